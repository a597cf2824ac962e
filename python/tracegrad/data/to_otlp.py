"""Write traces as OpenTelemetry spans, in the OTLP JSON of the collector's file exporter.

The attributes are those of the conventions for generative AI. Token ids and logprobs have the names that
open-telemetry/semantic-conventions-genai#75 proposes: `gen_ai.response.candidate.per_position_token_ids` and
`..._logprobs`, with the sampled token as the only candidate. Prompt ids are in `prompt_token_ids`, as Agent Lightning
has them. Policy version and logprob kind have no name in a convention: they are `tracegrad.policy_version` and
`tracegrad.logprob_kind`.
"""

import hashlib
import json
import math
import os
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tracegrad.data import chat, json_path
from tracegrad.data.formats.span_calls import PER_POSITION, PREFIX, PROMPT_IDS
from tracegrad.data.trace import Generation, Trace, Traces
from tracegrad.errors import ArgumentError
from tracegrad.storage import files


def write_spans(traces: Traces | Iterable[Traces | Trace], path: str | os.PathLike[str]) -> None:
    """Write traces as OpenTelemetry spans: OTLP JSON, one trace per line, which any collector or trace store accepts.

    Each trace has a root span, with a `gen_ai.evaluation.result` event for each reward, and a span for each sampling
    call, with its messages, tools, sampling options, token ids and logprobs. `read` returns equal messages, ids and
    logprobs; `--map.reward scores.reward` and `--map.group attributes.tracegrad.group` select the reward and the group.
    Texts and bytes of single tokens, images and masks are not written. The write is atomic.

    Args:
        traces: `Traces`, or an iterable of `Trace` or of `Traces`, such as `tracegrad.stream`.
        path: the file, such as `spans.jsonl`.

    Raises:
        ArgumentError: if a message has content that the conventions cannot express.
        ReadError: if the file cannot be written.

    >>> from tempfile import TemporaryDirectory
    >>> import tracegrad as tg
    >>> said = {"role": "assistant", "content": "4", "generation": {"token_ids": [19, 2], "logprobs": [-0.5, 0.0]}}
    >>> trace = tg.Trace.from_messages([{"role": "user", "content": "2+2?"}, said], reward=1)
    >>> with TemporaryDirectory() as folder:
    ...     write_spans([trace], f"{folder}/spans.jsonl")
    ...     [again] = tg.read(f"{folder}/spans.jsonl", map={"reward": "scores.reward"})
    >>> again.reward, again.generations[0].token_ids.tolist(), again.generations[0].logprobs.tolist()
    (1.0, [19, 2], [-0.5, 0.0])
    """
    now, number = time.time_ns(), 0
    with files.write_atomically(Path(path)) as file:
        for part in [traces] if isinstance(traces, Traces) else traces:
            for trace in part if isinstance(part, Traces) else [part]:
                number += 1
                line = json.dumps(spans_of(trace, number, now), ensure_ascii=False, allow_nan=False)
                file.write(line.encode("utf-8", "backslashreplace") + b"\n")


def spans_of(trace: Trace, number: int, start_ns: int) -> dict[str, Any]:
    """Return a trace as one OTLP record.

    Args:
        trace: the trace.
        number: its number, which makes its trace id unique.
        start_ns: start of its first span, in nanoseconds since 1970.
    """
    name = hashlib.sha256(f"{number} {trace.id}".encode("utf-8", "replace")).hexdigest()
    times = [start_ns + 1000 * index for index in range(len(trace.generations) + 2)]
    root = {"traceId": name[:32], "spanId": name[-16:], "name": "invoke_agent", "kind": 1}
    attributes = {"gen_ai.operation.name": "invoke_agent", "gen_ai.conversation.id": trace.id}
    if trace.group is not None:
        attributes[f"{PREFIX}group"] = trace.group
    rewards = {**trace.rewards, **({} if trace.reward is None else {"reward": trace.reward})}
    events = [
        {
            "timeUnixNano": str(times[-1]),
            "name": "gen_ai.evaluation.result",
            "attributes": _attributes({"gen_ai.evaluation.name": each, "gen_ai.evaluation.score.value": float(value)}),
        }
        for each, value in rewards.items()
        if not math.isnan(value)
    ]
    spans = [{**root, **_span_fields(times[0], times[-1], attributes), "events": events}]
    for index, generation in enumerate(trace.generations, 1):
        fields = {
            "traceId": name[:32],
            "spanId": f"{index:016x}",
            "parentSpanId": name[-16:],
            "name": "chat",
            "kind": 3,
        }
        spans.append({**fields, **_span_fields(times[index], times[index + 1], _call(trace, generation))})
    scope = {"scope": {"name": "tracegrad"}, "spans": spans}
    service = _attributes({"service.name": "tracegrad"})
    return {"resourceSpans": [{"resource": {"attributes": service}, "scopeSpans": [scope]}]}


