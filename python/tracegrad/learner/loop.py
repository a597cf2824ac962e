"""Epochs over recorded sequences: value measured, checkpoints written, and a stop that loses nothing.

Everything a step needs is a function of the config, the data and the checkpoint, so that a resumed run repeats the
uninterrupted one. A step itself is `Run`'s. Called by the command line and by users as `tracegrad.learner.train`.
"""

import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from tracegrad import metrics
from tracegrad.algebra import Objective
from tracegrad.batch import ModelShape, Step
from tracegrad.catalog import Source
from tracegrad.codes import LOGPROB_KINDS
from tracegrad.config import Config, as_dict
from tracegrad.errors import ArgumentError
from tracegrad.interrupt import Interrupt
from tracegrad.learner import checkpoint
from tracegrad.learner.adapters import has_adapters
from tracegrad.learner.epochs import Epochs
from tracegrad.learner.feed import Feed
from tracegrad.learner.keeper import Keeper
from tracegrad.learner.measured import HeldOut
from tracegrad.learner.off_policy_value import MIN_ESS
from tracegrad.learner.ranks import Ranks
from tracegrad.learner.record import TermRecord, Trained
from tracegrad.learner.run import Run
from tracegrad.learner.settle import describe_attention, settle_rows
from tracegrad.learner.setup import Optimizers, bucket_of, check_media, check_ranks_see, check_vocabulary
from tracegrad.learner.shown import Records
from tracegrad.learner.step import Outcome
from tracegrad.metrics import dashboards
from tracegrad.mirror import Mirror
from tracegrad.sampling import kept_mass
from tracegrad.sequence import Sequences


def train(
    data: Sequences | Source,
    model: Any,
    *,
    objective: Objective,
    out: str | Path | Mirror,
    config: Config | None = None,
    tokenizer: str | Path | None = None,
    resume: bool = False,
    optimizer: Optimizers | None = None,
    reference: Any = None,
    sinks: Sequence[metrics.Sink] | None = None,
    say: Callable[[str], None] = print,
) -> Trained:
    """Trains `model` on recorded traces; its parameters are changed in place.

    Under torchrun every rank calls this alike; files are written and things said by the first.

    Args:
        data: Sequences, from `align` or `Sequences.from_arrays`; or `Shards`, of which no more is in memory than the
            steps ahead need.
        model: a transformers causal LM, with peft's adapters or without; moved to the device, float32, dropout off.
        objective: a preset or another value of `Objective`.
        out: folder for metrics.jsonl, config.toml and checkpoints, made if it is not there: one that all ranks see, or
            an address of fsspec, for which each machine works in a folder of its own.
        config: default `Config()`; its `objective` section is for the command line and not read.
        tokenizer: folder whose tokenizer files go into each checkpoint.
        resume: go on from the newest checkpoint in `out`, where there is one.
        optimizer: over `model.parameters()`, or a function of groups of parameters that makes one; default AdamW as the
            config says. The schedule and clipping stay the config's.
        reference: a causal LM to measure the reference logprobs with, for objectives that take them; default the
            folder `train.ref_model`, or the starting model (without its adapters, where it has any).
        sinks: where rows go beside metrics.jsonl; default a progress line, and the dashboards of `train.log_to`.
        say: takes the few sentences that a user should read.

    Raises:
        ArgumentError: if objective, data and config do not fit together, or `out` holds a run and `resume` is False.
        ReadError: if the checkpoint to resume from is damaged.
        TracegradError: if the gradient is not finite or a checkpoint cannot be written.
    """
    config = config or Config()
    ranks = Ranks.join(config.train.timeout)
    cut = {"shape": ModelShape.known(model.config), "bucket": bucket_of(config)}
    feed = Feed.of(data, objective, config, ranks=ranks.world, rank=ranks.rank, **cut)
    check_vocabulary(feed.source, model)
    feed = replace(feed, notes=(*feed.notes, *check_media(feed.source, model)))
    given = {"tokenizer": tokenizer, "optimizer": optimizer, "reference": reference}
    driven = Run(model, objective, config, out=out, **given, keep_start=False, ranks=ranks)
    check_ranks_see(feed.source, driven.target, config)
    if driven.reference is not None:
        check_vocabulary(feed.source, driven.reference.model)
    longest = min(int(feed.catalog.longest.max()), config.pack.token_budget)
    if why := settle_rows(driven.target, longest, trees=feed.shares):
        feed = replace(feed, trees=False, notes=(*feed.notes, f"prefixes are not shared: {why}."))
    loop = _Loop(feed, driven, say)
    driven.steps = loop.plan.total
    with ExitStack() as lock:
        with ranks.together():
            if ranks.first:
                lock.enter_context(driven.away.mirror.locked())
        rows = loop.start(resume)
        if ranks.first:
            for sentence in [*feed.notes, *loop.opening()]:
                say(f"note     {sentence}")
        shown = _sinks(loop, sinks) if ranks.first else []
        try:
            with Interrupt() as interrupt, driven.together(ends=True):
                stopped = loop.run([loop.lines, *shown], rows, interrupt)
        finally:
            loop.epochs.close()
            loop.keeper.close()
            for sink in [loop.lines, *shown]:
                sink.close()
        with ranks.together():
            driven.away.push()
    last = checkpoint.list_checkpoints(driven.out)[-1]
    terms = [record for part in ranks.gathered(loop.terms.records) for record in part]
    return Trained(
        driven.taken,
        loop.plan.total,
        stopped,
        interrupt.code(stopped),
        last,
        rows,
        terms,
        driven.watch.seconds,
        driven.idle.overall(),
        ranks.sum(loop.terms.pull),
        driven.away.named(last),
    )


