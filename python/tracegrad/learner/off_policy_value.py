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


@dataclass(frozen=True)
class OffPolicyValue:
    """An estimate of the policy's reward, in the rewards' unit.

    Args:
        value: sum w r / sum w over the held-out traces.
        low, high: ends of its 95 % interval.
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
        """Whether enough effective traces are left, and an interval exists."""
        return self.ess >= MIN_ESS and math.isfinite(self.low)

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

    w_r = exp(clamp(sum over the terms of trace r of logprob - rollout logprob)), value = sum w r / sum w,
    se^2 = G / (G - 1) * sum over groups of (sum over its traces of w (r - value))^2 / (sum w)^2, and the interval is
    value +- 1.96 se. Groups, not traces, are the independent draws: traces of one group share their prompt.

    Args:
        logprobs, rollout: [M] nats, NaN in rollout where not known: such a trace is left out and not guessed.
        trace: [M] rows of the traces.
        rewards, group: [R]. A trace without reward is left out, as is one without terms.

    Source: Owen 2013, "Monte Carlo theory, methods and examples", 9.2 (ratio estimate and its delta-method variance).

    >>> same = np.log(np.full(4, 0.5, np.float32))
    >>> v = estimate(same, same, np.arange(4), np.array([0, 1, 1, 1], np.float32), np.array([0, 0, 1, 1]))
    >>> v.value, v.ess, v.traces
    (0.75, 4.0, 4)
    """
    total, reward, cluster = _usable(logprobs, rollout, trace, rewards, group)
    if len(total) == 0:
        return OffPolicyValue(math.nan, math.nan, math.nan, math.nan, 0.0, 0, 0)
    clamped = int((np.abs(total) > SUM_LIMIT).sum())
    value, weight, parts = _weighted(total, reward, cluster)
    half = _half_width(parts)
    ess = float(weight.sum() ** 2 / (weight @ weight))
    return OffPolicyValue(value, value - half, value + half, float(reward.mean()), ess, len(total), clamped)


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


def _half_width(parts: NDArray[np.float64]) -> float:
    groups = len(parts)
    if groups < 2:
        return math.nan
    return NORMAL_95 * math.sqrt(groups / (groups - 1) * float(parts @ parts))
