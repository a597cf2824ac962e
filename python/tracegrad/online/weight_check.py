"""Check before each update that the servers sample from the policy being trained: `WeightSyncCheck.gap`, with
`logprob_gap`.

Every rank computes the same numbers and the same result. `mismatch_causes` searches for the cause of a mismatch.
"""

import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from tracegrad.alignment.sequences import Sequences
from tracegrad.online.logprob_gap import (
    MIN_STANDARD_ERRORS,
    Floats,
    LogprobGap,
    SyncFault,
    WeightSyncBounds,
    mean_excess,
    rank_z_score,
    weight_sync_fault,
)
from tracegrad.online.mismatch_causes import ROUNDING, UNKNOWN, explain, previous_logprobs, previous_weights
from tracegrad.online.options import OnlineConfig
from tracegrad.online.weight_sample import ProbeSampler, Sample, sample_of
from tracegrad.packing import Step
from tracegrad.trainer import Trainer
from tracegrad.weight_sync import probe_requests as probes

MAX_TIME_SHARE = 0.01
"""Maximum share of the run's time spent on comparing tokens of the previous version, and on searches for rare causes.
"""
PUSHES = 3
"""Number of first weight syncs after which all causes are tried, whatever they cost."""
STALE = (
    "On a prompt that they have never seen they agree with the trainer: keys and values of older weights are left in "
    "their caches. Pause with clear_cache, which is the default, or give each version its own cache_salt."
)
PROMPT_REASONS = (7, *range(10, 22), 29, 31, 32)
"""Numbers of the alignment reasons that concern the text before sampled tokens."""
NAMED = 3
"""Maximum number of findings and traces in a message."""


@dataclass(frozen=True)
class UnreliablePrompts:
    """Tokens of a step whose prompt may differ from the one that the server saw.

    Their gap may have its cause in the trajectory instead of the servers.

    Args:
        terms: [M] bool, of this rank.
        told: description of the trajectories and findings, for messages.
    """

    terms: NDArray[np.bool_]
    told: str

    @classmethod
    def of(cls, step: Step, sequences: Sequences) -> "UnreliablePrompts":
        """Find these tokens in a step that was packed from the sequences."""
        drift = sequences.drift
        first = np.unique(sequences.trace, return_index=True)[1]
        number = np.array([int(name[1:3]) for name in drift.reasons], np.int64)[drift.reason]
        matches = np.isin(number, PROMPT_REASONS)
        first_turn = np.full(sequences.traces, np.iinfo(np.int32).max, np.int64)
        np.minimum.at(first_turn, drift.trace[matches], drift.turn[matches])
        # A trace may have no branch; then none of the tokens belongs to it.
        first_branch = np.full(sequences.traces, -1, np.int64)
        first_branch[sequences.trace[first]] = first
        terms = (step.branch != first_branch[step.trace]) | (step.turn >= first_turn[step.trace])
        reasons = sorted({drift.reasons[code] for code in drift.reason[matches]})
        forked = np.flatnonzero(np.bincount(sequences.trace, minlength=sequences.traces) > 1)
        traces = sorted({*forked.tolist(), *drift.trace[matches].tolist()})
        names = ", ".join(sequences.trace_name(trace) for trace in traces[:NAMED])
        remainder = f" and {len(traces) - NAMED} more" if len(traces) > NAMED else ""
        reason_text = f" ({', '.join(reasons[:NAMED])})" if reasons else ""
        return cls(terms, f"{names}{remainder}{reason_text}")

    def words(self, count: int, off: int) -> str:
        """Return the cause of a gap that only these tokens have.

        Args:
            count: number of these tokens that the trained version sampled, on all ranks.
            off: number of the other tokens, which agree.
        """
        return (
            f"The {off} other tokens agree, and these {count} follow a fork or a finding of the alignment, in the "
            f"trajectories {self.told}: the prompt that the trainer has for them is not the one that the server saw. "
            "`tracegrad doctor` on the run's played/ says what differs. Let the agent send its history as it was "
            'answered, or play with play.ids "tokens", where nothing is put together anew.'
        )


