"""Split a response of several choices into one trace per choice, and detect failed calls.

The traces of one response form a group. A list in the record with one value per choice is split among them. If the
record has a single reward for several choices, the reward cannot be assigned, and the record is not split. A failed
call (an error, an HTTP status of 400 or more, no response) becomes a record that the core refuses with its message.
"""

import itertools
from collections.abc import Mapping
from typing import Any

from tracegrad import _core
from tracegrad.data import chat, json_path
from tracegrad.data.arrow import to_json
from tracegrad.data.formats import generic, openai, prompt_response
from tracegrad.data.formats.openai import ERRORS, REQUESTS, RESPONSES, normalize_name, parse_json_or_events
from tracegrad.data.formats.prompt_response import ANSWERS, PROMPTS
from tracegrad.data.formats.record_fields import failed_call
from tracegrad.errors import FormatError

_CALL_FIELDS = ("request", "response", "messages", "choices", "tools", "usage")


def of_call(record: Any) -> list[dict[str, Any]] | None:
    """Apply `of_response` to a request with a response of several choices, or with several responses.

    None for other records.
    """
    fields = chat.as_mapping(record)
    response, has_request = fields.get("response"), isinstance(fields.get("request"), Mapping)
    has_several = len(_choices(response)) > 1 or _are_complete_responses(response)
    return of_response(record) if has_request and has_several else None


def of_made(record: Mapping[str, Any]) -> list[dict[str, Any]] | None:
    """Apply `of_response` to a record that an adapter made, if its response has several choices or is a list.

    None for other records.
    """
    response = record.get("response")
    has_several = len(_choices(response)) > 1 or (isinstance(response, list) and len(response) > 1)
    return of_response(record) if has_several else None


def _are_complete_responses(response: Any) -> bool:
    """Return whether a response is a list of several complete responses, each with one choice."""

    def is_incomplete(item: Any) -> bool:
        return not isinstance(item, Mapping) or openai.is_chunk(item) or len(_choices(item)) > 1

    return isinstance(response, list) and len(response) > 1 and not any(map(is_incomplete, response))


def of_response(record: Any, unused: int | None = None) -> list[dict[str, Any]] | None:
    """Split a record of one call with several choices into one record per choice.

    None if the core leaves no choice out, or if a reward cannot be assigned to a choice.

    Args:
        record: the record.
        unused: number of choices that the core leaves out of it; None if it is not known.

    Raises:
        BadValueError: if a list in the record does not match the number of choices, or the shared fields are too large.
    """
    if not isinstance(record, Mapping) or "calls" in record or "choice" in record:
        return None
    response, request = record.get("response"), record.get("request")
    has_choices = isinstance(request, Mapping) and len(_choices(response)) > 1
    if not has_choices and unused is None:
        unused = _unused(record)
    count = len(_choices(response)) if has_choices else 1 + (unused or 0)
    if count == 1 or not _rewards_are_assignable(chat.without(record, *_CALL_FIELDS), count):
        return None
    messages = request.get("messages") if isinstance(request, Mapping) else record.get("messages")
    group = prompt_response.group_of(record, record.get("prompt_token_ids", []) if messages is None else messages)
    if isinstance(response, Mapping) and len(_choices(response)) == count:
        return _of_choices(record, response, count, group)
    if len(_choices(record)) == count:
        rows = prompt_response.split_by_answer(record, count, ("choices", "usage"), {})
        return [
            {"group": group, **row, **of_answer, "choices": [choice]}
            for (row, of_answer), choice in zip(rows, record["choices"], strict=True)
        ]
    if isinstance(response, list) and _are_complete_responses(response) and len(response) == count:
        shared = {key: record[key] for key in _CALL_FIELDS if key in record and key not in ("response", "usage")}
        rows = prompt_response.split_by_answer(record, count, _CALL_FIELDS, shared)
        return [
            {"group": group, **row, **of_answer, **shared, "response": item}
            for (row, of_answer), item in zip(rows, response, strict=True)
        ]
    # Chunks of a stream, and responses of other APIs, number their choices themselves: `choice` selects one.
    rows = prompt_response.split_by_answer(record, count, ("response", "usage"), response)
    shared = chat.pick(record, ["response"])
    return [
        {"group": group, **row, **of_answer, "choice": index, **shared} for index, (row, of_answer) in enumerate(rows)
    ]


