"""How far the policies of a step are from one another: ratios, KL, chi-square, effective sample, and who pulls.

Here is `OffPolicy`, the one place that describes ratios: mergeable sums of a part of a step, read under the names of
docs/metrics.md, as a whole and by turn, tier and version lag. Nothing is corrected here; numpy alone. Called by the
learner, usable by any trainer with flat arrays.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import ArrayLike, NDArray

from tracegrad import arrays
from tracegrad.errors import ArgumentError
from tracegrad.metrics import histogram
from tracegrad.metrics.columns import Column, columns
from tracegrad.metrics.groups import Groups
from tracegrad.metrics.offpolicy_rows import ROWS, ROWS_BY_CELL
from tracegrad.metrics.sums import AllReduce, Floats, Sums

LAGS = (0, 1, 2, 3, 4, 8, 16)
"""First lag of each cell; the last cell is open."""
TURNS = 8
"""Turns with a cell of their own; later ones share one."""
_TIERS = 7


@dataclass(frozen=True)
class Breakdown:
    """Values to cells, which are fixed, so that sums have one shape on every rank.

    Args:
        starts: first value of each cell but the last, which holds what is below the first or not in `values`.
        cells: their names.
        above: values from here on are unknown too; None where the last cell is open.
    """

    starts: tuple[int, ...]
    cells: tuple[str, ...]
    above: int | None = None

    def place(self, values: NDArray[np.integer]) -> NDArray[np.intp]:
        """[M] cell of each value.

        >>> BREAKDOWNS["lag"].place(np.array([0, 5, 99, -1])).tolist()
        [0, 4, 6, 7]
        >>> [BREAKDOWNS["lag"].cells[cell] for cell in (0, 4, 6, 7)]
        ['lag_0', 'lag_4-7', 'lag_16+', 'lag_unknown']
        """
        wide = values.astype(np.int64)
        found = np.searchsorted(self.starts, wide, side="right") - 1
        unknown = (wide < self.starts[0]) | (False if self.above is None else wide >= self.above)
        return np.where(unknown, len(self.cells) - 1, found)


def _names(name: str, starts: tuple[int, ...]) -> tuple[str, ...]:
    closed = [f"{a}" if b == a + 1 else f"{a}-{b - 1}" for a, b in pairwise(starts)]
    return tuple(f"{name}_{cell}" for cell in (*closed, f"{starts[-1]}+", "unknown"))


_FIRST_TURNS = tuple(range(TURNS + 1))
BREAKDOWNS = {
    "turn": Breakdown(_FIRST_TURNS, _names("turn", _FIRST_TURNS)),
    "tier": Breakdown(tuple(range(_TIERS)), (*(f"tier_T{i}" for i in range(_TIERS)), "tier_unknown"), above=_TIERS),
    "lag": Breakdown(LAGS, _names("lag", LAGS)),
}
"""Name of the array to its cells."""


@dataclass(frozen=True)
class OffPolicy:
    """Sums of one part of a step. Parts are added with +, ranks with `all_reduce`, and named once at the end.

    The parts may be cut anywhere between traces. Chi-square and effective sample by trace, perplexity, standard errors
    and shares of the gradient by trace are of whole traces: a trace that is split counts as two. Integer counts merge
    to the last bit, sums to the rounding of float64.

    >>> old, rollout = np.log([0.5, 0.5, 0.2]), np.log([0.5, 0.25, 0.2])
    >>> here = OffPolicy.of(old, rollout, trace=[0, 0, 1]).named()
    >>> round(here["mismatch_mean"], 6), round(here["chi2_token"], 6), here["mismatch_p50"]
    (1.333333, 1.0, 1.0)
    """

    sums: Sums

    @classmethod
    def of(
        cls,
        old: ArrayLike,
        rollout: ArrayLike,
        *,
        trace: ArrayLike,
        keep: ArrayLike | None = None,
        weight: ArrayLike | None = None,
        theta: ArrayLike | None = None,
        ref: ArrayLike | None = None,
        advantages: ArrayLike | None = None,
        gradient: ArrayLike | None = None,
        turn: ArrayLike | None = None,
        tier: ArrayLike | None = None,
        lag: ArrayLike | None = None,
    ) -> "OffPolicy":
        """Measures terms. All arrays are [M], one entry per term, in any order.

        Args:
            old: logprobs of the proximal policy, nats; those of theta in objectives without old.
            rollout: recorded logprobs, NaN where not known: such a term stands outside every ratio to rollout.
            trace: integer ids.
            keep: bool, False where a gate dropped the term; such a term has no weight. Default all True.
            weight: after truncation (`Corrected.weight`).
            theta, ref: logprobs of the policy being trained and of the reference.
            advantages: of each term.
            gradient: d loss / d logprob, what the term pulls with.
            turn: which generation of its trace, -1 unknown.
            tier: index of the tier of alignment, 255 none.
            lag: policy versions between the one that is trained and the one that sampled the term, -1 unknown.

        Raises:
            ArgumentError: if the arrays differ in length, or a logprob is infinite.
        """
        named = {"old": old, "rollout": rollout, "theta": theta, "ref": ref, "keep": keep, "weight": weight}
        named |= {"advantages": advantages, "gradient": gradient, "turn": turn, "tier": tier, "lag": lag}
        given = {name: arrays.numbers(values, name) for name, values in named.items() if values is not None}
        ids = arrays.integers(trace, "trace")
        _check(given, len(ids))
        cells = {name: cut.place(given[name]) for name, cut in BREAKDOWNS.items() if name in given}
        pieces, given, cells = _pieces(ids, given, cells)
        measured = columns(given, len(ids))
        at_pieces = {name: column.by(pieces.groups) for name, column in measured.items()}
        nowhere = np.zeros(len(ids), np.intp)
        sums = Sums.of()
        for name, count in {"all": 1, **{name: len(BREAKDOWNS[name].cells) for name in cells}}.items():
            cell = cells.get(name, nowhere)
            parts, owner = Groups.of(pieces.trace).split(cell[pieces.groups.starts], count)
            here = {part: _summed(column, parts, owner, count) for part, column in at_pieces.items()}
            for part, column in measured.items():
                histograms = Sums.of() if column.bins is None else _histograms(column.bins, cell, count)
                sums = sums | (here[part] | histograms).at(f"{name}/{part}.")
        return cls(sums)

    def __add__(self, other: "OffPolicy") -> "OffPolicy":
        """Both parts together."""
        return OffPolicy(self.sums + other.sums)

    def all_reduce(self, all_reduce: AllReduce) -> "OffPolicy":
        """The same over all ranks: two collective calls, whatever was measured."""
        return OffPolicy(self.sums.all_reduce(all_reduce))

    def named(self) -> dict[str, float]:
        """Names of docs/metrics.md to values; `NAME/turn_0` and so on where a breakdown has more than one cell."""
        found = {name: float(value[0]) for name, value in _values(self.sums.under("all/"), ROWS).items()}
        for name, breakdown in BREAKDOWNS.items():
            here = self.sums.under(f"{name}/")
            filled = np.flatnonzero(here["terms.n"]) if "terms.n" in here else np.zeros(0, np.intp)
            if len(filled) > 1:
                values = _values(here, {part: ROWS[part] + ROWS_BY_CELL.get(part, ()) for part in ROWS})
                found |= {
                    f"{metric}/{breakdown.cells[cell]}": float(value[cell])
                    for metric, value in values.items()
                    for cell in filled
                }
        return found


def _values(sums: Sums, rows: Mapping[str, tuple]) -> dict[str, Floats]:
    """Each row's value in each cell, for the comparisons that were measured at all."""
    measured = [part for part in rows if f"{part}.n" in sums and sums[f"{part}.n"].any()]
    return {row.name: row.value(sums.under(f"{part}.")) for part in measured for row in rows[part]}


