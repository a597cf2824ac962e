"""Metrics with verl's names and definitions."""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from tracegrad.errors import ArgumentError
from tracegrad.metrics.aggregate import (
    Moments,
    Rows,
    Sums,
    above,
    below,
    divide,
    largest_of,
    mean_of,
    moments,
    smallest_of,
)
from tracegrad.metrics.definition import Metric, MetricSet, MetricSums

EPS = 1e-8
"""verl adds this to the mean weight before it divides by it, and does not normalise if the mean is below it."""
LIMIT = 20.0
"""verl's bound for a log-ratio before exp."""

_OLD, _TOKENS, _ROWS = "old / rollout", "tokens", "rows, empty ones too"
_FILLED = "rows with a token"


def _over(name: str, bottom: str = "n", less: float = 0.0) -> Callable[[Sums], Any]:
    return lambda s: divide(s[name], s[bottom]) - less


def _of(name: str, read: Callable[[Moments], Any]) -> Callable[[Sums], Any]:
    return lambda s: read(Moments(s, name))


def _filled(read: Callable[[str], Callable[[Sums], float]], name: str = "row") -> Callable[[Sums], float]:
    """Return a reading that is 0 if there is no row with a trained token."""
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


def _row(
    name: str, unit: str, per: str | None, meaning: str, value: Callable[[Sums], Any], ratio: str = _OLD
) -> Metric:
    return Metric(f"rollout_corr/{name}", unit, ratio, per, meaning, value)


def _is(name: str, unit: str, per: str | None, meaning: str, value: Callable[[Sums], Any]) -> Metric:
    return _row(f"rollout_is_{name}", unit, per, meaning, value)


OFF_POLICY = (
    _row("training_ppl", "1", _ROWS, "Perplexity of old; an empty row counts as 1.", _over("ppl", "rows"), ""),
    _row("training_log_ppl", "nats", _ROWS, "Mean of - mean old logprob.", _over("old", "rows"), ""),
    _row("kl", "nats", _TOKENS, "Mean of -l: our kl_rollout_old_k1.", _over("kl")),
    _row("k3_kl", "nats", _TOKENS, "Mean of r - 1 - l without a clamp: infinite for l beyond 709.", _over("k3")),
    _row("rollout_ppl", "1", _ROWS, "Perplexity of rollout.", _over("rollout_ppl", "rows"), ""),
    _row("rollout_log_ppl", "nats", _ROWS, "Mean of - mean rollout logprob.", _over("rollout", "rows"), ""),
    _row("log_ppl_diff", "nats", _ROWS, "Mean rollout - old logprob of a row.", _over("gap", "rows")),
    _row("log_ppl_abs_diff", "nats", _ROWS, "Its absolute value.", _over("abs", "rows")),
    _row("log_ppl_diff_max", "nats", None, "Largest; an empty row is 0.", lambda s: s["gap.max"]),
    _row("log_ppl_diff_min", "nats", None, "Smallest; an empty row is 0.", lambda s: -s["gap.-min"]),
    _row("ppl_ratio", "1", _ROWS, "Mean of exp(log_ppl_diff).", _over("ratio", "rows")),
    _row("chi2_token", "1", _TOKENS, "Mean r^2, minus 1.", _over("square", less=1.0)),
    _row("chi2_seq", "1", _ROWS, "Mean squared product, minus 1; an empty row is 1.", _over("product", "rows", 1.0)),
)
_W = "Weight after truncation"
_IMPORTANCE = (
    _is("mean", "1", _TOKENS, f"{_W}, before batch normalisation.", mean_of("w")),
    _is("std", "1", _TOKENS, "Its deviation; 0 of a single token.", _of("w", _spread)),
    _is("eff_sample_size", "share", _TOKENS, "Our `token_ess`, with 1e-8 in it; verl divides by 0 if all w are.", _ess),
    _is("seq_mean", "1", _ROWS, "Mean over rows of the row's mean weight.", mean_of("row")),
    _is("seq_std", "1", f"{_ROWS}, less one", "Its deviation.", _of("row", _deviation)),
    _is("seq_max", "1", None, "Largest mean weight of a row.", largest_of("row")),
    _is("seq_min", "1", None, "Smallest; 0 if a row is empty.", smallest_of("row")),
    _is("seq_max_deviation", "1", None, "Largest distance from 1.", largest_of("away")),
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
        _is("max", "1", None, "Largest weight.", largest_of("w")),
        _is("min", "1", None, "Smallest weight.", smallest_of("w")),
        _is("ratio_fraction_high", "share", _TOKENS, "Raw ratios above the upper bound.", above("raw")),
        _is("ratio_fraction_low", "share", _TOKENS, "Raw ratios below the lower bound, or 1 / upper.", below("raw")),
    ),
    "sequence": (
        *_IMPORTANCE,
        _is(
            "max",
            "1",
            None,
            "Largest raw product of a row, not truncated.",
            _of("sum", lambda m: np.exp(min(m.largest, LIMIT))),
        ),
        _is("min", "1", None, "Smallest raw product; an empty row is 1.", _of("sum", lambda m: np.exp(m.smallest))),
        _is("ratio_fraction_high", "share", _ROWS, "Rows whose product exceeds the upper bound.", above("sum")),
        _is("ratio_fraction_low", "share", _ROWS, "Rows below the lower bound, or 1 / upper.", below("sum")),
    ),
}
ICEPOP = (_is("oob_ratio", "share", _TOKENS, "IcePop only: weights set to 0.", _over("outside", "w.n")),)


