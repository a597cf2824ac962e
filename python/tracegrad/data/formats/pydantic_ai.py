"""Pydantic AI's message history: requests and responses, each of parts.

Source: pydantic-ai 2 `messages.py` (`ModelMessagesTypeAdapter`, `all_messages_json`). Logprobs stand in the
`provider_details` of a response where the settings asked for them.
"""

import json
from collections.abc import Mapping
from typing import Any

from tracegrad.data import chat
from tracegrad.data.formats import langchain
from tracegrad.data.formats.openai import opened

_GIVEN = {"system-prompt": "system", "user-prompt": "user", "tool-return": "tool", "retry-prompt": "user"}


def of_history(record: Any) -> list[dict[str, Any]] | None:
    """One trace of such a history; none where the model said nothing, None where a record does not hold just one."""
    found = _history(record)
    if found is None:
        return None
    key, history = found
    messages: list[dict[str, Any]] = []
    for each in history:
        messages += [_response(each)] if each["kind"] == "response" else _request(each)
    told = next((each["instructions"] for each in history if isinstance(each.get("instructions"), str)), None)
    if not any(each["role"] == "system" for each in messages):
        messages = chat.under(told, messages)
    rest = chat.without(chat.table(record), key)
    return [{**rest, "messages": messages}] if chat.has_answer(messages) else []


def _history(record: Any) -> tuple[str, list[Any]] | None:
    told = record.items() if isinstance(record, Mapping) else [("", record)]
    found = [
        (str(key), opened(value) if isinstance(value, str) and '"part_kind"' in value else value) for key, value in told
    ]
    found = [(key, value) for key, value in found if isinstance(value, list) and value and all(map(_is_message, value))]
    return found[0] if len(found) == 1 else None


def _is_message(value: Any) -> bool:
    if not isinstance(value, Mapping) or value.get("kind") not in ("request", "response"):
        return False
    parts = value.get("parts")
    return isinstance(parts, list) and all(isinstance(each, Mapping) and "part_kind" in each for each in parts)


def _request(told: Mapping[str, Any]) -> list[dict[str, Any]]:
    out = []
    for part in told["parts"]:
        kind, content = part["part_kind"], part.get("content")
        answers = kind == "retry-prompt" and part.get("tool_call_id") and part.get("tool_name")
        role = "tool" if answers else _GIVEN.get(kind, "user")
        content = langchain.text_of(content) if isinstance(content, (str, list)) else content
        said = {"role": role, "content": content if isinstance(content, str) else json.dumps(content, default=str)}
        out.append({**said, "tool_call_id": part.get("tool_call_id")} if role == "tool" else said)
    return out


def _response(told: Mapping[str, Any]) -> dict[str, Any]:
    parts = told["parts"]
    texts = [str(part.get("content") or "") for part in parts if part["part_kind"] == "text"]
    thoughts = [str(part.get("content") or "") for part in parts if part["part_kind"] == "thinking"]
    calls = [
        chat.tool_call(part.get("tool_name"), part.get("tool_call_id"), chat.told(part, ["args"]).get("args", {}))
        for part in parts
        if part["part_kind"] == "tool-call"
    ]
    details = chat.table(told.get("provider_details"))
    logprobs, finish = details.get("logprobs"), details.get("finish_reason")
    said: dict[str, Any] = {"role": "assistant", "content": "".join(texts) or None}
    said |= {"reasoning_content": "".join(thoughts)} if any(thoughts) else {}
    said |= {"tool_calls": calls} if calls else {}
    said |= {"logprobs": {"content": logprobs}} if isinstance(logprobs, list) else {}
    return said | ({"finish_reason": finish} if isinstance(finish, str) else {})
