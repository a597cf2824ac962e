"""What is summed of each comparison of policies: its columns, one entry per term.

Here are `Column` and the columns of ratios, weights, advantages and gradients. Sums and names are elsewhere. Called by
`offpolicy` alone.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from tracegrad.metrics import histogram
from tracegrad.metrics.groups import Groups
from tracegrad.metrics.sums import Floats, Sums

LIMIT = histogram.LIMIT
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
        np.where(known, histogram.bins(log), -1) if whole else None,
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
        bins = np.where(kept, histogram.bins(np.log(weight)), -1)
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
