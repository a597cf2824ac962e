"""The proof at work: what a step shows of the last push, what a canary shows where it shows nothing, and the fault.

Over ranks every one of them sees the same numbers and comes to the same end. Called by `loop` before each update.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tracegrad.batch import Step
from tracegrad.learner import Run
from tracegrad.online.canary import Canary
from tracegrad.online.forks import Forks
from tracegrad.online.options import Online
from tracegrad.online.proof import Floats, Gap, Proof, explain, fault
from tracegrad.online.suspects import suspects


@dataclass
class Check:
    """What looks at the logprobs of a step.

    Args:
        driven: the policy.
        options: of the run.
        proof: what a clean sync looks like; None where there are no servers to be wrong.
        canary: asks them; None where nobody can.
    """

    driven: Run
    options: Online
    proof: Proof | None
    canary: Canary | None = None

    def gap(self, number: int, step: Step, logprobs: Floats, here: NDArray[np.bool_], forks: Forks) -> Gap:
        """How far the servers are from the version that is trained. Every rank calls this.

        Args:
            number: of the step, from 1.
            logprobs: [M] of the policy before the update, as this rank knows them.
            here: [M] bool, the terms that the trained version sampled.
            forks: the terms whose prompts the servers may not have seen.

        Raises:
            SyncFault: if they sample from something else, with the cause as far as it is known.
            SyncError: if a server does not answer the canary.
        """
        ranks, version = self.driven.ranks, self.driven.taken
        # A rank holds its own terms; from here on all of them are looked at everywhere.
        theta, rollout, here, odd = map(ranks.joined, (logprobs, step.rollout_logprobs, here, forks.terms & here))
        gap = Gap.of(theta, rollout, here)
        if not gap.terms and self.canary is not None:
            asked = self.canary.ask(version)
            step, rollout, here = asked.step, asked.rollout, np.ones(len(asked.rollout), bool)
            theta, odd = asked.logprobs, ~here
            gap = Gap.of(theta, rollout, here)
        if self.proof is None or self.proof.holds(gap):
            return gap
        others = Gap.of(theta, rollout, here & ~odd)
        if others.terms and self.proof.within(others):
            why = forks.words(int(odd.sum()), others.terms)
            raise fault(number, version, gap, self.proof.bound, why)
        fresh = None
        if self.canary is not None:
            asked = self.canary.ask(version, salt=f"proof-{version}")
            fresh = Gap.of(asked.logprobs, asked.rollout, ~asked.cached)
        told = suspects(self.driven, step, self.options)
        raise fault(number, version, gap, self.proof.bound, explain(gap, rollout, here, told, self.proof.bound, fresh))
