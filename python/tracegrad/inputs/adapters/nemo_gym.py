"""NeMo Gym's rollouts: a row of the task, the request as `responses_create_params`, what followed as one `response`.

Source: NeMo Gym 0.3 `rollout_collection.py` (rows of rollouts.jsonl) and `openai_utils.py` (output items that carry
`prompt_token_ids`, `generation_token_ids` and `generation_log_probs`). A turn is what the model gave without a break.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tracegrad.inputs.adapters import fitting

_TOKENS = {
    "prompt_token_ids": "prompt_token_ids",
    "generation_token_ids": "token_ids",
    "generation_log_probs": "logprobs",
}


def _is_rollout(record: Any) -> bool:
    if not isinstance(record, Mapping) or not isinstance(record.get("responses_create_params"), Mapping):
        return False
    response = record.get("response")
    return isinstance(response, Mapping) and isinstance(response.get("output"), list)


def of_rollout(record: Any) -> list[dict[str, Any]] | None:
    """One trace of all messages; none where the model said nothing, None where it is no rollout."""
    if not _is_rollout(record):
        return None
    asked = record["responses_create_params"]
    given = asked.get("input")
    messages = [{"role": "user", "content": given}] if isinstance(given, str) else _messages(given)
    messages = [{**each, "sampled": False} if each["role"] == "assistant" else each for each in messages]
    if isinstance(system := asked.get("instructions"), str) and system:
        messages.insert(0, {"role": "system", "content": system})
    said = _messages(record["response"]["output"])
    if not any(each["role"] == "assistant" for each in said):
        return []
    tools = [_tool(each) for each in fitting.listed(asked.get("tools"), "tools") if isinstance(each, Mapping)]
    told = {key: asked[key] for key in ("temperature", "top_p") if asked.get(key) is not None}
    task = record.get("_ng_task_index")
    group = {} if task is None or "group" in record else {"group": str(task)}
    rest = {key: value for key, value in record.items() if key not in ("responses_create_params", "response")}
    return [{**told, **group, **rest, **({"tools": tools} if tools else {}), "messages": messages + said}]


def _messages(items: Any) -> list[dict[str, Any]]:
    """Items of the Responses API as messages; reasoning, text and calls in one go are one message."""
    out: list[dict[str, Any]] = []
    goes_on = False
    for item in items if isinstance(items, list) else []:
        if not isinstance(item, Mapping):
            continue
        kind = item.get("type", "message")
        if kind == "function_call_output":
            out.append({"role": "tool", "tool_call_id": item.get("call_id"), "content": _text(item.get("output"))})
        elif kind == "message" and item.get("role") != "assistant":
            out.append({"role": item.get("role", "user"), "content": _text(item.get("content"))})
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
        parts = [{"text": told}] if isinstance(told, str) else fitting.listed(told, f"{kind}.content")
        thought = "".join(str(part.get("text", "")) for part in parts if isinstance(part, Mapping))
        said["reasoning_content"] = said.get("reasoning_content", "") + thought
    elif kind == "function_call":
        function = {"name": item.get("name"), "arguments": item.get("arguments")}
        said.setdefault("tool_calls", []).append({"id": item.get("call_id"), "type": "function", "function": function})
    else:
        said["content"] = (said["content"] or "") + str(_text(item.get("content")) or "")
    said.update({name: item[key] for key, name in _TOKENS.items() if item.get(key) is not None})


def _text(content: Any) -> Any:
    """Parts of text as one text."""
    if not isinstance(content, list):
        return content
    parts = [part.get("text") if isinstance(part, Mapping) else part for part in content]
    texts = [part for part in parts if isinstance(part, str)]
    return "".join(texts) if len(texts) == len(parts) else content


def _tool(told: Mapping[str, Any]) -> dict[str, Any]:
    if "function" in told:
        return dict(told)
    function = {key: told[key] for key in ("name", "description", "parameters") if key in told}
    return {"type": "function", "function": function}
