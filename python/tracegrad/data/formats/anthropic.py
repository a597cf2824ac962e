"""Convert conversations in the form of Anthropic's Messages API: content as a list of blocks, a separate `system`.

Source: anthropic 2.13 `types/message_param.py` and its blocks. The core reads requests and responses of that API. This
module reads the list of messages that an agent keeps between calls. Most chat templates ignore such blocks, so that
their text would be lost without a conversion. Text only: the API returns no logprobs.
"""

from collections.abc import Mapping
from typing import Any

from tracegrad.data import chat
from tracegrad.data.formats import message_parts

KEYS = ("tool_use_id", "input_schema", "text")
_ASSISTANT_BLOCKS = ("text", "thinking", "redacted_thinking", "tool_use")
"""Types of blocks in assistant messages."""


def of_talk(record: Any) -> list[dict[str, Any]] | None:
    """Convert messages to those of the chat completions API; None if no assistant message consists of blocks."""
    conversation = chat.as_mapping(record).get("messages")
    if (
        not isinstance(conversation, list)
        or "response" in record
        or not any(_has_blocks(each) for each in conversation)
    ):
        return None
    messages = [converted for each in conversation for converted in convert_message(each)]
    if not any(chat.role(each) == "system" for each in messages):
        messages = chat.with_system_prompt(chat.text_of(record.get("system")), messages)
    tools = record.get("tools")
    schemas = chat.tools([_schema(each) for each in tools]) if isinstance(tools, list) else {}
    return [{**chat.without(record, "system"), **schemas, "messages": messages}]


def _has_blocks(message: Any) -> bool:
    content = chat.as_mapping(message).get("content")
    if chat.role(message) != "assistant" or not isinstance(content, list) or not content:
        return False
    blocks = [chat.as_mapping(block) for block in content]
    is_text = all(block.get("text") is None or isinstance(block["text"], str) for block in blocks)
    return is_text and all(block.get("type") in _ASSISTANT_BLOCKS for block in blocks)


def convert_message(message: Any) -> list[Any]:
    """Convert a message; each tool result becomes a separate message before the other content."""
    content = chat.as_mapping(message).get("content")
    if not isinstance(content, list):
        return [message]
    if message["role"] == "assistant" and any(chat.as_mapping(each).get("type") == "tool_result" for each in content):
        return list(message_parts.convert([message]))
    kinds: dict[str, list[Mapping[str, Any]]] = {}
    for block in content:
        kinds.setdefault(str(chat.as_mapping(block).get("type")), []).append(chat.as_mapping(block))
    messages: list[Any] = [
        {"role": "tool", "tool_call_id": each.get("tool_use_id"), "content": chat.text_of(each.get("content")) or ""}
        for each in kinds.pop("tool_result", [])
    ]
    kinds.pop("redacted_thinking", None)
    text, thoughts = (
        "".join(str(each.get(kind) or "") for each in kinds.pop(kind, [])) for kind in ("text", "thinking")
    )
    calls = [
        chat.tool_call(each.get("name"), each.get("id"), each.get("input") or {}) for each in kinds.pop("tool_use", [])
    ]
    other_blocks = [dict(each) for each in content if chat.as_mapping(each).get("type") in kinds]
    if text or thoughts or calls or other_blocks or not messages:
        converted = {
            **message,
            "content": [*([{"type": "text", "text": text}] if text else []), *other_blocks] if other_blocks else text,
        }
        converted |= {"reasoning_content": thoughts} if thoughts else {}
        messages.append(converted | ({"tool_calls": calls} if calls else {}))
    return messages


def _schema(tool: Any) -> Any:
    fields = chat.as_mapping(tool)
    if "input_schema" not in fields:
        return tool
    return {**chat.pick(fields, ("name", "description")), "parameters": fields["input_schema"]}
