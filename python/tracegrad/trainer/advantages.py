"""Compute advantages from rewards as the configuration says, with KL in the reward if it is asked for."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from tracegrad import advantage
from tracegrad.advantage import AdaptiveKl, kl_in_reward
from tracegrad.alignment.sequences import Sequences
from tracegrad.config import Config, nearest, split_names
from tracegrad.errors import ArgumentError
from tracegrad.objective import Objective
from tracegrad.objective.objective import Needs
from tracegrad.trainer.dataset import Catalog, Source

TOTAL = "reward"
"""The name of a trace's total reward."""
_A_STAR = 0.5
"""The temperature of V* under advantage.baseline a_star: A*-PO's and TRL's."""


def reward_column(traces: Sequences | Catalog, name: str, weights: str = "") -> NDArray[np.float32]:
    """[R] float32: the rewards called `name`, of several names with commas the first that a trace has; for "" the first
    column, or the one that is known where that is not. With weights, the weighted sum of those of the names that a
    trace has.
    """
    if weights:
        return advantage.weighted_sum(*reward_table(traces, name, weights)).astype(np.float32)
    names = traces.reward_names
    wanted = [each for each in ([name] if name in names else split_names(name)) if each in names]
    if name and not wanted:
        raise ArgumentError(f"data.reward is {name!r}, and no trace has such a reward. {nearest(name, names)}")
    if not names or not np.isfinite(traces.rewards).any():
        raise ArgumentError(
            "no trace has a reward. Without one no trace is better than another. Say where the records hold it: "
            "--map.reward PATH; tracegrad doctor names what may be meant."
        )
    known = np.asarray(np.isfinite(traces.rewards).any(axis=0))
    columns = [names.index(each) for each in wanted] or [int(np.argmax(known))]
    if not name and not known[0] and known.sum() > 1:
        several = [each for each, is_known in zip(names, known, strict=True) if is_known]
        raise ArgumentError(
            f"no trace has a total reward, and {len(several)} have names: {', '.join(several[:8])}. Which of them is "
            f"trained on is not told. Say it: --data.reward {several[0]}."
        )
    told = traces.rewards[:, columns]
    return np.ascontiguousarray(told[np.arange(len(told)), np.isfinite(told).argmax(axis=1)])


def reward_table(traces: Sequences | Catalog, name: str, weights: str) -> tuple[NDArray[np.floating], list[float]]:
    """[R, K] the rewards that `name` lists, of an empty one all but the total, and the weight of each.

    Raises:
        ArgumentError: for a name that no trace has, or other than one finite weight for each.
    """
    known = traces.reward_names
    names = split_names(name) or [each for each in known if each != TOTAL]
    for each in names:
        if each not in known:
            raise ArgumentError(f"data.reward lists {each!r}, and no trace has such a reward. {nearest(each, known)}")
    try:
        numbers = [float(each) for each in split_names(weights)]
    except ValueError:
        numbers = []
    if len(numbers) != len(names) or not names or not np.isfinite(numbers).all():
        raise ArgumentError(
            f"data.reward_weights is {weights!r:.80}, and the rewards are {', '.join(names[:8]) or 'none by a name'}. "
            "What a trace is worth is not known. Give one finite number for each, with commas between."
        )
    return traces.rewards[:, [known.index(each) for each in names]], numbers


def compared(
    rewards: NDArray[np.floating], source: Source, used: NDArray[np.bool_], config: Config
) -> NDArray[np.float32]:
    """[used] float32: the advantages of the traces that are used, compared with one another."""
    options, reward, group = config.advantage, rewards[used], source.catalog.group[used]
    if options.baseline == "none":
        return np.nan_to_num(reward, nan=0.0)
    if options.singleton == "refuse" and options.baseline != "batch_mean":
        _refuse_lone(reward, group, source, used)
    if options.baseline == "rloo":
        return advantage.rloo(reward, group, singleton=options.singleton)
    if options.baseline == "max_rl":
        return advantage.max_rl(reward, group, singleton=options.singleton)
    if options.baseline == "a_star":
        return advantage.a_star(reward, group, beta=_A_STAR, singleton=options.singleton)
    if options.baseline == "opo":
        return advantage.opo(reward, source.catalog.terms[used].astype(np.int64), group, singleton=options.singleton)
    if options.several == "normalize_then_sum":
        table, weights = reward_table(source.catalog, config.data.reward, config.data.reward_weights)
        told = {"scale": "std", "ddof": options.ddof, "singleton": options.singleton}
        each = advantage.normalize_then_sum(table[used], group, weights=weights, **told)
        return advantage.whiten(each, ddof=options.ddof, eps=1e-4, eps_in="deviation")
    groups = np.zeros_like(group) if options.baseline == "batch_mean" else group
    ddof = None if options.scale == "none" else options.ddof
    return advantage.group_mean(reward, groups, scale=options.scale, ddof=ddof, singleton=options.singleton)


