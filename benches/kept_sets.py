"""Make sets of kept ids like those of prime-rl's samplers, for support_size.py and support_cost.py."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tracegrad import Tokenizer
from tracegrad.alignment.ragged import Ragged

VOCABULARY = 151_936
SHARED = Path(__file__).parents[2] / "shared" / "data"
QWEN = SHARED / "tokenizers" / "qwen-agent-0.0.34"
TEXTS = SHARED / "trajectories"
SINGLES = 0.45
# Sizes above 1 are lognormal: with these two the mean of all sizes is 8, the median 2 and the 99th percentile 82.
MEDIAN, SIGMA = 6.6, 1.21


def sizes(count: int, random: np.random.Generator) -> NDArray[np.int64]:
    """Return [count] sizes of kept sets: mean 8, median 2, 99th percentile 82, 45 % of them 1."""
    drawn = np.maximum(2, np.rint(random.lognormal(np.log(MEDIAN), SIGMA, count))).astype(np.int64)
    return np.where(random.random(count) < SINGLES, 1, np.minimum(drawn, VOCABULARY // 4))


def texts(value: Any) -> Iterator[str]:
    """Return the strings of 20 characters or more in a JSON value: the messages and tool results of trajectories."""
    if isinstance(value, str):
        yield from [value] if len(value) >= 20 else []
    elif isinstance(value, dict | list):
        for each in value.values() if isinstance(value, dict) else value:
            yield from texts(each)


def unigrams(source: str) -> NDArray[np.float64]:
    """Return [151936] the probability of each id.

    Args:
        source: "qwen": counts of real trajectories in Qwen's tokens, from ../shared/data; "zipf": 1 / (id + 1);
            "uniform": all ids alike.
    """
    if source in ("zipf", "uniform"):
        weights = 1.0 / np.arange(1, VOCABULARY + 1) ** (source == "zipf")
        return weights / weights.sum()
    found = [text for path in sorted(TEXTS.iterdir()) for text in texts(json.loads(path.read_text()))]
    ids, _ = Tokenizer.from_pretrained(QWEN).encode_batch(found)
    counts = np.bincount(ids, minlength=VOCABULARY)
    return counts / counts.sum()


def sources() -> tuple[str, ...]:
    """Return the sources of frequencies that exist on this machine."""
    return ("qwen", "zipf", "uniform") if QWEN.exists() and TEXTS.exists() else ("zipf", "uniform")


def kept_sets(count: int, probabilities: NDArray[np.float64], random: np.random.Generator) -> Ragged:
    """Return `count` sets of distinct ids, drawn one after the other by their probabilities.

    The first id of a set is the sampled one. A set has at most half of the ids that occur.
    """
    wanted = np.minimum(sizes(count, random), np.count_nonzero(probabilities) // 2)
    cumulated = np.cumsum(probabilities)
    rows = []
    for size in wanted.tolist():
        row: dict[int, None] = {}
        while len(row) < size:
            drawn = np.searchsorted(cumulated, random.random(2 * size) * cumulated[-1], side="right")
            row.update(dict.fromkeys(drawn.tolist()))
        rows.append(list(row)[:size])
    offsets = np.concatenate([[0], np.cumsum(wanted)]).astype(np.int64)
    return Ragged(offsets, np.array([token for row in rows for token in row], np.int32))
