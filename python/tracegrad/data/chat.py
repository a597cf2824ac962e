"""Read chat records of any producer: roles, text, sampling options, and tools in the form that chat templates expect.

These helpers are independent of producers and files.
"""

import json
from collections.abc import Iterable, Mapping
from typing import Any, TypeGuard

from tracegrad.data import json_path
from tracegrad.data.sampling import OPTION_SPELLINGS

SAMPLING = ("temperature", "top_p", *OPTION_SPELLINGS)
PARTIAL = {"sampling_defaults": "unknown"}
"""Marks a call whose request was rebuilt from parts: an option that it lacks is unknown, not the default of an API."""
ANSWER_FIELDS = ("logprobs", "token_ids", "finish_reason", "prompt_token_ids")
"""Fields about the tokens of an answer, stored next to it."""
_SCHEMA = ("name", "description", "parameters")


def as_mapping(value: Any) -> Mapping[str, Any]:
    """Return the value if it is an object, else an empty one."""
    return value if isinstance(value, (dict, Mapping)) else {}


def get_path(record: Any, path: str) -> Any:
    """Return the value at a path, None if the path does not exist."""
    try:
        return json_path.get(record, path)
    except json_path.Missing:
        return None


def pick(record: Any, names: Iterable[str]) -> dict[str, Any]:
    """Return the fields of a record with these names that are not null; {} if it is not an object."""
    return {name: record[name] for name in names if record.get(name) is not None} if as_mapping(record) else {}


def sampling(record: Any) -> dict[str, Any]:
    """Return the sampling options of a record; {} unless temperature or top_p is a number."""
    numbers = {name: value for name, value in pick(record, SAMPLING[:2]).items() if isinstance(value, (int, float))}
    return {**pick(record, OPTION_SPELLINGS), **numbers} if numbers else {}


def without(record: Mapping[str, Any], *names: str) -> dict[str, Any]:
    """Return a copy of a record without the fields with these names."""
    return {name: value for name, value in record.items() if name not in names}


def role(message: Any) -> Any:
    """Return the role of a message, None if the value is not a message."""
    return as_mapping(message).get("role")


def was_sampled(message: Any) -> bool:
    """Return whether the core reads a message as sampled: it is the assistant's, and not marked as context."""
    if role(message) != "assistant":
        return False
    return message.get("sampled") is not False and message.get("trainable") is not False and message.get("weight") != 0


def is_messages(value: Any) -> TypeGuard[list[dict[str, Any]]]:
    """Return whether a value is a list of messages that is not empty."""
    return isinstance(value, list) and bool(value) and all(isinstance(role(each), str) for each in value)


def with_parsed_messages(record: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a record whose `messages` are the JSON text of a list of messages with that list; else unchanged."""
    messages = record.get("messages")
    parsed = json_path.parse_json_string(messages)
    return {**record, "messages": parsed} if isinstance(messages, str) and is_messages(parsed) else record


def has_answer(messages: Any) -> bool:
    """Return whether a list of messages contains an assistant message."""
    return isinstance(messages, list) and any(role(each) == "assistant" for each in messages)


def mark_not_sampled(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the messages of a prompt, with assistant messages marked as not sampled."""
    return [{**message, "sampled": False} if message.get("role") == "assistant" else message for message in messages]


def with_system_prompt(system: Any, messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return messages after a system message, if the system prompt is a non-empty string; else the messages."""
    has_system = isinstance(system, str) and system
    return [{"role": "system", "content": system}, *messages] if has_system else messages


def text_of(content: Any) -> Any:
    """Return content as one string, as templates expect, if it is a list whose parts all have text; else unchanged."""
    if not isinstance(content, list):
        return content
    parts = [part.get("text") if isinstance(part, Mapping) else part for part in content]
    texts = [part for part in parts if isinstance(part, str)]
    return "".join(texts) if len(texts) == len(parts) else content


_MARKS = ("id", "created_at", "created", "timestamp", "cache_control", "index")
"""Fields of the parts of a content that no model reads."""
_READ = ("name", "reasoning_content", "reasoning", "thinking")


def prompt_key(messages: Iterable[Any]) -> bytes:
    """Return what a model reads of messages, as bytes: equal for prompts that differ only in ids, times and metadata.

    It consists of roles, contents, names, reasoning, and the names and arguments of tool calls.

    >>> asked = {"role": "user", "content": "2+2?"}
    >>> prompt_key([{**asked, "id": "m1", "created_at": 5}]) == prompt_key([{"role": "user", "content": ["2+2?"]}])
    True
    """
    return json.dumps([_read(message) for message in messages], sort_keys=True, default=str).encode()


def _read(message: Any) -> Any:
    if not isinstance(message, Mapping):
        return message
    content = text_of(message.get("content"))
    if isinstance(content, list):
        content = [without(part, *_MARKS) if isinstance(part, Mapping) else part for part in content]
    calls = message.get("tool_calls")
    functions = (
        [as_mapping(as_mapping(call).get("function", call)) for call in calls] if isinstance(calls, list) else []
    )
    tool_calls = [[each.get("name"), json_path.parse_json_string(each.get("arguments"))] for each in functions]
    return [message.get("role"), content, pick(message, _READ), tool_calls]


def arguments_json(arguments: Any) -> str:
    """Return the arguments of a tool call as JSON; a string is returned unchanged."""
    return arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)


def tool_call(name: Any, identity: Any, arguments: Any) -> dict[str, Any]:
    """Return a tool call in OpenAI's form."""
    return {"id": identity, "type": "function", "function": {"name": name, "arguments": arguments_json(arguments)}}


def tools(schemas: list[Any]) -> dict[str, Any]:
    """Return {"tools": schemas}, each in OpenAI's `function` wrapper; {} if there are none."""
    wrapped = []
    for item in schemas:
        if isinstance(item, Mapping):
            schema = {name: item[name] for name in _SCHEMA if name in item}  # Null too, as in the request.
            wrapped.append(dict(item) if "function" in item else {"type": "function", "function": schema})
    return {"tools": wrapped} if wrapped else {}