def _refuse_lone(
    reward: NDArray[np.floating], group: NDArray[np.int32], source: Source, used: NDArray[np.bool_]
) -> None:
    """Refuses groups of one trace with a reward, which have no baseline."""
    counts = advantage.group_counts(reward, group)
    if not counts.singletons:
        return
    alone = np.flatnonzero(np.isin(group, counts.singleton_ids) & np.isfinite(reward))
    first = source.trace_name(int(np.flatnonzero(used)[alone[0]]))
    all_alone = counts.singletons == counts.groups
    cure = (
        "Say what they share: --map.group PATH, or --map.group prompt."
        if all_alone
        else "Pass --advantage.singleton zero."
    )
    raise ArgumentError(
        f"trace '{first}' is alone in its group, as in {counts.singletons:,} of {counts.groups:,} groups. A baseline "
        f"needs two traces. {cure}"
    )


Floats = NDArray[np.float32]


def needs_of(objective: Objective, config: Config) -> Needs:
    """What a run measures: what its objective takes, and both policies where rewards pay for their divergence."""
    return replace(objective.needs, old=True, ref=True) if config.reward_kl.coef else objective.needs


@dataclass
class Charge:
    """The batch that is trained on, as it is charged.

    Args:
        source, rewards, config: of the feed.
        used: [R] bool: the traces that are compared with one another.

    Attributes:
        coef: what a nat costs in this batch, and `following`, in the next.
        kl: the batch's divergence, its mean over each trace and then over traces; NaN before the first.
        advantages: [R], of the traces of this batch.
    """

    source: Source
    rewards: Floats
    used: NDArray[np.bool_]
    config: Config
    coef: float = 0.0
    kl: float = float("nan")
    following: float = field(init=False)
    advantages: Floats = field(init=False)

    def __post_init__(self) -> None:
        self.following = self.config.reward_kl.coef
        self.advantages = np.zeros(len(self.rewards), np.float32)

    def batch(self, traces: int, trace: NDArray[np.integer], old: Floats, ref: Floats) -> None:
        """Charges and compares the traces of a batch, which ranks share.

        Args:
            traces: how many count in its steps.
            trace, old, ref: [m] of the terms of all its traces, of every rank, ascending: trace and logprobs.
        """
        options, group = self.config.reward_kl, self.source.catalog.group
        self.coef = self.following
        how = {"coef": self.coef, "kind": options.kind, "cap": options.cap or None}
        charged = kl_in_reward(self.rewards, old, ref, trace, **how)
        here = self.used & np.isin(group, group[trace])
        self.advantages[:] = 0
        self.advantages[here] = compared(charged.rewards, self.source, here, self.config)
        self.kl = charged.kl * len(np.unique(trace)) / max(traces, 1)
        if options.target:
            after = AdaptiveKl(self.coef, options.target, options.horizon).after(self.kl, traces)
            self.following = max(after.coef, 0.0)

    def row(self) -> dict[str, float]:
        """Its metrics by the names of docs/metrics.md."""
        return {"reward_kl": self.kl, "reward_kl_coef": self.coef}

    def state(self) -> dict[str, float]:
        """What a checkpoint keeps."""
        return {"reward_kl": self.coef}

    def restore(self, state: Mapping[str, float]) -> None:
        """Takes up what `state` gave; the batch that it is of is then charged again."""
        self.following = state.get("reward_kl", self.following)
