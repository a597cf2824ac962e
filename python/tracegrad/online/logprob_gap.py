"""Compare the servers' logprobs with the trainer's: `LogprobGap`, `WeightSyncBounds` and the bounds for each precision.

Tokens that the current version sampled must have the trainer's logprobs. `mismatch_causes` searches for the cause if
they do not. Works without torch.
"""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tracegrad.errors import TracegradError

Floats = NDArray[np.float32]

FP32_NATS = 1e-4
"""Maximum difference of two correct float32 passes per token, in nats."""
BF16_MEDIAN, BF16_P99 = 0.02, 0.3
"""Bounds in nats that every correct bf16 sync stays within, in any run. benches/online/sync_noise.py measures correct
and missed syncs (TRL#5312 saw 0.015 for a correct and 0.201 for a stale one)."""
MIN_STANDARD_ERRORS = 5.0
"""Standard errors beyond which a difference is not random: once in three million checks."""
MAX_TOKEN_NATS = 5.0
"""Maximum contribution of one token to a mean of logprob differences, in nats."""
MIN_SLOPE = 0.3
"""Minimum slope towards other weights that counts as a fault. If an update is as small as the rounding of bf16 weights,
part of the served weights does not change. benches/online/sync_noise.py prints this share as `back`; it is larger if
the update is so small that the slope is not certain."""
DOUBT = 0.05
"""Constant that is added, as a root of squares, to 1 - p of a token to estimate its rounding error. Rounded logits
change a logprob in proportion to 1 - p, so likely tokens change little."""
OUTLIERS, MIN_EXPLAINED, MIN_EXPLAINED_WITHOUT_OUTLIERS = 3, 0.55, 0.45
"""Number of tokens that are left out, and the minimum shares of squares, in units of rounding, that a cause must
explain with and without them. benches/online/sync_noise.py measures these shares for correct syncs,
benches/online/faults.py for faults."""


class SyncFault(TracegradError):
    """The servers do not sample from the trained policy.

    The message has the size of the gap, the step and version, and the cause if known.

    ```python
    import tracegrad as tg
    from tracegrad.online import SyncFault


    def short(completions, **columns):
        return [float(len(text) < 3) for text in completions]


    try:
        tg.online.train("model", ["2+2?", "3+4?"], rewards=[short], out="out/online")
    except SyncFault as fault:  # for example, a server answers with the weights of an earlier version
        print(fault.code, fault)
    ```
    """


@dataclass(frozen=True)
class LogprobGap:
    """|theta - rollout| of tokens, in nats.

    Args:
        terms: number of tokens.
        p50, p99: percentiles; between two tokens the larger one. NaN without tokens, as are the next two.
        max, mean: maximum and mean.
        square: mean of the squares.
    """

    terms: int
    p50: float = math.nan
    p99: float = math.nan
    max: float = math.nan
    mean: float = math.nan
    square: float = math.nan

    @classmethod
    def of(cls, logprobs: Floats, rollout: Floats, here: NDArray[np.bool_] | None = None) -> "LogprobGap":
        """Compare [M] logprobs of both sides for the tokens in `here`.

        Tokens that are unknown to either side are left out. A token that is impossible for only one side has an
        infinite difference.

        >>> LogprobGap.of(np.float32([-1, -2, -3]), np.float32([-1, -2.5, np.nan]), np.array([True, True, True])).max
        0.5
        """
        differences = np.asarray(logprobs, np.float64) - np.asarray(rollout, np.float64)
        differences = np.abs(differences if here is None else differences[here])
        differences = differences[~np.isnan(differences)]
        if not len(differences):
            return cls(0)
        p50, p99 = (float(value) for value in np.percentile(differences, [50, 99], method="higher"))
        return cls(
            len(differences),
            p50,
            p99,
            float(differences.max()),
            float(differences.mean()),
            float((differences**2).mean()),
        )

    def row(self) -> dict[str, float]:
        """Return the figures by their metric names."""
        if not self.terms:
            return {"weight_check/tokens": 0}
        return {
            "weight_check/tokens": self.terms,
            "weight_check/p50": self.p50,
            "weight_check/p99": self.p99,
            "weight_check/max": self.max,
        }


