"""The sampler's support: the token ids from which top-p, top-k or min-p let the sampler draw each trained token."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, eq=False, repr=False)
class Support:
    """The support of each of U logit rows, concatenated. A row without ids was sampled from the whole vocabulary.

    Args:
        ids: [K] int32: the ids of all rows, each row's target among its own. An int64 tensor after `to`.
        offsets: [U+1] int64: row u has ids[offsets[u]:offsets[u+1]]. It stays numpy, because chunks are cut by it.
        row: [K] int64 tensor: the row of each id; None until `to`.

    >>> support = Support(np.array([5, 9, 6], np.int32), np.array([0, 2, 2, 3]))
    >>> support, support.take(np.array([2, 0])).ids.tolist()
    (Support(3 ids for 2 of 3 rows), [6, 5, 9])
    """

    ids: Any
    offsets: NDArray[np.int64]
    row: Any = None

    def __repr__(self) -> str:
        restricted = int(np.count_nonzero(np.diff(self.offsets)))
        return f"Support({int(self.offsets[-1])} ids for {restricted} of {len(self.offsets) - 1} rows)"

    def take(self, rows: NDArray[np.integer]) -> Support:
        """Return the support of some rows, before the batch is moved to a device."""
        lengths = np.diff(self.offsets)[rows]
        offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
        starts = np.repeat(self.offsets[rows] - offsets[:-1], lengths)
        return Support(self.ids[starts + np.arange(offsets[-1])], offsets)

    def at(self, rows: slice) -> Support | None:
        """Return the support of the rows of a chunk, on the device; None if all have the whole vocabulary."""
        offsets = self.offsets[rows.start : rows.stop + 1]
        first, end = int(offsets[0]), int(offsets[-1])
        if first == end:
            return None
        return replace(self, ids=self.ids[first:end], offsets=offsets - first, row=self.row[first:end] - rows.start)

    def to(self, device: Any) -> Support:
        """Return the support with `ids` and `row` as int64 tensors on `device`."""
        from tracegrad.packing.batch import to_device

        row = self.row
        if row is None:
            row = np.repeat(np.arange(len(self.offsets) - 1), np.diff(self.offsets))
        return replace(self, ids=to_device(self.ids, device), row=to_device(row, device))
