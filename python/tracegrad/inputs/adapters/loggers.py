"""Calls that loggers around an OpenAI client write under other names: inputs and outputs, bodies, JSON as text.

Names count by their words: `requestBody` is `request_body`. Source: model dumps of openai 3 beside the arguments of the
call; litellm's logger callbacks (`kwargs`, `response_obj`); proxies that keep `request_body` and `response_body`.
"""

import json
from collections.abc import Mapping
from typing import Any

from tracegrad import _core
from tracegrad.errors import FormatError
from tracegrad.inputs import chat, paths
from tracegrad.inputs.adapters.chunks import is_list
from tracegrad.tables import to_json
from tracegrad.trace import Trace, Traces

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
    found = dict(value) if isinstance(value, Mapping) else paths.opened(value)
    return _events(found) if isinstance(found, str) and found.lstrip("\ufeff\r\n").startswith(_EVENTS) else found


_EVENTS = ("data:", "event:", "id:", "retry:", ":", "{")
"""How the lines of a stream begin: fields of server-sent events, or a chunk."""


def _events(text: str) -> Any:
    """The chunks of a stream, each a line of JSON, behind `data:` or alone; the text where one is none."""
    said = [line for line in paths.lines(text.lstrip("\ufeff")) if line.startswith(("data:", "{"))]
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
