"""Convert LangChain's messages in their three serializations, and LangSmith's runs.

Source: langchain-core 1.x (`messages_to_dict`, `dumpd`, `model_dump`) and langsmith's run schema. A run that is not a
model call (a chain, a tool) is left out.
"""

from collections.abc import Mapping
from typing import Any

from tracegrad.data import chat
from tracegrad.data.formats import record_fields

ROLES = {"human": "user", "ai": "assistant", "system": "system", "tool": "tool", "function": "tool"}
"""Roles by message type. The type is part of the class name: `AIMessage`, or `AIMessageChunk`."""
KEYS = ("lc", "additional_kwargs", "response_metadata")
"""Every message that LangChain serialized contains one of these keys."""
_TALKS = ("messages", "input", "output", "history", "chat_history")
_OF_MODEL = ("llm", "chat_model")
_OF_RUN = ("inputs", "outputs", "events", "serialized")
_PARAMETERS = (*chat.SAMPLING, "model", "tools", "max_tokens", "stop")


def _is_talk(record: Any) -> bool:
    """Return whether a record is a list of LangChain messages, or contains one."""
    if isinstance(record, list):
        return bool(record) and all(is_message(each) for each in record)
    if not isinstance(record, Mapping) or "run_type" in record:
        return False
    return bool(_talks(record))


def _talks(record: Mapping[str, Any]) -> list[str]:
    """Return the keys of lists of messages, the usual names first."""
    names = [*(key for key in _TALKS if key in record), *(key for key in record if key not in _TALKS)]
    return [key for key in names if isinstance(record[key], list) and _is_talk(record[key])]


def of_talk(record: Any) -> list[dict[str, Any]] | None:
    """Convert LangChain messages, with the other fields of the record, to one trace; None for other records."""
    if not _is_talk(record):
        return None
    if isinstance(record, list):
        return [{"messages": [message(each) for each in record]}]
    keys = _talks(record)
    messages = [message(each) for key in keys[:1] for each in record[key]]
    output = record.get("output") if keys[0] == "input" else None
    if isinstance(output, list) and _is_talk(output):
        messages += [message(each) for each in output]
    elif isinstance(output, str) or is_message(output):
        answer = {"role": "assistant", "content": output} if isinstance(output, str) else message(output)
        messages, keys = [*chat.mark_not_sampled(messages), answer], [*keys, "output"]
    elif output:
        raise record_fields.unread_refusal("output", output)
    return [{**chat.without(record, *keys), "messages": messages}]


def of_run(record: Any) -> list[dict[str, Any]] | None:
    """Convert a LangSmith run to one call, or to a failed call if the run has an error.

    No records if the run is not a model call or has not ended; None if the record is not a run.
    """
    if not _is_run(record):
        return None
    inputs, outputs = record.get("inputs"), record.get("outputs")
    if record["run_type"] not in _OF_MODEL or not isinstance(inputs, Mapping):
        return []
    if isinstance(error := record.get("error"), str) and error:
        return [record_fields.failed_call(record, error)]
    if not isinstance(outputs, Mapping):
        return []
    prompt = inputs.get("messages", inputs.get("prompts"))
    prompt = prompt[0] if isinstance(prompt, list) and prompt and isinstance(prompt[0], list) else prompt
    response = _response(outputs)
    if not isinstance(prompt, list) or response is None:
        return []
    invoked = chat.as_mapping(record.get("extra")).get("invocation_params")
    parameters = {**chat.pick(invoked, _PARAMETERS), **chat.pick(inputs, _PARAMETERS)}
    other_fields = {**({} if parameters.keys() - {"tools"} else chat.PARTIAL), **chat.without(record, *_OF_RUN)}
    return [
        {
            **other_fields,
            "request": {**parameters, "messages": [message(each) for each in prompt]},
            "response": response,
        }
    ]


def _is_run(record: Any) -> bool:
    return isinstance(record, Mapping) and isinstance(record.get("run_type"), str) and "inputs" in record


def is_root(record: Any) -> bool:
    """Return whether a record is the root run of a LangSmith trace, and not a model call."""
    return _is_run(record) and record["run_type"] not in _OF_MODEL and record.get("parent_run_id") is None


def of_root(record: Mapping[str, Any]) -> dict[str, Any]:
    """Convert a root run to a record of its inputs and outputs, or to a failed call if the run has an error.

    If the messages of the outputs start with those of the inputs, as in a LangGraph state, only the former are used.
    """
    if isinstance(error := record.get("error"), str) and error:
        return record_fields.failed_call(record, error)
    other_fields = chat.without(record, *_OF_RUN, "run_type", "error")
    inputs, outputs = (_plain(record.get(key)) for key in ("inputs", "outputs"))
    input_messages, output_messages = (side.get("messages") for side in (inputs, outputs))
    if (
        isinstance(input_messages, list)
        and isinstance(output_messages, list)
        and output_messages[: len(input_messages)] != input_messages
    ):
        outputs["messages"] = [*input_messages, *output_messages]
    if isinstance(input_messages, list) and output_messages is None:
        # The answer is elsewhere in the outputs, if anywhere: the messages of the inputs were sampled earlier.
        inputs["messages"] = chat.mark_not_sampled(input_messages)
    return {**other_fields, **inputs, **outputs}