def _span_fields(start: int, end: int, attributes: Mapping[str, Any]) -> dict[str, Any]:
    return {"startTimeUnixNano": str(start), "endTimeUnixNano": str(end), "attributes": _attributes(attributes)}


def _call(trace: Trace, generation: Generation) -> dict[str, Any]:
    """Return the attributes of a sampling call."""
    options = {"temperature": generation.temperature, "top_p": generation.top_p}
    sampling = {name: _shortest(value) for name, value in options.items() if value is not None} | generation.sampling
    answer = _message(trace.pool[generation.message]) | {"finish_reason": generation.finish_reason or ""}
    attributes: dict[str, Any] = {
        "gen_ai.operation.name": "chat",
        "gen_ai.conversation.id": trace.id,
        "gen_ai.request.model": trace.model,
        "gen_ai.input.messages": _json([_message(trace.pool[index]) for index in generation.context]),
        "gen_ai.output.messages": _json([answer]),
        "gen_ai.tool.definitions": _json(trace.tools) if trace.tools else None,
        **{f"gen_ai.request.{name}": value for name, value in sampling.items()},
        f"{PREFIX}logprob_kind": None if generation.logprob_kind == "unknown" else generation.logprob_kind,
        f"{PREFIX}policy_version": None if generation.policy_version < 0 else generation.policy_version,
    }
    if generation.prompt_token_ids is not None:
        attributes[PROMPT_IDS] = _json(generation.prompt_token_ids.tolist())
    if generation.token_ids is not None:
        attributes[f"{PER_POSITION}token_ids"] = _json([[each] for each in generation.token_ids.tolist()])
    if generation.logprobs is not None:
        rows = [[None if math.isnan(each) else each] for each in generation.logprobs.tolist()]
        attributes[f"{PER_POSITION}logprobs"] = _json(rows)
    return {name: value for name, value in attributes.items() if value is not None}


def _shortest(value: float) -> float:
    """Return the shortest number with the same float32."""
    return float(str(np.float32(value)))


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, allow_nan=False)


def _message(message: Mapping[str, Any]) -> dict[str, Any]:
    """Return a message as OpenTelemetry's parts.

    Raises:
        ArgumentError: if the conventions have no part for its content.
    """
    content, role = message.get("content"), str(message.get("role"))
    if role == "tool":
        return {
            "role": role,
            "parts": [{"type": "tool_call_response", "id": message.get("tool_call_id"), "response": content}],
        }
    parts: list[dict[str, Any]] = []
    thought = next(
        (message[name] for name in ("reasoning_content", "reasoning") if message.get(name) is not None), None
    )
    if thought is not None:
        parts.append({"type": "reasoning", "content": thought})
    parts += map(_part, [{"type": "text", "text": content}] if isinstance(content, str) else content or ())
    for call in message.get("tool_calls") or ():
        function = chat.as_mapping(chat.as_mapping(call).get("function"))
        text = function.get("arguments")
        arguments = json_path.parse_json_string(text)
        exact = arguments if chat.arguments_json(arguments) == text else text
        parts.append({"type": "tool_call", "id": call.get("id"), "name": function.get("name"), "arguments": exact})
    return {"role": role, "parts": parts, **chat.pick(message, ["name"])}


def _part(part: Any) -> dict[str, Any]:
    fields = chat.as_mapping(part)
    if fields.get("type") == "text" and isinstance(fields.get("text"), str):
        return {"type": "text", "content": fields["text"]}
    url = chat.as_mapping(fields.get("image_url")).get("url")
    if fields.get("type") == "image_url" and isinstance(url, str):
        return {"type": "uri", "modality": "image", "uri": url}
    raise ArgumentError(
        f"TG-DATA-044: a message has a part of the type {fields.get('type')!r:.40}, for which OpenTelemetry's "
        "conventions have no name. Write the traces with tracegrad.write, which keeps every field."
    )


def _attributes(fields: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return attributes as OTLP's typed values."""
    return [{"key": name, "value": _value(value)} for name, value in fields.items()]


def _value(value: Any) -> dict[str, Any]:
    if isinstance(value, bool):
        return {"boolValue": value}
    if isinstance(value, int):
        return {"intValue": str(value)}
    if isinstance(value, float):
        return {"doubleValue": value}
    if isinstance(value, Mapping):
        return {"kvlistValue": {"values": _attributes(value)}}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return {"arrayValue": {"values": [_value(each) for each in value]}}
    return {"stringValue": str(value)}
