"""SkyRL's metrics: `is_ratio_*`, `tis_*`, `outlier_seq_*`, `token_mask_ratio`, `*_sequence_mask_*`, logprob gaps.

Definitions are those of skyrl 0.3.0, whose ratios are float32 (tests/parity/test_skyrl_metrics.py compares them). Its
masks are applied in sequence, each to the remaining tokens. A row is a trace; empty rows count, as in SkyRL.
"""

from collections.abc import Callable

import numpy as np
from numpy.typing import ArrayLike, NDArray

from tracegrad.errors import ArgumentError
from tracegrad.metrics.aggregate import (
    Moments,
    Rows,
    Sums,
    deviation_of,
    divide,
    formula_of,
    largest_of,
    mean_of,
    moments,
    quotient,
    smallest_of,
)
from tracegrad.metrics.definition import Metric, MetricSet, MetricSums

LIMIT = 20.0
"""SkyRL's bound for a log-ratio, or for its sum over a row, before exp."""
Bounds = tuple[float | None, float | None]
_OLD, _ROWS = "old / rollout", "rows, empty ones too"


def as_skyrl(
    old: ArrayLike,
    rollout: ArrayLike,
    rows: Rows,
    *,
    tis_ratio_type: str | None = None,
    tis_high: float = 2.0,
    sequence_mask_metric: str | None = None,
    sequence_mask: Bounds = (0.99, 1.01),
    outlier: Bounds | None = None,
    token_mask: Bounds | None = None,
) -> MetricSums:
    """Compute the metrics of `compute_off_policy_correction`.

    Args:
        old, rollout: [M] finite logprobs of the trained tokens of `rows`.
        rows: the rows of the trained tokens; `rows.positions` is the size of the padded array.
        tis_ratio_type: None, "token" or "sequence", capped at `tis_high`.
        sequence_mask_metric: None, "geometric" or "product", with the bounds `sequence_mask`.
        outlier: bounds of a ratio; a token outside of them masks its complete row.
        token_mask: bounds of a ratio; tokens outside of them are masked.

    Raises:
        ArgumentError: if the log-ratios are not finite, or do not match the rows.

    >>> found = as_skyrl(np.log([0.5, 0.5]), np.log([0.5, 0.1]), Rows.of([0, 0]), tis_ratio_type="token").values()
    >>> round(found["is_ratio_mean"], 6), found["tis_token_clip_high_ratio"]
    (3.0, 0.5)
    """
    log = np.asarray(old, np.float64) - np.asarray(rollout, np.float64)
    if log.shape != (rows.groups.terms,) or not np.isfinite(log).all():
        raise ArgumentError(
            f"TG-INTEG-008: the log-ratios are {log.shape}, the rows have {rows.groups.terms} trained tokens, and "
            "all must be finite: SkyRL's metrics of a missing logprob are NaN or computed from -9999. Leave them out."
        )
    ratio = _exp(log)
    counts = {"positions": rows.positions, "rows": rows.count}
    result = MetricSums(
        (moments("ratio", ratio) | Sums.of(counts=counts)).with_prefix("is/"), (MetricSet(RATIO, "is/"),)
    )
    if outlier is not None:
        high, low = _outside(ratio, outlier)
        masked = rows.any(high | low)
        result = result | _hits("outlier_seq_{}_ratio", rows.count, masked, rows.any(high), rows.any(low))
        rows, log, ratio = _remaining(rows, ~rows.back(masked), log, ratio)
    if token_mask is not None:
        high, low = _outside(ratio, token_mask)
        result = result | _share("token_mask_ratio", high | low)
        rows, log, ratio = _remaining(rows, ~(high | low), log, ratio)
    if tis_ratio_type == "token":
        result = result | _share("tis_token_clip_high_ratio", ratio > tis_high)
    elif tis_ratio_type == "sequence":
        result = result | _share("tis_seq_clip_high_ratio", _exp(rows.total(log)) > tis_high)
    if sequence_mask_metric is not None:
        length = np.maximum(rows.lengths, 1.0) if sequence_mask_metric == "geometric" else 1.0
        high, low = _outside(_exp(rows.total(log) / length), sequence_mask)
        prefix = "geo" if sequence_mask_metric == "geometric" else "product"
        result = result | _hits(f"{prefix}_sequence_mask_{{}}_ratio", rows.count, high | low, high, low)
    return result


