"""The columns of all traces of a run, end to end: what a plan, a filter or an advantage asks of them.

Here are `Catalog` and the numbering of groups by their keys. The columns are those of `trace_columns`; no tokens, no
files, and no Python object per trace.
"""

from dataclasses import dataclass
from functools import cached_property
from hashlib import blake2b
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]

HASHED = (
    *("group", "branches", "tokens", "longest", "terms", "known", "turns", "tier", "foreign", "version_min"),
    *("version_max", "rewards", "logprob_kind", "temperature", "reshaped", "ending", "max_id", "media", "source"),
)
"""The columns that a plan is made from."""


@dataclass(frozen=True, eq=False)
class Catalog:
    """One row a trace, of R traces with K rewards; the columns as `trace_columns.columns_of` counts them.

    Args:
        group: [R] int32: the number of its group.
        rewards: [R, K] float32, NaN where a trace lacks one; `reward_names` gives the columns.
        branches, tokens, longest, terms, known, turns, version_min, version_max, max_id: [R] int32.
        tier, logprob_kind, ending: [R] uint8.
        temperature: [R] float32.
        reshaped: [R] uint32.
        foreign, media: [R] bool.
        source: [R] int32: the number of the input that it is of.
    """

    group: NDArray[np.int32]
    rewards: NDArray[np.float32]
    reward_names: tuple[str, ...]
    branches: NDArray[np.int32]
    tokens: NDArray[np.int32]
    longest: NDArray[np.int32]
    terms: NDArray[np.int32]
    known: NDArray[np.int32]
    turns: NDArray[np.int32]
    tier: NDArray[np.uint8]
    foreign: NDArray[np.bool_]
    version_min: NDArray[np.int32]
    version_max: NDArray[np.int32]
    logprob_kind: NDArray[np.uint8]
    temperature: NDArray[np.float32]
    reshaped: NDArray[np.uint32]
    ending: NDArray[np.uint8]
    max_id: NDArray[np.int32]
    media: NDArray[np.bool_]
    source: NDArray[np.int32]

    @property
    def traces(self) -> int:
        """Number of traces R."""
        return len(self.group)

    @cached_property
    def first_token(self) -> NDArray[np.int64]:
        """[R+1]: where the tokens of each trace begin among those of all."""
        return _offsets(self.tokens)

    @cached_property
    def first_branch(self) -> NDArray[np.int64]:
        """[R+1]: where its branches begin."""
        return _offsets(self.branches)

    @cached_property
    def first_term(self) -> NDArray[np.int64]:
        """[R+1]: where its terms begin."""
        return _offsets(self.terms)

    @property
    def all_terms(self) -> int:
        """Terms of all traces."""
        return int(self.terms.sum(dtype=np.int64))

    @cached_property
    def hash(self) -> str:
        """The same where every column is: what ranks compare before they plan."""
        digest = blake2b(digest_size=16)
        for name in HASHED:
            digest.update(np.ascontiguousarray(getattr(self, name)).data)
        digest.update("\0".join(self.reward_names).encode("utf-8", "surrogatepass"))
        return digest.hexdigest()


def numbered(keys: NDArray[np.uint64]) -> NDArray[np.int32]:
    """[R] int32: groups by their keys, numbered from 0 in the order in which they first appear.

    Args:
        keys: [R, 2] uint64.

    >>> numbered(np.array([[7, 1], [7, 1], [2, 1], [7, 2], [7, 1]], np.uint64)).tolist()
    [0, 0, 1, 2, 0]
    """
    rows = len(keys)
    if not rows:
        return np.zeros(0, np.int32)
    new = np.concatenate([[True], (keys[1:] != keys[:-1]).any(1)])  # neighbours of one group are one run
    first = np.flatnonzero(new)
    runs = keys[first]
    order = np.lexsort((runs[:, 1], runs[:, 0]))
    apart = np.concatenate([[True], (runs[order[1:]] != runs[order[:-1]]).any(1)])
    earliest = np.minimum.reduceat(order, np.flatnonzero(apart))
    number = np.empty(len(earliest), np.int32)
    number[np.argsort(earliest)] = np.arange(len(earliest), dtype=np.int32)
    of_run = np.empty(len(runs), np.int32)
    of_run[order] = number[np.cumsum(apart) - 1]
    return np.repeat(of_run, np.diff(np.append(first, rows)))


def _offsets(counts: NDArray[np.int32]) -> NDArray[np.int64]:
    out = np.zeros(len(counts) + 1, np.int64)
    np.cumsum(counts, out=out[1:])
    return out