def _sinks(loop: "_Loop", sinks: Sequence[metrics.Sink] | None) -> list[metrics.Sink]:
    if sinks is not None:
        return list(sinks)
    config = loop.driven.config
    chosen = dashboards.opened(config.train.log_to, loop.driven.out, as_dict(config))
    return [*chosen, metrics.Progress(loop.plan.total, loop.driven.taken)]


class _Silent:
    """What a rank that is not the first writes: nothing."""

    def log(self, row: metrics.Row) -> None:
        pass

    def close(self) -> None:
        pass


@dataclass
class _Loop:
    """A run over a feed, between two steps."""

    feed: Feed
    driven: Run
    say: Callable[[str], None] = print

    def __post_init__(self) -> None:
        self.epochs = Epochs(self.feed, self.driven)
        self.plan = self.epochs.plan
        self.held = HeldOut(self.feed, self.epochs)
        self.fingerprint = self.feed.fingerprint()
        self.lines: metrics.Sink = _Silent()
        self.terms = Records(self.feed.catalog, bounded=not self.feed.source.in_memory)
        self.worse = False
        self.keeper = Keeper.silent(self.driven.out, self.driven.objective)

    def start(self, resume: bool) -> list[dict[str, Any]]:
        """Makes the folder, takes up a checkpoint, and opens metrics.jsonl; returns the rows it keeps."""
        out, first = self.driven.out, self.driven.ranks.first
        checkpoints = checkpoint.list_checkpoints(out)
        if checkpoints and not resume:
            raise ArgumentError(
                f"{self.driven.away} holds a run, its newest checkpoint is {checkpoints[-1].name}. A new run would "
                "overwrite it. Go on with --resume, or give another --out."
            )
        progress = self.driven.restore(fingerprint=self.fingerprint)
        if progress is not None:
            self.epochs.restore(checkpoints[-1], progress)
            if "best" in progress.logprobs:
                self.held.best = checkpoint.logprobs_of(checkpoints[-1], progress, "best", self.held.terms)
            for term in checkpoint.read_terms(checkpoints[-1], self.driven.ranks):
                if self.plan.epoch_of(term.step - 1) == self.plan.epochs - 1:
                    self.terms.add(term)
            if "pull" in progress.control:  # of all terms, not of those that were kept alone
                self.terms.pull = progress.control["pull"] / self.driven.ranks.world
        self.driven.begin()
        ranks = self.driven.ranks
        told = {"rank": ranks.rank, "world": ranks.world, "taken": self.driven.taken}
        self.keeper = Keeper(out, self.driven.config.terms, self.driven.objective, **told)
        if not first:
            return []
        with checkpoint.writable(out):
            self.lines = metrics.JsonLines(out / "metrics.jsonl", keep_to_step=self.driven.taken or None)
        return metrics.read_rows(out / "metrics.jsonl")

    def opening(self) -> list[str]:
        """What a user should know before the first step."""
        config, taken = self.driven.config, self.driven.taken
        said = [f"resumed after step {taken} of {self.plan.total}."] if taken else []
        said.append(self.driven.policy.sentence(config))
        said.append(describe_attention(self.driven.target, trees=self.feed.shares))
        if has_adapters(self.driven.model) and not config.train.lora_rank:
            said.append("the model's LoRA adapters are trained further; the model without them is the reference.")
        if self.feed.shares and taken < self.plan.total:
            said.append(f"{self.epochs.packed(taken).step.sharing}.")
        held = int(self.feed.held.sum())
        if config.data.holdout and held < MIN_ESS:
            said.append(
                f"{held} traces are held out, value needs {MIN_ESS:g} effective ones: raise data.holdout to know it."
            )
        return said

    def save(self) -> None:
        """Writes a checkpoint of the state as it is."""
        known = self.epochs.logprobs()
        if self.held.best is not None:
            known["best"] = self.held.best
        control = self.epochs.control()
        if self.terms.records and not self.feed.source.in_memory:
            control["pull"] = self.driven.ranks.sum(self.terms.pull)
        told = {"logprobs": known, "control": control}
        self.keeper.flush()
        self.driven.save(fingerprint=self.fingerprint, terms=self.terms.records, **told)

    def run(
        self, sinks: Sequence[metrics.Sink], rows: list[dict[str, Any]], interrupt: Interrupt
    ) -> Literal["done", "ess", "worse", "signal"]:
        """Steps until the end, a signal, or what `[stop]` says; a checkpoint is written in each case."""
        driven, plan = self.driven, self.plan

        def log(row: dict[str, Any]) -> None:
            rows.append(metrics.finite(row))
            metrics.log_all(sinks, rows[-1])

        def stops() -> bool:
            """Whether a signal came, to any rank."""
            interrupt.received = driven.ranks.largest(interrupt.received or 0) or None
            return interrupt.received is not None

        if driven.taken == 0:
            log({"step": 0, **self.held.row()})
        while driven.taken < plan.total and not stops():
            if not self.epochs.refresh(driven.taken, stops):
                break
            row = self._step()
            if plan.measures_value(driven.taken) and not stops():
                row.update(self.held.row())
            log(row)
            small = 0 < row.get("off_policy_value_ess_fraction", 1.0) < driven.config.stop.below_ess
            if small or self.held.worse:
                self.save()
                return "ess" if small else "worse"
            if plan.saves(driven.taken):
                self.save()
        self.save()
        return "signal" if stops() and driven.taken < plan.total else "done"

    def _step(self) -> dict[str, Any]:
        """One optimizer step; the row of its metrics."""
        driven, index, began = self.driven, self.driven.taken, time.perf_counter()
        with driven.watch("prepare"):
            step, corrected = self.epochs.take(index)
        told = {"newest": self.feed.newest, "rewards": self.feed.rewards, "endings": self.feed.catalog.ending}
        outcome = driven.update(step, corrected, **told, began=began)
        if index == 0 and driven.ranks.first and driven.config.data.accept_truncated_sampling:
            self._say_kept_mass(step, outcome)
        self._record(step, outcome)
        return {"step": driven.taken, "epoch": self.plan.epoch_of(index), **self.epochs.row(), **driven.row()}

    def _say_kept_mass(self, step: Step, outcome: Outcome) -> None:
        """What a cut distribution kept, by the first step: the policy is still the one that it was given."""
        catalog = self.feed.catalog
        processed = catalog.logprob_kind[step.trace] == LOGPROB_KINDS.index("processed")
        found = kept_mass(outcome.logprobs, step.rollout_logprobs, catalog.reshaped[step.trace], processed)
        if found is None:
            self.say(
                "note     the kept mass S is not measured: no processed logprobs of tokens that were only cut off."
            )
        else:
            mean, least = found
            self.say(f"note     kept mass S at the first step: {mean:.3f} on average, {least:.3f} at least.")

    def _record(self, step: Step, outcome: Outcome) -> None:
        taken = self.driven.taken
        self.keeper.step(taken, step, outcome, self.feed.source, passes=self.plan.epochs)
        if self.plan.epoch_of(taken - 1) == self.plan.epochs - 1:
            self.terms.add(TermRecord.of(taken, step, outcome))
