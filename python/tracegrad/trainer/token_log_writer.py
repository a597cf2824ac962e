"""Write the token log of a run in a background thread, and choose the traces that its report shows."""

import queue
import shutil
import threading
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tracegrad.alignment.sequences import Sequences
from tracegrad.config.schema import TokenLogConfig
from tracegrad.errors import TracegradError
from tracegrad.objective import Objective
from tracegrad.packing import Step
from tracegrad.trainer import token_log
from tracegrad.trainer.dataset import Dataset, TraceTable, as_dataset
from tracegrad.trainer.result import TokenRecord
from tracegrad.trainer.step import StepResult, correct_step
from tracegrad.trainer.token_log import CLIPPED, MASKED_BY_POLICY, TRAINED, UNKNOWN, StepTokens

_TOKEN_BYTES, _TERM_BYTES = 24, 41
_MEGA = 1_000_000


class TokenLogWriter:
    """Writes the token log: per-token results of steps, for groups sampled by name within a size limit.

    It never stops a run. If the disk is full, logging ends, and `problem` has the reason.

    Args:
        out: run directory.
        options: section `terms` of the config.
        objective: the objective, whose rejections are the reasons in the log.
        rank, world: number of this process, and number of processes. The first one also writes the tokens.
        steps_done: steps done before; files of later steps are removed, because a resumed run repeats these steps.
    """

    def __init__(
        self,
        out: Path,
        options: TokenLogConfig,
        objective: Objective,
        *,
        rank: int = 0,
        world: int = 1,
        steps_done: int = 0,
    ) -> None:
        self.folder, self._options, self._objective, self._rank = out / token_log.FOLDER, options, objective, rank
        self.problem = ""
        self._max_bytes = options.max_mb * _MEGA // world
        self._queue: queue.Queue[Any] = queue.Queue(maxsize=2)
        self._thread = threading.Thread(target=self._work, name="terms", daemon=True)
        self._sets_written = 0
        self._current_data: tuple[Sequences | Dataset, str, NDArray[np.int32], NDArray[np.int64]] | None = None
        self._bytes_written = 0
        if options.mode != "none":
            self._resume(steps_done)
            self._thread.start()

    @classmethod
    def disabled(cls, out: Path, objective: Objective) -> "TokenLogWriter":
        """Return a token logger that writes nothing."""
        return cls(out, TokenLogConfig(mode="none"), objective)

    def step(
        self,
        number: int,
        packed: Step,
        outcome: StepResult,
        data: Sequences | Dataset,
        *,
        sets: int = 1,
        passes: int = 1,
    ) -> None:
        """Queue a step for writing. Blocks only if two steps are waiting already.

        Args:
            number: number of the update, from 1.
            packed: the step.
            outcome: the result of the step.
            data: the data that `packed.trace` and `packed.origin` index.
            sets: number of different `data` still to come, including this one.
            passes: how often each of their tokens is trained.
        """
        if self._thread.is_alive():
            self._queue.put((number, packed, outcome, data, sets, passes))

    def flush(self) -> None:
        """Wait until all queued steps are written. Call it before a checkpoint, which must not be ahead of the log."""
        if self._thread.is_alive():
            self._queue.join()

    def close(self) -> None:
        """Write the queued steps, and stop the thread."""
        if self._thread.is_alive():
            self._queue.put(None)
            self._thread.join()

    def _resume(self, taken: int) -> None:
        try:
            if taken == 0:
                shutil.rmtree(self.folder, ignore_errors=True)
            self.folder.mkdir(parents=True, exist_ok=True)
            for path in self.folder.glob(f"step-*.r{self._rank}.safetensors"):
                if int(path.name[5:].partition(".")[0]) > taken:
                    path.unlink()
            self._sets_written = len(list(self.folder.glob("tokens-*")))
            self._bytes_written = sum(path.stat().st_size for path in self.folder.rglob("*.safetensors"))
        except OSError as error:
            self.problem = f"{self.folder}: {error.strerror}. The token log was not written."

    def _work(self) -> None:
        while (job := self._queue.get()) is not None:
            if not self.problem:
                self._write_or_stop(job)
            self._queue.task_done()

    def _write_or_stop(self, job: Any) -> None:
        try:
            self._write(*job)
        except (TracegradError, OSError) as error:
            self.problem = f"{error} The token log ends here."

    def _write(
        self, number: int, packed: Step, outcome: StepResult, data: Sequences | Dataset, sets: int, passes: int
    ) -> None:
        if self._current_data is None or self._current_data[0] is not data:
            self._current_data = (data, *self._start_set(as_dataset(data), sets, passes))
        _, set_name, rows, shifts = self._current_data
        here = np.flatnonzero(rows[packed.trace] >= 0)
        if not len(here) or (self._options.mode == "sampled" and self._bytes_left() < len(here) * _TERM_BYTES):
            return
        labels, codes = reasons(packed, outcome, self._objective)
        old = np.full(len(packed), np.nan, np.float32) if packed.old_logprobs is None else packed.old_logprobs
        columns = {"advantages": packed.advantages, "old_logprobs": old}
        columns |= {name: getattr(outcome, name) for name in token_log.FLOATS if name not in columns}
        order = here[np.argsort(rows[packed.trace[here]], kind="stable")]
        terms = StepTokens(
            number,
            set_name,
            labels,
            packed.origin[order] - shifts[packed.trace[order]],
            rows[packed.trace[order]],
            codes[order],
            {name: np.asarray(column, np.float32)[order] for name, column in columns.items()},
        )
        self._bytes_written += token_log.write_step(self.folder / token_log.step_name(number, self._rank), terms)

    def _start_set(self, source: Dataset, sets: int, passes: int) -> tuple[str, NDArray[np.int32], NDArray[np.int64]]:
        """Choose groups of new traces, and write their tokens.

        Returns:
            The name of the folder; by trace its row there, or -1; and by trace the shift of its token offsets.
        """
        catalog, chosen = source.catalog, self._choose_rows(source, sets, passes)
        self._sets_written += 1
        name = f"tokens-{self._sets_written:05d}"
        if self._rank == 0 and len(chosen):
            part = source.take_with_details(chosen)
            part.save(self.folder / name)
            self._bytes_written += part.tokens * _TOKEN_BYTES
        rows, shifts = np.full(catalog.traces, -1, np.int32), np.zeros(catalog.traces, np.int64)
        rows[chosen] = np.arange(len(chosen), dtype=np.int32)
        tokens = catalog.tokens[chosen].astype(np.int64)
        shifts[chosen] = catalog.first_token[chosen] - (np.cumsum(tokens) - tokens)
        return name, rows, shifts

    def _bytes_left(self) -> int:
        return self._max_bytes - self._bytes_written

    def _choose_rows(self, source: Dataset, sets: int, passes: int) -> NDArray[np.int64]:
        """Return the rows of the groups whose name hash is below the share that fits into the remaining bytes."""
        catalog = source.catalog
        if self._options.mode == "all":
            return np.arange(catalog.traces)
        tokens = int(catalog.tokens.sum(dtype=np.int64))
        cost = tokens * _TOKEN_BYTES + catalog.all_terms * _TERM_BYTES * passes
        share = self._bytes_left() / max(sets, 1) / max(cost, 1)
        return np.flatnonzero(source.group_hash() < share)


