"""The loop: epochs over steps, `old` refreshed, value measured, checkpoints written, and a stop that loses nothing.

Everything a step needs is a function of the config, the data and the checkpoint, so that a resumed run repeats the
uninterrupted one. No arithmetic of losses here. Called by the command line and by users as `tracegrad.learner.train`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from tracegrad import metrics
from tracegrad.algebra import Objective
from tracegrad.batch import Step
from tracegrad.config import Config, as_dict, to_toml
from tracegrad.correction import proximal_alpha
from tracegrad.errors import ArgumentError, TracegradError
from tracegrad.learner import checkpoint
from tracegrad.learner.entropy import Control
from tracegrad.learner.feed import Feed
from tracegrad.learner.interrupt import Interrupt
from tracegrad.learner.record import TermRecord, Trained
from tracegrad.learner.row import row_of
from tracegrad.learner.setup import adamw, check_same, check_vocabulary, learning_rate, place
from tracegrad.learner.step import Outcome, measure, optimizer_step
from tracegrad.learner.value import MIN_ESS, Value, estimate, good_and_bad
from tracegrad.sequence import Sequences


def train(
    sequences: Sequences,
    model: Any,
    *,
    objective: Objective,
    out: str | Path,
    config: Config | None = None,
    tokenizer: str | Path | None = None,
    resume: bool = False,
    sinks: Sequence[metrics.Sink] | None = None,
    say: Callable[[str], None] = print,
) -> Trained:
    """Trains `model` on recorded sequences; its parameters are changed in place.

    Args:
        sequences: from `align` or `Sequences.from_arrays`.
        model: a transformers causal LM; moved to the device and to float32, dropout off.
        objective: a preset or another value of `Objective`.
        out: folder for metrics.jsonl, config.toml and checkpoints; made if it is not there.
        config: default `Config()`; its `objective` section is for the command line and not read.
        tokenizer: folder whose tokenizer files go into each checkpoint.
        resume: go on from the newest checkpoint in `out`, where there is one.
        sinks: where rows go beside metrics.jsonl; default a progress line, and TensorBoard where the config says so.
        say: takes the few sentences that a user should read.

    Raises:
        ArgumentError: if objective, data and config do not fit together, or `out` holds a run and `resume` is False.
        ReadError: if the checkpoint to resume from is damaged.
        TracegradError: if the gradient is not finite or a checkpoint cannot be written.
    """
    config, out = config or Config(), Path(out)
    feed = Feed.of(sequences, objective, config)
    loop = _Loop(feed, model, out, Path(tokenizer) if tokenizer else None)
    rows = loop.start(resume)
    for sentence in [*feed.notes, *loop.opening()]:
        say(f"note     {sentence}")
    shown = _sinks(loop, sinks)
    try:
        with Interrupt() as interrupt:
            stopped = loop.run([loop.lines, *shown], rows, interrupt)
    except torch.OutOfMemoryError as error:
        raise TracegradError(
            f"step {loop.taken + 1}: the device has no memory left ({str(error).split('.')[0]}). It was not taken. "
            f"Lower pack.token_budget ({config.pack.token_budget}); the gradient stays the same."
        ) from error
    finally:
        for sink in [loop.lines, *shown]:
            sink.close()
    code = (interrupt.exit_code or 0) if stopped == "signal" else 0
    last = checkpoint.list_checkpoints(out)[-1]
    return Trained(loop.taken, loop.plan.total, stopped, code, last, rows, loop.terms, loop.watch.seconds)


def _sinks(loop: _Loop, sinks: Sequence[metrics.Sink] | None) -> list[metrics.Sink]:
    if sinks is not None:
        return list(sinks)
    chosen: list[metrics.Sink] = []
    if loop.config.train.tensorboard:
        chosen.append(metrics.TensorBoard(loop.out / "tensorboard"))
    return [*chosen, metrics.Progress(loop.plan.total, loop.taken)]


@dataclass
class _Loop:
    """State of a run between two steps."""

    feed: Feed
    model: Any
    out: Path
    tokenizer: Path | None
    taken: int = 0
    terms: list[TermRecord] = field(default_factory=list)
    watch: metrics.Stopwatch = field(default_factory=metrics.Stopwatch)

    def __post_init__(self) -> None:
        self.config = self.feed.config
        self.plan = self.feed.plan()
        self.held = self.feed.held_step()
        self.precision = place(self.model, self.config)
        check_vocabulary(self.feed.sequences, self.model)
        self.optimizer = adamw(self.model, self.config)
        self.known = {name: np.full(self.feed.sequences.tokens, np.nan, np.float32) for name in self._wanted()}
        self.fingerprint = self.feed.fingerprint()
        self.control = Control(self.feed.objective)
        self.epochs: dict[int, list[Step]] = {}

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
        try:
            self.out.mkdir(parents=True, exist_ok=True)
            if found:
                checkpoint.clear_staged(self.out)
                self._take_up(found[-1])
            (self.out / "config.toml").write_text(to_toml(self.config), encoding="utf-8")
            self.lines = metrics.JsonLines(self.out / "metrics.jsonl", keep_to_step=self.taken or None)
        except OSError as error:
            raise TracegradError(
                f"{error.filename or self.out}: {error.strerror}. Checkpoints have no place there. Give another --out."
            ) from error
        return metrics.read_rows(self.out / "metrics.jsonl")

    def _take_up(self, path: Path) -> None:
        progress = checkpoint.read_progress(path)
        check_same(path, progress, self._told(), self.fingerprint)
        checkpoint.restore(path, self.model, self.optimizer)
        self.taken = progress.step
        self.control.restore(progress.control)
        for name, values in self.known.items():
            values[self.feed.sequences.terms] = progress.logprobs[name]

    def _told(self) -> dict[str, Any]:
        options = {k: v for k, v in as_dict(self.config).items() if not k.startswith("objective.")}
        return {**options, "objective": repr(self.feed.objective)}

    def opening(self) -> list[str]:
        """What a user should know before the first step."""
        said = [f"resumed after step {self.taken} of {self.plan.total}."] if self.taken else []
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
        progress = checkpoint.Progress(self.taken, self.fingerprint, self._told(), logprobs, self.control.state())
        with self.watch("checkpoint"):
            keep = self.config.checkpoint.keep
            checkpoint.save(self.out, self.model, self.optimizer, progress, tokenizer=self.tokenizer, keep=keep)

    def run(
        self, sinks: Sequence[metrics.Sink], rows: list[dict[str, Any]], interrupt: Interrupt
    ) -> Literal["done", "ess", "signal"]:
        """Steps until the end, a signal, or too small an effective sample; a checkpoint is written in each case."""

        def log(row: dict[str, Any]) -> None:
            rows.append(metrics.finite(row))
            metrics.log_all(sinks, rows[-1])

        if self.taken == 0:
            log({"step": 0, **self.value_row()})
            self._measure_reference(interrupt)
        while self.taken < self.plan.total and not interrupt.received:
            if self._refresh_old(interrupt):
                break
            row = self._step()
            if self.plan.measures_value(self.taken) and not interrupt.received:
                row.update(self.value_row())
            log(row)
            if 0 < row.get("value_ess_fraction", 1.0) < self.config.train.stop_below_ess:
                self.save()
                return "ess"
            if self.plan.saves(self.taken):
                self.save()
        self.save()
        return "signal" if interrupt.received and self.taken < self.plan.total else "done"

    def steps(self, epoch: int) -> list[Step]:
        """The packed steps of an epoch; at most two epochs are held."""
        if epoch not in self.epochs:
            self.epochs = {e: s for e, s in self.epochs.items() if e >= epoch - 1}
            with self.watch("pack"):
                self.epochs[epoch] = self.feed.steps(self.plan.shuffle_seed(epoch))
        return self.epochs[epoch]

    def step_at(self, index: int) -> Step:
        """The packed step with its old and reference logprobs, as far as they are known."""
        epoch, place = divmod(index, self.plan.steps_per_epoch)
        step = self.steps(epoch)[place]
        if self.feed.objective.needs.proximal:
            step = replace(step, alpha=proximal_alpha(-self.feed.age(step), self.plan.refreshed(index), index))
        return step.with_logprobs(**{name: values[step.origin] for name, values in self.known.items()})

    def _measure(self, name: str, steps: list[Step], interrupt: Interrupt) -> bool:
        """Fills `known[name]` for the terms of the steps; False where a signal came first."""
        with self.watch(name):
            for step in steps:
                if interrupt.received:
                    return False
                measured = step.with_logprobs(old=measure(self.model, step.batches, self.precision))
                self.known[name][step.origin] = measured.old_logprobs
        return True

    def _measure_reference(self, interrupt: Interrupt) -> None:
        if "ref" in self.known:
            self._measure("ref", self.steps(0), interrupt)

    def _refresh_old(self, interrupt: Interrupt) -> bool:
        """Measures `old` where it is due; True where a signal came first and the resumed run has to do it."""
        if "old" not in self.known or not self.plan.refreshes_old(self.taken):
            return False
        self.known["old"][:] = np.nan
        window = [self.step_at(index) for index in self.plan.window(self.taken)]
        return not self._measure("old", window, interrupt)

    def _step(self) -> dict[str, Any]:
        """One optimizer step; the row of its metrics."""
        began = time.perf_counter()
        step = self.step_at(self.taken)
        lr = learning_rate(self.config, self.taken)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        with self.watch("train"):
            outcome = optimizer_step(
                self.model,
                step,
                self.control.applied(),
                self.optimizer,
                missing=self.config.train.missing,
                grad_clip=self.config.optimizer.grad_clip,
                precision=self.precision,
            )
        seconds = time.perf_counter() - began
        bonus = {"entropy_coef": self.control.coef} if self.control.adapts else {}
        self.control.update(outcome.entropy, outcome.keep)
        with self.watch("metrics"):
            seen = row_of(step, outcome, self.feed)
        self._record(step, outcome)
        self.taken += 1
        rate = seen["tokens"] / seconds
        told = {"step": self.taken, "epoch": self.plan.epoch_of(self.taken - 1), "lr": lr, **bonus}
        return {**told, **seen, "seconds": seconds, "tokens_per_s": rate}

    def _record(self, step: Step, outcome: Outcome) -> None:
        if self.plan.epoch_of(self.taken) == self.plan.epochs - 1:
            self.terms.append(
                TermRecord(
                    step=self.taken + 1,
                    origin=step.origin,
                    trace=step.trace,
                    ratio=outcome.ratio,
                    weight=outcome.weight,
                    keep=outcome.keep,
                    clipped=outcome.clipped,
                    advantages=step.advantages,
                    logprobs=outcome.logprobs,
                    gradient=outcome.gradient,
                )
            )

    def value_row(self) -> dict[str, float]:
        """Value and its company under their metrics' names; empty without held-out traces."""
        if self.held is None:
            return {}
        with self.watch("value"):
            found = measure(self.model, self.held.batches, self.precision)
        theta = self.held.with_logprobs(old=found).old_logprobs
        assert theta is not None
        rewards, group = self.feed.rewards, self.feed.sequences.group
        value: Value = estimate(theta, self.held.rollout_logprobs, self.held.trace, rewards, group)
        good, bad = good_and_bad(theta, self.held.trace, rewards, group)
        return {**value.row(), "logprob_good": good, "logprob_bad": bad}
