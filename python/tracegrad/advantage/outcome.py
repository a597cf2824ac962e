"""One reward per trace, one advantage per trace: what a reward says in comparison with its group's.

Each function is a baseline, a rule for the group of one, and a scale; the arithmetic is float64. Several rewards at
once are `several`, rewards within a trace `tokens` and `turns`. Called with the rewards and groups of `Sequences`, or
any two arrays.
"""

from typing import Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from tracegrad import arrays
from tracegrad.advantage.groups import Floats, Grouped, Singleton
from tracegrad.advantage.scale import Scale, check_scale, divided, scaled
from tracegrad.errors import ArgumentError

Counted = Literal["rewards", "advantages"]


def group_mean(
    rewards: ArrayLike,
    groups: ArrayLike,
    *,
    scale: Scale = "none",
    ddof: int | None = None,
    eps: float | None = None,
    singleton: Singleton = "refuse",
) -> NDArray[np.float32]:
    """Reward minus the mean of its group; with a scale divided by (standard deviation + eps).

    Groups are by id and may be ragged. Where all rewards of a group are equal, its advantages are exactly 0.

    Args:
        rewards: [R], NaN where a trace could not be scored: it stands outside the baseline and has advantage 0.
        groups: [R] ids, of any type that sorts.
        scale: "none" (Dr. GRPO), "std" of the group (GRPO), or "batch_std" of all rewards (TRL's
            scale_rewards="batch").
        ddof: required with a scale: 1 divides by n - 1 (TRL, verl, SkyRL), 0 by n (ART).
        eps: with a scale, added to the standard deviation; 1e-4 (TRL) by default, verl, SkyRL and ART have 1e-6.
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
    return centred(Grouped.of(rewards, groups), scale, ddof, eps, singleton).astype(np.float32)


def centred(group: Grouped, scale: str, ddof: int | None, eps: float | None, singleton: str) -> Floats:
    """`group_mean` in float64, for what is computed from it."""
    eps_ = check_scale(scale, ddof, eps)
    advantage = group.settle(group.reward - group.mean[group.index], singleton)
    return scaled(advantage, group, scale, ddof, eps_)


def batch_mean(
    rewards: ArrayLike,
    *,
    scale: Literal["none", "std"] = "none",
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
    reward = arrays.real(rewards, "rewards")
    groups = np.zeros(len(np.atleast_1d(reward)), np.int64)
    return group_mean(reward, groups, scale=scale, ddof=ddof, eps=eps, singleton=singleton)


def rloo(rewards: ArrayLike, groups: ArrayLike, *, singleton: Singleton = "refuse") -> NDArray[np.float32]:
    """Reward minus the mean of the others in its group: (r - mean) * n / (n - 1).

    Args:
        rewards: [R], NaN where a trace could not be scored.
        groups: [R] ids.
        singleton: peers differ: "keep" is verl's rloo, "zero" its rloo_vectorized, SkyRL's and TRL's.

    Returns:
        [R] float32.

    Raises:
        ArgumentError: for a group of one under "refuse", infinite rewards, lengths that differ.

    Source: Kool et al. 2019 (openreview r1lgTGL5DE); Ahmadian et al. 2024, arXiv 2402.14740.

    >>> rloo([3.0, 0.0, 0.0, 4.0], [0, 0, 0, 1], singleton="keep").tolist()
    [3.0, -1.5, -1.5, 4.0]
    """
    group = Grouped.of(rewards, groups)
    others = (group.count / np.maximum(group.count - 1, 1))[group.index]
    return group.settle((group.reward - group.mean[group.index]) * others, singleton).astype(np.float32)


def opo(
    rewards: ArrayLike, lengths: ArrayLike, groups: ArrayLike, *, singleton: Singleton = "refuse"
) -> NDArray[np.float32]:
    """Reward minus the length-weighted mean of its group, sum(l * r) / sum(l).

    The baseline of least variance where the squared norm of a trace's gradient grows with its length.

    Args:
        rewards: [R], NaN where a trace could not be scored.
        lengths: [R] trained terms of each trace, not negative. A group whose scorable traces have none in all has
            advantage 0: there is nothing to train (verl: NaN).
        groups: [R] ids.
        singleton: verl keeps the reward.

    Returns:
        [R] float32.

    Raises:
        ArgumentError: for a group of one under "refuse", infinite rewards, negative lengths, shapes that differ.

    Source: Hao et al. 2025, arXiv 2505.23585.

    >>> opo([1.0, 0.0], [1, 3], [0, 0]).tolist()
    [0.75, -0.25]
    """
    group, length = Grouped.of(rewards, groups), arrays.real(lengths, "lengths")
    if length.shape != group.reward.shape or not (length >= 0).all():
        raise ArgumentError(
            f"lengths have shape {length.shape} for {len(group.reward)} traces, the least is "
            f"{length.min() if length.size else None}. They weigh the baseline. Pass how many terms each trace has."
        )
    weight = group.sum(length)
    baseline = divided(group.sum(length * group.reward), weight)
    advantage = np.where((weight > 0)[group.index], group.reward - baseline[group.index], 0.0)
    return group.settle(advantage, singleton).astype(np.float32)


def gpg(
    rewards: ArrayLike, groups: ArrayLike, *, nonzero: Counted, singleton: Singleton = "refuse"
) -> NDArray[np.float32]:
    """alpha * (reward - mean of its group), where alpha = scorable traces / those that are not zero.

    Alpha makes up for the traces of a batch that carry no gradient.

    Args:
        rewards: [R], NaN where a trace could not be scored.
        groups: [R] ids.
        nonzero: what is counted: "advantages" (a trace without one carries no gradient), or "rewards", as verl does:
            there a failed trace counts as carrying none, and adding 1 to all rewards changes alpha.
        singleton: verl keeps alpha * reward.

    Returns:
        [R] float32.

    Raises:
        ArgumentError: for a group of one under "refuse", infinite rewards, lengths that differ.

    Source: Chu et al. 2025, arXiv 2504.02546.

    >>> gpg([1.0, 0.0, 1.0, 1.0], [0, 0, 1, 1], nonzero="advantages").tolist()
    [1.0, -1.0, 0.0, 0.0]
    """
    if nonzero not in ("rewards", "advantages"):
        raise ArgumentError(
            f"nonzero is {nonzero!r}. It says which zeros alpha makes up for. It must be 'rewards' or 'advantages'."
        )
    group = Grouped.of(rewards, groups)
    advantage = centred(group, "none", None, None, singleton)
    counted = np.count_nonzero(group.reward if nonzero == "rewards" else advantage)
    return (advantage * int(group.known.sum()) / max(counted, 1)).astype(np.float32)


def max_rl(
    rewards: ArrayLike, groups: ArrayLike, *, eps: float = 0.0, singleton: Singleton = "refuse"
) -> NDArray[np.float32]:
    """(reward - mean) / (mean + eps) of its group, 0 where the mean is not above 0.

    For rewards that are not negative, 0 or 1 above all: a group weighs as one over the share that solved it.

    Args:
        rewards: [R], NaN where a trace could not be scored.
        groups: [R] ids.
        eps: 0 in prime-rl; 1e-6 in SkyRL.
        singleton: SkyRL keeps the reward.

    Returns:
        [R] float32.

    Raises:
        ArgumentError: for a group of one under "refuse", infinite rewards, lengths that differ.

    Source: Maximum-likelihood RL, 2026, arXiv 2602.02710. SkyRL divides by a mean below 0 too, which turns the sign.

    >>> max_rl([1.0, 0.0, 0.0, 0.0], [0, 0, 0, 0]).tolist()
    [3.0, -1.0, -1.0, -1.0]
    """
    group = Grouped.of(rewards, groups)
    over = np.where(group.mean > 0, group.mean + eps, 0.0)[group.index]
    return group.settle(divided(group.reward - group.mean[group.index], over), singleton).astype(np.float32)


def pass_at_k(
    rewards: ArrayLike,
    groups: ArrayLike,
    *,
    scale: Scale = "none",
    ddof: int | None = None,
    eps: float | None = None,
    singleton: Singleton = "refuse",
) -> NDArray[np.float32]:
    """The best of a group has its lead over the second best, all others have 0.

    What one more sample adds to the best of k: only the trace that sets the maximum is credited. Arguments as
    `group_mean`; verl has scale="std", ddof 1, eps 1e-6 by default, and refuses a group of one.

    Returns:
        [R] float32.

    Raises:
        ArgumentError: as `group_mean`.

    Source: Tang et al. 2025, arXiv 2503.19595.

    >>> pass_at_k([0.25, 1.0, 0.5], [0, 0, 0]).tolist()
    [0.0, 0.5, 0.0]
    """
    group, eps_ = Grouped.of(rewards, groups), check_scale(scale, ddof, eps)
    known = np.flatnonzero(group.known)
    order = known[np.lexsort((group.reward[known], group.index[known]))]
    last = np.cumsum(group.count)[group.count > 1] - 1
    lead = np.zeros_like(group.reward)
    lead[order[last]] = group.reward[order[last]] - group.reward[order[last - 1]]
    return scaled(group.settle(lead, singleton), group, scale, ddof, eps_).astype(np.float32)


def a_star(
    rewards: ArrayLike, groups: ArrayLike, *, beta: float, singleton: Singleton = "refuse"
) -> NDArray[np.float32]:
    """Reward minus V*, where V* = beta * log(mean over the group of exp(reward / beta)).

    V* is the value of the best policy that stays within KL of the one that sampled; the target that OAPL and A*-PO
    regress on. It lies between the mean (large beta) and the maximum (small beta) of the group.

    Args:
        rewards: [R], NaN where a trace could not be scored.
        groups: [R] ids.
        beta: above 0; TRL's A2PO has beta1 0.5.
        singleton: of one sample V* is its reward, and says nothing.

    Returns:
        [R] float32.

    Raises:
        ArgumentError: for beta not above 0, a group of one under "refuse", infinite rewards, lengths that differ.

    Source: A*-PO, 2025, arXiv 2505.20686; OAPL, 2026, arXiv 2602.19362.

    >>> a_star([1.0, 1.0, 0.0, 0.0], [0, 0, 1, 1], beta=0.5).tolist()
    [0.0, 0.0, 0.0, 0.0]
    >>> a_star([1.0, 0.0], [0, 0], beta=1000.0).round(3).tolist()
    [0.5, -0.5]
    """
    if not 0 < beta < np.inf:
        raise ArgumentError(f"beta is {beta}. V* is a mean of exp(reward / beta). Pass a number above 0, such as 0.5.")
    group = Grouped.of(rewards, groups)
    top = np.where(group.count > 0, group.extent[1], 0.0)
    mean = group.sum(
        np.exp((group.reward - top[group.index]) / beta, where=group.known, out=np.zeros_like(group.reward))
    )
    value = top + beta * np.log(np.where(group.count > 0, mean, 1.0) / np.maximum(group.count, 1))
    return group.settle(group.reward - value[group.index], singleton).astype(np.float32)