def reasons(packed: Step, outcome: StepResult, objective: Objective) -> tuple[tuple[str, ...], NDArray[np.uint8]]:
    """Return a code per trained token and the label of each code: trained, clipped, or the first mask.

    To find out which of several rejections dropped a token, the correction is repeated with one more rejection at a
    time.
    """
    gates = tuple(gate for gate in objective.rejections if gate.detached)
    undetached_label = (
        "; or ".join(str(g) for g in objective.rejections if not g.detached) or "a selector on the trained policy"
    )
    labels = (
        "trained",
        f"clipped: {objective.surrogate}",
        "masked: its logprob was not recorded",
        f"masked: {undetached_label}",
    )
    labels = (*labels, *(f"masked: {gate}" for gate in gates))
    codes = np.full(len(packed), TRAINED, np.uint8)
    codes[outcome.clipped] = CLIPPED
    codes[~outcome.keep] = MASKED_BY_POLICY
    masked = ~np.asarray(outcome.corrected.keep, bool)
    if objective.requirements.rollout:
        codes[masked & np.isnan(packed.rollout_logprobs)] = UNKNOWN
    unexplained = masked & ~np.isnan(packed.rollout_logprobs)
    for count in range(1, len(gates) + 1):
        is_last = count == len(gates)
        dropped = (
            unexplained
            if is_last
            else unexplained & ~correct_step(packed, objective, "mask", rejections=gates[:count]).keep
        )
        codes[dropped] = MASKED_BY_POLICY + count
        unexplained &= ~dropped
    return labels, codes


