"""Compare the servers' logprobs with the trainer's: `Gap`, `Proof` and the bounds for each precision.

Tokens that the current version sampled must have the trainer's logprobs. `mismatch_causes` searches for the cause if
they do not. No torch.
"""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tracegrad.errors import TracegradError

Floats = NDArray[np.float32]

FP32_NATS = 1e-4
"""What separates two clean float32 passes at most, per token."""
BF16_MEDIAN, BF16_P99 = 0.02, 0.3
"""Nats beyond which no clean bf16 sync lies, whatever the run: benches/online/sync_noise.py measures clean and missed
ones (TRL#5312 saw 0.015 clean and 0.201 stale)."""
CERTAIN = 5.0
"""Standard errors beyond which a difference is not by chance: once in three million checks."""
FARTHEST = 5.0
"""Nats that one token adds at most where logprobs are averaged."""
FAR = 0.3
"""The share of the way to other weights below which a slope is not a fault: if an update is as small as the rounding
of bf16 weights, a part of the served weights has not moved. benches/online/sync_noise.py prints this share as `back`;
it is larger where the update is so small that the slope is not certain."""
DOUBT = 0.05
"""What is added, by squares, to 1 - p of a token for the size of its rounding: rounded logits move a logprob by as much
as its token is in doubt, and a certain one by little."""
OUTLIERS, GIVEN, GIVEN_WITHOUT_OUTLIERS = 3, 0.55, 0.45
"""Tokens that are left out, and shares of squares, in units of rounding, that a cause gives with and without them.
benches/online/sync_noise.py measures those of clean pushes, benches/online/faults.py those of faults."""


class SyncFault(TracegradError):
    """The servers do not sample from the policy that is trained: how far off, since when, and why as far as known."""


@dataclass(frozen=True)
class Gap:
    """|theta - rollout| of tokens, in nats.

    Args:
        terms: how many tokens there are.
        p50, p99, max, mean: percentiles, the largest and the mean; NaN where there are none.
        square: mean of the squares.
    """

    terms: int
    p50: float = math.nan
    p99: float = math.nan
    max: float = math.nan
    mean: float = math.nan
    square: float = math.nan

    @classmethod
    def of(cls, logprobs: Floats, rollout: Floats, here: NDArray[np.bool_] | None = None) -> "Gap":
        """Compare [M] logprobs of both, of the tokens that count; those that either does not know do not.

        A token that is impossible for one side alone is infinitely far off.

        >>> Gap.of(np.float32([-1, -2, -3]), np.float32([-1, -2.5, np.nan]), np.array([True, True, True])).max
        0.5
        """
        apart = np.asarray(logprobs, np.float64) - np.asarray(rollout, np.float64)
        apart = np.abs(apart if here is None else apart[here])
        apart = apart[~np.isnan(apart)]
        if not len(apart):
            return cls(0)
        p50, p99 = (float(each) for each in np.percentile(apart, [50, 99], method="higher"))
        return cls(len(apart), p50, p99, float(apart.max()), float(apart.mean()), float((apart**2).mean()))

    def row(self) -> dict[str, float]:
        """Name the figures as the metrics do."""
        if not self.terms:
            return {"sync_terms": 0}
        return {"sync_terms": self.terms, "sync_p50": self.p50, "sync_p99": self.p99, "sync_max": self.max}


