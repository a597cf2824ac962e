"""Off-policy estimate of the policy's reward on held-out groups, by importance weighting, for offline training.

The module chooses the held-out groups, and computes the estimate with its interval and effective sample size from
arrays.
"""

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tracegrad.metrics import unreliable_sample_reason

SUM_LIMIT = 20.0
"""Limit of a trace's summed log-ratio in nats. It is clamped to +- this before exp, and the trace is counted."""
NORMAL_95 = 1.959964
"""Half width of a 95 % interval of a normal distribution, in standard errors."""
_PSEUDO_TRACES = 4
"""Number of pseudo-traces in the interval, half of them at each end of the range of rewards."""
_STUDENT_95 = (
    *(12.7062, 4.3027, 3.1824, 2.7764, 2.5706, 2.4469, 2.3646, 2.3060, 2.2622, 2.2281),
    *(2.2010, 2.1788, 2.1604, 2.1448, 2.1314, 2.1199, 2.1098, 2.1009, 2.0930, 2.0860),
    *(2.0796, 2.0739, 2.0687, 2.0639, 2.0595, 2.0555, 2.0518, 2.0484, 2.0452, 2.0423),
)
"""Half widths of a 95 % interval of Student's t, in standard errors, for 1 to 30 degrees of freedom."""


@dataclass(frozen=True)
class OffPolicyEstimate:
    """An off-policy estimate (OPE) of the policy's reward, in the unit of the rewards.

    Args:
        value: the estimate, sum w r / sum w over the held-out traces.
        low, high: ends of its 95 % interval, within the range of the held-out rewards.
        recorded: mean recorded reward of the same traces.
        ess: Kish effective sample size, (sum w)^2 / sum w^2, in traces.
        traces: number of held-out traces with a rollout logprob for every trained token; others have no weight.
        clamped: number of traces whose summed log-ratio was clamped to `SUM_LIMIT`.

    >>> # Weights of 2 and 1.
    >>> theta, rollout = np.log(np.float32([0.8, 0.4])), np.log(np.float32([0.4, 0.4]))
    >>> result = estimate(theta, rollout, np.arange(2), np.float32([1.0, 0.0]), np.array([0, 1]))
    >>> round(result.value, 4), result.recorded  # 2 * 1 / (2 + 1), and the mean of 1 and 0
    (0.6667, 0.5)
    >>> # (2 + 1)^2 / (4 + 1); two traces are too few.
    >>> round(result.ess, 4), result.is_reliable
    (1.8, False)
    """

    value: float
    low: float
    high: float
    recorded: float
    ess: float
    traces: int
    clamped: int

    @property
    def ess_fraction(self) -> float:
        """ess / traces; 0 without traces."""
        return self.ess / self.traces if self.traces else 0.0

    @property
    def is_reliable(self) -> bool:
        """Whether the interval is reliable.

        It is not if a weight was clamped, or if the effective sample size is below `metrics.MIN_ESS` or
        `metrics.MIN_ESS_FRACTION` of the traces. If all rewards are equal or in one group, there is no interval.
        """
        sample = self.traces, self.ess, self.ess_fraction, self.clamped
        return unreliable_sample_reason(*sample, self.low, self.high) is None

    def row(self) -> dict[str, float]:
        """Return the estimate by the names of its metrics."""
        return {
            "ope": self.value,
            "ope_low": self.low,
            "ope_high": self.high,
            "ope_recorded_reward": self.recorded,
            "ope_ess": self.ess,
            "ope_ess_fraction": self.ess_fraction,
            "ope_reliable": int(self.is_reliable),
            "ope_traces": self.traces,
            "ope_clamped": self.clamped,
        }


