"""Split a response of several choices into one trace each, and count calls that failed.

Each choice becomes a trace of one group and takes its own value of every list beside the choices that has their length.
If one reward stands beside several choices, its owner cannot be known: the record stays as it is. A failed call (an
error, an HTTP status from 400, no response) becomes a record that the core refuses, with its place and message.
"""

import itertools
from collections.abc import Mapping
from typing import Any

from tracegrad import _core
from tracegrad.data import chat, json_path
from tracegrad.data.arrow import to_json
from tracegrad.data.formats import generic, openai, prompt_response
from tracegrad.data.formats.openai import ERRORS, REQUESTS, RESPONSES, opened, plain
from tracegrad.data.formats.prompt_response import ANSWERS, PROMPTS
from tracegrad.data.formats.record_fields import failed_call
from tracegrad.errors import FormatError

_SAID = ("request", "response", "messages", "choices", "tools", "usage")


def of_call(record: Any) -> list[dict[str, Any]] | None:
    """As `of_response`, of a request beside a response of several choices, or several responses; None of others."""
    told = chat.table(record)
    response, asks = told.get("response"), isinstance(told.get("request"), Mapping)
    several = len(_choices(response)) > 1 or _are_whole(response)
    return of_response(record) if asks and several else None


def of_made(record: Mapping[str, Any]) -> list[dict[str, Any]] | None:
    """As `of_response`, of a record that an adapter made: only a response of choices, or of chunks, may be several."""
    response = record.get("response")
    several = len(_choices(response)) > 1 or (isinstance(response, list) and len(response) > 1)
    return of_response(record) if several else None


def _are_whole(response: Any) -> bool:
    """Whether a response is a list of several objects of which none is a chunk, or holds several choices."""

    def is_part(each: Any) -> bool:
        return not isinstance(each, Mapping) or openai.is_chunk(each) or len(_choices(each)) > 1

    return isinstance(response, list) and len(response) > 1 and not any(map(is_part, response))


def _is_further(chunk: Any) -> bool:
    """Whether a chunk of a stream is of another choice than the first."""
    return any(chat.table(each).get("index") for each in _choices(chunk))


def of_response(record: Any) -> list[dict[str, Any]] | None:
    """One record for each choice of a record that the core reads as one call; None where it leaves no choice out, or
    where whose reward it is cannot be known.

    Raises:
        Unfit: if what stands beside them fits no choice, or they share too much.
    """
    if not isinstance(record, Mapping) or "calls" in record or "choice" in record:
        return None
    response, request = record.get("response"), record.get("request")
    known = isinstance(request, Mapping) and len(_choices(response)) > 1
    count = len(_choices(response)) if known else 1 + _unused(record)
    if count == 1 or not _tells_apart(chat.without(record, *_SAID), count):
        return None
    asked = request.get("messages") if isinstance(request, Mapping) else record.get("messages")
    group = prompt_response.group_of(record, record.get("prompt_token_ids", []) if asked is None else asked)
    if isinstance(response, Mapping) and len(_choices(response)) == count:
        return _of_choices(record, response, count, group)
    if len(_choices(record)) == count:
        told = prompt_response.rows(record, count, ("choices", "usage"), {})
        return [
            {"group": group, **row, **of_answer, "choices": [choice]}
            for (row, of_answer), choice in zip(told, record["choices"], strict=True)
        ]
    if isinstance(response, list) and _are_whole(response) and len(response) == count:
        kept = {key: record[key] for key in _SAID if key in record and key not in ("response", "usage")}
        told = prompt_response.rows(record, count, _SAID, kept)
        return [
            {"group": group, **row, **of_answer, **kept, "response": each}
            for (row, of_answer), each in zip(told, response, strict=True)
        ]
    # Of a stream, or of another API, which says itself which choice is which.
    told = prompt_response.rows(record, count, ("response", "usage"), response)
    kept = chat.told(record, ["response"])
    return [{"group": group, **row, **of_answer, "choice": at, **kept} for at, (row, of_answer) in enumerate(told)]


def _of_choices(record: Mapping[str, Any], response: Mapping[str, Any], count: int, group: Any) -> list[dict[str, Any]]:
    # Its usage counts all of them.
    whole = chat.without(response, "usage", "choices")
    kept = {key: record[key] for key in _SAID if key in record and key not in ("response", "usage")}
    made = []
    told = prompt_response.rows(record, count, _SAID, (kept, whole))
    for (row, of_answer), choice in zip(told, _choices(response), strict=True):
        name = {"id": f"{whole['id']}-{len(made)}"} if isinstance(whole.get("id"), (str, int)) else {}
        prompt_ids = {key: of_answer.pop(key) for key in ("prompt_token_ids",) if key in of_answer}
        choice = {**of_answer, **choice} if isinstance(choice, Mapping) else choice
        made.append({"group": group, **row, **kept, "response": {**prompt_ids, **whole, **name, "choices": [choice]}})
    return made


def _choices(value: Any) -> list[Any]:
    found = chat.table(value).get("choices")
    return found if isinstance(found, list) else []


def _unused(record: Mapping[str, Any]) -> int:
    """How many choices of a record of one call the core leaves out."""
    bare = to_json(chat.without(record, "reward", "rewards"))
    try:
        core, report = _core.Traces.decode([bare], "<record>", 1, "auto")
    except FormatError:
        return 0
    return report["unused_choices"] if len(core) == report["generations"] == 1 else 0


def _tells_apart(outer: Mapping[str, Any], count: int) -> bool:
    """Whether each choice has a reward of its own, or there is none beside them at all."""
    leaves = {path for path, _ in json_path.leaves(outer)}
    own = [path for path, _ in json_path.leaves(prompt_response.part(outer, 0, count)) if path not in leaves]
    if any(map(json_path.REWARD.search, own)):
        return True
    beside = itertools.islice(json_path.leaves(outer), json_path.MOST_WALKED)
    return not any(json_path.REWARD.search(path) and json_path.verdict(value) is not None for path, value in beside)


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
    what = json_path.kind(value) if value is None else "empty"
    return [failed_call(record, f"`{key}` is {what}, so there is no answer in it")]


def _is_elsewhere(record: Mapping[str, Any], asked: str) -> bool:
    """Whether the answer, or a conversation, stands where its name does not say so."""
    return generic.has_call(record) or generic.of_record(chat.without(record, asked)) is not None


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
            code = json_path.number(value)
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
