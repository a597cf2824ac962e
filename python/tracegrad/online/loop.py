"""The trainer's side: groups from the folder, one optimizer step, the proof before it, the push after it.

Every rank follows the folder; the first one collects and decides what a step takes, and the ledger tells the others.
Called as `tracegrad.online.train` and by `replay`.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from tracegrad import metrics
from tracegrad.alignment import align
from tracegrad.batch import ModelShape, Step
from tracegrad.codes import CUT, ENDINGS
from tracegrad.interrupt import Interrupt
from tracegrad.learner import Run
from tracegrad.learner.feed import Feed, NothingToLearn
from tracegrad.learner.keeper import Keeper
from tracegrad.learner.record import TermRecord
from tracegrad.learner.settle import describe_attention, settle_rows
from tracegrad.learner.setup import bucket_of, check_media, check_vocabulary
from tracegrad.metrics.dashboards import log_traces
from tracegrad.online import frames
from tracegrad.online.bond import Bond
from tracegrad.online.canary import Canary
from tracegrad.online.check import Check, Forks
from tracegrad.online.collector import Collector
from tracegrad.online.elsewhere import Elsewhere
from tracegrad.online.frames import Follower, Place
from tracegrad.online.ledger import Ledger, Taken
from tracegrad.online.link import Interrupted
from tracegrad.online.logged import beside, functions_of, tools_of
from tracegrad.online.options import Online, Play
from tracegrad.online.proof import Gap, Proof, own_terms
from tracegrad.online.signal import Signal
from tracegrad.online.ways import weights_of
from tracegrad.report import write_report
from tracegrad.rollout.progress import Progress, left
from tracegrad.sequence import Sequences
from tracegrad.tokenizer import Tokenizer
from tracegrad.trace import Traces

POLL_S = 0.5
"""Until the folder is looked into again for what other processes have played."""


@dataclass
class Loop:
    """A run between two steps.

    Args:
        driven: the policy and its optimizer.
        tokenizer: of the model.
        options: of the run.
        ledger: which groups each step took.
        player: what plays; None on ranks that follow, and in a replay.
        sinks: take a row each step.
        say: takes the sentences that a user should read.
        proof: what stops the run; None where there are no servers to be wrong.
        apart: others play, in processes that go by the newest version that they were told.
        play: of the run.
        first: folder of the model that the run began with, where that is the one that servers start with.
    """

    driven: Run
    tokenizer: Tokenizer
    options: Online
    ledger: Ledger
    player: Collector | Elsewhere | None
    sinks: Sequence[metrics.Sink]
    say: Callable[[str], None]
    proof: Proof | None = field(default_factory=Proof)
    rows: list[dict[str, Any]] = field(default_factory=list)
    evaluate: Callable[[int], dict[str, Any]] | None = None
    apart: bool = False
    play: Play = field(default_factory=Play)
    first: Path | None = None

    def __post_init__(self) -> None:
        self.folder = self.driven.out / frames.FOLDER
        self.follower = Follower(self.folder)
        self.queue: list[tuple[Place, Traces, bool]] = []
        self.ranks = self.driven.ranks
        self.check = Check(self.driven, self.options, self.proof, first=self.first)
        self._settled = False
        self._shown: tuple[Sequences, TermRecord] | None = None
        told = {"rank": self.ranks.rank, "world": self.ranks.world, "taken": self.driven.taken}
        self.keeper = Keeper(self.driven.out, self.driven.config.terms, self.driven.objective, **told)
        self.signal = Signal.of(self.driven.config)

    def run(self, interrupt: Interrupt) -> str:
        """Steps until the last, a signal, or the end of the tasks; "done", "signal" or "tasks"."""
        try:
            return self._run(interrupt)
        finally:
            self.keeper.close()

    def _run(self, interrupt: Interrupt) -> str:
        self.bond = Bond.of(self.ranks, interrupt)
        if self.player is not None:
            self.player.link.interrupted = lambda: interrupt.received is not None
        at = self._beginning()
        for taken in self.ledger.steps:
            self.follower.skip(taken.groups)
        # What plays elsewhere knows the versions of all these steps: servers are given none before the last of them.
        self._again = len(self.ledger.steps) if self.apart else 0
        if at >= self._again:
            self._begin(at)
        while at < self.options.steps:
            began = time.perf_counter()
            with self.bond.first():
                found = self._groups(at)
            if found is None:
                self.bond.end()
                break
            try:
                self._step(*found, waited=time.perf_counter() - began)
            except Interrupted:  # while the weights in the servers were checked: no update was taken
                break
            at += 1
            if at == self._again:
                self._begin(at)
            elif at > self._again:
                if self.player is not None:
                    self.player.step_taken(at)
                with self.bond.first():
                    self._evaluated(at)
        self._save()
        if interrupt.received is not None:
            return "signal"
        return "done" if at >= self.options.steps else "tasks"

    def _begin(self, at: int) -> None:
        """Gives the servers the weights that they are to have first, and lets groups begin."""
        if self.proof is not None:
            self._push()
            self._look()
            with self.bond.first():
                self._evaluated(at)
        if self.player is not None:
            self.player.step_taken(len(self.ledger.steps))
            self.player.begin()

    def _look(self) -> None:
        """Looks at what the servers answer before anything is played."""
        link = None if self.player is None else self.player.link
        canary = self.check.canary = Canary(self.driven, link, self.play, self.tokenizer)
        with self.bond.first():
            for line in canary.look():
                if self.ranks.first:
                    self.say(f"server   {line}")

    def _beginning(self) -> int:
        """The first step of the ledger that the policy has not taken."""
        steps = self.ledger.steps
        return next((each.step for each in steps if each.version >= self.driven.taken), len(steps))

    def _groups(self, step: int) -> tuple[Taken, Traces] | None:
        """The groups of a step: by the ledger where they were chosen before, else what has been played."""
        if step < len(self.ledger.steps):
            taken = self.ledger.steps[step]
            return taken, Traces.concatenate(frames.read(self.folder, place) for place in taken.trained)
        if self.player is None:
            if self.ranks.alone:
                return None
            taken = self.ledger.wait(step, self.bond.over)
            return None if taken is None else self._groups(taken.step)
        chosen = self._chosen()
        if chosen is None:
            return None
        dull = [index for index, (_, _, teaches_nothing) in enumerate(chosen) if teaches_nothing]
        taken = self.ledger.add(self.driven.taken, [place for place, _, _ in chosen], dull)
        return taken, Traces.concatenate(traces for _, traces, teaches_nothing in chosen if not teaches_nothing)

    def _chosen(self) -> list[tuple[Place, Traces, bool]] | None:
        """Waits for enough groups whose rewards differ, or as many as a step may have."""
        assert self.player is not None
        pace, progress = self.player.pace, Progress(self.say)
        while not self.bond.over():
            over = self.player.over
            new, dull = self.follower.look(), self.signal.is_dull
            if new and self.player.failing is not None:  # known before the last of them was there
                raise self.player.failing
            self.queue += [(place, traces, dull(self.signal.of_traces(traces))) for place, traces in new]
            sharp = np.cumsum([not teaches_nothing for _, _, teaches_nothing in self.queue])
            enough = int(np.searchsorted(sharp, pace.groups)) + 1
            if (len(sharp) and sharp[-1] >= pace.groups) or len(self.queue) >= pace.most or over:
                chosen = self.queue[: min(enough, pace.most)]
                self.queue = self.queue[len(chosen) :]
                return chosen or None
            here = int(sharp[-1]) if len(sharp) else 0
            progress.tick(
                lambda seconds, here=here: (
                    f"playing  {here} of {pace.groups} groups whose rewards differ, {seconds:.0f} s; "
                    + left(seconds, here, pace.groups)
                )
            )
            self.player.check()
            self.player.wait(POLL_S)
        return None

    def _step(self, taken: Taken, traces: Traces, *, waited: float) -> None:
        began = time.perf_counter()
        version = self.driven.taken
        about = {"groups": len(taken.groups), "groups_dull": len(taken.dull)}
        traces, sequences = self._aligned(traces)
        if not len(traces):
            self.say(f"step {taken.step + 1}: no group had unlike rewards; there is nothing to learn, and no update.")
            return
        try:
            step, rewards = self._packed(sequences)
        except NothingToLearn as nothing:
            self.say(f"step {taken.step + 1}: no update; {nothing}")
            return
        served = self.proof is not None and taken.step >= self._again
        if self.check.canary is not None and self.ranks.first:
            groups = dict(zip(traces.groups, range(len(traces)), strict=True))
            self.check.canary.prepare(traces[index].to_dict() for index in groups.values())
        here = own_terms(step, version)
        mixed = _mixed(traces, sequences)
        mixed &= self.options.sync != "lora"  # a call keeps the adapter that it began with
        here &= ~mixed[step.trace]
        gap = Gap(0)

        def check(logprobs: Any) -> None:
            nonlocal gap
            gap = self.check.gap(taken.step + 1, step, logprobs, here, Forks.of(step, sequences), sequences, mixed)

        prepared, asked = time.perf_counter(), self._asked_s
        outcome = self.driven.step(step, version, rewards=rewards, endings=sequences.ending, check=check)
        self._shown = sequences, TermRecord.of(self.driven.taken, step, outcome)
        self.keeper.step(self.driven.taken, step, outcome, sequences, sets=self.options.steps - taken.step)
        trained, asked, gone = time.perf_counter(), self._asked_s - asked, self._gone_s
        pushed = self._push() if served else None
        gone = self._gone_s - gone
        drift = sequences.drift
        about |= {
            "version": version,
            "forks": sequences.branches - sequences.traces,
            "tokens_lost": drift.recorded - drift.exact,
            "seconds_prepared": prepared - began,
            "seconds_waited": waited + asked + gone,
            "seconds_trained": trained - prepared - asked,
            "seconds_pushed": time.perf_counter() - trained - gone,
            "sync_pause": 0.0 if pushed is None else pushed.seconds,
            **gap.row(),
            **tools_of(traces),
        }
        self._log(taken.step + 1, about, functions_of(traces))
        log_traces(self.sinks, (trace for trace in traces if trace.group == traces[0].group), taken.step + 1)
        every = self.driven.config.checkpoint.every
        if every and self.driven.taken % every == 0:
            self._save()

    def _save(self) -> None:
        """A checkpoint, and on the first rank the page of the run so far."""
        self.driven.save()
        if self.ranks.first and self._shown is not None:
            sequences, terms = self._shown
            rows, out = metrics.read_rows(self.driven.out / "metrics.jsonl"), self.driven.out
            told = {"rows": rows, "sequences": sequences, "tokenizer": self.tokenizer, "terms": [terms]}
            write_report(out / "report.html", **told, title=f"{out.name}, the tokens of step {terms.step}")

    def _aligned(self, traces: Traces) -> tuple[Traces, Sequences]:
        """The traces in which anything was sampled: what failed before its first answer holds nothing to train on."""
        sequences = align(traces, self.tokenizer, on_error="skip")
        there = {sequences.trace_ids[index] for index in np.unique(sequences.trace)}
        kept = [index for index, trace in enumerate(traces) if trace.id in there]
        if len(kept) == sequences.traces:
            return traces, sequences
        traces = traces[kept]
        return traces, align(traces, self.tokenizer)

    def _packed(self, sequences: Sequences) -> tuple[Step, Any]:
        """One step of all groups, of this rank, with the rewards of its traces."""
        config = self.driven.config
        model = self.driven.model
        cut = {"shape": ModelShape.known(model.config), "bucket": bucket_of(config)}
        told = config.filter
        if told.tolerance and self.signal.compared:  # groups were chosen by it, as from a file with even_groups
            config = replace(config, filter=replace(told, even_groups=True))
        if told.truncated or told.zero_truncated:  # a call that its client left says no end, and was cut off by that
            unsaid = sequences.ending == ENDINGS.index("unknown")
            sequences = replace(sequences, ending=np.where(unsaid, CUT, sequences.ending).astype(np.uint8))
        feed = Feed.of(sequences, self.driven.objective, config, ranks=self.ranks.world, rank=self.ranks.rank, **cut)
        if not self._settled:
            check_vocabulary(sequences, model)
            for sentence in [*feed.notes, *check_media(sequences, model)]:
                self.say(f"note     {sentence}")
            longest = min(int(np.diff(sequences.cu_seqlens).max()), config.pack.token_budget)
            why = settle_rows(self.driven.target, longest, trees=feed.shares)
            self._trees, self._settled = not why, True
            self.say(f"note     {describe_attention(self.driven.target, trees=feed.shares and self._trees)}")
        [step] = replace(feed, trees=self._trees).steps(0)
        return step, feed.rewards

    @property
    def _asked_s(self) -> float:
        """Seconds in which servers were waited for, to check or to push."""
        return 0.0 if self.player is None else self.player.link.asked_s

    @property
    def _gone_s(self) -> float:
        """Those of them in which no server could be asked."""
        return 0.0 if self.player is None else self.player.link.gone_s

    def _push(self) -> Any:
        """What came of a push; None on ranks without servers, and where a signal came while none could be asked."""
        weights = weights_of(self.driven, self.options)
        if self.player is None:
            return None
        with self.bond.first():
            try:
                pushed = self.player.link.push(weights, self.driven.taken)
            except Interrupted:
                return None
        for line in pushed.lines():
            self.say(f"server   {line}")
        return pushed

    def _evaluated(self, at: int) -> None:
        """Evaluates before the first step, after the last, and at the cadence between."""
        every = self.options.eval_every
        if self.evaluate is not None and (at in (0, self.options.steps) or (every and at % every == 0)):
            began = time.perf_counter()
            try:
                found = self.evaluate(at)
            except Interrupted:
                self.say(f"evaluation after step {at}: left out, as a signal came")
                return
            row = metrics.finite({"step": at, **found, "seconds_evaluated": time.perf_counter() - began})
            self.rows.append(row)
            metrics.log_all(self.sinks, row)

    def _log(self, number: int, about: dict[str, Any], said: Mapping[str, float]) -> None:
        row = metrics.finite({**self.driven.row(), **about, "step": number})
        if self.player is not None:
            counts = self.player.counts
            row |= {"trajectories": counts.trajectories, "trajectories_failed": counts.failed}
            row |= {"trajectories_without_reward": counts.without_reward, "calls_retried": self.player.retried}
        row = beside(row, metrics.finite(said))
        self.rows.append(row)
        metrics.log_all(self.sinks, row)


def _mixed(traces: Traces, sequences: Sequences) -> Any:
    """[R] bool: traces with a call that was under way while weights changed, whose tokens are of two versions."""
    told = {trace.id: b'"received_version"' in trace.record for trace in traces}
    return np.array([told.get(name, False) for name in sequences.trace_ids], bool)
