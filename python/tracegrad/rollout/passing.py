"""What the proxy asks in addition, and takes out of the answer again: plain functions over requests and responses.

Shapes are vLLM's: what nobody asked for stands there as null, whole and in the chunks of a stream. Called by `proxy`.
"""

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from tracegrad.errors import shown
from tracegrad.rollout import shapes
from tracegrad.rollout.jsons import orjson
from tracegrad.rollout.session import CHAT, COMPLETIONS

_FIELDS = (b"data:", b"event:", b"id:", b"retry:", b":", b"data", b"event", b"id", b"retry")
"""How lines of an event begin; a name alone has an empty value."""
Wrong = Callable[[Mapping[str, Any]], str | None]


class MalformedAnswer(ValueError):
    """An answer of a server that is not what its API says; the text says what is wrong with it."""


@dataclass(frozen=True)
class Road:
    """One kind of request.

    Args:
        path: at the server.
        asked: what is asked whatever the client says; empty where the request goes as it came.
        wrong_in, wrong_in_chunk: say what is wrong with a whole answer, and with a chunk of a stream.
    """

    path: str
    asked: Mapping[str, Any]
    wrong_in: Wrong
    wrong_in_chunk: Wrong

    def error(self, message: str) -> bytes:
        """Return the event that ends a stream by an error, in the form that clients of this API read."""
        error: dict[str, Any] = {"message": shown(message)[:1000], "type": "upstream_error", "param": None, "code": 502}
        if self.path == "/v1/messages":
            return b"event: error\ndata: " + dumped({"type": "error", "error": error}) + b"\n\n"
        if self.path == "/v1/responses":
            return b"event: error\ndata: " + dumped({**error, "type": "error", "error": error}) + b"\n\n"
        return b"data: " + dumped({"error": error}) + b"\n\n"


ROADS = {
    road.path: road
    for road in (
        Road("/v1/chat/completions", CHAT, shapes.wrong_in_chat, shapes.wrong_in_chat_chunk),
        Road("/v1/completions", COMPLETIONS, shapes.wrong_in_completion, shapes.wrong_in_completion_chunk),
        Road("/v1/responses", {}, shapes.wrong_in_response, shapes.wrong_in_response),
        Road("/v1/messages", {}, shapes.wrong_in_message, shapes.wrong_in_message),
    )
}


class Added:
    """What a client did not ask for, by its request.

    >>> Added({"messages": []}, CHAT).taken_out({"choices": [{"token_ids": [1], "logprobs": {}}], "prompt_token_ids": [2]})
    {'choices': [{'token_ids': None, 'logprobs': None}], 'prompt_token_ids': None}
    """  # noqa: E501

    def __init__(self, body: Mapping[str, Any], asked: Mapping[str, Any]) -> None:
        chat = "top_logprobs" in asked
        told = body.get("logprobs")
        self.logprobs = "logprobs" in asked and not (told if chat else told is not None)
        self.ids = "return_token_ids" in asked and not body.get("return_token_ids")
        self._chat = chat

    def __bool__(self) -> bool:
        return self.logprobs or self.ids

    def taken_out(self, response: dict[str, Any]) -> dict[str, Any]:
        """A response, or a chunk of one, as the client would have got it; what is given is not changed."""
        out = dict(response)
        if self.ids and "prompt_token_ids" in out:
            out["prompt_token_ids"] = None
        if isinstance(choices := out.get("choices"), list):
            out["choices"] = [self._choice(one) if isinstance(one, dict) else one for one in choices]
        return out

    def _choice(self, choice: dict[str, Any]) -> dict[str, Any]:
        out = dict(choice)
        for key in ("token_ids", "prompt_token_ids") if self.ids else ():
            if key in out:
                out[key] = None
        if self.logprobs and "logprobs" in out:
            out["logprobs"] = None
        return out

    def alone(self, chunk: dict[str, Any]) -> bool:
        """Whether a chunk carries nothing but what was added: the server would not have sent it."""
        choices = chunk.get("choices")
        if not (self._chat and self.ids and self.logprobs and choices):
            return False
        return all(choice.get("delta") == {} and choice.get("finish_reason") is None for choice in choices)


