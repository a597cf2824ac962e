"""Predictions of a model at sampled tokens: the token's logprob, and the most probable ids with theirs."""

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

LISTED = 20
"""Number of most probable ids of a token that was sampled from the whole vocabulary."""
LISTED_TRUNCATED = 256
"""Number of most probable ids among which the ids must be that top_p, top_k and min_p keep."""


@dataclass(frozen=True)
class Predictions:
    """Predictions at M sampled tokens, in nats.

    Args:
        logprobs: [M] float32, of the sampled token; NaN if it is not among the ids from which the sampler draws.
        ids: [M, K] int32, the most probable ids, the most probable first; -1 where there are fewer.
        top_logprobs: [M, K] float32, their logprobs; -inf where there are fewer.
        sampled: [M] int32, the sampled ids.
    """

    logprobs: NDArray[np.float32]
    ids: NDArray[np.int32]
    top_logprobs: NDArray[np.float32]
    sampled: NDArray[np.int32]

    def __len__(self) -> int:
        return len(self.logprobs)

    def places(self) -> NDArray[np.int64]:
        """Return [M]: the place of each sampled id in its list, and K if it is not in it."""
        equal = self.ids == self.sampled[:, None]
        return np.where(equal.any(1), equal.argmax(1), self.ids.shape[1])

    def take(self, rows: NDArray[np.integer] | NDArray[np.bool_]) -> "Predictions":
        """Return the predictions of some tokens."""
        return Predictions(*(getattr(self, name)[rows] for name in ("logprobs", "ids", "top_logprobs", "sampled")))


@dataclass(frozen=True)
class Truncation:
    """The truncation of M tokens, as vLLM applies it: min_p, then top_k, then top_p of what remains.

    Args:
        top_p: [M] float64, 1 for none.
        top_k: [M] int64, 0 for none.
        min_p: [M] float64, 0 for none.
    """

    top_p: NDArray[np.float64]
    top_k: NDArray[np.int64]
    min_p: NDArray[np.float64]

    @property
    def is_active(self) -> NDArray[np.bool_]:
        """[M] bool: whether a token was sampled from a part of the vocabulary."""
        return (self.top_p < 1) | (self.top_k > 0) | (self.min_p > 0)

    def options(self, row: int) -> dict[str, float]:
        """Return the options of one token that have an effect, by name."""
        values = {"top_p": float(self.top_p[row]), "top_k": int(self.top_k[row]), "min_p": float(self.min_p[row])}
        neutral = {"top_p": 1.0, "top_k": 0, "min_p": 0.0}
        return {name: value for name, value in values.items() if value != neutral[name]}

    def take(self, rows: NDArray[np.integer]) -> "Truncation":
        """Return the truncation of some tokens."""
        return Truncation(self.top_p[rows], self.top_k[rows], self.min_p[rows])


def kept_counts(top_logprobs: NDArray[np.float32], truncation: Truncation) -> NDArray[np.int64]:
    """Return [M]: how many of the most probable ids the sampler keeps, at least 1; -1 if the list is too short to know.

    Args:
        top_logprobs: [M, K], at the sampling temperature, the most probable first, of the whole vocabulary.
        truncation: of these M tokens.

    >>> logprobs = np.log(np.array([[0.5, 0.3, 0.15, 0.04]], np.float32))
    >>> options = (0.7, 0, 0.0), (1.0, 3, 0.0), (1.0, 0, 0.2), (0.999, 0, 0.0)
    >>> truncation = Truncation(*(np.array(column) for column in zip(*options, strict=True)))
    >>> kept_counts(np.repeat(logprobs, 4, 0), truncation).tolist()
    [2, 3, 3, -1]
    """
    listed = top_logprobs.shape[1]
    p = np.exp(top_logprobs.astype(np.float64))
    place, unknown = np.arange(listed)[None], listed + 1
    by_min_p = (p >= truncation.min_p[:, None] * p[:, :1]).sum(1)
    # No other id reaches min_p if all of them together do not.
    ends = (by_min_p < listed) | (1 - p.sum(1) < truncation.min_p * p[:, 0])
    by_min_p = np.where((truncation.min_p > 0) & ends, by_min_p, unknown)
    by_top_k = np.where((truncation.top_k > 0) & (truncation.top_k <= listed), truncation.top_k, unknown)
    limit = np.minimum(by_min_p, by_top_k)
    p = np.where(place < limit[:, None], p, 0)
    has_limit = (truncation.min_p > 0) | (truncation.top_k > 0)
    needed = truncation.top_p * np.where(has_limit, p.sum(1), 1.0)
    reached = np.cumsum(p, 1)
    by_top_p = np.maximum(((reached - p < needed[:, None]) & (p > 0)).sum(1), 1)
    has_top_p = truncation.top_p < 1
    is_known = ~(has_limit & (limit == unknown)) & np.where(has_top_p, reached[:, -1] >= needed, limit < unknown)
    return np.where(is_known, np.where(has_top_p, by_top_p, limit), -1).astype(np.int64)


def over_kept(predictions: Predictions, kept: NDArray[np.int64]) -> Predictions:
    """Return the predictions over the first `kept` [M] ids of each list: the others have probability 0."""
    inside = np.arange(predictions.ids.shape[1])[None] < kept[:, None]
    with np.errstate(divide="ignore"):
        mass = np.log(np.where(inside, np.exp(predictions.top_logprobs.astype(np.float64)), 0).sum(1))
    place = predictions.places()
    # The differences of float32 values can be above 0 by rounding.
    logprobs = np.where(place < kept, np.minimum(predictions.logprobs - mass, 0), np.nan)
    top_logprobs = np.where(inside, np.minimum(predictions.top_logprobs - mass[:, None], 0), -np.inf)
    return replace(
        predictions,
        logprobs=logprobs.astype(np.float32),
        ids=np.where(inside, predictions.ids, -1).astype(np.int32),
        top_logprobs=top_logprobs.astype(np.float32),
    )


def over_listed(predictions: Predictions, kept: NDArray[np.int64]) -> Predictions:
    """Return predictions in which the probabilities of the listed ids sum to 1, where `kept` [M] is not -1."""
    with np.errstate(divide="ignore"):
        mass = np.log(np.exp(predictions.top_logprobs.astype(np.float64)).sum(1))
    top = np.where((kept >= 0)[:, None], predictions.top_logprobs - mass[:, None], predictions.top_logprobs)
    return replace(predictions, top_logprobs=top.astype(np.float32))
