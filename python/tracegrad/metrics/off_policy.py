"""Define and compute the off-policy metrics: ratios, KL, ESS, mismatch and gradient shares, by token and trace."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
from numpy.typing import ArrayLike, NDArray

from tracegrad import _validation
from tracegrad.errors import ArgumentError
from tracegrad.metrics import aggregate
from tracegrad.metrics.aggregate import AllReduce, Floats, Groups, Sums, divide
from tracegrad.metrics.definition import Metric

LIMIT = aggregate.LIMIT
"""Log-ratios, and their sums over a trace, are clamped to plus or minus this many nats before exp and counted."""

_PAIRS = {
    "mismatch": ("old", "rollout"),
    "drift": ("theta", "rollout"),
    "update": ("theta", "old"),
    "reference": ("ref", "theta_of_ref"),
}
"""Numerator and denominator of each comparison; tokens are treated as samples from the denominator."""
_LOGPROBS = ("old", "rollout", "theta", "ref", "theta_of_ref")


@dataclass(frozen=True)
class Column:
    """Quantities of one comparison that are summed, [M] by token or [K] by piece.

    Args:
        totals, counts, maxima: as in `Sums`; counts contain "n".
        spread: totals whose squares by trace give a standard error.
        bins: [M] bin of each ratio in the histogram, -1 if unknown.
        by_trace: computes further sums from the totals of each trace before they are summed.
    """

    totals: Mapping[str, NDArray]
    counts: Mapping[str, NDArray]
    maxima: Mapping[str, NDArray] = field(default_factory=dict)
    spread: Mapping[str, NDArray] = field(default_factory=dict)
    bins: NDArray[np.intp] | None = None
    by_trace: Callable[[Mapping[str, Floats], Floats], Sums] | None = None

    def by(self, groups: Groups) -> "Column":
        """Return the column summed into groups."""
        totals, counts, spread = (
            {name: groups.total(values) for name, values in part.items()}
            for part in (self.totals, self.counts, self.spread)
        )
        maxima = {name: groups.largest(values) for name, values in self.maxima.items()}
        return Column(totals, counts, maxima, spread, by_trace=self.by_trace)


def columns(given: Mapping[str, NDArray], terms: int) -> dict[str, Column]:
    """Return each comparison that the arrays allow."""
    logprobs = {name: given[name].astype(np.float64) for name in _LOGPROBS if name in given}
    if "theta" in logprobs:
        logprobs.setdefault("theta_of_ref", logprobs["theta"])
    result = {"terms": Column({}, {"n": np.ones(terms, bool)})}
    for name, (top, bottom) in _PAIRS.items():
        if top in logprobs and bottom in logprobs:
            result[name] = _pair(logprobs[top], logprobs[bottom], with_traces=name == "mismatch")
    if "weight" in given:
        weighted = ~(np.isnan(logprobs["old"]) | np.isnan(logprobs["rollout"]))
        if "keep" in given:
            weighted &= given["keep"].astype(bool)
        result["weight"] = _weights(np.where(weighted, given["weight"], 0.0), weighted)
    if "advantages" in given:
        result["advantage"] = _advantages(given["advantages"].astype(np.float64))
    if "gradient" in given:
        result["gradient"] = _gradient(np.abs(given["gradient"].astype(np.float64)), np.sign(given["advantages"]))
    return result


def _pair(top: Floats, bottom: Floats, *, with_traces: bool) -> Column:
    known = ~(np.isnan(top) | np.isnan(bottom))
    log = np.where(known, top - bottom, 0.0)
    bounded = np.clip(log, -LIMIT, LIMIT)
    ratio, gap = np.exp(bounded), np.abs(log)
    counted_ratio = np.where(known, ratio, 0.0)
    totals = {"ratio": counted_ratio, "ratio2": counted_ratio * counted_ratio, "gap": gap}
    maxima = {"ratio.max": np.where(known, ratio, -np.inf), "ratio.-min": np.where(known, -ratio, -np.inf)}
    if with_traces:
        totals |= {"top": np.where(known, top, 0.0), "bottom": np.where(known, bottom, 0.0)}
    return Column(
        totals,
        {"n": known, "clamped": gap > LIMIT},
        {**maxima, "gap.max": gap},
        {"k1": -log, "k2": log * log / 2, "k3": np.expm1(bounded) - bounded},
        np.where(known, aggregate.bins(log), -1) if with_traces else None,
        _trace_sums if with_traces else None,
    )


def _trace_sums(totals: Mapping[str, Floats], n: Floats) -> Sums:
    """Return products and perplexities of the traces [G] with both logprobs of a token; the other traces count as 0."""
    nonempty = n > 0
    product = np.exp(np.clip(-totals["k1"][nonempty], -LIMIT, LIMIT))
    top, bottom = (totals[side][nonempty] / n[nonempty] for side in ("top", "bottom"))
    values_by_name = {"product": product, "product2": product * product, "log_perplexity_gap": bottom - top}
    values_by_name |= {"top.perplexity": np.exp(-top), "bottom.perplexity": np.exp(-bottom)}
    return Sums.of({name: _scatter(values, nonempty) for name, values in values_by_name.items()})


def _scatter(values: Floats, at: NDArray[np.bool_]) -> Floats:
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


def _gradient(magnitude: Floats, sign: NDArray) -> Column:
    totals = {
        "magnitude": magnitude,
        "positive": np.where(sign > 0, magnitude, 0.0),
        "negative": np.where(sign < 0, magnitude, 0.0),
    }

    def shares(trace_totals: Mapping[str, Floats], _: Floats) -> Sums:
        return Sums.of(
            {"magnitude2": trace_totals["magnitude"] ** 2}, maxima={"magnitude.max": trace_totals["magnitude"]}
        )

    return Column(totals, {"n": np.ones(len(magnitude), bool)}, by_trace=shares)


PERCENTILES = {"p1": 0.01, "p5": 0.05, "p25": 0.25, "p50": 0.5, "p75": 0.75, "p95": 0.95, "p99": 0.99, "p99_9": 0.999}
"""Name to the share of tokens at or below the percentile."""

Formula = Callable[[Sums], Floats]


def _mean(name: str, bottom: str = "n") -> Formula:
    return lambda s: divide(s[name], s[bottom])


def _largest_of(name: str) -> Formula:
    return lambda s: np.where(s["n"] > 0, s[f"{name}.max"], np.nan)


def _smallest(name: str) -> Formula:
    return lambda s: np.where(s["n"] > 0, -s[f"{name}.-min"], np.nan)


def _kish(name: str, square: str) -> Formula:
    """Return the formula (sum x)^2 / sum x^2, which is 0 if every x is 0."""
    return lambda s: np.where(s["n"] > 0, np.nan_to_num(divide(s[name] ** 2, s[square])), np.nan)


def _kish_share(name: str, square: str, bottom: str = "n") -> Formula:
    count = _kish(name, square)
    return lambda s: divide(count(s), s[bottom])


def _standard_error(name: str) -> Formula:
    """Return the formula for the standard error of a ratio of sums over C traces.

    It is the root of C / (C - 1) * sum over traces of (S - mean n)^2, divided by n.
    """

    def value(s: Sums) -> Floats:
        traces = np.where(s["traces"] > 1, s["traces"], np.nan)
        mean = divide(s[name], s["n"])
        squares = s[f"{name}.squares"] - 2 * mean * s[f"{name}.n"] + mean * mean * s["n2"]
        return divide(np.sqrt(traces / (traces - 1) * np.maximum(squares, 0.0)), s["n"])

    return value


def _deviation(name: str, square: str) -> Formula:
    def value(s: Sums) -> Floats:
        mean = divide(s[name], s["n"])
        return np.sqrt(np.maximum(divide(s[square], s["n"]) - mean * mean, 0.0))

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
            None,
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
                f"Standard error of {name}_{kind}, with each trace as one independent sample.",
                _standard_error(kind),
            ),
        )
    )


_OLD = "old / rollout"
_KNOWN = "tokens with both logprobs"
_KEPT = "tokens with both logprobs that no rejection dropped"
_THETA = "theta / rollout"

METRICS_BY_COMPARISON: dict[str, tuple[Metric, ...]] = {
    "terms": (),
    "mismatch": (
        Metric(
            "tokens_with_rollout_logprob",
            "tokens",
            _OLD,
            None,
            "Tokens with both an old and a rollout logprob.",
            lambda s: s["n"],
        ),
        Metric("old_rollout_ratio_mean", "1", _OLD, _KNOWN, "Mean ratio, before any truncation.", _mean("ratio")),
        Metric("old_rollout_ratio_min", "1", _OLD, None, "Smallest ratio.", _smallest("ratio")),
        Metric("old_rollout_ratio_max", "1", _OLD, None, "Largest ratio.", _largest_of("ratio")),
        *_percentiles("old_rollout_ratio", "ratio", _OLD, "tokens", "a ratio, before any truncation,"),
        Metric(
            "old_rollout_ratio_ess", "share", _OLD, _KNOWN, "Kish's of the raw ratios.", _kish_share("ratio", "ratio2")
        ),
        Metric("old_rollout_ratio_ess_count", "tokens", _OLD, None, "(sum r)^2 / sum r^2.", _kish("ratio", "ratio2")),
        Metric(
            "old_rollout_ratio_trace_ess",
            "share",
            "old / rollout, product over the trace",
            "traces with both logprobs of a token",
            "Kish's of the products: share of the traces that remains under an exact correction.",
            _kish_share("product", "product2", "traces"),
        ),
        Metric(
            "old_rollout_ratio_clamped", "tokens", _OLD, None, "Tokens with |l| beyond 20 nats.", lambda s: s["clamped"]
        ),
        *_kl("kl_rollout_old", _OLD, "rollout || old"),
        Metric("chi2_token", "1", _OLD, _KNOWN, "Mean of r^2, minus 1.", lambda s: _mean("ratio2")(s) - 1),
        Metric(
            "chi2_trace",
            "1",
            "old / rollout, product over the trace",
            "traces with both logprobs of a token",
            "Mean squared product, minus 1; the sum of l is clamped to 20 nats.",
            lambda s: _mean("product2", "traces")(s) - 1,
        ),
        Metric(
            "perplexity_old",
            "1",
            None,
            "traces with both logprobs of a token",
            "Mean over traces of exp(- mean old logprob).",
            _mean("top.perplexity", "traces"),
        ),
        Metric(
            "perplexity_rollout",
            "1",
            None,
            "traces with both logprobs of a token",
            "The same of the rollout logprobs.",
            _mean("bottom.perplexity", "traces"),
        ),
        Metric(
            "perplexity_gap",
            "1",
            _OLD,
            "traces with both logprobs of a token",
            "perplexity_old - perplexity_rollout.",
            lambda s: divide(s["top.perplexity"] - s["bottom.perplexity"], s["traces"]),
        ),
        Metric(
            "log_perplexity_gap",
            "nats",
            _OLD,
            "traces with both logprobs of a token",
            "Mean over traces of their mean rollout - old logprob: k1 with every trace of one weight.",
            _mean("log_perplexity_gap", "traces"),
        ),
        Metric("old_rollout_logprob_diff_mean", "nats", _OLD, _KNOWN, "Mean of |l|.", _mean("gap")),
        Metric("old_rollout_logprob_diff_max", "nats", _OLD, None, "Largest |l|.", _largest_of("gap")),
    ),
    "weight": (
        Metric(
            "token_ess", "share", _OLD, _KEPT, "(sum w)^2 / sum w^2 / n; 0 where every w is 0.", _kish_share("w", "w2")
        ),
        Metric(
            "token_ess_count", "tokens", _OLD, None, "(sum w)^2 / sum w^2: Kish's effective tokens.", _kish("w", "w2")
        ),
        Metric("weight_mean", "1", _OLD, _KEPT, "Mean weight, after truncation and normalisation.", _mean("w")),
        Metric("weight_min", "1", _OLD, None, "Smallest weight.", _smallest("w")),
        Metric("weight_max", "1", _OLD, None, "Largest weight.", _largest_of("w")),
        *_percentiles("weight", "w", _OLD, _KEPT, "a weight"),
    ),
    "drift": (
        Metric(
            "mean_importance_ratio",
            "1",
            _THETA,
            _KNOWN,
            "Mean of exp(logprob - rollout logprob). ART counts a missing logprob as 1; here it is left out.",
            _mean("ratio"),
        ),
        Metric(
            "kl_rollout_theta",
            "nats",
            _THETA,
            _KNOWN,
            "k3 estimate of KL(rollout || theta): distance of the policy from the recorded one.",
            _mean("k3"),
        ),
        Metric(
            "kl_rollout_theta_se",
            "nats",
            _THETA,
            _KNOWN,
            "Standard error of kl_rollout_theta, by trace.",
            _standard_error("k3"),
        ),
        Metric(
            "trainer_rollout_logprob_diff_mean",
            "nats",
            _THETA,
            _KNOWN,
            "Mean |logprob - rollout logprob|. At step 1 it is the mismatch of trainer and engine.",
            _mean("gap"),
        ),
    ),
    "update": (
        Metric(
            "kl_old_theta",
            "nats",
            "theta / old",
            "tokens",
            "k3 estimate of KL(old || theta): distance since `old` was measured.",
            _mean("k3"),
        ),
    ),
    "reference": (
        Metric(
            "kl_ref",
            "nats",
            "theta / ref",
            "tokens",
            "k3 estimate of KL(theta || ref); only with a reference.",
            _mean("k3"),
        ),
    ),
    "advantage": (
        Metric("advantage_mean", "1", None, "tokens", "Mean advantage of the tokens.", _mean("a")),
        Metric("advantage_std", "1", None, "tokens", "Its deviation over tokens (n below).", _deviation("a", "a2")),
        Metric("advantage_min", "1", None, None, "Smallest.", _smallest("a")),
        Metric("advantage_max", "1", None, None, "Largest.", _largest_of("a")),
    ),
    "gradient": (
        Metric(
            "gradient_share_positive",
            "share",
            None,
            "sum of |d loss / d logprob|",
            "Share of the gradient magnitude from tokens with A > 0.",
            _mean("positive", "magnitude"),
        ),
        Metric(
            "gradient_share_negative",
            "share",
            None,
            "sum of |d loss / d logprob|",
            "Share from tokens with A < 0; the rest has A = 0 and is due to penalties.",
            _mean("negative", "magnitude"),
        ),
        Metric(
            "gradient_largest_trace",
            "share",
            None,
            "sum of |d loss / d logprob|",
            "Share of the trace with the largest gradient magnitude.",
            lambda s: divide(s["magnitude.max"], s["magnitude"]),
        ),
        Metric(
            "gradient_effective_traces",
            "traces",
            None,
            None,
            "Kish's effective number of traces by gradient magnitude.",
            _kish("magnitude", "magnitude2"),
        ),
    ),
}
"""Metrics by comparison, as `OffPolicySums` sums them."""

ROWS_BY_CELL: dict[str, tuple[Metric, ...]] = {
    "gradient": (
        Metric(
            "gradient_share",
            "share",
            None,
            "sum of |d loss / d logprob| over all cells",
            "Share of the gradient magnitude from the cell; in breakdowns only.",
            lambda s: divide(s["magnitude"], s["magnitude"].sum()),
        ),
    )
}
"""Metrics that exist only in breakdowns."""

OFF_POLICY = tuple(row for part, rows in METRICS_BY_COMPARISON.items() for row in rows + ROWS_BY_CELL.get(part, ()))


STALENESS_STARTS = (0, 1, 2, 3, 4, 8, 16)
"""First staleness of each cell; the last range is open."""
TURNS = 8
"""Number of turns with a separate cell; later turns share one cell."""
_LEVELS = 8


@dataclass(frozen=True)
class Breakdown:
    """Assignment of values to cells. The cells are fixed, so that sums have the same shape on every rank.

    Args:
        starts: first value of each cell but the last, which contains unknown values: those below the first start.
        cells: names of the cells.
        above: values from here on are unknown too; None if the last range is open.
    """

    starts: tuple[int, ...]
    cells: tuple[str, ...]
    above: int | None = None

    def place(self, values: NDArray[np.integer]) -> NDArray[np.intp]:
        """Return [M] the cell of each value.

        >>> BREAKDOWNS["staleness"].place(np.array([0, 5, 99, -1])).tolist()
        [0, 4, 6, 7]
        >>> [BREAKDOWNS["staleness"].cells[cell] for cell in (0, 4, 6, 7)]
        ['staleness_0', 'staleness_4-7', 'staleness_16+', 'staleness_unknown']
        """
        wide = values.astype(np.int64)
        cell = np.searchsorted(self.starts, wide, side="right") - 1
        unknown = (wide < self.starts[0]) | (False if self.above is None else wide >= self.above)
        return np.where(unknown, len(self.cells) - 1, cell)


def _names(name: str, starts: tuple[int, ...]) -> tuple[str, ...]:
    closed = [f"{a}" if b == a + 1 else f"{a}-{b - 1}" for a, b in pairwise(starts)]
    return tuple(f"{name}_{cell}" for cell in (*closed, f"{starts[-1]}+", "unknown"))


_FIRST_TURNS = tuple(range(TURNS + 1))
BREAKDOWNS = {
    "turn": Breakdown(_FIRST_TURNS, _names("turn", _FIRST_TURNS)),
    "alignment_level": Breakdown(
        tuple(range(_LEVELS)), (*(f"level_T{i}" for i in range(_LEVELS)), "level_unknown"), above=_LEVELS
    ),
    "staleness": Breakdown(STALENESS_STARTS, _names("staleness", STALENESS_STARTS)),
}
"""Breakdown by the name of its array."""


@dataclass(frozen=True)
class OffPolicySums:
    """Sums of one part of a step. Add parts with +, merge ranks with `all_reduce`, and call `values` once at the end.

    Parts may be split anywhere between traces. Chi-square and effective sample size by trace, perplexity, standard
    errors and shares of the gradient by trace need complete traces: a trace that is split counts as two. Integer counts
    merge to the last bit, sums up to float64 rounding.

    >>> old, rollout = np.log([0.5, 0.5, 0.2]), np.log([0.5, 0.25, 0.2])
    >>> here = OffPolicySums.of(old, rollout, trace=[0, 0, 1]).values()
    >>> round(here["old_rollout_ratio_mean"], 6), round(here["chi2_token"], 6), here["old_rollout_ratio_p50"]
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
        theta_of_ref: ArrayLike | None = None,
        advantages: ArrayLike | None = None,
        gradient: ArrayLike | None = None,
        turn: ArrayLike | None = None,
        alignment_level: ArrayLike | None = None,
        staleness: ArrayLike | None = None,
    ) -> "OffPolicySums":
        """Measure tokens. All arrays are [M], one entry per token, in any order.

        Args:
            old: logprobs of the proximal policy, nats; theta's in objectives without old.
            rollout: recorded logprobs, NaN if unknown: such a token is left out of every ratio to rollout.
            trace: integer ids.
            keep: bool, False if a rejection dropped the token; such a token has no weight. Default all True.
            weight: after truncation (`Correction.weight`).
            theta, ref: logprobs of the policy being trained and of the reference.
            theta_of_ref: those of the policy being trained that `ref` is compared with, if they are not `theta`: over
                the whole vocabulary.
            advantages: advantage of each token.
            gradient: d loss / d logprob of each token.
            turn: index of the generation in its trace, -1 if unknown.
            alignment_level: index of the alignment level, 255 if none.
            staleness: policy versions between the one being trained and the one that sampled the token, -1 if unknown.

        Raises:
            ArgumentError: if the arrays differ in length, or a logprob is infinite.
        """
        arguments = {"old": old, "rollout": rollout, "theta": theta, "ref": ref, "keep": keep, "weight": weight}
        arguments |= {"advantages": advantages, "gradient": gradient, "turn": turn, "alignment_level": alignment_level}
        arguments |= {"staleness": staleness, "theta_of_ref": theta_of_ref}
        arrays = {name: _validation.numbers(values, name) for name, values in arguments.items() if values is not None}
        ids = _validation.integers(trace, "trace")
        _check_arrays(arrays, len(ids))
        cells = {name: breakdown.place(arrays[name]) for name, breakdown in BREAKDOWNS.items() if name in arrays}
        pieces, arrays, cells = _pieces(ids, arrays, cells)
        measured = columns(arrays, len(ids))
        at_pieces = {name: column.by(pieces.groups) for name, column in measured.items()}
        single_cell = np.zeros(len(ids), np.intp)
        sums = Sums.of()
        for name, count in {"all": 1, **{name: len(BREAKDOWNS[name].cells) for name in cells}}.items():
            cell = cells.get(name, single_cell)
            parts, owner = Groups.of(pieces.trace).split(cell[pieces.groups.starts], count)
            part_sums = {part: _sum_by_cell(column, parts, owner, count) for part, column in at_pieces.items()}
            for part, column in measured.items():
                histograms = Sums.of() if column.bins is None else _histograms(column.bins, cell, count)
                sums = sums | (part_sums[part] | histograms).with_prefix(f"{name}/{part}.")
        return cls(sums)

    def __add__(self, other: "OffPolicySums") -> "OffPolicySums":
        """Return both parts together."""
        return OffPolicySums(self.sums + other.sums)

    def all_reduce(self, all_reduce: AllReduce) -> "OffPolicySums":
        """Return the same over all ranks, with two collective calls for any number of metrics."""
        return OffPolicySums(self.sums.all_reduce(all_reduce))

    def values(self) -> dict[str, float]:
        """Return {name: value}; the names are `NAME/turn_0` and so on if a breakdown has several cells."""
        metrics = {
            name: float(value[0])
            for name, value in _values(self.sums.without_prefix("all/"), METRICS_BY_COMPARISON).items()
        }
        for name, breakdown in BREAKDOWNS.items():
            sums = self.sums.without_prefix(f"{name}/")
            filled = np.flatnonzero(sums["terms.n"]) if "terms.n" in sums else np.zeros(0, np.intp)
            if len(filled) > 1:
                values = _values(
                    sums,
                    {part: METRICS_BY_COMPARISON[part] + ROWS_BY_CELL.get(part, ()) for part in METRICS_BY_COMPARISON},
                )
                metrics |= {
                    f"{metric}/{breakdown.cells[cell]}": float(value[cell])
                    for metric, value in values.items()
                    for cell in filled
                }
        return metrics


