"""Gates, weights and reductions of the algebra as plain tuples, the form in which they cross to Rust.

No decision is made here: each function lists the fields of one type. What depends on the policy being trained never
comes here.
"""

from __future__ import annotations

from typing import Any

from tracegrad.algebra import Budget, Clamp, Gamma, Gate, Gaussian, Level, Ratio, Reduce, Shape, Weight, Window


def plain_gate(gate: Gate | Budget) -> tuple[Any, ...]:
    """(ratio, stat, level, low, high, when, scope), or (ratio, stat, mean, kept)."""
    kept = gate.over == "kept"
    if isinstance(gate, Budget):
        return (_ratio(gate.ratio), gate.stat, gate.mean, kept)
    low, high = gate.bounds
    scope = gate.scope or gate.level.over
    return (_ratio(gate.ratio), gate.stat, _level(gate.level, kept), low, high, gate.when, scope)


def plain_weight(weight: Weight) -> tuple[Any, ...]:
    """(ratio, level, (shape, first, second), when, normalize)."""
    level = _level(weight.level, weight.level.terms == "kept")
    return (_ratio(weight.ratio), level, _shape(weight.shape), weight.when, weight.normalize)


def plain_reduction(reduce: Reduce) -> tuple[Any, ...]:
    """(per, mean, norm, kept)."""
    return (
        reduce.per,
        reduce.inner == "mean",
        1.0 if reduce.norm is None else reduce.norm,
        reduce.denominator == "kept",
    )


def _ratio(ratio: Ratio) -> tuple[str, str]:
    return (ratio.num, ratio.den)


def _level(level: Level, kept: bool) -> tuple[str, str | None, bool, str | None]:
    return (level.over, level.agg, kept, level.blend)


def _shape(shape: Shape) -> tuple[str, float, float]:
    if isinstance(shape, Clamp):
        return ("clamp", shape.low, shape.high)
    if isinstance(shape, Window):
        return ("strict_window" if shape.strict else "window", shape.low, shape.high)
    if isinstance(shape, Gamma):
        return ("gamma", shape.power, shape.rate)
    if isinstance(shape, Gaussian):
        return ("gaussian", shape.sigma, 0.0)
    return ("identity", 0.0, 0.0)
