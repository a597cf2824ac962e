"""TRL's metrics: `sampling/*`, `clip_ratio/*`, `kl`, `entropy` and the rewards, by GRPOTrainer 1.16's definitions.

TRL averages the means of ranks for `sampling/*`, and the means of micro-batches of a logging step for all names. Here,
sums are merged instead. On one rank and one micro-batch, both are equal (tests/parity/test_trl_metrics.py).
"""

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import ArrayLike

from tracegrad._validation import check_choice
from tracegrad.advantage import normalize_then_sum
from tracegrad.errors import ArgumentError
from tracegrad.metrics.aggregate import Moments, Rows, Sums, deviation_of, divide, formula_of, mean_of, moments
from tracegrad.metrics.definition import Metric, MetricSet, MetricSums
from tracegrad.metrics.training import zero_std_mask

CLIPPED = ("grpo", "bnpo", "dr_grpo", "dapo", "luspo")
"""Losses that report `clip_ratio/*`."""
LOSSES = (*CLIPPED, "cispo", "sapo", "vespo")
"""Values of TRL's loss_type."""


def as_trl_sampling(old: ArrayLike, sampling: ArrayLike, weight: ArrayLike) -> MetricSums:
    """Compute `sampling/*` of trained tokens.

    Args:
        old, sampling: [M] logprobs, NaN in `sampling` if unknown. Unknown ones do not count in the difference.
        weight: TRL's importance ratio after clipping, [M] at token level, one per row at sequence level. An empty row
            has the ratio 1, and so has a token without a logprob.

    >>> found = as_trl_sampling([-1.0, -2.0], [-1.5, float("nan")], [1.6, 1.0]).values()
    >>> found["sampling/sampling_logp_difference/mean"], found["sampling/importance_sampling_ratio/max"]
    (0.5, 1.6)
    """
    gap = np.abs(np.asarray(old, np.float64) - np.asarray(sampling, np.float64))
    sums = moments("gap", gap[~np.isnan(gap)]) | moments("ratio", weight)
    return MetricSums(sums.with_prefix("sampling/"), (MetricSet(SAMPLING, "sampling/"),))


def as_trl_loss(
    rows: Rows,
    *,
    loss_type: str = "dapo",
    ratio: ArrayLike | None = None,
    epsilon: float = 0.2,
    epsilon_high: float | None = None,
    delta: float | None = None,
    clipped: ArrayLike | None = None,
    advantages: ArrayLike | None = None,
    sequence: bool = False,
    theta: ArrayLike | None = None,
    ref: ArrayLike | None = None,
    kl_weight: ArrayLike | None = None,
    entropy: ArrayLike | None = None,
    phi: ArrayLike | None = None,
) -> MetricSums:
    """Compute the metrics of `_compute_loss`.

    Args:
        rows: the rows of the trained tokens.
        loss_type: as in TRL. sapo and vespo have no clip to report.
        ratio: [M] theta / old at its level, of every trained token including rejected ones: `Loss.per_term.ratio`.
        epsilon, epsilon_high, delta: as in TRL. In cispo, epsilon_high is the cap itself.
        clipped: [M] bool instead of `ratio`, for a clip with other bounds (GMPO): True for tokens that TRL would count.
        advantages: [M], whose sign decides which side was clipped; required with `ratio` or `clipped`.
        sequence: whether the ratio is of the row (`importance_sampling_level="sequence"`). Shares are then of rows.
        theta, ref: [M] logprobs, for `kl`.
        kl_weight: [M] theta / old at the ratio's level, by which `use_bias_correction_kl` multiplies the KL.
        entropy: [M] nats.
        phi: [R] gamma weight of each row, of vespo.

    Raises:
        ArgumentError: for a loss_type that TRL does not have, or arrays that say one thing twice or by half.

    >>> rows = Rows.of([0, 0, 1])
    >>> found = as_trl_loss(rows, ratio=[1.3, 0.9, 1.0], advantages=[1.0, 1.0, -1.0]).values()
    >>> round(found["clip_ratio/high_mean"], 6), found["clip_ratio/high_max"], found["clip_ratio/low_min"]
    (0.333333, 0.5, 0.0)
    """
    check_choice("loss_type", loss_type, LOSSES)
    if (ratio is not None and clipped is not None) or ((ratio is None and clipped is None) != (advantages is None)):
        raise ArgumentError(
            "TG-INTEG-009: the clipped share needs advantages, and either ratio or clipped. Otherwise the share "
            "is not defined. Pass ratio=loss.per_term.ratio with advantages, or neither."
        )
    totals: dict[str, float] = {}
    sums, tables = Sums.of(), []
    if theta is not None and ref is not None:
        log = np.asarray(ref, np.float64) - np.asarray(theta, np.float64)
        k3 = (np.exp(log) - log - 1) * (1.0 if kl_weight is None else np.asarray(kl_weight, np.float64))
        totals["kl"] = k3.sum()
        tables.append(KL)
    if entropy is not None:
        totals["entropy"] = np.asarray(entropy, np.float64).sum()
        tables.append(ENTROPY)
    if advantages is not None and loss_type in (*CLIPPED, "cispo"):
        signs = np.asarray(advantages, np.float64)
        if ratio is None:
            below = above = np.asarray(clipped, bool)
        else:
            below, above = _outside(np.asarray(ratio), loss_type, epsilon, epsilon_high, delta)
        sums = sums | _clips(below & (signs < 0), "low", rows, sequence)
        sums = sums | _clips(above & (signs > 0), "high", rows, sequence)
        tables.append(CLIP if loss_type in CLIPPED else CISPO)
    if phi is not None:
        sums = sums | moments("phi", phi)
        tables.append(VESPO)
    sums = sums | Sums.of(totals, {"n": rows.groups.terms})
    return MetricSums(sums.with_prefix("loss/"), tuple(MetricSet(table, "loss/") for table in tables))


