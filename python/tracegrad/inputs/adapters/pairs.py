"""A prompt with its answer under whatever names, and preference pairs (chosen, rejected). Text only.

A pair becomes two traces of one group: the chosen one has reward 1, the rejected one 0, or the scores that it says.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from typing import Any

PROMPTS = ("prompt", "instruction", "question", "query", "input", "inputs")
ANSWERS = ("response", "completion", "output", "answer", "generation", "response_text", "generated_text", "outputs")
OF_ANSWER = ("logprobs", "token_ids", "finish_reason", "prompt_token_ids")
_TURNS = re.compile(r"\n\n(Human|Assistant):[ ]?")
_SCORES = {"chosen": ("score_chosen", "chosen_score"), "rejected": ("score_rejected", "rejected_score")}


def of_preference(record: Any) -> list[dict[str, Any]] | None:
    """Two traces of one group; None where a record is no pair."""
    if not (isinstance(record, Mapping) and is_said(record.get("chosen")) and is_said(record.get("rejected"))):
        return None
    prompt = messages_of(record.get("prompt") or record.get("question") or [], "user")
    sides = {side: messages_of(record[side], "assistant") for side in ("chosen", "rejected")}
    if not prompt:
        common = 0
        while _same(sides["chosen"], sides["rejected"], common):
            common += 1
        prompt = sides["chosen"][:common]
    if isinstance(system := record.get("system"), str) and system:
        prompt = [{"role": "system", "content": system}, *prompt]
    group = group_of(record, prompt)
    rest = {key: value for key, value in record.items() if key not in ("prompt", "chosen", "rejected", "system", "id")}
    made = []
    for side, default in (("chosen", 1.0), ("rejected", 0.0)):
        said = sides[side]
        said = said[len(prompt) :] if said[: len(prompt)] == prompt else said
        told = next((record[key] for key in _SCORES[side] if isinstance(record.get(key), (int, float))), default)
        name = {"id": f"{record['id']}-{side}"} if isinstance(record.get("id"), (str, int)) else {}
        messages = [*given(prompt), *said]
        made.append({**rest, **name, "group": group, "reward": told, "messages": messages})
    return made


def of_answered(record: Any) -> list[dict[str, Any]] | None:
    """One trace: what was given, and the answer as the sampled turn; None where a record is not a prompt with it."""
    if not isinstance(record, Mapping) or "messages" in record:
        return None
    asked, answered = _first(record, PROMPTS), _first(record, ANSWERS)
    if asked is None or answered is None:
        return None
    prompt = messages_of(record[asked], "user")
    if asked == "instruction" and isinstance(more := record.get("input"), str) and more:
        prompt = [{"role": "user", "content": f"{record['instruction']}\n\n{more}"}]
    if isinstance(system := record.get("system"), str) and system:
        prompt = [{"role": "system", "content": system}, *prompt]
    said = messages_of(record[answered], "assistant")
    used = (asked, answered, "system", "input" if asked == "instruction" else asked)
    rest = {key: value for key, value in record.items() if key not in used}
    if said and len(said) == 1:
        said = [{**said[0], **{key: rest.pop(key) for key in OF_ANSWER if key in rest}}]
    return [{**rest, "messages": [*given(prompt), *said]}]


def group_of(record: Mapping[str, Any], prompt: Any) -> Any:
    """The group that a record names, else one of its prompt."""
    named = next((record[key] for key in ("group", "prompt_id") if record.get(key) is not None), None)
    text = json.dumps(prompt, sort_keys=True, default=str).encode()
    return f"prompt-{hashlib.sha256(text).hexdigest()[:16]}" if named is None else named


def _first(record: Mapping[str, Any], names: tuple[str, ...]) -> str | None:
    return next((name for name in names if is_said(record.get(name))), None)


def is_said(value: Any) -> bool:
    """Whether a value is a text, a message, or a list of messages."""
    if isinstance(value, str):
        return True
    if isinstance(value, Mapping):
        return isinstance(value.get("role"), str)
    return (
        isinstance(value, list) and bool(value) and all(isinstance(each, Mapping) and "role" in each for each in value)
    )


def messages_of(value: Any, role: str) -> list[dict[str, Any]]:
    """A text as the message of a role, or the turns that it writes out as Anthropic's do; messages as they are.

    >>> messages_of("\\n\\nHuman: 2+2?\\n\\nAssistant: 4", "assistant")[1]
    {'role': 'assistant', 'content': '4'}
    """
    if isinstance(value, str):
        first, *turns = _TURNS.split(value)
        if first or turns[:1] != ["Human"]:
            return [{"role": role, "content": value}]
        said = [
            {"role": "user" if who == "Human" else "assistant", "content": text}
            for who, text in zip(turns[::2], turns[1::2], strict=True)
        ]
        return said if said[-1]["content"] else said[:-1]  # a prompt ends where the assistant begins
    return [dict(value)] if isinstance(value, Mapping) else [dict(each) for each in value]


def given(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Messages of a prompt: what the assistant says there was not sampled."""
    return [{**each, "sampled": False} if each.get("role") == "assistant" else each for each in messages]


def _same(one: list[Any], other: list[Any], at: int) -> bool:
    return at < min(len(one), len(other)) - 1 and one[at] == other[at]