def _of_choices(record: Mapping[str, Any], response: Mapping[str, Any], count: int, group: Any) -> list[dict[str, Any]]:
    # Usage is dropped, as it counts the tokens of all choices.
    response_fields = chat.without(response, "usage", "choices")
    shared = {key: record[key] for key in _CALL_FIELDS if key in record and key not in ("response", "usage")}
    records = []
    rows = prompt_response.split_by_answer(record, count, _CALL_FIELDS, (shared, response_fields))
    for (row, of_answer), choice in zip(rows, _choices(response), strict=True):
        name = (
            {"id": f"{response_fields['id']}-{len(records)}"}
            if isinstance(response_fields.get("id"), (str, int))
            else {}
        )
        prompt_ids = {key: of_answer.pop(key) for key in ("prompt_token_ids",) if key in of_answer}
        choice = {**of_answer, **choice} if isinstance(choice, Mapping) else choice
        records.append(
            {
                "group": group,
                **row,
                **shared,
                "response": {**prompt_ids, **response_fields, **name, "choices": [choice]},
            }
        )
    return records


def _choices(value: Any) -> list[Any]:
    choices = chat.as_mapping(value).get("choices")
    return choices if isinstance(choices, list) else []


def _unused(record: Mapping[str, Any]) -> int:
    """Return the number of choices that the core leaves out of a record of one call."""
    raw = to_json(chat.without(record, "reward", "rewards"))
    try:
        core, report = _core.Traces.decode([raw], "<record>", 1, "auto")
    except FormatError:
        return 0
    return unused_choices(core, report)


def unused_choices(core: _core.Traces, report: Mapping[str, Any]) -> int:
    """Return the number of choices that the core left out of a record of one call."""
    return report["unused_choices"] if len(core) == report["generations"] == 1 else 0


def _rewards_are_assignable(outer: Mapping[str, Any], count: int) -> bool:
    """Return whether each choice has its own reward, or the record has no reward at all."""
    leaves = {path for path, _ in json_path.leaves(outer)}
    split_paths = [
        path for path, _ in json_path.leaves(prompt_response.select_answer(outer, 0, count)) if path not in leaves
    ]
    if any(map(json_path.REWARD.search, split_paths)):
        return True
    other_leaves = itertools.islice(json_path.leaves(outer), json_path.MAX_LEAVES)
    return not any(
        json_path.REWARD.search(path) and json_path.reward_value(value) is not None for path, value in other_leaves
    )


_STATUS = ("status", "statuscode", "httpstatus", "httpstatuscode", "responsestatus", "responsestatuscode")
_PROMPT_FIELDS = ("messages", "input", "prompt", "contents")
_ANSWER_FIELDS = ("choices", "output", "content", "candidates")
_EMPTY: tuple[Any, ...] = (None, "", {}, [])


def of_error(record: Any) -> list[dict[str, Any]] | None:
    """Convert a request with an error or an error status to a record that the core refuses; None for other records."""
    if not isinstance(record, Mapping) or (prompt_key := _prompt_key(record)) is None:
        return None
    answers = _answers(record, prompt_key)
    if any(_is_answer(value) for _, value in answers):
        return None
    if reason := next((message for _, value in answers if (message := _error(value))), None):
        return [failed_call(record, reason)]
    # Messages with assistant turns and no answer field may come from a run that failed later.
    if not answers and prompt_key == "messages" and chat.has_answer(record[prompt_key]):
        return None
    is_empty = all(value in _EMPTY for _, value in answers)
    reason = (is_empty and _error_field(record)) or _status(record)
    return [failed_call(record, reason)] if reason and not _has_answer_elsewhere(record, prompt_key) else None


def of_nothing(record: Any) -> list[dict[str, Any]] | None:
    """Convert a request whose response is empty or a string to a record that the core refuses.

    None for other records, including those with an answer in another field.
    """
    return _refused_without_answer(record, is_text=False)


def of_prompt(record: Any) -> list[dict[str, Any]] | None:
    """Convert a text prompt with an empty answer to a record that the core refuses; None for other records.

    This must be the last adapter, as it matches records that the others recognize.
    """
    return _refused_without_answer(record, is_text=True)


