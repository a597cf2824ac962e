"""Aggregate sums, histograms and segment statistics that can be merged over rows and ranks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from tracegrad import _validation
from tracegrad.errors import ArgumentError

LIMIT = 20.0
"""Log-ratios beyond plus or minus this many nats fall into the two open bins at the ends."""
FINE = 1e-3
"""Below this many nats bins are of one width; above, their width grows with |l|."""
HALF = 4096
"""Bins on either side of the one around l = 0."""
BINS = 2 * HALF + 3
"""Bins in all: 2 * HALF + 1 between the limits, and an open one at each end."""
_WIDTH = np.arcsinh(LIMIT / FINE) / HALF
RESOLUTION = _WIDTH / 2
"""A percentile is off by at most RESOLUTION * sqrt(l^2 + FINE^2) nats: 0.13 % of l, and 1.3e-6 near l = 0."""


def bins(log_ratios: NDArray[np.floating]) -> NDArray[np.intp]:
    """[M] the bin of each log-ratio; -inf (a weight of 0) is in the first.

    >>> bins(np.array([-np.inf, 0.0, 25.0])).tolist()
    [0, 4097, 8194]
    """
    place = np.rint(np.arcsinh(log_ratios / FINE) / _WIDTH)
    return (np.clip(place, -HALF - 1, HALF + 1) + HALF + 1).astype(np.intp)


def percentile(counts: NDArray[np.int64], share: float, low: float, high: float) -> float:
    """The smallest ratio with at least `share` of the counted ratios at or below it, up to `RESOLUTION`.

    Args:
        counts: [BINS].
        share: from 0 to 1.
        low, high: the smallest and the largest ratio, known exactly; the answer lies between them.

    Returns:
        the ratio, not its logarithm; NaN where nothing was counted.

    >>> counts = np.bincount(bins(np.log([0.5, 1.0, 1.0, 2.0])), minlength=BINS)
    >>> percentile(counts, 0.5, 0.5, 2.0), percentile(counts, 1.0, 0.5, 2.0)
    (1.0, 2.0)
    """
    total = int(counts.sum())
    if total == 0:
        return float("nan")
    rank = min(max(int(np.ceil(share * total)), 1), total)
    if rank == total:
        return high
    found = int(np.searchsorted(np.cumsum(counts), rank))
    if not 0 < found < BINS - 1:
        return low if found == 0 else high
    return float(np.clip(np.exp(FINE * np.sinh((found - HALF - 1) * _WIDTH)), low, high))


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
        ids = _validation.integers(trace, "trace", np.intp)
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
        flags = _validation.as_flags(_validation.numbers(mask, "mask"), "mask")
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


Counts = NDArray[np.int64]
AllReduce = Callable[[Floats, str], Floats]
"""all_reduce(array, "sum" or "max") over ranks, returning the reduced float64 array."""


@dataclass(frozen=True, eq=False)
class Sums:
    """Named arrays that merge exactly: counts to the last bit, totals to the rounding of float64.

    Args:
        totals: float64, added.
        counts: int64, added. Below 2^53 they survive an all-reduce in float64.
        maxima: float64, of which the largest is kept. A minimum is the maximum of the negative; its name starts with -.

    >>> a, b = Sums.of(totals={"x": 1.5}, counts={"n": 1}), Sums.of(totals={"x": 2.0}, counts={"n": 3})
    >>> float((a + b)["x"] / (a + b)["n"])
    0.875
    """

    totals: Mapping[str, Floats]
    counts: Mapping[str, Counts]
    maxima: Mapping[str, Floats]

    @classmethod
    def of(
        cls,
        totals: Mapping[str, ArrayLike] | None = None,
        counts: Mapping[str, ArrayLike] | None = None,
        maxima: Mapping[str, ArrayLike] | None = None,
    ) -> Sums:
        """From numbers or arrays."""
        return cls(_as(totals, np.float64), _as(counts, np.int64), _as(maxima, np.float64))

    def __getitem__(self, name: str) -> NDArray[Any]:
        """The array called `name`, of whichever kind."""
        for part in (self.totals, self.counts, self.maxima):
            if name in part:
                return part[name]
        raise KeyError(name)

    def __contains__(self, name: str) -> bool:
        return name in self.totals or name in self.counts or name in self.maxima

    def __or__(self, other: Sums) -> Sums:
        """Sums of other names beside these."""
        return Sums({**self.totals, **other.totals}, {**self.counts, **other.counts}, {**self.maxima, **other.maxima})

    def __add__(self, other: Sums) -> Sums:
        """The sums of both parts together.

        Raises:
            ArgumentError: if the parts were not measured alike.
        """
        for mine, theirs in zip(self._parts(), other._parts(), strict=True):
            shapes = {k: v.shape for k, v in mine.items()}, {k: v.shape for k, v in theirs.items()}
            if shapes[0] != shapes[1]:
                apart = sorted({k for k, _ in set(shapes[0].items()) ^ set(shapes[1].items())})
                raise ArgumentError(
                    f"these parts were not measured alike: {', '.join(apart[:5])} is not in both, or not of one shape. "
                    "Their sum would mix two definitions. Give every part the same options and the same arrays."
                )
        return Sums(
            {name: value + other.totals[name] for name, value in self.totals.items()},
            {name: value + other.counts[name] for name, value in self.counts.items()},
            {name: np.maximum(value, other.maxima[name]) for name, value in self.maxima.items()},
        )

    def all_reduce(self, all_reduce: AllReduce) -> Sums:
        """The sums of all ranks, by two collective calls; every rank must have measured the same names."""
        added = _through(all_reduce, "sum", {**self.totals, **self.counts})
        counts = {name: np.rint(added.pop(name)).astype(np.int64) for name in self.counts}
        return Sums(added, counts, _through(all_reduce, "max", self.maxima))

    def at(self, prefix: str) -> Sums:
        """The same sums under longer names."""
        return Sums(*({prefix + name: value for name, value in part.items()} for part in self._parts()))

    def under(self, prefix: str) -> Sums:
        """The sums whose names begin with `prefix`, by the rest of their names."""
        cut = len(prefix)
        return Sums(*({k[cut:]: v for k, v in part.items() if k.startswith(prefix)} for part in self._parts()))

    def _parts(self) -> tuple[Mapping[str, Any], ...]:
        return self.totals, self.counts, self.maxima


def _as(named: Mapping[str, ArrayLike] | None, dtype: Any) -> dict[str, NDArray[Any]]:
    return {name: np.asarray(value, dtype) for name, value in (named or {}).items()}


def _through(all_reduce: AllReduce, op: str, named: Mapping[str, NDArray[Any]]) -> dict[str, Floats]:
    """Arrays of any shape through one collective call."""
    if not named:
        return {}
    flat = np.concatenate([np.asarray(value, np.float64).reshape(-1) for value in named.values()])
    back = np.asarray(all_reduce(flat, op), np.float64)
    ends = np.cumsum([value.size for value in named.values()])
    return {
        name: back[end - value.size : end].reshape(value.shape)
        for (name, value), end in zip(named.items(), ends, strict=True)
    }


def per(top: ArrayLike, bottom: ArrayLike) -> Floats:
    """top / bottom, and NaN where the bottom is 0: a mean over nothing does not exist."""
    top, bottom = np.broadcast_arrays(np.asarray(top, np.float64), np.asarray(bottom, np.float64))
    return np.divide(top, bottom, out=np.full(top.shape, np.nan), where=bottom != 0)


def moments(
    name: str, values: ArrayLike, *, low: float | None = None, high: float | None = None, about: float = 0.0
) -> Sums:
    """The sums of one quantity that `Moments` reads.

    Args:
        name: what they are called.
        values: any shape, finite, or infinite where a peer leaves it so.
        low, high: also counts the values beyond these bounds, and sums the values clamped to them.
        about: squares are of the distance from this number: choose one the values lie around, as ratios do around 1.

    >>> Moments(moments("w", [1.0, 3.0]), "w").mean()
    2.0
    """
    values = _validation.real(values, "values")
    away = values - about
    totals: dict[str, Any] = {"": values.sum(), ".away": away.sum(), ".squares": (away * away).sum()}
    counts: dict[str, Any] = {".n": values.size}
    if low is not None or high is not None:
        bounded = np.clip(values, -np.inf if low is None else low, np.inf if high is None else high)
        totals |= {".clamped": bounded.sum(), ".clamped_squares": (bounded * bounded).sum()}
        counts[".above"] = 0 if high is None else np.count_nonzero(values > high)
        counts[".below"] = 0 if low is None else np.count_nonzero(values < low)
    maxima = {".max": values.max(initial=-np.inf), ".-min": (-values).max(initial=-np.inf)}
    return Sums.of(*({name + field: value for field, value in part.items()} for part in (totals, counts, maxima)))


@dataclass(frozen=True)
class Moments:
    """One quantity of some sums."""

    sums: Sums
    name: str

    @property
    def n(self) -> int:
        """How many values."""
        return int(self.sums[self.name + ".n"])

    @property
    def total(self) -> float:
        """Their sum."""
        return float(self.sums[self.name])

    @property
    def largest(self) -> float:
        """The largest; -inf of none."""
        return float(self.sums[self.name + ".max"])

    @property
    def smallest(self) -> float:
        """The smallest; inf of none."""
        return -float(self.sums[self.name + ".-min"])

    def mean(self) -> float:
        """total / n; NaN of none."""
        return float(per(self.total, self.n))

    def share(self, side: str) -> float:
        """Share of the values "above" or "below" the bounds."""
        return float(per(self.sums[f"{self.name}.{side}"], self.n))

    def deviation(self, ddof: int = 0) -> float:
        """Standard deviation; NaN of fewer than ddof + 1 values."""
        if self.n <= ddof:
            return float("nan")
        away, squares = (float(self.sums[self.name + field]) for field in (".away", ".squares"))
        return float(np.sqrt(max(squares - away * away / self.n, 0.0) / (self.n - ddof)))

    def clamped_deviation(self) -> float:
        """Standard deviation over n of the values clamped to the bounds."""
        mean = per(self.sums[self.name + ".clamped"], self.n)
        square = per(self.sums[self.name + ".clamped_squares"], self.n)
        return float(np.sqrt(np.maximum(square - mean * mean, 0.0)))


def reading(how: Callable[[Moments], float]) -> Callable[[str], Callable[[Sums], float]]:
    """What a row of a table reads of a quantity, by the quantity's name.

    >>> mean_of("w")(moments("w", [1.0, 3.0]))
    2.0
    """
    return lambda name: lambda sums: how(Moments(sums, name))


def over(top: str, bottom: str) -> Callable[[Sums], Floats]:
    """The quotient of two sums; NaN over 0."""
    return lambda sums: per(sums[top], sums[bottom])


mean_of, deviation_of = reading(Moments.mean), reading(lambda m: m.deviation(1))
largest_of, smallest_of = reading(lambda m: m.largest), reading(lambda m: m.smallest)
above, below = reading(lambda m: m.share("above")), reading(lambda m: m.share("below"))
"""Mean, deviation over n - 1, largest and smallest, and the shares of the values beyond the bounds."""
