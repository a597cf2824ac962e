"""The rows that read `OffPolicy`: each comparison's names, what they are divided by, and their formulas over sums.

A formula takes the sums of one comparison, each an array with an entry per cell, and gives an array of values. The
sums are named and filled in `columns`, by the same names of comparisons.
Called by `offpolicy` alone; tests/test_offpolicy.py holds the formulas.
"""

from collections.abc import Callable

import numpy as np

from tracegrad.metrics import histogram
from tracegrad.metrics.sums import Floats, Sums, per
from tracegrad.metrics.table import Metric

PERCENTILES = {"p1": 0.01, "p5": 0.05, "p25": 0.25, "p50": 0.5, "p75": 0.75, "p95": 0.95, "p99": 0.99, "p99_9": 0.999}
"""Name to the share of terms at or below."""

Formula = Callable[[Sums], Floats]


def _mean(name: str, bottom: str = "n") -> Formula:
    return lambda s: per(s[name], s[bottom])


def _largest(name: str) -> Formula:
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
        low, high = _smallest(name)(s), _largest(name)(s)
        cells = zip(s["histogram"], low, high, strict=True)
        return np.array([histogram.percentile(counts, share, a, b) for counts, a, b in cells])

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
        Metric("mismatch_max", "1", _OLD, "", "Largest ratio.", _largest("ratio")),
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
        Metric("logprob_gap_max", "nats", _OLD, "", "Largest |l|.", _largest("gap")),
    ),
    "weight": (
        Metric("ess", "share", _OLD, _KEPT, "(sum w)^2 / sum w^2 / n; 0 where every w is 0.", _kish_share("w", "w2")),
        Metric("ess_count", "terms", _OLD, "", "(sum w)^2 / sum w^2: Kish's effective terms.", _kish("w", "w2")),
        Metric("weight_mean", "1", _OLD, _KEPT, "Mean weight, after truncation and normalisation.", _mean("w")),
        Metric("weight_min", "1", _OLD, "", "Smallest weight.", _smallest("w")),
        Metric("weight_max", "1", _OLD, "", "Largest weight.", _largest("w")),
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
        Metric("advantage_max", "1", "", "", "Largest.", _largest("a")),
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