class Events:
    """A stream of server-sent events while it passes: what the client gets, what is recorded, how many tokens.

    `text` is what came, whole events only; `tokens` how many ids its chunks list. An event that is not what the API
    says is not in `text`: whoever reads on gets `MalformedAnswer`.

    Args:
        added: what the client did not ask for.
        wrong_in_chunk: says what is wrong with a chunk.
        most: bytes of the stream.
    """

    def __init__(self, added: Added, wrong_in_chunk: Wrong, most: int) -> None:
        self.tokens = 0
        self.chunks = 0
        self._size = 0
        self._added = added
        self._wrong_in_chunk = wrong_in_chunk
        self._most = most
        self._kept: list[bytes] = []
        self._rest = bytearray()

    @property
    def text(self) -> str:
        """The events that came."""
        return b"".join(self._kept).decode(errors="replace")

    def passed(self, data: bytes) -> Iterator[bytes]:
        """Return what the client gets for a piece of the stream, event by event.

        Raises:
            MalformedAnswer: for an event that is no chunk of this API, and for a stream of too many bytes.
        """
        self._size += len(data)
        for event in self._split(data):
            yield self._passed(event)
        if self._size > self._most:
            raise MalformedAnswer(f"the server's answer has more than {self._most} bytes")

    def ended(self) -> bytes:
        """Return what the client gets for an end without a blank line.

        Raises:
            MalformedAnswer: as for `passed`.
        """
        rest = bytes(self._rest)
        self._rest.clear()
        return self._passed(rest) if rest.strip() else rest

    def _split(self, data: bytes) -> Iterator[bytes]:
        """Events that are whole."""
        rest = self._rest
        # What was searched before holds no end of an event, but may hold the beginning of one.
        searched = max(len(rest) - 3, 0)
        rest += data
        start = 0
        while True:
            lines = rest.find(b"\n\n", searched)
            carriage = rest.find(b"\r\n\r\n", searched, lines if lines >= 0 else len(rest))
            if lines < 0 and carriage < 0:
                break
            end = carriage + 4 if carriage >= 0 else lines + 2
            yield bytes(rest[start:end])
            start = searched = end
        del rest[:start]

    def _passed(self, event: bytes) -> bytes:
        lines = event.splitlines() if event.find(b"\n", 0, -2) >= 0 else [event.strip()]
        if self.chunks == 0 and lines[0].startswith(b"\xef\xbb\xbf"):
            lines[0] = lines[0][3:]
        said, others = [], []
        for line in lines:
            if line.startswith(b"data:"):
                said.append(line[6:] if line[5:6] == b" " else line[5:])
            elif not line or line in _FIELDS or line.startswith(_FIELDS[:5]):
                others.append(line)
            else:
                raise MalformedAnswer(f"the server sent a line that is no event: {_quoted(line)}")
        payload = b"\n".join(said).strip()
        if not payload or payload == b"[DONE]":
            self._kept.append(event)
            return event
        chunk = self._chunk(payload)
        self._kept.append(event)
        self.chunks += 1
        if chunk.get("error") is not None:
            return event
        for choice in chunk.get("choices") or ():
            self.tokens += len(choice.get("token_ids") or ())
        if not self._added:
            return event
        if self._added.alone(chunk):
            return b""
        head = b"".join(line + b"\n" for line in others if line)
        return head + b"data: " + dumped(self._added.taken_out(chunk)) + b"\n\n"

    def _chunk(self, payload: bytes) -> dict[str, Any]:
        chunk = _object(payload, "the server sent a chunk that is")
        # An error of the server passes as it is.
        if chunk.get("error") is None and (why := self._wrong_in_chunk(chunk)) is not None:
            raise MalformedAnswer(f"the server sent a chunk of another shape: {why}")
        return chunk


def dumped(value: Any) -> bytes:
    """JSON as vLLM writes it: no blanks, no escapes but for what UTF-8 cannot say."""
    try:
        return orjson.dumps(value)
    except TypeError:  # integers of more than 64 bits, and half a character
        pass
    try:
        return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode()
    except UnicodeEncodeError:
        return json.dumps(value, separators=(",", ":")).encode()


def response_of(data: bytes, wrong_in: Wrong) -> dict[str, Any] | None:
    """Return a server's answer; None if it says that it failed.

    Raises:
        MalformedAnswer: if it is not what the API says.
    """
    told = _object(data, "the server's answer is")
    if told.get("error") is not None:
        return None
    if (why := wrong_in(told)) is not None:
        raise MalformedAnswer(f"the server's answer has another shape: {why}")
    return told


def _object(data: bytes, what: str) -> dict[str, Any]:
    """The JSON object of these bytes; `what` begins the error if they are none."""
    try:
        value = shapes.parsed(data)
    except ValueError as error:
        raise MalformedAnswer(f"{what} not JSON: {error}: {_quoted(data)}") from None
    if not isinstance(value, dict):
        raise MalformedAnswer(f"{what} not a JSON object: {_quoted(data)}")
    return value


def _quoted(data: bytes) -> str:
    return repr(data[:100].decode(errors="replace"))
