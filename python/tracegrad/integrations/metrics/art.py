"""ART's metrics: the three of its pull request 467, the off-policy diagnostics of its main branch, `probs_corr`.

In ART, "old" is the recorded policy, and a missing logprob counts as a ratio of 1. Tests compare `loss/*` and
`probs_corr` with ART's code (tests/parity/test_art_metrics.py). The pull request was closed; its three metrics follow
its design page.
"""

from collections.abc import Callable

import numpy as np
from numpy.typing import ArrayLike

from tracegrad.errors import ArgumentError
from tracegrad.metrics.aggregate import Rows, Sums, divide, moments
from tracegrad.metrics.definition import Metric, MetricSet, MetricSums

EPS = 1e-6
"""The epsilon that is added to ART's denominators."""
EDGES = np.logspace(-4, 4, 257).astype(np.float32)
"""Edges of ART's histogram of ratios, log-spaced; each bin is 7.5 % wide."""


def as_art(
    theta: ArrayLike,
    recorded: ArrayLike,
    rows: Rows,
    *,
    advantages: ArrayLike,
    ppo: bool = False,
    epsilon: float | None = None,
    epsilon_high: float | None = None,
    ratio: ArrayLike | None = None,
    ref: ArrayLike | None = None,
) -> MetricSums:
    """Compute ART's metrics of trained tokens (its assistant mask).

    Args:
        theta, recorded: [M] logprobs, NaN in `recorded` if unknown.
        rows: the rows of the trained tokens; `rows.positions` also counts prompts and padding.
        advantages: [M].
        ppo: use PPO's defaults and a clip that depends on the sign of the advantage; else those of cispo.
        epsilon, epsilon_high: as in ART: both 0.2 with ppo, 1.0 and 4.0 without.
        ratio: [M] at ART's configured level; default theta / recorded of each token.
        ref: [M], adds kl_policy_ref.

    Raises:
        ArgumentError: if the arrays do not match the rows.

    >>> rows = Rows.of([0, 0], positions=4)
    >>> found = as_art(np.log([0.5, 0.5]), [np.log(0.25), np.nan], rows, advantages=[1.0, 1.0], ppo=True).values()
    >>> round(found["frac_old_logprobs_valid"], 3), round(found["mean_importance_ratio"], 3)
    (0.25, 1.5)
    """
    new, old = np.asarray(theta, np.float64), np.asarray(recorded, np.float64)
    if not new.shape == old.shape == (rows.groups.terms,):
        raise ArgumentError(
            f"TG-INTEG-007: theta is {new.shape} and recorded {old.shape}, but the rows have {rows.groups.terms} "
            "trained tokens. Each needs its own entry. Pass flat arrays of the trained tokens."
        )
    low = (0.2 if ppo else 1.0) if epsilon is None else epsilon
    high = (low if ppo else 4.0) if epsilon_high is None else epsilon_high
    known = ~np.isnan(old)
    used_ratio = np.exp(np.where(known, new - old, 0.0)) if ratio is None else np.asarray(ratio, np.float64)
    over, under = used_ratio > 1 + high, used_ratio < 1 - low
    sign = np.sign(np.asarray(advantages, np.float64))
    removed = (over & (sign > 0)) | (under & (sign < 0)) if ppo else over | under
    counts = {
        "positions": rows.positions,
        "known": np.count_nonzero(known),
        "outside": np.count_nonzero(over | under),
        "removed": np.count_nonzero(removed),
        "bins": np.bincount(np.searchsorted(EDGES, used_ratio.astype(np.float32)), minlength=len(EDGES) + 1),
    }
    x, y = np.exp(old[known]), np.exp(new[known])
    products = {"x": x.sum(), "y": y.sum(), "xx": x @ x, "yy": y @ y, "xy": x @ y}
    sums = moments("ratio", used_ratio) | Sums.of(products, counts)
    found = MetricSums(sums.with_prefix("art/"), (MetricSet(DIAGNOSTICS, "art/"),))
    if ref is not None:
        sums = moments("gap", new - np.asarray(ref, np.float64)).with_prefix("ref/")
        found = found | MetricSums(sums, (MetricSet(REFERENCE, "ref/"),))
    return found


