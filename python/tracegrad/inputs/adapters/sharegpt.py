"""ShareGPT: `conversations` of `{"from", "value"}`. Text only.

Source: the layout of FastChat's and LLaMA-Factory's data (from: human, gpt, system, function_call, observation, tool);
camel-ai 0.2.90's `ShareGPTDataCollector`, whose function_call is a list of OpenAI's calls.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

ROLES = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "model": "assistant",
    "bing": "assistant",
    "chatgpt": "assistant",
    "bard": "assistant",
    "function_call": "assistant",
    "system": "system",
    "observation": "tool",
    "tool": "tool",
    "function_response": "tool",
}
_KEYS = ("conversations", "conversation")
_ARGUMENTS = ("arguments", "parameters", "args", "input")


def of_talk(record: Any) -> list[dict[str, Any]] | None:
    """The record with messages in place of its conversation; None where it is none of this form."""
    talk = _talk(record)
    if not talk or not all(isinstance(each, Mapping) and "from" in each and "value" in each for each in talk):
        return None
    messages = [_message(each) for each in talk]
    if isinstance(system := record.get("system"), str) and system and messages[0]["role"] != "system":
        messages.insert(0, {"role": "system", "content": system})
    rest = {key: value for key, value in record.items() if key not in (*_KEYS, "system", "tools")}
    tools = _tools(record.get("tools"))
    return [{**rest, **({"tools": tools} if tools else {}), "messages": messages}]


def _message(told: Mapping[str, Any]) -> dict[str, Any]:
    """A message; what `function_call` says is a call, where it is the JSON of one or several."""
    speaker, said = str(told["from"]).lower(), told["value"]
    if speaker == "function_call" and isinstance(said, str):
        calls = _json(said)
        made = [_call(each) for each in (calls if isinstance(calls, list) else [calls])]
        if made and None not in made:
            return {"role": "assistant", "content": None, "tool_calls": made}
    return {"role": ROLES.get(speaker, str(told["from"])), "content": said}


def _call(told: Any) -> dict[str, Any] | None:
    """A call of a tool: its name and arguments, alone or wrapped as OpenAI does; None where it is none."""
    function = told.get("function", told) if isinstance(told, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        return None
    arguments = next((function[key] for key in _ARGUMENTS if key in function), None)
    if arguments is None:
        return None
    written = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    return {"type": "function", "function": {"name": function["name"], "arguments": written}}


def _tools(told: Any) -> list[Any]:
    """Schemas of tools, which may stand as text, and without the wrapping that templates expect."""
    found = _json(told) if isinstance(told, str) else told
    tools = [each for each in found if isinstance(each, Mapping)] if isinstance(found, list) else []
    return [dict(each) if "function" in each else {"type": "function", "function": dict(each)} for each in tools]


def _json(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _talk(record: Any) -> list[Any]:
    found = next((record[key] for key in _KEYS if key in record), None) if isinstance(record, Mapping) else None
    return found if isinstance(found, list) else []
