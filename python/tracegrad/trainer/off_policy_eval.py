"""What offline training can know of its progress: importance-weighted reward on groups it does not train on.

Here are the choice of the held-out groups and the estimate with its interval and effective sample size. Arrays in,
numbers out: the loop runs the forward pass. No torch.
"""

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

SUM_LIMIT = 20.0
"""A trace's summed log-ratio is clamped to plus or minus this many nats before exp, and counted."""
NORMAL_95 = 1.959964
"""The standard errors that reach to either end of a 95 % interval of a normal distribution."""
MIN_ESS = 10.0
"""Below this many effective traces value is called unknown: its interval is then itself a guess from a handful."""
MIN_ESS_FRACTION = 0.3
"""Below this share of the held-out traces too: the traces that would weigh most were then hardly ever recorded."""
_ADDED = 4
"""Traces that the interval is computed with in addition, half of them at either end of the rewards' range."""
_STUDENT_95 = (
    *(12.7062, 4.3027, 3.1824, 2.7764, 2.5706, 2.4469, 2.3646, 2.3060, 2.2622, 2.2281),
    *(2.2010, 2.1788, 2.1604, 2.1448, 2.1314, 2.1199, 2.1098, 2.1009, 2.0930, 2.0860),
    *(2.0796, 2.0739, 2.0687, 2.0639, 2.0595, 2.0555, 2.0518, 2.0484, 2.0452, 2.0423),
)
"""The standard errors of a 95 % interval of Student's t with 1 to 30 degrees of freedom."""


@dataclass(frozen=True)
class OffPolicyValue:
    """An estimate of the policy's reward, in the rewards' unit.

    Args:
        value: sum w r / sum w over the held-out traces.
        low, high: ends of its 95 % interval, within the rewards of the held-out traces.
        recorded: mean recorded reward of the same traces.
        ess: Kish effective sample size, (sum w)^2 / sum w^2, in traces.
        traces: held-out traces all of whose terms have a rollout logprob; the others cannot be weighted.
        clamped: traces whose summed log-ratio was clamped to `SUM_LIMIT`.
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
    def known(self) -> bool:
        """Whether the interval can be believed.

        It cannot if a weight was clamped, if fewer than `MIN_ESS` effective traces or `MIN_ESS_FRACTION` of the traces
        are left, or if all rewards are equal or of one group, so that no interval exists.
        """
        enough = self.ess >= MIN_ESS and self.ess_fraction >= MIN_ESS_FRACTION
        return enough and not self.clamped and self.low < self.high

    def row(self) -> dict[str, float]:
        """The estimate under its metrics' names."""
        return {
            "off_policy_value": self.value,
            "off_policy_value_low": self.low,
            "off_policy_value_high": self.high,
            "off_policy_value_recorded": self.recorded,
            "off_policy_value_ess": self.ess,
            "off_policy_value_ess_fraction": self.ess_fraction,
            "off_policy_value_known": int(self.known),
            "off_policy_value_traces": self.traces,
            "off_policy_value_clamped": self.clamped,
        }


def estimate(
    logprobs: NDArray[np.float32],
    rollout: NDArray[np.float32],
    trace: NDArray[np.integer],
    rewards: NDArray[np.float32],
    group: NDArray[np.integer],
) -> OffPolicyValue:
    """Self-normalised importance-weighted reward, interval by the delta method over groups.

    w_r = exp(clamp(sum over the terms of trace r of logprob - rollout logprob)), value = sum w r / sum w.

    The interval is v +- t se, cut to the range of the rewards, where t is Student's with G - 1 degrees of freedom,
    se^2 = G / (G - 1) * sum over groups of (sum over its traces of w (r - v))^2 / (sum w)^2, and v, sums and se count
    four more traces, two with the lowest and two with the highest reward: each weighs sum w^2 / sum w, and is a group
    without the factor. Without them the interval is too narrow near the ends of the range, where the few traces with
    another reward may not have been recorded. Groups, not traces, are the independent draws: traces of one group share
    their prompt.

    Args:
        logprobs, rollout: [M] nats, NaN in rollout where not known: such a trace is left out and not guessed.
        trace: [M] rows of the traces.
        rewards, group: [R]. A trace without reward is left out, as is one without terms.

    Source: Owen 2013, "Monte Carlo theory, methods and examples", 9.2 (ratio estimate and its delta-method variance);
    Agresti and Coull 1998, The American Statistician 52 (two successes and two failures added).

    >>> same = np.log(np.full(4, 0.5, np.float32))
    >>> v = estimate(same, same, np.arange(4), np.array([0, 1, 1, 1], np.float32), np.array([0, 0, 1, 1]))
    >>> v.value, v.ess, v.traces
    (0.75, 4.0, 4)
    """
    total, reward, cluster = _usable(logprobs, rollout, trace, rewards, group)
    if len(total) == 0:
        return OffPolicyValue(math.nan, math.nan, math.nan, math.nan, 0.0, 0, 0)
    clamped = int((np.abs(total) > SUM_LIMIT).sum())
    value, weight, _ = _weighted(total, reward, cluster)
    low, high = _interval(value, weight, reward, cluster)
    ess = float(weight.sum() ** 2 / (weight @ weight))
    return OffPolicyValue(value, low, high, float(reward.mean()), ess, len(total), clamped)


