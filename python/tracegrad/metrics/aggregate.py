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
"""Log-ratios beyond plus or minus this many nats are in the two open bins at the ends."""
FINE = 1e-3
"""Below this many nats all bins have nearly the same width; above, their width grows with |l|."""
HALF = 4096
"""Number of bins on either side of the one around l = 0."""
BINS = 2 * HALF + 3
"""Total number of bins: 2 * HALF + 1 between the limits, and an open one at each end."""
_WIDTH = np.arcsinh(LIMIT / FINE) / HALF
RESOLUTION = _WIDTH / 2
"""A percentile is off by at most RESOLUTION * sqrt(l^2 + FINE^2) nats: 0.13 % of l, and 1.3e-6 near l = 0."""


def bins(log_ratios: NDArray[np.floating]) -> NDArray[np.intp]:
    """Return [M] the bin of each log-ratio; -inf (a weight of 0) is in the first bin.

    >>> bins(np.array([-np.inf, 0.0, 25.0])).tolist()
    [0, 4097, 8194]
    """
    place = np.rint(np.arcsinh(log_ratios / FINE) / _WIDTH)
    return (np.clip(place, -HALF - 1, HALF + 1) + HALF + 1).astype(np.intp)


def percentile(counts: NDArray[np.int64], share: float, low: float, high: float) -> float:
    """Return the smallest ratio with at least `share` of the counted ratios at or below it, up to `RESOLUTION`.

    Args:
        counts: [BINS].
        share: from 0 to 1.
        low, high: the smallest and the largest ratio, exact; the result is between them.

    Returns:
        the ratio, not its logarithm; NaN if nothing was counted.

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
    bin_index = int(np.searchsorted(np.cumsum(counts), rank))
    if not 0 < bin_index < BINS - 1:
        return low if bin_index == 0 else high
    return float(np.clip(np.exp(FINE * np.sinh((bin_index - HALF - 1) * _WIDTH)), low, high))


Floats = NDArray[np.float64]
Ints = NDArray[np.intp]


@dataclass(frozen=True, eq=False)
class Groups:
    """Tokens grouped by id.

    Consecutive tokens with the same id are reduced first, which is fast if tokens are in order of their trace.

    Args:
        starts: [K] first token of each run of equal ids.
        owner: [K] the group of each run.
        count: number of groups.
        terms: M, the number of tokens.
    """

    starts: Ints
    owner: Ints
    count: int
    terms: int

    @classmethod
    def of(cls, ids: NDArray[np.integer]) -> Groups:
        """Return groups numbered in the order of their ids.

        >>> Groups.of(np.array([7, 7, 3, 7])).total(np.array([1.0, 2.0, 4.0, 8.0])).tolist()
        [4.0, 11.0]
        """
        starts = _runs(ids)
        names, owner = np.unique(ids[starts], return_inverse=True)
        return cls(starts, owner.reshape(-1), len(names), len(ids))

    @classmethod
    def runs(cls, ids: NDArray[np.integer]) -> Groups:
        """Return one group per run of equal ids; an id that occurs again later is another group."""
        starts = _runs(ids)
        return cls(starts, np.arange(len(starts)), len(starts), len(ids))

    def split(self, cell: Ints, cells: int) -> tuple[Groups, Ints]:
        """Return these groups split by a second id below `cells`, and that id for each of the parts."""
        starts = np.union1d(self.starts, _runs(cell))
        group = self.owner[np.searchsorted(self.starts, starts, side="right") - 1]
        names, owner = np.unique(group * cells + cell[starts], return_inverse=True)
        return Groups(starts, owner.reshape(-1), len(names), self.terms), names % cells

    def total(self, values: NDArray[Any]) -> Floats:
        """Return [count] sum of each group, in float64."""
        runs = np.add.reduceat(values, self.starts, dtype=np.float64) if self.terms else np.zeros(0)
        return np.bincount(self.owner, runs, self.count).astype(np.float64, copy=False)

    def largest(self, values: NDArray[Any]) -> Floats:
        """Return [count] largest value of each group; -inf for a group without tokens."""
        largest = np.full(self.count, -np.inf)
        if self.terms:
            np.maximum.at(largest, self.owner, np.maximum.reduceat(values, self.starts))
        return largest

    def broadcast(self, values: NDArray[Any]) -> NDArray[Any]:
        """Return [M] the value of each token's group."""
        return np.repeat(values[self.owner], np.diff(self.starts, append=self.terms))


