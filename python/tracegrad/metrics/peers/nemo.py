"""NeMo-RL's metrics of its clipped policy gradient: probability ratios, errors between engine and trainer, weights.

Definitions are those of NVIDIA-NeMo/RL 7ea279a; "prev" is old, "generation" rollout, a row a sample whose mask is 1.
NeMo-RL cannot be installed from an index: tests/parity/test_nemo_metrics.py runs its function where it can be imported.
"""

from collections.abc import Callable

import numpy as np
from numpy.typing import ArrayLike, NDArray

from tracegrad.errors import ArgumentError
from tracegrad.metrics.groups import Rows
from tracegrad.metrics.sums import Sums, largest_of, moments, over, smallest_of
from tracegrad.metrics.table import Measured, Metric, Reading


def as_nemo(
    theta: ArrayLike,
    prev: ArrayLike,
    generation: ArrayLike,
    rows: Rows,
    *,
    clip: tuple[float, float] = (0.2, 0.2),
    kl_type: str = "k3",
    sequence_level: bool = False,
    truncation: str | None = None,
    bounds: tuple[float | None, float] = (None, 2.0),
) -> Measured:
    """`ClippedPGLossFn`'s metrics of terms.

    Args:
        theta, prev, generation: [M] logprobs of the policy being trained, the proximal and the recorded one.
        rows: the terms' rows, one for each sample whose mask is 1.
        clip: below and above 1.
        kl_type: k1, k2 or k3, of the two KL errors.
        sequence_level: the policy ratio is the row's geometric mean, the weight the row's product.
        truncation: None, "tis", "icepop" or "seq-mask-tis", with `bounds`.

    Raises:
        ArgumentError: if the arrays do not fit, or an option is not NeMo-RL's.

    >>> same = np.log([0.5, 0.25])
    >>> found = as_nemo(same, same, same, Rows.of([0, 1])).named()
    >>> round(found["probs_ratio"], 6), round(found["token_mult_prob_error"], 6), found["probs_ratio_max"]
    (1.0, 1.0, 1.0)
    """
    new, old, drawn = (np.asarray(values, np.float64) for values in (theta, prev, generation))
    if not new.shape == old.shape == drawn.shape == (rows.groups.terms,):
        raise ArgumentError(
            f"the logprobs are {new.shape}, {old.shape} and {drawn.shape}, the rows have {rows.groups.terms} terms. "
            "Each term needs its own entry. Pass flat arrays of the terms."
        )
    if kl_type not in _KL or truncation not in (None, "tis", "icepop", "seq-mask-tis"):
        raise ArgumentError(
            f"NeMo-RL has no kl_type {kl_type!r} or truncation {truncation!r}. See its ClippedPGLossFn."
        )
    log = new - old
    ratio = rows.back(np.exp(rows.mean(log))) if sequence_level else np.exp(log)
    mixture = np.log(0.5 * np.exp(old) + 0.5 * np.exp(drawn))
    totals = {
        "mult": np.exp(np.abs(drawn - old)).sum(),
        "gen": _KL[kl_type](old - drawn).sum(),
        "policy": _KL[kl_type](drawn - old).sum(),
        "js": (0.5 * _above(old - mixture) + 0.5 * _above(drawn - mixture)).sum(),
        "entropy": -(np.exp(new - drawn) * new).sum(),
    }
    clipped = np.clip(ratio, 1.0 - clip[0], 1.0 + clip[1])
    sums = moments("ratio", ratio) | moments("clipped", clipped) | Sums.of(totals)
    found = Measured(sums.at("pg/"), (Reading(POLICY_GRADIENT, "pg/"),))
    sums = _sampling(old - drawn, rows, sequence_level, truncation, bounds).at("is/")
    return found | Measured(sums, (Reading(SAMPLING if truncation is None else SAMPLING + OUT_OF_BOUNDS, "is/"),))


def _above(log: NDArray[np.float64]) -> NDArray[np.float64]:
    """r - 1 - l."""
    return np.exp(log) - log - 1


_KL: dict[str, Callable[[NDArray[np.float64]], NDArray[np.float64]]] = {
    "k1": lambda log: -log,
    "k2": lambda log: log * log / 2,
    "k3": _above,
}


def _sampling(
    log: NDArray[np.float64], rows: Rows, sequence: bool, truncation: str | None, bounds: tuple[float | None, float]
) -> Sums:
    """Weights after truncation, by term or by row, and how many lay outside the bounds."""
    low, high = 0.0 if bounds[0] is None else bounds[0], bounds[1]
    weight = np.exp(rows.total(log) if sequence else log)
    weight = np.where(np.isfinite(weight), weight, 0.0)
    outside = (weight < low) | (weight > high)
    if truncation == "tis":
        weight = np.clip(weight, low, high)
    elif truncation == "icepop":
        weight = np.where(outside, 0.0, weight)
    elif truncation == "seq-mask-tis":
        mean = np.exp(rows.mean(log))
        outside = (mean < low) | (mean > high)
        weight = np.where(rows.back(outside), 0.0, weight)
    if sequence:  # a row's weight is out of bounds for each of its terms
        outside = rows.back(outside)
    return moments("weight", weight) | Sums.of(counts={"outside": np.count_nonzero(outside), "of": len(outside)})


_POLICY, _OLD, _TERMS = "theta / old", "old / rollout", "terms"
POLICY_GRADIENT: tuple[Metric, ...] = (
    Metric("probs_ratio", "1", _POLICY, _TERMS, "Mean ratio, not clamped before exp.", over("ratio", "ratio.n")),
    Metric("probs_ratio_clamped", "1", _POLICY, _TERMS, "Mean of the clipped ratio.", over("clipped", "clipped.n")),
    Metric("probs_ratio_min", "1", _POLICY, "", "Smallest; inf of none.", smallest_of("ratio")),
    Metric("probs_ratio_max", "1", _POLICY, "", "Largest; -inf of none.", largest_of("ratio")),
    Metric("probs_ratio_clamped_min", "1", _POLICY, "", "Smallest clipped.", smallest_of("clipped")),
    Metric("probs_ratio_clamped_max", "1", _POLICY, "", "Largest clipped.", largest_of("clipped")),
    Metric("token_mult_prob_error", "1", _OLD, _TERMS, "Mean of exp|l|.", over("mult", "ratio.n")),
    Metric("gen_kl_error", "nats", _OLD, _TERMS, "KL(rollout || old), not clamped.", over("gen", "ratio.n")),
    Metric(
        "policy_kl_error", "nats", _OLD, _TERMS, "KL(old || rollout) on the same tokens.", over("policy", "ratio.n")
    ),
    Metric("js_divergence_error", "nats", _OLD, _TERMS, "Jensen-Shannon, by k3 to the mixture.", over("js", "ratio.n")),
    Metric("approx_entropy", "nats", "theta / rollout", _TERMS, "Mean of - r log theta.", over("entropy", "ratio.n")),
)
SAMPLING: tuple[Metric, ...] = (
    Metric(
        "sampling_importance_ratio",
        "1",
        _OLD,
        "terms; rows at sequence level",
        "Mean weight after truncation. NeMo-RL's own, at sequence level, is the sum over rows: a broadcast.",
        over("weight", "weight.n"),
    ),
)
OUT_OF_BOUNDS = (
    Metric(
        "is_oob_ratio",
        "share",
        _OLD,
        "terms; rows in seq-mask-tis",
        "Weights outside the bounds.",
        over("outside", "of"),
    ),
)
NEMO: tuple[Metric, ...] = (*POLICY_GRADIENT, *SAMPLING, *OUT_OF_BOUNDS)
"""The table."""
