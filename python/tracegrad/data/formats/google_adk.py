"""Convert sessions of Google's Agent Development Kit: each answer of the first agent is a call in Gemini's form.

Source: google-adk 2.13 `sessions/session.py`, `events/event.py`, `events/event_actions.py` and
`flows/llm_flows/contents.py`, as `adk run --save_session` writes them. The turns of other agents are shown to an agent
in a form that is not stored, so its answers after them are left out.
"""

from collections.abc import Mapping
from typing import Any

from tracegrad.data import chat
from tracegrad.data.field_map import BadValueError
from tracegrad.data.formats.record_fields import Converted

NAME = "google_adk"
KEYS = ("appName", "app_name")
_PARTS = {"text", "thought", "thoughtSignature", "functionCall", "functionResponse"}
_PARTS |= {"thought_signature", "function_call", "function_response"}
_SNAKE = {
    **{"appName": "app_name", "userId": "user_id", "modelVersion": "model_version", "errorCode": "error_code"},
    **{"finishReason": "finish_reason", "logprobsResult": "logprobs_result"},
    **{"rewindBeforeInvocationId": "rewind_before_invocation_id"},
}


def of_session(record: Any) -> list[dict[str, Any]] | None:
    """Convert a session to one trace; no trace without an answer, None for other records.

    Raises:
        BadValueError: if the history was compacted or rewound, or has parts other than text, calls and results.
    """
    events = chat.as_mapping(record).get("events")
    if not isinstance(events, list) or _get(record, "appName") is None or _get(record, "userId") is None:
        return None
    if not all(isinstance(event, Mapping) and "author" in event for event in events):
        return None
    converted = Converted()
    contents: list[Any] = []
    calls: list[dict[str, Any]] = []
    agent = version = None
    is_known = True
    for number, event in enumerate(events):
        actions, content = (chat.as_mapping(event.get(key)) for key in ("actions", "content"))
        if actions.get("compaction") or _get(actions, "rewindBeforeInvocationId"):
            why = "The prompts of its answers are other messages than those that it stores"
            raise BadValueError((f"events[{number}] compacts or rewinds the history", why, _FIX))
        parts = content.get("parts") or []
        if event.get("partial") or not parts:
            continue
        if any(not isinstance(part, Mapping) or _kinds(part) - _PARTS for part in parts):
            names = ", ".join(sorted({str(kind) for part in parts for kind in _kinds(part) - _PARTS}))
            why = "Only texts, function calls and their responses are read"
            raise BadValueError((f"events[{number}] has parts of the kind {names or 'text'}", why, _FIX))
        if content.get("role") == "model":
            if agent is None:
                agent, version = event["author"], _get(event, "modelVersion")
            if event["author"] != agent:
                converted.left_out["answers of other agents than the first one"] += 1
                is_known = False
            elif not is_known:
                converted.left_out["answers after turns of other agents, whose form in the prompt is not stored"] += 1
            elif _get(event, "modelVersion") != version:
                converted.left_out["answers of another model"] += 1
            elif _get(event, "errorCode") is not None:
                converted.left_out["answers with an error"] += 1
            else:
                calls.append(_call(event, [*contents]))
        contents.append(content)
    if calls:
        converted.append({"id": record.get("id"), **chat.PARTIAL, "calls": calls})
    return converted


_FIX = 'Leave such sessions out: on_error="skip"'


def _get(fields: Any, name: str) -> Any:
    """Return a field in camel case, as JSON has it, or in snake case, as `model_dump` without aliases."""
    fields = chat.as_mapping(fields)
    return fields.get(name, fields.get(_SNAKE[name]))


def _kinds(part: Any) -> set[Any]:
    return {name for name, value in chat.as_mapping(part).items() if value is not None}


def _call(event: Mapping[str, Any], contents: list[Any]) -> dict[str, Any]:
    fields = {name: _get(event, name) for name in ("finishReason", "logprobsResult")}
    known = {name: value for name, value in fields.items() if value is not None}
    response = {"candidates": [{"content": event["content"], **known}], "modelVersion": _get(event, "modelVersion")}
    return {"request": {"contents": contents}, "response": response}
