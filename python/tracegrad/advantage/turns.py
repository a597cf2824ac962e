"""Rewards of turns (messages): what each turn is credited with, and how the terms of a trace come to have it.

Called with `Sequences.turn_rewards`, `cu_turns` and the trace and turn of the terms. Two roads: credit turns and hand
it to their terms (`turn_returns`, `turns_to_terms`), which discounts by turns; or put rewards on the last terms
(`at_turn_ends`) for the functions of `tokens`, which discount by terms.
"""

import numpy as np
from numpy.typing import ArrayLike, NDArray

from tracegrad import arrays
from tracegrad.advantage.groups import Floats, refuse_infinite
from tracegrad.advantage.runs import rows
from tracegrad.advantage.tokens import returns
from tracegrad.errors import ArgumentError


def turn_returns(turn_rewards: ArrayLike, cu_turns: ArrayLike, *, gamma: float) -> Floats:
    """What each turn still gets: its own reward and gamma times what the next turn gets.

    gamma=0 credits a turn with its own reward alone; gamma=1 credits it with its own and all later ones; between, a
    later turn counts less, by turns and not by tokens. `turns_to_terms` brings it to the terms.

    A baseline stands after it, one number for all turns of a trace, from the other traces of its group: then it does
    not depend on what the trace does. A mean that is taken out of each turn before they are summed, as in the process
    supervision of DeepSeekMath (Shao et al. 2024, arXiv 2402.03300, section 4.1.3), is paid once for each turn that a
    trace takes. Where traces choose how many they take, the gradient is biased towards fewer, or more where the mean is
    below 0 (verl#7244); so it is with a mean over the turns of the group, in which a longer trace counts more often.

    Args:
        turn_rewards: [K], NaN where a turn has none: it adds nothing.
        cu_turns: [R+1] offsets: trace r owns turns cu_turns[r]:cu_turns[r+1].
        gamma: 0 to 1.

    Returns:
        [K] float64, NaN where no known reward is reached.

    Raises:
        ArgumentError: for gamma outside 0 to 1, infinite rewards, or offsets that do not rise from 0 to K.

    >>> turn_returns([1.0, 2.0, 4.0], [0, 2, 3], gamma=0.5).tolist()
    [2.0, 2.0, 4.0]

    Two traces of a group: one ends after a turn that got 1, the other's two turns got 1 and 0. Both got 1 in all, so
    that nothing speaks for either at the first turn, where they part: 0 and 0. The mean of all three turns, 2/3, taken
    out before, would have said 1/3 for the one that ended and 1/3 - 2/3 for the one that went on.

    >>> from tracegrad.advantage import group_mean, rloo
    >>> rewards, cu_turns, group = np.array([1.0, 1.0, 0.0]), np.array([0, 1, 3]), np.array([7, 7])
    >>> found = turn_returns(rewards, cu_turns, gamma=1.0)
    >>> whole = found[cu_turns[:-1]]  # of each trace, from its first turn on
    >>> others = whole - rloo(whole, group)  # the mean of the others: what rloo takes out
    >>> (found - np.repeat(others, np.diff(cu_turns))).tolist()
    [0.0, 0.0, -1.0]
    >>> before = group_mean(rewards, np.repeat(group, np.diff(cu_turns)))
    >>> turn_returns(before, cu_turns, gamma=1.0).round(3).tolist()
    [0.333, -0.333, -0.667]
    """
    reward = arrays.real(turn_rewards, "turn_rewards")
    offsets = _offsets(cu_turns, reward)
    return returns(reward, np.repeat(np.arange(len(offsets) - 1), np.diff(offsets)), gamma=gamma)


def turns_to_terms(values: ArrayLike, cu_turns: ArrayLike, trace: ArrayLike, turn: ArrayLike) -> NDArray[np.float32]:
    """Gives every term the value of its turn, 0 where that is NaN.

    Args:
        values: [K], one per turn.
        cu_turns: [R+1] offsets.
        trace: [M] row of each term's trace.
        turn: [M] which turn of its trace each term is of.

    Returns:
        [M] float32.

    Raises:
        ArgumentError: for a turn that its trace does not have, or shapes that contradict one another.

    >>> turns_to_terms([2.0, -1.0, 4.0], [0, 2, 3], [0, 0, 0, 1], [0, 1, 1, 0]).tolist()
    [2.0, -1.0, -1.0, 4.0]
    """
    value = arrays.real(values, "values")
    return np.nan_to_num(value[_turn_rows(_offsets(cu_turns, value), trace, turn)], nan=0.0).astype(np.float32)


def at_turn_ends(turn_rewards: ArrayLike, cu_turns: ArrayLike, trace: ArrayLike, turn: ArrayLike) -> Floats:
    """Puts each turn's reward on the last term of the turn: per-term rewards for `returns`, `gae` and the rest.

    A turn without terms gives its reward to the last term before it; if there is none it can credit nothing.

    Args: as `turns_to_terms`.

    Returns:
        [M] float64: 0 at the other terms, NaN at those of a turn whose reward is NaN.

    Raises:
        ArgumentError: as `turns_to_terms`, and for infinite rewards.

    >>> at_turn_ends([2.0, -1.0], [0, 2], [0, 0, 0, 0], [0, 0, 1, 1]).tolist()
    [0.0, 2.0, 0.0, -1.0]
    """
    reward = arrays.real(turn_rewards, "turn_rewards")
    offsets = _offsets(cu_turns, reward)
    refuse_infinite(reward)
    row = _turn_rows(offsets, trace, turn)
    out = np.where(np.isnan(reward[row]), np.nan, 0.0)
    order = np.argsort(row, kind="stable")
    given = np.flatnonzero(~np.isnan(reward))
    upto = np.searchsorted(row[order], given, side="right")
    before = np.searchsorted(row[order], np.repeat(offsets[:-1], np.diff(offsets))[given])
    there = upto > before  # the trace has a term in this turn or an earlier one
    term = order[upto[there] - 1]
    hit = np.bincount(term, minlength=len(row)) > 0
    return np.where(hit, np.bincount(term, reward[given][there], len(row)), out)


def _offsets(cu_turns: ArrayLike, values: Floats) -> NDArray[np.int64]:
    cu = arrays.integers(cu_turns, "cu_turns")
    rises = cu.ndim == 1 and len(cu) > 0 and cu[0] == 0 and bool((np.diff(cu) >= 0).all())
    if not rises or values.shape != (cu[-1],):
        raise ArgumentError(
            f"cu_turns is {cu.reshape(-1)[:6].tolist()}... for values of shape {values.shape}. It says which turns are "
            "of which trace. Pass offsets that rise from 0 to the number of turns."
        )
    return cu


def _turn_rows(offsets: NDArray[np.int64], trace: ArrayLike, turn: ArrayLike) -> NDArray[np.int64]:
    """[M]: which of all turns each term is of."""
    owner, number = rows(trace, len(offsets) - 1), arrays.integers(turn, "turn")
    if number.shape != owner.shape:
        raise ArgumentError(
            f"turn has shape {number.shape} for {len(owner)} terms. Each term is of one turn. Pass one number per term."
        )
    bad = np.flatnonzero((number < 0) | (number >= np.diff(offsets)[owner]))
    if len(bad):
        raise ArgumentError(
            f"term {bad[0]} is of turn {number[bad[0]]}, which its trace {owner[bad[0]]} does not have. Its reward is "
            "not known. Pass the turn of each term as `Sequences.turn` has it, from 0."
        )
    return offsets[owner] + number
