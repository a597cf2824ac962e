"""Check before each update that the servers sample from the policy being trained: `Check.gap`, by `logprob_gap`.

Every rank sees the same numbers and comes to the same verdict. `mismatch_causes` searches for the cause of a mismatch.
"""

import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from tracegrad.alignment.sequences import Sequences
from tracegrad.online.logprob_gap import CERTAIN, Floats, Gap, Proof, SyncFault, above, fault, worse
from tracegrad.online.mismatch_causes import ROUNDING, UNKNOWN, explain, previous, previous_weights
from tracegrad.online.options import Online
from tracegrad.online.weight_sample import Canary, Sample, sample_of
from tracegrad.packing import Step
from tracegrad.trainer import Run
from tracegrad.weight_sync import probe_requests as probes

BESIDE = 0.01
"""The share of a run's time that comparing what claims to be of the version before may take."""
PUSHES = 3
"""Pushes after which all causes are tried, whatever they cost."""
STALE = (
    "On a prompt that they have never seen they agree with the trainer: keys and values of older weights are left in "
    "their caches. Pause with clear_cache, which is the default, or give each version its own cache_salt."
)
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
        first: folder of the model that the run began with.
    """

    driven: Run
    options: Online
    proof: Proof | None
    canary: Canary | None = None
    first: Path | None = None

    def __post_init__(self) -> None:
        self._began, self._spent = time.perf_counter(), 0.0
        self._noise, self._searched_after = 0.0, -1

    def gap(
        self,
        number: int,
        step: Step,
        logprobs: Floats,
        here: NDArray[np.bool_],
        forks: Forks,
        sequences: Sequences,
        mixed: NDArray[np.bool_],
    ) -> Gap:
        """How far the servers are from the version that is trained. Every rank calls this.

        Where the step holds fewer than `weight_sync.probe_requests.TOKENS` tokens of that version for each server, and
        always in bf16, the servers are asked for as many. In bf16 these are also measured with the version before.
        Tokens of the step that claim that version are compared with it, as often as takes one hundredth of the run's
        time.

        Args:
            number: of the step, from 1.
            logprobs: [M] of the policy before the update, as this rank knows them.
            here: [M] bool, the terms that the trained version sampled.
            forks: the terms whose prompts the servers may not have seen.
            sequences: of the step, whole on every rank.
            mixed: [R] bool, traces whose tokens may be of two versions.

        Raises:
            SyncFault: if they sample from something else, with the cause as far as it is known.
            SyncError: if a server does not answer.
        """
        ranks, version = self.driven.ranks, self.driven.taken
        # A rank holds its own terms; from here on all of them are looked at everywhere.
        theta, rollout, here, odd = map(ranks.joined, (logprobs, step.rollout_logprobs, here, forks.terms & here))
        own = Gap.of(theta, rollout, here)
        if self.proof is None:
            return own
        asked = None
        if self.canary is not None and (self.proof.bf16 or own.terms < probes.TOKENS * self._servers()):
            asked = self.canary.ask()
        held = self.proof.holds(own)
        if not held:
            others = Gap.of(theta, rollout, here & ~odd)
            if others.terms and self.proof.holds(others):
                raise self._fault(number, version, own, forks.words(int(odd.sum()), others.terms))
        if asked is not None and not self.proof.holds(asked.gap()):
            raise self._fault(number, version, asked.gap(), self._why_asked(asked))
        if not held:
            raise self._fault(number, version, own, self._why_played(sequences, sequences.version == version, mixed))
        if asked is not None:
            self._lean(number, asked)
            self.proof.note(asked.gap())
        self._compare_before(number, sequences, mixed)
        if not own.terms and asked is not None:
            return asked.gap()
        return own

    def _servers(self) -> int:
        """How many servers there are, as the first rank knows them."""
        link = None if self.canary is None else self.canary.link
        return int(self.driven.ranks.shared(1 if link is None else len(link.servers.urls)))

    def _fault(self, number: int, version: int, gap: Gap, why: str) -> SyncFault:
        assert self.proof is not None
        return fault(number, version, gap, self.proof.words, why)

    def _why_asked(self, asked: Sample) -> str:
        """Why what the servers say when they are asked is not the policy's."""
        assert self.proof is not None
        assert self.canary is not None
        before = previous(self.driven, self.options, asked) if self.proof.bf16 else None
        off = [at for at in range(len(asked.urls)) if not self._agrees(asked, before, asked.server == at)]
        where = ""
        if off and len(off) < len(asked.urls):
            where = f"Of {len(asked.urls)} servers it is {', '.join(asked.urls[at] for at in off)} alone. "
            asked = asked.of_rows([row for row, each in enumerate(asked.rows) if each.server in off], self.driven)
        # In bf16 new prompts may seem to agree by chance: a cause that is known comes first.
        why = self._explained(asked) if self.proof.bf16 else ""
        if why and UNKNOWN not in why:
            return where + why
        # Before the first push as well: a cache may hold those of a run before this one.
        fresh = self._fresh()
        before = previous(self.driven, self.options, fresh) if self.proof.bf16 else None
        if self._agrees(fresh, before) and (not self.proof.bf16 or worse(asked.off, fresh.off) > CERTAIN):
            return where + STALE
        return where + (why or self._explained(asked))

    def _fresh(self) -> Sample:
        """What the servers say of prompts that they have not cached."""
        assert self.canary is not None
        return self.canary.ask(salt=f"check-{self.driven.taken}")

    def _agrees(self, sample: Sample, before: Floats | None, here: NDArray[np.bool_] | None = None) -> bool:
        """Whether servers sample from the policy, or those of some tokens do.

        Args:
            before: [M] logprobs of the version before, in bf16.
            here: [M] bool.
        """
        assert self.proof is not None
        here = np.ones(len(sample.step), bool) if here is None else here
        now, rollout = sample.logprobs[here], sample.rollout[here]
        if not self.proof.holds(Gap.of(now, rollout)):
            return False
        if not self.proof.bf16:
            return True
        return not above(now, rollout) and (before is None or not self.proof.leans(now, before[here], rollout))

    def _explained(self, sample: Sample) -> str:
        """The cause of a gap in all of the tokens; where there is none, that of the answers that are off."""
        assert self.proof is not None
        why = explain(self.driven, sample, self.options, self.proof, self.first)
        if UNKNOWN not in why and why != ROUNDING:
            return why
        part, off = self._part(sample)
        if not part:
            return why
        of_part = explain(self.driven, off, self.options, self.proof, self.first)
        return why if of_part == ROUNDING else part + of_part

    def _part(self, asked: Sample) -> tuple[str, Sample]:
        """What is to be said where some answers agree and others do not, and those that do not."""
        assert self.proof is not None
        asked = asked.by_answer(self.driven)
        off = [row for row in range(len(asked.rows)) if not self.proof.holds(asked.gap_of_row(row))]
        if not off or len(off) == len(asked.rows):
            return "", asked
        more = (
            f"{len(asked.rows) - len(off)} of {len(asked.rows)} answers agree: more than one server may stand behind "
            "one address. Name each by its own, so that each gets the weights. "
        )
        return more, asked.of_rows(off, self.driven)

    def _why_played(self, sequences: Sequences, here: NDArray[np.bool_], mixed: NDArray[np.bool_]) -> str:
        """Why what was played is not the policy's, while what the servers say when they are asked is."""
        assert self.proof is not None
        sample = sample_of(self.driven, sequences, here, mixed)
        if sample is None:
            return "Why is not known: the step holds pictures."
        fresh = None if self.canary is None else self._fresh().gap()
        why = self._explained(sample)
        if fresh is not None and fresh.terms and self.proof.holds(fresh) and (UNKNOWN in why or ROUNDING in why):
            return STALE
        return why

    def _why_then(self, claimed: Sample) -> str:
        """Why tokens that claim the version before are not of it."""
        assert self.proof is not None
        with previous_weights(self.driven, self.options):
            part, off = self._part(claimed)
            return part + explain(self.driven, off, self.options, self.proof, self.first)

    def _lean(self, number: int, asked: Sample) -> None:
        """In bf16 a mistake can be smaller than rounding, and goes one way, which rounding does not."""
        assert self.proof is not None
        if not self.proof.bf16:
            return
        before = previous(self.driven, self.options, asked)
        slope = 0.0 if before is None else self.proof.leans(asked.logprobs, before, asked.rollout)
        if slope:
            share = f"They stand {slope:.0%} of the way to the version before, which rounding does not explain. "
            raise self._fault(number, self.driven.taken, asked.gap(), share + self._why_asked(asked))
        if nats := above(asked.logprobs, asked.rollout):
            share = f"The tokens are {nats:.2g} nats likelier to them on average, which rounding does not explain. "
            raise self._fault(number, self.driven.taken, asked.gap(), share + self._why_asked(asked))
        self._search(number, asked)

    def _search(self, number: int, asked: Sample) -> None:
        """Tries the causes of mistakes that neither bounds nor averages show, as often as `BESIDE` allows.

        And always before the first push and after each of the first `PUSHES`, and where the noise is twice that of
        the last time.
        """
        assert self.proof is not None
        assert self.canary is not None
        began, square = time.perf_counter(), asked.gap().square
        pushes = min(self.driven.taken, PUSHES)
        noisier, known = square > 2 * self._noise, self._searched_after == pushes
        spent = self._spent > BESIDE * (began - self._began)
        if self.driven.ranks.shared(not noisier and known and spent):
            return
        self._noise, self._searched_after = max(self._noise, square), pushes
        why = explain(self.driven, asked, self.options, self.proof, self.first)
        if UNKNOWN not in why:
            raise self._fault(number, self.driven.taken, asked.gap(), why)
        if noisier and self.driven.taken:
            fresh = self._fresh()
            if worse(asked.off, fresh.off) > CERTAIN:
                raise self._fault(number, self.driven.taken, asked.gap(), STALE)
        self._spent += time.perf_counter() - began

    def _compare_before(self, number: int, sequences: Sequences, mixed: NDArray[np.bool_]) -> None:
        """Compares what claims to be of the version before with that, as often as `BESIDE` allows."""
        assert self.proof is not None
        began, version = time.perf_counter(), self.driven.taken
        if self.driven.ranks.shared(self._spent > BESIDE * (began - self._began)) or not version:
            return
        claimed = sample_of(self.driven, sequences, sequences.version == version - 1, mixed)
        if claimed is not None and (before := previous(self.driven, self.options, claimed)) is not None:
            gap = claimed.gap(before)
            if not self.proof.holds(gap):
                why = self._why_then(claimed)
                then = "These were played a version ago, and are compared with the weights of then. "
                raise self._fault(number, version - 1, gap, then + why)
        self._spent += time.perf_counter() - began