def _factor(m: Moments) -> float:
    mean = m.mean()
    return mean if mean > EPS else 1.0


BATCH_NORM = {
    "token": (_is("batch_norm_factor", "1", _TOKENS, "Mean weight divided by; 1 if tiny.", _of("w", _factor)),),
    "sequence": (_is("batch_norm_factor", "1", _FILLED, "The same over rows.", _of("filled", _factor)),),
}


def _rejection_rows(name: str, bottom: str, *, k1: bool) -> tuple[Metric, ...]:
    """Return the metrics of an option. Extrema and shares are over tokens at token level, else over filled rows."""
    x = "rollout_rs_{option}_"
    seq = _FILLED
    low = below(name) if k1 else lambda _: 0.0
    return (
        _row(x + "mean", "stat", _TOKENS, "Mean statistic; a row's counts once a token.", mean_of("term")),
        _row(x + "max", "stat", None, "Largest.", largest_of(name)),
        _row(x + "min", "stat", None, "Smallest.", smallest_of(name)),
        _row(x + "fraction_high", "share", bottom, "Above the upper bound.", above(name)),
        _row(x + "std", "stat", _TOKENS, "Deviation of the statistic clamped to its bounds.", _of("term", _spread)),
        _row(x + "seq_mean", "stat", seq, "Mean over rows.", _filled(mean_of)),
        _row(x + "seq_std", "stat", f"{seq}, less one", "Its deviation.", _of("row", _deviation)),
        _row(x + "seq_max", "stat", None, "Largest of a row.", _filled(largest_of)),
        _row(x + "seq_min", "stat", None, "Smallest of a row.", _filled(smallest_of)),
        _row(x + "seq_max_deviation", "stat", None, "Largest |.|.", _filled(largest_of, "away")),
        _row(x + "seq_fraction_high", "share", seq, "Rows above.", _filled(above)),
        _row(x + "masked_fraction", "share", _TOKENS, "Tokens dropped.", _of("kept", lambda m: (m.n - m.total) / m.n)),
        _row(
            x + "seq_masked_fraction",
            "share",
            seq,
            "Rows with a token dropped.",
            lambda s: np.nan_to_num(divide(s["hit"], s["row.n"])),
        ),
        _row(x + "fraction_low", "share", bottom, "Below the lower bound; 0 but for k1.", low),
    )


