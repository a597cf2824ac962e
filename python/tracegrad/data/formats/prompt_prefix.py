"""Put messages and system prompts that a record stores next to its conversation in front of it.

Examples are `system_prompt`, `instructions`, and Kani's `always_included_messages`. They were part of every prompt.
"""

import re
from collections.abc import Iterable, Mapping
from typing import Any

from tracegrad.data import chat
from tracegrad.data.field_map import BadValueError

NAME = "prompt_prefix"
_SYSTEM = ("system", "developer")
_STRINGS = (
    *("system", "system_prompt", "systemPrompt", "system_message", "systemMessage", "system_instruction"),
    *("systemInstruction", "instructions", "developer_prompt", "preamble"),
)
"""Fields that can contain a system prompt as text."""
KEYS = (
    *_STRINGS,
    *("system_messages", "systemMessages", "always_included_messages", "pinned_messages", "prefix", "prefix_messages"),
    *("few_shot", "fewshot", "few_shot_messages", "few_shot_examples", "shots", "examples", "demonstrations", "demos"),
)
"""Fields that contain a system prompt or messages in front of a conversation."""
_CALLS = {"request", "response", "calls", "choices"}
"""Fields of a record of calls, whose requests are complete."""
_OTHERS = re.compile(r"expect|reference|ideal|gold|target|ground|truth|label|reject|chosen|prefer", re.I)
"""Names of lists of messages that are no part of a prompt."""


def complete(record: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a record whose messages start with the system messages next to them; the same record if there are none.

    Raises:
        BadValueError: as `with_prefix`.
    """
    key = "messages" if "messages" in record else "history"  # The latter is SWE-agent's.
    messages = record.get(key)
    if record.keys().isdisjoint(KEYS) or not record.keys().isdisjoint(_CALLS) or not chat.is_messages(messages):
        return record
    longer = with_prefix([chat.pick(record, KEYS)], key, messages)
    return record if longer is messages else {**record, key: longer}


def with_prefix(
    parents: Iterable[Mapping[str, Any]], key: str, messages: list[Any], original: list[Any] | None = None
) -> list[Any]:
    """Return the messages after the system messages that the parents store under other keys.

    Args:
        parents: the objects that contain the conversation.
        key: the key of the conversation in them.
        messages: the conversation.
        original: the list in the record that was converted to it.

    Raises:
        BadValueError: if messages next to the conversation are not in it, and are not clearly in front of it.
    """
    keys = {chat.prompt_key([each]) for each in messages}
    prefixes: list[tuple[str, list[dict[str, Any]]]] = []
    for parent in parents:
        for name, value in parent.items():
            if name in _STRINGS and isinstance(value, str) and value.strip():
                prefixes.append((name, [{"role": "system", "content": value}]))
            elif name in KEYS and isinstance(value, Mapping) and chat.role(value) in _SYSTEM:
                system: list[dict[str, Any]] = [{**value}]
                prefixes += [] if chat.prompt_key(system) in keys else [(name, system)]
            elif name != key and value is not original and chat.is_messages(value) and not _OTHERS.search(name):
                missing = [each for each in value if chat.prompt_key([each]) not in keys]
                if missing and not all(chat.role(each) in _SYSTEM for each in value):
                    raise _refusal(name, key, "are not in the conversation")
                prefixes += [(name, value)] if missing else []
    if not prefixes:
        return messages
    texts = [str(chat.text_of(each.get("content"))) for each in messages]
    has_system = any(chat.role(each) in _SYSTEM for each in messages)
    lacking = [
        (name, value)
        for name, value in prefixes
        if not (name in _STRINGS and (has_system or any(value[0]["content"].strip() in text for text in texts)))
    ]
    contents = {chat.prompt_key([{**each, "role": "system"} for each in value]) for _, value in lacking}
    if len(contents) > 1 or (lacking and has_system):
        raise _refusal(lacking[0][0], key, "are not those at its start")
    return [*lacking[0][1], *messages] if lacking else messages


def _refusal(name: str, key: str, problem: str) -> BadValueError:
    fix = f"Write them into `{key}` where they were sent, or remove `{name}`"
    return BadValueError((f"the messages under `{name}` {problem} under `{key}`", "The prompt would lack them", fix))
