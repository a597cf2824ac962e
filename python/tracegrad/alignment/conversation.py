"""Build the prompt ids of a multi-turn conversation, and keep every sampled id unchanged.

It splices ids as `align` does, so that a trajectory with these prompts aligns to one branch. It calls no server.
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
class PromptFork:
    """A prompt that was rendered and tokenised from scratch, so it does not start with the previous ids.

    Args:
        turn: number of turns sampled before it.
        reason: as in `Sequences.alignment_report`, such as "R10 think_stripped".
        detail: a description of the mismatch.
    """

    turn: int
    reason: str
    detail: str


class Conversation:
    """A conversation with sampled and other messages. It returns the prompt ids of the next turn.

    A prompt consists of the previous prompt's ids, the sampled ids, and the tokens of the text that the template writes
    up to the next assistant turn. Sampled ids are never tokenised again. A sampled stop token is kept; if there is none
    (the turn was cut by length), the template's stop token is added. If the template does not keep the sampled text
    (it drops earlier thoughts, or renders other text), the full conversation is tokenised from scratch. `forks` lists
    the reasons. `align` starts a new branch there too.

    Args:
        tokenizer: of the model that samples, with its chat template.
        messages: the messages before the first turn; text only.
        tools: JSON schemas.
        kwargs: further template variables, such as `enable_thinking=False`.

    Raises:
        ArgumentError: for messages that JSON cannot represent, or that contain images, audio or video.

    Source: TRL 1.16 and prime-rl's renderers splice in the same way. tracegrad renders the full conversation instead of
    a dummy one, so that it works with any template.

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
                f"TG-ALIGN-004: tokenizer is a {type(tokenizer).__name__}. Ids are its own. Pass tracegrad.Tokenizer's."
            )
        self._tokenizer = tokenizer
        self._messages: list[Any] = _as_list(messages, "messages")
        schemas = None if tools is None else _as_list(tools, "tools")
        self._core = _core.Conversation(tokenizer._core, self._messages, schemas, kwargs)

    def append(self, turn: ArrayLike | Sequence[Message] | Message, message: Message | None = None) -> "Conversation":
        """Add a sampled turn or other messages, and return the conversation. An error leaves it unchanged.

        Args:
            turn: the ids [T] sampled after `prompt_ids()`, unchanged and with their stop token; or messages that were
                not sampled.
            message: the assistant message that the server parsed from the ids. The default has the text of the ids as
                content, without the special tokens at its end.

        Raises:
            ArgumentError: for an id that the model does not have, with its turn and token; for a sampled message that
                is not an assistant message; for messages that the class rejects.
            TemplateError: as for `prompt_ids`, if ids are added.
        """
        if message is None and not _is_ids(turn):
            messages = _as_list([turn] if isinstance(turn, Mapping) else turn, "messages")
            self._core.append(messages)
            self._messages += messages
            return self
        ids = _validation.integers(turn, "ids")
        message = self._message_of(ids) if message is None else message
        self._core.append_sampled(ids, message)
        self._messages.append(message)
        return self

    def prompt_ids(self) -> NDArray[np.int32]:
        """Return the prompt ids of the next turn, [T] int32.

        Raises:
            TemplateError: if the template raises, fails, or does not terminate; the error names the turn.
        """
        return self._core.prompt_ids()

    @property
    def messages(self) -> list[Message]:
        """All messages in order, sampled ones included."""
        return list(self._messages)

    @property
    def forks(self) -> tuple[PromptFork, ...]:
        """The prompts in which the template did not keep sampled text, up to the last call of `prompt_ids`."""
        return tuple(PromptFork(**fork) for fork in self._core.forks())

    def __copy__(self) -> "Conversation":
        copied = object.__new__(type(self))
        copied._tokenizer, copied._messages = self._tokenizer, list(self._messages)
        copied._core = self._core.copy()
        return copied

    def __len__(self) -> int:
        return len(self._messages)

    def __repr__(self) -> str:
        return f"Conversation({len(self)} messages, {len(self.forks)} forks)"

    def _message_of(self, ids: NDArray[np.int64]) -> Message:
        """Return an assistant message with the text of the ids, without the special tokens at its end."""
        end = len(ids)
        while end and 0 <= ids[end - 1] < len(self._tokenizer) and self._tokenizer._core.is_special(int(ids[end - 1])):
            end -= 1
        text_ids = ids[:end]
        if text_ids.size and (text_ids.min() < 0 or text_ids.max() >= len(self._tokenizer)):
            text_ids = text_ids[:0]  # the core rejects these ids, with an error that names the id
        return {"role": "assistant", "content": self._tokenizer.decode(text_ids)}


def _as_list(values: Any, name: str) -> list[Any]:
    if not isinstance(values, list | tuple):
        raise ArgumentError(
            f"TG-ALIGN-005: {name} is a {type(values).__name__}. What it holds is not known. Pass a list of dicts."
        )
    return list(values)


def _is_ids(said: Any) -> bool:
    """Return whether the argument of `append` is ids, not messages. Raise an ArgumentError for text."""
    if isinstance(said, str | bytes):
        raise ArgumentError(
            f"TG-ALIGN-006: a text, {said!r:.100}, is appended. Who said it is not known. Append ids, or "
            f"messages with their roles."
        )
    if isinstance(said, Mapping):
        return False
    if isinstance(said, list | tuple):
        return bool(said) and not isinstance(said[0], Mapping)
    return True