def _plain(fields: Any) -> dict[str, Any]:
    """Return an object with its messages in the form that chat templates expect."""
    converted = dict(chat.as_mapping(fields))
    for key, value in converted.items():
        if isinstance(value, list) and _is_talk(value):
            converted[key] = [message(each) for each in value]
        elif is_message(value):
            converted[key] = message(value)
    return converted


def _response(outputs: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the response of a run: OpenAI's, or one made from LangChain's generations or from a message."""
    if isinstance(outputs.get("choices"), list):
        return dict(outputs)
    first: Any = outputs.get("generations")
    while isinstance(first, list) and first:
        first = first[0]
    first = chat.as_mapping(first)
    if "message" in first:
        return of_message(first["message"], first.get("generation_info"))
    if isinstance(first.get("text"), str):
        return of_message({"role": "assistant", "content": first["text"]}, first.get("generation_info"))
    output = outputs.get("output", outputs.get("message"))
    if isinstance(outputs.get("messages"), list) and outputs["messages"]:
        output = outputs["messages"][-1]
    return of_message(output, None) if is_message(output) or chat.role(output) == "assistant" else None


def of_message(told: Any, info: Any) -> dict[str, Any]:
    """Return a response with one choice, made from an assistant message and its generation info."""
    converted = message(told)
    answer_fields = {**chat.pick(info, chat.ANSWER_FIELDS), **chat.pick(converted, chat.ANSWER_FIELDS)}
    choice = {
        "index": 0,
        **chat.without(answer_fields, "prompt_token_ids"),
        "message": chat.without(converted, *chat.ANSWER_FIELDS),
    }
    return {**chat.pick(answer_fields, ["prompt_token_ids"]), "choices": [choice]}


def _fields(value: Any) -> tuple[str, Mapping[str, Any]] | None:
    """Return the type and the fields of a message in any of the serializations; None for other values."""
    if not isinstance(value, Mapping):
        return None
    kind, names = value.get("type"), value.get("id")
    if value.get("lc") == 1 and isinstance(value.get("kwargs"), Mapping) and isinstance(names, list) and names:
        return _kind(str(names[-1])), value["kwargs"]
    if isinstance(kind, str) and ((kind := _kind(kind)) in ROLES or kind == "chat"):
        data = value.get("data")
        if isinstance(data, Mapping):
            return kind, data
        if "content" in value and "role" not in value:
            return kind, value
    return None


def _kind(name: str) -> str:
    return name.removesuffix("Chunk").removesuffix("Message").lower() if "Message" in name else name


def is_message(told: Any) -> bool:
    """Return whether a value is a message in one of LangChain's serializations."""
    match = _fields(told)
    return match is not None and match[0] in (*ROLES, "chat")


def message(told: Any) -> dict[str, Any]:
    """Return a message in the form that chat templates expect, with the logprobs of its response metadata.

    >>> message({"type": "human", "data": {"content": "2+2?"}})
    {'role': 'user', 'content': '2+2?'}
    """
    match = _fields(told)
    if match is None:
        return dict(told) if isinstance(told, Mapping) else {"role": "user", "content": str(told)}
    kind, fields = match
    converted: dict[str, Any] = {
        "role": ROLES.get(kind) or fields.get("role", "user"),
        "content": text_of(fields.get("content")),
    }
    extra = chat.as_mapping(fields.get("additional_kwargs"))
    tool_calls = fields.get("tool_calls")
    if isinstance(tool_calls, list) and tool_calls:
        converted["tool_calls"] = [_tool_call(call, extra) for call in tool_calls]
    elif isinstance(extra.get("tool_calls"), list) and extra["tool_calls"]:
        converted["tool_calls"] = extra["tool_calls"]
    if isinstance(thought := extra.get("reasoning_content"), str) and thought:
        converted["reasoning_content"] = thought
    if kind == "tool" and fields.get("tool_call_id"):
        converted["tool_call_id"] = fields["tool_call_id"]
    if isinstance(fields.get("name"), str) and fields["name"]:
        converted["name"] = fields["name"]
    if converted["role"] == "assistant":
        converted |= chat.pick(fields.get("response_metadata"), chat.ANSWER_FIELDS)
    return converted


def text_of(content: Any) -> Any:
    """Return content as one string, as templates expect, if it has only text blocks; else unchanged."""
    others = content if isinstance(content, list) else []
    kinds = [each.get("type", each.get("block_type")) for each in others if isinstance(each, Mapping)]
    return chat.text_of(content) if all(kind == "text" for kind in kinds) else content


def _tool_call(call: Any, extra: Mapping[str, Any]) -> Any:
    """Return a tool call in OpenAI's form, with the original argument string if it is recorded."""
    if not isinstance(call, Mapping) or "function" in call:
        return call
    raw_calls = extra.get("tool_calls")
    for raw in raw_calls if isinstance(raw_calls, list) else []:
        if isinstance(raw, Mapping) and raw.get("id") == call.get("id"):
            return raw
    return chat.tool_call(call.get("name"), call.get("id"), call.get("args"))
