"""KL in the reward of a run: each trace's reward less coef * KL(old, ref), and the advantages of what is left.

A batch is the steps between two measurements of `old`, as verl and SkyRL have it: when both policies are known of all
its terms, its rewards are charged and compared, before its first update. No torch. Called by `Epochs`.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from tracegrad.advantage import AdaptiveKl, kl_in_reward
from tracegrad.algebra import Objective
from tracegrad.algebra.loss import Needs
from tracegrad.catalog import Source
from tracegrad.config import Config
from tracegrad.learner.compared import compared

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
