"""How certain the tokens of a text are: the probability of its other segmentations beside the canonical one."""

from collections.abc import Sequence
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from tracegrad.alignment.ragged import Ragged
from tracegrad.alignment.tokenizer import Tokenizer
from tracegrad.missing_logprobs.predictions import Predictions

_MAX_BYTES = 64
"""Longest vocabulary entry that is tried as the next token."""


class Vocabulary:
    """The ids that have each byte string.

    Args:
        tokenizer: its ordinary entries are used; special tokens are not part of a text.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    def _bytes(self, id_: int) -> bytes:
        """Return the bytes of an ordinary entry, and none for an added or special one."""
        core = self._tokenizer._core
        return b"" if core.is_special(id_) or core.is_added(id_) else core.token_bytes(id_) or b""

    @cached_property
    def _ids(self) -> dict[bytes, list[int]]:
        ids: dict[bytes, list[int]] = {}
        for id_ in range(len(self._tokenizer)):
            if text := self._bytes(id_):
                ids.setdefault(text, []).append(id_)
        return ids

    @cached_property
    def _longest(self) -> int:
        return min(_MAX_BYTES, max(map(len, self._ids), default=0))

    def continuations(self, tokens: Sequence[int]) -> Ragged:
        """Return for each token all ids whose bytes begin the text from there on, this token's id among them.

        Args:
            tokens: the ids of a text; an id without bytes, such as a stop token, ends the text and has itself alone.
        """
        texts = [self._bytes(int(id_)) for id_ in tokens]
        rows: list[list[int]] = []
        for index, (id_, text) in enumerate(zip(tokens, texts, strict=True)):
            row = {int(id_)}
            if text:
                rest, following = text, index + 1
                while len(rest) < self._longest and following < len(texts) and texts[following]:
                    rest, following = rest + texts[following], following + 1
                for length in range(1, min(len(rest), self._longest) + 1):
                    row.update(self._ids.get(rest[:length], ()))
            rows.append(sorted(row))
        values = np.array([id_ for row in rows for id_ in row], np.int32)
        return Ragged(np.cumsum([0, *map(len, rows)]).astype(np.int64), values)


def other_segmentations(predictions: Predictions, continuations: Ragged) -> NDArray[np.float64]:
    """Return [M] nats: log of the probability of all ids that continue the text, over that of the token.

    The sum over the tokens of a text is how much less probable its tokens are than the text, if the rest of the text is
    as probable after each of these ids. An id that is not listed counts with the probability of the last listed id.

    Args:
        predictions: of M tokens.
        continuations: M rows, from `Vocabulary.continuations`.

    >>> top = np.log(np.array([[0.6, 0.3, 0.1]], np.float32))
    >>> three = Predictions(top[:, 0], np.array([[7, 8, 9]], np.int32), top, np.array([7], np.int32))
    >>> np.exp(other_segmentations(three, Ragged(np.array([0, 2]), np.array([7, 8])))).round(4).tolist()  # 0.9 / 0.6
    [1.5]
    """
    row = np.repeat(np.arange(len(predictions)), np.diff(continuations.offsets))
    ids = np.asarray(continuations.values, np.int64)
    listed = predictions.ids[row] == ids[:, None]
    place = np.where(listed.any(1), listed.argmax(1), predictions.ids.shape[1] - 1)
    p = np.exp(predictions.top_logprobs[row, place].astype(np.float64))
    others = np.bincount(row, np.where(ids == predictions.sampled[row], 0, p), len(predictions))
    with np.errstate(divide="ignore", over="ignore"):
        return np.log1p(others / np.exp(predictions.logprobs.astype(np.float64)))
