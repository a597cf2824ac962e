"""Convert prompts with one or several answers, preference pairs, ShareGPT and lm-evaluation-harness samples.

Text only. A preference pair becomes two traces of one group with rewards 1 and 0 (0.5 each if equal), or with the
scores of the pair. Several answers are one group; a list of their length beside them is one value each.
Sources: FastChat's and LLaMA-Factory's ShareGPT data, camel-ai 0.2.90 `ShareGPTDataCollector`; lm-eval 0.4
`evaluator_utils.py`, `evaluator.py` (samples_TASK.jsonl).
"""

import hashlib
import itertools
import json
import re
from collections.abc import Mapping
from typing import Any

from tracegrad.data import chat, json_path
from tracegrad.data.formats import langchain, record_fields
from tracegrad.data.formats.openai import opened, plain

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
        found = {side: None if isinstance(each, bool) else json_path.number(each) for side, each in told.items()}
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


def of_sample(record: Any) -> list[dict[str, Any]] | None:
    """One trace for each answer of each request of a row of samples, asked by the messages of the chat template or by
    text as a user's; None of what is no such row.
    """
    if not (isinstance(record, Mapping) and all(sign in record for sign in ("doc_id", "arguments", "resps"))):
        return None
    asked = record["arguments"]
    requests = [*asked.values()] if isinstance(asked, Mapping) else record_fields.listed(asked, "arguments")
    group = f"{record.get('task_name', 'doc')}-{record.get('prompt_hash', record['doc_id'])}"
    rest = {"group": group, **chat.without(record, "arguments", "resps", "filtered_resps")}
    made = []
    for request, answers in zip(requests, record_fields.listed(record["resps"], "resps"), strict=False):
        parts = [*request.values()] if isinstance(request, Mapping) else record_fields.listed(request, "arguments")
        prompt = _prompt(parts[0]) if parts else None
        told = chat.sampling(parts[1]) if len(parts) > 1 else {}
        texts = [
            text for text in record_fields.listed(answers, "resps") if prompt is not None and isinstance(text, str)
        ]
        made += [{**rest, **told, "messages": [*(prompt or []), messages_of(text, "assistant")[0]]} for text in texts]
    return made


def _prompt(value: Any) -> list[dict[str, Any]] | None:
    value = value[0] if isinstance(value, list) and len(value) == 1 else value
    value = opened(value)
    return messages_of(value, "user") if is_said(value) else None


ANSWER_LISTS = ("completions", "responses", "outputs", "answers", "generations", "samples", "candidates", "choices")
_TEXTS = ("text", "content", "completion", "response", "output", "answer", "generation")


def of_samples(record: Any) -> list[dict[str, Any]] | None:
    """One trace for each answer of a prompt with a list of them; None of others.

    Raises:
        Unfit: if what stands beside them fits no answer, or they share too much.
    """
    answers = _of(record) if isinstance(record, Mapping) else ""
    if not answers or (asked := _asked(record, answers)) is None:
        return None
    prompt = chat.under(record.get("system"), messages_of(record[asked], "user"))
    told = rows(record, len(record[answers]), (asked, answers, "system"), prompt)
    group, given = group_of(record, prompt), chat.given(prompt)
    made = []
    for (row, of_answer), answer in zip(told, record[answers], strict=True):
        if answer is None:
            made.append(record_fields.failed_call(row, "null stands where an answer of the model should be"))
            continue
        own, text = {}, answer
        if isinstance(answer, Mapping) and "role" not in answer:
            key = next(name for name in _TEXTS if is_said(answer.get(name)))
            own, text = chat.without(answer, key), answer[key]
        said = messages_of(text, "assistant")
        of_own = {name: own.pop(name) for name in chat.OF_ANSWER if name in own}
        said[-1:] = [{**of_answer, **said[-1], **of_own}]
        made.append({"group": group, **row, **_rewarded(own), "messages": [*given, *said]})
    return made


def _asked(record: Mapping[str, Any], answers: str) -> str | None:
    """The key of the prompt: messages where there are any, and they end before an answer."""
    if "messages" in record:
        return "messages" if asks(record["messages"], answers) else None
    return next((name for name in (*PROMPTS, "prompts") if is_said(record.get(name))), None)


def _of(record: Mapping[str, Any]) -> str:
    """The key of the answers, "" where there are none."""
    for name in ANSWER_LISTS:
        answers = record.get(name)
        answers = answers if isinstance(answers, list) else []
        known = [each for each in answers if each is not None]
        if not known or not all(map(_is_answer, known)):
            continue
        if name != "choices" or _are_sampled(record, answers):
            return name
    return ""


