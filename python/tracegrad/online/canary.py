"""A few tokens asked of every server, on a prompt whose keys and values may be cached and on one that is new.

They prove a push where a step holds nothing that the trained version sampled, and tell a stale cache from other
mistakes where a proof has failed. The asking is `sync.canary`'s; here is what the trainer says of the answers.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tracegrad.batch import Step, pack
from tracegrad.errors import TracegradError
from tracegrad.learner import Run
from tracegrad.online.link import Link
from tracegrad.online.options import Play
from tracegrad.online.proof import Floats
from tracegrad.sequence import Sequences
from tracegrad.sync import SyncError, canary

LENGTH = 192
"""Ids of a prompt: more than a block of vLLM's cache (128 on CPU)."""
TOKENS = 8


@dataclass(frozen=True)
class Asked:
    """What servers said and what the trainer says of it.

    Args:
        step: the tokens that were sampled, as terms of this rank.
        logprobs, rollout: [M] of all ranks, the trainer's and the servers'.
        cached: [M] bool, terms behind the prompt that may be cached.
    """

    step: Step
    logprobs: Floats
    rollout: Floats
    cached: NDArray[np.bool_]


@dataclass
class Canary:
    """What asks the servers, and compares. Over ranks the first one asks, and all run the forward pass.

    Args:
        driven: the policy.
        link: to the servers that are asked; None on the ranks that follow.
        play: of the run: its sampling is the canary's.
        ids: token ids that prompts are drawn from.
    """

    driven: Run
    link: Link | None
    play: Play
    ids: Sequence[int]

    def ask(self, version: int, salt: str | None = None) -> Asked:
        """What the servers say behind a prompt that is the same each time, and behind a new one.

        Args:
            version: that they should run.
            salt: of the requests' caches; a new one finds nothing cached.
        """
        ranks = self.driven.ranks
        said, error = (None, None) if self.link is None else self._said(self.link, version, salt)
        said, told = ranks.shared((said, error and str(error)))
        if told:
            raise error or SyncError(told)
        return self._compared(said)

    def _said(
        self, link: Link, version: int, salt: str | None
    ) -> tuple[list[canary.Said] | None, TracegradError | None]:
        same, new = canary.drawn(self.ids, 0, LENGTH), canary.drawn(self.ids, version + 1, LENGTH)
        heat = {"temperature": self.play.temperature}

        async def asked(servers: Any, _: Any) -> list[canary.Said]:
            return await canary.ask(servers, same, new, tokens=TOKENS, sampling=heat, salt=salt)

        try:
            return link.run(asked), None
        except TracegradError as error:
            return None, error

    def _compared(self, said: Sequence[canary.Said]) -> Asked:
        rows = [(*one.prompt_ids, *one.ids) for one in said]
        flat = np.concatenate([np.r_[np.full(len(one.prompt_ids), np.nan), one.logprobs] for one in said])
        ends = np.cumsum([0, *map(len, rows)])
        heat = np.full(ends[-1], 1 / self.play.temperature, np.float32)
        sequences = Sequences.from_arrays(np.concatenate(rows), ends, flat, ~np.isnan(flat), inv_temperature=heat)
        budget, ranks = max(self.driven.config.pack.token_budget, max(map(len, rows))), self.driven.ranks
        cut: dict[str, Any] = {"token_budget": budget, "per": "trace", "ranks": ranks.world, "rank": ranks.rank}
        [step] = pack(sequences, np.zeros(len(said)), **cut)
        cached = np.array([one.cached for one in said])[step.trace]
        return Asked(step, *map(ranks.joined, (self.driven.measure(step), step.rollout_logprobs, cached)))