_SEQUENCE_LOW = _row(
    "rollout_rs_{option}_seq_fraction_low", "share", _FILLED, "k1 only: rows below the lower bound.", _filled(below)
)
REJECTION = {
    ("token", True): (*_rejection_rows("term", _TOKENS, k1=True), _SEQUENCE_LOW),
    ("token", False): _rejection_rows("term", _TOKENS, k1=False),
    ("sequence", True): (*_rejection_rows("row", _FILLED, k1=True), _SEQUENCE_LOW),
    ("sequence", False): _rejection_rows("row", _FILLED, k1=False),
}
"""Metrics by level and whether the statistic is k1. Only k1 has a lower bound."""
REJECTION_ALL = (
    _row(
        "rollout_rs_masked_fraction",
        "share",
        _TOKENS,
        "Tokens that any option dropped.",
        lambda s: (s["n"] - s["kept"]) / s["n"],
    ),
    _row("rollout_rs_seq_masked_fraction", "share", _ROWS, "Rows with a token dropped.", _over("hit", "rows")),
)
_PPO = "theta / old"
ACTOR = (
    Metric(
        "actor/ppo_kl",
        "nats",
        _PPO,
        _TOKENS,
        "Mean of -l: below 0 where theta likes the tokens better. kl_cov: of |l|.",
        _over("kl"),
    ),
    Metric(
        "actor/pg_clipfrac", "share", _PPO, _TOKENS, "Tokens whose gradient the loss's bound removed.", _over("clipped")
    ),
    Metric("actor/pg_clipfrac_lower", "share", _PPO, _TOKENS, "Tokens under the dual clip.", _over("clipped_lower")),
)
_CORRECTION = (*OFF_POLICY, *IMPORTANCE["token"], *ICEPOP, *BATCH_NORM["token"], *REJECTION["sequence", True])
VERL = (*_CORRECTION, *REJECTION_ALL, *ACTOR)
"""All metrics of verl. If token and sequence differ, it has rollout_is of tokens and rollout_rs of sequences."""


Bounds = tuple[float | None, float]


def as_verl(
    old: ArrayLike,
    rollout: ArrayLike,
    rows: Rows,
    *,
    rollout_is: str | None = None,
    rollout_is_bounds: Bounds = (None, 2.0),
    batch_normalize: bool = False,
    rollout_rs: Mapping[str, Bounds] | None = None,
) -> MetricSums:
    """Compute the metrics of `compute_rollout_correction_and_rejection_mask`.

    Args:
        old, rollout: [M] finite logprobs of the trained tokens of `rows`.
        rows: the rows of the trained tokens.
        rollout_is: None, "token" or "sequence".
        rollout_is_bounds: (None, C) truncates at C, (low, high) is IcePop.
        batch_normalize: add the metric of verl's batch normalisation factor.
        rollout_rs: bounds by option, in verl's convention: k1 is -log(old / rollout), and (low, high) bounds the
            inverse ratio. Other options have bounds (None, high).

    Raises:
        ArgumentError: if the arrays do not match the rows, or verl does not have an option.

    >>> rows = Rows.of([0, 0, 1])
    >>> found = as_verl(np.log([0.5, 0.5, 0.2]), np.log([0.5, 0.1, 0.2]), rows, rollout_is="token").values()
    >>> round(found["rollout_corr/rollout_is_mean"], 6), round(found["rollout_corr/rollout_is_ratio_fraction_high"], 6)
    (1.333333, 0.333333)
    """
    old_, rollout_ = (_terms(name, values, rows) for name, values in (("old", old), ("rollout", rollout)))
    log = old_ - rollout_
    result = MetricSums(_off_policy(old_, rollout_, rows).with_prefix("off/"), (MetricSet(OFF_POLICY, "off/"),))
    if rollout_is is not None:
        if rollout_is not in ("token", "sequence"):
            raise ArgumentError(
                f"TG-INTEG-011: rollout_is is {rollout_is!r}. verl has 'token' and 'sequence'. Pass one of them."
            )
        sums = _importance(log, rows, rollout_is == "sequence", rollout_is_bounds).with_prefix("is/")
        result = result | MetricSums(sums, (MetricSet(IMPORTANCE[rollout_is], "is/"),))
        if rollout_is_bounds[0] is not None:
            result = result | MetricSums(Sums.of(), (MetricSet(ICEPOP, "is/"),))
        if batch_normalize:
            result = result | MetricSums(Sums.of(), (MetricSet(BATCH_NORM[rollout_is], "is/"),))
    if rollout_rs:
        result = result | _rejection(log, rows, rollout_rs)
    return result


