"""Off-policy correction of recorded terms: the detached half of a loss, evaluated in Rust once per step.

Here is `correct`, which turns logprobs into `weight`, `keep` and `scale` and says what it met. No gradient, no model;
torch is touched only where tensors are passed. Called by the learner, or by any trainer with flat or padded arrays.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from tracegrad import _core
from tracegrad.algebra import Gate, Level, Missing, Reduce, Weight
from tracegrad.errors import ArgumentError

AllReduce = Callable[[NDArray[np.float64], str], NDArray[np.float64]]
_SMALLEST_MEAN = 1e-8  # verl's: below it a mean weight is not divided by


class Totals(Protocol):
    """Counts of a step over all ranks, as `Step.totals` holds them."""

    @property
    def terms(self) -> int: ...
    @property
    def traces(self) -> int: ...
    @property
    def groups(self) -> int: ...


@dataclass(frozen=True)
class Corrected:
    """What the loss takes of each term, in the shape (and on the device) of the logprobs given.

    Args:
        weight: float, detached; 0 where masked as missing, 1 where neutral.
        keep: bool, whether the term trains.
        scale: float, 1 over the reduction's denominators.
        metrics: names to numbers, see docs/metrics.md.
    """

    weight: Any
    keep: Any
    scale: Any
    metrics: Mapping[str, float]


def correct(
    old: Any | None,
    rollout: Any | None,
    *,
    trace: Any | None = None,
    turn: Any | None = None,
    group: Any | None = None,
    advantages: Any | None = None,
    mask: Any | None = None,
    weights: Sequence[Weight] = (),
    gates: Sequence[Gate] = (),
    reduce: Reduce | None = None,
    totals: Totals | None = None,
    group_terms: Any | None = None,
    missing: Missing = "mask",
    all_reduce: AllReduce | None = None,
) -> Corrected:
    """Weights, gates and denominators of the terms of one optimizer step.

    Arrays are flat [M], one entry per term, or [B, S] with `mask`, numpy or torch. float64 is computed in float64, all
    else in float32. In a padded array each row is a trace unless `trace` says otherwise; per-row arrays may be [B].

    Args:
        old: logprobs of the proximal policy (the model being trained, before the step), nats; None in the direct form.
        rollout: recorded logprobs, nats, NaN where not known; None where the objective takes no ratio of them.
        trace: integer ids; required for flat arrays. Terms of a trace need not stand together.
        turn: which generation of its trace; needed for turn levels.
        group: integer ids; needed for Reduce(per="group").
        advantages: needed where a gate or weight says `when`.
        mask: bool, True at the terms; all others come back with weight, keep and scale 0.
        weights, gates, reduce: of an Objective; reduce is the mean over tokens by default.
        totals: counts over all ranks before any gate (`Step.totals`); counted from these arrays by default.
        group_terms: terms of each term's group over all ranks (`Step.group_terms`).
        missing: a NaN in `rollout` is dropped ("mask": outside level sums and "kept" denominators, inside "all"
            ones), taken with weight 1 ("neutral": outside sums and means, falls only with its turn or trace) or an
            error ("refuse").
        all_reduce: all_reduce(array, "sum" or "max") over ranks, returning the reduced float64 array.

    Raises:
        ArgumentError: for shapes that differ, a plan that names what was not given, logprobs that are positive,
            infinite or -9999, `old` that is not finite, and NaN under "refuse".

    >>> import numpy as np
    >>> from tracegrad.algebra import Clamp, Ratio, Weight
    >>> tis = Weight(Ratio("old", "rollout"), shape=Clamp(0.0, 2.0))
    >>> old, rollout = np.array([-1.0, -0.5, -1.0]), np.array([-1.0, -2.5, np.nan])
    >>> c = correct(old, rollout, trace=np.array([0, 0, 1]), weights=[tis])
    >>> c.weight.tolist(), c.keep.tolist(), c.metrics["missing"]
    ([1.0, 2.0, 0.0], [True, True, False], 1.0)
    """
    reduce = reduce or Reduce()
    gates, weights = [gate for gate in gates if gate.detached], [weight for weight in weights if weight.detached]
    layout = _Layout.of(rollout if rollout is not None else old, mask, trace)
    terms = _Flat(layout, old, rollout, trace, turn, group, advantages)
    if missing == "neutral" and old is None and rollout is not None:
        raise ArgumentError(
            "missing='neutral' without old means theta/rollout in the surrogate, and a ratio of 1 where none is known. "
            "Use missing='mask', or pass old."
        )
    if rollout is None and (weights or gates):
        raise ArgumentError("weights and gates take old/rollout, and rollout is None. Pass the recorded logprobs.")
    weight, keep, sums, maxima, units = _core.correct_terms(
        terms.old if terms.rollout is not None else None,
        terms.known,
        terms.trace,
        terms.turn,
        terms.advantages,
        [_plain_gate(gate) for gate in gates],
        [_plain_weight(each) for each in weights],
        missing,
    )
    sums, maxima = _reduced(sums, "sum", all_reduce), _reduced(maxima, "max", all_reduce)
    factor = _mean_weight(weights, units, all_reduce)
    if factor != 1.0:
        weight = np.where(np.isnan(terms.known), weight, weight / factor)
        sums["weight"] /= factor
        sums["weight_squared"] /= factor**2
    scale = _scale(reduce, terms, keep, totals, group_terms, sums, all_reduce)
    ratios = terms.old is not None and terms.rollout is not None
    metrics = _metrics(sums, maxima, ratios)
    back = layout.back
    return Corrected(back(weight), back(keep), back(scale.astype(weight.dtype)), metrics)


@dataclass(frozen=True)
class _Layout:
    """Where the terms stand in the arrays given, and how results go back there."""

    shape: tuple[int, ...]
    mask: NDArray[np.bool_] | None
    dtype: type
    like: Any

    @classmethod
    def of(cls, like: Any, mask: Any, trace: Any) -> _Layout:
        if like is None:
            raise ArgumentError("old and rollout are both None. Pass the logprobs that are known.")
        array = _numpy(like)
        flags = None if mask is None else _numpy(mask).astype(bool)
        if flags is not None and flags.shape != array.shape:
            raise ArgumentError(
                f"mask is {flags.shape} but the logprobs are {array.shape}. Pass one flag per position."
            )
        if array.ndim > 1 and flags is None:
            raise ArgumentError(
                f"logprobs of shape {array.shape} need mask=. Which positions are terms is not in them."
            )
        if array.ndim == 1 and trace is None:
            raise ArgumentError(
                "flat logprobs need trace=, one id per term. Which terms belong together is not in them."
            )
        return cls(array.shape, flags, np.float64 if array.dtype == np.float64 else np.float32, like)

    def flat(self, values: Any, name: str, dtype: Any) -> NDArray[Any] | None:
        """The terms of `values`, one per position or one per row."""
        if values is None:
            return None
        array = _numpy(values)
        if len(self.shape) > 1 and array.shape == self.shape[:-1]:
            array = np.broadcast_to(array[..., None], self.shape)
        if array.shape != self.shape:
            raise ArgumentError(f"{name} is {array.shape} but the logprobs are {self.shape}. Pass one entry per term.")
        return np.ascontiguousarray(array.reshape(-1) if self.mask is None else array[self.mask], dtype)

    def back(self, values: NDArray[Any]) -> Any:
        """Flat results in the shape, kind and device of what was given; 0 off the mask."""
        if self.mask is not None:
            full = np.zeros(self.shape, values.dtype)
            full[self.mask] = values
            values = full
        if not _is_tensor(self.like):
            return values
        import torch

        return torch.from_numpy(values).to(self.like.device)


class _Flat:
    """The terms as the core takes them."""

    def __init__(
        self, layout: _Layout, old: Any, rollout: Any, trace: Any, turn: Any, group: Any, advantages: Any
    ) -> None:
        self.old = layout.flat(old, "old", layout.dtype)
        self.rollout = layout.flat(rollout, "rollout", layout.dtype)
        if trace is None:
            trace = np.arange(layout.shape[0])
        trace_ = layout.flat(trace, "trace", np.int64)
        assert trace_ is not None
        self.trace: NDArray[np.int64] = trace_
        self.turn = layout.flat(turn, "turn", np.int64)
        self.group = layout.flat(group, "group", np.int64)
        self.advantages = layout.flat(advantages, "advantages", layout.dtype)
        self.known = np.zeros(len(trace_), layout.dtype) if self.rollout is None else self.rollout


def _plain_level(level: Level, kept: bool) -> tuple[str, str | None, bool]:
    return (level.over, level.agg, kept)


def _plain_gate(gate: Gate) -> tuple[Any, ...]:
    low = -np.inf if gate.low is None else gate.low
    high = np.inf if gate.high is None else gate.high
    return (
        gate.stat,
        _plain_level(gate.level, gate.over == "kept"),
        low,
        high,
        gate.when,
        gate.scope or gate.level.over,
    )


def _plain_weight(weight: Weight) -> tuple[Any, ...]:
    shape = weight.shape
    bounds = (type(shape).__name__.lower(), getattr(shape, "low", 0.0), getattr(shape, "high", np.inf))
    return (_plain_level(weight.level, weight.level.terms == "kept"), bounds, weight.when)


def _reduced(named: Mapping[str, float], op: str, all_reduce: AllReduce | None) -> dict[str, float]:
    if all_reduce is None:
        return dict(named)
    values = all_reduce(np.array(list(named.values()), np.float64), op)
    return dict(zip(named, map(float, values), strict=True))


def _mean_weight(weights: Sequence[Weight], units: list[tuple[float, float]], all_reduce: AllReduce | None) -> float:
    """The product of the means that `normalize` divides by."""
    factor = 1.0
    for weight, (total, count) in zip(weights, units, strict=True):
        if weight.normalize:
            over = _reduced({"total": total, "count": count}, "sum", all_reduce)
            mean = over["total"] / max(over["count"], 1.0)
            factor *= mean if mean > _SMALLEST_MEAN else 1.0
    return factor


def _scale(
    reduce: Reduce,
    terms: _Flat,
    keep: NDArray[np.bool_],
    totals: Totals | None,
    group_terms: Any,
    sums: Mapping[str, float],
    all_reduce: AllReduce | None,
) -> NDArray[np.float64]:
    """[M] float64: 1 over integer denominators; 0 where a denominator counts nothing."""
    kept = keep if reduce.denominator == "kept" else None
    known_totals = totals if kept is None else None
    if reduce.per == "token":
        total = known_totals.terms if known_totals else sums["terms" if kept is None else "kept"]
        return np.full(len(keep), 1.0 / total if total else 0.0)
    ids = terms.trace if reduce.per == "trace" else terms.group
    if ids is None:
        raise ArgumentError("Reduce(per='group') without group. Pass group=, one id per term.")
    if reduce.per == "group" and all_reduce is not None and (known_totals is None or group_terms is None):
        raise ArgumentError(
            "Reduce(per='group') over ranks counts groups that stand on several of them. "
            "Pass totals= and group_terms= of the step, with denominator='all'."
        )
    inside, here = _core.count_terms(ids, kept)
    if reduce.per == "group" and kept is None and group_terms is not None:
        inside = np.asarray(group_terms, np.int64)
    if known_totals is not None:
        units = known_totals.traces if reduce.per == "trace" else known_totals.groups
    else:
        units = _reduced({"units": float(here)}, "sum", all_reduce)["units"]
    inner = inside if reduce.inner == "mean" else np.where(inside > 0, reduce.norm or 1.0, 0)
    bottom = inner * float(units)
    return np.divide(1.0, bottom, out=np.zeros(len(bottom)), where=bottom > 0)


def _metrics(sums: Mapping[str, float], maxima: Mapping[str, float], ratios: bool) -> dict[str, float]:
    """Means over their named denominators; docs/metrics.md has the table."""
    terms, known = max(sums["terms"], 1.0), max(sums["known"], 1.0)
    found = {
        "terms": sums["terms"],
        "missing": sums["terms"] - sums["known"],
        "frac_missing": (sums["terms"] - sums["known"]) / terms,
        "kept": sums["kept"],
        "masked_fraction": sums["gated"] / terms,
    }
    if not ratios or not sums["known"]:
        return found
    weighted = max(sums["weighted"], 1.0)
    kish = sums["weight"] ** 2 / sums["weight_squared"] if sums["weight_squared"] > 0 else 0.0
    return found | {
        "ratio_mean": sums["ratio"] / known,
        "ratio_min": -maxima["minus_ratio_min"],
        "ratio_max": maxima["ratio_max"],
        "ratio_ess": sums["ratio"] ** 2 / sums["ratio_squared"] / known,
        "weight_mean": sums["weight"] / weighted,
        "ess": kish / weighted,
        "ess_count": kish,
        "truncated_fraction": sums["truncated"] / known,
        "clamped": sums["clamped"],
        "clamped_levels": sums["clamped_levels"],
        "kl_rollout_old_k1": -sums["log_ratio"] / known,
        "kl_rollout_old_k3": sums["k3"] / known,
        "logprob_abs_diff_mean": sums["log_ratio_abs"] / known,
        "logprob_abs_diff_max": maxima["log_ratio_abs_max"],
    }


def _is_tensor(value: Any) -> bool:
    return type(value).__module__.partition(".")[0] == "torch"


def _numpy(value: Any) -> NDArray[Any]:
    """Any array as numpy; tensors come to the CPU, and types that numpy lacks to float32."""
    if not _is_tensor(value):
        return np.asarray(value)
    value = value.detach().cpu()
    return (value.float() if value.is_floating_point() and value.element_size() < 4 else value).numpy()
