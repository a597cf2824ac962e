"""Convert NeMo Gym's rollouts, and chat messages with its token fields.

A rollout is a row of the task with `responses_create_params` and one `response` for all turns. Consecutive model items
form one turn. Source: NeMo Gym 0.4 `rollout_collection.py` (rows of rollouts.jsonl), `openai_utils.py` (items and
messages with `prompt_token_ids`, `generation_token_ids` and `generation_log_probs`) and `responses_api_agents` (padding
of failed rollouts, logs of completions with `provider_specific_fields`).
"""

import json
from collections.abc import Mapping
from typing import Any

from tracegrad.data import chat
from tracegrad.data.formats import record_fields
from tracegrad.data.formats.record_fields import Converted

_TOKENS = {
    "prompt_token_ids": "prompt_token_ids",
    "generation_token_ids": "token_ids",
    "generation_log_probs": "logprobs",
}


def of_rollout(record: Any) -> list[dict[str, Any]] | None:
    """Convert a rollout to one trace; no trace without an assistant message, None if the record is not a rollout."""
    params, response = (chat.as_mapping(record).get(key) for key in ("responses_create_params", "response"))
    if not isinstance(params, Mapping) or not isinstance(output := chat.as_mapping(response).get("output"), list):
        return None
    prompt = params.get("input")
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else _messages(prompt)
    converted = Converted()
    output_messages = _without_padding(_messages(output), converted)
    if not chat.has_answer(output_messages):
        return converted
    task = record.get("_ng_task_index")
    group = {} if task is None or "group" in record else {"group": str(task)}
    other_fields = chat.without(record, "responses_create_params", "response")
    tools = chat.tools(record_fields.require_list(params.get("tools"), "tools"))
    conversation = [
        *chat.with_system_prompt(params.get("instructions"), chat.mark_not_sampled(messages)),
        *output_messages,
    ]
    converted.append({**chat.pick(params, chat.SAMPLING), **group, **other_fields, **tools, "messages": conversation})
    return converted


def of_chat(record: Any) -> list[dict[str, Any]] | None:
    """Rename the token fields of chat messages, of a completion's message, or next to a response.

    None if the record has none of them.

    Raises:
        BadValueError: if an id is not a number, or the response has ids of one answer and several answers.
    """
    if not isinstance(record, Mapping) or "calls" in record:
        return None
    converted = Converted()
    response, talk = record.get("response"), record.get("messages")
    if _choices(response) or _choices(record):
        owner = chat.as_mapping(response) if _choices(response) else record
        fields = {**chat.as_mapping(owner.get("provider_specific_fields"))}
        fields |= chat.as_mapping(record.get("provider_specific_fields"))
        messages = [chat.as_mapping(each.get("message")) for each in _choices(owner)]
        if not any(_has_ids(each) for each in (fields, *messages)):
            return None
        if _has_ids(fields) and len(messages) > 1:
            name = "provider_specific_fields.generation_token_ids"
            raise record_fields.length_refusal(name, fields["generation_token_ids"], len(messages))
        choices = [_renamed_choice(each, fields) for each in _choices(owner)]
        prompts = [each.pop("prompt_token_ids") for each in choices if "prompt_token_ids" in each]
        renamed = {**owner, **({"prompt_token_ids": prompts[0]} if prompts else {}), "choices": choices}
        if owner is record:
            converted.append(renamed)
        elif isinstance(talk, list):
            # A log of completions: `kwargs` has the tools and options of the request.
            options = {**chat.sampling(record), **chat.as_mapping(record.get("kwargs"))}
            request = {**chat.pick(options, (*chat.SAMPLING, "tools")), "messages": [_renamed(each) for each in talk]}
            others = chat.without(record, "messages", "response", "kwargs", "provider_specific_fields")
            converted.append({**chat.PARTIAL, **others, "request": request, "response": renamed})
        else:
            converted.append({**record, "response": renamed})
        return converted
    if not isinstance(talk, list):
        return None
    if not any(_has_ids(chat.as_mapping(each)) for each in talk):
        return None
    messages = _without_padding([_renamed(each) for each in talk], converted)
    converted.append({**record, "messages": messages})
    return converted