def as_verl_actor(
    theta: ArrayLike,
    old: ArrayLike,
    rows: Rows,
    *,
    loss: str = "vanilla",
    clipped: ArrayLike | None = None,
    clipped_lower: ArrayLike | None = None,
) -> MetricSums:
    """Compute `actor/*` of a policy loss of verl, over the tokens that rejection kept.

    The loss decides which tokens it clips; this function only counts them.

    Args:
        theta, old: [M] logprobs.
        rows: the rows of the trained tokens.
        loss: verl's name of the loss, which decides how `ppo_kl` is bounded.
        clipped: [M] bool, the tokens that `pg_clipfrac` counts. In vanilla, max(-A r, -A clip(r)) is the clipped side;
            in cispo, the ratio is outside of the bounds; in dppo_*, the mask dropped the token.
        clipped_lower: [M] bool: in vanilla, the dual clip's ceiling is smaller; in geo_mean, tokens clipped with A < 0.

    >>> as_verl_actor(np.log([0.5]), np.log([0.25]), Rows.of([0]), clipped=[True], clipped_lower=[False]).values()
    {'actor/ppo_kl': -0.6931471805599453, 'actor/pg_clipfrac': 1.0, 'actor/pg_clipfrac_lower': 0.0}
    """
    log = _terms("theta", theta, rows) - _terms("old", old, rows)
    kl = -(log if loss in _UNBOUNDED else np.clip(log, -LIMIT, LIMIT)) if loss != "kl_cov" else np.abs(log)
    flags = {"clipped": clipped, "clipped_lower": clipped_lower}
    present = {name: np.asarray(values, bool) for name, values in flags.items() if values is not None}
    counts = {"n": len(log)} | {name: np.count_nonzero(values) for name, values in present.items()}
    reading = tuple(row for row in ACTOR if row.name == "actor/ppo_kl" or _FLAG[row.name] in present)
    return MetricSums(Sums.of({"kl": kl.sum()}, counts).with_prefix("actor/"), (MetricSet(reading, "actor/"),))


_UNBOUNDED = {"gspo", "clip_cov", "geo_mean", "dro", "reinforce"}
_FLAG = {"actor/pg_clipfrac": "clipped", "actor/pg_clipfrac_lower": "clipped_lower"}


def _terms(name: str, values: ArrayLike, rows: Rows) -> NDArray[np.float64]:
    array = np.asarray(values, np.float64)
    if array.shape != (rows.groups.terms,) or not np.isfinite(array).all():
        raise ArgumentError(
            f"TG-INTEG-012: {name} is {array.shape}, the rows have {rows.groups.terms} trained tokens, and every "
            "logprob must be finite. verl's mean would be another one, or NaN. Leave out tokens without a logprob."
        )
    return array


def _importance(log: NDArray, rows: Rows, sequence: bool, bounds: Bounds) -> Sums:
    low, high = bounds
    floor = 1.0 / high if low is None else low
    totals = rows.total(log)
    raw = np.exp(np.clip(rows.back(totals) if sequence else log, -LIMIT, LIMIT))
    outside = (raw > high) | (raw < floor)
    weight = np.minimum(raw, high) if low is None else np.where(outside, 0.0, raw)
    by_row, raw_by_row = rows.mean(weight), rows.mean(raw)
    sums = moments("w", weight, low=0.0, high=high) | moments("raw", raw, low=floor, high=high)
    sums = sums | moments("row", by_row, about=1.0) | moments("away", np.abs(by_row - 1.0))
    sums = sums | moments("raw_row", raw_by_row, low=floor, high=high)
    sums = sums | moments("filled", by_row[rows.filled]) | moments("sum", totals, low=np.log(floor), high=np.log(high))
    return sums | Sums.of(counts={"outside": np.count_nonzero(outside)})


