"""Compute advantages per token or turn: GAE, REINFORCE++, ReMax, turn-level credit, the optimal token baseline."""

from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from tracegrad import _validation
from tracegrad.advantage.outcome import (
    Floats,
    GroupedRewards,
    Singleton,
    group_mean_float64,
    refuse_infinite,
    safe_divide,
    whiten_float64,
)
from tracegrad.errors import ArgumentError


def discounted_sums(values: Floats, owner: NDArray[np.int64], gamma: float) -> Floats:
    """Return [M] S_t = v_t + gamma * S_(t+1) within each trace.

    Computed by doubling: after k rounds S_t covers 2**k tokens.
    """
    order = np.argsort(owner, kind="stable")
    ids, total = owner[order], values[order]
    longest = int(np.bincount(np.cumsum(np.diff(ids, prepend=ids[:1]) != 0)).max()) if len(ids) else 0
    reach = 1
    while reach < longest and gamma**reach:
        total[:-reach] += np.where(ids[reach:] == ids[:-reach], gamma**reach * total[reach:], 0.0)
        reach *= 2
    return _in_original_order(total, order)


def next_values(values: Floats, owner: NDArray[np.int64]) -> Floats:
    """Return [M] the value at the next token of the same trace, 0 after the last."""
    order = np.argsort(owner, kind="stable")
    ids, ordered = owner[order], values[order]
    after = np.zeros_like(ordered)
    after[:-1] = np.where(ids[1:] == ids[:-1], ordered[1:], 0.0)
    return _in_original_order(after, order)


def running_sums(values: Floats, owner: NDArray[np.int64]) -> Floats:
    """Return [M] the sum from the first token of the trace to this one."""
    return discounted_sums(values[::-1], owner[::-1], 1.0)[::-1]


def check_terms(trace: ArrayLike, **values: ArrayLike) -> tuple[Floats, NDArray[np.int64]]:
    """Check one [M] array and the [M] trace ids; return them as float64 and int64."""
    ((name, raw),) = values.items()
    array, owner = _validation.real(raw, name), _validation.numbers(trace, "trace")
    if array.ndim != 1 or owner.shape != array.shape or (owner.dtype.kind not in "iu" and owner.size):
        raise ArgumentError(
            f"TG-ADV-021: {name} have shape {array.shape}, trace has shape {owner.shape} of {owner.dtype}. Each token "
            "has one value and the number of its trace. Pass flat arrays of equal length, trace as integers."
        )
    bad = np.flatnonzero(np.isinf(array))
    if len(bad):
        raise ArgumentError(
            f"TG-ADV-022: token {bad[0]} of trace {owner[bad[0]]}: {name} is {array[bad[0]]}. Sums over the "
            "trace would be infinite. Pass NaN if the value is unknown."
        )
    return array, owner.astype(np.int64)


def check_rows(trace: ArrayLike, total: int) -> NDArray[np.int64]:
    """Return [M] rows of traces, checked against the number of traces."""
    owner = _validation.integers(trace, "trace")
    if len(owner) and not 0 <= owner.min() <= owner.max() < total:
        raise ArgumentError(
            f"TG-ADV-023: trace runs from {owner.min()} to {owner.max()}, of {total} traces. "
            "A token would have another trace's reward. Pass the row, from 0, of each token's trace."
        )
    return owner


def check_share(value: float, name: str) -> None:
    """Raise ArgumentError unless 0 <= value <= 1."""
    if not 0 <= value <= 1:
        raise ArgumentError(f"TG-ADV-024: {name} is {value}. It must be between 0 and 1.")


def _in_original_order(values: Floats, order: NDArray[np.intp]) -> Floats:
    out = np.empty_like(values)
    out[order] = values
    return out


_VARIANCE_EPS = 1e-8
"""As in verl's and SkyRL's `masked_whiten`."""


class Gae(NamedTuple):
    """Result of `gae`: advantages [M] float64, and returns [M] float64, the target of the value function.

    >>> result = gae([0.0, 1.0], [0.5, 0.25], [0, 0], gamma=1.0, lam=1.0)
    >>> result.returns.tolist()  # both tokens see the reward of 1 at the end
    [1.0, 1.0]
    >>> result.advantages.tolist()  # minus the values 0.5 and 0.25
    [0.5, 0.75]
    """

    advantages: Floats
    returns: Floats


