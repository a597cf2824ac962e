"""Per-term arrays of the last pass, for the report: of every step, or of the traces that can be shown alone.

Here is `Records`. What a record is stands in `record`, which traces are shown in `report.tokens`. Called by the loop.
"""

from dataclasses import fields, replace

import numpy as np
from numpy.typing import NDArray

from tracegrad.catalog import Catalog
from tracegrad.learner.record import TermRecord

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
