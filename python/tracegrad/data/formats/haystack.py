"""Convert messages of Haystack, whose calls and results are parts of the content without a type.

Source: haystack-ai 3.4.1 `dataclasses/chat_message.py` (`ChatMessage.to_dict`).
"""

from collections.abc import Mapping
from typing import Any

from tracegrad.data import chat
from tracegrad.data.field_map import BadValueError

NAME = "haystack"
KEYS = ("tool_call", "tool_call_result")
_PARTS = {*KEYS, "text", "reasoning"}


def of_talk(record: Any) -> list[dict[str, Any]] | None:
    """Return a record with messages in OpenAI's form; None for a record whose messages have no call or result.

    Raises:
        BadValueError: if a message has a part that is not text, reasoning, a call or a result.
    """
    messages = chat.as_mapping(record).get("messages")
    if not chat.is_messages(messages) or not any(KEYS[0] in part or KEYS[1] in part for part in _parts(messages)):
        return None
    results = [chat.text_of(part[KEYS[1]]["result"]) for part in _parts(messages) if KEYS[1] in part]
    unknown = {str(key) for part in _parts(messages) for key in part} - _PARTS
    if unknown or not all(isinstance(result, str) for result in results):
        unknown = unknown or {"image or file in a result"}
        why = "Only text, reasoning, calls and results of tools are read"
        fix = 'Leave such records out: on_error="skip"'
        raise BadValueError((f"a message of Haystack has parts of the kind {', '.join(sorted(unknown))}", why, fix))
    return [{**record, "messages": [each for message in messages for each in _messages(message)]}]


def _parts(messages: list[dict[str, Any]]) -> list[Mapping[str, Any]]:
    """Return the parts without a type of all messages."""
    contents = [message["content"] for message in messages if isinstance(message.get("content"), list)]
    return [part for content in contents for part in content if isinstance(part, Mapping) and "type" not in part]


def _messages(message: dict[str, Any]) -> list[dict[str, Any]]:
    """Return one message, or one for each result of a tool."""
    parts = _parts([message])
    if not parts or len(parts) != len(message["content"]):
        return [message]
    results = [part[KEYS[1]] for part in parts if KEYS[1] in part]
    if results:
        return [
            {"role": "tool", "content": chat.text_of(each["result"]), "tool_call_id": each["origin"]["id"]}
            | {"name": each["origin"]["tool_name"]}
            for each in results
        ]
    calls = [part[KEYS[0]] for part in parts if KEYS[0] in part]
    tool_calls = [chat.tool_call(each["tool_name"], each["id"], each["arguments"]) for each in calls]
    thoughts = "".join(part["reasoning"]["reasoning_text"] for part in parts if "reasoning" in part)
    converted = {**message, "content": "".join(part["text"] for part in parts if "text" in part)}
    converted |= {"tool_calls": tool_calls} if tool_calls else {}
    return [converted | ({"reasoning_content": thoughts} if thoughts else {})]
