"""NeMo Gym's rollouts: a row of the task, the request as `responses_create_params`, what followed as one `response`.

Source: NeMo Gym 0.3 `rollout_collection.py` (rows of rollouts.jsonl) and `openai_utils.py` (output items that carry
`prompt_token_ids`, `generation_token_ids` and `generation_log_probs`). A turn is what the model gave without a break.
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
    """One trace of all messages; none where the model said nothing, None where it is no rollout."""
    asked, answered = (chat.table(record).get(key) for key in ("responses_create_params", "response"))
    if not isinstance(asked, Mapping) or not isinstance(output := chat.table(answered).get("output"), list):
        return None
    given = asked.get("input")
    messages = [{"role": "user", "content": given}] if isinstance(given, str) else _messages(given)
    said = _messages(output)
    if not chat.has_answer(said):
        return []
    task = record.get("_ng_task_index")
    group = {} if task is None or "group" in record else {"group": str(task)}
    rest = chat.without(record, "responses_create_params", "response")
    tools = chat.tools(record_fields.listed(asked.get("tools"), "tools"))
    talk = [*chat.under(asked.get("instructions"), chat.given(messages)), *said]
    return [{**chat.told(asked, chat.SAMPLING), **group, **rest, **tools, "messages": talk}]


def _messages(items: Any) -> list[dict[str, Any]]:
    """Items of the Responses API as messages; reasoning, text and calls in one go are one message."""
    out: list[dict[str, Any]] = []
    goes_on = False
    for item in items if isinstance(items, list) else []:
        if not isinstance(item, Mapping):
            continue
        kind = item.get("type", "message")
        if kind == "function_call_output":
            out.append(
                {"role": "tool", "tool_call_id": item.get("call_id"), "content": chat.text_of(item.get("output"))}
            )
        elif kind == "message" and item.get("role") != "assistant":
            out.append({"role": item.get("role", "user"), "content": chat.text_of(item.get("content"))})
        else:
            if not goes_on:
                out.append({"role": "assistant", "content": None})
            _add(out[-1], kind, item)
            goes_on = "generation_token_ids" not in item
            continue
        goes_on = False
    return out


def _add(said: dict[str, Any], kind: str, item: Mapping[str, Any]) -> None:
    """Adds an item that the model gave to its message."""
    if kind == "reasoning":
        told = item.get("summary") or item.get("content")
        parts = [{"text": told}] if isinstance(told, str) else record_fields.listed(told, f"{kind}.content")
        thought = "".join(str(part.get("text", "")) for part in parts if isinstance(part, Mapping))
        said["reasoning_content"] = said.get("reasoning_content", "") + thought
    elif kind == "function_call":
        function = {"name": item.get("name"), "arguments": item.get("arguments")}
        said.setdefault("tool_calls", []).append({"id": item.get("call_id"), "type": "function", "function": function})
    else:
        said["content"] = (said["content"] or "") + str(chat.text_of(item.get("content")) or "")
    said.update({name: item[key] for key, name in _TOKENS.items() if item.get(key) is not None})