def as_trl_rewards(
    rewards: ArrayLike,
    group: ArrayLike,
    *,
    names: Sequence[str],
    weights: ArrayLike | None = None,
    scale_rewards: str | bool = "group",
    aggregation: str = "sum_then_normalize",
) -> MetricSums:
    """Compute the metrics of rewards of traces. Parts of a step must not split groups.

    Args:
        rewards: [R, K], NaN if a reward function does not apply.
        group: [R] ids. Unlike in TRL, groups may have different sizes and any order.
        names: K names.
        weights: [K], default 1.
        scale_rewards: "group" (True) or "none" (False) test whether the deviation of each group is 0, "batch" whether
            that of all rewards is 0.
        aggregation: TRL's multi_objective_aggregation. With "normalize_then_sum" (GDPO), the deviation of all summed
            rewards is tested, after each is normalised within its group. scale_rewards is then ignored, as in TRL.

    Raises:
        ArgumentError: for an option that TRL does not have, or if the number of names does not match.

    >>> named = as_trl_rewards([[1.0], [1.0], [0.0], [1.0]], [0, 0, 1, 1], names=["exact"]).values()
    >>> named["rewards/exact/mean"], named["reward_std"], named["frac_reward_zero_std"]
    (0.75, 0.5, 0.5)
    """
    scale_rewards = {True: "group", False: "none"}.get(scale_rewards, scale_rewards)  # type: ignore[call-overload]
    check_choice("scale_rewards", scale_rewards, ("group", "batch", "none"))
    check_choice("aggregation", aggregation, ("sum_then_normalize", "normalize_then_sum"))
    table = np.asarray(rewards, np.float64)
    if table.ndim != 2 or table.shape[1] != len(names):
        raise ArgumentError(
            f"TG-INTEG-010: rewards are {table.shape} and there are {len(names)} names. The reward of each column "
            "is ambiguous. Pass rewards [R, K] and K names."
        )
    weight = np.ones(len(names)) if weights is None else np.asarray(weights, np.float64)
    reward = np.where(np.isnan(table).all(1), np.nan, np.nansum(table * weight, 1))
    result = MetricSums(Sums.of(), ())
    for name, column in zip(names, table.T, strict=True):
        sums = moments("reward", column[~np.isnan(column)]).with_prefix(f"rewards/{name}/")
        result = result | MetricSums(sums, (MetricSet(NAMED_REWARD, f"rewards/{name}/", {"name": name}),))
    counts = {"rows": len(reward), "flat": np.count_nonzero(zero_std_mask(reward, np.asarray(group)))}
    sums = moments("reward", reward[~np.isnan(reward)]) | Sums.of(counts=counts)
    rows = REWARD_BY_BATCH if scale_rewards == "batch" else REWARD
    if aggregation == "normalize_then_sum":
        totals = normalize_then_sum(
            table, group, weights=weight, scale="std", ddof=1, eps=1e-4, single_sample_group="zero"
        )
        sums, rows = sums | moments("summed", totals[~np.isnan(totals)]), REWARD_OF_GDPO
    return result | MetricSums(sums.with_prefix("reward/"), (MetricSet(rows, "reward/"),))


def _outside(
    ratio: np.ndarray, loss_type: str, epsilon: float, epsilon_high: float | None, delta: float | None
) -> tuple[np.ndarray, np.ndarray]:
    """Return [M] bool below and above the bounds, as in `_compute_loss`: ratios are capped at `delta` first."""
    high = epsilon if epsilon_high is None else epsilon_high
    if loss_type == "cispo":
        return np.zeros(ratio.shape, bool), ratio > high
    capped = ratio if delta is None else np.minimum(ratio, delta)
    return capped < 1 - epsilon, capped > 1 + high


def _clips(flags: np.ndarray, side: str, rows: Rows, sequence: bool) -> Sums:
    """Return the sums of clipped shares: one value per row, and the mean over rows or over tokens."""
    by_row = rows.any(flags).astype(np.float64) if sequence else rows.mean(flags)[rows.filled]
    bottom = rows.count if sequence else rows.groups.terms
    counts = {f"{side}.hit": by_row.sum() if sequence else np.count_nonzero(flags), f"{side}.of": bottom}
    return moments(side, by_row) | Sums.of(counts=counts)


