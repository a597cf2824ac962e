"""The offline training loop: epochs, old and reference logprobs, held-out evaluation, checkpoints and metrics."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Generic, Literal, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from tracegrad import metrics
from tracegrad._html import plural
from tracegrad.alignment.sequences import Sequences
from tracegrad.config import Config, as_dict
from tracegrad.data.codes import LOGPROB_KINDS
from tracegrad.data.sampling import kept_mass
from tracegrad.errors import ArgumentError, TracegradError
from tracegrad.metrics import loggers
from tracegrad.objective import Objective
from tracegrad.objective.correction import Correction, proximal_alpha
from tracegrad.packing import ModelShape, Step
from tracegrad.recipes import Recipe
from tracegrad.storage import files
from tracegrad.storage.run_dir import RunDirectory
from tracegrad.trainer import checkpoint
from tracegrad.trainer.advantages import RewardKl, needs_of
from tracegrad.trainer.checkpoint import Progress
from tracegrad.trainer.dataset import Dataset
from tracegrad.trainer.distributed import Ranks
from tracegrad.trainer.lora import has_adapters
from tracegrad.trainer.off_policy_eval import OffPolicyEstimate, difference, estimate, good_and_bad
from tracegrad.trainer.result import TokenRecord, TrainResult
from tracegrad.trainer.setup import Optimizers, check_images_on_ranks, check_media, check_vocabulary, row_padding
from tracegrad.trainer.signals import Interrupt
from tracegrad.trainer.step import StepResult
from tracegrad.trainer.steps import PlannedStep, Rows, StepAssignment, TrainingData, array_bytes
from tracegrad.trainer.token_log_writer import ReportRecords, TokenLogWriter
from tracegrad.trainer.trainer import Trainer
from tracegrad.trainer.verify_attention import describe_attention, verify_rows

_CHUNK = 1 << 20

Floats = NDArray[np.float32]

Made = TypeVar("Made")

_MAX_PACKED_BYTES = 256 << 20
"""Maximum size of packed steps that stay in memory from the measurement of `old` to training. The last two are not
counted: the current step, and the next one, which a thread prepares."""


def train(
    data: Sequences | Dataset,
    model: Any,
    *,
    objective: Objective,
    out: str | Path | RunDirectory,
    config: Config | None = None,
    tokenizer: str | Path | None = None,
    resume: bool = False,
    optimizer: Optimizers | None = None,
    reference: Any = None,
    sinks: Sequence[metrics.Sink] | None = None,
    log: Callable[[str], None] = print,
    recipe: Recipe | None = None,
) -> TrainResult:
    """Train `model` in place on recorded traces.

    Under torchrun every rank makes the same call. The first rank writes the files and the log lines.

    Args:
        data: Sequences, from `align` or `Sequences.from_arrays`; or `PreparedDataset`, which keeps only the traces of
            the next steps in memory.
        model: a transformers causal LM, with or without peft adapters. It is moved to the device, set to float32 and to
            eval mode (no dropout).
        objective: a preset or another value of `Objective`.
        out: run directory for metrics.jsonl, config.toml and checkpoints, created if missing. Either a path that all
            ranks see, or an fsspec address; then each machine works in its own local folder.
        config: default `Config()`. Its `objective` section is for the command line and is ignored here.
        tokenizer: folder whose tokenizer files are copied into each checkpoint.
        resume: continue from the newest checkpoint in `out`, if there is one.
        optimizer: an optimizer over `model.parameters()`, or a function that makes one from parameter groups. Default
            AdamW with the options of `config`. The schedule and clipping always follow `config`.
        reference: a causal LM for the reference logprobs, if the objective needs them. Default the folder
            `train.ref_model`, or the starting model (without its adapters, if it has any).
        sinks: loggers in addition to metrics.jsonl; default a progress line and the dashboards of `train.report_to`.
        log: function that prints a line for the user.
        recipe: the recipe that objective and config come from; only warnings read it.

    Raises:
        ArgumentError: if objective, data and config are incompatible, or `out` contains a run and `resume` is False.
        ReadError: if the checkpoint to resume from is damaged.
        TracegradError: if the gradient is not finite or a checkpoint cannot be written.

    >>> from tempfile import TemporaryDirectory
    >>> from transformers import LlamaConfig, LlamaForCausalLM
    >>> from tracegrad import Sequences, presets
    >>> from tracegrad.config import Config, Data, Train
    >>> size = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
    >>> model = LlamaForCausalLM(LlamaConfig(vocab_size=8, **size))
    >>> logprobs, trainable = [float("nan"), -2.0] * 2, [False, True] * 2
    >>> data = Sequences.from_arrays([5, 6, 5, 7], [0, 2, 4], logprobs, trainable, group=[0, 0], rewards=[1.0, 0.0])
    >>> config = Config(data=Data(holdout=0.0), train=Train(epochs=2))
    >>> options = {"config": config, "sinks": [], "log": lambda line: None}
    >>> with TemporaryDirectory() as folder:
    ...     result = train(data, model, objective=presets.GRPO, out=folder, **options)
    >>> result.step, result.rows[-1]["reward"]  # one group per epoch; the mean of 1 and 0
    (2, 0.5)
    """
    config = config or Config()
    ranks = Ranks.join(config.train.timeout_s)
    feed = TrainingData.of(
        data,
        objective,
        config,
        ranks=ranks.world,
        rank=ranks.rank,
        shape=ModelShape.try_of(model.config),
        bucket=row_padding(config),
    )
    check_vocabulary(feed.source, model)
    feed = replace(feed, notes=(*feed.notes, *check_media(feed.source, model)))
    trainer = Trainer(
        model,
        objective,
        config,
        out=out,
        tokenizer=tokenizer,
        optimizer=optimizer,
        reference=reference,
        keep_initial_reference=False,
        ranks=ranks,
    )
    check_images_on_ranks(feed.source, trainer.target, config)
    if trainer.reference is not None:
        check_vocabulary(feed.source, trainer.reference.model)
    with metrics.reported_stages(trainer.watch) if ranks.first else nullcontext(), trainer.watch("verify"):
        reason = verify_rows(trainer.target, feed.longest, share_prefixes=feed.shares_prefixes)
    if reason:
        feed = replace(feed, allow_prefix_sharing=False, notes=(*feed.notes, f"prefixes are not shared: {reason}."))
    loop = _Loop(feed, trainer, log)
    trainer.steps = loop.plan.total
    with ExitStack() as lock:
        with ranks.fail_together():
            if ranks.first:
                lock.enter_context(trainer.run_dir.mirror.lock())
        rows = loop.start(resume)
        if ranks.first:
            for line in feed.lines():
                log(line)
            for sentence in feed.warnings(recipe):
                log(f"warning  {sentence}")
            for sentence in [*feed.notes, *loop.opening()]:
                log(f"note     {sentence}")
        chosen_sinks = _sinks(loop, sinks) if ranks.first else []
        try:
            with Interrupt() as interrupt, trainer.propagate_errors(final=True):
                stopped = loop.run([loop.lines, *chosen_sinks], rows, interrupt)
            trainer.run_dir.mirror.end(stopped)
        finally:
            with ExitStack() as closing:  # each is closed, also if another one fails; the sinks come first
                for each in (loop.epochs, loop.keeper, loop.lines, *chosen_sinks):
                    closing.callback(each.close)
        with ranks.fail_together():
            trainer.run_dir.push()
    last = checkpoint.list_checkpoints(trainer.out)[-1]
    terms = [record for part in ranks.gather(loop.terms.records) for record in part]
    return TrainResult(
        trainer.steps_done,
        loop.plan.total,
        stopped,
        interrupt.code(stopped),
        last,
        rows,
        terms,
        trainer.watch.seconds,
        trainer.idle.total_share(),
        ranks.sum(loop.terms.gradient_magnitude),
        trainer.run_dir.address_of(last),
        feed.counts(),
    )


@dataclass
class _Loop:
    """The state of a training run between two steps."""

    feed: TrainingData
    trainer: Trainer
    log: Callable[[str], None] = print

    def __post_init__(self) -> None:
        self.epochs = Epochs(self.feed, self.trainer)
        self.plan = self.epochs.plan
        self.held = HeldOutEvaluator(self.feed, self.epochs)
        self.fingerprint = self.feed.fingerprint()
        self.lines: metrics.Sink = _NullSink()
        self.terms = ReportRecords(self.feed.catalog, bounded=not self.feed.source.in_memory)
        self.worse = False
        self.keeper = TokenLogWriter.disabled(self.trainer.out, self.trainer.objective)

    def start(self, resume: bool) -> list[dict[str, Any]]:
        """Create the folder, restore a checkpoint, and open metrics.jsonl; return the rows that it keeps."""
        out, first = self.trainer.out, self.trainer.ranks.first
        checkpoints = checkpoint.list_checkpoints(out)
        if checkpoints and not resume:
            raise ArgumentError(
                f"TG-TRAIN-037: {self.trainer.run_dir} contains a run; its newest checkpoint is "
                f"{checkpoints[-1].name}. A new run would "
                "overwrite it. Continue the run with resume=True, or pass another out."
            )
        progress = self.trainer.restore(fingerprint=self.fingerprint)
        if progress is not None:
            self.epochs.restore(checkpoints[-1], progress)
            if "best" in progress.logprobs:
                self.held.best = checkpoint.logprobs_of(checkpoints[-1], progress, "best", self.held.terms)
            for term in checkpoint.read_terms(checkpoints[-1], self.trainer.ranks):
                if self.plan.epoch_of(term.step - 1) == self.plan.epochs - 1:
                    self.terms.add(term)
            # The sum over all trained tokens; the records may be a selection.
            if "gradient_magnitude" in progress.control:
                self.terms.gradient_magnitude = progress.control["gradient_magnitude"] / self.trainer.ranks.world
        self.trainer.create_run_dir()
        ranks = self.trainer.ranks
        self.keeper = TokenLogWriter(
            out,
            self.trainer.config.token_log,
            self.trainer.objective,
            rank=ranks.rank,
            world=ranks.world,
            steps_done=self.trainer.steps_done,
        )
        if not first:
            return []
        with checkpoint.writable(out):
            self.lines = metrics.JsonLines(out / "metrics.jsonl", keep_to_step=self.trainer.steps_done or None)
        return metrics.read_rows(out / "metrics.jsonl")

    def opening(self) -> list[str]:
        """Return the notes to print before the first step."""
        config, taken = self.trainer.config, self.trainer.steps_done
        notes = [f"resumed after step {taken} of {self.plan.total}."] if taken else []
        notes.append(self.trainer.policy.sentence(config))
        notes.append(describe_attention(self.trainer.target, share_prefixes=self.feed.shares_prefixes))
        if has_adapters(self.trainer.model) and not config.train.lora_rank:
            notes.append("the model's LoRA adapters are trained further; the model without them is the reference.")
        if self.feed.shares_prefixes and taken < self.plan.total:
            notes.append(f"{self.epochs.packed(taken).step.sharing}.")
        held_out = int(self.feed.held_out.sum())
        if self.feed.config.data.holdout and held_out < metrics.MIN_ESS:
            notes.append(
                f"{plural(held_out, 'trace')} held out, but the off-policy estimate needs an effective sample size of "
                f"{metrics.MIN_ESS:g}: raise data.holdout."
            )
        return notes

    def save(self) -> None:
        """Write a checkpoint of the current state."""
        logprobs = self.epochs.logprobs()
        if self.held.best is not None:
            logprobs["best"] = self.held.best
        control = self.epochs.control()
        if self.terms.records and not self.feed.source.in_memory:
            control["gradient_magnitude"] = self.trainer.ranks.sum(self.terms.gradient_magnitude)
        self.keeper.flush()
        self.trainer.save(fingerprint=self.fingerprint, terms=self.terms.records, logprobs=logprobs, control=control)

    def run(
        self, sinks: Sequence[metrics.Sink], rows: list[dict[str, Any]], interrupt: Interrupt
    ) -> Literal["done", "ope_ess", "ope_falls", "signal"]:
        """Train until the end, a signal, or a condition of `[stop]`. Each case ends with a checkpoint.

        Returns:
            Why training stopped, as in `TrainResult.stopped`.
        """
        trainer, plan = self.trainer, self.plan

        def log(values: dict[str, Any]) -> None:
            rows.append(metrics.finite(values))
            metrics.log_all(sinks, rows[-1])

        def stops() -> bool:
            """Return whether any rank received a signal."""
            interrupt.received = trainer.ranks.max(interrupt.received or 0) or None
            return interrupt.received is not None

        if trainer.steps_done == 0:
            log({"step": 0, **self.held.row()})
        while trainer.steps_done < plan.total and not stops():
            # Recompute the old and reference logprobs of the next steps, if they are due.
            if not self.epochs.refresh(trainer.steps_done, stops):
                break
            # Take one optimizer step.
            row = self._step()
            # Evaluate the held-out traces, and decide whether to stop.
            if plan.evaluates(trainer.steps_done) and not stops():
                row.update(self.held.row())
            log(row)
            ess_too_small = 0 < row.get("ope_ess_fraction", 1.0) < trainer.config.stop.min_ope_ess
            if ess_too_small or self.held.worse:
                self.save()
                return "ope_ess" if ess_too_small else "ope_falls"
            if plan.saves(trainer.steps_done):
                self.save()
        self.save()
        return "signal" if stops() and trainer.steps_done < plan.total else "done"

    def _step(self) -> dict[str, Any]:
        """Take one optimizer step; return its metrics."""
        trainer, index, start = self.trainer, self.trainer.steps_done, time.perf_counter()
        # The packed rows and the correction are made on the CPU during the previous step.
        with trainer.watch("prepare"):
            step, corrected = self.epochs.take(index)
        # Run forward, loss, backward, clipping and `optimizer.step()`: see `trainer.step.optimizer_step`.
        outcome = trainer.update(
            step,
            corrected,
            newest_version=self.feed.newest_version,
            rewards=self.feed.rewards,
            endings=self.feed.catalog.ending,
            start_time=start,
        )
        # Log it.
        if index == 0 and trainer.ranks.first and trainer.config.data.accept_truncated_sampling:
            self._report_kept_mass(step, outcome)
        self._record(step, outcome)
        return {
            "step": trainer.steps_done,
            "epoch": self.plan.epoch_of(index),
            **self.epochs.row(),
            **trainer.metrics(),
        }

    def _report_kept_mass(self, step: Step, outcome: StepResult) -> None:
        """Print the kept mass of truncated sampling at the first step, when the policy is still the initial one."""
        catalog = self.feed.catalog
        processed = catalog.logprob_kind[step.trace] == LOGPROB_KINDS.index("processed")
        result = kept_mass(outcome.logprobs, step.rollout_logprobs, catalog.reshaped[step.trace], processed)
        if result is None:
            self.log(
                "note     the kept mass S is not measured: no token sampled with truncation (top_p, ...) has a "
                "processed logprob."
            )
        else:
            mean, lowest = result
            self.log(f"note     kept mass S at the first step: mean {mean:.3f}, minimum {lowest:.3f}.")

    def _record(self, step: Step, outcome: StepResult) -> None:
        step_number = self.trainer.steps_done
        self.keeper.step(step_number, step, outcome, self.feed.source, passes=self.plan.epochs)
        if self.plan.epoch_of(step_number - 1) == self.plan.epochs - 1:
            self.terms.add(TokenRecord.of(step_number, step, outcome))


def allocate_logprobs(terms: int, folder: Path | None) -> NDArray[np.float32]:
    """Return an array of one float32 per trained token, filled with NaN.

    Args:
        terms: number of trained tokens.
        folder: folder of an unlinked temporary file that backs the array; the disk space is freed with the last
            reference to the array. None allocates RAM.

    Raises:
        TracegradError: if the disk is full.
    """
    if folder is None or not terms:
        return np.full(terms, np.nan, np.float32)
    path = folder / f".logprobs-{os.getpid()}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with files.create(path) as file:
            path.unlink()
            # Write all bytes: on a full disk, a page fault in a sparse file would kill the process. macOS has no
            # posix_fallocate.
            for first in range(0, terms, _CHUNK):
                file.write(np.full(min(_CHUNK, terms - first), np.nan, np.float32).data)
            file.flush()
            values = np.memmap(file, np.float32, "r+", shape=(terms,))
    except OSError as error:
        raise TracegradError(
            f"TG-TRAIN-038: {folder}: {error.strerror}. The logprobs of {terms:,} trained tokens do not fit there. "
            "Free space, or pass another out."
        ) from error
    return values


class Prefetcher(Generic[Made]):
    """Builds item n on request, or ahead of time in a background thread if it was announced.

    `get` re-raises what `make` raises. The thread is idle between a `get` and the next `announce`.

    Args:
        make: builds an item from (its number, whether it runs in the thread).
    >>> ahead = Prefetcher(lambda number, in_thread: (number, in_thread))
    >>> ahead.announce(3)
    >>> ahead.get(3), ahead.get(4)
    ((3, True), (4, False))
    >>> ahead.close()
    """

    def __init__(self, make: Callable[[int, bool], Made]) -> None:
        self._make = make
        self._thread = ThreadPoolExecutor(1, "tracegrad-next-step")
        self._pending: tuple[int, Future[Made]] | None = None

    def announce(self, number: int) -> None:
        """Start building item `number` in the thread."""
        self._pending = number, self._thread.submit(self._make, number, True)

    def get(self, number: int) -> Made:
        """Return item `number`: wait for the thread if it was announced, otherwise build it now."""
        pending, self._pending = self._pending, None
        if pending is None:
            return self._make(number, False)
        item = pending[1].result()
        return item if pending[0] == number else self._make(number, False)

    def close(self) -> None:
        """Wait for the item in progress, and stop the thread."""
        self._thread.shutdown(wait=True)


class _CachedStep(NamedTuple):
    """A packed step.

    Args:
        refresh: the last refresh of `old` before it.
        size: bytes of its arrays.
    """

    planned: PlannedStep
    refresh: int
    size: int


class Epochs:
    """The steps of a run over a data set, by number. Each is packed when needed, at most one ahead.

    Args:
        feed: the data of the run.
        run: computes logprobs and corrections.

    Attributes:
        plan: the schedule of refreshes, evaluations and checkpoints.
        known: float32 arrays `old` and `ref` with one entry per trained token of the data; NaN if not computed yet.
    """

    def __init__(self, feed: TrainingData, run: Trainer) -> None:
        self.feed, self.run = feed, run
        self._cuts: dict[int, StepAssignment] = {0: feed.assign_steps(feed.plan(1).shuffle_seed(0))}
        self._packed_steps: dict[int, _CachedStep] = {}
        self._check_plan()
        self.plan = feed.plan(len(self._cuts[0]))
        needs = needs_of(feed.objective, feed.config)
        folder = None if feed.source.in_memory else run.out
        names = [name for name in ("old", "ref") if getattr(needs, name)]
        self.logprob_arrays = {name: allocate_logprobs(feed.catalog.all_terms, folder) for name in names}
        charge = RewardKl(feed.source, feed.rewards, feed.eligible, feed.config)
        self.charge = charge if feed.config.reward_kl.coef else None
        self._ahead = Prefetcher(self._make)

    def _check_plan(self) -> None:
        """Check that all ranks plan the same steps. Otherwise they would wait for each other forever."""
        ranks = self.run.ranks
        own_hash = "" if ranks.is_single else self.feed.plan_hash(self._cuts[0])
        differs = ranks.broadcast(own_hash) != own_hash
        if ranks.max(int(differs)):
            planner = f"rank {ranks.rank} plans" if differs else "another rank plans"
            raise ArgumentError(
                f"TG-TRAIN-039: {planner} other steps than the first rank: its traces or options differ. Ranks "
                f"would wait "
                "for each other forever. Pass the same traces and options on every rank."
            )

    def packed(self, index: int) -> PlannedStep:
        """Return a packed step. The step assignments of two epochs are cached.

        The last two steps are cached. If `old` is measured, the other steps since its last refresh are too, as far as
        they fit in `_MAX_PACKED_BYTES`, so that they are packed once and not once more for training.
        """
        epoch, place = index // self.plan.steps_per_epoch, self.plan.packed_index(index)
        refresh, index = self.plan.last_refresh(index), epoch * self.plan.steps_per_epoch + place
        if index not in self._packed_steps:
            if epoch not in self._cuts:
                self._cuts = {e: cut for e, cut in self._cuts.items() if e == epoch - 1}
                self._cuts[epoch] = self.feed.assign_steps(self.plan.shuffle_seed(epoch))
            planned = self.feed.pack_step(self._cuts[epoch].of(place))
            cached = _CachedStep(planned, refresh, array_bytes(planned))
            earlier = list(self._packed_steps.items())
            earlier, last = earlier[:-1], earlier[-1:]
            kept = [each for each in earlier if each[1].refresh == refresh] if "old" in self.logprob_arrays else []
            while kept and sum(step.size for _, step in kept) > _MAX_PACKED_BYTES:
                kept.pop()  # The first ones stay: training starts with them.
            self._packed_steps = dict([*kept, *last, (index, cached)])
        return self._packed_steps[index].planned

    def refresh(self, index: int, stops: Callable[[], bool]) -> bool:
        """Recompute the old and reference logprobs that are due before a step.

        Returns:
            False if `stops` interrupted it. A resumed run then has to recompute them.
        """
        ref, old = self._due(index)
        if ref and not self._refresh("ref", "reference", self.plan.ref_window(index), stops):
            return False
        if old:
            if not self._refresh("old", "policy", self.plan.window(index), stops):
                return False
            self._charge_kl(index)
        return True

    def take(self, index: int) -> tuple[Step, Correction]:
        """Return a step with its logprobs and correction, and start preparing the next step in the background.

        The next step is not started if logprobs must be recomputed before it.
        """
        ready, following = self._ahead.get(index), index + 1
        if following < self.plan.total and not any(self._due(following)):
            self._ahead.announce(following)
        return ready

    def compute_logprobs(self, planned: PlannedStep, of: Literal["policy", "reference"]) -> Floats:
        """Compute [L] logprobs of `planned.terms`, merged over ranks; NaN for tokens that no rank lays out."""
        logprobs, is_here = np.zeros(len(planned.terms), np.float32), np.zeros(len(planned.terms), bool)
        logprobs[planned.here], is_here[planned.here] = self.run.compute_logprobs(planned.step, model=of), True
        return self.run.ranks.merge(logprobs, is_here)

    def logprobs(self) -> dict[str, Floats]:
        """Return the logprob arrays that a checkpoint saves."""
        return dict(self.logprob_arrays)

    def restore(self, path: Path, progress: Progress) -> None:
        """Restore the logprob arrays and the KL penalty from a checkpoint."""
        for name, values in self.logprob_arrays.items():
            values[:] = checkpoint.logprobs_of(path, progress, name, len(values))
        if self.charge is not None and progress.step:
            self.charge.restore(progress.control)
            self._charge_kl(self.plan.last_refresh(progress.step - 1))

    def control(self) -> dict[str, float]:
        """Return the adaptive coefficients that a checkpoint saves."""
        return {} if self.charge is None else self.charge.state()

    def row(self) -> dict[str, float]:
        """Return the metrics of the current batch."""
        return {} if self.charge is None else self.charge.row()

    def close(self) -> None:
        """Wait for the step in preparation, and stop the thread."""
        self._ahead.close()

    def _due(self, index: int) -> tuple[bool, bool]:
        """Return whether the reference and `old` logprobs are recomputed before a step."""
        plan = self.plan
        return "ref" in self.logprob_arrays and plan.refreshes_ref(
            index
        ), "old" in self.logprob_arrays and plan.refreshes_old(index)

    def _refresh(self, name: str, of: Literal["policy", "reference"], window: range, stops: Callable[[], bool]) -> bool:
        """Recompute `known[name]` for the trained tokens of a window of steps; other entries do not change."""
        # With a KL penalty, store the results at the end: a run that stops here charges the previous batch again.
        results: list[tuple[Rows, Floats]] = []
        total = len({(self.plan.epoch_of(index), self.plan.packed_index(index)) for index in window})
        with self.run.watch(name) as watch:
            for number, planned in enumerate(self._steps(name, window)):
                if stops():
                    return False
                watch.advance(number, max(total, number + 1))
                logprobs = self.compute_logprobs(planned, of)
                laid_out = ~np.isnan(logprobs)
                results.append((planned.terms[laid_out], logprobs[laid_out]))
                if self.charge is None:
                    self._store(name, results)
        self._store(name, results)
        return True

    def _steps(self, name: str, window: range) -> Iterator[PlannedStep]:
        """Yield the steps of a window. A fixed reference with mixture weights needs all groups of any epoch."""
        if name == "ref" and not self.plan.ref_sync_steps and self.feed.input_weights and self.plan.epochs > 1:
            cut = self.feed.assign_steps(self.plan.shuffle_seed(0), all_groups=True)
            yield from (self.feed.pack_step(cut.of(number)) for number in range(len(cut)))
        else:
            unique = {(self.plan.epoch_of(index), self.plan.packed_index(index)): index for index in reversed(window)}
            yield from map(self.packed, sorted(unique.values()))

    def _store(self, name: str, results: list[tuple[Rows, Floats]]) -> None:
        """Move results into `known`, and empty the list."""
        while results:
            terms, logprobs = results.pop()
            self.logprob_arrays[name][terms] = logprobs

    def _charge_kl(self, first: int) -> None:
        """Subtract the KL penalty from the rewards of the batch that starts with step `first`, if it is enabled."""
        if self.charge is None:
            return
        traces, term_lists = 0, []
        for index in self.plan.window(first):
            planned = self.packed(index)
            traces += planned.step.totals.traces
            term_lists.append(planned.terms)
        terms = np.unique(np.concatenate(term_lists))
        trace = np.searchsorted(self.feed.catalog.first_term, terms, side="right") - 1
        old, ref = (self.logprob_arrays[name][terms] for name in ("old", "ref"))
        laid_out = ~np.isnan(old)
        self.charge.batch(traces, trace[laid_out], old[laid_out], ref[laid_out])

    def _make(self, index: int, in_thread: bool) -> tuple[Step, Correction]:
        planned = self.packed(index)
        step, terms = planned.step, planned.terms[planned.here]
        if self.charge is not None:
            step = replace(step, advantages=self.charge.advantages[step.trace])
        if self.feed.objective.requirements.proximal:
            # Assume that the run started with the newest recorded policy, and count each update as one version.
            staleness = np.maximum(step.staleness(self.feed.newest_version), 0)
            step = replace(step, alpha=proximal_alpha(-staleness, self.plan.last_refresh(index), index))
        step = step.with_logprobs(**{name: values[terms] for name, values in self.logprob_arrays.items()})
        return step, self.run.correct(step, in_thread=in_thread)


class HeldOutEvaluator:
    """Evaluates the current policy on held-out traces.

    Args:
        feed: the data of the run.
        epochs: computes the logprobs.

    Attributes:
        terms: number of trained tokens in the held-out traces, L.
        best: [L] float32 logprobs at the highest estimate so far, NaN for tokens not laid out; None before the first
            reliable estimate.
        worse: whether the estimate is below the best by more than the interval of their difference, if `stop.ope_falls`
            is set.
    """

    def __init__(self, feed: TrainingData, epochs: Epochs) -> None:
        self._feed, self._epochs, self._parts = feed, epochs, feed.held_pieces()
        self._single_part: PlannedStep | None = None
        self.terms = sum(int(feed.catalog.terms[rows].sum(dtype=np.int64)) for rows in self._parts)
        self.best: NDArray[np.float32] | None = None
        self.worse = False

    def row(self) -> dict[str, float]:
        """Return the off-policy estimate and related metrics by name; empty without held-out traces."""
        if not self._parts:
            return {}
        feed = self._feed
        theta, rollout, trace = self._measure()
        laid_out, rewards_and_group = ~np.isnan(theta), (feed.rewards, feed.catalog.group)
        arrays = (rollout[laid_out], trace[laid_out], *rewards_and_group)
        value: OffPolicyEstimate = estimate(theta[laid_out], *arrays)
        if feed.config.stop.ope_falls and value.is_reliable:
            change, half_interval = (
                (1.0, 0.0) if self.best is None else difference(theta[laid_out], self.best[laid_out], *arrays)
            )
            self.worse = change + half_interval < 0
            self.best = theta if change > 0 else self.best
        good, bad = good_and_bad(theta[laid_out], trace[laid_out], *rewards_and_group)
        return {**value.row(), "logprob_good": good, "logprob_bad": bad}

    def _measure(self) -> tuple[NDArray[np.float32], NDArray[np.float32], NDArray[np.int64]]:
        """Compute [L] each over the held-out tokens: policy logprobs, recorded logprobs, and trace numbers."""
        results = []
        with self._epochs.run.watch("value"):
            for number, rows in enumerate(self._parts):
                self._epochs.run.watch.advance(number, len(self._parts))
                planned = self._single_part or self._feed.pack_held_out(rows)
                if len(self._parts) == 1:
                    self._single_part = planned
                results.append((self._epochs.compute_logprobs(planned, "policy"), planned.rollout, planned.trace))
        theta, rollout, trace = (np.concatenate(parts) for parts in zip(*results, strict=True))
        return theta, rollout, trace


def _sinks(state: _Loop, sinks: Sequence[metrics.Sink] | None) -> list[metrics.Sink]:
    if sinks is not None:
        return list(sinks)
    config = state.trainer.config
    chosen = loggers.open_sinks(config.train.report_to, state.trainer.out, as_dict(config))
    trainer = state.trainer
    return [*chosen, metrics.Progress(state.plan.total, trainer.steps_done, watch=trainer.watch)]


class _NullSink:
    """A sink that discards all rows, for ranks other than the first."""

    def log(self, row: metrics.Row) -> None:
        pass

    def close(self) -> None:
        pass
