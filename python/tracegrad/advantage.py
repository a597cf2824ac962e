"""Baselines and scales: what a trace's reward says in comparison with its group's.

One number per trace, computed in float64. No learned critic; no tokens. Called with the rewards and groups of
`Sequences`, or with any two arrays.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from tracegrad.errors import ArgumentError

Scale = Literal["none", "std"]
Singleton = Literal["refuse", "zero", "keep"]

_EPS = 1e-4


@dataclass(frozen=True)
class GroupCounts:
    """What the groups of a batch are like.

    Args:
        traces: traces.
        unscorable: traces whose reward is NaN; they stand outside baselines and have advantage 0.
        groups: groups with a scorable trace.
        singletons: groups with exactly one.
        equal: groups of two or more whose rewards are all the same: they teach nothing.
    """

    traces: int
    unscorable: int
    groups: int
    singletons: int
    equal: int


def group_counts(rewards: ArrayLike, groups: ArrayLike) -> GroupCounts:
    """Counts what `group_mean` meets.

    Args:
        rewards: [R], NaN where a trace could not be scored.
        groups: [R] ids.

    >>> group_counts([1.0, 1.0, 0.0, float("nan")], [0, 0, 1, 1])
    GroupCounts(traces=4, unscorable=1, groups=2, singletons=1, equal=1)
    """
    reward, index, total = _columns(rewards, groups)
    known = ~np.isnan(reward)
    count = np.bincount(index[known], minlength=total)
    low, high = _extent(reward, index, total)
    return GroupCounts(
        traces=len(reward),
        unscorable=int((~known).sum()),
        groups=int((count > 0).sum()),
        singletons=int((count == 1).sum()),
        equal=int(((count > 1) & (low == high)).sum()),
    )


def group_mean(
    rewards: ArrayLike,
    groups: ArrayLike,
    *,
    scale: Scale = "none",
    ddof: int | None = None,
    eps: float | None = None,
    singleton: Singleton = "refuse",
) -> NDArray[np.float32]:
    """Reward minus the mean of its group; with scale="std" divided by the group's (standard deviation + eps).

    Groups are by id and may be ragged. Where all rewards of a group are equal, its advantages are exactly 0.

    Args:
        rewards: [R], NaN where a trace could not be scored: it stands outside the baseline and has advantage 0.
        groups: [R] ids, of any type that sorts.
        scale: "none" (Dr. GRPO) or "std" (GRPO).
        ddof: required with "std": 1 divides by n - 1 (TRL, verl, SkyRL), 0 by n (ART).
        eps: with "std", added to the standard deviation; 1e-4 (TRL) by default, verl has 1e-6.
        singleton: a group with one scorable trace has no baseline: "refuse" it, give it "zero", or "keep" its reward
            (over 1 + eps with "std", as verl's grpo does).

    Returns:
        [R] float32.

    Raises:
        ArgumentError: for a group of one under "refuse", infinite rewards, lengths that differ, ddof missing or
            without effect.

    Source: Shao et al. 2024, arXiv 2402.03300, section 4.1; scale="none": Liu et al. 2025, arXiv 2503.20783.

    >>> group_mean([1.0, 0.0, 0.0, 5.0, 5.0], [7, 7, 7, 9, 9]).round(3).tolist()
    [0.6669999957084656, -0.3330000042915344, -0.3330000042915344, 0.0, 0.0]
    """
    reward, index, total = _columns(rewards, groups)
    eps_ = _check_scale(scale, ddof, eps)
    known = ~np.isnan(reward)
    filled = np.where(known, reward, 0.0)
    count = np.bincount(index[known], minlength=total)
    safe = np.maximum(count, 1)
    mean = np.bincount(index, filled, total) / safe
    low, high = _extent(reward, index, total)
    advantage = np.where(low == high, 0.0, 1.0)[index] * (filled - mean[index])
    alone = count == 1
    if alone.any():
        advantage = _alone(advantage, filled, alone[index] & known, singleton, groups)
    if scale == "std":
        assert ddof is not None
        centred = np.where(known, filled - mean[index], 0.0)
        spread = np.sqrt(np.bincount(index, centred**2, total) / np.maximum(count - ddof, 1))
        advantage = advantage / (np.where(alone, 1.0, spread) + eps_)[index]
    return np.where(known, advantage, 0.0).astype(np.float32)


def batch_mean(
    rewards: ArrayLike,
    *,
    scale: Scale = "none",
    ddof: int | None = None,
    eps: float | None = None,
    singleton: Singleton = "refuse",
) -> NDArray[np.float32]:
    """Reward minus the mean of the batch, for logs with one sample a prompt; otherwise as `group_mean`.

    The baseline then holds the difference between easy and hard prompts too: more variance, no bias worth the name in a
    large batch.

    >>> batch_mean([1.0, 0.0, 0.0, 1.0]).tolist()
    [0.5, -0.5, -0.5, 0.5]
    """
    reward = np.asarray(rewards, np.float64)
    groups = np.zeros(len(np.atleast_1d(reward)), np.int64)
    return group_mean(reward, groups, scale=scale, ddof=ddof, eps=eps, singleton=singleton)


def _columns(rewards: ArrayLike, groups: ArrayLike) -> tuple[NDArray[np.float64], NDArray[np.intp], int]:
    reward, group = np.asarray(rewards, np.float64), np.asarray(groups)
    if reward.ndim != 1 or group.shape != reward.shape:
        raise ArgumentError(
            f"rewards are {reward.shape} and groups {group.shape}. Pass one of each per trace, both flat."
        )
    bad = np.flatnonzero(np.isinf(reward))
    if len(bad):
        raise ArgumentError(
            f"trace {bad[0]}: the reward is {reward[bad[0]]}. It would make the whole group infinite. "
            "Pass NaN for a trace that could not be scored."
        )
    names, index = np.unique(group, return_inverse=True)
    return reward, index.reshape(-1), len(names)


def _extent(reward: NDArray[np.float64], index: NDArray[np.intp], total: int) -> tuple[NDArray, NDArray]:
    """[G] lowest and highest known reward."""
    low, high = np.full(total, np.inf), np.full(total, -np.inf)
    known = ~np.isnan(reward)
    np.minimum.at(low, index[known], reward[known])
    np.maximum.at(high, index[known], reward[known])
    return low, high


def _check_scale(scale: str, ddof: int | None, eps: float | None) -> float:
    if scale not in ("none", "std"):
        raise ArgumentError(f"scale is {scale!r}. It must be 'none' or 'std'.")
    if scale == "none" and (ddof is not None or eps is not None):
        raise ArgumentError("ddof and eps have no effect with scale='none'. Leave them out, or pass scale='std'.")
    if scale == "std" and ddof not in (0, 1):
        raise ArgumentError(
            f"ddof is {ddof} with scale='std'. Peers differ here: pass 1 (TRL, verl, SkyRL) or 0 (ART)."
        )
    return _EPS if eps is None else eps


def _alone(
    advantage: NDArray[np.float64],
    reward: NDArray[np.float64],
    alone: NDArray[np.bool_],
    singleton: str,
    groups: ArrayLike,
) -> NDArray[np.float64]:
    if singleton == "keep":
        return np.where(alone, reward, advantage)
    if singleton == "zero":
        return np.where(alone, 0.0, advantage)
    if singleton != "refuse":
        raise ArgumentError(f"singleton is {singleton!r}. It must be 'refuse', 'zero' or 'keep'.")
    first = int(np.flatnonzero(alone)[0])
    raise ArgumentError(
        f"trace {first}: group {np.asarray(groups)[first]!s} has one scorable trace; there are {int(alone.sum())} such "
        "groups. A baseline needs two. Pass singleton='zero' or 'keep', or use batch_mean for one sample a prompt."
    )
