"""What the checks ask of a tokenizer, once for a file: `Vocabulary`."""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tracegrad.errors import TemplateError
from tracegrad.tokenizer import Tokenizer


@dataclass(frozen=True)
class Vocabulary:
    """A tokenizer as arrays.

    Args:
        tokenizer: of the model.
        special: [V] bool, special tokens.
        size: [V] int64, bytes that each id spells.
        injected: what the template writes before a first user message that no message says, "" if nothing.
    """

    tokenizer: Tokenizer
    special: NDArray[np.bool_]
    size: NDArray[np.int64]
    injected: str

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> "Vocabulary":
        """Asks for every id, and renders two user messages."""
        ids, core = range(len(tokenizer)), tokenizer._core
        special = np.fromiter(map(core.is_special, ids), bool)
        size = np.fromiter((len(core.token_bytes(i) or b"") for i in ids), np.int64)
        return cls(tokenizer, special, size, injected(tokenizer))

    def spelled(self, ids: NDArray[Any]) -> NDArray[np.int64]:
        """[n] bytes that each of `ids` [n] spells; none for ids that only the model has."""
        inside = (ids >= 0) & (ids < len(self.size))
        return np.where(inside, self.size[np.where(inside, ids, 0)], 0)

    def is_special(self, ids: NDArray[Any]) -> NDArray[np.bool_]:
        """[n] bools: which of `ids` [n] are special tokens; none outside the vocabulary."""
        inside = (ids >= 0) & (ids < len(self.special))
        return inside & self.special[np.where(inside, ids, 0)]


def injected(tokenizer: Tokenizer) -> str:
    """What the template writes before the first of the user's words and not before later ones; "" if no words.

    The text before the first user message, less what stands before the second one, less special tokens.
    """
    user = {"role": "user", "content": "first words"}
    rest = [{"role": "assistant", "content": "an answer"}, {"role": "user", "content": "second words"}]
    try:
        text = tokenizer.render([user, *rest]).text
    except TemplateError:
        return ""
    before, _, after = text.partition("first words")
    between = after.partition("an answer")[2].partition("second words")[0]
    shared = 0
    while shared < min(len(before), len(between)) and before[-1 - shared] == between[-1 - shared]:
        shared += 1
    ids = tokenizer.encode(before[: len(before) - shared])
    plain = tokenizer.decode([i for i in ids.tolist() if not tokenizer._core.is_special(i)]).strip()
    return plain if sum(character.isalpha() for character in plain) >= 8 else ""
