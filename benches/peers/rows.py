"""Rows of final tensors, split again so that two libraries' can be compared: ids, which are trained, logprobs.

Here are `Row`, `ours` and `compare`. A row ends after its last trained token, as what follows has no part in the loss.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np


@dataclass
class Row:
    """One branch: ids [T], trained [T] bool, logprobs [T] float32."""

    ids: np.ndarray
    trained: np.ndarray
    logprobs: np.ndarray

    def __post_init__(self) -> None:
        end = int(np.flatnonzero(self.trained)[-1]) + 1 if self.trained.any() else 0
        self.ids = np.asarray(self.ids, np.int64)[:end]
        self.trained = np.asarray(self.trained, bool)[:end]
        self.logprobs = np.asarray(self.logprobs, np.float32)[:end]

    def equals(self, other: Row) -> bool:
        """Whether ids, mask and the trained tokens' logprobs are the same, the last bit by bit."""
        return (
            np.array_equal(self.ids, other.ids)
            and np.array_equal(self.trained, other.trained)
            and np.array_equal(self.logprobs[self.trained], other.logprobs[other.trained])
        )


def ours(sequences: Any, steps: list[Any]) -> list[Row]:
    """The branches of packed steps: the path from the root of a row to its last term, and the terms on it."""
    rows = []
    for step in steps:
        for batch in step.batches:
            branch = step.branch[batch.term]
            for one in np.unique(branch):
                mine = batch.term[branch == one]
                heads = batch.logit_row[branch == one]
                last = int(batch.read[heads].max())
                path = np.flatnonzero(batch.tree_end[: last + 1] > last)
                final = heads[batch.read[heads] == last][0]
                ids = np.append(batch.ids[path], batch.target[final])
                trained, logprobs = np.zeros(len(ids), bool), np.full(len(ids), np.nan, np.float32)
                at = batch.positions[batch.read[heads]] + 1
                trained[at], logprobs[at] = True, step.rollout_logprobs[mine]
                assert np.array_equal(ids[at], batch.target[heads]), "a head row does not predict the next id"
                assert np.array_equal(ids[at], sequences.ids[step.origin[mine]]), "a term is not its token"
                rows.append(Row(ids, trained, logprobs))
    return rows


def compare(mine: Iterable[Row], theirs: Iterable[Row]) -> dict[str, int]:
    """How many of their rows are one of mine, and how those that are not differ."""
    known: dict[bytes, list[Row]] = {}
    for row in mine:
        known.setdefault(row.ids.tobytes(), []).append(row)
    found = {"rows": 0, "equal": 0, "other_ids": 0, "other_mask": 0, "other_logprobs": 0}
    for row in theirs:
        found["rows"] += 1
        same = known.get(row.ids.tobytes(), [])
        if any(row.equals(one) for one in same):
            found["equal"] += 1
        elif not same:
            found["other_ids"] += 1
        elif any(np.array_equal(row.trained, one.trained) for one in same):
            found["other_logprobs"] += 1
        else:
            found["other_mask"] += 1
    return found