@dataclass
class WeightSyncBounds:
    """Bounds of a correct sync, and the test against them.

    Args:
        bf16: whether the trainer's forward pass is bf16: then even correct syncs differ, within fixed bounds.
        noise_mean_square: mean squared nats of the noisiest correct sync, for `slope_to_previous`.
    """

    bf16: bool = False
    noise_mean_square: float = 0.0

    @property
    def words(self) -> str:
        """The bounds in words."""
        return f"a median of {BF16_MEDIAN:g} and a 99th percentile of {BF16_P99:g}" if self.bf16 else f"{FP32_NATS:g}"

    def holds(self, gap: LogprobGap) -> bool:
        """Return whether a gap is within the bounds of a correct sync.

        >>> WeightSyncBounds().holds(LogprobGap.of(np.float32([-1.0]), np.float32([-1.01])))
        False
        >>> WeightSyncBounds(bf16=True).holds(LogprobGap.of(np.float32([-1.0]), np.float32([-1.01])))
        True
        """
        if not gap.terms:
            return True
        return (gap.p50 <= BF16_MEDIAN and gap.p99 <= BF16_P99) if self.bf16 else gap.max <= FP32_NATS

    def record_noise(self, gap: LogprobGap) -> None:
        """Remember the noise of a correct sync."""
        if gap.terms:
            self.noise_mean_square = max(self.noise_mean_square, gap.square)

    def slope_to_previous(self, now: Floats, before: Floats, rollout: Floats) -> float:
        """Return how far the servers' logprobs are on the way to the previous version, if that is certain.

        The slope of rollout - now over before - now is 0 for the current weights and 1 for the previous ones. Rounding
        of `now` is in both differences and increases the slope. The largest possible increase, from the noise of
        correct syncs, is subtracted before the test.

        Returns:
            the slope; 0 if it is below `MIN_SLOPE`, or within `MIN_STANDARD_ERRORS` standard errors of what rounding
            explains.

        >>> now, before = np.linspace(-2, -1, 64, dtype=np.float32), np.linspace(-1, -2, 64, dtype=np.float32)
        >>> bounds = WeightSyncBounds(bf16=True)
        >>> round(bounds.slope_to_previous(now, before, before), 6), bounds.slope_to_previous(now, before, now)
        (1.0, 0.0)
        """
        off, way = _differences(now, rollout, before)
        slope, error = _slope(off, way)
        total = float((way**2).sum())
        lifted = min(1.0, self.noise_mean_square * len(way) / total) if total else 0.0
        return slope if slope > MIN_SLOPE and slope - lifted > MIN_STANDARD_ERRORS * error else 0.0


def mean_excess(now: Floats, rollout: Floats) -> float:
    """Return how much likelier sampled tokens are on average to the servers than to the trainer, if that is certain.

    Rounding makes as many tokens likelier as less likely. Truncated sampling makes all of them likelier.

    Returns:
        nats; 0 if it is within `MIN_STANDARD_ERRORS` standard errors of 0.

    >>> now = np.linspace(-3, -1, 64, dtype=np.float32)
    >>> round(mean_excess(now, now + np.float32(0.1)), 6)
    0.1
    >>> mean_excess(now, now + np.float32(0.1) * (-1) ** np.arange(64))
    0.0
    """
    (off,) = _differences(now, rollout)
    if len(off) < 2:
        return 0.0
    mean, error = float(off.mean()), float(off.std(ddof=1)) / math.sqrt(len(off))
    return mean if mean > MIN_STANDARD_ERRORS * error else 0.0


def explains(now: Floats, other: Floats, rollout: Floats) -> bool:
    """Return whether other logprobs explain the difference between servers and trainer, which rounding would not.

    They must explain most of the squared difference, also without the `OUTLIERS` tokens that differ most. The slope
    towards them must be certainly positive. Differences are in units of each token's rounding.

    >>> now, rounding = np.linspace(-3, -1, 64, dtype=np.float32), np.float32(0.01) * np.sin(np.arange(64))
    >>> other = now + np.float32(0.1) * np.cos(np.arange(64) ** 2)
    >>> explains(now, other, other + rounding), explains(now, other, now + rounding)
    (True, False)
    """
    off, way = _in_roundings(now, rollout, other)
    slope, error = _slope(off, way)
    share, without_outliers = _shares(off, way)
    return (
        slope > MIN_STANDARD_ERRORS * error
        and share > MIN_EXPLAINED
        and without_outliers > MIN_EXPLAINED_WITHOUT_OUTLIERS
    )


def explained_share(now: Floats, other: Floats, rollout: Floats) -> tuple[float, float]:
    """Compute the share of the squared server-trainer difference, in roundings, that other logprobs explain.

    Args:
        now, rollout, other: [M] logprobs in nats: the trainer's, the servers', and those under a cause.

    Returns:
        the share for all tokens, and without the `OUTLIERS` tokens that differ most. 1 is all of it. Below 0, the other
            logprobs are farther from the servers' than the trainer's are.

    >>> now = np.zeros(4, np.float32)
    >>> explained_share(now, now + np.float32(1), np.float32([2, 2, 2, 1]))
    (0.7692307692307692, 1.0)
    """
    return _shares(*_in_roundings(now, rollout, other))


