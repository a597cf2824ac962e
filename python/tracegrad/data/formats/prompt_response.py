"""Convert prompts with one or several answers, preference pairs, ShareGPT and lm-evaluation-harness samples.

Text only. A preference pair becomes two traces of one group with rewards 1 and 0 (0.5 each if equal); scores of the two
sides become named rewards. Several answers form one group; a list of the same length in the record has one value per
answer.
Sources: FastChat's and LLaMA-Factory's ShareGPT data, camel-ai 0.2.90 `ShareGPTDataCollector`; lm-eval 0.4
`evaluator_utils.py`, `evaluator.py` (samples_TASK.jsonl).
"""

import hashlib
import itertools
import re
from collections.abc import Mapping
from typing import Any

from tracegrad.data import chat, json_path
from tracegrad.data.formats import langchain, record_fields
from tracegrad.data.formats.openai import (
    is_python_repr,
    is_response_part,
    normalize_name,
    parse_json_or_events,
)

PROMPTS = ("prompt", "instruction", "question", "query", "input", "inputs")
ANSWERS = ("response", "completion", "output", "answer", "generation", "response_text", "generated_text", "outputs")
_OF_MODEL = re.compile(
    r"(model|llm|ai|assistant|bot|agent|generated|predicted|sampled)(answer|response|completion|output|generation|reply)s?"
)
_OF_USER = re.compile(r"(user|human|customer)(prompt|question|query|input|message|request)")
_PROMPT = re.compile(r"(^|_)(prompt|input|inputs|query|instruction)(_text|_str)?$", re.I)
_MIN_PROMPT_LENGTH = 8  # Characters. A shorter prompt can occur in other texts by chance.
_EXPECTED = ("answer", "answers")
_TURNS = re.compile(r"\n\n(Human|Assistant):[ ]?")
_SIDES = ("chosen", "rejected")
_SCORES = ("score", "rating", "reward", "grade", "quality", "points")


def of_preference(record: Any) -> list[dict[str, Any]] | None:
    """Convert a preference pair to two traces of one group; None if the record is not a pair."""
    if not (
        isinstance(record, Mapping)
        and is_text_or_messages(record.get("chosen"))
        and is_text_or_messages(record.get("rejected"))
    ):
        return None
    prompt = messages_of(record.get("prompt") or record.get("question") or [], "user")
    sides = {side: messages_of(record[side], "assistant") for side in _SIDES}
    sides = {side: turns[len(prompt) :] if turns[: len(prompt)] == prompt else turns for side, turns in sides.items()}
    # Messages that both sides start with belong to the prompt, as in TRL's extract_prompt.
    paired = zip(sides["chosen"][:-1], sides["rejected"][:-1], strict=False)
    shared = [message for message, _ in itertools.takewhile(lambda pair: pair[0] == pair[1], paired)]
    sides = {side: turns[len(shared) :] for side, turns in sides.items()}
    has_prompt = shared[:1] and shared[0].get("role") == "system" and all(each in shared for each in prompt)
    prompt = chat.with_system_prompt(record.get("system"), shared if has_prompt else [*prompt, *shared])
    group = group_of(record, prompt)
    other_fields = chat.without(record, "prompt", "chosen", "rejected", "system", "id")
    traces, equal, scores = [], sides["chosen"] == sides["rejected"], _scores(record)
    for side, turns in sides.items():
        name = {"id": f"{record['id']}-{side}"} if isinstance(record.get("id"), (str, int)) else {}
        reward = 0.5 if equal else float(side == "chosen")
        rewards = {"rewards": scores[side]} if scores[side] else {}
        messages = [*chat.mark_not_sampled(prompt), *turns]
        traces.append({**other_fields, **name, "group": group, "reward": reward, **rewards, "messages": messages})
    return traces


def _scores(record: Mapping[str, Any]) -> dict[str, dict[str, float]]:
    """Return the scores of each side, from fields named side + score or score + side, if both sides have the score."""
    values_by_name = {normalize_name(str(key)): value for key, value in record.items()}
    scores_by_side: dict[str, dict[str, float]] = {side: {} for side in _SIDES}
    for name in _SCORES:
        values = {side: values_by_name.get(side + name, values_by_name.get(name + side)) for side in _SIDES}
        scores = {side: None if isinstance(score, bool) else json_path.number(score) for side, score in values.items()}
        for side, score in scores.items():
            if score is not None and None not in scores.values():
                scores_by_side[side][name] = score
    return scores_by_side


