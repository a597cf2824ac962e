"""Convert inspect-ai's logs: a sample is one trace, its model events are the calls, its scores are the rewards.

Source: inspect-ai 0.3 `log/_log.py` (EvalSample, events of kind "model" with `input`, `output`, `config`). Scores C, I,
P, N have the values of inspect's `value_to_float`.
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
_EXCLUDED_SPANS = ("scorer", "scorers", "tool")
"""Types of spans whose model calls are not those of the evaluated model."""
_SIGNS = ("epoch", "input", "messages", "output")


def of_log(record: Any) -> list[dict[str, Any]] | None:
    """Convert a complete log, as in `.json` files, to one trace per sample; None for other records."""
    if not (isinstance(record, Mapping) and "eval" in record and isinstance(record.get("samples"), list)):
        return None
    return [trace for sample in record["samples"] for trace in of_sample(sample) or []]


def of_messages(record: Any) -> list[dict[str, Any]] | None:
    """Return a record whose assistant messages that were not sampled are marked; None for a record without them.

    The `source` of inspect's messages is "generate" for sampled ones. A data set may contain other assistant messages.
    evalscope writes the same messages.
    """
    messages = chat.as_mapping(record).get("messages")
    if not chat.is_messages(messages):
        return None
    answers = [message for message in messages if message.get("role") == "assistant"]
    sampled = [message for message in answers if message.get("source") == "generate"]
    if not sampled or len(sampled) == len(answers):
        return None
    marked = [
        message if message.get("source") == "generate" else chat.mark_not_sampled([message])[0] for message in messages
    ]
    return [{**record, "messages": marked}]


def of_sample(record: Any) -> list[dict[str, Any]] | None:
    """Convert a sample to one trace of its calls, or of its messages if it has no calls.

    No trace without an assistant message; None if the record is not a sample.
    """
    if not (isinstance(record, Mapping) and all(sign in record for sign in _SIGNS)):
        return None
    attachments = chat.as_mapping(record.get("attachments"))
    events = _events(record)
    group = _group(record, events)
    header: dict[str, Any] = {
        "id": "-".join([group, *map(str, chat.pick(record, ("epoch", "uuid")).values())]),
        "group": group,
        **_rewards(record.get("scores")),
        "metadata": record.get("metadata") or {},
    }
    pool = chat.as_mapping(record.get("events_data")).get("messages")
    calls = [call for event in events if (call := _call(event, attachments, pool or [])) is not None]
    if calls:
        return [{**header, "calls": calls}]
    messages = [_message(each, attachments) for each in record_fields.require_list(record["messages"], "messages")]
    return [{**header, "messages": messages}] if chat.has_answer(messages) else []


def _group(record: Mapping[str, Any], events: list[Mapping[str, Any]]) -> str:
    """Return a group name: the sample's id and a hash of its prompt, tools and scorers.

    The id does not suffice, because the samples of every task are numbered from 1.
    """
    messages = record["messages"] if isinstance(record["messages"], list) else []
    prompt_messages = itertools.takewhile(
        lambda each: isinstance(each, Mapping) and each.get("role") != "assistant", messages
    )
    prompt = [(each.get("role"), each.get("content")) for each in prompt_messages]
    tools = [each.get("tools") for each in events[:1]]
    identity = json.dumps(
        [record["input"], prompt, tools, sorted(chat.as_mapping(record.get("scores")))], sort_keys=True
    )
    return f"{record.get('id')}-{hashlib.sha256(identity.encode()).hexdigest()[:8]}"


def _events(record: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return the calls of the evaluated model, without those of a grader or inside a tool."""
    events = record.get("events")
    valid_events = [event for event in events if isinstance(event, Mapping)] if isinstance(events, list) else []
    excluded_spans: set[Any] = set()
    for event in valid_events:
        if event.get("event") == "span_begin" and (
            event.get("type") in _EXCLUDED_SPANS or event.get("parent_id") in excluded_spans
        ):
            excluded_spans.add(event.get("id"))
    calls = [event for event in valid_events if event.get("event") == "model" and event.get("role") != "grader"]
    return [event for event in calls if event.get("span_id") is None or event["span_id"] not in excluded_spans]


def _call(event: Mapping[str, Any], attachments: Mapping[str, Any], pool: list[Any]) -> dict[str, Any] | None:
    """Convert a model event to a call; None if it failed. The prompt may refer to ranges of the sample's pool."""
    output, prompt = chat.as_mapping(event.get("output")), event.get("input")
    if event.get("error") or not output.get("choices") or not isinstance(prompt, list):
        return None
    ranges = event.get("input_refs")
    prompt = prompt + [each for start, end in (ranges if isinstance(ranges, list) else []) for each in pool[start:end]]
    parameters = chat.pick(event.get("config"), chat.SAMPLING)
    partial = {} if isinstance(event.get("config"), Mapping) else chat.PARTIAL
    tools = chat.tools(record_fields.require_list(event.get("tools"), "tools"))
    request = {"messages": [_message(each, attachments) for each in prompt], **parameters, **tools}
    choices = []
    for index, each in enumerate(output["choices"]):
        logprobs = {"logprobs": each["logprobs"]} if each.get("logprobs") else {}
        reason = each.get("stop_reason")
        finish = {"stop_reason": None, "finish_reason": _FINISH.get(reason, reason)}
        choices.append({"index": index, "message": _message(each["message"], attachments), **finish, **logprobs})
    return {**partial, "request": request, "response": {"model": output.get("model"), "choices": choices}}


def _message(recorded: Mapping[str, Any], attachments: Mapping[str, Any]) -> dict[str, Any]:
    content, thoughts = recorded.get("content"), []
    if isinstance(content, list):
        parts = [each for each in content if isinstance(each, Mapping)]
        thoughts = [str(each.get("reasoning", "")) for each in parts if each.get("type") == "reasoning"]
        texts = [each for each in parts if each.get("type") != "reasoning"]
        content = "".join(str(each["text"]) for each in texts) if all("text" in each for each in texts) else texts
    if isinstance(content, str):
        content = attachments.get(content.removeprefix("attachment://"), content)
    converted: dict[str, Any] = {"role": recorded.get("role"), "content": content}
    if thoughts:
        converted["reasoning_content"] = "".join(thoughts)
    if isinstance(tool_calls := recorded.get("tool_calls"), list) and tool_calls:
        converted["tool_calls"] = [
            chat.tool_call(each.get("function"), each.get("id"), each.get("arguments") or {}) for each in tool_calls
        ]
    for key, source in (("tool_call_id", "tool_call_id"), ("name", "function")):
        if recorded.get("role") == "tool" and recorded.get(source):
            converted[key] = recorded[source]
    return converted


def _rewards(scores: Any) -> dict[str, Any]:
    """Return the scores by name, `scorer.key` if a scorer has several. inspect has no total, so `reward` is not set."""
    rewards: dict[str, float] = {}
    for name, score in chat.as_mapping(scores).items():
        value = score.get("value") if isinstance(score, Mapping) else score
        parts = {f"{name}.{key}": each for key, each in value.items()} if isinstance(value, Mapping) else {name: value}
        for key, each in parts.items():
            each = VALUES.get(each, each) if isinstance(each, str) else each
            if isinstance(each, (bool, int, float)):
                rewards[str(key)] = float(each)
    return {"rewards": rewards} if rewards else {}