def as_skyrl_policy(
    logprobs: ArrayLike,
    rollout: ArrayLike,
    rows: Rows,
    *,
    minibatch: bool = False,
    clipped: ArrayLike | None = None,
    ratio: ArrayLike | None = None,
    cispo_clip: tuple[float, float] | None = None,
) -> MetricSums:
    """Compute differences of logprobs, `clip_ratio`, and cispo's metrics of the ratio.

    Args:
        logprobs: [M] of the trainer: old before the step, theta inside a mini-batch.
        rollout: [M] recorded.
        rows: the rows of the trained tokens.
        minibatch: return `minibatch_rollout_logprobs_abs_diff_*`, whose minimum is 0 if any position is masked.
        clipped: [M] bool, tokens whose gradient the bound of the loss removed.
        ratio: [M] theta / old, adds `importance_ratio`, or `cispo/*` if `cispo_clip` is set.
        cispo_clip: the lower and the upper bound of cispo.

    >>> as_skyrl_policy([-1.0, -2.0], [-1.5, -2.0], Rows.of([0, 1]))
    ...     # doctest: +ELLIPSIS
    MetricSums(...)
    """
    gap = np.abs(np.asarray(logprobs, np.float64) - np.asarray(rollout, np.float64))
    table = MINIBATCH if minibatch else POLICY
    sums = (moments("gap", gap) | Sums.of(counts={"positions": rows.positions})).with_prefix("diff/")
    result = MetricSums(sums, (MetricSet(table, "diff/"),))
    if clipped is not None:
        result = result | _share("clip_ratio", np.asarray(clipped, bool))
    if ratio is not None:
        low, high = cispo_clip or (None, None)
        table = IMPORTANCE if cispo_clip is None else CISPO
        result = result | MetricSums(
            moments("ratio", ratio, low=low, high=high).with_prefix("loss/"), (MetricSet(table, "loss/"),)
        )
    return result


def _exp(log: NDArray[np.float64]) -> NDArray[np.float64]:
    return np.exp(np.clip(log, -LIMIT, LIMIT))


def _outside(ratio: NDArray[np.float64], bounds: Bounds) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
    low, high = bounds
    none = np.zeros(len(ratio), bool)
    return none if high is None else ratio > high, none if low is None else ratio < low


def _remaining(rows: Rows, keep: NDArray[np.bool_], log: NDArray, ratio: NDArray) -> tuple[Rows, NDArray, NDArray]:
    return rows.where(keep), log[keep], ratio[keep]


def _share(name: str, flags: NDArray[np.bool_]) -> MetricSums:
    """Return the share of tokens, or of rows, that are flagged. SkyRL divides by 1 if there are none."""
    counts = {"hit": np.count_nonzero(flags), "of": len(flags)}
    return MetricSums(Sums.of(counts=counts).with_prefix(f"{name}/"), (MetricSet((_SHARE[name],), f"{name}/"),))


def _hits(name: str, count: int, masked: NDArray, high: NDArray, low: NDArray) -> MetricSums:
    flags = {"masked": masked, "over_high": high, "under_low": low}
    counts = {word: np.count_nonzero(values) for word, values in flags.items()} | {"rows": count}
    return MetricSums(Sums.of(counts=counts).with_prefix(f"{name}/"), (MetricSet(_HITS[name], f"{name}/"),))


def _over(name: str, bottom: str) -> Callable[[Sums], float]:
    """Return a function that computes name / max(bottom, 1)."""
    return lambda s: float(s[name]) / max(int(s[bottom]), 1)


def _padded_deviation(s: Sums) -> float:
    """Return the standard deviation of the ratios and of a zero for each masked position."""
    total, positions = Moments(s, "ratio").total, int(s["positions"])
    if positions < 2:
        return float("nan")
    return float(np.sqrt(max(float(s["ratio.squares"]) - total * total / positions, 0.0) / (positions - 1)))


def _padded_smallest(name: str) -> Callable[[Sums], float]:
    return lambda s: 0.0 if int(s["positions"]) > Moments(s, name).n else Moments(s, name).smallest


def _padded_largest(name: str) -> Callable[[Sums], float]:
    return lambda s: max(Moments(s, name).largest, 0.0)


