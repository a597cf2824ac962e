"""Off-policy correction of recorded terms: the detached half of a loss, evaluated in Rust once per step.

Here is `correct`, which turns logprobs into `weight`, `keep` and `scale` and says what it met. No gradient, no model.
Called by the learner, or by any trainer with flat or padded arrays.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, get_args

import numpy as np
from numpy.typing import NDArray

from tracegrad import _core, arrays
from tracegrad.algebra import AnyGate, Missing, Reduce, Weight
from tracegrad.algebra.part import core_of
from tracegrad.correction.layout import Layout
from tracegrad.errors import ArgumentError

AllReduce = Callable[[NDArray[np.float64], str], NDArray[np.float64]]


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
        scale: float, 1 over the reduction's denominators; a read-only view of one number where all are equal.
        metrics: what was dropped, missing and truncated (docs/metrics.md); of the ratios themselves, their KL and
            effective sample `tracegrad.metrics.OffPolicy.of(old, rollout, trace=..., weight=..., keep=...)` tells.
        scales: the same for `reduce` and every reduction of `reductions`.
    """

    weight: Any
    keep: Any
    scale: Any
    metrics: Mapping[str, float]
    scales: Mapping[Reduce, Any] = field(default_factory=dict)


def correct(
    old: Any | None,
    rollout: Any | None,
    *,
    ref: Any | None = None,
    trace: Any | None = None,
    turn: Any | None = None,
    group: Any | None = None,
    advantages: Any | None = None,
    mask: Any | None = None,
    weights: Sequence[Weight] = (),
    gates: Sequence[AnyGate] = (),
    reduce: Reduce | None = None,
    reductions: Sequence[Reduce] = (),
    totals: Totals | None = None,
    group_terms: Any | None = None,
    group_traces: Any | None = None,
    missing: Missing = "mask",
    all_reduce: AllReduce | None = None,
) -> Corrected:
    """Weights, gates and denominators of the terms of one optimizer step.

    Arrays are flat [M], one entry per term, or [B, S] with `mask`, numpy or torch. float64 is computed in float64, all
    else in float32. In a padded array each row is a trace unless `trace` says otherwise; per-row arrays may be [B].

    A term is known where its recorded logprob is. Every log-ratio, of a token or aggregated, is held within
    LOG_RATIO_LIMIT before it is exponentiated. Weights and gates that depend on the policy being trained, or on the
    log-linear proximal, are passed over: the objective evaluates them.

    Args:
        old: logprobs of the proximal policy (the model being trained, before the step), nats; None in the direct form.
        rollout: recorded logprobs, nats, NaN where not known; None where the objective takes no ratio of them.
        ref: logprobs of the reference model, nats; needed where a weight or gate names it.
        trace: integer ids; required for flat arrays. Terms of a trace need not stand together.
        turn: which generation of its trace; needed for turn levels.
        group: integer ids; needed for group levels and for Reduce(per="group") and "prompt".
        advantages: needed where a gate or weight says `when`.
        mask: bool, True at the terms; all others are never read and come back with weight, keep and scale 0.
        weights, gates, reduce: of an Objective; reduce is the mean over tokens by default.
        reductions: further ones whose scale is wanted (`Objective.reductions`).
        totals: counts over all ranks before any gate (`Step.totals`); counted from these arrays by default.
        group_terms: terms of each term's group over all ranks (`Step.group_terms`).
        group_traces: traces with a term in it (`Step.group_traces`).
        missing: a NaN in `rollout` is dropped ("mask": outside level sums and "kept" denominators, inside "all"
            ones), taken with weight 1 ("neutral": outside sums and means, falls only with its turn, trace, group or
            batch) or an error ("refuse").
        all_reduce: all_reduce(array, "sum" or "max") over ranks, returning the reduced float64 array. Every rank makes
            the same calls, a rank without terms too.

    Raises:
        ArgumentError: for shapes that differ, a plan that names what was not given, logprobs that are positive,
            infinite or -9999, `old` or `ref` that is not finite, NaN under "refuse", and group levels over ranks.

    >>> import numpy as np
    >>> from tracegrad.algebra import Clamp, Ratio, Weight
    >>> tis = Weight(Ratio("old", "rollout"), shape=Clamp(0.0, 2.0))
    >>> old, rollout = np.array([-1.0, -0.5, -1.0]), np.array([-1.0, -2.5, np.nan])
    >>> c = correct(old, rollout, trace=np.array([0, 0, 1]), weights=[tis])
    >>> c.weight.tolist(), c.keep.tolist(), c.metrics["missing"]
    ([1.0, 2.0, 0.0], [True, True, False], 1.0)
    """
    weights, gates = arrays.instances(weights, "weights", Weight), arrays.instances(gates, "gates", AnyGate)
    reduction: Reduce = arrays.instance(
        Reduce() if reduce is None else reduce, "reduce", Reduce, "Pass an objective's reduce."
    )
    wanted: list[Reduce] = list(dict.fromkeys([reduction, *arrays.instances(reductions, "reductions", Reduce)]))
    arrays.one_of(missing, "missing", get_args(Missing))
    if all_reduce is not None and not callable(all_reduce):
        raise ArgumentError(
            f"all_reduce is {arrays.described(all_reduce)}. Pass a function of an array and 'sum' or 'max'."
        )
    if missing == "neutral" and old is None and rollout is not None:
        raise ArgumentError(
            "missing='neutral' without old means theta/rollout in the surrogate, and a ratio of 1 where none is known. "
            "Use missing='mask', or pass old."
        )
    layout = Layout.of(rollout if rollout is not None else old, mask, trace)
    trace = np.arange(layout.shape[0]) if trace is None else trace
    columns = {
        **{name: layout.floats(values, name) for name, values in (("old", old), ("rollout", rollout), ("ref", ref))},
        "advantages": layout.floats(advantages, "advantages"),
        "mask": layout.mask,
        "trace": layout.ids(trace, "trace"),
        "turn": layout.ids(turn, "turn"),
        "group": layout.ids(group, "group"),
        "group_terms": layout.ids(group_terms, "group_terms"),
        "group_traces": layout.ids(group_traces, "group_traces"),
        "positions": math.prod(layout.shape),
        "width": layout.width,
        "totals": None if totals is None else _counts(totals),
    }
    weight, keep, scales, stats = _core.correct_terms(
        columns,
        [core_of("a gate", gate) for gate in gates if gate.detached],
        [core_of("a weight", each) for each in weights if each.detached],
        [core_of("a reduction", each) for each in wanted],
        missing,
        all_reduce,
    )
    by_reduction = {each: layout.back(scale) for each, scale in zip(wanted, scales, strict=True)}
    ratios = old is not None and rollout is not None
    return Corrected(
        layout.back(weight), layout.back(keep), by_reduction[reduction], _metrics(stats, ratios), by_reduction
    )


def _counts(totals: Totals) -> tuple[int, ...]:
    names = ("terms", "traces", "groups")
    return tuple(arrays.integer(getattr(totals, name, None), f"totals.{name}", least=0) for name in names)


def _metrics(stats: Mapping[str, float], ratios: bool) -> dict[str, float]:
    """What the correction did, and nothing of the ratios themselves: `metrics.OffPolicy` describes those."""
    terms = max(stats["terms"], 1.0)
    metrics = {
        "terms": stats["terms"],
        "missing": stats["terms"] - stats["known"],
        "frac_missing": (stats["terms"] - stats["known"]) / terms,
        "kept": stats["kept"],
        "masked_fraction": stats["gated"] / terms,
    }
    if ratios and stats["known"]:
        metrics["truncated_fraction"] = stats["truncated"] / stats["known"]
        metrics |= {"clamped": stats["clamped"], "clamped_levels": stats["clamped_levels"]}
    return metrics
