"""A prompt with its answer under whatever names, and preference pairs (chosen, rejected). Text only.

A pair becomes two traces of one group: the chosen one has reward 1, the rejected one 0, both 0.5 where they are equal;
the scores that a pair says are rewards by their own names.
"""

import hashlib
import itertools
import json
import re
from collections.abc import Mapping
from typing import Any

from tracegrad.inputs import chat, paths
from tracegrad.inputs.adapters import langchain
from tracegrad.inputs.adapters.loggers import opened, plain

PROMPTS = ("prompt", "instruction", "question", "query", "input", "inputs")
ANSWERS = ("response", "completion", "output", "answer", "generation", "response_text", "generated_text", "outputs")
_OF_MODEL = re.compile(
    r"(model|llm|ai|assistant|bot|agent|generated|predicted|sampled)(answer|response|completion|output|generation|reply)s?"
)
_OF_USER = re.compile(r"(user|human|customer)(prompt|question|query|input|message|request)")
_PROMPT = re.compile(r"(^|_)(prompt|input|inputs|query|instruction)(_text|_str)?$", re.I)
_LEAST = 8  # letters: a shorter text stands in others by chance
_WISHED = ("answer", "answers")
_SHOWN = re.compile(r"[A-Z]\w*\(\s*\w+=")
_TURNS = re.compile(r"\n\n(Human|Assistant):[ ]?")
_SIDES = ("chosen", "rejected")
_SCORES = ("score", "rating", "reward", "grade", "quality", "points")


def of_preference(record: Any) -> list[dict[str, Any]] | None:
    """Two traces of one group; None where a record is no pair."""
    if not (isinstance(record, Mapping) and is_said(record.get("chosen")) and is_said(record.get("rejected"))):
        return None
    prompt = messages_of(record.get("prompt") or record.get("question") or [], "user")
    sides = {side: messages_of(record[side], "assistant") for side in _SIDES}
    sides = {side: said[len(prompt) :] if said[: len(prompt)] == prompt else said for side, said in sides.items()}
    # What both sides begin with was given, as TRL's extract_prompt has it.
    both = zip(sides["chosen"][:-1], sides["rejected"][:-1], strict=False)
    shared = [one for one, _ in itertools.takewhile(lambda pair: pair[0] == pair[1], both)]
    sides = {side: said[len(shared) :] for side, said in sides.items()}
    is_whole = shared[:1] and shared[0].get("role") == "system" and all(each in shared for each in prompt)
    prompt = chat.under(record.get("system"), shared if is_whole else [*prompt, *shared])
    group = group_of(record, prompt)
    rest = chat.without(record, "prompt", "chosen", "rejected", "system", "id")
    made, equal, scores = [], sides["chosen"] == sides["rejected"], _scores(record)
    for side, said in sides.items():
        name = {"id": f"{record['id']}-{side}"} if isinstance(record.get("id"), (str, int)) else {}
        reward = 0.5 if equal else float(side == "chosen")
        rewards = {"rewards": scores[side]} if scores[side] else {}
        messages = [*chat.given(prompt), *said]
        made.append({**rest, **name, "group": group, "reward": reward, **rewards, "messages": messages})
    return made


def _scores(record: Mapping[str, Any]) -> dict[str, dict[str, float]]:
    """What each side was rated, where both were, by a name with the side before or behind it."""
    named = {plain(str(key)): value for key, value in record.items()}
    out: dict[str, dict[str, float]] = {side: {} for side in _SIDES}
    for name in _SCORES:
        told = {side: named.get(side + name, named.get(name + side)) for side in _SIDES}
        found = {side: None if isinstance(each, bool) else paths.number(each) for side, each in told.items()}
        for side, each in found.items():
            if each is not None and None not in found.values():
                out[side][name] = each
    return out


def of_answered(record: Any) -> list[dict[str, Any]] | None:
    """One trace: what was given, and the answer as the sampled turn; None where a record is not a prompt with it.

    Messages are the prompt where an answer must follow them, and no prompt of another name counts then.
    """
    if not isinstance(record, Mapping):
        return None
    answered = _named({key: value for key, value in record.items() if not _is_raw(value)}, ANSWERS, _OF_MODEL)
    asked = _whole(record, _named(record, PROMPTS, _OF_USER))
    if "messages" in record:
        asked = "messages" if answered and record[answered] and asks(record["messages"], answered) else None
    if asked is None or answered is None:
        return None
    prompt = messages_of(record[asked], "user")
    if asked == "instruction" and isinstance(more := record.get("input"), str) and more:
        prompt = [{"role": "user", "content": f"{record['instruction']}\n\n{more}"}]
    prompt = chat.under(record.get("system"), prompt)
    said = messages_of(record[answered], "assistant")
    said = [{**each, "content": langchain.text_of(each["content"])} if "content" in each else each for each in said]
    rest = chat.without(record, asked, answered, "system", "input" if asked == "instruction" else asked)
    if len(said) == 1:
        said = [{**said[0], **{key: rest.pop(key) for key in chat.OF_ANSWER if key in rest}}]
    return [{**rest, "messages": [*chat.given(prompt), *said]}]


def _whole(record: Mapping[str, Any], asked: str | None) -> str | None:
    """Under which name the whole prompt stands: the longest text of a prompt that holds the one under `asked`."""
    if asked is None or not isinstance(record[asked], str) or len(record[asked]) < _LEAST:
        return asked
    others = [name for name, text in record.items() if _PROMPT.search(str(name)) and isinstance(text, str)]
    return max((asked, *(name for name in others if record[asked] in record[name])), key=lambda name: len(record[name]))


def group_of(record: Mapping[str, Any], prompt: Any) -> Any:
    """The group that a record names, else one of its prompt."""
    named = next((record[key] for key in ("group", "prompt_id") if record.get(key) is not None), None)
    text = json.dumps(prompt, sort_keys=True, default=str).encode()
    return f"prompt-{hashlib.sha256(text).hexdigest()[:16]}" if named is None else named


def asks(talk: Any, answer: str) -> bool:
    """Whether messages are what the text under a key is the answer to: they end with the user, or with a tool.

    Not those that say themselves which tokens were sampled; and after a tool `answer` is what the task asks for.
    """
    if not isinstance(talk, list) or not is_said(talk) or talk[-1]["role"] == "assistant":
        return False
    if talk[-1]["role"] != "user" and answer in _WISHED:
        return False
    return not any(key in each for each in talk for key in (*chat.OF_ANSWER, "generation"))


def _is_raw(value: Any) -> bool:
    """Whether a text is a response, the events of one, or how Python shows one, and no answer."""
    if isinstance(value, str) and _SHOWN.match(value):
        return True
    told = opened(value) if isinstance(value, str) else None
    return (isinstance(told, Mapping) and "choices" in told) or (isinstance(told, list) and value[:1] != "[")


def _named(record: Mapping[str, Any], names: tuple[str, ...], longer: re.Pattern[str]) -> str | None:
    """The first of these names under which something is said, or else the one longer name that says whose it is."""
    found = next((name for name in names if is_said(record.get(name))), None)
    others = [name for name in record if longer.fullmatch(plain(str(name))) and is_said(record[name])]
    return others[0] if found is None and len(others) == 1 else found


def is_said(value: Any) -> bool:
    """Whether a value is a text, a message, or a list of messages."""
    if isinstance(value, str):
        return True
    if isinstance(value, Mapping):
        return isinstance(value.get("role"), str)
    return isinstance(value, list) and bool(value) and all("role" in chat.table(each) for each in value)


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