def returns(rewards: ArrayLike, trace: ArrayLike, *, gamma: float) -> Floats:
    """Return the reward from each token to the end of its trace: G_t = r_t + gamma * G_(t+1).

    Args:
        rewards: [M], 0 if a token has none, NaN if unknown: that adds nothing.
        trace: [M] id of each token's trace.
        gamma: 0 to 1. At 1 an early token is credited with all later rewards, at 0 only with its own.

    Returns:
        [M] float64, NaN if no known reward is reached.

    Raises:
        ArgumentError: for gamma outside 0 to 1, infinite rewards, or shapes that differ.

    >>> returns([0.0, 0.0, 1.0, 5.0], [0, 0, 0, 1], gamma=0.5).tolist()
    [0.25, 0.5, 1.0, 5.0]
    """
    check_share(gamma, "gamma")
    reward, owner = check_terms(trace, rewards=rewards)
    known = ~np.isnan(reward)
    total = discounted_sums(np.where(known, reward, 0.0), owner, gamma)
    if known.all():
        return total
    return np.where(discounted_sums(known.astype(np.float64), owner, float(gamma > 0)) > 0, total, np.nan)


def reinforce_plus_plus(rewards: ArrayLike, trace: ArrayLike, *, gamma: float) -> NDArray[np.float32]:
    """Compute REINFORCE++: discounted returns, whitened over all tokens (deviation with n - 1, 1e-8 in the variance).

    Args: as `returns`.

    Returns:
        [M] float32; 0 if no reward is known.

    Raises:
        ArgumentError: as `returns` and `whiten`.

    Source: Hu 2025, arXiv 2501.03262. As verl. SkyRL ends a return at a gap in the mask, so that a reward after a tool
    result does not reach earlier turns.

    >>> reinforce_plus_plus([0.0, 1.0, 0.0, 0.0], [0, 0, 1, 1], gamma=1.0).round(3).tolist()
    [0.8659999966621399, 0.8659999966621399, -0.8659999966621399, -0.8659999966621399]
    """
    return whiten_float64(returns(rewards, trace, gamma=gamma), 1, _VARIANCE_EPS, "variance").astype(np.float32)


def reinforce_plus_plus_baseline(
    rewards: ArrayLike, groups: ArrayLike, trace: ArrayLike, *, single_sample_group: Singleton = "error"
) -> NDArray[np.float32]:
    """Compute REINFORCE++ with a baseline: reward minus the mean of its group, whitened over all tokens.

    Args:
        rewards: [R], NaN if a trace could not be scored: its tokens have 0, and are left out of mean and deviation.
        groups: [R] ids.
        trace: [M] row of each token's trace in `rewards`.
        single_sample_group: verl keeps the reward.

    Returns:
        [M] float32.

    Raises:
        ArgumentError: as `group_mean` and `whiten`.

    Source: Hu 2025, arXiv 2501.03262.

    >>> reinforce_plus_plus_baseline([3.0, 1.0], [0, 0], [0, 0, 1, 1]).round(3).tolist()
    [0.8659999966621399, 0.8659999966621399, -0.8659999966621399, -0.8659999966621399]
    """
    group = GroupedRewards.of(rewards, groups)
    advantage = np.where(group.scored, group_mean_float64(group, "none", None, None, single_sample_group), np.nan)
    return whiten_float64(advantage[check_rows(trace, len(advantage))], 1, _VARIANCE_EPS, "variance").astype(np.float32)


def remax(rewards: ArrayLike, greedy: ArrayLike, trace: ArrayLike) -> NDArray[np.float32]:
    """Return the undiscounted return of each token minus the reward of the greedy answer to the same prompt.

    Args:
        rewards: [M] per token, as in `returns`.
        greedy: [R] reward of the greedy answer to each trace's prompt, NaN if unknown.
        trace: [M] row of each token's trace in `greedy`.

    Returns:
        [M] float32; 0 if either is unknown.

    Raises:
        ArgumentError: as `returns`, and for rows that `greedy` does not have.

    Source: Li et al. 2023, arXiv 2310.10505.

    >>> remax([0.0, 1.0, 0.0], [0.25, 0.5], [0, 0, 1]).tolist()
    [0.75, 0.75, -0.5]
    """
    baseline = _validation.real(greedy, "greedy")
    refuse_infinite(baseline)
    advantages = returns(rewards, trace, gamma=1.0) - baseline[check_rows(trace, len(baseline))]
    return np.nan_to_num(advantages, nan=0.0).astype(np.float32)


