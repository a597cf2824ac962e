"""Evaluate what an objective does not differentiate: weight, mask and scale of every trained token.

`correct` runs in Rust, once per optimizer step. `Layout` converts between padded and flat arrays.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, get_args

import numpy as np
from numpy.typing import ArrayLike, NDArray

from tracegrad import _core, _validation
from tracegrad._validation import is_tensor
from tracegrad.errors import ArgumentError
from tracegrad.objective.component import core_of
from tracegrad.objective.core_forms import CoreTotals
from tracegrad.objective.objective import MissingLogprobs
from tracegrad.objective.ratio import Reduce
from tracegrad.objective.rejection import AnyRejection
from tracegrad.objective.weight import Weight


@dataclass(frozen=True)
class Layout:
    """Positions of the tokens in the caller's arrays.

    Args:
        shape: shape of the logprobs.
        mask: flat bool, True at the tokens; None if every position is a token.
        dtype: float32 or float64, in which all floats are computed.
        template: the logprobs; results have their type and device.
    """

    shape: tuple[int, ...]
    mask: NDArray[np.bool_] | None
    dtype: type[np.float32] | type[np.float64]
    template: Any

    @classmethod
    def of(cls, like: Any, mask: Any, trace: Any) -> "Layout":
        """Return the layout of logprobs and their mask."""
        if like is None:
            raise ArgumentError("TG-OBJ-006: old and rollout are both None. Pass at least one of them.")
        array = _validation.numbers(like, "the logprobs")
        flags = None if mask is None else _validation.as_flags(_validation.numbers(mask, "mask"), "mask")
        if flags is not None and flags.shape != array.shape:
            raise ArgumentError(
                f"TG-OBJ-007: mask is {flags.shape} but the logprobs are {array.shape}. Pass one flag per position."
            )
        if array.ndim == 0:
            raise ArgumentError("TG-OBJ-008: the logprobs are one number, not an array. Pass one entry per token.")
        if array.ndim > 1 and flags is None:
            raise ArgumentError(
                f"TG-OBJ-009: logprobs of shape {array.shape} need mask=, which marks the positions of trained tokens."
            )
        if array.ndim == 1 and trace is None:
            raise ArgumentError(
                "TG-OBJ-010: flat logprobs need trace=, one id per token, to group the tokens by trace."
            )
        flat = None if flags is None else flags.reshape(-1)
        return cls(array.shape, flat, np.float64 if array.dtype == np.float64 else np.float32, like)

    @property
    def width(self) -> int:
        """Number of positions in a row."""
        return self.shape[-1]

    def floats(self, values: Any, name: str) -> NDArray[np.floating] | None:
        """Return one number per position, flat."""
        if values is None:
            return None
        array = _validation.numbers(values, name)
        if self._by_row(array):
            array = np.broadcast_to(array[..., None], self.shape)
        self._check(array, name)
        return _validation.as_floats(array, self.dtype, name).reshape(-1)

    def ids(self, values: Any, name: str) -> NDArray[np.integer] | None:
        """Return one integer per position or per row, flat; int32 and int64 keep their dtype."""
        if values is None:
            return None
        array = _validation.numbers(values, name)
        if not self._by_row(array):
            self._check(array, name)
        kind = array.dtype if array.dtype in (np.int32, np.int64) else np.int64
        return _validation.as_integers(array, kind, name).reshape(-1)

    def back(self, values: NDArray[Any] | float) -> Any:
        """Return flat results in the shape, type and device of the logprobs.

        A number is returned as a broadcast view of itself.
        """
        tensor = is_tensor(self.template)
        if not isinstance(values, np.ndarray):
            if not tensor:
                return np.broadcast_to(self.dtype(values), self.shape)
            import torch

            kind = torch.float64 if self.dtype == np.float64 else torch.float32
            return torch.tensor(values, dtype=kind, device=self.template.device).expand(self.shape)
        values = values.reshape(self.shape)
        if not tensor:
            return values
        import torch

        return torch.from_numpy(values).to(self.template.device)

    def _by_row(self, array: NDArray[Any]) -> bool:
        return len(self.shape) > 1 and array.shape == self.shape[:-1]

    def _check(self, array: NDArray[Any], name: str) -> None:
        if array.shape != self.shape:
            raise ArgumentError(
                f"TG-OBJ-011: {name} is {array.shape} but the logprobs are {self.shape}. Pass one entry per token."
            )


def proximal_alpha(version: ArrayLike, proximal: int, current: int) -> NDArray[np.float32]:
    """Return (proximal - version) / (current - version): 0 at the recorded policy, 1 at the trained one.

    The result is clamped to [0, 1]. It is 1 for a token as new as the trained policy.

    Args:
        version: [m] integers, the policy version that sampled each token.
        proximal: version of the proximal policy: the trained one at the time when `old` would last have been measured.
        current: version of the policy being trained.

    Returns:
        [m] float32, for `Terms.alpha`.

    Source: A-3PO, arXiv 2512.06547; AReaL's prox_logp_method="loglinear".

    >>> proximal_alpha([0, 2, 4], 3, 4).tolist()
    [0.75, 0.5, 1.0]
    """
    recorded = _validation.integers(version, "version")
    proximal, current = (
        _validation.integer(value, name, least=-1) for name, value in (("proximal", proximal), ("current", current))
    )
    distance = current - recorded
    alpha = (proximal - recorded) / np.maximum(distance, 1)
    return np.where(distance > 0, alpha.clip(0.0, 1.0), 1.0).astype(np.float32)


AllReduce = Callable[[NDArray[np.float64], str], NDArray[np.float64]]


class Totals(Protocol):
    """Counts of a step over all ranks, as in `Step.totals`."""

    @property
    def terms(self) -> int: ...
    @property
    def traces(self) -> int: ...
    @property
    def groups(self) -> int: ...


@dataclass(frozen=True)
class Correction:
    """Weight, mask and scale of each token, in the shape (and on the device) of the given logprobs.

    Args:
        weight: float, detached; 0 if masked as missing, 1 if `ratio_one`.
        keep: bool, whether the token is trained.
        scale: float, 1 over the reduction's denominators; a read-only view of one number if all are equal.
        metrics: numbers of dropped, missing and truncated tokens (docs/reference/metrics.md). For the ratios
            themselves, their KL and effective sample size, use `tracegrad.metrics.OffPolicySums.of(old, rollout,
            trace=..., weight=..., keep=...)`.
        scales: the scale for `reduce` and for every reduction of `reductions`.

    >>> from tracegrad.objective import Ratio, Truncate, Weight
    >>> truncated = Weight(Ratio("old", "rollout"), transform=Truncate(0.0, 2.0))
    >>> old, rollout = np.log([0.8, 0.5]), np.log([0.2, 0.5])  # ratios 4 and 1
    >>> corrected = correct(old, rollout, trace=[0, 0], weights=[truncated])
    >>> # The scale is 1 / 2 tokens.
    >>> corrected.weight.tolist(), corrected.keep.tolist(), corrected.scale.tolist()
    ([2.0, 1.0], [True, True], [0.5, 0.5])
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
    rejections: Sequence[AnyRejection] = (),
    reduce: Reduce | None = None,
    reductions: Sequence[Reduce] = (),
    totals: Totals | None = None,
    group_terms: Any | None = None,
    group_traces: Any | None = None,
    missing_logprobs: MissingLogprobs = "mask",
    all_reduce: AllReduce | None = None,
) -> Correction:
    """Compute weight, mask and scale of the tokens of one optimizer step.

    Arrays are flat [M], one entry per token, or [B, S] with `mask`; numpy or torch. float64 is computed in float64,
    everything else in float32. In a padded array each row is a trace unless `trace` is passed; per-row arrays may be
    [B].

    A token is known if its recorded logprob is. Every log-ratio, of a token or aggregated, is clamped to
    +-LOG_RATIO_LIMIT before it is exponentiated. Weights and rejections that depend on the policy being trained, or on
    the log-linear proximal policy, are skipped here: the objective evaluates them.

    Args:
        old: logprobs of the proximal policy (the model being trained, before the step), nats; None in the direct form.
        rollout: recorded logprobs, nats, NaN if unknown; None if the objective has no ratio to them.
        ref: logprobs of the reference model, nats; needed if a weight or rejection names it.
        trace: integer ids; required for flat arrays. Tokens of a trace need not be adjacent.
        turn: index of the generation within its trace; needed for turn levels.
        group: integer ids; needed for group levels and for Reduce(per="group") and "prompt".
        advantages: needed if a rejection or weight has a `when` condition.
        mask: bool, True at the tokens. Other positions are never read; their weight, keep and scale are 0.
        weights, rejections, reduce: of an Objective; reduce is the mean over tokens by default.
        reductions: further reductions whose scale is returned (`Objective.reductions`).
        totals: counts over all ranks before any rejection (`Step.totals`); default: counted from these arrays.
        group_terms: number of tokens in each token's group over all ranks (`Step.group_terms`).
        group_traces: number of traces with a token in that group (`Step.group_traces`).
        missing_logprobs: how to treat a NaN in `rollout`. "mask" drops the token: it is outside level sums and "kept"
            denominators, inside "all" ones. "ratio_one" keeps it with weight 1: it is outside sums and means, and
            dropped only with its turn, trace, group or batch. "error" raises.
        all_reduce: all_reduce(array, "sum" or "max") over ranks, returning the reduced float64 array. Every rank makes
            the same calls, including ranks without tokens.

    Raises:
        ArgumentError: for shapes that differ, weights or rejections that need an array which is None, logprobs that are
            positive, infinite or -9999, `old` or `ref` that is not finite, NaN under "error", and group levels over
            ranks.

    >>> import numpy as np
    >>> from tracegrad.objective import Truncate, Ratio, Weight
    >>> tis = Weight(Ratio("old", "rollout"), transform=Truncate(0.0, 2.0))
    >>> old, rollout = np.array([-1.0, -0.5, -1.0]), np.array([-1.0, -2.5, np.nan])
    >>> c = correct(old, rollout, trace=np.array([0, 0, 1]), weights=[tis])
    >>> c.weight.tolist(), c.keep.tolist(), c.metrics["missing"]
    ([1.0, 2.0, 0.0], [True, True, False], 1.0)
    """
    weights, rejections = (
        _validation.instances(weights, "weights", Weight),
        _validation.instances(rejections, "rejections", AnyRejection),
    )
    reduction: Reduce = _validation.instance(
        Reduce() if reduce is None else reduce, "reduce", Reduce, "Pass an objective's reduce."
    )
    all_reductions: list[Reduce] = list(
        dict.fromkeys([reduction, *_validation.instances(reductions, "reductions", Reduce)])
    )
    _validation.one_of(missing_logprobs, "missing", get_args(MissingLogprobs))
    if all_reduce is not None and not callable(all_reduce):
        raise ArgumentError(
            f"TG-OBJ-012: all_reduce is {_validation.describe(all_reduce)}. Pass a function of an array and "
            f"'sum' or 'max'."
        )
    if missing_logprobs == "ratio_one" and old is None and rollout is not None:
        raise ArgumentError(
            "TG-OBJ-013: missing_logprobs='ratio_one' without old means theta/rollout in the surrogate. "
            "Unknown ratios would be 1. Use missing_logprobs='mask', or pass old."
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
    corrected = _core.correct_terms(
        columns,
        [core_of("a rejection", rejection) for rejection in rejections if rejection.detached],
        [core_of("a weight", part) for part in weights if part.detached],
        [core_of("a reduction", part) for part in all_reductions],
        missing_logprobs,
        all_reduce,
    )
    by_reduction = {part: layout.back(scale) for part, scale in zip(all_reductions, corrected["scales"], strict=True)}
    ratios = old is not None and rollout is not None
    return Correction(
        layout.back(corrected["weight"]),
        layout.back(corrected["keep"]),
        by_reduction[reduction],
        _metrics(corrected["stats"], ratios),
        by_reduction,
    )


def _counts(totals: Totals) -> CoreTotals:
    def count(name: str) -> int:
        return _validation.integer(getattr(totals, name, None), f"totals.{name}", least=0)

    return CoreTotals(count("terms"), count("traces"), count("groups"))


def _metrics(stats: Mapping[str, float], ratios: bool) -> dict[str, float]:
    """Return what the correction did. `metrics.OffPolicySums` describes the ratios themselves."""
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
