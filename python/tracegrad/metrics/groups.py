"""Terms by trace: sums and extrema of each trace, whatever the order of the terms, without a loop.

Here are `Groups`, terms by any ids, and `Rows`, traces as the rows of the padded array that a peer would hold. Called
by `offpolicy` and `peers`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from tracegrad import arrays
from tracegrad.errors import ArgumentError

Floats = NDArray[np.float64]
Ints = NDArray[np.intp]


@dataclass(frozen=True, eq=False)
class Groups:
    """Terms by id. Neighbours with one id are taken together first, which makes terms in order of their trace fast.

    Args:
        starts: [K] first term of each run of neighbours.
        owner: [K] the group of each run.
        count: groups.
        terms: M.
    """

    starts: Ints
    owner: Ints
    count: int
    terms: int

    @classmethod
    def of(cls, ids: NDArray[np.integer]) -> Groups:
        """Groups numbered in the order of their ids.

        >>> Groups.of(np.array([7, 7, 3, 7])).total(np.array([1.0, 2.0, 4.0, 8.0])).tolist()
        [4.0, 11.0]
        """
        starts = _runs(ids)
        names, owner = np.unique(ids[starts], return_inverse=True)
        return cls(starts, owner.reshape(-1), len(names), len(ids))

    @classmethod
    def runs(cls, ids: NDArray[np.integer]) -> Groups:
        """Groups of neighbours with one id; an id that comes again later is another group."""
        starts = _runs(ids)
        return cls(starts, np.arange(len(starts)), len(starts), len(ids))

    def split(self, cell: Ints, cells: int) -> tuple[Groups, Ints]:
        """These groups cut by a second id below `cells`, and that id of each of the parts."""
        starts = np.union1d(self.starts, _runs(cell))
        whole = self.owner[np.searchsorted(self.starts, starts, side="right") - 1]
        names, owner = np.unique(whole * cells + cell[starts], return_inverse=True)
        return Groups(starts, owner.reshape(-1), len(names), self.terms), names % cells

    def total(self, values: NDArray[Any]) -> Floats:
        """[count] sum of each group, in float64."""
        runs = np.add.reduceat(values, self.starts, dtype=np.float64) if self.terms else np.zeros(0)
        return np.bincount(self.owner, runs, self.count).astype(np.float64, copy=False)

    def largest(self, values: NDArray[Any]) -> Floats:
        """[count] largest of each group; -inf of a group without terms."""
        found = np.full(self.count, -np.inf)
        if self.terms:
            np.maximum.at(found, self.owner, np.maximum.reduceat(values, self.starts))
        return found

    def back(self, values: NDArray[Any]) -> NDArray[Any]:
        """[M] each term's group's value."""
        return np.repeat(values[self.owner], np.diff(self.starts, append=self.terms))


def _runs(ids: NDArray[Any]) -> Ints:
    return np.flatnonzero(np.concatenate([[True], ids[1:] != ids[:-1]])) if len(ids) else np.zeros(0, np.intp)


@dataclass(frozen=True, eq=False)
class Rows:
    """Terms as a peer holds them: rows of a padded array, some of which may be empty.

    Args:
        groups: terms by row; a row is a trace.
        lengths: [R] terms of each row.
        positions: elements of the padded array, for peers that divide by them.
    """

    groups: Groups
    lengths: Floats
    positions: int

    @classmethod
    def of(cls, trace: ArrayLike, rows: int | None = None, positions: int | None = None) -> Rows:
        """Flat terms.

        Args:
            trace: [M] row of each term, from 0.
            rows: R, if the last ones are empty; default the highest id + 1.
            positions: default M, a padded array without padding.

        Raises:
            ArgumentError: if an id is negative or not below `rows`.

        >>> Rows.of([0, 0, 2], rows=4).lengths.tolist()
        [2.0, 0.0, 1.0, 0.0]
        """
        ids = arrays.integers(trace, "trace", np.intp)
        count = int(ids.max(initial=-1)) + 1 if rows is None else rows
        if len(ids) and not 0 <= ids.min() <= ids.max() < count:
            raise ArgumentError(
                f"trace has ids from {ids.min()} to {ids.max()} with {count} rows. A row would be missing in a peer's "
                "means over rows. Number the rows from 0, and say rows= if some are empty."
            )
        starts = _runs(ids)
        groups = Groups(starts, ids[starts], count, len(ids))
        return cls(groups, groups.total(np.ones(len(ids))), len(ids) if positions is None else positions)

    @classmethod
    def padded(cls, mask: ArrayLike) -> Rows:
        """The terms of a padded array [B, S] of flags, in the order of `array[mask]`.

        >>> Rows.padded([[True, False], [False, False]]).lengths.tolist()
        [1.0, 0.0]
        """
        flags = arrays.as_flags(arrays.numbers(mask, "mask"), "mask")
        return cls.of(np.nonzero(flags)[0], flags.shape[0], flags.size)

    @property
    def count(self) -> int:
        """Rows, empty ones among them."""
        return self.groups.count

    @property
    def filled(self) -> NDArray[np.bool_]:
        """[R] rows with a term."""
        return self.lengths > 0

    def total(self, values: NDArray[Any]) -> Floats:
        """[R] sum of each row, 0 of an empty one."""
        return self.groups.total(values)

    def mean(self, values: NDArray[Any]) -> Floats:
        """[R] mean of each row, 0 of an empty one."""
        return self.total(values) / np.maximum(self.lengths, 1.0)

    def largest(self, values: NDArray[Any], empty: float = 0.0) -> Floats:
        """[R] largest of each row."""
        return np.where(self.filled, self.groups.largest(values), empty)

    def any(self, flags: NDArray[np.bool_]) -> NDArray[np.bool_]:
        """[R] whether any term of the row is flagged."""
        return self.largest(flags.astype(np.float64)) > 0

    def back(self, values: NDArray[Any]) -> NDArray[Any]:
        """[M] each term's row's value."""
        return self.groups.back(values)

    def where(self, keep: NDArray[np.bool_]) -> Rows:
        """The same rows with some of their terms."""
        return Rows.of(self.back(np.arange(self.count))[keep], self.count, self.positions)
