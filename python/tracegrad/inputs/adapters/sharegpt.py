"""ShareGPT: `conversations` of `{"from", "value"}`. Text only.

Source: the layout of FastChat's and LLaMA-Factory's data (from: human, gpt, system, function_call, observation, tool);
camel-ai 0.2.90's `ShareGPTDataCollector`, whose function_call is a list of OpenAI's calls.
"""

from collections.abc import Mapping
from typing import Any

from tracegrad.inputs import chat, paths

_SPEAKERS = {
    "user": "human user",
    "assistant": "gpt assistant model bing chatgpt bard function_call",
    "system": "system",
    "tool": "observation tool function_response",
}
ROLES = {speaker: role for role, speakers in _SPEAKERS.items() for speaker in speakers.split()}
_KEYS = ("conversations", "conversation")
_ARGUMENTS = ("arguments", "parameters", "args", "input")


def of_talk(record: Any) -> list[dict[str, Any]] | None:
    """The record with messages in place of its conversation; None where it is none of this form."""
    talk = next((record[key] for key in _KEYS if key in record), None) if isinstance(record, Mapping) else None
    if (
        not isinstance(talk, list)
        or not talk
        or not all(isinstance(each, Mapping) and "from" in each and "value" in each for each in talk)
    ):
        return None
    messages = [_message(each) for each in talk]
    if messages[0]["role"] != "system":
        messages = chat.under(record.get("system"), messages)
    rest = chat.without(record, *_KEYS, "system", "tools")
    tools = _tools(record.get("tools"))
    return [{**rest, **({"tools": tools} if tools else {}), "messages": messages}]


def _message(told: Mapping[str, Any]) -> dict[str, Any]:
    """A message; what `function_call` says is a call, where it is the JSON of one or several."""
    speaker, said = str(told["from"]).lower(), told["value"]
    if speaker == "function_call" and isinstance(said, str):
        calls = paths.opened(said.strip())
        made = [_call(each) for each in (calls if isinstance(calls, list) else [calls])]
        if made and None not in made:
            return {"role": "assistant", "content": None, "tool_calls": made}
    return {"role": ROLES.get(speaker, str(told["from"])), "content": said}


def _call(told: Any) -> dict[str, Any] | None:
    """A call of a tool: its name and arguments, alone or wrapped as OpenAI does; None where it is none."""
    function = chat.table(chat.table(told).get("function", told))
    arguments = next((function[key] for key in _ARGUMENTS if key in function), None)
    if not isinstance(function.get("name"), str) or arguments is None:
        return None
    return {"type": "function", "function": {"name": function["name"], "arguments": chat.written(arguments)}}


def _tools(told: Any) -> list[Any]:
    """Schemas of tools, which may stand as text, and without the wrapping that templates expect."""
    found = paths.opened(told.strip() if isinstance(told, str) else told)
    tools = [each for each in found if isinstance(each, Mapping)] if isinstance(found, list) else []
    return [dict(each) if "function" in each else {"type": "function", "function": dict(each)} for each in tools]