@dataclass
class Proof:
    """What a clean sync looks like, and whether this one is.

    Args:
        bf16: the forward pass of the trainer is bf16: then two clean ones differ, by bounds that no run changes.
        square: mean squared nats of the noisiest sync that held, for `leans`.
    """

    bf16: bool = False
    square: float = 0.0

    @property
    def words(self) -> str:
        """What is clean."""
        return f"a median of {BF16_MEDIAN:g} and a 99th percentile of {BF16_P99:g}" if self.bf16 else f"{FP32_NATS:g}"

    def holds(self, gap: Gap) -> bool:
        """Whether a gap is that of a clean sync.

        >>> Proof().holds(Gap.of(np.float32([-1.0]), np.float32([-1.01])))
        False
        >>> Proof(bf16=True).holds(Gap.of(np.float32([-1.0]), np.float32([-1.01])))
        True
        """
        if not gap.terms:
            return True
        return (gap.p50 <= BF16_MEDIAN and gap.p99 <= BF16_P99) if self.bf16 else gap.max <= FP32_NATS

    def note(self, gap: Gap) -> None:
        """Remember the noise of a sync that held."""
        if gap.terms:
            self.square = max(self.square, gap.square)

    def leans(self, now: Floats, before: Floats, rollout: Floats) -> float:
        """How far the servers' logprobs stand on the way from this version's to the one before, where that is certain.

        The slope of rollout - now over before - now: 0 for the weights of now, 1 for those before. Rounding of `now` is
        in both differences and lifts the slope; what it can lift it by at most, by the noise of syncs that held, is
        taken off.

        Returns:
            the slope; 0 where it is below `FAR`, or within `CERTAIN` standard errors of what rounding explains.

        >>> now, before = np.linspace(-2, -1, 64, dtype=np.float32), np.linspace(-1, -2, 64, dtype=np.float32)
        >>> round(Proof(bf16=True).leans(now, before, before), 6), Proof(bf16=True).leans(now, before, now)
        (1.0, 0.0)
        """
        off, way = _differences(now, rollout, before)
        slope, error = _slope(off, way)
        total = float((way**2).sum())
        lifted = min(1.0, self.square * len(way) / total) if total else 0.0
        return slope if slope > FAR and slope - lifted > CERTAIN * error else 0.0


def above(now: Floats, rollout: Floats) -> float:
    """How much likelier sampled tokens are to the servers than to the trainer on average, where that is certain.

    Rounding makes as many tokens likelier as less likely. Truncated sampling makes all of them likelier.

    Returns:
        nats; 0 where it is within `CERTAIN` standard errors of none.

    >>> now = np.linspace(-3, -1, 64, dtype=np.float32)
    >>> round(above(now, now + np.float32(0.1)), 6), above(now, now + np.float32(0.1) * (-1) ** np.arange(64))
    (0.1, 0.0)
    """
    (off,) = _differences(now, rollout)
    if len(off) < 2:
        return 0.0
    mean, error = float(off.mean()), float(off.std(ddof=1)) / math.sqrt(len(off))
    return mean if mean > CERTAIN * error else 0.0


def explains(now: Floats, other: Floats, rollout: Floats) -> bool:
    """Whether other logprobs give what separates the servers' from the trainer's, which rounding would not.

    They give most of the squared difference, also without the `OUTLIERS` tokens that differ most, and the way to them
    is one that the servers' certainly went. Differences are in units of each token's rounding.

    >>> now, rounding = np.linspace(-3, -1, 64, dtype=np.float32), np.float32(0.01) * np.sin(np.arange(64))
    >>> other = now + np.float32(0.1) * np.cos(np.arange(64) ** 2)
    >>> explains(now, other, other + rounding), explains(now, other, now + rounding)
    (True, False)
    """
    off, way = _in_roundings(now, rollout, other)
    slope, error = _slope(off, way)
    share, without_outliers = _shares(off, way)
    return slope > CERTAIN * error and share > GIVEN and without_outliers > GIVEN_WITHOUT_OUTLIERS


def share_given(now: Floats, other: Floats, rollout: Floats) -> tuple[float, float]:
    """Compute the share of the squared difference between server and trainer, in roundings, that other logprobs give.

    Args:
        now, rollout, other: [M] logprobs in nats: the trainer's, the servers', and those that a cause would give.

    Returns:
        the share for all tokens, and without the `OUTLIERS` tokens that differ most. 1 is all of it; below 0 the other
        logprobs are farther off than the trainer's.

    >>> now = np.zeros(4, np.float32)
    >>> share_given(now, now + np.float32(1), np.float32([2, 2, 2, 1]))
    (0.7692307692307692, 1.0)
    """
    return _shares(*_in_roundings(now, rollout, other))


