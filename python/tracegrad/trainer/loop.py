"""Train over a data set: epochs, old and reference logprobs, held-out evaluation, checkpoints and metrics."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Generic, Literal, TypeVar

import numpy as np
from numpy.typing import NDArray

from tracegrad import metrics
from tracegrad.alignment.sequences import Sequences
from tracegrad.config import Config, as_dict
from tracegrad.data.codes import LOGPROB_KINDS
from tracegrad.data.sampling import kept_mass
from tracegrad.errors import ArgumentError, TracegradError
from tracegrad.metrics import loggers
from tracegrad.objective import Objective
from tracegrad.objective.correction import Corrected, proximal_alpha
from tracegrad.packing import ModelShape, Step
from tracegrad.storage import files
from tracegrad.storage.run_dir import Mirror
from tracegrad.trainer import checkpoint
from tracegrad.trainer.advantages import Charge, needs_of
from tracegrad.trainer.checkpoint import Progress
from tracegrad.trainer.dataset import Source
from tracegrad.trainer.distributed import Ranks
from tracegrad.trainer.lora import has_adapters
from tracegrad.trainer.off_policy_eval import MIN_ESS, OffPolicyValue, difference, estimate, good_and_bad
from tracegrad.trainer.result import TermRecord, Trained
from tracegrad.trainer.setup import Optimizers, bucket_of, check_media, check_ranks_see, check_vocabulary
from tracegrad.trainer.signals import Interrupt
from tracegrad.trainer.step import Outcome
from tracegrad.trainer.steps import Cut, Feed, Planned, Rows
from tracegrad.trainer.token_log_writer import Keeper, Records
from tracegrad.trainer.trainer import Run
from tracegrad.trainer.verify_attention import describe_attention, settle_rows

_AT_ONCE = 1 << 20

Floats = NDArray[np.float32]

Made = TypeVar("Made")

_HELD = 2
"""Steps that are held packed: the one that is taken, and the one that is made beside it."""


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
            # Old and reference logprobs of the next steps, if they are due.
            if not self.epochs.refresh(driven.taken, stops):
                break
            # One optimizer step.
            row = self._step()
            # Held-out traces: how good the policy is, and whether to stop.
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
        # Packed rows and the correction, made on CPU while the step before ran.
        with driven.watch("prepare"):
            step, corrected = self.epochs.take(index)
        # Forward, loss, backward, clipping and `optimizer.step()`: `trainer.step.optimizer_step`.
        told = {"newest": self.feed.newest, "rewards": self.feed.rewards, "endings": self.feed.catalog.ending}
        outcome = driven.update(step, corrected, **told, began=began)
        # What is logged of it.
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


def scratch(terms: int, folder: Path | None) -> NDArray[np.float32]:
    """[terms] float32, all NaN.

    Args:
        terms: how many.
        folder: where a file holds them, whose name is gone when this returns and whose room is given back when nothing
            refers to the array any more; None for memory.

    Raises:
        TracegradError: if the disk has no room for them.
    """
    if folder is None or not terms:
        return np.full(terms, np.nan, np.float32)
    path = folder / f".logprobs-{os.getpid()}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with files.create(path) as file:
            path.unlink()
            # Written, as a map of a file without room would end the process, and macOS has no posix_fallocate.
            for first in range(0, terms, _AT_ONCE):
                file.write(np.full(min(_AT_ONCE, terms - first), np.nan, np.float32).data)
            file.flush()
            values = np.memmap(file, np.float32, "r+", shape=(terms,))
    except OSError as error:
        raise TracegradError(
            f"{folder}: {error.strerror}. The logprobs of {terms:,} terms have no place there. Make room, or give "
            "another --out."
        ) from error
    return values


class Ahead(Generic[Made]):
    """Builds item n when it is asked for, or before that in a background thread if it was announced.

    What `make` raises is raised by `take`. Nothing runs in the thread between a `take` and the next `announce`.

    Args:
        make: builds an item from (its number, whether it runs in the thread).

    >>> ahead = Ahead(lambda number, beside: (number, beside))
    >>> ahead.announce(3)
    >>> ahead.take(3), ahead.take(4)
    ((3, True), (4, False))
    >>> ahead.close()
    """

    def __init__(self, make: Callable[[int, bool], Made]) -> None:
        self._make = make
        self._thread = ThreadPoolExecutor(1, "tracegrad-next-step")
        self._coming: tuple[int, Future[Made]] | None = None

    def announce(self, number: int) -> None:
        """Starts building item `number` in the thread."""
        self._coming = number, self._thread.submit(self._make, number, True)

    def take(self, number: int) -> Made:
        """Item `number`: waits for the thread if it was announced, else builds it now."""
        coming, self._coming = self._coming, None
        if coming is None:
            return self._make(number, False)
        made = coming[1].result()
        return made if coming[0] == number else self._make(number, False)

    def close(self) -> None:
        """Waits for what is being made and lets the thread go."""
        self._thread.shutdown(wait=True)


class Epochs:
    """The steps of a run over a file, by their number; each is packed when it is needed, at most one ahead.

    Args:
        feed: what the run trains on.
        run: what measures and corrects them.

    Attributes:
        plan: when what happens.
        known: `old` and `ref` of every term of the data, as far as they are measured; float32 each, NaN elsewhere.
    """

    def __init__(self, feed: Feed, run: Run) -> None:
        self.feed, self.run = feed, run
        self._cuts: dict[int, Cut] = {0: feed.cut(feed.plan(1).shuffle_seed(0))}
        self._packed: dict[int, Planned] = {}
        self._check_plan()
        self.plan = feed.plan(len(self._cuts[0]))
        needs = needs_of(feed.objective, feed.config)
        folder = None if feed.source.in_memory else run.out
        names = [name for name in ("old", "ref") if getattr(needs, name)]
        self.known = {name: scratch(feed.catalog.all_terms, folder) for name in names}
        charged = Charge(feed.source, feed.rewards, feed.used, feed.config)
        self.charge = charged if feed.config.reward_kl.coef else None
        self._ahead = Ahead(self._make)

    def _check_plan(self) -> None:
        """That every rank has the first one's plan: another would wait for steps that never come."""
        ranks = self.run.ranks
        mine = "" if ranks.alone else self.feed.plan_hash(self._cuts[0])
        other = ranks.shared(mine) != mine
        if ranks.largest(int(other)):
            who = f"rank {ranks.rank} plans" if other else "another rank plans"
            raise ArgumentError(
                f"{who} other steps than the first: its traces or options are others. Each would wait for steps that "
                "never come. Give every rank the same."
            )

    def packed(self, index: int) -> Planned:
        """A step as it was packed; the last few are held, and the plans of two epochs."""
        epoch, place = index // self.plan.steps_per_epoch, self.plan.packed(index)
        index = epoch * self.plan.steps_per_epoch + place
        if index not in self._packed:
            if epoch not in self._cuts:
                self._cuts = {e: cut for e, cut in self._cuts.items() if e == epoch - 1}
                self._cuts[epoch] = self.feed.cut(self.plan.shuffle_seed(epoch))
            made = self.feed.planned(self._cuts[epoch].of(place))
            kept = list(self._packed.items())[1 - _HELD :]
            self._packed = {**dict(kept), index: made}
        return self._packed[index]

    def refresh(self, index: int, stops: Callable[[], bool]) -> bool:
        """Measures what is due before a step; False where the run was to stop first, and a resumed one must."""
        ref, old = self._due(index)
        if ref and not self._refresh("ref", "reference", self.plan.ref_window(index), stops):
            return False
        if old:
            if not self._refresh("old", "policy", self.plan.window(index), stops):
                return False
            self._charge(index)
        return True

    def take(self, index: int) -> tuple[Step, Corrected]:
        """A step with its logprobs and its correction, waited for or made now; the one after it is then begun.

        It is not where something must be measured in between.
        """
        ready, following = self._ahead.take(index), index + 1
        if following < self.plan.total and not any(self._due(following)):
            self._ahead.announce(following)
        return ready

    def measured(self, planned: Planned, of: Literal["policy", "reference"]) -> Floats:
        """[L] logprobs of `planned.terms`, those of all ranks; NaN where no rank lays a term out."""
        logprobs, held = np.zeros(len(planned.terms), np.float32), np.zeros(len(planned.terms), bool)
        logprobs[planned.here], held[planned.here] = self.run.measure(planned.step, of=of), True
        return self.run.ranks.merge(logprobs, held)

    def logprobs(self) -> dict[str, Floats]:
        """What is known, by term, as a checkpoint keeps it."""
        return dict(self.known)

    def restore(self, path: Path, progress: Progress) -> None:
        """Takes up what a checkpoint knows."""
        for name, values in self.known.items():
            values[:] = checkpoint.logprobs_of(path, progress, name, len(values))
        if self.charge is not None and progress.step:
            self.charge.restore(progress.control)
            self._charge(self.plan.refreshed(progress.step - 1))

    def control(self) -> dict[str, float]:
        """What adapts from batch to batch, as a checkpoint keeps it."""
        return {} if self.charge is None else self.charge.state()

    def row(self) -> dict[str, float]:
        """Metrics of the batch that is trained on."""
        return {} if self.charge is None else self.charge.row()

    def close(self) -> None:
        """Waits for the step that is being made."""
        self._ahead.close()

    def _due(self, index: int) -> tuple[bool, bool]:
        """Whether the reference and `old` are measured before a step."""
        plan = self.plan
        return "ref" in self.known and plan.refreshes_ref(index), "old" in self.known and plan.refreshes_old(index)

    def _refresh(self, name: str, of: Literal["policy", "reference"], window: range, stops: Callable[[], bool]) -> bool:
        """Measures `known[name]` for the terms of a window; those of other steps stay what they were."""
        late: list[tuple[Rows, Floats]] = []  # a run that stops in between charges the batch before again
        with self.run.watch(name):
            for planned in self._steps(name, window):
                if stops():
                    return False
                logprobs = self.measured(planned, of)
                laid = ~np.isnan(logprobs)
                late.append((planned.terms[laid], logprobs[laid]))
                if self.charge is None:
                    self._keep(name, late)
        self._keep(name, late)
        return True

    def _steps(self, name: str, window: range) -> Iterator[Planned]:
        """The steps of a window; for a reference that stays, of every group that any epoch may take."""
        if name == "ref" and not self.plan.ref_every and self.feed.shares_of_inputs and self.plan.epochs > 1:
            cut = self.feed.cut(self.plan.shuffle_seed(0), whole=True)
            yield from (self.feed.planned(cut.of(number)) for number in range(len(cut)))
        else:
            once = {(self.plan.epoch_of(index), self.plan.packed(index)): index for index in reversed(window)}
            yield from map(self.packed, sorted(once.values()))

    def _keep(self, name: str, found: list[tuple[Rows, Floats]]) -> None:
        """Puts what was measured where it is looked up."""
        while found:
            terms, logprobs = found.pop()
            self.known[name][terms] = logprobs

    def _charge(self, first: int) -> None:
        """Takes KL out of the rewards of the batch that begins with a step, where a run is to."""
        if self.charge is None:
            return
        traces, found = 0, []
        for index in self.plan.window(first):
            planned = self.packed(index)
            traces += planned.step.totals.traces
            found.append(planned.terms)
        terms = np.unique(np.concatenate(found))
        trace = np.searchsorted(self.feed.catalog.first_term, terms, side="right") - 1
        old, ref = (self.known[name][terms] for name in ("old", "ref"))
        laid = ~np.isnan(old)
        self.charge.batch(traces, trace[laid], old[laid], ref[laid])

    def _make(self, index: int, beside: bool) -> tuple[Step, Corrected]:
        planned = self.packed(index)
        step, terms = planned.step, planned.terms[planned.here]
        if self.charge is not None:
            step = replace(step, advantages=self.charge.advantages[step.trace])
        if self.feed.objective.needs.proximal:
            # The newest policy recorded is taken for the one that the run began with, and each update for one more.
            lag = np.maximum(step.lag(self.feed.newest), 0)
            step = replace(step, alpha=proximal_alpha(-lag, self.plan.refreshed(index), index))
        step = step.with_logprobs(**{name: values[terms] for name, values in self.known.items()})
        return step, self.run.correct(step, beside=beside)


