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
    "On a new prompt they agree with the trainer: their caches contain keys and values of older weights. Pause with "
    "clear_cache (the default), or use a different cache_salt for each version."
)
PROMPT_REASONS = (7, *range(10, 22), 29, 31, 32)
"""Numbers of the alignment reasons that concern the text before sampled tokens."""
NAMED = 3
"""Maximum number of findings and traces in a message."""


@dataclass(frozen=True)
class UnreliablePrompts:
    """Tokens of a step whose prompt may differ from the server's prompt.

    Their gap may have its cause in the trajectory instead of the servers.

    Args:
        terms: [M] bool, of this rank.
        description: description of the trajectories and findings, for messages.
    """

    terms: NDArray[np.bool_]
    description: str

    @classmethod
    def of(cls, step: Step, sequences: Sequences) -> "UnreliablePrompts":
        """Find these tokens in a step that was packed from the sequences."""
        report = sequences.alignment_report
        first = np.unique(sequences.trace, return_index=True)[1]
        number = np.array([int(name[1:3]) for name in report.reasons], np.int64)[report.reason]
        matches = np.isin(number, PROMPT_REASONS)
        first_turn = np.full(sequences.traces, np.iinfo(np.int32).max, np.int64)
        np.minimum.at(first_turn, report.trace[matches], report.turn[matches])
        # A trace may have no branch; then none of the tokens belongs to it.
        first_branch = np.full(sequences.traces, -1, np.int64)
        first_branch[sequences.trace[first]] = first
        terms = (step.branch != first_branch[step.trace]) | (step.turn >= first_turn[step.trace])
        reasons = sorted({report.reasons[code] for code in report.reason[matches]})
        forked = np.flatnonzero(np.bincount(sequences.trace, minlength=sequences.traces) > 1)
        traces = sorted({*forked.tolist(), *report.trace[matches].tolist()})
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
            f"The {off} other tokens agree. These {count} tokens follow a new branch or an alignment mismatch, in the "
            f"trajectories {self.description}: the trainer's prompt for them differs from the server's. Run `tracegrad "
            "doctor` on the run's played/ to see the difference. Let the agent resend its history unchanged, or set "
            'rollout.input to "token_ids", which never tokenises the history again.'
        )


