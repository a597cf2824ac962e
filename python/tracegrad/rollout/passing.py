"""What the proxy asks in addition, and takes out of the answer again: plain functions over requests and responses.

Shapes are vLLM's: what nobody asked for stands there as null, whole and in the chunks of a stream. Called by `proxy`.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from tracegrad.rollout.jsons import loads
from tracegrad.rollout.session import CHAT, COMPLETIONS


@dataclass(frozen=True)
class Road:
    """One kind of request.

    Args:
        path: at the server.
        asked: what is asked whatever the client says; empty where the request goes as it came.
    """

    path: str
    asked: Mapping[str, Any]


ROADS = {
    road.path: road
    for road in (
        Road("/v1/chat/completions", CHAT),
        Road("/v1/completions", COMPLETIONS),
        Road("/v1/responses", {}),
        Road("/v1/messages", {}),
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

    `text` is what came, whole events only; `tokens` how many ids its chunks list.
    """

    def __init__(self, added: Added) -> None:
        self.tokens = 0
        self.size = 0
        self._added = added
        self._kept: list[bytes] = []
        self._rest = b""

    @property
    def text(self) -> str:
        """The events that came."""
        return b"".join(self._kept).decode(errors="replace")

    def passed(self, data: bytes) -> bytes:
        """What the client gets for a piece of the stream."""
        self.size += len(data)
        return b"".join([self._passed(event) for event in self._split(data)])

    def ended(self) -> bytes:
        """What the client gets for an end without a blank line."""
        rest, self._rest = self._rest, b""
        return self._passed(rest) if rest.strip() else rest

    def _split(self, data: bytes) -> Iterator[bytes]:
        """Events that are whole."""
        rest = self._rest + data
        start = 0
        while True:
            lines = rest.find(b"\n\n", start)
            carriage = rest.find(b"\r\n\r\n", start, lines if lines >= 0 else len(rest))
            if lines < 0 and carriage < 0:
                break
            end = carriage + 4 if carriage >= 0 else lines + 2
            yield rest[start:end]
            start = end
        self._rest = rest[start:]

    def _passed(self, event: bytes) -> bytes:
        self._kept.append(event)
        if not event.startswith(b"data:"):
            return event
        payload = event[5:].strip()
        if not payload.startswith(b"{"):
            return event
        try:
            chunk = loads(payload)
        except (ValueError, RecursionError):
            return event
        for choice in chunk.get("choices") or ():
            if isinstance(choice, dict):
                self.tokens += len(choice.get("token_ids") or ())
        if not self._added:
            return event
        if self._added.alone(chunk):
            return b""
        return b"data: " + dumped(self._added.taken_out(chunk)) + b"\n\n"


def dumped(value: Any) -> bytes:
    """JSON as vLLM writes it: no blanks, no escapes but for what UTF-8 cannot say."""
    try:
        return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode()
    except UnicodeEncodeError:
        return json.dumps(value, separators=(",", ":")).encode()


def response_of(data: bytes) -> dict[str, Any] | None:
    """A server's answer, where it is one that can be recorded."""
    try:
        told = loads(data)
    except (ValueError, RecursionError):
        return None
    return told if isinstance(told, dict) and told.get("error") is None else None