def of_answered(record: Any) -> list[dict[str, Any]] | None:
    """Convert a prompt and an answer to one trace, whose sampled turn is the answer.

    None if the record has no prompt or no answer. If the record has `messages`, these are the prompt (if an answer can
    follow them), and other prompt fields are ignored.
    """
    if not isinstance(record, Mapping):
        return None
    answer_key = _field_with_text(
        {key: value for key, value in record.items() if not _is_serialized_response(value)}, ANSWERS, _OF_MODEL
    )
    prompt_key = _longest_prompt_key(record, _field_with_text(record, PROMPTS, _OF_USER))
    if "messages" in record:
        prompt_key = (
            "messages" if answer_key and record[answer_key] and is_prompt_of(record["messages"], answer_key) else None
        )
    if prompt_key is None or answer_key is None:
        return None
    if answer_key in _EXPECTED:
        _refuse_unread(record)
    prompt = messages_of(record[prompt_key], "user")
    if prompt_key == "instruction" and isinstance(extra_input := record.get("input"), str) and extra_input:
        prompt = [{"role": "user", "content": f"{record['instruction']}\n\n{extra_input}"}]
    prompt = chat.with_system_prompt(record.get("system"), prompt)
    turns = messages_of(record[answer_key], "assistant")
    if len(turns) > len(prompt) and chat.prompt_key(turns[: len(prompt)]) == chat.prompt_key(prompt):
        turns = turns[len(prompt) :]  # The output of a graph repeats its input.
    turns = [{**turn, "content": langchain.text_of(turn["content"])} if "content" in turn else turn for turn in turns]
    other_fields = chat.without(
        record, prompt_key, answer_key, "system", "input" if prompt_key == "instruction" else prompt_key
    )
    if len(turns) == 1:
        turns = [{**turns[0], **{key: other_fields.pop(key) for key in chat.ANSWER_FIELDS if key in other_fields}}]
    return [{**other_fields, "messages": [*chat.mark_not_sampled(prompt), *turns]}]


def _refuse_unread(record: Mapping[str, Any]) -> None:
    """Refuse a record with a response that cannot be read: an `answer` next to it is the expected one."""
    for key, value in record.items():
        if normalize_name(str(key)) not in _EXPECTED and is_response_part(str(key), value):
            raise record_fields.unread_refusal(str(key), value)


def _longest_prompt_key(record: Mapping[str, Any], prompt_key: str | None) -> str | None:
    """Return the field of the complete prompt: the longest prompt text that contains the one at `asked`."""
    if prompt_key is None or not isinstance(record[prompt_key], str) or len(record[prompt_key]) < _MIN_PROMPT_LENGTH:
        return prompt_key
    others = [name for name, text in record.items() if _PROMPT.search(str(name)) and isinstance(text, str)]
    return max(
        (prompt_key, *(name for name in others if record[prompt_key] in record[name])),
        key=lambda name: len(record[name]),
    )


def group_of(record: Mapping[str, Any], prompt: Any) -> Any:
    """Return the group that a record names, else a hash of its prompt."""
    group = next((record[key] for key in ("group", "prompt_id") if record.get(key) is not None), None)
    text = chat.prompt_key(prompt if isinstance(prompt, list) else [prompt])
    return f"prompt-{hashlib.sha256(text).hexdigest()[:16]}" if group is None else group


def is_prompt_of(talk: Any, answer: str) -> bool:
    """Return whether messages are the prompt of the text at key `answer`: whether they end with a user or tool message.

    Messages with token ids or logprobs contain their own answers. After a tool message, a key `answer` or `answers` is
    the expected answer of the task.
    """
    if not isinstance(talk, list) or not is_text_or_messages(talk) or talk[-1]["role"] == "assistant":
        return False
    if talk[-1]["role"] != "user" and answer in _EXPECTED:
        return False
    return not any(key in each for each in talk for key in (*chat.ANSWER_FIELDS, "generation"))


def _is_serialized_response(value: Any) -> bool:
    """Return whether a string is a serialized response (JSON, events or a Python repr) instead of an answer."""
    if is_python_repr(value):
        return True
    parsed = parse_json_or_events(value) if isinstance(value, str) else None
    return (isinstance(parsed, Mapping) and "choices" in parsed) or (isinstance(parsed, list) and value[:1] != "[")


