"""The rows of verl's metrics: names, denominators and formulas over the sums of `verl`.

Called by `verl` alone.
"""

from collections.abc import Callable
from typing import Any

import numpy as np

from tracegrad.metrics.sums import Moments, Sums, above, below, largest_of, mean_of, per, smallest_of
from tracegrad.metrics.table import Metric

EPS = 1e-8
"""verl adds this to the mean weight before it divides by it, and below it normalises by nothing."""
LIMIT = 20.0
"""verl's bound of a log-ratio before exp."""

_OLD, _TERMS, _ROWS = "old / rollout", "terms", "rows, empty ones too"
_FILLED = "rows with a term"


def _over(name: str, bottom: str = "n", less: float = 0.0) -> Callable[[Sums], Any]:
    return lambda s: per(s[name], s[bottom]) - less


def _of(name: str, read: Callable[[Moments], Any]) -> Callable[[Sums], Any]:
    return lambda s: read(Moments(s, name))


def _filled(read: Callable[[str], Callable[[Sums], float]], name: str = "row") -> Callable[[Sums], float]:
    """A reading, 0 where there is no row with a term."""
    return lambda s: read(name)(s) if Moments(s, name).n else 0.0


def _deviation(m: Moments) -> float:
    return m.deviation(1) if m.n > 1 else 0.0


def _spread(m: Moments) -> float:
    return m.clamped_deviation() if m.n > 1 else 0.0


def _ess(s: Sums) -> float:
    weights = Moments(s, "w")
    square = float(s["w.clamped_squares"])
    mean = float(s["w.clamped"]) / weights.n
    return (mean + EPS) ** 2 * weights.n / square if square > 0 else 0.0


def _row(name: str, unit: str, per: str, meaning: str, value: Callable[[Sums], Any], ratio: str = _OLD) -> Metric:
    return Metric(f"rollout_corr/{name}", unit, ratio, per, meaning, value)


def _is(name: str, unit: str, per: str, meaning: str, value: Callable[[Sums], Any]) -> Metric:
    return _row(f"rollout_is_{name}", unit, per, meaning, value)


OFF_POLICY = (
    _row("training_ppl", "1", _ROWS, "Perplexity of old; an empty row counts as 1.", _over("ppl", "rows"), ""),
    _row("training_log_ppl", "nats", _ROWS, "Mean of - mean old logprob.", _over("old", "rows"), ""),
    _row("kl", "nats", _TERMS, "Mean of -l: our kl_rollout_old_k1.", _over("kl")),
    _row("k3_kl", "nats", _TERMS, "Mean of r - 1 - l without a clamp: infinite for l beyond 709.", _over("k3")),
    _row("rollout_ppl", "1", _ROWS, "Perplexity of rollout.", _over("rollout_ppl", "rows"), ""),
    _row("rollout_log_ppl", "nats", _ROWS, "Mean of - mean rollout logprob.", _over("rollout", "rows"), ""),
    _row("log_ppl_diff", "nats", _ROWS, "Mean rollout - old logprob of a row.", _over("gap", "rows")),
    _row("log_ppl_abs_diff", "nats", _ROWS, "Its absolute value.", _over("abs", "rows")),
    _row("log_ppl_diff_max", "nats", "", "Largest; an empty row is 0.", lambda s: s["gap.max"]),
    _row("log_ppl_diff_min", "nats", "", "Smallest; an empty row is 0.", lambda s: -s["gap.-min"]),
    _row("ppl_ratio", "1", _ROWS, "Mean of exp(log_ppl_diff).", _over("ratio", "rows")),
    _row("chi2_token", "1", _TERMS, "Mean r^2, minus 1.", _over("square", less=1.0)),
    _row("chi2_seq", "1", _ROWS, "Mean squared product, minus 1; an empty row is 1.", _over("product", "rows", 1.0)),
)
_W = "Weight after truncation"
_IMPORTANCE = (
    _is("mean", "1", _TERMS, f"{_W}, before batch normalisation.", mean_of("w")),
    _is("std", "1", _TERMS, "Its deviation; 0 of a single term.", _of("w", _spread)),
    _is("eff_sample_size", "share", _TERMS, "Our ess, with 1e-8 in it; verl divides by 0 if all w are.", _ess),
    _is("seq_mean", "1", _ROWS, "Mean over rows of the row's mean weight.", mean_of("row")),
    _is("seq_std", "1", f"{_ROWS}, less one", "Its deviation.", _of("row", _deviation)),
    _is("seq_max", "1", "", "Largest mean weight of a row.", largest_of("row")),
    _is("seq_min", "1", "", "Smallest; 0 if a row is empty.", smallest_of("row")),
    _is("seq_max_deviation", "1", "", "Largest distance from 1.", largest_of("away")),
    _is("seq_fraction_high", "share", _ROWS, "Rows whose mean raw ratio exceeds the upper bound.", above("raw_row")),
    _is(
        "seq_fraction_low",
        "share",
        _ROWS,
        "Rows below the lower bound, 1 / upper without one; empty ones.",
        below("raw_row"),
    ),
)
IMPORTANCE = {
    "token": (
        *_IMPORTANCE,
        _is("max", "1", "", "Largest weight.", largest_of("w")),
        _is("min", "1", "", "Smallest weight.", smallest_of("w")),
        _is("ratio_fraction_high", "share", _TERMS, "Raw ratios above the upper bound.", above("raw")),
        _is("ratio_fraction_low", "share", _TERMS, "Raw ratios below the lower bound, or 1 / upper.", below("raw")),
    ),
    "sequence": (
        *_IMPORTANCE,
        _is(
            "max",
            "1",
            "",
            "Largest raw product of a row, not truncated.",
            _of("sum", lambda m: np.exp(min(m.largest, LIMIT))),
        ),
        _is("min", "1", "", "Smallest raw product; an empty row is 1.", _of("sum", lambda m: np.exp(m.smallest))),
        _is("ratio_fraction_high", "share", _ROWS, "Rows whose product exceeds the upper bound.", above("sum")),
        _is("ratio_fraction_low", "share", _ROWS, "Rows below the lower bound, or 1 / upper.", below("sum")),
    ),
}
ICEPOP = (_is("oob_ratio", "share", _TERMS, "IcePop only: weights set to 0.", _over("outside", "w.n")),)