class HeldOut:
    """Held-out traces, under the policy as it is.

    Args:
        feed: whose they are.
        epochs: what measures them.

    Attributes:
        terms: of all held-out traces, L.
        best: [L] float32: logprobs where value was highest, NaN of what is not laid out; None where it was not known.
        worse: whether value is below that by more than the interval of the difference, where `stop.worse` asks.
    """

    def __init__(self, feed: Feed, epochs: Epochs) -> None:
        self._feed, self._epochs, self._pieces = feed, epochs, feed.held_pieces()
        self._only: Planned | None = None
        self.terms = sum(int(feed.catalog.terms[rows].sum(dtype=np.int64)) for rows in self._pieces)
        self.best: NDArray[np.float32] | None = None
        self.worse = False

    def row(self) -> dict[str, float]:
        """Off-policy value and its company under their metrics' names; empty without held-out traces."""
        if not self._pieces:
            return {}
        feed = self._feed
        theta, rollout, trace = self._measured()
        laid, given = ~np.isnan(theta), (feed.rewards, feed.catalog.group)
        beside = (rollout[laid], trace[laid], *given)
        value: OffPolicyValue = estimate(theta[laid], *beside)
        if feed.config.stop.worse and value.known:
            change, half = (1.0, 0.0) if self.best is None else difference(theta[laid], self.best[laid], *beside)
            self.worse = change + half < 0
            self.best = theta if change > 0 else self.best
        good, bad = good_and_bad(theta[laid], trace[laid], *given)
        return {**value.row(), "logprob_good": good, "logprob_bad": bad}

    def _measured(self) -> tuple[NDArray[np.float32], NDArray[np.float32], NDArray[np.int64]]:
        """[L] of all terms, by trace: logprobs of the policy, the recorded ones, and the trace."""
        found = []
        with self._epochs.run.watch("value"):
            for rows in self._pieces:
                planned = self._only or self._feed.held_part(rows)
                if len(self._pieces) == 1:
                    self._only = planned
                found.append((self._epochs.measured(planned, "policy"), planned.rollout, planned.trace))
        theta, rollout, trace = (np.concatenate(parts) for parts in zip(*found, strict=True))
        return theta, rollout, trace


def _sinks(loop: _Loop, sinks: Sequence[metrics.Sink] | None) -> list[metrics.Sink]:
    if sinks is not None:
        return list(sinks)
    config = loop.driven.config
    chosen = loggers.opened(config.train.log_to, loop.driven.out, as_dict(config))
    return [*chosen, metrics.Progress(loop.plan.total, loop.driven.taken)]


class _Silent:
    """What a rank that is not the first writes: nothing."""

    def log(self, row: metrics.Row) -> None:
        pass

    def close(self) -> None:
        pass
