"""verl's metrics: `rollout_corr/*` of rollout correction, and `actor/*` of its policy losses.

Definitions are verl 0.9.1's (tests/parity/test_verl_metrics.py runs both). In means over rows verl counts empty ones:
give `Rows` with all rows of the padded array. verl divides by the counts of one process; these sums merge.
"""

from collections.abc import Callable, Mapping

import numpy as np
from numpy.typing import ArrayLike, NDArray

from tracegrad.errors import ArgumentError
from tracegrad.metrics.groups import Rows
from tracegrad.metrics.peers.verl_rows import (
    ACTOR,
    BATCH_NORM,
    ICEPOP,
    IMPORTANCE,
    LIMIT,
    OFF_POLICY,
    REJECTION,
    REJECTION_ALL,
)
from tracegrad.metrics.sums import Sums, moments
from tracegrad.metrics.table import Measured, Reading

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
) -> Measured:
    """`compute_rollout_correction_and_rejection_mask`'s metrics of terms.

    Args:
        old, rollout: [M] finite logprobs of the terms of `rows`.
        rows: the terms' rows.
        rollout_is: None, "token" or "sequence".
        rollout_is_bounds: (None, C) truncates at C, (low, high) is IcePop.
        batch_normalize: adds verl's factor.
        rollout_rs: option to bounds in verl's convention: k1 is -log(old / rollout), and (low, high) bounds the inverse
            ratio; the others take (None, high).

    Raises:
        ArgumentError: if the arrays do not fit, or an option is not verl's.

    >>> rows = Rows.of([0, 0, 1])
    >>> found = as_verl(np.log([0.5, 0.5, 0.2]), np.log([0.5, 0.1, 0.2]), rows, rollout_is="token").named()
    >>> round(found["rollout_corr/rollout_is_mean"], 6), round(found["rollout_corr/rollout_is_ratio_fraction_high"], 6)
    (1.333333, 0.333333)
    """
    new, behind = (_terms(name, values, rows) for name, values in (("old", old), ("rollout", rollout)))
    log = new - behind
    found = Measured(_off_policy(new, behind, rows).at("off/"), (Reading(OFF_POLICY, "off/"),))
    if rollout_is is not None:
        if rollout_is not in ("token", "sequence"):
            raise ArgumentError(f"rollout_is is {rollout_is!r}. verl has 'token' and 'sequence'. Pass one of them.")
        sums = _importance(log, rows, rollout_is == "sequence", rollout_is_bounds).at("is/")
        found = found | Measured(sums, (Reading(IMPORTANCE[rollout_is], "is/"),))
        if rollout_is_bounds[0] is not None:
            found = found | Measured(Sums.of(), (Reading(ICEPOP, "is/"),))
        if batch_normalize:
            found = found | Measured(Sums.of(), (Reading(BATCH_NORM[rollout_is], "is/"),))
    if rollout_rs:
        found = found | _rejection(log, rows, rollout_rs)
    return found


def as_verl_actor(
    theta: ArrayLike,
    old: ArrayLike,
    rows: Rows,
    *,
    loss: str = "vanilla",
    clipped: ArrayLike | None = None,
    clipped_lower: ArrayLike | None = None,
) -> Measured:
    """`actor/*` of a policy loss of verl, over the terms that rejection left.

    Which terms a loss clips is the loss's own to say; here it is counted.

    Args:
        theta, old: [M] logprobs.
        rows: the terms' rows.
        loss: verl's name, which decides how `ppo_kl` is bounded.
        clipped: [M] bool, what `pg_clipfrac` counts: in vanilla max(-A r, -A clip(r)) took the clipped side; in cispo
            the ratio was outside; in dppo_* the mask dropped it.
        clipped_lower: [M] bool: in vanilla the dual clip's ceiling was the smaller; in geo_mean the clip where A < 0.

    >>> as_verl_actor(np.log([0.5]), np.log([0.25]), Rows.of([0]), clipped=[True], clipped_lower=[False]).named()
    {'actor/ppo_kl': -0.6931471805599453, 'actor/pg_clipfrac': 1.0, 'actor/pg_clipfrac_lower': 0.0}
    """
    log = _terms("theta", theta, rows) - _terms("old", old, rows)
    kl = -(log if loss in _UNBOUNDED else np.clip(log, -LIMIT, LIMIT)) if loss != "kl_cov" else np.abs(log)
    flags = {"clipped": clipped, "clipped_lower": clipped_lower}
    given = {name: np.asarray(values, bool) for name, values in flags.items() if values is not None}
    counts = {"n": len(log)} | {name: np.count_nonzero(values) for name, values in given.items()}
    reading = tuple(row for row in ACTOR if row.name == "actor/ppo_kl" or _FLAG[row.name] in given)
    return Measured(Sums.of({"kl": kl.sum()}, counts).at("actor/"), (Reading(reading, "actor/"),))


