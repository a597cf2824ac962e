"""Write per-token data of a run in the background, and choose the traces that its report shows."""

import queue
import shutil
import threading
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tracegrad.alignment.sequences import Sequences
from tracegrad.config.schema import Kept
from tracegrad.errors import TracegradError
from tracegrad.objective import Objective
from tracegrad.packing import Step
from tracegrad.trainer import token_log
from tracegrad.trainer.dataset import Catalog, Source, source_of
from tracegrad.trainer.result import TermRecord
from tracegrad.trainer.step import Outcome, detached
from tracegrad.trainer.token_log import CLIPPED, KEPT, LATE, UNKNOWN, StepTerms

_TOKEN_BYTES, _TERM_BYTES = 24, 41
_MEGA = 1_000_000


class Keeper:
    """Writes the terms of steps, of whole groups that are chosen by their names, within a bound.

    Nothing here stops a run: a disk that is full ends the keeping, and `problem` says so.

    Args:
        out: folder of the run.
        options: section `terms` of the config.
        objective: whose gates give the reasons.
        rank, world: this process of so many; the first one writes the tokens too.
        taken: steps taken before; what stands there of later ones is removed, as those are taken again.
    """

    def __init__(
        self, out: Path, options: Kept, objective: Objective, *, rank: int = 0, world: int = 1, taken: int = 0
    ) -> None:
        self.folder, self._options, self._objective, self._rank = out / token_log.FOLDER, options, objective, rank
        self.problem = ""
        self._bound = options.megabytes * _MEGA // world
        self._queue: queue.Queue[Any] = queue.Queue(maxsize=2)
        self._thread = threading.Thread(target=self._work, name="terms", daemon=True)
        self._sets = 0
        self._known: tuple[Sequences | Source, str, NDArray[np.int32], NDArray[np.int64]] | None = None
        self._spent = 0
        if options.keep != "none":
            self._begin(taken)
            self._thread.start()

    @classmethod
    def silent(cls, out: Path, objective: Objective) -> "Keeper":
        """One that keeps nothing."""
        return cls(out, Kept(keep="none"), objective)

    def step(
        self, number: int, packed: Step, outcome: Outcome, data: Sequences | Source, *, sets: int = 1, passes: int = 1
    ) -> None:
        """Has a step kept; waits only where two steps are not written yet.

        Args:
            number: of the update, from 1.
            data: what `packed.trace` and `packed.origin` count into.
            sets: how many different `data` are still to come, this one included.
            passes: how often each of their terms comes.
        """
        if self._thread.is_alive():
            self._queue.put((number, packed, outcome, data, sets, passes))

    def flush(self) -> None:
        """Waits until what was given is written: a checkpoint is not ahead of it."""
        if self._thread.is_alive():
            self._queue.join()

    def close(self) -> None:
        """Writes what is left."""
        if self._thread.is_alive():
            self._queue.put(None)
            self._thread.join()

    def _begin(self, taken: int) -> None:
        try:
            if taken == 0:
                shutil.rmtree(self.folder, ignore_errors=True)
            self.folder.mkdir(parents=True, exist_ok=True)
            for path in self.folder.glob(f"step-*.r{self._rank}.safetensors"):
                if int(path.name[5:].partition(".")[0]) > taken:
                    path.unlink()
            self._sets = len(list(self.folder.glob("tokens-*")))
            self._spent = sum(path.stat().st_size for path in self.folder.rglob("*.safetensors"))
        except OSError as error:
            self.problem = f"{self.folder}: {error.strerror}. What the steps made of their tokens is not kept."

    def _work(self) -> None:
        while (job := self._queue.get()) is not None:
            if not self.problem:
                self._try(job)
            self._queue.task_done()

    def _try(self, job: Any) -> None:
        try:
            self._write(*job)
        except (TracegradError, OSError) as error:
            self.problem = f"{error} What the steps made of their tokens is kept no further."

    def _write(
        self, number: int, packed: Step, outcome: Outcome, data: Sequences | Source, sets: int, passes: int
    ) -> None:
        if self._known is None or self._known[0] is not data:
            self._known = (data, *self._new(source_of(data), sets, passes))
        _, name, rows, moved = self._known
        here = np.flatnonzero(rows[packed.trace] >= 0)
        if not len(here) or (self._options.keep == "sampled" and self._left() < len(here) * _TERM_BYTES):
            return
        words, why = reasons(packed, outcome, self._objective)
        old = np.full(len(packed), np.nan, np.float32) if packed.old_logprobs is None else packed.old_logprobs
        columns = {"advantages": packed.advantages, "old_logprobs": old}
        columns |= {each: getattr(outcome, each) for each in token_log.FLOATS if each not in columns}
        order = here[np.argsort(rows[packed.trace[here]], kind="stable")]
        found = StepTerms(
            number,
            name,
            words,
            packed.origin[order] - moved[packed.trace[order]],
            rows[packed.trace[order]],
            why[order],
            {each: np.asarray(column, np.float32)[order] for each, column in columns.items()},
        )
        self._spent += token_log.write_step(self.folder / token_log.step_name(number, self._rank), found)

    def _new(self, source: Source, sets: int, passes: int) -> tuple[str, NDArray[np.int32], NDArray[np.int64]]:
        """Chooses groups of new traces, writes their tokens, and says which row each trace is there.

        Returns:
            the name of what holds them; by trace its row, -1 where it is not kept; and by how much its tokens moved.
        """
        catalog, chosen = source.catalog, self._chosen(source, sets, passes)
        self._sets += 1
        name = f"tokens-{self._sets:05d}"
        if self._rank == 0 and len(chosen):
            part = source.kept(chosen)
            part.save(self.folder / name)
            self._spent += part.tokens * _TOKEN_BYTES
        rows, moved = np.full(catalog.traces, -1, np.int32), np.zeros(catalog.traces, np.int64)
        rows[chosen] = np.arange(len(chosen), dtype=np.int32)
        tokens = catalog.tokens[chosen].astype(np.int64)
        moved[chosen] = catalog.first_token[chosen] - (np.cumsum(tokens) - tokens)
        return name, rows, moved

    def _left(self) -> int:
        return self._bound - self._spent

    def _chosen(self, source: Source, sets: int, passes: int) -> NDArray[np.int64]:
        """Rows of the groups whose names fall into the share that the bound leaves."""
        catalog = source.catalog
        if self._options.keep == "all":
            return np.arange(catalog.traces)
        tokens = int(catalog.tokens.sum(dtype=np.int64))
        cost = tokens * _TOKEN_BYTES + catalog.all_terms * _TERM_BYTES * passes
        share = self._left() / max(sets, 1) / max(cost, 1)
        return np.flatnonzero(source.lots() < share)