def rank_z_score(one: Floats, other: Floats) -> float:
    """Return by how many standard errors one set of differences ranks above another in size (Mann and Whitney 1947).

    Args:
        one, other: differences in nats, of different tokens.

    >>> noise = np.sin(np.arange(64, dtype=np.float32))
    >>> rank_z_score(9 * noise, noise) > 3, abs(rank_z_score(noise, -noise)) < 1e-9
    (True, True)
    """
    sizes = [np.abs(values[~np.isnan(values)]) for values in (one, other)]
    m, n = map(len, sizes)
    if not m or not n:
        return 0.0
    _, at, times = np.unique(np.concatenate(sizes), return_inverse=True, return_counts=True)
    ranks = (np.cumsum(times) - (times - 1) / 2)[at]
    error = math.sqrt(m * n * (m + n + 1) / 12)
    return float(ranks[:m].sum() - m * (m + n + 1) / 2) / error


def _differences(now: Floats, *others: Floats) -> tuple[NDArray[np.float64], ...]:
    """Return the differences of `others` from `now` in nats, clipped to `MAX_TOKEN_NATS`.

    Tokens without a value in any of them are left out.
    """
    differences = [np.asarray(values, np.float64) - np.asarray(now, np.float64) for values in others]
    is_known = ~np.isnan(differences).any(0)
    return tuple(np.clip(values[is_known], -MAX_TOKEN_NATS, MAX_TOKEN_NATS) for values in differences)


def slope_of(now: Floats, other: Floats, rollout: Floats) -> tuple[float, float]:
    """Fit how far the servers' logprobs are on the way from the trainer's (0) to others (1).

    Returns:
        the slope, and its standard error, which is valid even if one token has most of the weight (HC3: MacKinnon
            1985).

    >>> now = np.zeros(4, np.float32)
    >>> slope, error = slope_of(now, np.float32([1, 2, 3, 4]), np.float32([0.5, 1, 1.5, 2]))
    >>> slope, round(error, 6)
    (0.5, 0.0)
    """
    return _slope(*_differences(now, rollout, other))


def _slope(off: NDArray[np.float64], way: NDArray[np.float64]) -> tuple[float, float]:
    """Fit the slope of `off` over `way`, as `slope_of` returns it."""
    total = float((way**2).sum())
    if len(way) < 2 or total == 0:
        return 0.0, math.inf
    slope = float((off * way).sum()) / total
    residuals = (off - slope * way) / np.maximum(1 - way**2 / total, 1e-9)
    return slope, math.sqrt(float((residuals**2 * way**2).sum())) / total


def _in_roundings(now: Floats, rollout: Floats, other: Floats) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return the differences of the servers' and the other logprobs from the trainer's, in each token's rounding."""
    is_known = ~np.isnan(now + rollout + other)
    rounding = np.hypot(np.expm1(np.minimum(now[is_known], 0), dtype=np.float64), DOUBT)
    off, way = _differences(now, rollout, other)
    return off / rounding, way / rounding


def _shares(off: NDArray[np.float64], way: NDArray[np.float64]) -> tuple[float, float]:
    """Compute the share of the squares of `off` that `way` explains, for all tokens and without the outliers."""
    without_outliers = np.argsort(-np.abs(off), kind="stable")[OUTLIERS:]
    return _explained_share(off, way), _explained_share(off[without_outliers], way[without_outliers])


def _explained_share(off: NDArray[np.float64], way: NDArray[np.float64]) -> float:
    """Compute the share of the squares of `off` that `way` explains."""
    total = float((off**2).sum())
    return 1 - float(((off - way) ** 2).sum()) / total if total else 0.0


def weight_sync_fault(step: int, version: int, gap: LogprobGap, clean: str, why: str) -> SyncFault:
    """Build the error that ends a run."""
    return SyncFault(
        f"TG-ONLINE-020: step {step}: the servers do not sample from version {version}, which is trained. For "
        f"{gap.terms} tokens of this version, their logprobs differ by up to {gap.max:.3g} nats (median {gap.p50:.2g}, "
        f"99th percentile {gap.p99:.2g}; a correct sync has at most {clean}). Ratios would be wrong. {why}"
    )


def cached_response(name: str | None, where: str) -> str:
    """Build the error message for two answers with the same id."""
    return (
        f"TG-ONLINE-049: {where} returned two responses with the id {name!r}. A response cache between the run and the "
        "model would make the run train twice on one sample. Turn the cache off for this run."
    )


def own_terms(step: Any, version: int) -> NDArray[np.bool_]:
    """Return [M] bool: the tokens of a step that this version sampled."""
    return np.asarray(step.version) == version
