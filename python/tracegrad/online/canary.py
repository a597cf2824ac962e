"""A few tokens asked of every server, on a prompt whose keys and values may be cached and on one that is new.

They prove a push where a step holds nothing that the trained version sampled, and tell a stale cache from other
mistakes where a proof has failed. The asking is `sync.canary`'s; here is what the trainer says of the answers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tracegrad.batch import pack
from tracegrad.learner import Run
from tracegrad.online.collector import Collector
from tracegrad.online.options import Online
from tracegrad.online.proof import Gap
from tracegrad.sequence import Sequences
from tracegrad.sync import canary

LENGTH = 192
"""Ids of a prompt: more than a block of vLLM's cache (128 on CPU)."""
TOKENS = 8


@dataclass
class Canary:
    """What asks the servers, and compares.

    Args:
        driven: the policy.
        collector: whose servers are asked.
        options: of the run: its sampling is the canary's.
        ids: token ids that prompts are drawn from.
    """

    driven: Run
    collector: Collector
    options: Online
    ids: Sequence[int]

    def ask(self, version: int, salt: str | None = None) -> tuple[Gap, Gap]:
        """How far the servers are from the policy as it is: on the prompt that is the same each time, and on a new one.

        Args:
            version: that they should run.
            salt: of the requests' caches; a new one finds nothing cached.
        """
        same, new = canary.drawn(self.ids, 0, LENGTH), canary.drawn(self.ids, version + 1, LENGTH)
        heat = {"temperature": self.options.temperature}

        async def asked(servers: Any, _: Any) -> list[canary.Said]:
            return await canary.ask(servers, same, new, tokens=TOKENS, sampling=heat, salt=salt)

        said = self.collector.run(asked)
        theta, rollout, cached = self._compared(said)
        return Gap.of(theta, rollout, cached), Gap.of(theta, rollout, ~cached)

    def _compared(self, said: Sequence[canary.Said]) -> tuple[Any, Any, Any]:
        """[M] logprobs of the trainer and of the servers, and which terms are behind the prompt that may be cached."""
        rows = [(*one.prompt_ids, *one.ids) for one in said]
        logprobs = [np.r_[np.full(len(one.prompt_ids), np.nan), one.logprobs] for one in said]
        flat = np.concatenate(logprobs)
        ends = np.cumsum([0, *map(len, rows)])
        heat = np.full(ends[-1], 1 / self.options.temperature, np.float32)
        sequences = Sequences.from_arrays(np.concatenate(rows), ends, flat, ~np.isnan(flat), inv_temperature=heat)
        budget = max(self.driven.config.pack.token_budget, max(map(len, rows)))
        [step] = pack(sequences, np.zeros(len(said)), token_budget=budget, per="trace")
        cached = np.array([one.cached for one in said])[step.trace]
        return self.driven.measure(step), step.rollout_logprobs, cached