@dataclass(frozen=True)
class _Pieces:
    """Neighbouring terms of one trace and one cell of every breakdown: what all breakdowns are summed from."""

    groups: Groups
    trace: NDArray[np.intp]


def _pieces(
    ids: NDArray, given: dict[str, NDArray], cells: dict[str, NDArray]
) -> tuple[_Pieces, dict[str, NDArray], dict[str, NDArray]]:
    """The pieces, and the arrays in their order: as given, or sorted where neighbours have little in common."""
    groups = Groups.of(ids)
    key = groups.back(np.arange(groups.count))
    for cell in cells.values():
        key = key * 16 + cell
    pieces = Groups.runs(key)
    if pieces.count * 4 > len(ids):
        order = np.argsort(key, kind="stable")
        key = key[order]
        given = {name: values[order] for name, values in given.items()}
        cells = {name: values[order] for name, values in cells.items()}
        pieces = Groups.runs(key)
    return _Pieces(pieces, key[pieces.starts] >> 4 * len(cells)), given, cells


def _summed(pieces: Column, parts: Groups, owner: NDArray, cells: int) -> Sums:
    """[cells] of pieces [K]: first into the parts of traces, each of which lies in one cell, then into cells."""

    def by_cell(values: Floats) -> Floats:
        return np.bincount(owner, values, cells).astype(np.float64, copy=False)

    column = pieces.by(parts)
    n = column.counts["n"]
    totals = {**column.totals, **column.spread}
    maxima = dict(column.maxima)
    if column.by_trace is not None:
        taken = column.by_trace(totals, n)
        totals, maxima = {**totals, **taken.totals}, {**maxima, **taken.maxima}
    if column.spread:
        totals["n2"] = n * n
        for name, values in column.spread.items():
            totals |= {f"{name}.squares": values * values, f"{name}.n": values * n}
    counts = {**column.counts, "traces": n > 0}
    return Sums.of(
        {name: by_cell(values) for name, values in totals.items()},
        {name: by_cell(values) for name, values in counts.items()},
        {name: _largest(values, owner, cells) for name, values in maxima.items()},
    )


def _largest(values: Floats, owner: NDArray, cells: int) -> Floats:
    found = np.full(cells, -np.inf)
    np.maximum.at(found, owner, values)
    return found


def _histograms(bins: NDArray[np.intp], cell: NDArray[np.intp], cells: int) -> Sums:
    """[cells, BINS] counts; a bin of -1 counts for nothing."""
    wide = histogram.BINS + 1
    counts = np.bincount(cell * wide + bins + 1, minlength=cells * wide)
    return Sums.of(counts={"histogram": counts.reshape(cells, wide)[:, 1:]})


def _check(given: Mapping[str, NDArray], terms: int) -> None:
    for name, values in given.items():
        if values.shape != (terms,):
            raise ArgumentError(
                f"{name} is {values.shape} but trace has {terms} terms. Each term needs its own entry. "
                "Pass flat arrays of one length."
            )
        if name in ("old", "rollout", "theta", "ref") and np.isinf(values).any():
            raise ArgumentError(
                f"{name} has {int(np.isinf(values).sum())} infinite logprobs. A sum with one of them says nothing of "
                "the others. Pass NaN where a logprob is not known."
            )
    if "weight" in given and not (np.isfinite(given["weight"]) & (given["weight"] >= 0)).all():
        raise ArgumentError("weight holds what is negative or not finite. Factors are not. Pass Corrected.weight.")
    if "gradient" in given and "advantages" not in given:
        raise ArgumentError(
            "gradient without advantages. Which sign a term pulls with is not known. Pass advantages= too."
        )
