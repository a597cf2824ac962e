"""One record as the calls it holds, in the form of a call log; and whether one call goes on another.

Two messages are the same where role, text, tool calls and the call they answer are: as in call logs. No files.
"""

import contextlib
import hashlib
import json
from collections.abc import Mapping
from typing import Any

from tracegrad.errors import TracegradError
from tracegrad.inputs import chat, paths
from tracegrad.trace import Trace

_SAMPLING = (*chat.SAMPLING, "policy_version", "logprob_kind", "choice", "sampling_defaults")
_PREVIOUS = "previous_response_id"
_OF_CALL = ("token_ids", "finish_reason", "stop_reason", "logprobs")


def calls_of(record: Any) -> list[dict[str, Any]] | None:
    """The calls of a record that is one or several; None where it is none.

    A list of messages is the call that gave its last one: what the assistant said before was given.

    >>> said = [{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "4", "token_ids": [19]}]
    >>> calls_of({"messages": said})[0]["response"]["choices"][0]["token_ids"]
    [19]
    """
    if not isinstance(record, Mapping):
        return None
    calls = record.get("calls")
    if isinstance(calls, list):
        return [dict(call) for call in calls] if all(isinstance(call, Mapping) for call in calls) else None
    sampling = chat.told(record, _SAMPLING)
    response, request = paths.opened(record.get("response")), paths.opened(record.get("request"))
    messages = record.get("messages")
    if isinstance(response, (Mapping, list)) and isinstance(request, Mapping):
        return [{**sampling, "request": request, "response": response}]
    if isinstance(response, Mapping) and isinstance(messages, list):
        asked = chat.table(record.get("model_parameters"))
        partial = {} if asked else chat.PARTIAL
        return [{**partial, **sampling, "request": {**asked, "messages": messages}, "response": response}]
    if isinstance(record.get("choices"), list) and "prompt_token_ids" in record:
        return [{**sampling, "response": record}]
    if isinstance(messages, list) and messages and chat.role(messages[-1]) == "assistant":
        tools = {"tools": record["tools"]} if record.get("tools") else {}
        request = {"messages": messages[:-1], **tools}
        return [{**chat.PARTIAL, **sampling, "request": request, "response": _answer(messages[-1])}]
    return None


def _answer(message: Mapping[str, Any]) -> dict[str, Any]:
    """The response that a recorded message came in."""
    told = {**message, **chat.table(message.get("generation"))}
    choice = chat.told(told, _OF_CALL)
    if "logprobs" in choice and isinstance(choice["logprobs"], list) and told.get("tokens"):
        choice["logprobs"] = {"tokens": told["tokens"], "logprobs": choice["logprobs"]}
    kept = chat.without(message, *_OF_CALL, "generation", "prompt_token_ids")
    return {**chat.told(told, ["prompt_token_ids"]), "choices": [{"index": 0, **choice, "message": kept}]}


def prefixes(call: Mapping[str, Any]) -> tuple[list[bytes], bytes | None]:
    """Hashes of the messages of a call's request up to each of them, and of all with its answer, None without one.

    A call of the Responses API goes by what it was asked, or by the id of the response that it goes on, and by its own.
    """
    request, response = chat.table(call.get("request")), chat.table(call.get("response"))
    messages = request.get("messages")
    if messages is None and "input" in request:
        before = _hash(request.get(_PREVIOUS) or [request.get("instructions"), request["input"]])
        return [before], _hash(response["id"]) if isinstance(response.get("id"), str) else None
    told = messages if isinstance(messages, list) else []
    chain, found = hashlib.blake2b(digest_size=16), []
    for message in told:
        chain.update(_normal(message))
        found.append(chain.digest())
    answer = _answered(call.get("response"))
    if answer is None or not told:
        return found, None
    chain.update(_normal({"role": "assistant", **answer}))
    return found, chain.digest()


def whole_inputs(calls: list[dict[str, Any]], most_bytes: int) -> list[dict[str, Any]]:
    """Calls of the Responses API with what `previous_response_id` stands for before their own input, where the call
    that gave that response is among those before.

    Raises:
        OverflowError: if all that is put before them has more than `most_bytes`.
    """
    known: dict[str, tuple[list[Any], int]] = {}
    made, held = [], 0
    for call in calls:
        request, response = chat.table(call.get("request")), chat.table(call.get("response"))
        asked, previous = request.get("input"), request.get(_PREVIOUS)
        if isinstance(asked, (str, list)):
            own = [{"role": "user", "content": asked}] if isinstance(asked, str) else asked
            before, size = known.get(previous, ([], 0)) if isinstance(previous, str) else ([], 0)
            if (held := held + size) > most_bytes:
                raise OverflowError
            if before:
                call = {**call, "request": {**chat.without(request, _PREVIOUS), "input": [*before, *own]}}
            if isinstance(response.get("id"), str) and isinstance(response.get("output"), list):
                said = [*own, *response["output"]]
                known[response["id"]] = [*before, *said], size + len(json.dumps(said, default=str))
        made.append(call)
    return made


def _hash(value: Any) -> bytes:
    return hashlib.blake2b(json.dumps(value, sort_keys=True, default=str).encode(), digest_size=16).digest()


def _answered(response: Any) -> Mapping[str, Any] | None:
    """The message that a response holds: one in chunks, or of another API, as the core reads it."""
    if not isinstance(response, Mapping) or "choices" not in response:
        try:
            return Trace.from_dict({"request": {"messages": []}, "response": response}).messages[-1]
        except (TracegradError, IndexError):
            return None
    choices = response["choices"]
    message = chat.table(choices[0]).get("message") if isinstance(choices, list) and choices else None
    return message if isinstance(message, Mapping) else None


def _normal(message: Any) -> bytes:
    if not isinstance(message, Mapping):
        return json.dumps(message, default=str).encode() + b"\n"
    calls = message.get("tool_calls")
    told = [_call(each) for each in calls] if isinstance(calls, list) else []
    said = [message.get("role"), chat.text_of(message.get("content")) or "", told, message.get("tool_call_id")]
    return json.dumps(said, sort_keys=True, default=str).encode() + b"\n"


def _call(call: Any) -> list[Any]:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping):
        return [call]
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        with contextlib.suppress(ValueError, RecursionError):
            arguments = json.loads(arguments)
    return [call.get("id"), function.get("name"), arguments]