def _values(sums: Sums, rows: Mapping[str, tuple]) -> dict[str, Floats]:
    """Return each metric's value in each cell, for the comparisons that were measured."""
    measured = [part for part in rows if f"{part}.n" in sums and sums[f"{part}.n"].any()]
    by_part = {part: sums.without_prefix(f"{part}.") for part in measured}
    return {row.name: row.value(part_sums) for part, part_sums in by_part.items() for row in rows[part]}


@dataclass(frozen=True)
class _Pieces:
    """Consecutive tokens of one trace and one cell of every breakdown; all breakdowns are summed from these pieces."""

    groups: Groups
    trace: NDArray[np.intp]


def _pieces(
    ids: NDArray, arrays: dict[str, NDArray], cells: dict[str, NDArray]
) -> tuple[_Pieces, dict[str, NDArray], dict[str, NDArray]]:
    """Return the pieces, and the arrays in their order.

    The order is the given one, or sorted by piece if pieces would have fewer than four tokens on average.
    """
    groups = Groups.of(ids)
    key = groups.broadcast(np.arange(groups.count))
    for cell in cells.values():
        key = key * 16 + cell
    pieces = Groups.runs(key)
    if pieces.count * 4 > len(ids):
        order = np.argsort(key, kind="stable")
        key = key[order]
        arrays = {name: values[order] for name, values in arrays.items()}
        cells = {name: values[order] for name, values in cells.items()}
        pieces = Groups.runs(key)
    return _Pieces(pieces, key[pieces.starts] >> 4 * len(cells)), arrays, cells