def _runs(ids: NDArray[Any]) -> Ints:
    return np.flatnonzero(np.concatenate([[True], ids[1:] != ids[:-1]])) if len(ids) else np.zeros(0, np.intp)


@dataclass(frozen=True, eq=False)
class Rows:
    """Tokens as a peer stores them: rows of a padded array, some of which may be empty.

    Args:
        groups: tokens by row; a row is a trace.
        lengths: [R] number of tokens of each row.
        positions: number of elements of the padded array, for peers that divide by it.

    >>> # Three tokens of three traces, one of which is empty.
    >>> rows = Rows.of([0, 0, 2], rows=3)
    >>> rows.lengths.tolist(), rows.mean(np.array([1.0, 2.0, 4.0])).tolist(), rows.filled.tolist()
    ([2.0, 0.0, 1.0], [1.5, 0.0, 4.0], [True, False, True])
    """

    groups: Groups
    lengths: Floats
    positions: int

    @classmethod
    def of(cls, trace: ArrayLike, rows: int | None = None, positions: int | None = None) -> Rows:
        """Build rows from flat tokens.

        Args:
            trace: [M] row of each token, from 0.
            rows: R, if the last rows are empty; default the highest id + 1.
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
                f"TG-METRIC-001: trace has ids from {ids.min()} to {ids.max()} with {count} rows. Ids "
                "must be row numbers from 0. Pass rows= if the last rows are empty."
            )
        starts = _runs(ids)
        groups = Groups(starts, ids[starts], count, len(ids))
        return cls(groups, groups.total(np.ones(len(ids))), len(ids) if positions is None else positions)

    @classmethod
    def padded(cls, mask: ArrayLike) -> Rows:
        """Build rows from the tokens of a padded array [B, S] of flags, in the order of `array[mask]`.

        >>> Rows.padded([[True, False], [False, False]]).lengths.tolist()
        [1.0, 0.0]
        """
        flags = _validation.as_flags(_validation.numbers(mask, "mask"), "mask")
        return cls.of(np.nonzero(flags)[0], flags.shape[0], flags.size)

    @property
    def count(self) -> int:
        """Number of rows, including empty ones."""
        return self.groups.count

    @property
    def filled(self) -> NDArray[np.bool_]:
        """[R] bool: rows with a token."""
        return self.lengths > 0

    def total(self, values: NDArray[Any]) -> Floats:
        """Return [R] sum of each row, 0 for an empty one."""
        return self.groups.total(values)

    def mean(self, values: NDArray[Any]) -> Floats:
        """Return [R] mean of each row, 0 for an empty one."""
        return self.total(values) / np.maximum(self.lengths, 1.0)

    def largest(self, values: NDArray[Any], empty: float = 0.0) -> Floats:
        """Return [R] largest value of each row, `empty` for an empty one."""
        return np.where(self.filled, self.groups.largest(values), empty)

    def any(self, flags: NDArray[np.bool_]) -> NDArray[np.bool_]:
        """Return [R] whether any token of the row is flagged."""
        return self.largest(flags.astype(np.float64)) > 0

    def back(self, values: NDArray[Any]) -> NDArray[Any]:
        """Return [M] the value of each token's row."""
        return self.groups.broadcast(values)

    def where(self, keep: NDArray[np.bool_]) -> Rows:
        """Return the same rows with only the tokens in `keep`."""
        return Rows.of(self.back(np.arange(self.count))[keep], self.count, self.positions)


Counts = NDArray[np.int64]
AllReduce = Callable[[Floats, str], Floats]
"""all_reduce(array, "sum" or "max") over ranks, returning the reduced float64 array."""