def estimate(
    logprobs: NDArray[np.float32],
    rollout: NDArray[np.float32],
    trace: NDArray[np.integer],
    rewards: NDArray[np.float32],
    group: NDArray[np.integer],
) -> OffPolicyEstimate:
    """Estimate the policy's reward by self-normalised importance weighting, with an interval by the delta method.

    w_r = exp(clamp(sum over the trained tokens of trace r of logprob - rollout logprob)), value = sum w r / sum w.

    The interval is v +- t se, clipped to the range of the rewards. t is Student's t with G - 1 degrees of freedom, and
    se^2 = G / (G - 1) * sum over groups of (sum over its traces of w (r - v))^2 / (sum w)^2. v, the sums and se include
    four pseudo-traces, two with the lowest and two with the highest reward. Each has weight sum w^2 / sum w, and counts
    as a group, without the factor G / (G - 1). Without them the interval is too narrow near the ends of the range,
    where the few traces with other rewards may be missing from the data. Groups, not traces, are the independent
    draws: traces of one group share their prompt.

    Args:
        logprobs: [M] logprobs of the policy, nats.
        rollout: [M] recorded logprobs, nats; a trace with NaN is left out.
        trace: [M] trace of each token, an index into `rewards`.
        rewards: [R]; a trace without a reward or a trained token is left out.
        group: [R] group numbers.

    Source: Owen 2013, "Monte Carlo theory, methods and examples", 9.2 (ratio estimate and its delta-method variance);
    Agresti and Coull 1998, The American Statistician 52 (two successes and two failures added).

    >>> same = np.log(np.full(4, 0.5, np.float32))
    >>> v = estimate(same, same, np.arange(4), np.array([0, 1, 1, 1], np.float32), np.array([0, 0, 1, 1]))
    >>> v.value, v.ess, v.traces
    (0.75, 4.0, 4)
    """
    total, reward, cluster = _usable(logprobs, rollout, trace, rewards, group)
    if len(total) == 0:
        return OffPolicyEstimate(math.nan, math.nan, math.nan, math.nan, 0.0, 0, 0)
    clamped = int((np.abs(total) > SUM_LIMIT).sum())
    value, weight, _ = _weighted(total, reward, cluster)
    low, high = _interval(value, weight, reward, cluster)
    ess = float(weight.sum() ** 2 / (weight @ weight))
    return OffPolicyEstimate(value, low, high, float(reward.mean()), ess, len(total), clamped)


def difference(
    logprobs: NDArray[np.float32],
    previous_logprobs: NDArray[np.float32],
    rollout: NDArray[np.float32],
    trace: NDArray[np.integer],
    rewards: NDArray[np.float32],
    group: NDArray[np.integer],
) -> tuple[float, float]:
    """Return the estimate under `logprobs` minus that under `previous_logprobs`, and half its 95 % interval.

    Both use the same groups, so common errors cancel: the interval is far narrower than for either estimate. Half
    of it is 1.96 standard errors, too narrow for fewer than about 20 groups, and NaN for a single group.

    >>> theta, rollout = np.log(np.array([0.9, 0.1, 0.8, 0.2], np.float32)), np.log(np.full(4, 0.5, np.float32))
    >>> given = rollout, np.arange(4), np.array([0, 1, 0, 1], np.float32), np.array([0, 0, 1, 1])
    >>> change, half = difference(theta, rollout, *given)
    >>> round(change, 2), half > 0
    (-0.35, True)
    """
    estimates = [_weighted(*_usable(theta, rollout, trace, rewards, group)) for theta in (logprobs, previous_logprobs)]
    (current, _, parts), (previous, _, previous_parts) = estimates
    return current - previous, _half_width(parts - previous_parts)


def _usable(
    logprobs: NDArray[np.float32],
    rollout: NDArray[np.float32],
    trace: NDArray[np.integer],
    rewards: NDArray[np.float32],
    group: NDArray[np.integer],
) -> tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.intp]]:
    """Return the summed log-ratio, reward and group number of each trace that can be weighted."""
    log_ratio = logprobs.astype(np.float64) - rollout.astype(np.float64)
    total = np.asarray(np.bincount(trace, log_ratio, len(rewards)), np.float64)
    terms = np.bincount(trace, minlength=len(rewards))
    usable = np.isfinite(total) & np.isfinite(rewards) & (terms > 0)
    return total[usable], rewards[usable].astype(np.float64), np.unique(group[usable], return_inverse=True)[1]


