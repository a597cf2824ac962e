"""Compute advantages from one reward per trace: group means, RLOO, OPO, MaxRL and their scalings.

Groups are ragged and summed with `np.bincount`. An advantage is divided by the standard deviation of its group, of the
batch, or not at all.
"""

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from tracegrad import _validation
from tracegrad.errors import ArgumentError

Singleton = Literal["error", "zero", "keep"]
Floats = NDArray[np.float64]


@dataclass(frozen=True)
class GroupCounts:
    """Counts of the groups of a batch, and of those without any gradient.

    Args:
        traces: number of traces.
        unscorable: traces whose reward is NaN; they are outside baselines and have advantage 0.
        groups: groups with a scorable trace.
        singletons: groups with exactly one scorable trace.
        equal: groups of two or more whose rewards are all the same, so that all advantages are 0. Divided by `groups`
            this is TRL's `frac_reward_zero_std`.
        singleton_ids: ids of the singletons.
        equal_ids: ids of the equal groups.
        equal_rewards: the reward of each equal group; it distinguishes "all solved" from "none solved".
        unscorable_ids: ids of groups without any scorable trace.

    >>> counts = group_counts([1.0, 1.0, 0.0, 1.0], ["easy", "easy", "hard", "hard"])
    >>> # Both traces of "easy" have the same reward.
    >>> counts.groups, counts.equal, counts.equal_ids
    (2, 1, ('easy',))
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
    """Count groups of one, groups without variance, and traces without a score.

    Args:
        rewards: [R], NaN if a trace could not be scored.
        groups: [R] ids.

    Raises:
        ArgumentError: for infinite rewards or lengths that differ.

    >>> found = group_counts([1.0, 1.0, 0.0, float("nan")], [7, 7, 9, 9])
    >>> found
    GroupCounts(traces=4, unscorable=1, groups=2, singletons=1, equal=1)
    >>> found.equal_ids, found.equal_rewards, found.singleton_ids
    ((7,), (1.0,), (9,))
    """
    group = GroupedRewards.of(rewards, groups)
    alone = group.count == 1
    return GroupCounts(
        traces=len(group.reward),
        unscorable=int((~group.scored).sum()),
        groups=int((group.count > 0).sum()),
        singletons=int(alone.sum()),
        equal=int(group.equal.sum()),
        singleton_ids=tuple(group.names[alone].tolist()),
        equal_ids=tuple(group.names[group.equal].tolist()),
        equal_rewards=tuple(group.extent[1][group.equal].tolist()),
        unscorable_ids=tuple(group.names[group.count == 0].tolist()),
    )


@dataclass(frozen=True)
class GroupedRewards:
    """Rewards with the groups of their traces.

    Args:
        reward: [R] float64, 0 if unknown.
        scored: [R] bool.
        index: [R], row of each trace's group in `names`.
        names: [G] ids.
        count: [G] number of known rewards.
    """

    reward: Floats
    scored: NDArray[np.bool_]
    index: NDArray[np.intp]
    names: NDArray[Any]
    count: NDArray[np.intp]

    @classmethod
    def of(cls, rewards: ArrayLike, groups: ArrayLike) -> "GroupedRewards":
        """Group [R] rewards, NaN if unknown, by [R] ids of any type that sorts."""
        reward, group = _validation.real(rewards, "rewards"), _validation.labels(groups, "groups")
        if reward.ndim != 1 or group.shape != reward.shape:
            raise ArgumentError(
                f"TG-ADV-007: rewards are {reward.shape} and groups {group.shape}. Each trace is compared with its own "
                "group. Pass one of each per trace, both flat."
            )
        refuse_infinite(reward)
        names, index = np.unique(group, return_inverse=True)
        index, known = index.reshape(-1), ~np.isnan(reward)
        return cls(np.where(known, reward, 0.0), known, index, names, np.bincount(index[known], minlength=len(names)))

    def sum(self, values: Floats) -> Floats:
        """Return [G]: [R] values summed over the known rewards of each group."""
        return np.bincount(self.index, np.where(self.scored, values, 0.0), len(self.names)).astype(np.float64)

    @cached_property
    def mean(self) -> Floats:
        """[G] mean of the known rewards, 0 if there are none."""
        return self.sum(self.reward) / np.maximum(self.count, 1)

    @cached_property
    def extent(self) -> tuple[Floats, Floats]:
        """[G] lowest and highest known reward; infinities if there are none."""
        low, high = np.full(len(self.names), np.inf), np.full(len(self.names), -np.inf)
        np.minimum.at(low, self.index[self.scored], self.reward[self.scored])
        np.maximum.at(high, self.index[self.scored], self.reward[self.scored])
        return low, high

    @property
    def equal(self) -> NDArray[np.bool_]:
        """[G] bool: two or more known rewards, all the same."""
        low, high = self.extent
        return (self.count > 1) & (low == high)

    @property
    def is_singleton(self) -> NDArray[np.bool_]:
        """[R] bool: the only known reward of its group."""
        return (self.count == 1)[self.index] & self.scored

    def finalize(self, advantage: Floats, single_sample_group: str) -> Floats:
        """Return [R] float64: the advantages with their special cases applied.

        They are 0 for unknown rewards and exactly 0 in equal groups. `single_sample_group` decides those of a group
        of one.
        """
        if not isinstance(single_sample_group, str) or single_sample_group not in ("error", "zero", "keep"):
            raise ArgumentError(
                f"TG-ADV-008: single_sample_group is {_validation.describe(single_sample_group)}. It must "
                "be 'error', 'zero' or 'keep'."
            )
        alone = self.is_singleton
        if single_sample_group == "error" and alone.any():
            first = int(np.flatnonzero(alone)[0])
            raise ArgumentError(
                f"TG-ADV-009: trace {first}: group {self.names[self.index[first]]!s} has one scorable trace; there are "
                f"{int(alone.sum())} such groups. A baseline needs two. Pass single_sample_group='zero' or 'keep', or "
                "use batch_mean for one sample a prompt."
            )
        result = np.where(self.equal[self.index] | ~self.scored, 0.0, advantage)
        return np.where(alone, self.reward if single_sample_group == "keep" else 0.0, result)


def refuse_infinite(reward: Floats) -> None:
    """Raise ArgumentError for an infinite reward, naming the first."""
    bad = np.flatnonzero(np.isinf(reward))
    if len(bad):
        raise ArgumentError(
            f"TG-ADV-010: trace {bad[0]}: the reward is {reward[bad[0]]}. All advantages of its group would be "
            "infinite. "
            "Pass NaN for a trace that could not be scored."
        )


Scale = Literal["none", "std", "batch_std"]
EpsIn = Literal["variance", "deviation"]

_EPS = 1e-4


def check_scale(scale: str, ddof: int | None, eps: float | None) -> float:
    """Return the eps to use.

    Raises:
        ArgumentError: for an unknown scale, a ddof that is missing, or a ddof or eps without effect.
    """
    if not isinstance(scale, str) or scale not in ("none", "std", "batch_std"):
        raise ArgumentError(
            f"TG-ADV-011: scale is {_validation.describe(scale)}. It is the divisor of the advantages. "
            "It must be 'none' or 'std' (of the group) or 'batch_std'."
        )
    if scale == "none" and (ddof is not None or eps is not None):
        raise ArgumentError(
            "TG-ADV-012: ddof and eps have no effect with scale='none': nothing is divided. "
            "Omit them, or pass scale='std'."
        )
    if scale != "none":
        check_ddof(ddof, f"scale={scale!r}")
    return _EPS if eps is None else eps


def check_ddof(ddof: int | None, where: str) -> None:
    """Raise ArgumentError unless ddof is 0 or 1."""
    if ddof not in (0, 1):
        raise ArgumentError(
            f"TG-ADV-013: ddof is {ddof} with {where}. Peers differ here, by a factor of sqrt(n / (n - 1)): "
            "pass 1 (TRL, verl, SkyRL) or 0 (ART)."
        )


def divide_by_std(advantage: Floats, group: GroupedRewards, scale: str, ddof: int | None, eps: float) -> Floats:
    """Return [R] float64: advantage / (deviation of the rewards + eps); a group of one has deviation 1."""
    if scale == "none":
        return advantage
    assert ddof is not None
    if scale == "batch_std":
        spread = np.full(len(group.names), _deviation(group.reward[group.scored], ddof))
    else:
        square = group.sum((group.reward - group.mean[group.index]) ** 2)
        spread = np.where(group.count == 1, 1.0, np.sqrt(square / np.maximum(group.count - ddof, 1)))
    return safe_divide(advantage, (spread + eps)[group.index])


def whiten(values: ArrayLike, *, ddof: int, eps: float, eps_in: EpsIn) -> NDArray[np.float32]:
    """Return all values minus their mean, divided by their deviation.

    Over traces this is a batch normalisation. Over tokens (`advantages[trace]`) a trace counts once per token, as in
    verl's and SkyRL's `masked_whiten`. NaN is left out and becomes 0. If all values are equal, all results are 0.

    Args:
        values: [R] or [M].
        ddof: 1 divides the squares by n - 1, 0 by n.
        eps: keeps the quotient finite.
        eps_in: "variance": (x - mean) / sqrt(variance + eps), verl and SkyRL with 1e-8; "deviation": (x - mean) /
            (deviation + eps), TRL with 1e-4.

    Returns:
        float32, in the shape of `values`.

    Raises:
        ArgumentError: if only one value is not NaN, because its deviation is not defined; for infinities.

    >>> whiten([3.0, 1.0, float("nan")], ddof=0, eps=0.0, eps_in="variance").tolist()
    [1.0, -1.0, 0.0]
    """
    return whiten_float64(_validation.real(values, "values"), ddof, eps, eps_in).astype(np.float32)


def whiten_float64(values: Floats, ddof: int, eps: float, eps_in: str) -> Floats:
    """Return `whiten` in float64."""
    if eps_in not in ("variance", "deviation"):
        raise ArgumentError(
            f"TG-ADV-014: eps_in is {eps_in!r}. Peers add eps at different places. "
            "It must be 'variance' (verl, SkyRL) or 'deviation' (TRL)."
        )
    check_ddof(ddof, "whiten")
    known = ~np.isnan(values)
    present = values[known]
    if len(present) == 1 or np.isinf(present).any():
        raise ArgumentError(
            f"TG-ADV-015: {len(present)} of {values.size} values are not NaN, and {int(np.isinf(present).sum())} are "
            "infinite. Their deviation is not defined. Whiten two or more finite values."
        )
    if not len(present) or present.min() == present.max():
        return np.zeros_like(values)
    spread = _deviation(present, ddof)
    spread = np.sqrt(spread**2 + eps) if eps_in == "variance" else spread + eps
    return np.where(known, (values - present.mean()) / spread, 0.0)


def divide_by_mean_abs(
    advantages: ArrayLike, *, weights: ArrayLike | None = None, balance: float = 0.0
) -> NDArray[np.float32]:
    """Divide advantages of tokens by their mean size, so that a learning rate has the same effect for any spread of
    rewards.

    Args:
        advantages: [M] of all tokens of a batch.
        weights: [M] weight of each token in the mean, which is divided by the sum of the weights; None means equal
            weights.
        balance: from 0 to 1 first removes that share of negative advantages, from 0 to -1 of positive ones.

    Returns:
        [M] float32; all 0 if all advantages are 0.

    Raises:
        ArgumentError: for values that are not finite, weights below 0, shapes that differ, a balance beyond 1.

    Source: ART's packing of tensors, with its weights of 1 / length and its advantage_balance.

    >>> divide_by_mean_abs([3.0, -1.0]).tolist(), divide_by_mean_abs([3.0, -1.0], balance=1.0).tolist()
    ([1.5, -0.5], [2.0, 0.0])
    """
    if not -1 <= balance <= 1:
        raise ArgumentError(
            f"TG-ADV-016: balance is {balance}. One sign cannot be reduced by more than all of it. Pass -1 to 1."
        )
    value = _validation.real(advantages, "advantages")
    weight = np.ones_like(value) if weights is None else _validation.real(weights, "weights")
    if weight.shape != value.shape or not np.isfinite(value + weight).all() or (weight < 0).any():
        raise ArgumentError(
            f"TG-ADV-017: advantages have shape {value.shape} and weights {weight.shape}; a value may not be finite, "
            "or a weight is below 0. Their mean size would mean nothing. Pass one of each for every token."
        )
    factor = np.where(value > 0, 1 + min(balance, 0.0), 1 - max(balance, 0.0))
    value = value * factor + 0.0
    size = float((np.abs(value) * weight).sum())
    return (value * weight.sum() / size if size > 0 else value * 0.0).astype(np.float32)


def safe_divide(numerator: Floats, denominator: Floats) -> Floats:
    """Return the quotient, 0 if the denominator is not above 0."""
    return np.divide(numerator, denominator, out=np.zeros_like(numerator), where=denominator > 0)


def _deviation(values: Floats, ddof: int) -> float:
    if not len(values):
        return 0.0
    return float(np.sqrt(((values - values.mean()) ** 2).sum() / max(len(values) - ddof, 1)))


NonzeroOf = Literal["rewards", "advantages"]


def group_mean(
    rewards: ArrayLike,
    groups: ArrayLike,
    *,
    scale: Scale = "none",
    ddof: int | None = None,
    eps: float | None = None,
    single_sample_group: Singleton = "error",
) -> NDArray[np.float32]:
    """Return reward minus the mean of its group; with a scale divided by (standard deviation + eps).

    Groups are defined by id and may differ in size. If all rewards of a group are equal, its advantages are exactly 0.

    Args:
        rewards: [R], NaN if a trace could not be scored: it is outside the baseline and has advantage 0.
        groups: [R] ids, of any type that sorts.
        scale: "none" (Dr. GRPO), "std" of the group (GRPO), or "batch_std" of all rewards (TRL's
            scale_rewards="batch").
        ddof: required with a scale: 1 divides by n - 1 (TRL, verl, SkyRL), 0 by n (ART).
        eps: with a scale, added to the standard deviation; default 1e-4 (TRL). verl, SkyRL and ART use 1e-6.
        single_sample_group: a group with one scorable trace has no baseline: "error" raises, "zero" sets its advantage
            to 0, "keep" uses its reward (divided by 1 + eps with "std", as verl's grpo does).

    Returns:
        [R] float32.

    Raises:
        ArgumentError: for a group of one under "error", infinite rewards, lengths that differ, ddof missing or without
            effect.

    Source: Shao et al. 2024, arXiv 2402.03300, section 4.1; scale="none": Liu et al. 2025, arXiv 2503.20783.

    >>> group_mean([1.0, 0.0, 0.0, 5.0, 5.0], [7, 7, 7, 9, 9]).round(3).tolist()
    [0.6669999957084656, -0.3330000042915344, -0.3330000042915344, 0.0, 0.0]
    """
    return group_mean_float64(GroupedRewards.of(rewards, groups), scale, ddof, eps, single_sample_group).astype(
        np.float32
    )


def group_mean_float64(
    group: GroupedRewards, scale: str, ddof: int | None, eps: float | None, single_sample_group: str
) -> Floats:
    """Return `group_mean` in float64, for further computation."""
    eps_ = check_scale(scale, ddof, eps)
    advantage = group.finalize(group.reward - group.mean[group.index], single_sample_group)
    return divide_by_std(advantage, group, scale, ddof, eps_)


def batch_mean(
    rewards: ArrayLike,
    *,
    scale: Literal["none", "std"] = "none",
    ddof: int | None = None,
    eps: float | None = None,
    single_sample_group: Singleton = "error",
) -> NDArray[np.float32]:
    """Return reward minus the mean of the batch, for logs with one sample per prompt; otherwise as `group_mean`.

    The baseline then includes the difference between easy and hard prompts. The variance is larger, and the bias is
    negligible in a large batch.

    >>> batch_mean([1.0, 0.0, 0.0, 1.0]).tolist()
    [0.5, -0.5, -0.5, 0.5]
    """
    reward = _validation.real(rewards, "rewards")
    groups = np.zeros(len(np.atleast_1d(reward)), np.int64)
    return group_mean(reward, groups, scale=scale, ddof=ddof, eps=eps, single_sample_group=single_sample_group)


def rloo(rewards: ArrayLike, groups: ArrayLike, *, single_sample_group: Singleton = "error") -> NDArray[np.float32]:
    """Return reward minus the mean of the others in its group: (r - mean) * n / (n - 1).

    Args:
        rewards: [R], NaN if a trace could not be scored.
        groups: [R] ids.
        single_sample_group: peers differ: "keep" is verl's rloo, "zero" its rloo_vectorized, SkyRL's and TRL's.

    Returns:
        [R] float32.

    Raises:
        ArgumentError: for a group of one under "error", infinite rewards, lengths that differ.

    Source: Kool et al. 2019 (openreview r1lgTGL5DE); Ahmadian et al. 2024, arXiv 2402.14740.

    >>> rloo([3.0, 0.0, 0.0, 4.0], [0, 0, 0, 1], single_sample_group="keep").tolist()
    [3.0, -1.5, -1.5, 4.0]
    """
    group = GroupedRewards.of(rewards, groups)
    others = (group.count / np.maximum(group.count - 1, 1))[group.index]
    return group.finalize((group.reward - group.mean[group.index]) * others, single_sample_group).astype(np.float32)


def opo(
    rewards: ArrayLike, lengths: ArrayLike, groups: ArrayLike, *, single_sample_group: Singleton = "error"
) -> NDArray[np.float32]:
    """Return reward minus the length-weighted mean of its group, sum(l * r) / sum(l).

    This is the baseline of least variance if the squared norm of a trace's gradient grows with its length.

    Args:
        rewards: [R], NaN if a trace could not be scored.
        lengths: [R] trained tokens of each trace, not negative. If the scorable traces of a group have no tokens at
            all,
            their advantage is 0: there is nothing to train (verl: NaN).
        groups: [R] ids.
        single_sample_group: verl keeps the reward.

    Returns:
        [R] float32.

    Raises:
        ArgumentError: for a group of one under "error", infinite rewards, negative lengths, shapes that differ.

    Source: Hao et al. 2025, arXiv 2505.23585.

    >>> opo([1.0, 0.0], [1, 3], [0, 0]).tolist()
    [0.75, -0.25]
    """
    group, length = GroupedRewards.of(rewards, groups), _validation.real(lengths, "lengths")
    if length.shape != group.reward.shape or not (length >= 0).all():
        raise ArgumentError(
            f"TG-ADV-018: lengths have shape {length.shape} for {len(group.reward)} traces, the least is "
            f"{length.min() if length.size else None}. They weigh the baseline. Pass how many tokens each trace has."
        )
    total_length = group.sum(length)
    baseline = safe_divide(group.sum(length * group.reward), total_length)
    advantage = np.where((total_length > 0)[group.index], group.reward - baseline[group.index], 0.0)
    return group.finalize(advantage, single_sample_group).astype(np.float32)


def gpg(
    rewards: ArrayLike, groups: ArrayLike, *, nonzero: NonzeroOf, single_sample_group: Singleton = "error"
) -> NDArray[np.float32]:
    """Return alpha * (reward - mean of its group), with alpha = scorable traces / those that are not zero.

    Alpha compensates for the traces of a batch that have no gradient.

    Args:
        rewards: [R], NaN if a trace could not be scored.
        groups: [R] ids.
        nonzero: what is counted: "advantages" (a trace with advantage 0 has no gradient), or "rewards", as verl does:
            there a failed trace counts as one without gradient, and adding 1 to all rewards changes alpha.
        single_sample_group: verl keeps alpha * reward.

    Returns:
        [R] float32.

    Raises:
        ArgumentError: for a group of one under "error", infinite rewards, lengths that differ.

    Source: Chu et al. 2025, arXiv 2504.02546.

    >>> gpg([1.0, 0.0, 1.0, 1.0], [0, 0, 1, 1], nonzero="advantages").tolist()
    [1.0, -1.0, 0.0, 0.0]
    """
    if nonzero not in ("rewards", "advantages"):
        raise ArgumentError(
            f"TG-ADV-019: nonzero is {nonzero!r}. It selects the zeros that alpha compensates for. It must be "
            "'rewards' "
            f"or 'advantages'."
        )
    group = GroupedRewards.of(rewards, groups)
    advantage = group_mean_float64(group, "none", None, None, single_sample_group)
    counted = np.count_nonzero(group.reward if nonzero == "rewards" else advantage)
    return (advantage * int(group.scored.sum()) / max(counted, 1)).astype(np.float32)


def max_rl(
    rewards: ArrayLike, groups: ArrayLike, *, eps: float = 0.0, single_sample_group: Singleton = "error"
) -> NDArray[np.float32]:
    """Return (reward - mean) / (mean + eps) of its group, 0 if the mean is not above 0.

    For rewards that are not negative, in particular 0 or 1: a group is weighted by the inverse of the share that solved
    it.

    Args:
        rewards: [R], NaN if a trace could not be scored.
        groups: [R] ids.
        eps: 0 in prime-rl; 1e-6 in SkyRL.
        single_sample_group: SkyRL keeps the reward.

    Returns:
        [R] float32.

    Raises:
        ArgumentError: for a group of one under "error", infinite rewards, lengths that differ.

    Source: Maximum-likelihood RL, 2026, arXiv 2602.02710. SkyRL divides by a mean below 0 too, which flips the sign.

    >>> max_rl([1.0, 0.0, 0.0, 0.0], [0, 0, 0, 0]).tolist()
    [3.0, -1.0, -1.0, -1.0]
    """
    group = GroupedRewards.of(rewards, groups)
    denominator = np.where(group.mean > 0, group.mean + eps, 0.0)[group.index]
    return group.finalize(safe_divide(group.reward - group.mean[group.index], denominator), single_sample_group).astype(
        np.float32
    )


def pass_at_k(
    rewards: ArrayLike,
    groups: ArrayLike,
    *,
    scale: Scale = "none",
    ddof: int | None = None,
    eps: float | None = None,
    single_sample_group: Singleton = "error",
) -> NDArray[np.float32]:
    """Return the lead of the best trace of a group over the second best; all other traces have 0.

    This is what one more sample adds to the best of k: only the trace that sets the maximum is credited. Arguments as
    in `group_mean`; verl uses scale="std", ddof 1, eps 1e-6 by default, and refuses a group of one.

    Returns:
        [R] float32.

    Raises:
        ArgumentError: as `group_mean`.

    Source: Tang et al. 2025, arXiv 2503.19595.

    >>> pass_at_k([0.25, 1.0, 0.5], [0, 0, 0]).tolist()
    [0.0, 0.5, 0.0]
    """
    group, eps_ = GroupedRewards.of(rewards, groups), check_scale(scale, ddof, eps)
    known = np.flatnonzero(group.scored)
    order = known[np.lexsort((group.reward[known], group.index[known]))]
    last = np.cumsum(group.count)[group.count > 1] - 1
    lead = np.zeros_like(group.reward)
    lead[order[last]] = group.reward[order[last]] - group.reward[order[last - 1]]
    return divide_by_std(group.finalize(lead, single_sample_group), group, scale, ddof, eps_).astype(np.float32)


def a_star(
    rewards: ArrayLike, groups: ArrayLike, *, beta: float, single_sample_group: Singleton = "error"
) -> NDArray[np.float32]:
    """Return reward minus V*, where V* = beta * log(mean over the group of exp(reward / beta)).

    V* is the value of the best policy that stays within KL of the one that sampled; OAPL and A*-PO regress on it. It is
    between the mean (large beta) and the maximum (small beta) of the group.

    Args:
        rewards: [R], NaN if a trace could not be scored.
        groups: [R] ids.
        beta: above 0; TRL's A2PO has beta1 0.5.
        single_sample_group: for one sample V* is its own reward, so it carries no information.

    Returns:
        [R] float32.

    Raises:
        ArgumentError: for beta not above 0, a group of one under "error", infinite rewards, lengths that differ.

    Source: A*-PO, 2025, arXiv 2505.20686; OAPL, 2026, arXiv 2602.19362.

    >>> a_star([1.0, 1.0, 0.0, 0.0], [0, 0, 1, 1], beta=0.5).tolist()
    [0.0, 0.0, 0.0, 0.0]
    >>> a_star([1.0, 0.0], [0, 0], beta=1000.0).round(3).tolist()
    [0.5, -0.5]
    """
    if not 0 < beta < np.inf:
        raise ArgumentError(
            f"TG-ADV-020: beta is {beta}. V* is a mean of exp(reward / beta). Pass a number above 0, such as 0.5."
        )
    group = GroupedRewards.of(rewards, groups)
    highest = np.where(group.count > 0, group.extent[1], 0.0)
    mean = group.sum(
        np.exp((group.reward - highest[group.index]) / beta, where=group.scored, out=np.zeros_like(group.reward))
    )
    value = highest + beta * np.log(np.where(group.count > 0, mean, 1.0) / np.maximum(group.count, 1))
    return group.finalize(group.reward - value[group.index], single_sample_group).astype(np.float32)
