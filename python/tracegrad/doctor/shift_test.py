"""Whether logprobs stand beside their own tokens: `lag_test`, and `bigram_logprobs` as a reference that needs no model.

Functions of arrays alone; `checks_shift` feeds them what a file records, `rescore` what the model computes.
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
        correlation: lag to Spearman's rho in [-1, 1]; NaN where a side is constant or there are no tokens.
        lead: lag to how far it stands above lag 0, in standard errors over turns; 0 for lag 0, NaN where unknown. Turns
            that say the same are one draw.
        place_lead: the same in standard errors over tokens, those between the same neighbours taken as one draw: words
            that many answers share.
        tokens: tokens compared, the same ones at every lag.
        turns: turns they stand in.
        draws: turns of these that differ.
        places: how many places between neighbours of equal weight say as much as those that there are.
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
        """The lag with the highest correlation; 0 where none is known."""
        known = {lag: rho for lag, rho in self.correlation.items() if not np.isnan(rho)}
        return max(known, key=lambda lag: (known[lag], lag == 0)) if known else 0


def lag_test(recorded: ArrayLike, reference: ArrayLike, cu_turns: ArrayLike, lags: Sequence[int] = LAGS) -> LagTest:
    """Which token each recorded logprob fits: its own, or a neighbour.

    At lag k, recorded[i] is compared with reference[i + k] within a turn. A list that lost its first entry fits at
    lag +1, one that begins with a filler at lag -1. Only tokens that have a neighbour at every lag and finite numbers
    there are used, so that the lags are compared on the same tokens.

    Args:
        recorded: [T] nats, NaN where not known.
        reference: [T] nats: what a model or a count says of the same tokens.
        cu_turns: [N+1] offsets: turn n is tokens cu_turns[n]:cu_turns[n+1].
        lags: must hold 0.

    Raises:
        ArgumentError: if the lengths contradict one another, or lags lack 0.

    >>> test = lag_test([-1, -9, -2, -8, -3, -7], [-7, -1, -9, -2, -8, -3], [0, 6])
    >>> test.best, test.tokens, round(test.correlation[1], 3)
    (1, 4, 1.0)
    """
    theirs, ours = np.asarray(recorded, np.float64), np.asarray(reference, np.float64)
    cu = np.asarray(cu_turns, np.int64)
    if 0 not in lags or theirs.ndim != 1 or theirs.shape != ours.shape or len(cu) == 0 or cu[-1] != len(theirs):
        raise ArgumentError(
            f"recorded {theirs.shape}, reference {ours.shape}, cu_turns to {cu[-1:].tolist()}, lags {list(lags)}. "
            "They must be flat, of one length, which cu_turns ends at, and lag 0 must be among the lags. Pass them so."
        )
    turn = np.repeat(np.arange(len(cu) - 1), np.diff(cu))
    at = np.arange(len(theirs))
    usable = np.isfinite(theirs)
    for lag in lags:
        inside = (at + lag >= cu[:-1][turn]) & (at + lag < cu[1:][turn])
        usable &= inside & np.isfinite(ours[np.where(inside, at + lag, 0)]) if len(at) else inside
    at = at[usable]
    scores = {lag: _standardised(ours[at + lag]) for lag in lags}
    mine = _standardised(theirs[at])
    near = np.unique(np.stack([ours[at + lag] for lag in lags], 1).round(6), axis=0, return_inverse=True)[1].ravel()
    same = _alike(near, turn[at])
    ahead = {lag: mine * (scores[lag] - scores[0]) for lag in lags}
    leads, place_leads = ({lag: _lead(ahead[lag], of) if lag else 0.0 for lag in lags} for of in (same, near))
    correlation = {lag: float(np.mean(mine * scores[lag])) if len(at) else float("nan") for lag in lags}
    turns, draws = (len(np.unique(each)) for each in (turn[at], same))
    counts = np.bincount(near)
    places = float(len(at) ** 2 / max(int(np.sum(counts.astype(np.int64) ** 2)), 1))
    return LagTest(correlation, leads, place_leads, len(at), turns, draws, places)


def bigram_logprobs(previous: ArrayLike, ids: ArrayLike, backoff: float = 4.0) -> Floats:
    """What counts say of each token after the one before it, the token itself left out of the counts.

    (n(a, b) - 1 + m p(b)) / (n(a) - 1 + m) with p(b) = (n(b) - 1/2) / (T - 1 + V/2), V distinct ids: bigrams backed
    off to unigrams. Weak beside a model, and enough to tell a token from its neighbour.

    Args:
        previous: [T] integers: the id before each token, sampled or given.
        ids: [T] integers.
        backoff: m, how many counts the unigrams are worth.

    Returns:
        [T] float64, nats.

    >>> bigram_logprobs([1, 1, 1, 1], [2, 2, 2, 3]).round(2).tolist()
    [-0.44, -0.44, -0.44, -2.64]
    """
    after, here = np.unique(previous, return_inverse=True)[1], np.unique(ids, return_inverse=True)[1]
    if not len(here):
        return np.zeros(0)
    pair = np.unique(after.astype(np.int64) * (int(here.max()) + 1) + here, return_inverse=True)[1]
    both, first, second = (np.bincount(column)[column] for column in (pair, after, here))
    alone = (second - 0.5) / (len(here) - 1 + 0.5 * (int(here.max()) + 1))
    return np.log((both - 1 + backoff * alone) / (first - 1 + backoff))


def _standardised(values: Floats) -> Floats:
    """Ranks with mean 0 and standard deviation 1, ties at their mean; NaN where all are equal."""
    distinct, index, counts = np.unique(values, return_inverse=True, return_counts=True)
    if len(distinct) < 2:
        return np.full(len(values), np.nan)
    rank = (np.cumsum(counts) - (counts - 1) / 2)[index]
    return (rank - rank.mean()) / rank.std()


def _alike(near: NDArray[np.int64], turn: NDArray[np.int64]) -> NDArray[np.int64]:
    """[n] a number for the turn of each token, the same for turns that have the same tokens in the same order."""
    starts = np.flatnonzero(np.diff(turn, prepend=-1))
    parts = np.split(near, starts[1:]) if len(starts) else []
    numbers: dict[bytes, int] = {}
    return np.repeat([numbers.setdefault(part.tobytes(), len(numbers)) for part in parts], list(map(len, parts)))


def _lead(products: Any, cluster: NDArray[np.int64]) -> float:
    """Mean of `products` in standard errors, clusters taken as the independent draws; NaN with fewer than two."""
    if not len(products):
        return float("nan")
    index = np.unique(cluster, return_inverse=True)[1]
    sums, counts = np.bincount(index, products), np.bincount(index)
    mean = products.mean()
    spread = np.sqrt(np.sum((sums - mean * counts) ** 2)) / len(products)
    return float(mean / spread) if len(sums) > 1 and spread > 0 else float("nan")