def worse(one: Floats, other: Floats) -> float:
    """By how many standard errors one set of differences ranks above another in size (Mann and Whitney 1947).

    Args:
        one, other: nats, of different tokens.

    >>> noise = np.sin(np.arange(64, dtype=np.float32))
    >>> worse(9 * noise, noise) > 3, abs(worse(noise, -noise)) < 1e-9
    (True, True)
    """
    sizes = [np.abs(each[~np.isnan(each)]) for each in (one, other)]
    m, n = map(len, sizes)
    if not m or not n:
        return 0.0
    _, at, times = np.unique(np.concatenate(sizes), return_inverse=True, return_counts=True)
    ranks = (np.cumsum(times) - (times - 1) / 2)[at]
    error = math.sqrt(m * n * (m + n + 1) / 12)
    return float(ranks[:m].sum() - m * (m + n + 1) / 2) / error


def _differences(now: Floats, *others: Floats) -> tuple[NDArray[np.float64], ...]:
    """What separates each of `others` from `now`, nats, at most `FARTHEST`, of the tokens that all are known of."""
    apart = [np.asarray(each, np.float64) - np.asarray(now, np.float64) for each in others]
    known = ~np.isnan(apart).any(0)
    return tuple(np.clip(each[known], -FARTHEST, FARTHEST) for each in apart)


def slope_of(now: Floats, other: Floats, rollout: Floats) -> tuple[float, float]:
    """Fit how far the servers' logprobs are on the way from the trainer's to others: 0 is at the trainer's, 1 at those.

    Returns:
        the slope, and its standard error, which holds if one token has most of the weight (HC3: MacKinnon 1985).

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
    left = (off - slope * way) / np.maximum(1 - way**2 / total, 1e-9)
    return slope, math.sqrt(float((left**2 * way**2).sum())) / total


def _in_roundings(now: Floats, rollout: Floats, other: Floats) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """What separates the servers' and other logprobs from the trainer's, over the size of each token's rounding."""
    known = ~np.isnan(now + rollout + other)
    rounding = np.hypot(np.expm1(np.minimum(now[known], 0), dtype=np.float64), DOUBT)
    off, way = _differences(now, rollout, other)
    return off / rounding, way / rounding


def _shares(off: NDArray[np.float64], way: NDArray[np.float64]) -> tuple[float, float]:
    """Compute the share of the squares of `off` that `way` takes away, for all tokens and without the outliers."""
    most = np.argsort(-np.abs(off), kind="stable")[OUTLIERS:]
    return _given(off, way), _given(off[most], way[most])


def _given(off: NDArray[np.float64], way: NDArray[np.float64]) -> float:
    """The share of the squares of `off` that `way` takes away."""
    whole = float((off**2).sum())
    return 1 - float(((off - way) ** 2).sum()) / whole if whole else 0.0


def fault(step: int, version: int, gap: Gap, clean: str, why: str) -> SyncFault:
    """The error that ends a run."""
    return SyncFault(
        f"step {step}: the servers do not sample from version {version}, which is trained. Of {gap.terms} tokens "
        f"that they say are its own, the logprobs are off by up to {gap.max:.3g} nats (median {gap.p50:.2g}, 99th "
        f"percentile {gap.p99:.2g}; at most {clean} is clean). Ratios would be wrong. {why}"
    )


def cached_response(name: str | None, where: str) -> str:
    """What is wrong where two answers have one id."""
    return (
        f"{where} gave two answers with the id {name!r}. A cache of responses stands between the run and the model: an "
        "answer would be trained twice, as if it had been sampled twice. Turn it off for this run."
    )


def own_terms(step: Any, version: int) -> NDArray[np.bool_]:
    """[M] bool: the terms of a step that this version sampled."""
    return np.asarray(step.version) == version
