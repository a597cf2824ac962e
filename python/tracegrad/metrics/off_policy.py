"""Define the off-policy metrics and compute them: ratios, KL, ESS, mismatch, clipping, by token and trace."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
from numpy.typing import ArrayLike, NDArray

from tracegrad import _validation
from tracegrad.errors import ArgumentError
from tracegrad.metrics import aggregate
from tracegrad.metrics.aggregate import AllReduce, Floats, Groups, Sums, per
from tracegrad.metrics.definition import Metric

LIMIT = aggregate.LIMIT
"""Log-ratios, and their sums over a trace, are clamped to plus or minus this many nats before exp, and counted."""

_PAIRS = {
    "mismatch": ("old", "rollout"),
    "drift": ("theta", "rollout"),
    "update": ("theta", "old"),
    "reference": ("ref", "theta"),
}
"""Numerator and denominator of each comparison; the tokens are draws of the denominator, or taken for such."""


@dataclass(frozen=True)
class Column:
    """What is summed of one comparison, [M] by term or [K] by piece.

    Args:
        totals, counts, maxima: as in `Sums`; counts hold "n".
        spread: totals whose squares by trace give a standard error.
        bins: [M] bin of each ratio in the histogram, -1 where none is known.
        by_trace: what is taken of a whole trace before it is summed.
    """

    totals: Mapping[str, NDArray]
    counts: Mapping[str, NDArray]
    maxima: Mapping[str, NDArray] = field(default_factory=dict)
    spread: Mapping[str, NDArray] = field(default_factory=dict)
    bins: NDArray[np.intp] | None = None
    by_trace: Callable[[Mapping[str, Floats], Floats], Sums] | None = None

    def by(self, groups: Groups) -> "Column":
        """Summed into groups."""
        totals, counts, spread = (
            {name: groups.total(values) for name, values in part.items()}
            for part in (self.totals, self.counts, self.spread)
        )
        maxima = {name: groups.largest(values) for name, values in self.maxima.items()}
        return Column(totals, counts, maxima, spread, by_trace=self.by_trace)


def columns(given: Mapping[str, NDArray], terms: int) -> dict[str, Column]:
    """Each comparison that the arrays allow."""
    logprobs = {name: given[name].astype(np.float64) for name in ("old", "rollout", "theta", "ref") if name in given}
    found = {"terms": Column({}, {"n": np.ones(terms, bool)})}
    for name, (top, bottom) in _PAIRS.items():
        if top in logprobs and bottom in logprobs:
            found[name] = _pair(logprobs[top], logprobs[bottom], whole=name == "mismatch")
    if "weight" in given:
        kept = ~(np.isnan(logprobs["old"]) | np.isnan(logprobs["rollout"]))
        if "keep" in given:
            kept &= given["keep"].astype(bool)
        found["weight"] = _weights(np.where(kept, given["weight"], 0.0), kept)
    if "advantages" in given:
        found["advantage"] = _advantages(given["advantages"].astype(np.float64))
    if "gradient" in given:
        found["gradient"] = _gradient(np.abs(given["gradient"].astype(np.float64)), np.sign(given["advantages"]))
    return found


def _pair(top: Floats, bottom: Floats, *, whole: bool) -> Column:
    known = ~(np.isnan(top) | np.isnan(bottom))
    log = np.where(known, top - bottom, 0.0)
    bounded = np.clip(log, -LIMIT, LIMIT)
    ratio, gap = np.exp(bounded), np.abs(log)
    counted = np.where(known, ratio, 0.0)
    totals = {"ratio": counted, "ratio2": counted * counted, "gap": gap}
    maxima = {"ratio.max": np.where(known, ratio, -np.inf), "ratio.-min": np.where(known, -ratio, -np.inf)}
    if whole:
        totals |= {"top": np.where(known, top, 0.0), "bottom": np.where(known, bottom, 0.0)}
    return Column(
        totals,
        {"n": known, "clamped": gap > LIMIT},
        {**maxima, "gap.max": gap},
        {"k1": -log, "k2": log * log / 2, "k3": np.expm1(bounded) - bounded},
        np.where(known, aggregate.bins(log), -1) if whole else None,
        _whole_traces if whole else None,
    )


def _whole_traces(inside: Mapping[str, Floats], n: Floats) -> Sums:
    """Products and perplexities of the traces [G] with a known term; the others count for nothing."""
    some = n > 0
    product = np.exp(np.clip(-inside["k1"][some], -LIMIT, LIMIT))
    top, bottom = (inside[side][some] / n[some] for side in ("top", "bottom"))
    found = {"product": product, "product2": product * product, "log_perplexity_gap": bottom - top}
    found |= {"top.perplexity": np.exp(-top), "bottom.perplexity": np.exp(-bottom)}
    return Sums.of({name: _spread_out(values, some) for name, values in found.items()})


def _spread_out(values: Floats, at: NDArray[np.bool_]) -> Floats:
    out = np.zeros(len(at))
    out[at] = values
    return out


def _weights(weight: Floats, kept: NDArray[np.bool_]) -> Column:
    with np.errstate(divide="ignore"):
        bins = np.where(kept, aggregate.bins(np.log(weight)), -1)
    maxima = {"w.max": np.where(kept, weight, -np.inf), "w.-min": np.where(kept, -weight, -np.inf)}
    return Column({"w": weight, "w2": weight * weight}, {"n": kept}, maxima, bins=bins)


def _advantages(advantages: Floats) -> Column:
    totals = {"a": advantages, "a2": advantages * advantages}
    return Column(totals, {"n": np.ones(len(advantages), bool)}, {"a.max": advantages, "a.-min": -advantages})


def _gradient(pull: Floats, sign: NDArray) -> Column:
    totals = {"pull": pull, "positive": np.where(sign > 0, pull, 0.0), "negative": np.where(sign < 0, pull, 0.0)}

    def shares(inside: Mapping[str, Floats], _: Floats) -> Sums:
        return Sums.of({"pull2": inside["pull"] ** 2}, maxima={"pull.max": inside["pull"]})

    return Column(totals, {"n": np.ones(len(pull), bool)}, by_trace=shares)


PERCENTILES = {"p1": 0.01, "p5": 0.05, "p25": 0.25, "p50": 0.5, "p75": 0.75, "p95": 0.95, "p99": 0.99, "p99_9": 0.999}
"""Name to the share of terms at or below."""

Formula = Callable[[Sums], Floats]


def _mean(name: str, bottom: str = "n") -> Formula:
    return lambda s: per(s[name], s[bottom])


def _largest_of(name: str) -> Formula:
    return lambda s: np.where(s["n"] > 0, s[f"{name}.max"], np.nan)


def _smallest(name: str) -> Formula:
    return lambda s: np.where(s["n"] > 0, -s[f"{name}.-min"], np.nan)


def _kish(name: str, square: str) -> Formula:
    """(sum x)^2 / sum x^2, and 0 where every x is 0."""
    return lambda s: np.where(s["n"] > 0, np.nan_to_num(per(s[name] ** 2, s[square])), np.nan)


def _kish_share(name: str, square: str, bottom: str = "n") -> Formula:
    count = _kish(name, square)
    return lambda s: per(count(s), s[bottom])


def _standard_error(name: str) -> Formula:
    """Of a ratio of sums over traces: C / (C - 1) * sum over traces of (S - mean n)^2, its root over n; C traces."""

    def value(s: Sums) -> Floats:
        traces = np.where(s["traces"] > 1, s["traces"], np.nan)
        mean = per(s[name], s["n"])
        squares = s[f"{name}.squares"] - 2 * mean * s[f"{name}.n"] + mean * mean * s["n2"]
        return per(np.sqrt(traces / (traces - 1) * np.maximum(squares, 0.0)), s["n"])

    return value


def _deviation(name: str, square: str) -> Formula:
    def value(s: Sums) -> Floats:
        mean = per(s[name], s["n"])
        return np.sqrt(np.maximum(per(s[square], s["n"]) - mean * mean, 0.0))

    return value


def _percentile(share: float, name: str) -> Formula:
    def value(s: Sums) -> Floats:
        low, high = _smallest(name)(s), _largest_of(name)(s)
        cells = zip(s["histogram"], low, high, strict=True)
        return np.array([aggregate.percentile(counts, share, a, b) for counts, a, b in cells])

    return value


def _percentiles(prefix: str, name: str, ratio: str, per: str, what: str) -> tuple[Metric, ...]:
    return tuple(
        Metric(
            f"{prefix}_{label}",
            "1",
            ratio,
            "",
            f"{share:.1%} of {per} have {what} at or below this.".replace(".0%", "%"),
            _percentile(share, name),
        )
        for label, share in PERCENTILES.items()
    )


def _kl(name: str, ratio: str, from_to: str, suffix: str = "") -> tuple[Metric, ...]:
    formulas = {"k1": "-l", "k2": "l^2 / 2", "k3": "r - 1 - l"}
    return tuple(
        row
        for kind, formula in formulas.items()
        for row in (
            Metric(f"{name}_{kind}", "nats", ratio, _KNOWN, f"KL({from_to}), mean of {formula}.", _mean(kind)),
            Metric(
                f"{name}_{kind}_se",
                "nats",
                ratio,
                _KNOWN,
                f"Standard error of {name}_{kind}, terms of one trace taken as one draw.",
                _standard_error(kind),
            ),
        )
    )


_OLD = "old / rollout"
_KNOWN = "terms with both logprobs"
_KEPT = "known terms that gates kept"
_THETA = "theta / rollout"

ROWS: dict[str, tuple[Metric, ...]] = {
    "terms": (),
    "mismatch": (
        Metric("known_terms", "terms", _OLD, "", "Terms with both an old and a rollout logprob.", lambda s: s["n"]),
        Metric("mismatch_mean", "1", _OLD, _KNOWN, "Mean ratio, before any truncation.", _mean("ratio")),
        Metric("mismatch_min", "1", _OLD, "", "Smallest ratio.", _smallest("ratio")),
        Metric("mismatch_max", "1", _OLD, "", "Largest ratio.", _largest_of("ratio")),
        *_percentiles("mismatch", "ratio", _OLD, "terms", "a ratio, before any truncation,"),
        Metric("mismatch_ess", "share", _OLD, _KNOWN, "Kish's of the raw ratios.", _kish_share("ratio", "ratio2")),
        Metric("mismatch_ess_count", "terms", _OLD, "", "(sum r)^2 / sum r^2.", _kish("ratio", "ratio2")),
        Metric(
            "mismatch_trace_ess",
            "share",
            "old / rollout, product over the trace",
            "traces with a known term",
            "Kish's of the products: what is left of the traces under an exact correction.",
            _kish_share("product", "product2", "traces"),
        ),
        Metric("mismatch_clamped", "terms", _OLD, "", "Terms with |l| beyond 20 nats.", lambda s: s["clamped"]),
        *_kl("kl_rollout_old", _OLD, "rollout || old"),
        Metric("chi2_token", "1", _OLD, _KNOWN, "Mean of r^2, minus 1.", lambda s: _mean("ratio2")(s) - 1),
        Metric(
            "chi2_trace",
            "1",
            "old / rollout, product over the trace",
            "traces with a known term",
            "Mean squared product, minus 1; the sum of l is clamped to 20 nats.",
            lambda s: _mean("product2", "traces")(s) - 1,
        ),
        Metric(
            "perplexity_old",
            "1",
            "",
            "traces with a known term",
            "Mean over traces of exp(- mean old logprob).",
            _mean("top.perplexity", "traces"),
        ),
        Metric(
            "perplexity_rollout",
            "1",
            "",
            "traces with a known term",
            "The same of the rollout logprobs.",
            _mean("bottom.perplexity", "traces"),
        ),
        Metric(
            "perplexity_gap",
            "1",
            _OLD,
            "traces with a known term",
            "perplexity_old - perplexity_rollout.",
            lambda s: per(s["top.perplexity"] - s["bottom.perplexity"], s["traces"]),
        ),
        Metric(
            "log_perplexity_gap",
            "nats",
            _OLD,
            "traces with a known term",
            "Mean over traces of their mean rollout - old logprob: k1 with every trace of one weight.",
            _mean("log_perplexity_gap", "traces"),
        ),
        Metric("logprob_gap_mean", "nats", _OLD, _KNOWN, "Mean of |l|.", _mean("gap")),
        Metric("logprob_gap_max", "nats", _OLD, "", "Largest |l|.", _largest_of("gap")),
    ),
    "weight": (
        Metric("ess", "share", _OLD, _KEPT, "(sum w)^2 / sum w^2 / n; 0 where every w is 0.", _kish_share("w", "w2")),
        Metric("ess_count", "terms", _OLD, "", "(sum w)^2 / sum w^2: Kish's effective terms.", _kish("w", "w2")),
        Metric("weight_mean", "1", _OLD, _KEPT, "Mean weight, after truncation and normalisation.", _mean("w")),
        Metric("weight_min", "1", _OLD, "", "Smallest weight.", _smallest("w")),
        Metric("weight_max", "1", _OLD, "", "Largest weight.", _largest_of("w")),
        *_percentiles("weight", "w", _OLD, _KEPT, "a weight"),
    ),
    "drift": (
        Metric(
            "mean_importance_ratio",
            "1",
            _THETA,
            _KNOWN,
            "Mean of exp(logprob - rollout logprob). ART counts a missing logprob as 1; here it stands outside.",
            _mean("ratio"),
        ),
        Metric(
            "kl_rollout",
            "nats",
            _THETA,
            _KNOWN,
            "k3 estimate of KL(rollout || theta): how far the policy has gone from the one that was recorded.",
            _mean("k3"),
        ),
        Metric(
            "kl_rollout_se", "nats", _THETA, _KNOWN, "Standard error of kl_rollout, by trace.", _standard_error("k3")
        ),
        Metric(
            "rollout_gap",
            "nats",
            _THETA,
            _KNOWN,
            "Mean |logprob - rollout logprob|. At step 1 it is the mismatch of trainer and engine.",
            _mean("gap"),
        ),
    ),
    "update": (
        Metric(
            "kl_old",
            "nats",
            "theta / old",
            "terms",
            "k3 estimate of KL(old || theta): how far since `old` was refreshed.",
            _mean("k3"),
        ),
    ),
    "reference": (
        Metric(
            "kl", "nats", "theta / ref", "terms", "k3 estimate of KL(theta || ref); only with a reference.", _mean("k3")
        ),
    ),
    "advantage": (
        Metric("advantage_mean", "1", "", "terms", "Mean advantage of the terms.", _mean("a")),
        Metric("advantage_std", "1", "", "terms", "Its deviation over terms (n below).", _deviation("a", "a2")),
        Metric("advantage_min", "1", "", "", "Smallest.", _smallest("a")),
        Metric("advantage_max", "1", "", "", "Largest.", _largest_of("a")),
    ),
    "gradient": (
        Metric(
            "gradient_share_positive",
            "share",
            "",
            "sum of |d loss / d logprob|",
            "Part of the pull that comes from terms with A > 0.",
            _mean("positive", "pull"),
        ),
        Metric(
            "gradient_share_negative",
            "share",
            "",
            "sum of |d loss / d logprob|",
            "Part from terms with A < 0; what is left has A = 0 and comes from penalties.",
            _mean("negative", "pull"),
        ),
        Metric(
            "gradient_largest_trace",
            "share",
            "",
            "sum of |d loss / d logprob|",
            "Part of the trace that pulls most.",
            lambda s: per(s["pull.max"], s["pull"]),
        ),
        Metric(
            "gradient_effective_traces",
            "traces",
            "",
            "",
            "Kish's of the traces' pulls: by how many traces the step is moved.",
            _kish("pull", "pull2"),
        ),
    ),
}
"""By comparison, as `OffPolicy` sums them."""

ROWS_BY_CELL: dict[str, tuple[Metric, ...]] = {
    "gradient": (
        Metric(
            "gradient_share",
            "share",
            "",
            "sum of |d loss / d logprob| over all cells",
            "Part of the pull that comes from the cell; in breakdowns only.",
            lambda s: per(s["pull"], s["pull"].sum()),
        ),
    )
}
"""What exists in a breakdown only."""

OFF_POLICY = tuple(row for part, rows in ROWS.items() for row in rows + ROWS_BY_CELL.get(part, ()))


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
        given = {name: _validation.numbers(values, name) for name, values in named.items() if values is not None}
        ids = _validation.integers(trace, "trace")
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
    wide = aggregate.BINS + 1
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