@dataclass
class WeightSyncCheck:
    """Checks the servers with the logprobs of a step.

    Args:
        driven: trainer with the policy.
        options: options of the run.
        proof: bounds of a correct sync; None without servers.
        canary: sends probes to the servers; None if that is impossible.
        first: folder of the initial model.
    """

    driven: Trainer
    options: OnlineConfig
    proof: WeightSyncBounds | None
    canary: ProbeSampler | None = None
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
        forks: UnreliablePrompts,
        sequences: Sequences,
        mixed: NDArray[np.bool_],
    ) -> LogprobGap:
        """Return the gap between the servers and the trained version. Every rank must call this.

        The servers are probed if the step has fewer than `weight_sync.probe_requests.TOKENS` tokens of that version per
        server, and always in bf16. In bf16, the probes are also compared with the previous version. Tokens of the step
        that claim the previous version are compared with it as often as one hundredth of the run's time allows.

        Args:
            number: number of the step, from 1.
            step: packed step of this rank.
            logprobs: [M] logprobs of the policy before the update, of this rank.
            here: [M] bool, the tokens that the trained version sampled.
            forks: the tokens whose prompts the servers may not have seen.
            sequences: all sequences of the step, on every rank.
            mixed: [R] bool, traces whose tokens may be of two versions.

        Raises:
            SyncFault: if they sample from something else; the message has the cause if it is known.
            SyncError: if a server does not answer.
        """
        ranks, version = self.driven.ranks, self.driven.taken
        # Each rank has only its own tokens; join them, so that every rank checks all tokens.
        theta, rollout, here, odd = map(ranks.joined, (logprobs, step.rollout_logprobs, here, forks.terms & here))
        step_gap = LogprobGap.of(theta, rollout, here)
        if self.proof is None:
            return step_gap
        sample = None
        if self.canary is not None and (self.proof.bf16 or step_gap.terms < probes.TOKENS * self._servers()):
            sample = self.canary.ask()
        holds = self.proof.holds(step_gap)
        if not holds:
            other_gap = LogprobGap.of(theta, rollout, here & ~odd)
            if other_gap.terms and self.proof.holds(other_gap):
                raise self._fault(number, version, step_gap, forks.words(int(odd.sum()), other_gap.terms))
        if sample is not None and not self.proof.holds(sample.gap()):
            raise self._fault(number, version, sample.gap(), self._cause_of_probes(sample))
        if not holds:
            raise self._fault(
                number, version, step_gap, self._cause_of_rollouts(sequences, sequences.version == version, mixed)
            )
        if sample is not None:
            self._check_bias(number, sample)
            self.proof.note(sample.gap())
        self._compare_before(number, sequences, mixed)
        if not step_gap.terms and sample is not None:
            return sample.gap()
        return step_gap

    def _servers(self) -> int:
        """Return the number of servers, from the first rank."""
        link = None if self.canary is None else self.canary.link
        return int(self.driven.ranks.shared(1 if link is None else len(link.servers.urls)))

    def _fault(self, number: int, version: int, gap: LogprobGap, cause: str) -> SyncFault:
        assert self.proof is not None
        return weight_sync_fault(number, version, gap, self.proof.words, cause)

    def _cause_of_probes(self, sample: Sample) -> str:
        """Return why the answers to probes are not the policy's."""
        assert self.proof is not None
        assert self.canary is not None
        before = previous_logprobs(self.driven, self.options, sample) if self.proof.bf16 else None
        faulty = [
            server for server in range(len(sample.urls)) if not self._agrees(sample, before, sample.server == server)
        ]
        prefix = ""
        if faulty and len(faulty) < len(sample.urls):
            prefix = (
                f"Of {len(sample.urls)} servers it is {', '.join(sample.urls[server] for server in faulty)} alone. "
            )
            sample = sample.of_rows(
                [index for index, row in enumerate(sample.rows) if row.server in faulty], self.driven
            )
        # In bf16, new prompts may seem to agree by chance, so a known cause has priority.
        cause = self._explain(sample) if self.proof.bf16 else ""
        if cause and UNKNOWN not in cause:
            return prefix + cause
        # Also before the first push: a cache may contain keys and values of an earlier run.
        fresh = self._probe_uncached()
        before = previous_logprobs(self.driven, self.options, fresh) if self.proof.bf16 else None
        if self._agrees(fresh, before) and (
            not self.proof.bf16 or rank_z_score(sample.off, fresh.off) > MIN_STANDARD_ERRORS
        ):
            return prefix + STALE
        return prefix + (cause or self._explain(sample))

    def _probe_uncached(self) -> Sample:
        """Probe with a new salt, so that no keys and values are cached."""
        assert self.canary is not None
        return self.canary.ask(salt=f"check-{self.driven.taken}")

    def _agrees(self, sample: Sample, before: Floats | None, here: NDArray[np.bool_] | None = None) -> bool:
        """Return whether the servers sample from the policy, for all or some of the tokens.

        Args:
            before: [M] logprobs of the previous version, in bf16.
            here: [M] bool.
        """
        assert self.proof is not None
        here = np.ones(len(sample.step), bool) if here is None else here
        now, rollout = sample.logprobs[here], sample.rollout[here]
        if not self.proof.holds(LogprobGap.of(now, rollout)):
            return False
        if not self.proof.bf16:
            return True
        return not mean_excess(now, rollout) and (before is None or not self.proof.leans(now, before[here], rollout))

    def _explain(self, sample: Sample) -> str:
        """Return the cause for all of the tokens; if there is none, the cause for the answers outside of the bounds."""
        assert self.proof is not None
        cause = explain(self.driven, sample, self.options, self.proof, self.first)
        if UNKNOWN not in cause and cause != ROUNDING:
            return cause
        part, faulty = self._split_faulty(sample)
        if not part:
            return cause
        cause_of_part = explain(self.driven, faulty, self.options, self.proof, self.first)
        return cause if cause_of_part == ROUNDING else part + cause_of_part

    def _split_faulty(self, sample: Sample) -> tuple[str, Sample]:
        """Return a message if only some answers agree, and the answers that do not."""
        assert self.proof is not None
        sample = sample.by_answer(self.driven)
        bad = [row for row in range(len(sample.rows)) if not self.proof.holds(sample.gap_of_row(row))]
        if not bad or len(bad) == len(sample.rows):
            return "", sample
        message = (
            f"{len(sample.rows) - len(bad)} of {len(sample.rows)} answers agree: more than one server may stand behind "
            "one address. Name each by its own, so that each gets the weights. "
        )
        return message, sample.of_rows(bad, self.driven)

    def _cause_of_rollouts(self, sequences: Sequences, here: NDArray[np.bool_], mixed: NDArray[np.bool_]) -> str:
        """Return why rollouts are not the policy's although probe answers are."""
        assert self.proof is not None
        sample = sample_of(self.driven, sequences, here, mixed)
        if sample is None:
            return "Why is not known: the step holds pictures."
        fresh = None if self.canary is None else self._probe_uncached().gap()
        cause = self._explain(sample)
        if fresh is not None and fresh.terms and self.proof.holds(fresh) and (UNKNOWN in cause or ROUNDING in cause):
            return STALE
        return cause

    def _cause_before(self, claimed: Sample) -> str:
        """Return why tokens that claim the previous version are not of it."""
        assert self.proof is not None
        with previous_weights(self.driven, self.options):
            part, faulty = self._split_faulty(claimed)
            return part + explain(self.driven, faulty, self.options, self.proof, self.first)

    def _check_bias(self, number: int, sample: Sample) -> None:
        """Test for small mistakes in bf16: they shift logprobs in one direction, which rounding does not."""
        assert self.proof is not None
        if not self.proof.bf16:
            return
        before = previous_logprobs(self.driven, self.options, sample)
        slope = 0.0 if before is None else self.proof.leans(sample.logprobs, before, sample.rollout)
        if slope:
            message = f"They stand {slope:.0%} of the way to the version before, which rounding does not explain. "
            raise self._fault(number, self.driven.taken, sample.gap(), message + self._cause_of_probes(sample))
        if nats := mean_excess(sample.logprobs, sample.rollout):
            message = f"The tokens are {nats:.2g} nats likelier to them on average, which rounding does not explain. "
            raise self._fault(number, self.driven.taken, sample.gap(), message + self._cause_of_probes(sample))
        self._search(number, sample)

    def _search(self, number: int, sample: Sample) -> None:
        """Try the causes of mistakes that neither bounds nor averages show, as often as `MAX_TIME_SHARE` allows.

        The search always runs before the first push, after each of the first `PUSHES` pushes, and if the noise has
        doubled since the last search.
        """
        assert self.proof is not None
        assert self.canary is not None
        began, square = time.perf_counter(), sample.gap().square
        pushes = min(self.driven.taken, PUSHES)
        is_noisier, is_searched = square > 2 * self._noise, self._searched_after == pushes
        is_over_budget = self._spent > MAX_TIME_SHARE * (began - self._began)
        if self.driven.ranks.shared(not is_noisier and is_searched and is_over_budget):
            return
        self._noise, self._searched_after = max(self._noise, square), pushes
        cause = explain(self.driven, sample, self.options, self.proof, self.first)
        if UNKNOWN not in cause:
            raise self._fault(number, self.driven.taken, sample.gap(), cause)
        if is_noisier and self.driven.taken:
            fresh = self._probe_uncached()
            if rank_z_score(sample.off, fresh.off) > MIN_STANDARD_ERRORS:
                raise self._fault(number, self.driven.taken, sample.gap(), STALE)
        self._spent += time.perf_counter() - began

    def _compare_before(self, number: int, sequences: Sequences, mixed: NDArray[np.bool_]) -> None:
        """Compare tokens that claim the previous version with that version, as often as `MAX_TIME_SHARE` allows."""
        assert self.proof is not None
        began, version = time.perf_counter(), self.driven.taken
        if self.driven.ranks.shared(self._spent > MAX_TIME_SHARE * (began - self._began)) or not version:
            return
        claimed = sample_of(self.driven, sequences, sequences.version == version - 1, mixed)
        if claimed is not None and (before := previous_logprobs(self.driven, self.options, claimed)) is not None:
            gap = claimed.gap(before)
            if not self.proof.holds(gap):
                cause = self._cause_before(claimed)
                note = "These were played a version ago, and are compared with the weights of then. "
                raise self._fault(number, version - 1, gap, note + cause)
        self._spent += time.perf_counter() - began
