"""Chunks of a streamed answer that stand as records of their own, or as a list: put together into one call.

The core reads a list of chunks as the response of a call; here they are gathered by their id.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from tracegrad.errors import FormatError
from tracegrad.inputs import chat
from tracegrad.tables import to_json
from tracegrad.trace import Line, located

_KINDS = ("chat.completion.chunk", "text_completion.chunk")
MOST_CHUNKS = 1_000_000
Gathered = tuple[Line, bytes, bytes, dict[str, Any]]
"""A call with the place and the bytes of its first chunk, and its own."""


def is_chunk(record: Any) -> bool:
    """Whether a record is one chunk of an OpenAI-shaped stream."""
    if not isinstance(record, Mapping) or "messages" in record or "request" in record:
        return False
    choices = record.get("choices")
    is_delta = isinstance(choices, list) and bool(choices) and "delta" in chat.table(choices[0])
    return is_delta or record.get("object") in _KINDS


def is_list(record: Any) -> bool:
    """Whether a record is a list of chunks."""
    return isinstance(record, list) and bool(record) and is_chunk(record[0])


def of_list(record: Any) -> list[dict[str, Any]] | None:
    """One call for each id, in the order of their first chunks; None of what is no list of chunks."""
    if not is_list(record):
        return None
    calls: dict[Any, list[Any]] = {}
    for chunk in record:
        calls.setdefault(chat.table(chunk).get("id"), []).append(chunk)
    # The prompt of such a call is known where the first chunk has its ids.
    return [{"response": chunks} for chunks in calls.values()]


class Gather:
    """Chunks that stand line by line: those of one id that follow one another are one call."""

    def __init__(self) -> None:
        self._held: list[Any] = []
        self._line: Line = 0
        self._raw = b""

    def take(self, line: Line, raw: bytes, chunk: Mapping[str, Any]) -> Iterator[Gathered]:
        """Takes a chunk; gives the call before, where this one begins another."""
        if self._held and chunk.get("id") != self._held[0].get("id"):
            yield from self.rest()
        if not self._held:
            self._line, self._raw = line, raw
        if len(self._held) >= MOST_CHUNKS:
            raise FormatError(
                f"{located('line', line)}: a stream of more than {MOST_CHUNKS:,} chunks. It would have to be held "
                "whole. Split it."
            )
        self._held.append(chunk)

    def rest(self) -> Iterator[Gathered]:
        """The call that is held."""
        if self._held:
            held, self._held = self._held, []
            call = {"response": held}
            yield self._line, self._raw, to_json(call), call
