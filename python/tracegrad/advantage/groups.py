"""Groups by id: members, sizes, and which groups have no spread of rewards, so that their advantages are 0.

Everything ragged is summed here, by `np.bincount` over the groups. No baseline is chosen here; `outcome`, `several` and
`tokens` choose them.
"""

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from tracegrad import arrays
from tracegrad.errors import ArgumentError

Singleton = Literal["refuse", "zero", "keep"]
Floats = NDArray[np.float64]


@dataclass(frozen=True)
class GroupCounts:
    """What the groups of a batch are like, and which of them teach nothing.

    Args:
        traces: traces.
        unscorable: traces whose reward is NaN; they stand outside baselines and have advantage 0.
        groups: groups with a scorable trace.
        singletons: groups with exactly one.
        equal: groups of two or more whose rewards are all the same: they teach nothing. Over `groups` this is TRL's
            `frac_reward_zero_std`.
        singleton_ids: ids of the singletons.
        equal_ids: ids of the equal groups.
        equal_rewards: the one reward of each of them: tells "all solved" from "none solved".
        unscorable_ids: ids of groups without any scorable trace.
    """

    traces: int
    unscorable: int
    groups: int
    singletons: int
    equal: int
    singleton_ids: tuple[Any, ...] = field(default=(), repr=False)
    equal_ids: tuple[Any, ...] = field(default=(), repr=False)
    equal_rewards: tuple[float, ...] = field(default=(), repr=False)
    unscorable_ids: tuple[Any, ...] = field(default=(), repr=False)


def group_counts(rewards: ArrayLike, groups: ArrayLike) -> GroupCounts:
    """Counts what the baselines meet: groups of one, groups without variance, traces without a score.

    Args:
        rewards: [R], NaN where a trace could not be scored.
        groups: [R] ids.

    Raises:
        ArgumentError: for infinite rewards or lengths that differ.

    >>> found = group_counts([1.0, 1.0, 0.0, float("nan")], [7, 7, 9, 9])
    >>> found
    GroupCounts(traces=4, unscorable=1, groups=2, singletons=1, equal=1)
    >>> found.equal_ids, found.equal_rewards, found.singleton_ids
    ((7,), (1.0,), (9,))
    """
    group = Grouped.of(rewards, groups)
    alone = group.count == 1
    return GroupCounts(
        traces=len(group.reward),
        unscorable=int((~group.known).sum()),
        groups=int((group.count > 0).sum()),
        singletons=int(alone.sum()),
        equal=int(group.equal.sum()),
        singleton_ids=tuple(group.names[alone].tolist()),
        equal_ids=tuple(group.names[group.equal].tolist()),
        equal_rewards=tuple(group.extent[1][group.equal].tolist()),
        unscorable_ids=tuple(group.names[group.count == 0].tolist()),
    )


@dataclass(frozen=True)
class Grouped:
    """Rewards and the groups they stand in.

    Args:
        reward: [R] float64, 0 where it is not known.
        known: [R] bool.
        index: [R], row of each trace's group in `names`.
        names: [G] ids.
        count: [G] known rewards.
    """

    reward: Floats
    known: NDArray[np.bool_]
    index: NDArray[np.intp]
    names: NDArray[Any]
    count: NDArray[np.intp]

    @classmethod
    def of(cls, rewards: ArrayLike, groups: ArrayLike) -> "Grouped":
        """From [R] rewards, NaN where unknown, and [R] ids of any type that sorts."""
        reward, group = arrays.real(rewards, "rewards"), arrays.labels(groups, "groups")
        if reward.ndim != 1 or group.shape != reward.shape:
            raise ArgumentError(
                f"rewards are {reward.shape} and groups {group.shape}. Each trace is compared with its own group. "
                "Pass one of each per trace, both flat."
            )
        refuse_infinite(reward)
        names, index = np.unique(group, return_inverse=True)
        index, known = index.reshape(-1), ~np.isnan(reward)
        return cls(np.where(known, reward, 0.0), known, index, names, np.bincount(index[known], minlength=len(names)))

    def sum(self, values: Floats) -> Floats:
        """[G]: [R] values summed over the known rewards of each group."""
        return np.bincount(self.index, np.where(self.known, values, 0.0), len(self.names)).astype(np.float64)

    @cached_property
    def mean(self) -> Floats:
        """[G] mean of the known rewards, 0 where there are none."""
        return self.sum(self.reward) / np.maximum(self.count, 1)

    @cached_property
    def extent(self) -> tuple[Floats, Floats]:
        """[G] lowest and highest known reward; infinities where there are none."""
        low, high = np.full(len(self.names), np.inf), np.full(len(self.names), -np.inf)
        np.minimum.at(low, self.index[self.known], self.reward[self.known])
        np.maximum.at(high, self.index[self.known], self.reward[self.known])
        return low, high

    @property
    def equal(self) -> NDArray[np.bool_]:
        """[G]: two or more known rewards, all the same."""
        low, high = self.extent
        return (self.count > 1) & (low == high)

    @property
    def alone(self) -> NDArray[np.bool_]:
        """[R]: the only known reward of its group."""
        return (self.count == 1)[self.index] & self.known

    def settle(self, advantage: Floats, singleton: str) -> Floats:
        """[R] float64: 0 for unknown rewards, exactly 0 in equal groups, and what `singleton` says for a lone one."""
        if not isinstance(singleton, str) or singleton not in ("refuse", "zero", "keep"):
            raise ArgumentError(
                f"singleton is {arrays.described(singleton)}. It says what becomes of a group of one. "
                "It must be 'refuse', 'zero' or 'keep'."
            )
        alone = self.alone
        if singleton == "refuse" and alone.any():
            first = int(np.flatnonzero(alone)[0])
            raise ArgumentError(
                f"trace {first}: group {self.names[self.index[first]]!s} has one scorable trace; there are "
                f"{int(alone.sum())} such groups. A baseline needs two. Pass singleton='zero' or 'keep', or use "
                "batch_mean for one sample a prompt."
            )
        settled = np.where(self.equal[self.index] | ~self.known, 0.0, advantage)
        return np.where(alone, self.reward if singleton == "keep" else 0.0, settled)


def refuse_infinite(reward: Floats) -> None:
    """Raises ArgumentError for an infinite reward, naming the first."""
    bad = np.flatnonzero(np.isinf(reward))
    if len(bad):
        raise ArgumentError(
            f"trace {bad[0]}: the reward is {reward[bad[0]]}. It would make the whole group infinite. "
            "Pass NaN for a trace that could not be scored."
        )
