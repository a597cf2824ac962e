"""The loop: epochs over steps, `old` refreshed, value measured, checkpoints written, and a stop that loses nothing.

Everything a step needs is a function of the config, the data and the checkpoint, so that a resumed run repeats the
uninterrupted one. No arithmetic of losses here. Called by the command line and by users as `tracegrad.learner.train`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from tracegrad import metrics
from tracegrad.algebra import Objective
from tracegrad.batch import ModelShape, Step
from tracegrad.config import Config, as_dict, to_toml
from tracegrad.correction import Corrected, proximal_alpha
from tracegrad.errors import ArgumentError, TracegradError
from tracegrad.learner import checkpoint
from tracegrad.learner.adapters import adapters_off
from tracegrad.learner.ahead import Ahead
from tracegrad.learner.entropy import Control
from tracegrad.learner.feed import Feed
from tracegrad.learner.idle import Idle
from tracegrad.learner.interrupt import Interrupt
from tracegrad.learner.memory import out_of_memory
from tracegrad.learner.parallel import Placed
from tracegrad.learner.ranks import Ranks
from tracegrad.learner.record import TermRecord, Trained
from tracegrad.learner.row import row_of
from tracegrad.learner.settle import settle_rows
from tracegrad.learner.setup import (
    Optimizers,
    Prepared,
    bucket_of,
    check_media,
    check_same,
    check_vocabulary,
    other_model,
    prepared,
)
from tracegrad.learner.step import Floats, Outcome, detached, measure, optimizer_step
from tracegrad.learner.value import MIN_ESS, Value, estimate, good_and_bad
from tracegrad.sequence import Sequences
from tracegrad.shards import write_bytes


def train(
    sequences: Sequences,
    model: Any,
    *,
    objective: Objective,
    out: str | Path,
    config: Config | None = None,
    tokenizer: str | Path | None = None,
    resume: bool = False,
    optimizer: Optimizers | None = None,
    reference: Any = None,
    sinks: Sequence[metrics.Sink] | None = None,
    say: Callable[[str], None] = print,
) -> Trained:
    """Trains `model` on recorded sequences; its parameters are changed in place.

    Under torchrun every rank calls this alike; files are written and things said by the first.

    Args:
        sequences: from `align` or `Sequences.from_arrays`.
        model: a transformers causal LM, with peft's adapters or without; moved to the device, float32, dropout off.
        objective: a preset or another value of `Objective`.
        out: folder for metrics.jsonl, config.toml and checkpoints; made if it is not there. One that all ranks see.
        config: default `Config()`; its `objective` section is for the command line and not read.
        tokenizer: folder whose tokenizer files go into each checkpoint.
        resume: go on from the newest checkpoint in `out`, where there is one.
        optimizer: over `model.parameters()`, or a function of groups of parameters that makes one; default AdamW as the
            config says. Warm-up and clipping stay the config's.
        reference: a causal LM to measure the reference logprobs with, for objectives that take them; default the
            folder `train.ref_model`, or the starting model (without its adapters, where it has any).
        sinks: where rows go beside metrics.jsonl; default a progress line, and TensorBoard where the config says so.
        say: takes the few sentences that a user should read.

    Raises:
        ArgumentError: if objective, data and config do not fit together, or `out` holds a run and `resume` is False.
        ReadError: if the checkpoint to resume from is damaged.
        TracegradError: if the gradient is not finite or a checkpoint cannot be written.
    """
    config, out, ranks = config or Config(), Path(out), Ranks.join()
    cut = {"shape": ModelShape.known(model.config), "bucket": bucket_of(config)}
    feed = Feed.of(sequences, objective, config, ranks=ranks.world, rank=ranks.rank, **cut)
    check_vocabulary(sequences, model)
    feed = replace(feed, notes=(*feed.notes, *check_media(sequences, model)))
    model, policy = prepared(model, config, ranks, optimizer)
    longest = min(int(np.diff(sequences.cu_seqlens).max()), config.pack.token_budget)
    if why := settle_rows(policy.target, longest, trees=feed.shares):
        feed = replace(feed, trees=False, notes=(*feed.notes, f"prefixes are not shared: {why}."))
    other = other_model(reference, feed, policy)
    loop = _Loop(feed, policy, model, other, out, Path(tokenizer) if tokenizer else None)
    rows = loop.start(resume)
    if ranks.first:
        for sentence in [*feed.notes, *loop.opening()]:
            say(f"note     {sentence}")
    shown = _sinks(loop, sinks) if ranks.first else []
    try:
        with Interrupt() as interrupt:
            stopped = loop.run([loop.lines, *shown], rows, interrupt)
    except torch.OutOfMemoryError as error:
        told = f"step {loop.taken + 1}: {out_of_memory(error, config)}"
        ranks.tell(told)
        raise TracegradError(told) from error
    except RuntimeError as error:
        if told := ranks.heard():
            raise TracegradError(f"{told} This rank stops with it.") from error
        raise
    finally:
        loop.ahead.close()
        for sink in [loop.lines, *shown]:
            sink.close()
    code = (interrupt.exit_code or 0) if stopped == "signal" else 0
    last = checkpoint.list_checkpoints(out)[-1]
    terms = [record for part in ranks.gathered(loop.terms) for record in part]
    idle = loop.idle.overall()
    return Trained(loop.taken, loop.plan.total, stopped, code, last, rows, terms, loop.watch.seconds, idle)


def _sinks(loop: _Loop, sinks: Sequence[metrics.Sink] | None) -> list[metrics.Sink]:
    if sinks is not None:
        return list(sinks)
    chosen: list[metrics.Sink] = []
    if loop.config.train.tensorboard:
        chosen.append(metrics.TensorBoard(loop.out / "tensorboard"))
    return [*chosen, metrics.Progress(loop.plan.total, loop.taken)]


class _Silent:
    """What a rank that is not the first writes: nothing."""

    def log(self, row: metrics.Row) -> None:
        pass

    def close(self) -> None:
        pass


@dataclass
class _Loop:
    """State of a run between two steps."""

    feed: Feed
    policy: Prepared
    model: Any
    reference: Placed | None
    out: Path
    tokenizer: Path | None
    taken: int = 0
    terms: list[TermRecord] = field(default_factory=list)
    watch: metrics.Stopwatch = field(default_factory=metrics.Stopwatch)

    def __post_init__(self) -> None:
        self.config = self.feed.config
        self.target, self.precision, self.optimizer = self.policy.target, self.policy.precision, self.policy.optimizer
        self.ranks = self.target.ranks
        self.epochs: dict[int, list[Step]] = {0: self.feed.steps(self.feed.plan(1).shuffle_seed(0))}
        self.plan = self.feed.plan(len(self.epochs[0]))
        self.held = self.feed.held_step()
        self.known = {name: np.full(self.feed.sequences.tokens, np.nan, np.float32) for name in self._wanted()}
        self.fingerprint = self.feed.fingerprint()
        self.control = Control(self.feed.objective)
        self.ahead = Ahead(self._make)
        self.idle = Idle(self.target.device)

    def _wanted(self) -> list[str]:
        needs = self.feed.objective.needs
        return [name for name in ("old", "ref") if getattr(needs, name)]

    def start(self, resume: bool) -> list[dict[str, Any]]:
        """Makes the folder, takes up a checkpoint, and opens metrics.jsonl; returns the rows it keeps."""
        found = checkpoint.list_checkpoints(self.out)
        if found and not resume:
            raise ArgumentError(
                f"{self.out} holds a run, its newest checkpoint is {found[-1].name}. A new run would overwrite it. "
                "Go on with --resume, or give another --out."
            )
        self.lines: metrics.Sink = _Silent()
        try:
            if found:
                self._take_up(found[-1])
            if self.ranks.first:
                self.out.mkdir(parents=True, exist_ok=True)
                checkpoint.clear_staged(self.out)
                write_bytes(self.out / "config.toml", [to_toml(self.config).encode()])
                self.lines = metrics.JsonLines(self.out / "metrics.jsonl", keep_to_step=self.taken or None)
        except OSError as error:
            raise TracegradError(
                f"{error.filename or self.out}: {error.strerror}. Checkpoints have no place there. Give another --out."
            ) from error
        return metrics.read_rows(self.out / "metrics.jsonl") if self.ranks.first else []

    def _take_up(self, path: Path) -> None:
        progress = checkpoint.read_progress(path)
        check_same(path, progress, self._told(), self.fingerprint)
        checkpoint.restore(path, self.model, self.optimizer, self.ranks)
        self.taken = progress.step
        self.control.restore(progress.control)
        self.watch.seconds.update(progress.seconds)
        last = self.plan.epochs - 1
        self.terms = [t for t in checkpoint.read_terms(path, self.ranks) if self.plan.epoch_of(t.step - 1) == last]
        terms = self.feed.sequences.terms
        for name, values in self.known.items():
            values[terms] = checkpoint.logprobs_of(path, progress, name, len(terms))

    def _told(self) -> dict[str, Any]:
        options = {k: v for k, v in as_dict(self.config).items() if not k.startswith("objective.")}
        return {**options, "objective": repr(self.feed.objective)}

    def opening(self) -> list[str]:
        """What a user should know before the first step."""
        said = [f"resumed after step {self.taken} of {self.plan.total}."] if self.taken else []
        said.append(self.policy.sentence(self.config))
        if self.feed.shares and self.taken < self.plan.total:
            epoch, place = self._place(self.taken)
            said.append(f"{self.steps(epoch)[place].sharing}.")
        held = int(self.feed.held.sum())
        if self.config.data.holdout and held < MIN_ESS:
            said.append(
                f"{held} traces are held out, value needs {MIN_ESS:g} effective ones: raise data.holdout to know it."
            )
        return said

    def save(self) -> None:
        """Writes a checkpoint of the state as it is."""
        terms = self.feed.sequences.terms
        logprobs = {name: values[terms] for name, values in self.known.items()}
        known = {"logprobs": logprobs, "control": self.control.state(), "seconds": self.watch.seconds}
        progress = checkpoint.Progress(self.taken, self.fingerprint, self._told(), **known)
        with self.watch("checkpoint"):
            keep = self.config.checkpoint.keep
            where = {"tokenizer": self.tokenizer, "keep": keep, "terms": self.terms, "ranks": self.ranks}
            checkpoint.save(self.out, self.model, self.optimizer, progress, **where)

    def run(
        self, sinks: Sequence[metrics.Sink], rows: list[dict[str, Any]], interrupt: Interrupt
    ) -> Literal["done", "ess", "signal"]:
        """Steps until the end, a signal, or too small an effective sample; a checkpoint is written in each case."""

        def log(row: dict[str, Any]) -> None:
            rows.append(metrics.finite(row))
            metrics.log_all(sinks, rows[-1])

        if self.taken == 0:
            log({"step": 0, **self.value_row()})
        while self.taken < self.plan.total and not self._stops(interrupt):
            if self._refresh_ref(interrupt) or self._refresh_old(interrupt):
                break
            row = self._step()
            if self.plan.measures_value(self.taken) and not self._stops(interrupt):
                row.update(self.value_row())
            log(row)
            if 0 < row.get("value_ess_fraction", 1.0) < self.config.train.stop_below_ess:
                self.save()
                return "ess"
            if self.plan.saves(self.taken):
                self.save()
        self.save()
        return "signal" if self._stops(interrupt) and self.taken < self.plan.total else "done"

    def _stops(self, interrupt: Interrupt) -> bool:
        """Whether a signal came, to any rank."""
        interrupt.received = self.ranks.largest(interrupt.received or 0) or None
        return interrupt.received is not None

    def steps(self, epoch: int) -> list[Step]:
        """The packed steps of an epoch; at most two epochs are held."""
        if epoch not in self.epochs:
            self.epochs = {e: s for e, s in self.epochs.items() if e >= epoch - 1}
            self.epochs[epoch] = self.feed.steps(self.plan.shuffle_seed(epoch))
        return self.epochs[epoch]

    def _place(self, index: int) -> tuple[int, int]:
        return divmod(index, self.plan.steps_per_epoch)

    def step_at(self, index: int) -> Step:
        """The packed step with its old and reference logprobs, as far as they are known."""
        epoch, place = self._place(index)
        step = self.steps(epoch)[place]
        if self.feed.objective.needs.proximal:
            step = replace(step, alpha=proximal_alpha(-self.feed.age(step), self.plan.refreshed(index), index))
        return step.with_logprobs(**{name: values[step.origin] for name, values in self.known.items()})

    def _measured(self, model: Any, steps: list[Step], interrupt: Interrupt | None) -> Floats | None:
        """[tokens] logprobs of the terms of the steps on all ranks, NaN elsewhere; None where a signal came first."""
        found, here = np.zeros(self.feed.sequences.tokens, np.float32), np.zeros(self.feed.sequences.tokens, bool)
        for step in steps:
            if interrupt is not None and self._stops(interrupt):
                return None
            logprobs = step.with_logprobs(old=measure(model, step.batches, self.precision)).old_logprobs
            assert logprobs is not None
            found[step.origin], here[step.origin] = logprobs, True
        return self.ranks.merge(found, here)

    def _refresh(self, name: str, model: Any, window: range, interrupt: Interrupt) -> bool:
        """Measures `known[name]` for the terms of a window; True where a signal came first and a resumed run must."""
        steps = [self.steps(epoch)[place] for epoch, place in (self._place(index) for index in window)]
        with self.watch(name):
            found = self._measured(model, steps, interrupt)
        if found is not None:
            self.known[name][:] = np.where(np.isnan(found), self.known[name], found)
        return found is None

    def _refresh_ref(self, interrupt: Interrupt) -> bool:
        if "ref" not in self.known or not self.plan.refreshes_ref(self.taken):
            return False
        own = self.reference is None and not self.config.train.ref_every
        with adapters_off(self.model) if own else nullcontext():
            return self._refresh("ref", self.reference or self.target, self.plan.ref_window(self.taken), interrupt)

    def _refresh_old(self, interrupt: Interrupt) -> bool:
        if "old" not in self.known or not self.plan.refreshes_old(self.taken):
            return False
        self.known["old"][:] = np.nan
        return self._refresh("old", self.target, self.plan.window(self.taken), interrupt)

    def _make(self, index: int, beside: bool) -> tuple[Step, Corrected]:
        """A step and all of it that does not depend on the policy being trained."""
        step = self.step_at(index)
        reduce = self.ranks.all_reduce_beside if beside else self.ranks.all_reduce
        missing = self.config.train.missing
        return step, detached(step, self.feed.objective, missing, None if self.ranks.alone else reduce)

    def _announce(self) -> None:
        """Has the step after this one made ready, where nothing must be measured in between."""
        following = self.taken + 1
        due = ("old" in self.known and self.plan.refreshes_old(following)) or (
            "ref" in self.known and self.plan.refreshes_ref(following)
        )
        if following < self.plan.total and not due:
            self.ahead.announce(following)

    def _step(self) -> dict[str, Any]:
        """One optimizer step; the row of its metrics."""
        began = time.perf_counter()
        with self.watch("prepare"):
            step, corrected = self.ahead.take(self.taken)
        self._announce()
        lr = self.policy.warm(self.config, self.taken)
        with self.watch("train"):
            outcome = optimizer_step(
                self.target,
                step,
                self.control.applied(),
                self.optimizer,
                grad_clip=self.config.optimizer.grad_clip,
                precision=self.precision,
                corrected=corrected,
                left_out=step.idle(self.feed.objective.needs, corrected) if self.config.pack.skip_idle else None,
                idle=self.idle,
            )
        seconds = time.perf_counter() - began
        bonus = {"entropy_coef": self.control.coef} if self.control.adapts else {}
        self.control.update(outcome.entropy, outcome.keep, self.ranks.all_reduce)
        with self.watch("metrics"):
            seen = row_of(step, outcome, self.feed, self.ranks)
        self._record(step, outcome)
        self.taken += 1
        rate, idle = seen["tokens"] / seconds, self.idle.share()
        told = {"step": self.taken, "epoch": self.plan.epoch_of(self.taken - 1), "lr": lr, **bonus}
        waited = {} if idle is None else {"device_idle": idle}
        return {**told, **seen, "seconds": seconds, "tokens_per_s": rate, **waited}

    def _record(self, step: Step, outcome: Outcome) -> None:
        if self.plan.epoch_of(self.taken) == self.plan.epochs - 1:
            self.terms.append(TermRecord.of(self.taken + 1, step, outcome))

    def value_row(self) -> dict[str, float]:
        """Value and its company under their metrics' names; empty without held-out traces."""
        if self.held is None:
            return {}
        with self.watch("value"):
            found = self._measured(self.target, [self.held], None)
        assert found is not None
        s, rewards = self.feed.sequences, self.feed.rewards
        terms = np.flatnonzero(~np.isnan(found))
        theta, trace = found[terms], np.repeat(s.trace, np.diff(s.cu_seqlens))[terms]
        value: Value = estimate(theta, np.asarray(s.rollout_logprobs)[terms], trace, rewards, s.group)
        good, bad = good_and_bad(theta, trace, rewards, s.group)
        return {**value.row(), "logprob_good": good, "logprob_bad": bad}