def _field_with_text(record: Mapping[str, Any], names: tuple[str, ...], longer: re.Pattern[str]) -> str | None:
    """Return the first of `names` with text or messages, else the only field whose name matches `longer`."""
    match = next((name for name in names if is_text_or_messages(record.get(name))), None)
    others = [
        name for name in record if longer.fullmatch(normalize_name(str(name))) and is_text_or_messages(record[name])
    ]
    return others[0] if match is None and len(others) == 1 else match


def is_text_or_messages(value: Any) -> bool:
    """Return whether a value is a string, a message, or a list of messages."""
    if isinstance(value, str):
        return True
    if isinstance(value, Mapping):
        return isinstance(value.get("role"), str)
    return isinstance(value, list) and bool(value) and all("role" in chat.as_mapping(each) for each in value)


def messages_of(value: Any, role: str) -> list[dict[str, Any]]:
    """Return a string as a message of a role, or as the turns that it spells as "Human:" and "Assistant:".

    Messages are copied unchanged.

    >>> messages_of("\\n\\nHuman: 2+2?\\n\\nAssistant: 4", "assistant")[1]
    {'role': 'assistant', 'content': '4'}
    """
    if isinstance(value, str):
        first, *turns = _TURNS.split(value)
        if first or turns[:1] != ["Human"]:
            return [{"role": role, "content": value}]
        messages = [
            {"role": "user" if speaker == "Human" else "assistant", "content": text}
            for speaker, text in zip(turns[::2], turns[1::2], strict=True)
        ]
        return messages if messages[-1]["content"] else messages[:-1]  # A prompt ends with an empty assistant turn.
    return [dict(value)] if isinstance(value, Mapping) else [dict(each) for each in value]


def of_sample(record: Any) -> list[dict[str, Any]] | None:
    """Convert a row of lm-evaluation-harness samples to one trace for each answer of each request.

    The prompt is the messages of the chat template, or a text, which becomes a user message. None for other records.
    """
    if not (isinstance(record, Mapping) and all(sign in record for sign in ("doc_id", "arguments", "resps"))):
        return None
    arguments = record["arguments"]
    requests = (
        [*arguments.values()] if isinstance(arguments, Mapping) else record_fields.require_list(arguments, "arguments")
    )
    group = f"{record.get('task_name', 'doc')}-{record.get('prompt_hash', record['doc_id'])}"
    shared = {"group": group, **chat.without(record, "arguments", "resps", "filtered_resps")}
    traces = []
    for request, answers in zip(requests, record_fields.require_list(record["resps"], "resps"), strict=False):
        parts = (
            [*request.values()] if isinstance(request, Mapping) else record_fields.require_list(request, "arguments")
        )
        prompt = _prompt(parts[0]) if parts else None
        sampling = chat.sampling(parts[1]) if len(parts) > 1 else {}
        texts = [
            text
            for text in record_fields.require_list(answers, "resps")
            if prompt is not None and isinstance(text, str)
        ]
        traces += [
            {**shared, **sampling, "messages": [*(prompt or []), messages_of(text, "assistant")[0]]} for text in texts
        ]
    return traces


def _prompt(value: Any) -> list[dict[str, Any]] | None:
    value = value[0] if isinstance(value, list) and len(value) == 1 else value
    value = parse_json_or_events(value)
    return messages_of(value, "user") if is_text_or_messages(value) else None


ANSWER_LISTS = ("completions", "responses", "outputs", "answers", "generations", "samples", "candidates", "choices")
_TEXTS = ("text", "content", "completion", "response", "output", "answer", "generation")


def of_samples(record: Any) -> list[dict[str, Any]] | None:
    """Convert a prompt with a list of answers to one trace for each answer; None for other records.

    Raises:
        BadValueError: if a list in the record does not match the number of answers, or the shared fields are too large.
    """
    answers = _answer_list_key(record) if isinstance(record, Mapping) else ""
    if not answers or (prompt_key := _prompt_key(record, answers)) is None:
        return None
    if answers in _EXPECTED:
        _refuse_unread(record)
    prompt = chat.with_system_prompt(record.get("system"), messages_of(record[prompt_key], "user"))
    answer_rows = split_by_answer(record, len(record[answers]), (prompt_key, answers, "system"), prompt)
    group, prompt_messages = group_of(record, prompt), chat.mark_not_sampled(prompt)
    traces = []
    for (row, message_fields), answer in zip(answer_rows, record[answers], strict=True):
        if answer is None:
            traces.append(record_fields.failed_call(row, "null stands where an answer of the model should be"))
            continue
        answer_fields, text = {}, answer
        if isinstance(answer, Mapping) and "role" not in answer:
            key = next(name for name in _TEXTS if is_text_or_messages(answer.get(name)))
            answer_fields, text = chat.without(answer, key), answer[key]
        turns = messages_of(text, "assistant")
        own_message_fields = {name: answer_fields.pop(name) for name in chat.ANSWER_FIELDS if name in answer_fields}
        turns[-1:] = [{**message_fields, **turns[-1], **own_message_fields}]
        traces.append({"group": group, **row, **_rewarded(answer_fields), "messages": [*prompt_messages, *turns]})
    return traces