@dataclass(frozen=True, eq=False)
class Sums:
    """Named arrays that merge exactly: counts to the last bit, totals up to float64 rounding.

    Args:
        totals: float64, added.
        counts: int64, added. Below 2^53 they survive an all-reduce in float64.
        maxima: float64; merging keeps the largest. A minimum is stored as the maximum of the negative; its name starts
            with -.

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
        """Build sums from numbers or arrays."""
        return cls(_as_arrays(totals, np.float64), _as_arrays(counts, np.int64), _as_arrays(maxima, np.float64))

    def __getitem__(self, name: str) -> NDArray[Any]:
        """Return the array called `name`, of any kind."""
        for part in (self.totals, self.counts, self.maxima):
            if name in part:
                return part[name]
        raise KeyError(name)

    def __contains__(self, name: str) -> bool:
        return name in self.totals or name in self.counts or name in self.maxima

    def __or__(self, other: Sums) -> Sums:
        """Return these sums together with sums of other names."""
        return Sums({**self.totals, **other.totals}, {**self.counts, **other.counts}, {**self.maxima, **other.maxima})

    def __add__(self, other: Sums) -> Sums:
        """Return the sums of both parts together.

        Raises:
            ArgumentError: if the parts have different names or shapes.
        """
        for mine, theirs in zip(self._parts(), other._parts(), strict=True):
            shapes = {k: v.shape for k, v in mine.items()}, {k: v.shape for k, v in theirs.items()}
            if shapes[0] != shapes[1]:
                names = sorted({k for k, _ in set(shapes[0].items()) ^ set(shapes[1].items())})
                raise ArgumentError(
                    f"TG-METRIC-002: these parts were not measured alike: {', '.join(names[:5])} is not in both, or "
                    "not of one shape. Their sum would mix two definitions. Measure every part with the same "
                    "options and arrays."
                )
        return Sums(
            {name: value + other.totals[name] for name, value in self.totals.items()},
            {name: value + other.counts[name] for name, value in self.counts.items()},
            {name: np.maximum(value, other.maxima[name]) for name, value in self.maxima.items()},
        )

    def all_reduce(self, all_reduce: AllReduce) -> Sums:
        """Return the sums of all ranks, with two collective calls; every rank must have measured the same names."""
        added = _all_reduce_arrays(all_reduce, "sum", {**self.totals, **self.counts})
        counts = {name: np.rint(added.pop(name)).astype(np.int64) for name in self.counts}
        return Sums(added, counts, _all_reduce_arrays(all_reduce, "max", self.maxima))

    def with_prefix(self, prefix: str) -> Sums:
        """Return the same sums with a prefix before their names."""
        return Sums(*({prefix + name: value for name, value in part.items()} for part in self._parts()))

    def without_prefix(self, prefix: str) -> Sums:
        """Return the sums whose names start with `prefix`, without that prefix."""
        cut = len(prefix)
        return Sums(*({k[cut:]: v for k, v in part.items() if k.startswith(prefix)} for part in self._parts()))

    def _parts(self) -> tuple[Mapping[str, Any], ...]:
        return self.totals, self.counts, self.maxima


def _as_arrays(arrays: Mapping[str, ArrayLike] | None, dtype: Any) -> dict[str, NDArray[Any]]:
    return {name: np.asarray(value, dtype) for name, value in (arrays or {}).items()}


def _all_reduce_arrays(all_reduce: AllReduce, op: str, arrays: Mapping[str, NDArray[Any]]) -> dict[str, Floats]:
    """Reduce arrays of any shape with one collective call."""
    if not arrays:
        return {}
    flat = np.concatenate([np.asarray(value, np.float64).reshape(-1) for value in arrays.values()])
    reduced = np.asarray(all_reduce(flat, op), np.float64)
    ends = np.cumsum([value.size for value in arrays.values()])
    return {
        name: reduced[end - value.size : end].reshape(value.shape)
        for (name, value), end in zip(arrays.items(), ends, strict=True)
    }


def divide(top: ArrayLike, bottom: ArrayLike) -> Floats:
    """Return top / bottom, and NaN if the bottom is 0: a mean over nothing does not exist."""
    top, bottom = np.broadcast_arrays(np.asarray(top, np.float64), np.asarray(bottom, np.float64))
    return np.divide(top, bottom, out=np.full(top.shape, np.nan), where=bottom != 0)


def moments(
    name: str, values: ArrayLike, *, low: float | None = None, high: float | None = None, about: float = 0.0
) -> Sums:
    """Return the sums of one quantity that `Moments` reads.

    Args:
        name: prefix of the names of the sums.
        values: any shape, finite, or infinite if a peer leaves it so.
        low, high: also count the values beyond these bounds, and sum the values clamped to them.
        about: squares are of the distance from this number. Choose a number close to the values, such as 1 for ratios.

    >>> Moments(moments("w", [1.0, 3.0]), "w").mean()
    2.0
    """
    values = _validation.real(values, "values")
    distance = values - about
    totals: dict[str, Any] = {"": values.sum(), ".away": distance.sum(), ".squares": (distance * distance).sum()}
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
    """Moments of one quantity, read from some sums.

    >>> ratios = Moments(moments("ratio", [0.5, 1.0, 1.5], high=1.2), "ratio")
    >>> ratios.n, ratios.mean(), ratios.largest, ratios.deviation(ddof=1), round(ratios.share("above"), 3)
    (3, 1.0, 1.5, 0.5, 0.333)
    """

    sums: Sums
    name: str

    @property
    def n(self) -> int:
        """Number of values."""
        return int(self.sums[self.name + ".n"])

    @property
    def total(self) -> float:
        """Sum of the values."""
        return float(self.sums[self.name])

    @property
    def largest(self) -> float:
        """The largest value; -inf if there is none."""
        return float(self.sums[self.name + ".max"])

    @property
    def smallest(self) -> float:
        """The smallest value; inf if there is none."""
        return -float(self.sums[self.name + ".-min"])

    def mean(self) -> float:
        """Return total / n; NaN if there is no value."""
        return float(divide(self.total, self.n))

    def share(self, side: str) -> float:
        """Return the share of the values "above" or "below" the bounds."""
        return float(divide(self.sums[f"{self.name}.{side}"], self.n))

    def deviation(self, ddof: int = 0) -> float:
        """Return the standard deviation; NaN for fewer than ddof + 1 values."""
        if self.n <= ddof:
            return float("nan")
        distance, squares = (float(self.sums[self.name + field]) for field in (".away", ".squares"))
        return float(np.sqrt(max(squares - distance * distance / self.n, 0.0) / (self.n - ddof)))

    def clamped_deviation(self) -> float:
        """Return the standard deviation over n of the values clamped to the bounds."""
        mean = divide(self.sums[self.name + ".clamped"], self.n)
        square = divide(self.sums[self.name + ".clamped_squares"], self.n)
        return float(np.sqrt(np.maximum(square - mean * mean, 0.0)))


def formula_of(how: Callable[[Moments], float]) -> Callable[[str], Callable[[Sums], float]]:
    """Turn a function of `Moments` into one that, given a quantity's name, returns a formula over `Sums`.

    >>> mean_of("w")(moments("w", [1.0, 3.0]))
    2.0
    """
    return lambda name: lambda sums: how(Moments(sums, name))


def quotient(top: str, bottom: str) -> Callable[[Sums], Floats]:
    """Return the formula for the quotient of two sums; NaN over 0."""
    return lambda sums: divide(sums[top], sums[bottom])


mean_of, deviation_of = formula_of(Moments.mean), formula_of(lambda m: m.deviation(1))
largest_of, smallest_of = formula_of(lambda m: m.largest), formula_of(lambda m: m.smallest)
above, below = formula_of(lambda m: m.share("above")), formula_of(lambda m: m.share("below"))
"""Mean, deviation over n - 1, largest and smallest, and the shares of the values beyond the bounds."""