def _refused_without_answer(record: Any, *, is_text: bool) -> list[dict[str, Any]] | None:
    """Refuse a request with an empty or string answer. `is_text` selects text prompts; otherwise they are left out."""
    if not isinstance(record, Mapping) or (prompt_key := _prompt_key(record)) is None:
        return None
    answers = (
        _answers(record, prompt_key) if isinstance(parse_json_or_events(record[prompt_key]), str) == is_text else []
    )
    if not answers or any(value not in _EMPTY and not isinstance(value, str) for _, value in answers):
        return None
    if _has_answer_elsewhere(record, prompt_key):
        return None
    string_answer = next(((key, value) for key, value in answers if value not in _EMPTY), None)
    if string_answer is not None:
        return [
            failed_call(
                record, f"`{string_answer[0]}` is a text, which no server answers with: {string_answer[1][:60]!r}"
            )
        ]
    key, value = answers[0]
    description = json_path.describe_type(value) if value is None else "empty"
    return [failed_call(record, f"`{key}` is {description}, so there is no answer in it")]


def _has_answer_elsewhere(record: Mapping[str, Any], prompt_key: str) -> bool:
    """Return whether an answer or a conversation is stored under an unusual name."""
    return generic.has_call(record) or generic.of_record(chat.without(record, prompt_key)) is not None


def _prompt_key(record: Mapping[str, Any]) -> str | None:
    """Return the key of a request, messages or text prompt that does not end with an answer; None if there is none."""
    if "calls" in record:
        return None
    for key, value in record.items():
        request = parse_json_or_events(value) if normalize_name(str(key)) in REQUESTS else None
        if (
            isinstance(request, Mapping)
            and any(map(request.get, _PROMPT_FIELDS))
            and _needs_answer(request.get("messages"))
        ):
            return key
    if isinstance(record.get("messages"), list):
        return "messages" if record["messages"] and _needs_answer(record["messages"]) else None
    return next((key for key in PROMPTS if isinstance(record.get(key), str) and record[key]), None)


def _needs_answer(messages: Any) -> bool:
    """Return whether messages do not end with an assistant message."""
    return not (isinstance(messages, list) and messages and chat.role(messages[-1]) == "assistant")


def _answers(record: Mapping[str, Any], prompt_key: str) -> list[tuple[str, Any]]:
    """Return (key, value) of each field whose name is that of an answer."""
    names = {*RESPONSES, *map(normalize_name, ANSWERS)}
    answers = [
        (str(key), parse_json_or_events(value))
        for key, value in record.items()
        if key != prompt_key and normalize_name(str(key)) in names
    ]
    return [(key, {} if value == {"choices": []} else value) for key, value in answers]


def _is_answer(value: Any) -> bool:
    """Return whether a value is an answer of a server or a stream of one. A string is not: it may be an error."""
    if isinstance(value, Mapping):
        return (
            any(map(value.get, _ANSWER_FIELDS))
            or isinstance(value.get("message"), Mapping)
            or bool(value.get("response"))
        )
    return isinstance(value, list) and bool(value)


def _error(body: Any) -> str | None:
    """Return the error in a response, also one nested in its `body`; None for an answer."""
    if not isinstance(body, Mapping) or any(map(body.get, _ANSWER_FIELDS)):
        return None
    if body.get("object") == "error" or body.get("error"):
        return _error_message(body.get("error") or body)
    nested = parse_json_or_events(body.get("body"))
    return (_error(nested) or _status(body)) if isinstance(nested, (Mapping, str)) else _status(body)


def _status(record: Mapping[str, Any]) -> str | None:
    for key, value in record.items():
        if normalize_name(str(key)) in _STATUS and not isinstance(value, bool):
            code = json_path.number(value)
            if code is not None and 400 <= code < 600:
                return f"its {key} is {code:g}"
    return None


def _error_field(record: Mapping[str, Any]) -> str | None:
    """Return the message of an error field of the record, None if there is none."""
    errors = [value for key, value in record.items() if normalize_name(str(key)) in ERRORS and value]
    return _error_message(errors[0]) if errors and isinstance(errors[0], (str, Mapping)) else None


def _error_message(error: Any) -> str:
    message = error
    while isinstance(message, Mapping):
        message = next(
            (message[key] for key in ("message", "error", "type", "code") if message.get(key)), "it says no more"
        )
    return str(message)[:200]