def _prompt_key(record: Mapping[str, Any], answers: str) -> str | None:
    """Return the key of the prompt: `messages` if the record has them and they end before an answer."""
    if "messages" in record:
        return "messages" if is_prompt_of(record["messages"], answers) else None
    return next((name for name in (*PROMPTS, "prompts") if is_text_or_messages(record.get(name))), None)


def _answer_list_key(record: Mapping[str, Any]) -> str:
    """Return the key of the list of answers, "" if there is none."""
    for name in ANSWER_LISTS:
        answers = record.get(name)
        answers = answers if isinstance(answers, list) else []
        present = [each for each in answers if each is not None]
        if not present or not all(map(_is_answer, present)):
            continue
        if name != "choices" or _are_sampled(record, answers):
            return name
    return ""


def _are_sampled(record: Mapping[str, Any], choices: list[Any]) -> bool:
    """Return whether choices were sampled, unlike those of a multiple-choice question.

    Sampled choices are objects, or each of them has a reward.
    """
    rewards = (record.get(key) for key in ("reward", "rewards", "score", "scores"))
    are_objects = all(isinstance(each, Mapping) for each in choices)
    return are_objects or any(is_of_each("reward", each, len(choices)) for each in rewards)


def _is_answer(value: Any) -> bool:
    if isinstance(value, Mapping) and "role" not in value:
        return any(is_text_or_messages(value.get(name)) for name in _TEXTS)
    return is_text_or_messages(value)


def split_by_answer(
    record: Mapping[str, Any], count: int, used: tuple[str, ...], given: Any
) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """Return (fields of the trace, fields of the answer's message) for each answer of a record.

    A list with one value for each answer is split; other fields are copied to every answer.

    Args:
        record: the record.
        count: number of answers.
        used: keys that the caller handles itself.
        given: values of these keys that every trace contains, for the size limit.

    Raises:
        BadValueError: if a list of rewards, ids or logprobs does not have `count` values, or the shared fields are
            too large.
    """
    message_fields = _of_answers(record, count)
    other_fields = chat.without(record, *used, *chat.ANSWER_FIELDS)
    lists = {key for key, value in other_fields.items() if is_of_each(key, value, count)}
    lists |= {"id"} if isinstance(other_fields.get("id"), list) and len(other_fields["id"]) == count else set()
    for key in ("reward", "rewards"):
        if isinstance(other_fields.get(key), list) and key not in lists:
            raise record_fields.length_refusal(key, other_fields[key], count)
    record_fields.check_size(count, (given, chat.without(other_fields, *lists)))
    result = []
    for index in range(count):
        row = {
            key: value[index] if key in lists else select_answer(value, index, count)
            for key, value in other_fields.items()
        }
        name = {"id": f"{row['id']}-{index}"} if isinstance(row.get("id"), (str, int)) and "id" not in lists else {}
        result.append((_rewarded({**row, **name}), message_fields[index]))
    return result


def select_answer(value: Any, at: int, count: int, depth: int = 0) -> Any:
    """Return an object in which every list with `count` per-answer values is replaced by its value at `at`.

    >>> select_answer({"by": "x", "right": [True, False]}, 1, 2)
    {'by': 'x', 'right': False}
    """
    if not isinstance(value, Mapping) or depth == json_path.DEEPEST:
        return value
    split = {
        key: item[at] if is_of_each(key, item, count) else select_answer(item, at, count, depth + 1)
        for key, item in value.items()
    }
    return split if any(split[key] is not item for key, item in value.items()) else value


