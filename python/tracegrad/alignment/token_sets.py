"""Sets of token ids, one for each of T tokens, in few bytes (`TokenSets`): the sampler's support of each token."""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from tracegrad import _core, _validation
from tracegrad.alignment.ragged import Ragged
from tracegrad.errors import ArgumentError


@dataclass(frozen=True, eq=False, repr=False)
class TokenSets:
    """The set of ids from which each of T tokens was sampled; a token without a set is unrestricted.

    A set is stored as its size, its smallest id and the gaps between its ids, in one to three bytes each. A token
    without a set takes one byte.

    Args:
        starts: int64: where set 0, 64, 128, ... begins in `data`, then the end of the last one.
        data: uint8: all sets.
        tokens: T.

    >>> sets = TokenSets.from_rows(Ragged(np.array([0, 2, 2, 3]), np.array([9, 5, 6], np.int32)))
    >>> len(sets), sets[0].tolist(), sets[1].tolist(), sets.take([2, 0])[1].tolist(), sets.data.nbytes
    (3, [5, 9], [], [5, 9], 6)
    """

    starts: NDArray[np.int64]
    data: NDArray[np.uint8]
    tokens: int

    def __len__(self) -> int:
        return self.tokens

    def __repr__(self) -> str:
        return f"TokenSets({self.tokens} tokens, {self.data.nbytes} bytes)"

    def __getitem__(self, token: int) -> NDArray[np.int32]:
        if not -len(self) <= token < len(self):
            raise IndexError(f"token {token} of {len(self)}")
        return self.rows([token % len(self)]).values

    @classmethod
    def from_rows(cls, rows: Ragged) -> "TokenSets":
        """Encode rows of ids, in any order. An empty row means that the token was sampled from the whole vocabulary.

        Raises:
            ArgumentError: if an id is not an integer from 0 to 2^31 - 1.
        """
        values = _validation.integers(rows.values, "the ids of sets", np.int32)
        offsets = np.ascontiguousarray(rows.offsets, np.int64)
        return cls(*_core.token_sets_encode(offsets, values), len(rows))

    @classmethod
    def concatenate(cls, parts: "list[tuple[TokenSets | None, NDArray[np.int64]]]") -> "TokenSets | None":
        """Return the sets of tokens of several parts, in order; None if no part has sets.

        Args:
            parts: the sets of a part, None if none of its tokens is restricted; and the tokens to take from it.
        """
        if all(sets is None for sets, _ in parts):
            return None
        rows = [
            Ragged(np.zeros(len(tokens) + 1, np.int64), np.zeros(0, np.int32)) if sets is None else sets.rows(tokens)
            for sets, tokens in parts
        ]
        return cls.from_rows(Ragged.concatenate(rows))

    def rows(self, tokens: ArrayLike) -> Ragged:
        """Return the sets of some tokens, each ascending: [M] integers, such as `Step.origin`.

        Raises:
            ArgumentError: if a token does not exist.
            FormatError: if the bytes are not those of sets.
        """
        return Ragged(*_core.token_sets_decode(*self._stored(), _indices(tokens)))

    def take(self, tokens: ArrayLike) -> "TokenSets":
        """Return the sets of some tokens, encoded, as `rows`."""
        return TokenSets.from_rows(self.rows(tokens))

    def keys(self, tokens: ArrayLike) -> NDArray[np.int64]:
        """Return [M] a number for the set of each token: 0 without a set, and the same number for equal sets."""
        return _core.token_sets_keys(*self._stored(), _indices(tokens))

    def check(self) -> None:
        """Read all bytes.

        Raises:
            FormatError: if they are not those of T sets.
        """
        _core.token_sets_check(*self._stored())

    def _stored(self) -> tuple[NDArray[np.int64], NDArray[np.uint8], int]:
        return np.require(self.starts, np.int64, ["C", "A"]), np.require(self.data, np.uint8, ["C", "A"]), self.tokens


def _indices(tokens: ArrayLike) -> NDArray[np.int64]:
    return np.ascontiguousarray(np.asarray(tokens, np.int64).reshape(-1))


def support_of(rows: Any, ids: NDArray[np.int32], trainable: NDArray[np.bool_]) -> TokenSets | None:
    """Check the support that a caller passes, and encode it.

    Args:
        rows: `TokenSets`, or a `Ragged` with one row per token; None for none.
        ids: [T].
        trainable: [T].

    Raises:
        ArgumentError: if there is not one set for each token, or a trained token is not in its own set.
    """
    if rows is None:
        return None
    rows = _validation.instance(rows, "support", (TokenSets, Ragged), "Pass a Ragged with the ids of each token.")
    sets = TokenSets.from_rows(rows) if isinstance(rows, Ragged) else rows
    if len(sets) != len(ids):
        raise ArgumentError(
            f"TG-ALIGN-040: support has {len(sets)} rows for {len(ids)} tokens. Pass one row for each token, empty "
            "where the token was sampled from the whole vocabulary."
        )
    terms = np.flatnonzero(trainable)
    found = sets.rows(terms)
    lengths = np.diff(found.offsets)
    own = np.repeat(ids[terms], lengths) == found.values
    has_own = np.zeros(len(terms), np.bool_)
    has_own[np.repeat(np.arange(len(terms)), lengths)[own]] = True
    wrong = np.flatnonzero((lengths > 0) & ~has_own)
    if len(wrong):
        token = int(terms[wrong[0]])
        raise ArgumentError(
            f"TG-ALIGN-041: token {token} has the id {int(ids[token])}, which is not among the ids of its support, and "
            f"{len(wrong)} tokens are like it. It cannot have been sampled from them. Pass the support of each token."
        )
    return sets
