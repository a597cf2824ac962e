"""Conversations kept in the form of Anthropic's Messages API: content that is a list of blocks, `system` beside.

Source: anthropic 2.13 `types/message_param.py` and its blocks. The core reads requests and responses of that API; this
is the list that an agent keeps between them. Most chat templates write nothing of such a list, so without this the
words would be gone. Text only: that API gives no logprobs.
"""

from collections.abc import Mapping
from typing import Any

from tracegrad.data import chat

KEYS = ("tool_use_id", "input_schema", "text")
_SAID = ("text", "thinking", "redacted_thinking", "tool_use")
"""Types of what the assistant says."""


def of_talk(record: Any) -> list[dict[str, Any]] | None:
    """One trace with each message as the chat completions API has it; None where the assistant says no blocks."""
    talk = chat.table(record).get("messages")
    if not isinstance(talk, list) or "response" in record or not any(_says_blocks(each) for each in talk):
        return None
    messages = [made for each in talk for made in _messages(each)]
    if not any(chat.role(each) == "system" for each in messages):
        messages = chat.under(chat.text_of(record.get("system")), messages)
    tools = record.get("tools")
    schemas = chat.tools([_schema(each) for each in tools]) if isinstance(tools, list) else {}
    return [{**chat.without(record, "system"), **schemas, "messages": messages}]


def _says_blocks(message: Any) -> bool:
    content = chat.table(message).get("content")
    if chat.role(message) != "assistant" or not isinstance(content, list) or not content:
        return False
    return all(chat.table(block).get("type") in _SAID for block in content)


def _messages(message: Any) -> list[Any]:
    """What a message stands for: results of tools are messages of their own, before what else it says."""
    content = chat.table(message).get("content")
    if not isinstance(content, list):
        return [message]
    kinds: dict[str, list[Mapping[str, Any]]] = {}
    for block in content:
        kinds.setdefault(str(chat.table(block).get("type")), []).append(chat.table(block))
    out: list[Any] = [
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
    more = [dict(each) for each in content if chat.table(each).get("type") in kinds]
    if text or thoughts or calls or more or not out:
        said = {**message, "content": [*([{"type": "text", "text": text}] if text else []), *more] if more else text}
        said |= {"reasoning_content": thoughts} if thoughts else {}
        out.append(said | ({"tool_calls": calls} if calls else {}))
    return out


def _schema(tool: Any) -> Any:
    given = chat.table(tool)
    if "input_schema" not in given:
        return tool
    return {**chat.told(given, ("name", "description")), "parameters": given["input_schema"]}