def _weighted(
    total: NDArray[np.float64], reward: NDArray[np.float64], cluster: NDArray[np.intp]
) -> tuple[float, NDArray[np.float64], NDArray[np.float64]]:
    """Return the estimate, the weights up to a common factor, and each group's contribution to the deviation."""
    bounded = np.clip(total, -SUM_LIMIT, SUM_LIMIT)
    weight = np.exp(bounded - bounded.max())  # The common factor cancels in every ratio below.
    value = float(weight @ reward / weight.sum())
    return value, weight, np.bincount(cluster, weight * (reward - value)) / weight.sum()


def good_and_bad(
    logprobs: NDArray[np.float32], trace: NDArray[np.integer], rewards: NDArray[np.float32], group: NDArray[np.integer]
) -> tuple[float, float]:
    """Return the mean logprob of tokens in traces with a reward above, and below, their group's mean; NaN if none."""
    has_reward = np.isfinite(rewards)
    count = np.bincount(group[has_reward], minlength=int(group.max(initial=-1)) + 1)
    mean = np.bincount(group[has_reward], rewards[has_reward].astype(np.float64), len(count)) / np.maximum(count, 1)
    above = rewards.astype(np.float64) - mean[group]
    good, bad = above[trace] > 1e-9, above[trace] < -1e-9
    return _mean(logprobs[good]), _mean(logprobs[bad])


def _mean(values: NDArray[np.float32]) -> float:
    return float(values.mean(dtype=np.float64)) if len(values) else math.nan


def choose_held_out(group: NDArray[np.integer], share: float, seed: int) -> NDArray[np.bool_]:
    """Return [R] bool: traces of the held-out groups, a rounded `share` of the groups, at least one if share > 0.

    At least one group is kept for training. The choice depends only on the seed and the number of groups.

    >>> int(choose_held_out(np.repeat(np.arange(20), 4), 0.05, seed=0).sum())
    4
    """
    names = np.unique(group)
    count = min(max(round(share * len(names)), 1), len(names) - 1) if share > 0 else 0
    chosen = np.random.default_rng([seed, 0x76616C]).permutation(len(names))[: max(count, 0)]
    return np.isin(group, names[chosen])


def _interval(
    value: float, weight: NDArray[np.float64], reward: NDArray[np.float64], cluster: NDArray[np.intp]
) -> tuple[float, float]:
    """Return the ends of the 95 % interval of a weighted mean; NaN for a single group."""
    groups = int(cluster.max()) + 1
    if groups < 2:
        return math.nan, math.nan
    lowest, highest = float(reward.min()), float(reward.max())
    pseudo_weight = float(weight @ weight / weight.sum())
    weight_sum = float(weight.sum()) + _PSEUDO_TRACES * pseudo_weight
    center = float(weight @ reward + _PSEUDO_TRACES / 2 * pseudo_weight * (lowest + highest)) / weight_sum
    parts = np.bincount(cluster, weight * (reward - center)) / weight_sum
    pseudo_variance = (
        _PSEUDO_TRACES / 2 * (pseudo_weight / weight_sum) ** 2 * ((lowest - center) ** 2 + (highest - center) ** 2)
    )
    half_interval = _student(groups - 1) * math.sqrt(groups / (groups - 1) * float(parts @ parts) + pseudo_variance)
    return min(max(center - half_interval, lowest), value), max(min(center + half_interval, highest), value)


def _student(freedom: int) -> float:
    """Return the half width of a 95 % interval in standard errors; beyond the table by the Cornish-Fisher expansion."""
    if freedom <= len(_STUDENT_95):
        return _STUDENT_95[freedom - 1]
    z = NORMAL_95
    return z + (z**3 + z) / (4 * freedom) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * freedom**2)


def _half_width(parts: NDArray[np.float64]) -> float:
    groups = len(parts)
    if groups < 2:
        return math.nan
    return NORMAL_95 * math.sqrt(groups / (groups - 1) * float(parts @ parts))
