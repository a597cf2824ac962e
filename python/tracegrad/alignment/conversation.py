"""A conversation while it is played: the ids of its next prompt, in which every sampled id stands as it was drawn.

The splice is `align`'s, so that what is played with these prompts aligns to one branch. No server is asked here;
`rollout.tokens` does.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from tracegrad import _core, _validation
from tracegrad.alignment.tokenizer import Message, Tokenizer
from tracegrad.errors import ArgumentError


@dataclass(frozen=True)
class Fork:
    """A prompt that the template wrote anew: the ids before it, sampled ones among them, are not in it.

    Args:
        turn: how many turns had been sampled before it.
        reason: as in `Sequences.drift`, such as "R10 think_stripped".
        detail: what was found.
    """

    turn: int
    reason: str
    detail: str


class Conversation:
    """Messages of which some were sampled, each with its ids; gives the ids after which the next is sampled.

    A prompt is the ids of the one before, the ids that were sampled, and the text that the template writes from there
    to the next turn of the assistant, tokenised. No sampled id is tokenised again, however its text would be. A stop
    token that was sampled stays; where none was (cut by length), the template's is added. Where the template does not
    keep what was sampled (it drops earlier thoughts, or shows another text than was drawn), the prompt is the whole
    conversation tokenised anew, and `forks` says why: `align` opens a branch there too.

    Args:
        tokenizer: of the model that samples, with its chat template.
        messages: before the first turn; text alone.
        tools: JSON schemas.
        kwargs: further template variables, such as `enable_thinking=False`.

    Raises:
        ArgumentError: for messages that JSON cannot say, or that hold pictures, sound or video.

    Source: as TRL 1.16 and prime-rl's renderers splice, with the template's own text of the whole conversation in
    place of a dummy's, so that any template can be asked.

    >>> tokenizer = Tokenizer.from_pretrained("examples/quickstart/model")
    >>> talk = Conversation(tokenizer, [{"role": "user", "content": "2+2?"}])
    >>> before = talk.prompt_ids().tolist()
    >>> drawn = [*tokenizer.encode("4").tolist(), *tokenizer.eos_ids]
    >>> after = talk.append(drawn).append([{"role": "user", "content": "Sure?"}]).prompt_ids().tolist()
    >>> after[: len(before) + len(drawn)] == before + drawn, talk.forks
    (True, ())
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        messages: Sequence[Message] = (),
        tools: Sequence[Mapping[str, Any]] | None = None,
        **kwargs: Any,
    ) -> None:
        if not isinstance(tokenizer, Tokenizer):
            raise ArgumentError(
                f"tokenizer is a {type(tokenizer).__name__}. Ids are its own. Pass tracegrad.Tokenizer's."
            )
        self._tokenizer = tokenizer
        self._messages: list[Any] = _listed(messages, "messages")
        schemas = None if tools is None else _listed(tools, "tools")
        self._core = _core.Conversation(tokenizer._core, self._messages, schemas, kwargs)

    def append(self, said: ArrayLike | Sequence[Message] | Message, message: Message | None = None) -> "Conversation":
        """Adds what was said; returns itself. What is refused changes nothing.

        Args:
            said: the ids that were sampled after `prompt_ids()`, [T] integers, as drawn and with their stop token; or
                messages that were not sampled.
            message: the assistant message that servers' parsers made of the ids; by default their text as content,
                without the special tokens at its end.

        Raises:
            ArgumentError: for an id that the model does not have, with its turn and token; a message that is not an
                assistant's; as for the class.
            TemplateError: as for `prompt_ids`, where ids are added.
        """
        if message is None and not _holds_ids(said):
            messages = _listed([said] if isinstance(said, Mapping) else said, "messages")
            self._core.append(messages)
            self._messages += messages
            return self
        ids = _validation.integers(said, "ids")
        message = self._shown(ids) if message is None else message
        self._core.append_sampled(ids, message)
        self._messages.append(message)
        return self

    def prompt_ids(self) -> NDArray[np.int32]:
        """The ids after which the next turn is sampled, [T] int32.

        Raises:
            TemplateError: if the template raises, fails, or does not end, with the turn.
        """
        return self._core.prompt_ids()

    @property
    def messages(self) -> list[Message]:
        """All messages in order, those that were sampled among them."""
        return list(self._messages)

    @property
    def forks(self) -> tuple[Fork, ...]:
        """Where the template did not keep what was sampled, up to the last prompt that was asked for."""
        return tuple(Fork(*fork) for fork in self._core.forks())

    def __copy__(self) -> "Conversation":
        other = object.__new__(type(self))
        other._tokenizer, other._messages = self._tokenizer, list(self._messages)
        other._core = self._core.copy()
        return other

    def __len__(self) -> int:
        return len(self._messages)

    def __repr__(self) -> str:
        return f"Conversation({len(self)} messages, {len(self.forks)} forks)"

    def _shown(self, ids: NDArray[np.int64]) -> Message:
        """The message whose content is the text of the ids, without the special tokens that end it."""
        end = len(ids)
        while end and 0 <= ids[end - 1] < len(self._tokenizer) and self._tokenizer._core.is_special(int(ids[end - 1])):
            end -= 1
        known = ids[:end]
        if known.size and (known.min() < 0 or known.max() >= len(self._tokenizer)):
            known = known[:0]  # refused by the core, which says which id it is
        return {"role": "assistant", "content": self._tokenizer.decode(known)}


def _listed(values: Any, name: str) -> list[Any]:
    if not isinstance(values, list | tuple):
        raise ArgumentError(f"{name} is a {type(values).__name__}. What it holds is not known. Pass a list of dicts.")
    return list(values)


def _holds_ids(said: Any) -> bool:
    """Whether these are ids rather than messages; text, which is neither, is refused."""
    if isinstance(said, str | bytes):
        raise ArgumentError(
            f"a text, {said!r:.100}, is appended. Who said it is not known. Append ids, or messages with their roles."
        )
    if isinstance(said, Mapping):
        return False
    if isinstance(said, list | tuple):
        return bool(said) and not isinstance(said[0], Mapping)
    return True