@dataclass
class WeightSyncCheck:
    """Checks the servers with the logprobs of a step.

    Args:
        trainer: trainer with the policy.
        options: options of the run.
        weight_bounds: bounds of a correct sync; None without servers.
        probe_sampler: sends probes to the servers; None if that is impossible.
        first: folder of the initial model.
    """

    trainer: Trainer
    options: OnlineConfig
    weight_bounds: WeightSyncBounds | None
    probe_sampler: ProbeSampler | None = None
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
        unreliable: UnreliablePrompts,
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
            unreliable: tokens whose prompts may differ from the servers'.
            sequences: all sequences of the step, on every rank.
            mixed: [R] bool, traces whose tokens may be of two versions.

        Raises:
            SyncFault: if they sample from something else; the message has the cause if it is known.
            SyncError: if a server does not answer.
        """
        ranks, version = self.trainer.ranks, self.trainer.steps_done
        # Each rank has only its own tokens; join them, so that every rank checks all tokens.
        theta, rollout, here, odd = map(
            ranks.all_gather_arrays, (logprobs, step.rollout_logprobs, here, unreliable.terms & here)
        )
        step_gap = LogprobGap.of(theta, rollout, here)
        if self.weight_bounds is None:
            return step_gap
        sample = None
        if self.probe_sampler is not None and (
            self.weight_bounds.bf16 or step_gap.terms < probes.TOKENS * self._servers()
        ):
            sample = self.probe_sampler.ask()
        holds = self.weight_bounds.holds(step_gap)
        if not holds:
            other_gap = LogprobGap.of(theta, rollout, here & ~odd)
            if other_gap.terms and self.weight_bounds.holds(other_gap):
                raise self._fault(number, version, step_gap, unreliable.words(int(odd.sum()), other_gap.terms))
        if sample is not None and not self.weight_bounds.holds(sample.gap()):
            raise self._fault(number, version, sample.gap(), self._cause_of_probes(sample))
        if not holds:
            raise self._fault(
                number, version, step_gap, self._cause_of_rollouts(sequences, sequences.version == version, mixed)
            )
        if sample is not None:
            self._check_bias(number, sample)
            self.weight_bounds.record_noise(sample.gap())
        self._compare_before(number, sequences, mixed)
        if not step_gap.terms and sample is not None:
            return sample.gap()
        return step_gap

    def _servers(self) -> int:
        """Return the number of servers, from the first rank."""
        server_pool = None if self.probe_sampler is None else self.probe_sampler.server_pool
        return int(self.trainer.ranks.broadcast(1 if server_pool is None else len(server_pool.servers.urls)))

    def _fault(self, number: int, version: int, gap: LogprobGap, cause: str) -> SyncFault:
        assert self.weight_bounds is not None
        return weight_sync_fault(number, version, gap, self.weight_bounds.words, cause)

    def _cause_of_probes(self, sample: Sample) -> str:
        """Return why the answers to probes are not of the policy."""
        assert self.weight_bounds is not None
        assert self.probe_sampler is not None
        before = previous_logprobs(self.trainer, self.options, sample) if self.weight_bounds.bf16 else None
        faulty = [
            server for server in range(len(sample.urls)) if not self._agrees(sample, before, sample.server == server)
        ]
        prefix = ""
        if faulty and len(faulty) < len(sample.urls):
            prefix = (
                f"Only {', '.join(sample.urls[server] for server in faulty)} of {len(sample.urls)} servers differs. "
            )
            sample = sample.of_rows(
                [index for index, row in enumerate(sample.rows) if row.server in faulty], self.trainer
            )
        # In bf16, new prompts may seem to agree by chance, so a known cause has priority.
        cause = self._explain(sample) if self.weight_bounds.bf16 else ""
        if cause and UNKNOWN not in cause:
            return prefix + cause
        # Also before the first push: a cache may contain keys and values of an earlier run.
        fresh = self._probe_uncached()
        before = previous_logprobs(self.trainer, self.options, fresh) if self.weight_bounds.bf16 else None
        if self._agrees(fresh, before) and (
            not self.weight_bounds.bf16 or rank_z_score(sample.off, fresh.off) > MIN_STANDARD_ERRORS
        ):
            return prefix + STALE
        return prefix + (cause or self._explain(sample))

    def _probe_uncached(self) -> Sample:
        """Probe with a new salt, so that no keys and values are cached."""
        assert self.probe_sampler is not None
        return self.probe_sampler.ask(salt=f"check-{self.trainer.steps_done}")

    def _agrees(self, sample: Sample, before: Floats | None, here: NDArray[np.bool_] | None = None) -> bool:
        """Return whether the servers sample from the policy, for all or some of the tokens.

        Args:
            before: [M] logprobs of the previous version, in bf16.
            here: [M] bool.
        """
        assert self.weight_bounds is not None
        here = np.ones(len(sample.step), bool) if here is None else here
        now, rollout = sample.logprobs[here], sample.rollout[here]
        if not self.weight_bounds.holds(LogprobGap.of(now, rollout)):
            return False
        if not self.weight_bounds.bf16:
            return True
        return not mean_excess(now, rollout) and (
            before is None or not self.weight_bounds.slope_to_previous(now, before[here], rollout)
        )

    def _explain(self, sample: Sample) -> str:
        """Return the cause for all of the tokens; if there is none, the cause for the answers outside of the bounds."""
        assert self.weight_bounds is not None
        cause = explain(self.trainer, sample, self.options, self.weight_bounds, self.first)
        if UNKNOWN not in cause and cause != ROUNDING:
            return cause
        part, faulty = self._split_faulty(sample)
        if not part:
            return cause
        cause_of_part = explain(self.trainer, faulty, self.options, self.weight_bounds, self.first)
        return cause if cause_of_part == ROUNDING else part + cause_of_part

    def _split_faulty(self, sample: Sample) -> tuple[str, Sample]:
        """Return a message if only some answers agree, and the answers that do not."""
        assert self.weight_bounds is not None
        sample = sample.by_answer(self.trainer)
        bad = [row for row in range(len(sample.rows)) if not self.weight_bounds.holds(sample.gap_of_row(row))]
        if not bad or len(bad) == len(sample.rows):
            return "", sample
        message = (
            f"{len(sample.rows) - len(bad)} of {len(sample.rows)} answers agree: one address may serve several "
            "servers. Pass the address of each server, so that each gets the weights. "
        )
        return message, sample.of_rows(bad, self.trainer)

    def _cause_of_rollouts(self, sequences: Sequences, here: NDArray[np.bool_], mixed: NDArray[np.bool_]) -> str:
        """Return why rollouts are not of the policy although answers to probes are."""
        assert self.weight_bounds is not None
        sample = sample_of(self.trainer, sequences, here, mixed)
        if sample is None:
            return "The cause is unknown, since the step contains images."
        fresh = None if self.probe_sampler is None else self._probe_uncached().gap()
        cause = self._explain(sample)
        if (
            fresh is not None
            and fresh.terms
            and self.weight_bounds.holds(fresh)
            and (UNKNOWN in cause or ROUNDING in cause)
        ):
            return STALE
        return cause

    def _cause_before(self, claimed: Sample) -> str:
        """Return why tokens that claim the previous version are not of it."""
        assert self.weight_bounds is not None
        with previous_weights(self.trainer, self.options):
            part, faulty = self._split_faulty(claimed)
            return part + explain(self.trainer, faulty, self.options, self.weight_bounds, self.first)

    def _check_bias(self, number: int, sample: Sample) -> None:
        """Test for small mistakes in bf16: they shift logprobs in one direction, which rounding does not."""
        assert self.weight_bounds is not None
        if not self.weight_bounds.bf16:
            return
        before = previous_logprobs(self.trainer, self.options, sample)
        slope = 0.0 if before is None else self.weight_bounds.slope_to_previous(sample.logprobs, before, sample.rollout)
        if slope:
            message = f"They are {slope:.0%} of the way to the previous version, which rounding does not explain. "
            raise self._fault(number, self.trainer.steps_done, sample.gap(), message + self._cause_of_probes(sample))
        if nats := mean_excess(sample.logprobs, sample.rollout):
            message = f"Their logprobs are {nats:.2g} nats higher on average, which rounding does not explain. "
            raise self._fault(number, self.trainer.steps_done, sample.gap(), message + self._cause_of_probes(sample))
        self._search(number, sample)

    def _search(self, number: int, sample: Sample) -> None:
        """Try the causes of mistakes that neither bounds nor averages show, as often as `MAX_TIME_SHARE` allows.

        The search always runs before the first push, after each of the first `PUSHES` pushes, and if the noise has
        doubled since the last search.
        """
        assert self.weight_bounds is not None
        assert self.probe_sampler is not None
        began, square = time.perf_counter(), sample.gap().square
        pushes = min(self.trainer.steps_done, PUSHES)
        is_noisier, is_searched = square > 2 * self._noise, self._searched_after == pushes
        is_over_budget = self._spent > MAX_TIME_SHARE * (began - self._began)
        if self.trainer.ranks.broadcast(not is_noisier and is_searched and is_over_budget):
            return
        self._noise, self._searched_after = max(self._noise, square), pushes
        cause = explain(self.trainer, sample, self.options, self.weight_bounds, self.first)
        if UNKNOWN not in cause:
            raise self._fault(number, self.trainer.steps_done, sample.gap(), cause)
        if is_noisier and self.trainer.steps_done:
            fresh = self._probe_uncached()
            if rank_z_score(sample.off, fresh.off) > MIN_STANDARD_ERRORS:
                raise self._fault(number, self.trainer.steps_done, sample.gap(), STALE)
        self._spent += time.perf_counter() - began

    def _compare_before(self, number: int, sequences: Sequences, mixed: NDArray[np.bool_]) -> None:
        """Compare tokens that claim the previous version with that version, as often as `MAX_TIME_SHARE` allows."""
        assert self.weight_bounds is not None
        began, version = time.perf_counter(), self.trainer.steps_done
        if self.trainer.ranks.broadcast(self._spent > MAX_TIME_SHARE * (began - self._began)) or not version:
            return
        claimed = sample_of(self.trainer, sequences, sequences.version == version - 1, mixed)
        if claimed is not None and (before := previous_logprobs(self.trainer, self.options, claimed)) is not None:
            gap = claimed.gap(before)
            if not self.weight_bounds.holds(gap):
                cause = self._cause_before(claimed)
                note = "These tokens are of the previous version and were compared with its weights. "
                raise self._fault(number, version - 1, gap, note + cause)
        self._spent += time.perf_counter() - began