def gae(rewards: ArrayLike, values: ArrayLike, trace: ArrayLike, *, gamma: float, lam: float) -> Gae:
    """Return generalised advantage estimates: A_t = d_t + gamma * lam * A_(t+1), d_t = r_t + gamma * V_(t+1) - V_t.

    V after the last token of a trace is 0. verl and SkyRL end with `whiten(found.advantages, ddof=1, eps=1e-8,
    eps_in="variance")`; the returns are not whitened.

    Args:
        rewards: [M], 0 if a token has none.
        values: [M] of the value function, at the state before each token.
        trace: [M] id of each token's trace.
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
    reward, owner = check_terms(trace, rewards=rewards)
    value, _ = check_terms(trace, values=values)
    bad = np.flatnonzero(np.isnan(reward + value))
    if len(bad):
        raise ArgumentError(
            f"TG-ADV-025: token {bad[0]}: reward {reward[bad[0]]}, value {value[bad[0]]}. Tokens before it would have "
            "no advantage. Pass 0 if a token has no reward, and leave out traces without a value."
        )
    advantages = discounted_sums(reward + gamma * next_values(value, owner) - value, owner, gamma * lam)
    return Gae(advantages, advantages + value)


Tail = Literal["keep", "zero"]


def optimal_token_baseline(
    rewards: ArrayLike,
    groups: ArrayLike,
    trace: ArrayLike,
    *,
    logprobs: ArrayLike,
    sum_pi_squared: ArrayLike,
    tail: Tail,
    weights: ArrayLike | None = None,
    position: ArrayLike | None = None,
    eps: float = 1e-8,
    single_sample_group: Singleton = "error",
) -> NDArray[np.float32]:
    """Return G_t - B_t, with B_t = sum(G_t * W_t) / (sum(W_t) + eps) over the traces of the group with a token at step
    t.

    G_t is the undiscounted return. W_t sums w_j = 1 - 2 * p_j + sum_v p_v**2 over the tokens up to t. That is the
    squared norm of the gradient of the logprob with respect to the logits, so B_t is the baseline of least variance.

    Args:
        rewards: [M] per token, 0 if a token has none; a trace with a NaN is unscorable.
        groups: [R] ids.
        trace: [M] row of each token's trace in `groups`.
        logprobs: [M] nats, of the policy being trained, at the time of sampling.
        sum_pi_squared: [M] sum over the vocabulary of p squared.
        tail: at a step that only one trace of a larger group reaches: "keep" the return (verl's handle_zero_tail=True),
            or "zero", because there is nothing to compare with (False).
        weights: [M] importance weights; w_j is multiplied by their square.
        position: [M] step of each token, rising within a trace; default its number among the tokens of the trace
            (verl's tir_optimal_token_baseline). Pass offsets within the response for verl's optimal_token_baseline.
        eps: added to the denominator.
        single_sample_group: for a group in which one scorable trace has tokens; verl keeps the return.

    Returns:
        [M] float32.

    Raises:
        ArgumentError: for values that are not finite, steps that do not rise, a group of one under "error", shapes
            that contradict one another.

    Source: verl 0.9.1, `compute_optimal_token_baseline_advantage`; the baseline of least variance: Greensmith,
    Bartlett and Baxter 2004, JMLR 5, section 4.

    >>> sure = dict(logprobs=[-0.5, -0.5], sum_pi_squared=[0.5, 0.5])
    >>> optimal_token_baseline([1.0, 0.0], [0, 0], [0, 1], tail="keep", **sure).round(3).tolist()
    [0.5, -0.5]
    """
    if tail not in ("keep", "zero"):
        raise ArgumentError(
            f"TG-ADV-026: tail is {tail!r}. It decides how the last trace of a group is treated. It must be 'keep' or "
            "'zero'."
        )
    reward, owner = check_terms(trace, rewards=rewards)
    group = _validation.labels(groups, "groups")
    index = np.unique(group, return_inverse=True)[1].reshape(-1)
    check_rows(owner, len(index))
    known = ~np.isnan(reward)
    unscorable = np.isin(owner, owner[~known])
    total = np.where(unscorable, np.nan, discounted_sums(np.where(known, reward, 0.0), owner, 1.0))
    energy = running_sums(_energy(owner, logprobs, sum_pi_squared, weights), owner)
    step = _steps(owner, position)
    cells = GroupedRewards.of(total, index[owner] * (step.max(initial=0) + 1) + step)
    baseline = safe_divide(cells.sum(cells.reward * energy), cells.sum(energy) + eps)
    advantage = cells.finalize(cells.reward - baseline[cells.index], tail)
    return _with_lone_traces(advantage, total, owner, group, single_sample_group).astype(np.float32)


def _energy(owner: NDArray[np.int64], logprobs: ArrayLike, squares: ArrayLike, weights: ArrayLike | None) -> Floats:
    logprob, square = check_terms(owner, logprobs=logprobs)[0], check_terms(owner, sum_pi_squared=squares)[0]
    energy = 1.0 - 2.0 * np.exp(logprob) + square
    if weights is not None:
        energy = energy * check_terms(owner, weights=weights)[0] ** 2
    bad = np.flatnonzero(np.isnan(energy))
    if len(bad):
        raise ArgumentError(
            f"TG-ADV-027: token {bad[0]} of trace {owner[bad[0]]}: a logprob, sum_pi_squared or weight is NaN. All "
            "later steps of its group would have no baseline. Compute them for every token."
        )
    return energy


def _steps(owner: NDArray[np.int64], position: ArrayLike | None) -> NDArray[np.int64]:
    if position is None:
        return running_sums(np.ones(len(owner)), owner).astype(np.int64)
    step, order = _validation.integers(position, "position"), np.argsort(owner, kind="stable")
    if step.shape == owner.shape and step.min(initial=0) >= 0:
        bad = order[1:][(np.diff(owner[order]) == 0) & (np.diff(step[order]) <= 0)]
        if not len(bad):
            return step
        where = f"token {bad[0]} of trace {owner[bad[0]]}: the position {step[bad[0]]} does not rise"
    else:
        where = f"position has shape {step.shape} for {len(owner)} tokens, or is negative"
    raise ArgumentError(
        f"TG-ADV-028: {where}. Tokens would be compared at the wrong step. Pass the offset of each token within "
        f"its trace."
    )


def _with_lone_traces(
    advantage: Floats, total: Floats, owner: NDArray[np.int64], group: NDArray, single_sample_group: str
) -> Floats:
    """Return the advantages with groups of one handled as `single_sample_group` says.

    A group of one has a single scorable trace with tokens.
    """
    present, first = np.unique(owner, return_index=True)
    traces = GroupedRewards.of(total[first], group[present])
    traces.finalize(traces.reward, single_sample_group)
    lone = np.isin(owner, present[traces.is_singleton])
    return np.where(lone, total if single_sample_group == "keep" else 0.0, advantage)


def turn_returns(turn_rewards: ArrayLike, cu_turns: ArrayLike, *, gamma: float) -> Floats:
    """Return the return of each turn: its own reward plus gamma times the return of the next turn.

    gamma=0 credits a turn only with its own reward, gamma=1 with its own and all later ones. In between, a later turn
    counts less, by turns and not by tokens. `turns_to_terms` distributes the returns to the tokens.

    Subtract a baseline afterwards: one number for all turns of a trace, from the other traces of its group. It then
    does not depend on what the trace does. If you subtract a mean from each turn before the sum, a trace pays it once
    for each of its turns. The process supervision of DeepSeekMath does so (Shao et al. 2024, arXiv 2402.03300, section
    4.1.3). If traces choose their number of turns, the gradient is then biased towards fewer turns, or towards more if
    the mean is below 0 (verl#7244). A mean over the turns of the group has the same bias, because a longer trace counts
    more often in it.

    Args:
        turn_rewards: [K], NaN if a turn has none: it adds nothing.
        cu_turns: [R+1] offsets: trace r has turns cu_turns[r]:cu_turns[r+1].
        gamma: 0 to 1.

    Returns:
        [K] float64, NaN if no known reward is reached.

    Raises:
        ArgumentError: for gamma outside 0 to 1, infinite rewards, or offsets that do not rise from 0 to K.

    >>> turn_returns([1.0, 2.0, 4.0], [0, 2, 3], gamma=0.5).tolist()
    [2.0, 2.0, 4.0]

    Example with two traces of a group: one ends after a turn with reward 1, the other has two turns with rewards 1 and
    0. Both have a total of 1, so neither is better at the first turn, where they diverge: 0 and 0. If the mean of all
    three turns, 2/3, were subtracted first, the result would be 1/3 for the one that ended and 1/3 - 2/3 for the other.

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
    reward = _validation.real(turn_rewards, "turn_rewards")
    offsets = _offsets(cu_turns, reward)
    return returns(reward, np.repeat(np.arange(len(offsets) - 1), np.diff(offsets)), gamma=gamma)


def turns_to_terms(values: ArrayLike, cu_turns: ArrayLike, trace: ArrayLike, turn: ArrayLike) -> NDArray[np.float32]:
    """Return for every token the value of its turn, 0 if that is NaN.

    Args:
        values: [K], one per turn.
        cu_turns: [R+1] offsets.
        trace: [M] row of each token's trace.
        turn: [M] which turn of its trace each token is of.

    Returns:
        [M] float32.

    Raises:
        ArgumentError: for a turn that its trace does not have, or shapes that contradict one another.

    >>> turns_to_terms([2.0, -1.0, 4.0], [0, 2, 3], [0, 0, 0, 1], [0, 1, 1, 0]).tolist()
    [2.0, -1.0, -1.0, 4.0]
    """
    value = _validation.real(values, "values")
    return np.nan_to_num(value[_turn_rows(_offsets(cu_turns, value), trace, turn)], nan=0.0).astype(np.float32)


def at_turn_ends(turn_rewards: ArrayLike, cu_turns: ArrayLike, trace: ArrayLike, turn: ArrayLike) -> Floats:
    """Return per-token rewards with each turn's reward on its last token, for `returns`, `gae` and similar functions.

    A turn without tokens gives its reward to the last token before it. If there is no such token, the reward is
    dropped.

    Args: as `turns_to_terms`.

    Returns:
        [M] float64: 0 at the other tokens, NaN at those of a turn whose reward is NaN.

    Raises:
        ArgumentError: as `turns_to_terms`, and for infinite rewards.

    >>> at_turn_ends([2.0, -1.0], [0, 2], [0, 0, 0, 0], [0, 0, 1, 1]).tolist()
    [0.0, 2.0, 0.0, -1.0]
    """
    reward = _validation.real(turn_rewards, "turn_rewards")
    offsets = _offsets(cu_turns, reward)
    refuse_infinite(reward)
    row = _turn_rows(offsets, trace, turn)
    out = np.where(np.isnan(reward[row]), np.nan, 0.0)
    order = np.argsort(row, kind="stable")
    rewarded = np.flatnonzero(~np.isnan(reward))
    end = np.searchsorted(row[order], rewarded, side="right")
    before = np.searchsorted(row[order], np.repeat(offsets[:-1], np.diff(offsets))[rewarded])
    has_token = end > before  # the trace has a token in this turn or an earlier one
    token = order[end[has_token] - 1]
    hit = np.bincount(token, minlength=len(row)) > 0
    return np.where(hit, np.bincount(token, reward[rewarded][has_token], len(row)), out)


def _offsets(cu_turns: ArrayLike, values: Floats) -> NDArray[np.int64]:
    cu = _validation.integers(cu_turns, "cu_turns")
    rises = cu.ndim == 1 and len(cu) > 0 and cu[0] == 0 and bool((np.diff(cu) >= 0).all())
    if not rises or values.shape != (cu[-1],):
        raise ArgumentError(
            f"TG-ADV-029: cu_turns is {cu.reshape(-1)[:6].tolist()}... for values of shape {values.shape}. It "
            "assigns turns to traces. Pass offsets that rise from 0 to the number of turns."
        )
    return cu


def _turn_rows(offsets: NDArray[np.int64], trace: ArrayLike, turn: ArrayLike) -> NDArray[np.int64]:
    """Return [M]: the row of each token's turn among all turns."""
    owner, number = check_rows(trace, len(offsets) - 1), _validation.integers(turn, "turn")
    if number.shape != owner.shape:
        raise ArgumentError(
            f"TG-ADV-030: turn has shape {number.shape} for {len(owner)} tokens. Each token is of one turn. Pass "
            f"one number per token."
        )
    bad = np.flatnonzero((number < 0) | (number >= np.diff(offsets)[owner]))
    if len(bad):
        raise ArgumentError(
            f"TG-ADV-031: token {bad[0]} is of turn {number[bad[0]]}, which its trace {owner[bad[0]]} does not have. "
            "Pass the turn of each token as in `Sequences.turn`, from 0."
        )
    return offsets[owner] + number
