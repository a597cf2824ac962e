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
from tracegrad.config import Config
from tracegrad.learner.compared import compared
from tracegrad.sequence import Sequences

Floats = NDArray[np.float32]


def needs_of(objective: Objective, config: Config) -> Needs:
    """What a run measures: what its objective takes, and both policies where rewards pay for their divergence."""
    return replace(objective.needs, old=True, ref=True) if config.reward_kl.coef else objective.needs


@dataclass
class Charge:
    """The batch that is trained on, as it is charged.

    Args:
        sequences, rewards, held, config: of the feed.

    Attributes:
        coef: what a nat costs in this batch, and `following`, in the next.
        kl: the batch's divergence, its mean over each trace and then over traces; NaN before the first.
        advantages: [R], of the traces of this batch.
    """

    sequences: Sequences
    rewards: Floats
    held: NDArray[np.bool_]
    config: Config
    coef: float = 0.0
    kl: float = float("nan")
    following: float = field(init=False)
    advantages: Floats = field(init=False)

    def __post_init__(self) -> None:
        self.following = self.config.reward_kl.coef
        self.advantages = np.zeros(len(self.rewards), np.float32)

    def batch(self, traces: int, old: Floats, ref: Floats) -> None:
        """Charges and compares the traces of a batch, which ranks share.

        Args:
            traces: how many count in its steps.
            old, ref: [T] logprobs of the terms of all its traces, of every rank; NaN elsewhere.
        """
        options, s = self.config.reward_kl, self.sequences
        origin = np.flatnonzero(~np.isnan(old))
        trace = np.repeat(s.trace, np.diff(s.cu_seqlens))[origin]
        self.coef = self.following
        how = {"coef": self.coef, "kind": options.kind, "cap": options.cap or None}
        charged = kl_in_reward(self.rewards, old[origin], ref[origin], trace, **how)
        compared_traces = ~self.held & np.isin(s.group, s.group[trace])
        self.advantages[:] = 0
        self.advantages[compared_traces] = compared(charged.rewards, s, compared_traces, self.config)
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
