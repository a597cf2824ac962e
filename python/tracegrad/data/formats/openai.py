"""Convert calls that clients of OpenAI's API logged: under other names, as chunks of a stream, inside a message.

Sources: model dumps of openai 3 beside the arguments of the call; litellm's logger callbacks (`kwargs`,
`response_obj`); proxies that keep `request_body` and `response_body`; mini-swe-agent 2's trajectories
(`extra.response`). Names count by their words: `requestBody` is `request_body`. Chunks are gathered by their id.
"""

import json
from collections.abc import Iterator, Mapping
from typing import Any

from tracegrad import _core
from tracegrad.data import chat, json_path
from tracegrad.data.arrow import to_json
from tracegrad.data.trace import Line, Trace, Traces, located
from tracegrad.errors import FormatError

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


REQUESTS = (
    *("request", "requestbody", "kwargs", "inputs", "input", "params", "parameters"),
    *("body", "req", "payload", "sent"),
)
RESPONSES = (
    *("response", "responseobj", "responsebody", "outputs", "output", "completion", "result"),
    *("res", "resp", "llmresponse", "rawresponse", "got", "received"),
)

ERRORS = ("error", "errorstr", "errormessage", "exception", "err")


def of_call(record: Any) -> list[dict[str, Any]] | None:
    """A request and a response that the core does not find, with what else the record says; None where they are not."""
    if not isinstance(record, Mapping) or "calls" in record or "call_type" in record:
        return None
    if isinstance(record.get("request"), Mapping) and isinstance(record.get("response"), Mapping):
        return None
    if (names := _names(record)) is None:
        return None
    asked, answered = names
    if not asked and not _is_response(record[answered]):
        return [_of_other(record, answered)]
    request = opened(record[asked]) if asked else {"messages": record["messages"]}
    response = opened(record[answered])
    if not asked:
        request |= chat.told(record, (*chat.SAMPLING, "tools", "model"))
        said = _said(response)
        if request["messages"] and said is not None and _same(request["messages"][-1], said):
            request["messages"] = request["messages"][:-1]
    kept = chat.without(record, asked, answered, "messages")
    return [{**({} if asked else chat.PARTIAL), **kept, "request": request, "response": response}]


def _names(record: Mapping[str, Any]) -> tuple[str, str] | None:
    """Under which keys request and response stand; an empty first one where messages stand beside the response."""
    named = {plain(str(key)): key for key in reversed(list(record))}
    there = [named[key] for key in RESPONSES if key in named]
    answered = next((key for key in there if _is_response(record[key])), None)
    if answered is None:
        if (other := _of_other_api(record, named, there)) is not None:
            return other
        talk = record.get("messages")
        asks = isinstance(talk, list) and talk and isinstance(talk[-1], Mapping) and talk[-1].get("role") != "assistant"
        answered = next((key for key in there if asks and _read({}, opened(record[key]))), None)
        return None if answered is None else ("", answered)
    others = [named[key] for key in REQUESTS if key in named and named[key] != answered]
    asked = next((key for key in others if _is_request(record[key])), None)
    if asked is None:
        return ("", answered) if isinstance(record.get("messages"), list) else None
    return asked, answered


def _of_other_api(record: Mapping[str, Any], named: dict[str, str], there: list[str]) -> tuple[str, str] | None:
    """The keys of a request of another API, and of a response to it that the core reads."""
    for asked in (named[key] for key in REQUESTS if key in named):
        request = opened(record[asked])
        if isinstance(request, Mapping) and not request.keys().isdisjoint(("input", "contents", "system")):
            answered = next((key for key in there if key != asked and _read(request, opened(record[key]))), None)
            if answered is not None:
                return asked, answered
    return None


def plain(name: str) -> str:
    """A name by its letters alone.

    >>> plain("requestBody"), plain("request_body")
    ('requestbody', 'requestbody')
    """
    return name.replace("_", "").replace("-", "").lower()