def _are_sampled(record: Mapping[str, Any], choices: list[Any]) -> bool:
    """Whether choices are what a model gave, and not those of a question: they are objects, or each has a reward."""
    rewards = (record.get(key) for key in ("reward", "rewards", "score", "scores"))
    are_objects = all(isinstance(each, Mapping) for each in choices)
    return are_objects or any(is_of_each("reward", each, len(choices)) for each in rewards)


def _is_answer(value: Any) -> bool:
    if isinstance(value, Mapping) and "role" not in value:
        return any(is_said(value.get(name)) for name in _TEXTS)
    return is_said(value)


def rows(
    record: Mapping[str, Any], count: int, used: tuple[str, ...], given: Any
) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """What the record says of each answer, and what of it goes on the answer: its own values of lists, and all else.

    Args:
        used: keys that the caller takes.
        given: what each trace has of these.
    """
    of_answers = _of_answers(record, count)
    rest = chat.without(record, *used, *chat.OF_ANSWER)
    lists = {key for key, value in rest.items() if is_of_each(key, value, count)}
    lists |= {"id"} if isinstance(rest.get("id"), list) and len(rest["id"]) == count else set()
    for key in ("reward", "rewards"):
        if isinstance(rest.get(key), list) and key not in lists:
            raise record_fields.unequal(key, rest[key], count)
    record_fields.bounded(count, (given, chat.without(rest, *lists)))
    told = []
    for at in range(count):
        row = {key: value[at] if key in lists else part(value, at, count) for key, value in rest.items()}
        name = {"id": f"{row['id']}-{at}"} if isinstance(row.get("id"), (str, int)) and "id" not in lists else {}
        told.append((_rewarded({**row, **name}), of_answers[at]))
    return told


def part(value: Any, at: int, count: int, depth: int = 0) -> Any:
    """An object with, of lists in it that have one value for each of so many answers, the value of one.

    >>> part({"by": "x", "right": [True, False]}, 1, 2)
    {'by': 'x', 'right': False}
    """
    if not isinstance(value, Mapping) or depth == json_path.DEEPEST:
        return value
    made = {
        key: each[at] if is_of_each(key, each, count) else part(each, at, count, depth + 1)
        for key, each in value.items()
    }
    return made if any(made[key] is not each for key, each in value.items()) else value


def _of_answers(record: Mapping[str, Any], count: int) -> list[dict[str, Any]]:
    """What goes on the message of each answer: its ids, their logprobs, why it ended."""
    found: list[dict[str, Any]] = [{} for _ in range(count)]
    for name in chat.OF_ANSWER:
        value = record.get(name)
        if value is None:
            continue
        if (name == "finish_reason" and isinstance(value, str)) or (name == "prompt_token_ids" and _are_ids(value)):
            record_fields.bounded(count, value)
            values = [value] * count
        elif _has_each(name, value) and len(value) == count:
            values = value
        elif count == 1 and not _has_each(name, value):
            values = [value]
        else:
            raise record_fields.unequal(name, value, count)
        for said, each in zip(found, values, strict=True):
            said |= {} if each is None else {name: each}
    return found


def _has_each(name: str, value: Any) -> bool:
    """Whether a value is a list of what answers have, and not what one of them has."""
    if not isinstance(value, list) or not value:
        return False
    wanted = str if name == "finish_reason" else (list, Mapping)
    return all(each is None or (isinstance(each, wanted) and "logprob" not in chat.table(each)) for each in value)


def _are_ids(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(each, int) for each in value)


def is_of_each(key: str, value: Any, count: int) -> bool:
    """Whether a value is a list of as many numbers, or of words that are ones, or under a name of rewards of objects
    that have these; null stands for one that is not known.
    """
    if not isinstance(value, list) or len(value) != count:
        return False
    known = [each for each in value if each is not None]
    if json_path.REWARD.search(str(key)) and all(isinstance(each, Mapping) for each in known):
        return bool(known) and all(any(map(_is_verdict, each.values())) for each in known)
    return bool(known) and all(map(_is_verdict, known))


def _is_verdict(value: Any) -> bool:
    return json_path.verdict(value) is not None


def _rewarded(row: dict[str, Any]) -> dict[str, Any]:
    """With `reward` as a number, where `reward` or `rewards` is one, or a number as text."""
    for key in ("reward", "rewards"):
        if key in row and (found := json_path.number(row[key])) is not None:
            row = {**chat.without(row, key), "reward": found}
    return row


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
        calls = json_path.opened(said.strip())
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
    found = json_path.opened(told.strip() if isinstance(told, str) else told)
    tools = [each for each in found if isinstance(each, Mapping)] if isinstance(found, list) else []
    return [dict(each) if "function" in each else {"type": "function", "function": dict(each)} for each in tools]