def _sum_by_cell(pieces: Column, parts: Groups, owner: NDArray, cells: int) -> Sums:
    """Return [cells] sums of pieces [K], summed first into the parts of traces (each in one cell), then into cells."""

    def by_cell(values: Floats) -> Floats:
        return np.bincount(owner, values, cells).astype(np.float64, copy=False)

    column = pieces.by(parts)
    n = column.counts["n"]
    totals = {**column.totals, **column.spread}
    maxima = dict(column.maxima)
    if column.by_trace is not None:
        trace_sums = column.by_trace(totals, n)
        totals, maxima = {**totals, **trace_sums.totals}, {**maxima, **trace_sums.maxima}
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
    largest = np.full(cells, -np.inf)
    np.maximum.at(largest, owner, values)
    return largest


def _histograms(bins: NDArray[np.intp], cell: NDArray[np.intp], cells: int) -> Sums:
    """Return [cells, BINS] counts; a bin of -1 is not counted."""
    wide = aggregate.BINS + 1
    counts = np.bincount(cell * wide + bins + 1, minlength=cells * wide)
    return Sums.of(counts={"histogram": counts.reshape(cells, wide)[:, 1:]})


def _check_arrays(arrays: Mapping[str, NDArray], terms: int) -> None:
    for name, values in arrays.items():
        if values.shape != (terms,):
            raise ArgumentError(
                f"TG-METRIC-007: {name} is {values.shape} but trace has {terms} tokens. "
                "Pass flat arrays with one entry per token."
            )
        if name in _LOGPROBS and np.isinf(values).any():
            raise ArgumentError(
                f"TG-METRIC-008: {name} has {int(np.isinf(values).sum())} infinite logprobs. Their "
                "sums would be infinite. Pass NaN if a logprob is unknown."
            )
    if "weight" in arrays and not (np.isfinite(arrays["weight"]) & (arrays["weight"] >= 0)).all():
        raise ArgumentError("TG-METRIC-009: weight has negative or non-finite entries. Pass Correction.weight.")
    if "gradient" in arrays and "advantages" not in arrays:
        raise ArgumentError(
            "TG-METRIC-010: gradient needs advantages, for the sign of each token's gradient. Pass advantages= too."
        )