def _over(name: str, bottom: str) -> Callable[[Sums], float]:
    """Return a function that computes name / max(bottom, 1)."""
    return lambda s: float(s[name]) / max(float(s[bottom]), 1.0)


def _region(s: Sums) -> float:
    return _over("low.hit", "low.of")(s) + _over("high.hit", "high.of")(s)


def _extreme(name: str, side: str, nothing: float) -> Callable[[Sums], float]:
    return lambda s: getattr(Moments(s, name), side) if Moments(s, name).n else nothing


_NAN = float("nan")
_SAMPLING = "sampling/sampling_logp_difference/"
_RATIO = "sampling/importance_sampling_ratio/"
_WEIGHTED, _RATIO_OF = "old / rollout", "theta / old"
_UNITS = "tokens; rows at sequence level"

SAMPLING = (
    Metric(f"{_SAMPLING}mean", "nats", _WEIGHTED, "known tokens", "Mean of |l|; 0 of none.", _over("gap", "gap.n")),
    Metric(f"{_SAMPLING}max", "nats", _WEIGHTED, None, "Largest |l|.", _extreme("gap", "largest", 0.0)),
    Metric(f"{_RATIO}min", "1", _WEIGHTED, None, "Smallest weight after clipping.", _extreme("ratio", "smallest", 0.0)),
    Metric(f"{_RATIO}mean", "1", _WEIGHTED, _UNITS, "Mean weight: not the raw ratio.", _over("ratio", "ratio.n")),
    Metric(f"{_RATIO}max", "1", _WEIGHTED, None, "Largest weight after clipping.", _extreme("ratio", "largest", 0.0)),
)
KL = (Metric("kl", "nats", "theta / ref", "tokens", "k3 of theta || ref, times theta / old.", _over("kl", "n")),)
ENTROPY = (Metric("entropy", "nats", None, "tokens", "Mean entropy.", _over("entropy", "n")),)
CLIP = (
    Metric("clip_ratio/low_mean", "share", _RATIO_OF, _UNITS, "A < 0, below 1 - low.", _over("low.hit", "low.of")),
    Metric(
        "clip_ratio/low_min",
        "share",
        _RATIO_OF,
        None,
        "Smallest share of a row: 0 unless every row was clipped somewhere.",
        _extreme("low", "smallest", _NAN),
    ),
    Metric("clip_ratio/high_mean", "share", _RATIO_OF, _UNITS, "A > 0, above 1 + high.", _over("high.hit", "high.of")),
    Metric(
        "clip_ratio/high_max", "share", _RATIO_OF, None, "Largest share of a row.", _extreme("high", "largest", _NAN)
    ),
    Metric(
        "clip_ratio/region_mean", "share", _RATIO_OF, _UNITS, "Either side: our clip_fraction without dual.", _region
    ),
)
CISPO = (Metric("cispo_clip_ratio", "share", _RATIO_OF, _UNITS, "A > 0, above the cap.", _over("high.hit", "high.of")),)
VESPO = (Metric("vespo/phi_seq_mean", "1", "theta / rollout", "rows", "Mean gamma weight.", _over("phi", "phi.n")),)
NAMED_REWARD = (
    Metric("rewards/{name}/mean", "reward", None, "scored traces", "Of one function.", mean_of("reward")),
    Metric("rewards/{name}/std", "reward", None, "scored traces, less one", "Its deviation.", deviation_of("reward")),
)
_REWARD = (
    Metric("reward", "reward", None, "scored traces", "Weighted sum of the functions.", mean_of("reward")),
    Metric("reward_std", "reward", None, "scored traces, less one", "Over all traces.", deviation_of("reward")),
)


def _one_value(name: str, meaning: str) -> Metric:
    """Return the metric that is 1 if there are two or more values and they differ by at most TRL's 1e-8."""
    spread = formula_of(lambda m: float(m.n > 1 and m.largest - m.smallest <= 1e-8))
    return Metric("frac_reward_zero_std", "0 or 1", None, None, meaning, spread(name))


_FLAT = "Traces of groups without a difference; TRL takes a deviation below 1e-8 for none."
REWARD = (
    *_REWARD,
    Metric("frac_reward_zero_std", "share", None, "traces", _FLAT, lambda s: divide(s["flat"], s["rows"])),
)
REWARD_BY_BATCH = (*_REWARD, _one_value("reward", "All rewards are equal."))
REWARD_OF_GDPO = (*_REWARD, _one_value("summed", "All normalised rewards are equal."))
TRL: tuple[Metric, ...] = (*SAMPLING, *KL, *ENTROPY, *CLIP, *CISPO, *VESPO, *NAMED_REWARD, *REWARD)
"""All metrics of TRL."""