def _of_answers(record: Mapping[str, Any], count: int) -> list[dict[str, Any]]:
    """Return the token ids, logprobs and finish reason of each answer."""
    fields: list[dict[str, Any]] = [{} for _ in range(count)]
    for name in chat.ANSWER_FIELDS:
        value = record.get(name)
        if value is None:
            continue
        if (name == "finish_reason" and isinstance(value, str)) or (name == "prompt_token_ids" and _are_ids(value)):
            record_fields.check_size(count, value)
            values = [value] * count
        elif _has_each(name, value) and len(value) == count:
            values = value
        elif count == 1 and not _has_each(name, value):
            values = [value]
        else:
            raise record_fields.length_refusal(name, value, count)
        for answer_fields, each in zip(fields, values, strict=True):
            answer_fields |= {} if each is None else {name: each}
    return fields


def _has_each(name: str, value: Any) -> bool:
    """Return whether a value is a list with one value per answer, and not the value of a single answer."""
    if not isinstance(value, list) or not value:
        return False
    item_types = str if name == "finish_reason" else (list, Mapping)
    return all(
        each is None or (isinstance(each, item_types) and "logprob" not in chat.as_mapping(each)) for each in value
    )


def _are_ids(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(each, int) for each in value)


def is_of_each(key: str, value: Any, count: int) -> bool:
    """Return whether a value is a list of `count` numbers, or of words with a numeric value such as "pass".

    Under the name of a reward, it may also be a list of objects with such values. Null means unknown.
    """
    if not isinstance(value, list) or len(value) != count:
        return False
    present = [item for item in value if item is not None]
    if json_path.REWARD.search(str(key)) and all(isinstance(item, Mapping) for item in present):
        return bool(present) and all(any(map(_is_verdict, item.values())) for item in present)
    return bool(present) and all(map(_is_verdict, present))


def _is_verdict(value: Any) -> bool:
    return json_path.reward_value(value) is not None


def _rewarded(row: dict[str, Any]) -> dict[str, Any]:
    """Set `reward` to a number if `reward` or `rewards` is a number or a numeric string."""
    for key in ("reward", "rewards"):
        if key in row and (reward := json_path.number(row[key])) is not None:
            row = {**chat.without(row, key), "reward": reward}
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
    """Convert a ShareGPT record: its conversation becomes messages. None for other records."""
    talk = next((record[key] for key in _KEYS if key in record), None) if isinstance(record, Mapping) else None
    if (
        not isinstance(talk, list)
        or not talk
        or not all(isinstance(each, Mapping) and "from" in each and "value" in each for each in talk)
    ):
        return None
    messages = [_message(each) for each in talk]
    if messages[0]["role"] != "system":
        messages = chat.with_system_prompt(record.get("system"), messages)
    other_fields = chat.without(record, *_KEYS, "system", "tools")
    tools = _tools(record.get("tools"))
    return [{**other_fields, **({"tools": tools} if tools else {}), "messages": messages}]


def _message(turn: Mapping[str, Any]) -> dict[str, Any]:
    """Convert a message. The JSON of a `function_call` speaker becomes tool calls."""
    speaker, content = str(turn["from"]).lower(), turn["value"]
    if speaker == "function_call" and isinstance(content, str):
        calls = json_path.parse_json_string(content.strip())
        tool_calls = [_call(each) for each in (calls if isinstance(calls, list) else [calls])]
        if tool_calls and None not in tool_calls:
            return {"role": "assistant", "content": None, "tool_calls": tool_calls}
    return {"role": ROLES.get(speaker, str(turn["from"])), "content": content}


def _call(call: Any) -> dict[str, Any] | None:
    """Convert a tool call, with or without OpenAI's `function` wrapper; None if it is not a tool call."""
    function = chat.as_mapping(chat.as_mapping(call).get("function", call))
    arguments = next((function[key] for key in _ARGUMENTS if key in function), None)
    if not isinstance(function.get("name"), str) or arguments is None:
        return None
    return {"type": "function", "function": {"name": function["name"], "arguments": chat.arguments_json(arguments)}}


def _tools(value: Any) -> list[Any]:
    """Return tool schemas, also from a JSON string, with the `function` wrapper that templates expect."""
    schemas = json_path.parse_json_string(value.strip() if isinstance(value, str) else value)
    tools = [schema for schema in schemas if isinstance(schema, Mapping)] if isinstance(schemas, list) else []
    return [
        dict(schema) if "function" in schema else {"type": "function", "function": dict(schema)} for schema in tools
    ]
