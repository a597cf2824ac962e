"""Rewards of single terms, and what each term is credited with.

A term is known by the id of its trace; terms of a trace are taken in the order given, which is the order of sampling.
Returns are float64, as what is computed from them is a difference; advantages are float32. No padded rows, no mask:
what is not a term is not here, so that a discount counts terms and a reward reaches over what stands between them.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from tracegrad import arrays
from tracegrad.advantage.groups import Floats, Grouped, Singleton, refuse_infinite
from tracegrad.advantage.outcome import centred
from tracegrad.advantage.runs import check_share, discounted, following, rows, terms
from tracegrad.advantage.scale import whitened
from tracegrad.errors import ArgumentError

_VARIANCE_EPS = 1e-8
"""verl's and SkyRL's `masked_whiten`."""


class Gae(NamedTuple):
    """What `gae` gives: advantages [M] float64 and returns [M] float64, the target of the value function."""

    advantages: Floats
    returns: Floats


def returns(rewards: ArrayLike, trace: ArrayLike, *, gamma: float) -> Floats:
    """What each term still gets: G_t = r_t + gamma * G_(t+1), to the end of its trace.

    Args:
        rewards: [M], 0 where a term has none, NaN where it is not known: that adds nothing.
        trace: [M] id of each term's trace.
        gamma: 0 to 1. At 1 an early term is credited with all that follows, at 0 with its own reward alone.

    Returns:
        [M] float64, NaN where no known reward is reached.

    Raises:
        ArgumentError: for gamma outside 0 to 1, infinite rewards, or shapes that differ.

    >>> returns([0.0, 0.0, 1.0, 5.0], [0, 0, 0, 1], gamma=0.5).tolist()
    [0.25, 0.5, 1.0, 5.0]
    """
    check_share(gamma, "gamma")
    reward, owner = terms(trace, rewards=rewards)
    known = ~np.isnan(reward)
    total = discounted(np.where(known, reward, 0.0), owner, gamma)
    if known.all():
        return total
    return np.where(discounted(known.astype(np.float64), owner, float(gamma > 0)) > 0, total, np.nan)


def reinforce_plus_plus(rewards: ArrayLike, trace: ArrayLike, *, gamma: float) -> NDArray[np.float32]:
    """REINFORCE++: discounted returns, whitened over all terms (deviation with n - 1, 1e-8 in the variance).

    Args: as `returns`.

    Returns:
        [M] float32; 0 where nothing is known.

    Raises:
        ArgumentError: as `returns` and `whiten`.

    Source: Hu 2025, arXiv 2501.03262. As verl; SkyRL ends a return at a hole in the mask, so that a reward after a tool
    result does not reach the turns before it.

    >>> reinforce_plus_plus([0.0, 1.0, 0.0, 0.0], [0, 0, 1, 1], gamma=1.0).round(3).tolist()
    [0.8659999966621399, 0.8659999966621399, -0.8659999966621399, -0.8659999966621399]
    """
    return whitened(returns(rewards, trace, gamma=gamma), 1, _VARIANCE_EPS, "variance").astype(np.float32)


def reinforce_plus_plus_baseline(
    rewards: ArrayLike, groups: ArrayLike, trace: ArrayLike, *, singleton: Singleton = "refuse"
) -> NDArray[np.float32]:
    """REINFORCE++ with a baseline: reward minus the mean of its group, whitened over all terms.

    Args:
        rewards: [R], NaN where a trace could not be scored: its terms have 0, and stand outside mean and deviation.
        groups: [R] ids.
        trace: [M] row of each term's trace in `rewards`.
        singleton: verl keeps the reward.

    Returns:
        [M] float32.

    Raises:
        ArgumentError: as `group_mean` and `whiten`.

    Source: Hu 2025, arXiv 2501.03262.

    >>> reinforce_plus_plus_baseline([3.0, 1.0], [0, 0], [0, 0, 1, 1]).round(3).tolist()
    [0.8659999966621399, 0.8659999966621399, -0.8659999966621399, -0.8659999966621399]
    """
    group = Grouped.of(rewards, groups)
    advantage = np.where(group.known, centred(group, "none", None, None, singleton), np.nan)
    return whitened(advantage[rows(trace, len(advantage))], 1, _VARIANCE_EPS, "variance").astype(np.float32)


def remax(rewards: ArrayLike, greedy: ArrayLike, trace: ArrayLike) -> NDArray[np.float32]:
    """What a term still gets, undiscounted, minus the reward of the greedy answer to the same prompt.

    Args:
        rewards: [M] per term, as `returns` takes them.
        greedy: [R] reward of the greedy answer to each trace's prompt, NaN where it is not known.
        trace: [M] row of each term's trace in `greedy`.

    Returns:
        [M] float32; 0 where either is not known.

    Raises:
        ArgumentError: as `returns`, and for rows that `greedy` does not have.

    Source: Li et al. 2023, arXiv 2310.10505.

    >>> remax([0.0, 1.0, 0.0], [0.25, 0.5], [0, 0, 1]).tolist()
    [0.75, 0.75, -0.5]
    """
    baseline = arrays.real(greedy, "greedy")
    refuse_infinite(baseline)
    advantages = returns(rewards, trace, gamma=1.0) - baseline[rows(trace, len(baseline))]
    return np.nan_to_num(advantages, nan=0.0).astype(np.float32)


def gae(rewards: ArrayLike, values: ArrayLike, trace: ArrayLike, *, gamma: float, lam: float) -> Gae:
    """Generalised advantage estimates: A_t = d_t + gamma * lam * A_(t+1), d_t = r_t + gamma * V_(t+1) - V_t.

    V after the last term of a trace is 0. verl and SkyRL end with `whiten(found.advantages, ddof=1, eps=1e-8,
    eps_in="variance")`; the returns are not whitened.

    Args:
        rewards: [M], 0 where a term has none.
        values: [M] of the value function, at the state before each term.
        trace: [M] id of each term's trace.
        gamma: 0 to 1.
        lam: 0 (one step) to 1 (returns minus values).

    Returns:
        Gae(advantages [M], returns [M]), float64.

    Raises:
        ArgumentError: for gamma or lam outside 0 to 1, values or rewards that are not finite, shapes that differ.

    Source: Schulman et al. 2016, arXiv 1506.02438, equation 16.

    >>> gae([0.0, 1.0], [0.5, 0.25], [0, 0], gamma=1.0, lam=0.0).advantages.tolist()
    [-0.25, 0.75]
    """
    check_share(gamma, "gamma")
    check_share(lam, "lam")
    reward, owner = terms(trace, rewards=rewards)
    value, _ = terms(trace, values=values)
    bad = np.flatnonzero(np.isnan(reward + value))
    if len(bad):
        raise ArgumentError(
            f"term {bad[0]}: reward {reward[bad[0]]}, value {value[bad[0]]}. Terms before it would have no advantage. "
            "Pass 0 where a term has no reward, and leave out traces without a value."
        )
    advantages = discounted(reward + gamma * following(value, owner) - value, owner, gamma * lam)
    return Gae(advantages, advantages + value)