_UNBOUNDED = {"gspo", "clip_cov", "geo_mean", "dro", "reinforce"}
_FLAG = {"actor/pg_clipfrac": "clipped", "actor/pg_clipfrac_lower": "clipped_lower"}


def _terms(name: str, values: ArrayLike, rows: Rows) -> NDArray[np.float64]:
    array = np.asarray(values, np.float64)
    if array.shape != (rows.groups.terms,) or not np.isfinite(array).all():
        raise ArgumentError(
            f"{name} is {array.shape}, the rows have {rows.groups.terms} terms, and every logprob must be finite. The "
            "peer's mean would be another one, or NaN. Leave missing terms out of both."
        )
    return array


def _importance(log: NDArray, rows: Rows, sequence: bool, bounds: Bounds) -> Sums:
    low, high = bounds
    floor = 1.0 / high if low is None else low
    summed = rows.total(log)
    raw = np.exp(np.clip(rows.back(summed) if sequence else log, -LIMIT, LIMIT))
    outside = (raw > high) | (raw < floor)
    weight = np.minimum(raw, high) if low is None else np.where(outside, 0.0, raw)
    by_row, raw_by_row = rows.mean(weight), rows.mean(raw)
    sums = moments("w", weight, low=0.0, high=high) | moments("raw", raw, low=floor, high=high)
    sums = sums | moments("row", by_row, about=1.0) | moments("away", np.abs(by_row - 1.0))
    sums = sums | moments("raw_row", raw_by_row, low=floor, high=high)
    sums = sums | moments("filled", by_row[rows.filled]) | moments("sum", summed, low=np.log(floor), high=np.log(high))
    return sums | Sums.of(counts={"outside": np.count_nonzero(outside)})


def _rejection(log: NDArray, rows: Rows, options: Mapping[str, Bounds]) -> Measured:
    bounded = np.clip(log, -LIMIT, LIMIT)
    stats = {"k1": -bounded, "k2": 0.5 * bounded**2, "k3": np.exp(bounded) - 1.0 - bounded}
    keep = np.ones(len(log), bool)
    found = Measured(Sums.of(), ())
    for option, (low, high) in options.items():
        level, _, stat = option.rpartition("_")
        if level not in _LEVELS or stat not in stats or option == "seq_max_k1":
            raise ArgumentError(
                f"rollout_rs has no option {option!r}. verl has token_k1 to seq_max_k3. Pass one of it."
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
        found = found | Measured(sums.at(f"{option}/"), (Reading(table, f"{option}/", {"option": option}),))
    counts = {"kept": np.count_nonzero(keep), "n": len(keep), "hit": np.count_nonzero(rows.any(~keep))}
    sums = Sums.of(counts=counts | {"rows": rows.count}).at("rs/")
    return found | Measured(sums, (Reading(REJECTION_ALL, "rs/"),))


_LEVELS: dict[str, Callable[[Rows, NDArray], NDArray]] = {
    "token": lambda rows, stat: rows.mean(stat),
    "seq_sum": lambda rows, stat: rows.total(stat),
    "seq_mean": lambda rows, stat: rows.mean(stat),
    "seq_max": lambda rows, stat: rows.largest(stat),
}


def _off_policy(old: NDArray, rollout: NDArray, rows: Rows) -> Sums:
    log = old - rollout
    bounded = np.exp(np.clip(log, -LIMIT, LIMIT))
    mine, theirs = rows.mean(old), rows.mean(rollout)
    gap, product = theirs - mine, np.clip(rows.total(log), -LIMIT, LIMIT)
    with np.errstate(over="ignore"):
        k3 = (np.exp(log) - log - 1).sum()
    totals = {"kl": -log.sum(), "k3": k3, "square": (bounded**2).sum(), "product": np.exp(2 * product).sum()}
    totals |= {"old": -mine.sum(), "rollout": -theirs.sum(), "gap": gap.sum(), "abs": np.abs(gap).sum()}
    totals |= {"ppl": np.exp(-mine).sum(), "rollout_ppl": np.exp(-theirs).sum(), "ratio": np.exp(gap).sum()}
    maxima = {"gap.max": gap.max(initial=-np.inf), "gap.-min": (-gap).max(initial=-np.inf)}
    return Sums.of(totals, {"n": len(log), "rows": rows.count}, maxima)
