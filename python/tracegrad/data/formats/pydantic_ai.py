"""Convert Pydantic AI's message history: requests and responses, each a list of parts.

Source: pydantic-ai 2 `messages.py` (`ModelMessagesTypeAdapter`, `all_messages_json`). If logprobs were requested, they
are in the `provider_details` of a response.
"""

import json
from collections.abc import Mapping
from typing import Any

from tracegrad.data import chat
from tracegrad.data.formats import langchain
from tracegrad.data.formats.openai import parse_json_or_events

_ROLES = {"system-prompt": "system", "user-prompt": "user", "tool-return": "tool", "retry-prompt": "user"}


def of_history(record: Any) -> list[dict[str, Any]] | None:
    """Convert a history to one trace; no trace without a model response, None unless there is exactly one history."""
    match = _history(record)
    if match is None:
        return None
    key, history = match
    messages: list[dict[str, Any]] = []
    for item in history:
        messages += [_response(item)] if item["kind"] == "response" else _request(item)
    instructions = next((item["instructions"] for item in history if isinstance(item.get("instructions"), str)), None)
    if not any(item["role"] == "system" for item in messages):
        messages = chat.with_system_prompt(instructions, messages)
    other_fields = chat.without(chat.as_mapping(record), key)
    return [{**other_fields, "messages": messages}] if chat.has_answer(messages) else []


def _history(record: Any) -> tuple[str, list[Any]] | None:
    items = record.items() if isinstance(record, Mapping) else [("", record)]
    histories = [
        (str(key), parse_json_or_events(value) if isinstance(value, str) and '"part_kind"' in value else value)
        for key, value in items
    ]
    histories = [
        (key, value) for key, value in histories if isinstance(value, list) and value and all(map(_is_message, value))
    ]
    return histories[0] if len(histories) == 1 else None


def _is_message(value: Any) -> bool:
    if not isinstance(value, Mapping) or value.get("kind") not in ("request", "response"):
        return False
    parts = value.get("parts")
    return isinstance(parts, list) and all(isinstance(each, Mapping) and "part_kind" in each for each in parts)


def _request(request: Mapping[str, Any]) -> list[dict[str, Any]]:
    messages = []
    for part in request["parts"]:
        kind, content = part["part_kind"], part.get("content")
        is_tool_result = kind == "retry-prompt" and part.get("tool_call_id") and part.get("tool_name")
        role = "tool" if is_tool_result else _ROLES.get(kind, "user")
        content = langchain.text_of(content) if isinstance(content, (str, list)) else content
        message = {"role": role, "content": content if isinstance(content, str) else json.dumps(content, default=str)}
        messages.append({**message, "tool_call_id": part.get("tool_call_id")} if role == "tool" else message)
    return messages


def _response(response: Mapping[str, Any]) -> dict[str, Any]:
    parts = response["parts"]
    texts = [str(part.get("content") or "") for part in parts if part["part_kind"] == "text"]
    thoughts = [str(part.get("content") or "") for part in parts if part["part_kind"] == "thinking"]
    calls = [
        chat.tool_call(part.get("tool_name"), part.get("tool_call_id"), chat.pick(part, ["args"]).get("args", {}))
        for part in parts
        if part["part_kind"] == "tool-call"
    ]
    details = chat.as_mapping(response.get("provider_details"))
    logprobs, finish = details.get("logprobs"), details.get("finish_reason")
    message: dict[str, Any] = {"role": "assistant", "content": "".join(texts) or None}
    message |= {"reasoning_content": "".join(thoughts)} if any(thoughts) else {}
    message |= {"tool_calls": calls} if calls else {}
    message |= {"logprobs": {"content": logprobs}} if isinstance(logprobs, list) else {}
    return message | ({"finish_reason": finish} if isinstance(finish, str) else {})
