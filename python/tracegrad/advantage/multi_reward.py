"""Combine several rewards per trace into one by weights, before or after comparing each with its group.

The functions take `Sequences.rewards` [R, K]. Pass their float64 result to a function of `outcome` or to `whiten`.
"""

import numpy as np
from numpy.typing import ArrayLike, NDArray

from tracegrad import _validation
from tracegrad.advantage.outcome import Floats, GroupedRewards, Scale, Singleton, group_mean_float64, refuse_infinite
from tracegrad.errors import ArgumentError


def weighted_sum(rewards: ArrayLike, weights: ArrayLike | None = None) -> Floats:
    """Return the sum of weight times reward over the rewards that a trace has, for any function of one reward.

    With `group_mean` this is TRL's multi_objective_aggregation="sum_then_normalize".

    Args:
        rewards: [R, K], NaN (None of a reward function) if a trace lacks a reward: it adds nothing.
        weights: [K], default 1 each.

    Returns:
        [R] float64, NaN if a trace has none of its rewards: it is unscorable.

    Raises:
        ArgumentError: for infinite rewards or weights, or shapes that contradict one another.

    >>> weighted_sum([[1.0, 4.0], [2.0, float("nan")], [float("nan"), float("nan")]], [1.0, 0.5]).tolist()
    [3.0, 2.0, nan]
    """
    table, weight = _table(rewards, weights)
    return _sum(table, table, weight)


def normalize_then_sum(
    rewards: ArrayLike,
    groups: ArrayLike,
    *,
    weights: ArrayLike | None = None,
    scale: Scale = "std",
    ddof: int | None = None,
    eps: float | None = None,
    single_sample_group: Singleton = "error",
) -> Floats:
    """Compare each reward with its own group, then return the weighted sum: GDPO before its last step.

    A reward of large spread then does not dominate the others. GDPO ends with `whiten` of this: in TRL
    ("normalize_then_sum") over traces, eps 1e-4 in the deviation; in verl over tokens, `whiten(found[trace], ...)`, eps
    1e-8 in the variance.

    Args:
        rewards: [R, K], NaN if a trace lacks a reward: it is outside that reward's baseline and adds nothing.
        groups: [R] ids.
        weights: [K], default 1 each.
        scale, ddof, eps, single_sample_group: for each reward, as in `group_mean`. A group in which only one trace has
            the reward is a group of one.

    Returns:
        [R] float64, NaN if a trace has none of its rewards.

    Raises:
        ArgumentError: as `group_mean` and `weighted_sum`.

    Source: GDPO, 2026, arXiv 2601.05242.

    >>> normalize_then_sum([[1.0, 90.0], [0.0, 10.0]], [0, 0], ddof=0, eps=0.0).tolist()
    [2.0, -2.0]
    """
    table, weight = _table(rewards, weights)
    columns = [
        group_mean_float64(GroupedRewards.of(column, groups), scale, ddof, eps, single_sample_group)
        for column in table.T
    ]
    return _sum(np.stack(columns, axis=1), table, weight)


def _sum(values: Floats, rewards: Floats, weight: Floats) -> Floats:
    known = ~np.isnan(rewards)
    return np.where(known.any(axis=1), (np.where(known, values, 0.0) * weight).sum(axis=1), np.nan)


def _table(rewards: ArrayLike, weights: ArrayLike | None) -> tuple[Floats, Floats]:
    table = _validation.real(rewards, "rewards")
    if table.ndim != 2 or table.shape[1] == 0:
        raise ArgumentError(
            f"TG-ADV-004: rewards have shape {table.shape}. Several rewards are a table. Pass [R, K], a row per trace."
        )
    refuse_infinite(np.where(np.isinf(table).any(axis=1), np.inf, 0.0))
    weight = np.ones(table.shape[1]) if weights is None else _validation.real(weights, "weights")
    if weight.shape != (table.shape[1],) or not np.isfinite(weight).all():
        raise ArgumentError(
            f"TG-ADV-005: weights are {weight.tolist()} for {table.shape[1]} rewards. Each reward has one weight. "
            "Pass a finite number for each column."
        )
    return table, weight


def overlong(lengths: ArrayLike, *, longest: int, buffer: int, penalty: float = 1.0) -> NDArray[np.float32]:
    """Return DAPO's penalty for long answers, to add to the reward.

    It is 0 up to longest - buffer tokens, then falls linearly to -penalty at `longest`, and further beyond it.

    Args:
        lengths: [R] trained tokens of each trace.
        longest: generation budget, in tokens.
        buffer: the last tokens of the budget, over which the penalty grows.
        penalty: what is subtracted at `longest`, in units of the reward.

    Returns:
        [R] float32, to be added to the rewards before the baseline.

    Raises:
        ArgumentError: for a buffer that is not within the budget, or a penalty that is not above 0.

    Source: DAPO, arXiv 2503.14476, eq. 13; verl's and its recipe's overlong_buffer.

    >>> overlong([100, 180, 200], longest=200, buffer=40).tolist()
    [0.0, -0.5, -1.0]
    """
    if not 0 < buffer <= longest or not 0 < penalty < np.inf:
        raise ArgumentError(
            f"TG-ADV-006: overlong with longest {longest}, buffer {buffer}, penalty {penalty}. The buffer "
            "must be within the budget, and the penalty above 0."
        )
    left = (longest - buffer) - np.asarray(lengths, np.float64)
    return (np.minimum(left, 0) / buffer * penalty).astype(np.float32)
