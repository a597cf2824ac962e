"""Sums that merge: a step cut into micro-batches and spread over ranks gives the same numbers as the step whole.

Here are `Sums`, named arrays of which some are added and of others the largest is kept, and `Moments`, which reads
mean, deviation and extrema out of them. No metric has its name here. Called by `offpolicy`, `rewards` and `peers`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from tracegrad import arrays
from tracegrad.errors import ArgumentError

Floats = NDArray[np.float64]
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
    values = arrays.real(values, "values")
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