def reasons(packed: Step, outcome: Outcome, objective: Objective) -> tuple[tuple[str, ...], NDArray[np.uint8]]:
    """What became of each term, and the words for it: trained, clipped, or the first that masked it.

    Which of several gates dropped a term is found by the correction itself, with one gate more each time.
    """
    gates = tuple(gate for gate in objective.gates if gate.detached)
    late = "; or ".join(str(g) for g in objective.gates if not g.detached) or "a selector on the trained policy"
    words = ("trained", f"clipped: {objective.surrogate}", "masked: its logprob was not recorded", f"masked: {late}")
    words = (*words, *(f"masked: {gate}" for gate in gates))
    why = np.full(len(packed), KEPT, np.uint8)
    why[outcome.clipped] = CLIPPED
    why[~outcome.keep] = LATE
    lost = ~np.asarray(outcome.corrected.keep, bool)
    if objective.needs.rollout:
        why[lost & np.isnan(packed.rollout_logprobs)] = UNKNOWN
    open_ = lost & ~np.isnan(packed.rollout_logprobs)
    for count in range(1, len(gates) + 1):
        last = count == len(gates)
        fell = open_ if last else open_ & ~detached(packed, objective, "mask", gates=gates[:count]).keep
        why[fell] = LATE + count
        open_ &= ~fell
    return words, why


MOST = 20
"""Traces that a report shows."""


class Records:
    """What is kept of the steps of the last pass.

    Where it is bounded, of each side (good is an advantage of at least 0 on average) the `MOST` hardest pulling
    traces stay that are first of their groups, and as many of the others: no report of `MOST` traces shows another one.

    Args:
        catalog: of all traces.
        bounded: keep these alone; else every term.

    Attributes:
        records: by step.
        pull: of all terms that were added, sum of |d loss / d logprob|.
    """

    def __init__(self, catalog: Catalog, *, bounded: bool) -> None:
        self._catalog, self._bounded = catalog, bounded
        self.records: list[TermRecord] = []
        self.pull = 0.0

    def add(self, record: TermRecord) -> None:
        """Takes the terms of a step; each trace comes once."""
        self.records.append(record)
        self.pull += float(np.abs(np.nan_to_num(record.gradient)).sum(dtype=np.float64))
        if self._bounded:
            self._let_go()

    def _let_go(self) -> None:
        trace = np.concatenate([each.trace for each in self.records])
        gradient = np.concatenate([each.gradient for each in self.records])
        advantages = np.concatenate([each.advantages for each in self.records])
        rows, of = np.unique(trace, return_inverse=True)
        pull = np.asarray(np.bincount(of, np.abs(np.nan_to_num(gradient)).astype(np.float64)), np.float64)
        good = np.bincount(of, np.nan_to_num(advantages).astype(np.float64)) >= 0
        chosen = [self._shown(rows[side], pull[side]) for side in (good, ~good)]
        stay = np.concatenate(chosen)
        parts = [_of(record, np.isin(record.trace, stay)) for record in self.records]
        self.records = [part for part in parts if len(part.trace)]

    def _shown(self, rows: NDArray[np.int32], pull: NDArray[np.float64]) -> NDArray[np.int32]:
        order = np.argsort(-pull, kind="stable")
        heads = np.unique(self._catalog.group[rows[order]], return_index=True)[1]
        first = np.zeros(len(order), bool)
        first[heads] = True
        return np.concatenate([rows[order[first]][:MOST], rows[order[~first]][:MOST]])


def _of(record: TermRecord, here: NDArray[np.bool_]) -> TermRecord:
    return replace(record, **{each.name: getattr(record, each.name)[here] for each in fields(record)[1:]})
