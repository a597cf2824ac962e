"""inspect-ai's logs: a sample is one trajectory, whose calls are its model events. Its scores are rewards.

Source: inspect-ai 0.3 `log/_log.py` (EvalSample, events of kind "model" with `input`, `output`, `config`); scores C, I,
P, N as inspect's `value_to_float` reads them.
"""

import hashlib
import itertools
import json
from collections.abc import Mapping
from typing import Any

from tracegrad.data import chat
from tracegrad.data.formats import record_fields

VALUES = {"C": 1.0, "I": 0.0, "P": 0.5, "N": 0.0}
_FINISH = {"max_tokens": "length", "model_length": "length"}
_ASIDE = ("scorer", "scorers", "tool")
"""Kinds of spans whose calls of a model are not of the model that is evaluated."""
_SIGNS = ("epoch", "input", "messages", "output")


def of_log(record: Any) -> list[dict[str, Any]] | None:
    """One trace for each sample of a whole log, as `.json` files hold it; None where a record is none."""
    if not (isinstance(record, Mapping) and "eval" in record and isinstance(record.get("samples"), list)):
        return None
    return [made for sample in record["samples"] for made in of_sample(sample) or []]


def of_sample(record: Any) -> list[dict[str, Any]] | None:
    """One trace: the calls of its events, or the messages where there are none; None where it is no sample."""
    if not (isinstance(record, Mapping) and all(sign in record for sign in _SIGNS)):
        return None
    attachments = chat.table(record.get("attachments"))
    events = _events(record)
    group = _group(record, events)
    head: dict[str, Any] = {
        "id": "-".join([group, *map(str, chat.told(record, ("epoch", "uuid")).values())]),
        "group": group,
        **_rewards(record.get("scores")),
        "metadata": record.get("metadata") or {},
    }
    pool = chat.table(record.get("events_data")).get("messages")
    calls = [made for event in events if (made := _call(event, attachments, pool or [])) is not None]
    if calls:
        return [{**head, "calls": calls}]
    messages = [_message(each, attachments) for each in record_fields.listed(record["messages"], "messages")]
    return [{**head, "messages": messages}] if chat.has_answer(messages) else []


def _group(record: Mapping[str, Any], events: list[Mapping[str, Any]]) -> str:
    """The sample's id, and a hash of what was asked and by what it is scored: samples of all tasks count from 1."""
    talk = record["messages"] if isinstance(record["messages"], list) else []
    asked = itertools.takewhile(lambda each: isinstance(each, Mapping) and each.get("role") != "assistant", talk)
    prompt = [(each.get("role"), each.get("content")) for each in asked]
    tools = [each.get("tools") for each in events[:1]]
    told = json.dumps([record["input"], prompt, tools, sorted(chat.table(record.get("scores")))], sort_keys=True)
    return f"{record.get('id')}-{hashlib.sha256(told.encode()).hexdigest()[:8]}"


def _events(record: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The calls of the model that is evaluated: those of a grader, or below a tool, are none of its conversation."""
    events = record.get("events")
    told = [each for each in events if isinstance(each, Mapping)] if isinstance(events, list) else []
    aside: set[Any] = set()
    for each in told:
        if each.get("event") == "span_begin" and (each.get("type") in _ASIDE or each.get("parent_id") in aside):
            aside.add(each.get("id"))
    calls = [each for each in told if each.get("event") == "model" and each.get("role") != "grader"]
    return [each for each in calls if each.get("span_id") is None or each["span_id"] not in aside]


def _call(event: Mapping[str, Any], attachments: Mapping[str, Any], pool: list[Any]) -> dict[str, Any] | None:
    """None of an event that failed. What was asked may stand in the sample's pool, by ranges."""
    output, asked = chat.table(event.get("output")), event.get("input")
    if event.get("error") or not output.get("choices") or not isinstance(asked, list):
        return None
    ranges = event.get("input_refs")
    asked = asked + [each for start, end in (ranges if isinstance(ranges, list) else []) for each in pool[start:end]]
    told = chat.told(event.get("config"), chat.SAMPLING)
    partial = {} if isinstance(event.get("config"), Mapping) else chat.PARTIAL
    tools = chat.tools(record_fields.listed(event.get("tools"), "tools"))
    request = {"messages": [_message(each, attachments) for each in asked], **told, **tools}
    choices = []
    for index, each in enumerate(output["choices"]):
        logprobs = {"logprobs": each["logprobs"]} if each.get("logprobs") else {}
        reason = each.get("stop_reason")
        finish = {"stop_reason": None, "finish_reason": _FINISH.get(reason, reason)}
        choices.append({"index": index, "message": _message(each["message"], attachments), **finish, **logprobs})
    return {**partial, "request": request, "response": {"model": output.get("model"), "choices": choices}}


def _message(told: Mapping[str, Any], attachments: Mapping[str, Any]) -> dict[str, Any]:
    content, thoughts = told.get("content"), []
    if isinstance(content, list):
        parts = [each for each in content if isinstance(each, Mapping)]
        thoughts = [str(each.get("reasoning", "")) for each in parts if each.get("type") == "reasoning"]
        texts = [each for each in parts if each.get("type") != "reasoning"]
        content = "".join(str(each["text"]) for each in texts) if all("text" in each for each in texts) else texts
    if isinstance(content, str):
        content = attachments.get(content.removeprefix("attachment://"), content)
    said: dict[str, Any] = {"role": told.get("role"), "content": content}
    if thoughts:
        said["reasoning_content"] = "".join(thoughts)
    if isinstance(calls := told.get("tool_calls"), list) and calls:
        said["tool_calls"] = [
            chat.tool_call(each.get("function"), each.get("id"), each.get("arguments") or {}) for each in calls
        ]
    for key, source in (("tool_call_id", "tool_call_id"), ("name", "function")):
        if told.get("role") == "tool" and told.get(source):
            said[key] = told[source]
    return said


def _rewards(scores: Any) -> dict[str, Any]:
    """Scores by their names, those of a scorer that gives several behind its own: no total, as inspect has none."""
    found: dict[str, float] = {}
    for name, told in chat.table(scores).items():
        value = told.get("value") if isinstance(told, Mapping) else told
        parts = {f"{name}.{key}": each for key, each in value.items()} if isinstance(value, Mapping) else {name: value}
        for key, each in parts.items():
            each = VALUES.get(each, each) if isinstance(each, str) else each
            if isinstance(each, (bool, int, float)):
                found[str(key)] = float(each)
    return {"rewards": found} if found else {}
