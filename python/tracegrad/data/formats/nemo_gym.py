"""Convert NeMo Gym's rollouts: a row of the task with `responses_create_params` and one `response` for all turns.

Source: NeMo Gym 0.3 `rollout_collection.py` (rows of rollouts.jsonl) and `openai_utils.py` (output items with
`prompt_token_ids`, `generation_token_ids` and `generation_log_probs`). Consecutive model items form one turn.
"""

from collections.abc import Mapping
from typing import Any

from tracegrad.data import chat
from tracegrad.data.formats import record_fields

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
    output_messages = _messages(output)
    if not chat.has_answer(output_messages):
        return []
    task = record.get("_ng_task_index")
    group = {} if task is None or "group" in record else {"group": str(task)}
    other_fields = chat.without(record, "responses_create_params", "response")
    tools = chat.tools(record_fields.require_list(params.get("tools"), "tools"))
    conversation = [
        *chat.with_system_prompt(params.get("instructions"), chat.mark_not_sampled(messages)),
        *output_messages,
    ]
    return [{**chat.pick(params, chat.SAMPLING), **group, **other_fields, **tools, "messages": conversation}]


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