def _factor(m: Moments) -> float:
    mean = m.mean()
    return mean if mean > EPS else 1.0


BATCH_NORM = {
    "token": (_is("batch_norm_factor", "1", _TERMS, "Mean weight divided by; 1 if tiny.", _of("w", _factor)),),
    "sequence": (_is("batch_norm_factor", "1", _FILLED, "The same over rows.", _of("filled", _factor)),),
}


def _rejection_rows(name: str, bottom: str, *, k1: bool) -> tuple[Metric, ...]:
    """Rows of an option; extrema and shares are over terms at token level, over rows with a term above it."""
    x = "rollout_rs_{option}_"
    seq = _FILLED
    low = below(name) if k1 else lambda _: 0.0
    return (
        _row(x + "mean", "stat", _TERMS, "Mean statistic; a row's counts once a term.", mean_of("term")),
        _row(x + "max", "stat", "", "Largest.", largest_of(name)),
        _row(x + "min", "stat", "", "Smallest.", smallest_of(name)),
        _row(x + "fraction_high", "share", bottom, "Above the upper bound.", above(name)),
        _row(x + "std", "stat", _TERMS, "Deviation of the statistic clamped to its bounds.", _of("term", _spread)),
        _row(x + "seq_mean", "stat", seq, "Mean over rows.", _filled(mean_of)),
        _row(x + "seq_std", "stat", f"{seq}, less one", "Its deviation.", _of("row", _deviation)),
        _row(x + "seq_max", "stat", "", "Largest of a row.", _filled(largest_of)),
        _row(x + "seq_min", "stat", "", "Smallest of a row.", _filled(smallest_of)),
        _row(x + "seq_max_deviation", "stat", "", "Largest |.|.", _filled(largest_of, "away")),
        _row(x + "seq_fraction_high", "share", seq, "Rows above.", _filled(above)),
        _row(x + "masked_fraction", "share", _TERMS, "Terms dropped.", _of("kept", lambda m: (m.n - m.total) / m.n)),
        _row(
            x + "seq_masked_fraction",
            "share",
            seq,
            "Rows with a term dropped.",
            lambda s: np.nan_to_num(per(s["hit"], s["row.n"])),
        ),
        _row(x + "fraction_low", "share", bottom, "Below the lower bound; 0 but for k1.", low),
    )


_SEQUENCE_LOW = _row(
    "rollout_rs_{option}_seq_fraction_low", "share", _FILLED, "k1 only: rows below the lower bound.", _filled(below)
)
REJECTION = {
    ("token", True): (*_rejection_rows("term", _TERMS, k1=True), _SEQUENCE_LOW),
    ("token", False): _rejection_rows("term", _TERMS, k1=False),
    ("sequence", True): (*_rejection_rows("row", _FILLED, k1=True), _SEQUENCE_LOW),
    ("sequence", False): _rejection_rows("row", _FILLED, k1=False),
}
"""By level and whether the statistic is k1, which alone has a lower bound."""
REJECTION_ALL = (
    _row(
        "rollout_rs_masked_fraction",
        "share",
        _TERMS,
        "Terms that any option dropped.",
        lambda s: (s["n"] - s["kept"]) / s["n"],
    ),
    _row("rollout_rs_seq_masked_fraction", "share", _ROWS, "Rows with a term dropped.", _over("hit", "rows")),
)
_PPO = "theta / old"
ACTOR = (
    Metric(
        "actor/ppo_kl",
        "nats",
        _PPO,
        _TERMS,
        "Mean of -l: below 0 where theta likes the tokens better. kl_cov: of |l|.",
        _over("kl"),
    ),
    Metric(
        "actor/pg_clipfrac", "share", _PPO, _TERMS, "Terms whose gradient the loss's bound removed.", _over("clipped")
    ),
    Metric("actor/pg_clipfrac_lower", "share", _PPO, _TERMS, "Terms under the dual clip.", _over("clipped_lower")),
)
_CORRECTION = (*OFF_POLICY, *IMPORTANCE["token"], *ICEPOP, *BATCH_NORM["token"], *REJECTION["sequence", True])
VERL = (*_CORRECTION, *REJECTION_ALL, *ACTOR)
"""The table: where token and sequence differ, rollout_is is shown for tokens and rollout_rs for sequences."""