MAX_REPORT_TRACES = 20
"""Maximum number of traces in a report."""


class ReportRecords:
    """Records of trained tokens of the last epoch, for the report.

    If bounded, traces are split by the sign of their mean advantage, where 0 counts as positive. Of each side, the
    `MAX_REPORT_TRACES` traces with the largest gradient magnitude that are the first of their group are kept, and
    `MAX_REPORT_TRACES` others. A report of `MAX_REPORT_TRACES` traces needs no others.

    Args:
        catalog: table of all traces.
        bounded: keep only these traces; otherwise all.

    Attributes:
        records: the records by step.
        gradient_magnitude: sum of |d loss / d logprob| over all added tokens, including those discarded.
    """

    def __init__(self, catalog: TraceTable, *, bounded: bool) -> None:
        self._catalog, self._bounded = catalog, bounded
        self.records: list[TokenRecord] = []
        self.gradient_magnitude = 0.0

    def add(self, record: TokenRecord) -> None:
        """Add the tokens of a step. Each trace occurs only once."""
        self.records.append(record)
        self.gradient_magnitude += float(np.abs(np.nan_to_num(record.gradient)).sum(dtype=np.float64))
        if self._bounded:
            self._discard()

    def _discard(self) -> None:
        trace = np.concatenate([record.trace for record in self.records])
        gradient = np.concatenate([record.gradient for record in self.records])
        advantages = np.concatenate([record.advantages for record in self.records])
        rows, owner = np.unique(trace, return_inverse=True)
        magnitude = np.asarray(np.bincount(owner, np.abs(np.nan_to_num(gradient)).astype(np.float64)), np.float64)
        good = np.bincount(owner, np.nan_to_num(advantages).astype(np.float64)) >= 0
        chosen = [self._choose_traces(rows[side], magnitude[side]) for side in (good, ~good)]
        kept_traces = np.concatenate(chosen)
        parts = [_select(record, np.isin(record.trace, kept_traces)) for record in self.records]
        self.records = [part for part in parts if len(part.trace)]

    def _choose_traces(self, rows: NDArray[np.int32], magnitude: NDArray[np.float64]) -> NDArray[np.int32]:
        order = np.argsort(-magnitude, kind="stable")
        first_of_group = np.unique(self._catalog.group[rows[order]], return_index=True)[1]
        first = np.zeros(len(order), bool)
        first[first_of_group] = True
        return np.concatenate([rows[order[first]][:MAX_REPORT_TRACES], rows[order[~first]][:MAX_REPORT_TRACES]])


def _select(record: TokenRecord, mask: NDArray[np.bool_]) -> TokenRecord:
    return replace(record, **{column.name: getattr(record, column.name)[mask] for column in fields(record)[1:]})