_ROLLOUT, _PROXIMAL = "theta / rollout", "theta / old"
RATIO = (
    Metric("is_ratio_mean", "1", _OLD, "tokens, at least 1", "Mean raw ratio.", _over("ratio", "ratio.n")),
    Metric(
        "is_ratio_std",
        "1",
        _OLD,
        "positions, less one",
        "Deviation of the ratios and of a 0 for every masked position.",
        _padded_deviation,
    ),
    Metric("is_ratio_max", "1", _OLD, None, "Largest ratio.", _padded_largest("ratio")),
    Metric(
        "is_ratio_min", "1", _OLD, None, "Smallest ratio, and 0 where anything is masked.", _padded_smallest("ratio")
    ),
)
_SHARE = {
    row.name: row
    for row in (
        Metric("token_mask_ratio", "share", _OLD, "tokens left", "Tokens the token mask drops.", _over("hit", "of")),
        Metric("tis_token_clip_high_ratio", "share", _OLD, "tokens left", "Ratios above the cap.", _over("hit", "of")),
        Metric("tis_seq_clip_high_ratio", "share", _OLD, _ROWS, "Products above the cap.", _over("hit", "of")),
        Metric(
            "clip_ratio", "share", _PROXIMAL, "tokens", "Tokens whose gradient the bound removed.", _over("hit", "of")
        ),
    )
}


def _sides(name: str, what: str) -> tuple[Metric, ...]:
    said = {
        "masked": f"Rows dropped by {what}.",
        "over_high": "Rows above its upper bound.",
        "under_low": "Rows below its lower bound.",
    }
    return tuple(
        Metric(name.format(word), "share", _OLD, _ROWS, meaning, lambda s, word=word: divide(s[word], s["rows"]))
        for word, meaning in said.items()
    )


_HITS = {
    name: _sides(name, what)
    for name, what in {
        "outlier_seq_{}_ratio": "any token's ratio",
        "geo_sequence_mask_{}_ratio": "the geometric mean of those left",
        "product_sequence_mask_{}_ratio": "the product of those left",
    }.items()
}
_spread = formula_of(Moments.deviation)
_DIFF = "policy/rollout_train_logprobs_abs_diff_"
_MINI = "minibatch_rollout_logprobs_abs_diff_"
POLICY = (
    Metric(f"{_DIFF}mean", "nats", _OLD, "tokens", "Mean |l|.", mean_of("gap")),
    Metric(f"{_DIFF}std", "nats", _OLD, "tokens, less one", "Its deviation.", deviation_of("gap")),
    Metric(f"{_DIFF}max", "nats", _OLD, None, "Largest |l|.", largest_of("gap")),
    Metric(f"{_DIFF}min", "nats", _OLD, None, "Smallest |l|.", smallest_of("gap")),
)
MINIBATCH = (
    Metric(f"{_MINI}mean", "nats", _ROLLOUT, "tokens", "Mean |l|.", mean_of("gap")),
    Metric(f"{_MINI}sq_mean", "nats^2", _ROLLOUT, "tokens", "Mean l^2.", quotient("gap.squares", "gap.n")),
    Metric(f"{_MINI}std", "nats", _ROLLOUT, "tokens", "sqrt(sq_mean - mean^2).", _spread("gap")),
    Metric(f"{_MINI}max", "nats", _ROLLOUT, None, "Largest |l|.", _padded_largest("gap")),
    Metric(f"{_MINI}min", "nats", _ROLLOUT, None, "Smallest, and 0 where anything is masked.", _padded_smallest("gap")),
)
IMPORTANCE = (
    Metric(
        "importance_ratio", "1", _PROXIMAL, "tokens", "Mean ratio, of the loss importance_sampling.", mean_of("ratio")
    ),
)
CISPO = (
    Metric("cispo/ratio_mean", "1", _PROXIMAL, "tokens", "Mean ratio.", mean_of("ratio")),
    Metric(
        "cispo/ratio_clamped_mean",
        "1",
        _PROXIMAL,
        "tokens",
        "Mean ratio after the clamp.",
        quotient("ratio.clamped", "ratio.n"),
    ),
    Metric("cispo/ratio_max", "1", _PROXIMAL, None, "Largest.", largest_of("ratio")),
    Metric("cispo/ratio_min", "1", _PROXIMAL, None, "Smallest.", smallest_of("ratio")),
)
_OFF_POLICY = (*RATIO, *_SHARE.values(), *(row for rows in _HITS.values() for row in rows))
SKYRL: tuple[Metric, ...] = (*_OFF_POLICY, *POLICY, *MINIBATCH, *IMPORTANCE, *CISPO)
"""All metrics of SkyRL."""