def _rejection(log: NDArray, rows: Rows, options: Mapping[str, Bounds]) -> MetricSums:
    bounded = np.clip(log, -LIMIT, LIMIT)
    stats = {"k1": -bounded, "k2": 0.5 * bounded**2, "k3": np.exp(bounded) - 1.0 - bounded}
    keep = np.ones(len(log), bool)
    result = MetricSums(Sums.of(), ())
    for option, (low, high) in options.items():
        level, _, stat = option.rpartition("_")
        if level not in _LEVELS or stat not in stats or option == "seq_max_k1":
            raise ArgumentError(
                f"TG-INTEG-013: rollout_rs has no option {option!r}. verl has token_k1 to seq_max_k3. Pass one of it."
            )
        if stat == "k1":
            limits = (float(np.log(1.0 / high if low is None else low)), float(np.log(high)))
        else:
            limits = (0.0, high)
        by_row = _LEVELS[level](rows, stats[stat])
        by_term = stats[stat] if level == "token" else rows.back(by_row)
        kept = (by_term <= limits[1]) & ((stat != "k1") | (by_term >= limits[0]))
        keep &= kept
        lower = limits[0] if stat == "k1" else -np.inf
        sums = moments("term", by_term, low=limits[0], high=limits[1]) | moments("kept", kept)
        sums = sums | moments("row", by_row[rows.filled], low=lower, high=limits[1])
        sums = sums | moments("away", np.abs(by_row[rows.filled]))
        sums = sums | Sums.of(counts={"hit": np.count_nonzero(rows.any(~kept))})
        table = REJECTION["token" if level == "token" else "sequence", stat == "k1"]
        result = result | MetricSums(
            sums.with_prefix(f"{option}/"), (MetricSet(table, f"{option}/", {"option": option}),)
        )
    counts = {"kept": np.count_nonzero(keep), "n": len(keep), "hit": np.count_nonzero(rows.any(~keep))}
    sums = Sums.of(counts=counts | {"rows": rows.count}).with_prefix("rs/")
    return result | MetricSums(sums, (MetricSet(REJECTION_ALL, "rs/"),))


_LEVELS: dict[str, Callable[[Rows, NDArray], NDArray]] = {
    "token": lambda rows, stat: rows.mean(stat),
    "seq_sum": lambda rows, stat: rows.total(stat),
    "seq_mean": lambda rows, stat: rows.mean(stat),
    "seq_max": lambda rows, stat: rows.largest(stat),
}


def _off_policy(old: NDArray, rollout: NDArray, rows: Rows) -> Sums:
    log = old - rollout
    bounded = np.exp(np.clip(log, -LIMIT, LIMIT))
    old_mean, rollout_mean = rows.mean(old), rows.mean(rollout)
    gap, product = rollout_mean - old_mean, np.clip(rows.total(log), -LIMIT, LIMIT)
    with np.errstate(over="ignore"):
        k3 = (np.exp(log) - log - 1).sum()
    totals = {"kl": -log.sum(), "k3": k3, "square": (bounded**2).sum(), "product": np.exp(2 * product).sum()}
    totals |= {"old": -old_mean.sum(), "rollout": -rollout_mean.sum(), "gap": gap.sum(), "abs": np.abs(gap).sum()}
    totals |= {"ppl": np.exp(-old_mean).sum(), "rollout_ppl": np.exp(-rollout_mean).sum(), "ratio": np.exp(gap).sum()}
    maxima = {"gap.max": gap.max(initial=-np.inf), "gap.-min": (-gap).max(initial=-np.inf)}
    return Sums.of(totals, {"n": len(log), "rows": rows.count}, maxima)
