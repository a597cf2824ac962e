"""What records of chats hold, whoever wrote them: roles, text, sampling, and tools as a chat template gets them.

Nothing of a producer is known here, and no files. `sessions` and the adapters use it.
"""

import json
from collections.abc import Iterable, Mapping
from typing import Any

from tracegrad.data import json_path
from tracegrad.data.sampling import SPELLED

SAMPLING = ("temperature", "top_p", *SPELLED)
PARTIAL = {"sampling_defaults": "unknown"}
"""Said of a call whose request was put together here: what it leaves out is unknown, and no default of an API."""
OF_ANSWER = ("logprobs", "token_ids", "finish_reason", "prompt_token_ids")
"""What is said of the tokens of an answer, beside it."""
_SCHEMA = ("name", "description", "parameters")


def table(value: Any) -> Mapping[str, Any]:
    """An object, empty where a value is none."""
    return value if isinstance(value, Mapping) else {}


def within(record: Any, path: str) -> Any:
    """What stands at a path, None where nothing does."""
    try:
        return json_path.at(record, path)
    except json_path.Missing:
        return None


def told(record: Any, names: Iterable[str]) -> dict[str, Any]:
    """What a record says under some names, but null; nothing where it is no object."""
    return {name: record[name] for name in names if record.get(name) is not None} if table(record) else {}


def sampling(record: Any) -> dict[str, Any]:
    """What a record says of sampling: temperature and top_p as numbers, and what stands beside one of them."""
    found = {name: value for name, value in told(record, SAMPLING[:2]).items() if isinstance(value, (int, float))}
    return {**told(record, SPELLED), **found} if found else {}


def without(record: Mapping[str, Any], *names: str) -> dict[str, Any]:
    """A record but for some names."""
    return {name: value for name, value in record.items() if name not in names}


def role(message: Any) -> Any:
    """The role of a message, None of what is none."""
    return table(message).get("role")


def has_answer(messages: Any) -> bool:
    """Whether the assistant says something in a list of messages."""
    return isinstance(messages, list) and any(role(each) == "assistant" for each in messages)


def given(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Messages of a prompt: what the assistant says there was not sampled."""
    return [{**each, "sampled": False} if each.get("role") == "assistant" else each for each in messages]


def under(system: Any, messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Messages below a system prompt, where that is a text."""
    says = isinstance(system, str) and system
    return [{"role": "system", "content": system}, *messages] if says else messages


def text_of(content: Any) -> Any:
    """Text; a list of parts that all have text is one text, as a template gets it."""
    if not isinstance(content, list):
        return content
    parts = [part.get("text") if isinstance(part, Mapping) else part for part in content]
    texts = [part for part in parts if isinstance(part, str)]
    return "".join(texts) if len(texts) == len(parts) else content


def written(arguments: Any) -> str:
    """Arguments of a call as text: as they stand where they are one."""
    return arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)


def tool_call(name: Any, identity: Any, arguments: Any) -> dict[str, Any]:
    """A call of a tool as OpenAI writes it."""
    return {"id": identity, "type": "function", "function": {"name": name, "arguments": written(arguments)}}


def tools(schemas: list[Any]) -> dict[str, Any]:
    """`tools` with the schemas of a list, wrapped as OpenAI does; nothing where there are none."""
    made = []
    for each in schemas:
        if isinstance(each, Mapping):
            schema = {name: each[name] for name in _SCHEMA if name in each}  # null too, as it was asked
            made.append(dict(each) if "function" in each else {"type": "function", "function": schema})
    return {"tools": made} if made else {}
