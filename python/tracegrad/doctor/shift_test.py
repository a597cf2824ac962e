"""Test whether logprobs belong to their own tokens: `lag_test`, with `bigram_logprobs` as a reference without a model.

All functions take arrays. `checks_shift` passes what a file records, `rescore` what the model computes.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from tracegrad.errors import ArgumentError

LAGS = (-1, 0, 1)
Floats = NDArray[np.float64]


@dataclass(frozen=True)
class LagTest:
    """Rank correlation of recorded logprobs with a reference, by lag.

    Args:
        correlation: lag to Spearman's rho in [-1, 1]; NaN if a side is constant or there are no tokens.
        lead: lag to its lead over lag 0, in standard errors over turns; 0 for lag 0, NaN if unknown. Turns with the
            same content count as one draw.
        place_lead: the same in standard errors over tokens. Tokens between the same neighbours count as one draw,
            because many answers share words.
        tokens: tokens compared, the same ones at every lag.
        turns: turns that contain these tokens.
        draws: distinct turns among them.
        places: effective number of distinct places between neighbours: (sum n)^2 / sum n^2 over their counts n.

    >>> # The logprobs are one token too late.
    >>> logprobs, reference = [-1, -9, -2, -8, -3, -7], [-7, -1, -9, -2, -8, -3]
    >>> test = lag_test(logprobs, reference, [0, 6])
    >>> test.best, test.turns, test.correlation[0] < test.correlation[1]
    (1, 1, True)
    """

    correlation: Mapping[int, float]
    lead: Mapping[int, float]
    place_lead: Mapping[int, float]
    tokens: int
    turns: int
    draws: int
    places: float

    @property
    def best(self) -> int:
        """Lag with the highest correlation; 0 if no correlation is known."""
        finite = {lag: rho for lag, rho in self.correlation.items() if not np.isnan(rho)}
        return max(finite, key=lambda lag: (finite[lag], lag == 0)) if finite else 0


def lag_test(recorded: ArrayLike, reference: ArrayLike, cu_turns: ArrayLike, lags: Sequence[int] = LAGS) -> LagTest:
    """Find the token that each recorded logprob fits: its own, or a neighbour.

    At lag k, recorded[i] is compared with reference[i + k] within a turn. A list that lost its first entry fits at lag
    +1, one that begins with a filler at lag -1. A token is used only if it has a neighbour with a finite number at
    every lag, so that all lags are compared on the same tokens.

    Args:
        recorded: [T] nats, NaN if unknown.
        reference: [T] nats: the same tokens under a model or under counts.
        cu_turns: [N+1] offsets: turn n is tokens cu_turns[n]:cu_turns[n+1].
        lags: lags to compare; must contain 0.

    Raises:
        ArgumentError: if the lengths contradict one another, or lags lack 0.

    >>> test = lag_test([-1, -9, -2, -8, -3, -7], [-7, -1, -9, -2, -8, -3], [0, 6])
    >>> test.best, test.tokens, round(test.correlation[1], 3)
    (1, 4, 1.0)
    """
    actual, expected = np.asarray(recorded, np.float64), np.asarray(reference, np.float64)
    cu = np.asarray(cu_turns, np.int64)
    if 0 not in lags or actual.ndim != 1 or actual.shape != expected.shape or len(cu) == 0 or cu[-1] != len(actual):
        raise ArgumentError(
            f"TG-DOCTOR-005: recorded {actual.shape}, reference {expected.shape}, cu_turns to {cu[-1:].tolist()}, lags "
            f"{list(lags)}. They must be flat, of one length, which cu_turns ends at, and lag 0 must be among the "
            "lags. Pass them so."
        )
    turn = np.repeat(np.arange(len(cu) - 1), np.diff(cu))
    position = np.arange(len(actual))
    usable = np.isfinite(actual)
    for lag in lags:
        inside = (position + lag >= cu[:-1][turn]) & (position + lag < cu[1:][turn])
        usable &= inside & np.isfinite(expected[np.where(inside, position + lag, 0)]) if len(position) else inside
    position = position[usable]
    scores = {lag: _standardised(expected[position + lag]) for lag in lags}
    actual_scores = _standardised(actual[position])
    neighbourhood = np.unique(
        np.stack([expected[position + lag] for lag in lags], 1).round(6), axis=0, return_inverse=True
    )[1].ravel()
    content = _turn_content(neighbourhood, turn[position])
    products = {lag: actual_scores * (scores[lag] - scores[0]) for lag in lags}
    leads, place_leads = (
        {lag: _lead(products[lag], clusters) if lag else 0.0 for lag in lags} for clusters in (content, neighbourhood)
    )
    correlation = {lag: float(np.mean(actual_scores * scores[lag])) if len(position) else float("nan") for lag in lags}
    turns, draws = (len(np.unique(labels)) for labels in (turn[position], content))
    counts = np.bincount(neighbourhood)
    places = float(len(position) ** 2 / max(int(np.sum(counts.astype(np.int64) ** 2)), 1))
    return LagTest(correlation, leads, place_leads, len(position), turns, draws, places)


def bigram_logprobs(previous: ArrayLike, ids: ArrayLike, backoff: float = 4.0) -> Floats:
    """Return the logprob of each token given the one before it, from counts that exclude the token itself.

    (n(a, b) - 1 + m p(b)) / (n(a) - 1 + m) with p(b) = (n(b) - 1/2) / (T - 1 + V/2), V distinct ids: bigrams backed off
    to unigrams. This is weak compared with a model, but enough to tell a token from its neighbour.

    Args:
        previous: [T] integers: the id before each token, sampled or from the prompt.
        ids: [T] integers.
        backoff: m, the number of counts that the unigrams are worth.

    Returns:
        [T] float64, nats.

    >>> bigram_logprobs([1, 1, 1, 1], [2, 2, 2, 3]).round(2).tolist()
    [-0.44, -0.44, -0.44, -2.64]
    """
    previous_index, index = np.unique(previous, return_inverse=True)[1], np.unique(ids, return_inverse=True)[1]
    if not len(index):
        return np.zeros(0)
    pair = np.unique(previous_index.astype(np.int64) * (int(index.max()) + 1) + index, return_inverse=True)[1]
    both, first, second = (np.bincount(column)[column] for column in (pair, previous_index, index))
    unigram = (second - 0.5) / (len(index) - 1 + 0.5 * (int(index.max()) + 1))
    return np.log((both - 1 + backoff * unigram) / (first - 1 + backoff))


def _standardised(values: Floats) -> Floats:
    """Return ranks with mean 0 and standard deviation 1, ties at their mean; NaN if all values are equal."""
    distinct, index, counts = np.unique(values, return_inverse=True, return_counts=True)
    if len(distinct) < 2:
        return np.full(len(values), np.nan)
    rank = (np.cumsum(counts) - (counts - 1) / 2)[index]
    return (rank - rank.mean()) / rank.std()


def _turn_content(near: NDArray[np.int64], turn: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return [n] a number for the turn of each token; turns with the same tokens in the same order share one."""
    starts = np.flatnonzero(np.diff(turn, prepend=-1))
    parts = np.split(near, starts[1:]) if len(starts) else []
    numbers: dict[bytes, int] = {}
    return np.repeat([numbers.setdefault(part.tobytes(), len(numbers)) for part in parts], list(map(len, parts)))


def _lead(products: Any, cluster: NDArray[np.int64]) -> float:
    """Return the mean of `products` in standard errors.

    Clusters are the independent draws. The result is NaN with fewer than two clusters.
    """
    if not len(products):
        return float("nan")
    index = np.unique(cluster, return_inverse=True)[1]
    sums, counts = np.bincount(index, products), np.bincount(index)
    mean = products.mean()
    spread = np.sqrt(np.sum((sums - mean * counts) ** 2)) / len(products)
    return float(mean / spread) if len(sums) > 1 and spread > 0 else float("nan")