def opened(value: Any) -> Any:
    """What JSON as text says, or the events of a stream as text; else the value.

    >>> opened('data: {"choices": []}\\n\\ndata: [DONE]\\n')
    [{'choices': []}]
    """
    found = dict(value) if isinstance(value, Mapping) else json_path.opened(value)
    return _events(found) if isinstance(found, str) and found.lstrip("\ufeff\r\n").startswith(_EVENTS) else found


_EVENTS = ("data:", "event:", "id:", "retry:", ":", "{")
"""How the lines of a stream begin: fields of server-sent events, or a chunk."""


def _events(text: str) -> Any:
    """The chunks of a stream, each a line of JSON, behind `data:` or alone; the text where one is none."""
    said = [line for line in json_path.lines(text.lstrip("\ufeff")) if line.startswith(("data:", "{"))]
    data = [line.removeprefix("data:").strip() for line in said]
    try:
        return [json.loads(each) for each in data if each and each != "[DONE]"]
    except (ValueError, RecursionError):
        return text


def _is_request(value: Any) -> bool:
    told = opened(value)
    return isinstance(told, Mapping) and isinstance(told.get("messages"), list)


def _is_response(value: Any) -> bool:
    told = opened(value)
    choices = chat.table(told).get("choices")
    return is_list(told) or (isinstance(choices, list) and bool(choices))


def _of_other(record: Mapping[str, Any], answered: str) -> dict[str, Any]:
    """Messages and the response of another API beside them: as a call, or with what it says behind the messages, where
    that API asks by something else than messages.
    """
    kept = chat.without(record, answered, "messages")
    talk, response = record["messages"], opened(record[answered])
    request = {**chat.told(record, chat.SAMPLING), "messages": talk}
    trace = _read(request, response)
    if trace is not None and len(trace.messages) == len(talk) + 1:
        return {**chat.PARTIAL, **kept, "request": request, "response": response}
    return {**kept, "messages": [*chat.given(talk), *(trace.messages[-1:] if trace else [])]}


def _read(request: Any, response: Any) -> Trace | None:
    """What the core reads of a response of another API, with something sampled in it."""
    if not isinstance(response, (Mapping, list)) or not response:
        return None
    try:
        core, _ = _core.Traces.decode([to_json({"request": request, "response": response})], "<record>", 1, "auto")
    except FormatError:
        return None
    return next((trace for trace in Traces(core) if trace.generations), None)


def _said(response: Any) -> Any:
    """The message of a response that is whole."""
    return chat.table(response["choices"][0]).get("message") if "choices" in chat.table(response) else None


def _same(message: Any, said: Any) -> bool:
    if not isinstance(message, Mapping) or not isinstance(said, Mapping):
        return False
    return all((message.get(key) or "") == (said.get(key) or "") for key in ("role", "content", "tool_calls"))


_TOLD = ("token_ids", "logprobs")


def of_talk(record: Any) -> list[dict[str, Any]] | None:
    """The record with these responses among its messages; None where no message has one that says its tokens."""
    talk = chat.table(record).get("messages")
    if not isinstance(talk, list):
        return None
    held = [_response(each) for each in talk]
    if not any(each["choices"][0].get(key) for each in held if each for key in _TOLD):
        return None
    # What its program noted of a message no template knows.
    plain = [chat.without(each, "extra") if isinstance(each, Mapping) else each for each in talk]
    messages = [each if response is None else response for each, response in zip(plain, held, strict=True)]
    # Where mini-swe-agent's config of the model stands.
    sampling = chat.sampling(chat.within(record, "info.config.model.model_kwargs"))
    return [{**sampling, **record, "messages": messages}]


def _response(message: Any) -> Mapping[str, Any] | None:
    """The response of one choice that an assistant's message keeps."""
    response = chat.table(message.get("extra")).get("response") if chat.role(message) == "assistant" else None
    choices = chat.table(response).get("choices")
    alone = isinstance(choices, list) and len(choices) == 1 and isinstance(choices[0], Mapping)
    return response if alone else None
