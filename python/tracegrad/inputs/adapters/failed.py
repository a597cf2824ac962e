"""Calls that failed: a request beside an error, an HTTP status from 400 on, or nothing, where a response should be.

They become no traces: each is made a record that the core refuses as a failed call, with its place and what was said.
"""

from collections.abc import Mapping
from typing import Any

from tracegrad.inputs import chat, paths
from tracegrad.inputs.adapters import shapes
from tracegrad.inputs.adapters.fitting import failed_call
from tracegrad.inputs.adapters.loggers import ERRORS, REQUESTS, RESPONSES, opened, plain
from tracegrad.inputs.adapters.pairs import ANSWERS, PROMPTS

_STATUS = ("status", "statuscode", "httpstatus", "httpstatuscode", "responsestatus", "responsestatuscode")
_ASKS = ("messages", "input", "prompt", "contents")
_SAYS = ("choices", "output", "content", "candidates")
_EMPTY: tuple[Any, ...] = (None, "", {}, [])


def of_error(record: Any) -> list[dict[str, Any]] | None:
    """One that the core refuses, of a request beside an error or its status; None of others."""
    if not isinstance(record, Mapping) or (asked := _asked(record)) is None:
        return None
    answers = _answers(record, asked)
    if any(_is_answer(value) for _, value in answers):
        return None
    if why := next((said for _, value in answers if (said := _error(value))), None):
        return [failed_call(record, why)]
    # Messages alone, in which something was answered, may be of a run that failed later.
    if not answers and asked == "messages" and chat.has_answer(record[asked]):
        return None
    nothing = all(value in _EMPTY for _, value in answers)
    why = (nothing and _told(record)) or _status(record)
    return [failed_call(record, why)] if why and not _is_elsewhere(record, asked) else None


def of_nothing(record: Any) -> list[dict[str, Any]] | None:
    """As `of_error`, of a request of messages beside nothing, or a text, where its response should be; None where an
    answer stands elsewhere.
    """
    return _without(record, is_text=False)


def of_prompt(record: Any) -> list[dict[str, Any]] | None:
    """As `of_error`, of a prompt as text, whose answer is null: asked last, where nothing else was found."""
    return _without(record, is_text=True)


def _without(record: Any, *, is_text: bool) -> list[dict[str, Any]] | None:
    """What is refused of a request, whose prompt is a text or is none, beside nothing or a text."""
    if not isinstance(record, Mapping) or (asked := _asked(record)) is None:
        return None
    answers = _answers(record, asked) if isinstance(opened(record[asked]), str) == is_text else []
    if not answers or any(value not in _EMPTY and not isinstance(value, str) for _, value in answers):
        return None
    if _is_elsewhere(record, asked):
        return None
    said = next(((key, value) for key, value in answers if value not in _EMPTY), None)
    if said is not None:
        return [failed_call(record, f"`{said[0]}` is a text, which no server answers with: {said[1][:60]!r}")]
    key, value = answers[0]
    what = paths.kind(value) if value is None else "empty"
    return [failed_call(record, f"`{key}` is {what}, so there is no answer in it")]


def _is_elsewhere(record: Mapping[str, Any], asked: str) -> bool:
    """Whether the answer, or a conversation, stands where its name does not say so."""
    return shapes.has_call(record) or shapes.of_record(chat.without(record, asked)) is not None


def _asked(record: Mapping[str, Any]) -> str | None:
    """The key of what was asked and waits for its answer: a request, messages, or a prompt as text."""
    if "calls" in record:
        return None
    for key, value in record.items():
        told = opened(value) if plain(str(key)) in REQUESTS else None
        if isinstance(told, Mapping) and any(map(told.get, _ASKS)) and _waits(told.get("messages")):
            return key
    if isinstance(record.get("messages"), list):
        return "messages" if record["messages"] and _waits(record["messages"]) else None
    return next((key for key in PROMPTS if isinstance(record.get(key), str) and record[key]), None)


def _waits(messages: Any) -> bool:
    """Whether no answer of the assistant is the last of messages."""
    return not (isinstance(messages, list) and messages and chat.role(messages[-1]) == "assistant")


def _answers(record: Mapping[str, Any], asked: str) -> list[tuple[str, Any]]:
    """Where an answer should be, and what stands there."""
    names = {*RESPONSES, *map(plain, ANSWERS)}
    found = [(str(key), opened(value)) for key, value in record.items() if key != asked and plain(str(key)) in names]
    return [(key, {} if value == {"choices": []} else value) for key, value in found]


def _is_answer(value: Any) -> bool:
    """Whether a server's answer, or a stream of one, is there: a text may be one, or what a server says of an error."""
    if isinstance(value, Mapping):
        return any(map(value.get, _SAYS)) or isinstance(value.get("message"), Mapping) or bool(value.get("response"))
    return isinstance(value, list) and bool(value)


def _error(body: Any) -> str | None:
    """What a response says of its error, also where it stands within it beside its status; None of an answer."""
    if not isinstance(body, Mapping) or any(map(body.get, _SAYS)):
        return None
    if body.get("object") == "error" or body.get("error"):
        return _words(body.get("error") or body)
    inner = opened(body.get("body"))
    return (_error(inner) or _status(body)) if isinstance(inner, (Mapping, str)) else _status(body)


def _status(record: Mapping[str, Any]) -> str | None:
    for key, value in record.items():
        if plain(str(key)) in _STATUS and not isinstance(value, bool):
            code = paths.number(value)
            if code is not None and 400 <= code < 600:
                return f"its {key} is {code:g}"
    return None


def _told(record: Mapping[str, Any]) -> str | None:
    """What stands under the name of an error beside the request."""
    errors = [value for key, value in record.items() if plain(str(key)) in ERRORS and value]
    return _words(errors[0]) if errors and isinstance(errors[0], (str, Mapping)) else None


def _words(error: Any) -> str:
    said = error
    while isinstance(said, Mapping):
        said = next((said[key] for key in ("message", "error", "type", "code") if said.get(key)), "it says no more")
    return str(said)[:200]
