"""Rewards of a step's traces: mean, spread, and how many groups teach nothing because all their rewards are equal.

Here is `Rewards`. Baselines and scales are in `tracegrad.advantage`; nothing is normalised here. Called by the learner
and by `peers.trl`.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from tracegrad import arrays
from tracegrad.errors import ArgumentError
from tracegrad.metrics.groups import Groups
from tracegrad.metrics.sums import AllReduce, Moments, Sums, moments, per
from tracegrad.metrics.table import Metric


@dataclass(frozen=True)
class Rewards:
    """Sums over the traces of one part of a step; parts are cut between groups, as a group has one baseline.

    >>> found = Rewards.of([1.0, 1.0, 0.0, float("nan")], [0, 0, 1, 1]).named()
    >>> round(found["reward"], 3), found["frac_reward_zero_std"], found["frac_unscorable"]
    (0.667, 0.5, 0.25)
    """

    sums: Sums

    @classmethod
    def of(cls, rewards: ArrayLike, group: ArrayLike) -> "Rewards":
        """Measures traces.

        Args:
            rewards: [R], NaN where a trace could not be scored.
            group: [R] ids.

        Raises:
            ArgumentError: if their lengths differ.
        """
        reward, ids = arrays.real(rewards, "rewards"), arrays.labels(group, "group")
        if reward.ndim != 1 or reward.shape != ids.shape:
            raise ArgumentError(
                f"rewards are {reward.shape} and groups {ids.shape}. Which traces share a baseline is not known. "
                "Pass one of each per trace, both flat."
            )
        known = ~np.isnan(reward)
        counts = {"traces": len(reward), "flat": np.count_nonzero(flat(reward, ids))}
        return cls(moments("reward", reward[known]) | Sums.of(counts=counts))

    def __add__(self, other: "Rewards") -> "Rewards":
        """Both parts together."""
        return Rewards(self.sums + other.sums)

    def all_reduce(self, all_reduce: AllReduce) -> "Rewards":
        """The same over all ranks."""
        return Rewards(self.sums.all_reduce(all_reduce))

    def named(self) -> dict[str, float]:
        """Names of docs/metrics.md to values."""
        return {row.name: float(row.value(self.sums)) for row in REWARDS if row.value is not None}


def flat(reward: NDArray[np.float64], group: NDArray) -> NDArray[np.bool_]:
    """[R] traces of a group of two or more known rewards that are all equal."""
    groups, known = Groups.of(group), ~np.isnan(reward)
    high = groups.largest(np.where(known, reward, -np.inf))
    low = -groups.largest(np.where(known, -reward, -np.inf))
    return groups.back((groups.total(known) > 1) & (high == low))


def _known(sums: Sums) -> Moments:
    return Moments(sums, "reward")


REWARDS: tuple[Metric, ...] = (
    Metric("reward", "reward", "", "scored traces", "Mean recorded reward.", lambda s: _known(s).mean()),
    Metric(
        "reward_std",
        "reward",
        "",
        "scored traces, less one",
        "Its deviation over all traces: TRL's.",
        lambda s: _known(s).deviation(1),
    ),
    Metric(
        "frac_reward_zero_std",
        "share",
        "",
        "traces",
        "Traces of groups of two or more whose known rewards are all equal: they teach nothing. TRL's.",
        lambda s: per(s["flat"], s["traces"]),
    ),
    Metric(
        "frac_unscorable",
        "share",
        "",
        "traces",
        "Traces without a reward.",
        lambda s: per(s["traces"] - s["reward.n"], s["traces"]),
    ),
)