def difference(
    logprobs: NDArray[np.float32],
    before: NDArray[np.float32],
    rollout: NDArray[np.float32],
    trace: NDArray[np.integer],
    rewards: NDArray[np.float32],
    group: NDArray[np.integer],
) -> tuple[float, float]:
    """OffPolicyValue under `logprobs` less value under `before`, and half of its 95 % interval, NaN for a single group.

    Both are of the same groups, so what they share cancels: the interval is far narrower than that of either. It is
    1.96 standard errors, which is too narrow for fewer than some 20 groups.

    >>> theta, rollout = np.log(np.array([0.9, 0.1, 0.8, 0.2], np.float32)), np.log(np.full(4, 0.5, np.float32))
    >>> given = rollout, np.arange(4), np.array([0, 1, 0, 1], np.float32), np.array([0, 0, 1, 1])
    >>> change, half = difference(theta, rollout, *given)
    >>> round(change, 2), half > 0
    (-0.35, True)
    """
    estimates = [_weighted(*_usable(theta, rollout, trace, rewards, group)) for theta in (logprobs, before)]
    (now, _, parts), (then, _, others) = estimates
    return now - then, _half_width(parts - others)


def _usable(
    logprobs: NDArray[np.float32],
    rollout: NDArray[np.float32],
    trace: NDArray[np.integer],
    rewards: NDArray[np.float32],
    group: NDArray[np.integer],
) -> tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.intp]]:
    """Summed log-ratio, reward and number of the group of each trace that can be weighted."""
    apart = logprobs.astype(np.float64) - rollout.astype(np.float64)
    total = np.asarray(np.bincount(trace, apart, len(rewards)), np.float64)
    terms = np.bincount(trace, minlength=len(rewards))
    usable = np.isfinite(total) & np.isfinite(rewards) & (terms > 0)
    return total[usable], rewards[usable].astype(np.float64), np.unique(group[usable], return_inverse=True)[1]


def _weighted(
    total: NDArray[np.float64], reward: NDArray[np.float64], cluster: NDArray[np.intp]
) -> tuple[float, NDArray[np.float64], NDArray[np.float64]]:
    """OffPolicyValue, the weights of the traces up to a factor, and what each group adds to the deviation."""
    bounded = np.clip(total, -SUM_LIMIT, SUM_LIMIT)
    weight = np.exp(bounded - bounded.max())  # the common factor cancels in every ratio below
    value = float(weight @ reward / weight.sum())
    return value, weight, np.bincount(cluster, weight * (reward - value)) / weight.sum()


def good_and_bad(
    logprobs: NDArray[np.float32], trace: NDArray[np.integer], rewards: NDArray[np.float32], group: NDArray[np.integer]
) -> tuple[float, float]:
    """Mean logprob of the terms of traces with a reward above, and below, the mean of their group; NaN without any."""
    known = np.isfinite(rewards)
    count = np.bincount(group[known], minlength=int(group.max(initial=-1)) + 1)
    mean = np.bincount(group[known], rewards[known].astype(np.float64), len(count)) / np.maximum(count, 1)
    above = rewards.astype(np.float64) - mean[group]
    good, bad = above[trace] > 1e-9, above[trace] < -1e-9
    return _mean(logprobs[good]), _mean(logprobs[bad])


def _mean(values: NDArray[np.float32]) -> float:
    return float(values.mean(dtype=np.float64)) if len(values) else math.nan


def held_out(group: NDArray[np.integer], share: float, seed: int) -> NDArray[np.bool_]:
    """[R] bool: traces of the groups kept out of training, `share` of them, rounded, at least one where share > 0.

    The choice depends on the seed and the number of groups alone.

    >>> int(held_out(np.repeat(np.arange(20), 4), 0.05, seed=0).sum())
    4
    """
    names = np.unique(group)
    count = min(max(round(share * len(names)), 1), len(names) - 1) if share > 0 else 0
    chosen = np.random.default_rng([seed, 0x76616C]).permutation(len(names))[: max(count, 0)]
    return np.isin(group, names[chosen])


def _interval(
    value: float, weight: NDArray[np.float64], reward: NDArray[np.float64], cluster: NDArray[np.intp]
) -> tuple[float, float]:
    """The ends of the 95 % interval of a weighted mean; NaN for a single group."""
    groups = int(cluster.max()) + 1
    if groups < 2:
        return math.nan, math.nan
    lowest, highest = float(reward.min()), float(reward.max())
    added = float(weight @ weight / weight.sum())
    whole = float(weight.sum()) + _ADDED * added
    middle = float(weight @ reward + _ADDED / 2 * added * (lowest + highest)) / whole
    parts = np.bincount(cluster, weight * (reward - middle)) / whole
    beyond = _ADDED / 2 * (added / whole) ** 2 * ((lowest - middle) ** 2 + (highest - middle) ** 2)
    half = _student(groups - 1) * math.sqrt(groups / (groups - 1) * float(parts @ parts) + beyond)
    return min(max(middle - half, lowest), value), max(min(middle + half, highest), value)


def _student(freedom: int) -> float:
    """Standard errors of a 95 % interval; beyond the table by the expansion of Cornish and Fisher."""
    if freedom <= len(_STUDENT_95):
        return _STUDENT_95[freedom - 1]
    z = NORMAL_95
    return z + (z**3 + z) / (4 * freedom) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * freedom**2)


def _half_width(parts: NDArray[np.float64]) -> float:
    groups = len(parts)
    if groups < 2:
        return math.nan
    return NORMAL_95 * math.sqrt(groups / (groups - 1) * float(parts @ parts))