def _has_ids(message: Mapping[str, Any]) -> bool:
    return message.get("generation_token_ids") is not None


def _choices(value: Any) -> list[Any]:
    choices = chat.as_mapping(value).get("choices")
    return choices if isinstance(choices, list) and all(map(chat.as_mapping, choices)) else []


def _renamed_choice(choice: Mapping[str, Any], fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return a choice with the token fields of its message, or of `fields`, under the names of vLLM."""
    message = _renamed({**fields, **chat.as_mapping(choice.get("message"))})
    kept = {**choice, "message": chat.without(message, *_TOKENS.values(), *fields)}
    logprobs = {"logprobs": message["logprobs"]} if "logprobs" in message else {}
    return {**kept, **logprobs, **chat.pick(message, ("prompt_token_ids", "token_ids"))}


def _renamed(message: Any) -> Any:
    """Return a message with its token fields under the names that the core reads; ids may be texts."""
    if not isinstance(message, Mapping) or not _has_ids(message):
        return message
    tokens = {name: message[key] for key, name in _TOKENS.items() if message.get(key)}
    for name in ("prompt_token_ids", "token_ids"):
        if name in tokens:
            tokens[name] = [_token_id(each) for each in record_fields.require_list(tokens[name], name)]
    return {**chat.without(message, *_TOKENS, "routed_experts"), **tokens}


def _token_id(value: Any) -> Any:
    return int(value.removeprefix("token_id:")) if isinstance(value, str) else value


def _without_padding(messages: list[Any], converted: Converted) -> list[Any]:
    """Return messages without those that an agent added to a rollout without an answer.

    Their ids are [0] after [0], or those of an earlier answer after the same prompt: they were not sampled.
    """
    seen: set[str] = set()
    kept = []
    for message in messages:
        tokens = [chat.as_mapping(message).get(key) for key in ("prompt_token_ids", "token_ids")]
        if all(tokens):
            text = json.dumps(tokens)
            if tokens == [[0], [0]] or text in seen:
                converted.left_out["messages that pad a rollout: their ids are not sampled"] += 1
                continue
            seen.add(text)
        kept.append(message)
    return kept


def _messages(items: Any) -> list[dict[str, Any]]:
    """Convert items of the Responses API to messages; consecutive reasoning, text and calls become one message."""
    messages: list[dict[str, Any]] = []
    is_open = False
    for item in items if isinstance(items, list) else []:
        if not isinstance(item, Mapping):
            continue
        kind = item.get("type", "message")
        if kind == "function_call_output":
            messages.append(
                {"role": "tool", "tool_call_id": item.get("call_id"), "content": chat.text_of(item.get("output"))}
            )
        elif kind == "message" and item.get("role") != "assistant":
            messages.append({"role": item.get("role", "user"), "content": chat.text_of(item.get("content"))})
        else:
            if not is_open:
                messages.append({"role": "assistant", "content": None})
            _add(messages[-1], kind, item)
            is_open = "generation_token_ids" not in item
            continue
        is_open = False
    return messages


def _add(message: dict[str, Any], kind: str, item: Mapping[str, Any]) -> None:
    """Add a model item to its message."""
    if kind == "reasoning":
        text = item.get("summary") or item.get("content")
        parts = [{"text": text}] if isinstance(text, str) else record_fields.require_list(text, f"{kind}.content")
        thought = "".join(str(part.get("text", "")) for part in parts if isinstance(part, Mapping))
        message["reasoning_content"] = message.get("reasoning_content", "") + thought
    elif kind == "function_call":
        function = {"name": item.get("name"), "arguments": item.get("arguments")}
        message.setdefault("tool_calls", []).append(
            {"id": item.get("call_id"), "type": "function", "function": function}
        )
    else:
        message["content"] = (message["content"] or "") + str(chat.text_of(item.get("content")) or "")
    message.update({name: item[key] for key, name in _TOKENS.items() if item.get(key) is not None})