def _correlation(s: Sums) -> float:
    """Return Pearson's correlation; NaN for fewer than two tokens or if one side is constant."""
    n = float(s["known"])
    if n < 2:
        return float("nan")
    x, y = float(s["x"]), float(s["y"])
    spread = (float(s["xx"]) - x * x / n) * (float(s["yy"]) - y * y / n)
    return (float(s["xy"]) - x * y / n) / np.sqrt(spread) if spread > 0 else float("nan")


def _quantile(share: float) -> Callable[[Sums], float]:
    """Return a quantile of the histogram, linear inside its bin. The first bin starts at 0, the last has no width."""

    def value(s: Sums) -> float:
        counts = s["bins"]
        if not (total := counts.sum()):
            return 0.0
        cumulative = np.cumsum(counts)
        bin_ = min(int(np.searchsorted(cumulative, total * share)), len(counts) - 1)
        before = cumulative[bin_ - 1] if bin_ else 0
        lower = EDGES[bin_ - 1] if bin_ else 0.0
        upper = EDGES[min(bin_, len(EDGES) - 1)]
        return float(lower + (upper - lower) * np.clip((total * share - before) / max(counts[bin_], 1), 0.0, 1.0))

    return value


def _over(name: str, eps: float = EPS) -> Callable[[Sums], float]:
    return lambda s: float(s[name]) / (int(s["ratio.n"]) + eps)


def _share(name: str) -> Callable[[Sums], float]:
    return lambda s: float(s[name]) / max(int(s["ratio.n"]), 1)


_RATIO = "theta / rollout"
_SUM, _CLOSED = "tokens + 1e-6", "Closed pull request."
DIAGNOSTICS: tuple[Metric, ...] = (
    Metric(
        "frac_old_logprobs_valid",
        "share",
        None,
        "positions + 1e-6",
        f"Positions with a recorded logprob, over prompts and padding too: it never reaches 1. {_CLOSED}",
        lambda s: 1 - (int(s["positions"]) - int(s["known"])) / (int(s["positions"]) + EPS),
    ),
    Metric("mean_importance_ratio", "1", _RATIO, _SUM, f"A missing logprob counts as 1. {_CLOSED}", _over("ratio")),
    Metric(
        "clip_fraction",
        "share",
        _RATIO,
        _SUM,
        f"Outside the clip range, whatever the sign. {_CLOSED}",
        _over("outside"),
    ),
    Metric("loss/importance_ratio_mean", "1", _RATIO, "tokens, at least 1", "The same mean.", _share("ratio")),
    Metric(
        "loss/importance_ratio_p95", "1", _RATIO, None, "From ART's histogram, linear inside a bin.", _quantile(0.95)
    ),
    Metric(
        "loss/importance_ratio_p99", "1", _RATIO, None, "From ART's histogram, linear inside a bin.", _quantile(0.99)
    ),
    Metric(
        "loss/clipped_token_fraction",
        "share",
        _RATIO,
        "tokens, at least 1",
        "By sign with ppo, either side with cispo.",
        _share("removed"),
    ),
    Metric("probs_corr", "1", _RATIO, None, "Pearson correlation of the known probabilities.", _correlation),
)
REFERENCE = (
    Metric(
        "kl_policy_ref",
        "nats",
        "theta / ref",
        _SUM,
        "Mean of l: k1, and below 0 at times.",
        lambda s: divide(s["gap"], s["gap.n"] + EPS),
    ),
)
ART: tuple[Metric, ...] = (*DIAGNOSTICS, *REFERENCE)
"""All metrics of ART."""
