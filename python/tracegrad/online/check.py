"""The proof at work: what a step shows of the last push, what a canary shows where it shows nothing, and the fault.

Over ranks every one of them sees the same numbers and comes to the same end. Called by `loop` before each update.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tracegrad.batch import Step
from tracegrad.learner import Run
from tracegrad.online.canary import Canary
from tracegrad.online.options import Online
from tracegrad.online.proof import Floats, Gap, Proof, explain, fault
from tracegrad.online.suspects import suspects
from tracegrad.sequence import Sequences

OF_PROMPTS = (7, *range(10, 22), 29, 31, 32)
"""Reasons of drift, by number, that concern what stands before sampled tokens."""
NAMED = 3
"""Findings and traces that are named at most."""


@dataclass(frozen=True)
class Forks:
    """The terms of a step whose prompts need not be what the server saw, and why: their gap may be of the trajectory.

    Args:
        terms: [M] bool, of this rank.
        told: what was found, in words.
    """

    terms: NDArray[np.bool_]
    told: str

    @classmethod
    def of(cls, step: Step, sequences: Sequences) -> "Forks":
        """Those of a step that is made of these sequences."""
        drift = sequences.drift
        first = np.unique(sequences.trace, return_index=True)[1]
        number = np.array([int(name[1:3]) for name in drift.reasons], np.int64)[drift.reason]
        found = np.isin(number, OF_PROMPTS)
        since = np.full(sequences.traces, np.iinfo(np.int32).max, np.int64)
        np.minimum.at(since, drift.trace[found], drift.turn[found])
        # A trace may have no branch: then no term is of it.
        begins = np.full(sequences.traces, -1, np.int64)
        begins[sequences.trace[first]] = first
        terms = (step.branch != begins[step.trace]) | (step.turn >= since[step.trace])
        reasons = sorted({drift.reasons[code] for code in drift.reason[found]})
        forked = np.flatnonzero(np.bincount(sequences.trace, minlength=sequences.traces) > 1)
        traces = sorted({*forked.tolist(), *drift.trace[found].tolist()})
        names = ", ".join(sequences.trace_name(trace) for trace in traces[:NAMED])
        more = f" and {len(traces) - NAMED} more" if len(traces) > NAMED else ""
        why = f" ({', '.join(reasons[:NAMED])})" if reasons else ""
        return cls(terms, f"{names}{more}{why}")

    def words(self, count: int, off: int) -> str:
        """The cause of a gap that is in these terms alone.

        Args:
            count: of these terms, on all ranks, whose version is the trained one.
            off: of the others, which agree.
        """
        return (
            f"The {off} other tokens agree, and these {count} follow a fork or a finding of the alignment, in the "
            f"trajectories {self.told}: the prompt that the trainer has for them is not the one that the server saw. "
            "`tracegrad doctor` on the run's played/ says what differs. Let the agent send its history as it was "
            'answered, or play with play.ids "tokens", where nothing is put together anew.'
        )


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
            raise fault(number, version, gap, self.proof.bound, forks.words(int(odd.sum()), others.terms))
        fresh = None
        if self.canary is not None:
            asked = self.canary.ask(version, salt=f"proof-{version}")
            fresh = Gap.of(asked.logprobs, asked.rollout, ~asked.cached)
        told = suspects(self.driven, step, self.options)
        raise fault(number, version, gap, self.proof.bound, explain(gap, rollout, here, told, self.proof.bound, fresh))
