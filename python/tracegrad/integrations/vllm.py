"""Convert the results of vLLM's `LLM.generate` and `LLM.chat` to traces, without JSON files.

Rust reads the objects in one pass and creates no Python object per token. Logprobs may be `list[dict]` or
`FlatLogprobs`. vllm is not imported: the objects are recognised by their fields.
"""

import base64
import io
import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

import numpy as np

from tracegrad import _core
from tracegrad.data.trace import ReadReport, Traces
from tracegrad.errors import ArgumentError

FORMAT = "vllm_offline"


def traces_from_outputs(
    outputs: Iterable[Any],
    *,
    logprob_kind: Literal["raw", "processed", "unknown"] = "raw",
    temperature: float | None = None,
    top_p: float | None = None,
    sampling: Mapping[str, Any] | None = None,
    messages: Sequence[Any] | None = None,
    rewards: Sequence[Any] | None = None,
    groups: Sequence[Any] | None = None,
    policy_version: int | None = None,
) -> Traces:
    """Convert each completion to a trace. The completions of a request are a group.

    Args:
        outputs: `RequestOutput`s, with `logprobs=0` or more in their sampling parameters.
        logprob_kind: "raw" is vLLM's default; "processed" with `logprobs_mode="processed_logprobs"`.
        temperature, top_p: as in the sampling parameters, which the objects lack.
        sampling: the other sampling parameters that were set, such as {"top_k": 20, "min_p": 0.05}.
        messages: of each request, as passed to `LLM.chat`. The ids of the prompt always come from the objects.
        rewards: of each request, one number for each completion (or one number if there is only one).
        groups: of each request; by default its `request_id`.
        policy_version: of the weights, if the objects do not contain it.

    Raises:
        ArgumentError: if an object is not a `RequestOutput`, or a list is not as long as `outputs`.
        FormatError: if ids or logprobs are invalid; the error has the number of the request, from 1.

    >>> from types import SimpleNamespace as Object
    >>> step = {7: Object(logprob=-0.5), 3: Object(logprob=-1.0)}
    >>> completion = Object(index=0, text=" b", token_ids=[7], logprobs=[step], cumulative_logprob=-0.5,
    ...                     finish_reason="length", stop_reason=None)
    >>> request = Object(request_id="0", prompt="a", prompt_token_ids=[5, 6], outputs=[completion])
    >>> generation = traces_from_outputs([request], temperature=1.0)[0].generations[0]
    >>> generation.prompt_token_ids.tolist(), generation.token_ids.tolist(), generation.logprobs.tolist()
    ([5, 6], [7], [-0.5])
    """
    outputs = list(outputs)
    for name, values in (("messages", messages), ("rewards", rewards), ("groups", groups)):
        if values is not None and len(values) != len(outputs):
            raise ArgumentError(
                f"TG-INTEG-026: {name} has {len(values)} entries for {len(outputs)} requests. Pass one per request."
            )
    options = {
        "logprob_kind": logprob_kind,
        "temperature": temperature,
        "top_p": top_p,
        "policy_version": policy_version,
    }
    options = {**(sampling or {}), **options}
    rows = []
    for number, output in enumerate(outputs):
        _check(output, number)
        reward = _rewards(rewards[number], output, number) if rewards is not None else [None] * len(output.outputs)
        group = output.request_id if groups is None else groups[number]
        for completion, value in zip(output.outputs, reward, strict=True):
            head = {"id": f"{output.request_id}-{completion.index}", "group": group, "reward": value, **options}
            rows.append(_row(head, messages[number] if messages is not None else None, output, completion))
    core, report = _core.Traces.compose(rows, "<outputs>", 1, "auto")
    return Traces(core, ReadReport(**report))


def _check(output: Any, number: int) -> None:
    missing = [name for name in ("request_id", "prompt_token_ids", "outputs") if not hasattr(output, name)]
    if missing:
        raise ArgumentError(
            f"TG-INTEG-027: outputs[{number}] is {type(output).__name__} without {', '.join(missing)}. "
            "Pass the list that LLM.generate or LLM.chat returned."
        )


def _rewards(values: Any, output: Any, number: int) -> list[float | None]:
    rewards = np.atleast_1d(np.asarray(values, np.float64)).tolist()
    if len(rewards) != len(output.outputs):
        raise ArgumentError(
            f"TG-INTEG-028: rewards[{number}] has {len(rewards)} entries for {len(output.outputs)} completions. "
            f"Pass one per completion."
        )
    return [None if np.isnan(value) else value for value in rewards]


def _row(head: dict[str, Any], messages: Any, output: Any, completion: Any) -> list[Any]:
    """Return a record as pieces: JSON text, alternating with the lists of the objects."""
    completion_fields = {
        "index": 0,
        "text": completion.text,
        "finish_reason": completion.finish_reason,
        "stop_reason": completion.stop_reason,
        "cumulative_logprob": _finite(completion.cumulative_logprob),
        "routed_experts": _encoded(getattr(completion, "routed_experts", None)),
        "weight_versions": _spans(getattr(completion, "weight_versions", None)),
    }
    record = {key: value for key, value in head.items() if value is not None}
    if messages is not None:
        record["request"] = {"messages": list(messages)}
    opening = _json(record)[:-1]
    ids = list(completion.token_ids) if isinstance(completion.token_ids, tuple) else completion.token_ids
    pieces: list[Any] = [opening + (', "response": {"prompt_token_ids": ')]
    pieces += [output.prompt_token_ids, ', "outputs": [' + _json(completion_fields)[:-1] + ', "token_ids": ', ids]
    if completion.logprobs is not None:
        pieces += [', "logprobs": ', (ids, completion.logprobs)]
    if (mask := getattr(completion, "sampling_mask", None)) is not None:
        pieces += [', "sampling_mask": ', list(mask)]
    if messages is None:
        pieces[0] = opening + ', "prompt_token_ids": '
        return [*pieces, "}]}"]
    return [*pieces, "}]}}"]


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def _finite(value: float | None) -> float | None:
    return value if value is not None and np.isfinite(value) else None


def _encoded(array: Any) -> str | None:
    """Return Base64 of the array in numpy's file format, as vLLM's server sends it."""
    if array is None:
        return None
    file = io.BytesIO()
    np.save(file, np.asarray(array), allow_pickle=False)
    return base64.b64encode(file.getvalue()).decode()


def _spans(spans: Any) -> list[dict[str, Any]] | None:
    if spans is None:
        return None
    return [
        span if isinstance(span, dict) else {name: getattr(span, name) for name in ("version", "start", "end")}
        for span in spans
    ]
