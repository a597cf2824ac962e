"""LangChain's messages in their three spellings, and LangSmith's runs.

Source: langchain-core 1.x (`messages_to_dict`, `dumpd`, `model_dump`) and langsmith's run schema; a run that is no call
of a model (a chain, a tool) holds none and is left out.
"""

from collections.abc import Mapping
from typing import Any

from tracegrad.data import chat
from tracegrad.data.formats import record_fields

ROLES = {"human": "user", "ai": "assistant", "system": "system", "tool": "tool", "function": "tool"}
"""By the kind of a message, which its class is named for: `AIMessage`, or `AIMessageChunk`."""
KEYS = ("lc", "additional_kwargs", "response_metadata")
"""One of them stands in each message that LangChain wrote."""
_TALKS = ("messages", "input", "output", "history", "chat_history")
_OF_MODEL = ("llm", "chat_model")
_OF_RUN = ("inputs", "outputs", "events", "serialized")
_PARAMETERS = (*chat.SAMPLING, "model", "tools", "max_tokens", "stop")


def _is_talk(record: Any) -> bool:
    """Whether a record is a list of LangChain's messages, or holds one."""
    if isinstance(record, list):
        return bool(record) and all(is_message(each) for each in record)
    if not isinstance(record, Mapping) or "run_type" in record:
        return False
    return bool(_talks(record))


def _talks(record: Mapping[str, Any]) -> list[str]:
    """The keys under which messages stand, the usual names first."""
    names = [*(key for key in _TALKS if key in record), *(key for key in record if key not in _TALKS)]
    return [key for key in names if isinstance(record[key], list) and _is_talk(record[key])]


def of_talk(record: Any) -> list[dict[str, Any]] | None:
    """One trace of the messages, with what else the record says; None where these are no such messages."""
    if not _is_talk(record):
        return None
    if isinstance(record, list):
        return [{"messages": [message(each) for each in record]}]
    keys = _talks(record)
    messages = [message(each) for key in keys[:1] for each in record[key]]
    if keys[0] == "input" and isinstance(record.get("output"), list) and _is_talk(record["output"]):
        messages += [message(each) for each in record["output"]]
    return [{**chat.without(record, *keys), "messages": messages}]


def of_run(record: Any) -> list[dict[str, Any]] | None:
    """One call of a run of LangSmith, or what is refused as a failed one; none of a run that is no model's, or that has
    not ended; None where it is no run.
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
    asked = inputs.get("messages", inputs.get("prompts"))
    asked = asked[0] if isinstance(asked, list) and asked and isinstance(asked[0], list) else asked
    response = _response(outputs)
    if not isinstance(asked, list) or response is None:
        return []
    invoked = chat.table(record.get("extra")).get("invocation_params")
    told = {**chat.told(invoked, _PARAMETERS), **chat.told(inputs, _PARAMETERS)}
    kept = {**({} if told.keys() - {"tools"} else chat.PARTIAL), **chat.without(record, *_OF_RUN)}
    return [{**kept, "request": {**told, "messages": [message(each) for each in asked]}, "response": response}]


def _is_run(record: Any) -> bool:
    return isinstance(record, Mapping) and isinstance(record.get("run_type"), str) and "inputs" in record


def is_root(record: Any) -> bool:
    """Whether a record is the first run of a trace of LangSmith, and no model's."""
    return _is_run(record) and record["run_type"] not in _OF_MODEL and record.get("parent_run_id") is None


def of_root(record: Mapping[str, Any]) -> dict[str, Any]:
    """What such a run was asked and answered, side by side; what is refused as a failed call of one that failed.

    The messages of its outputs stand for those of its inputs where they begin with them, as a state of LangGraph does.
    """
    if isinstance(error := record.get("error"), str) and error:
        return record_fields.failed_call(record, error)
    kept = chat.without(record, *_OF_RUN, "run_type", "error")
    inputs, outputs = (_plain(record.get(key)) for key in ("inputs", "outputs"))
    asked, said = (told.get("messages") for told in (inputs, outputs))
    if isinstance(asked, list) and isinstance(said, list) and said[: len(asked)] != asked:
        outputs["messages"] = [*asked, *said]
    return {**kept, **inputs, **outputs}


def _plain(told: Any) -> dict[str, Any]:
    """An object with its messages as a chat template gets them."""
    made = dict(chat.table(told))
    for key, value in made.items():
        if isinstance(value, list) and _is_talk(value):
            made[key] = [message(each) for each in value]
        elif is_message(value):
            made[key] = message(value)
    return made


def _response(outputs: Mapping[str, Any]) -> dict[str, Any] | None:
    """The response of a run: OpenAI's own, LangChain's generations, or a message."""
    if isinstance(outputs.get("choices"), list):
        return dict(outputs)
    first: Any = outputs.get("generations")
    while isinstance(first, list) and first:
        first = first[0]
    first = chat.table(first)
    if "message" in first:
        return of_message(first["message"], first.get("generation_info"))
    if isinstance(first.get("text"), str):
        return of_message({"role": "assistant", "content": first["text"]}, first.get("generation_info"))
    said = outputs.get("output", outputs.get("message"))
    if isinstance(outputs.get("messages"), list) and outputs["messages"]:
        said = outputs["messages"][-1]
    return of_message(said, None) if is_message(said) or chat.role(said) == "assistant" else None


def of_message(told: Any, info: Any) -> dict[str, Any]:
    """A message of the assistant as the response that it came in."""
    said = message(told)
    of_answer = {**chat.told(info, chat.OF_ANSWER), **chat.told(said, chat.OF_ANSWER)}
    choice = {"index": 0, **chat.without(of_answer, "prompt_token_ids"), "message": chat.without(said, *chat.OF_ANSWER)}
    return {**chat.told(of_answer, ["prompt_token_ids"]), "choices": [choice]}


def _fields(told: Any) -> tuple[str, Mapping[str, Any]] | None:
    """The kind of a message, by a word of its own, and its fields, of whichever spelling."""
    if not isinstance(told, Mapping):
        return None
    kind, names = told.get("type"), told.get("id")
    if told.get("lc") == 1 and isinstance(told.get("kwargs"), Mapping) and isinstance(names, list) and names:
        return _kind(str(names[-1])), told["kwargs"]
    if isinstance(kind, str) and ((kind := _kind(kind)) in ROLES or kind == "chat"):
        inner = told.get("data")
        if isinstance(inner, Mapping):
            return kind, inner
        if "content" in told and "role" not in told:
            return kind, told
    return None


def _kind(name: str) -> str:
    return name.removesuffix("Chunk").removesuffix("Message").lower() if "Message" in name else name


def is_message(told: Any) -> bool:
    """Whether a value is a message in one of these spellings."""
    found = _fields(told)
    return found is not None and found[0] in (*ROLES, "chat")


def message(told: Any) -> dict[str, Any]:
    """A message as a chat template gets it, with the logprobs that stand in its response metadata.

    >>> message({"type": "human", "data": {"content": "2+2?"}})
    {'role': 'user', 'content': '2+2?'}
    """
    found = _fields(told)
    if found is None:
        return dict(told) if isinstance(told, Mapping) else {"role": "user", "content": str(told)}
    kind, fields = found
    said: dict[str, Any] = {
        "role": ROLES.get(kind) or fields.get("role", "user"),
        "content": text_of(fields.get("content")),
    }
    more = chat.table(fields.get("additional_kwargs"))
    calls = fields.get("tool_calls")
    if isinstance(calls, list) and calls:
        said["tool_calls"] = [_tool_call(call, more) for call in calls]
    elif isinstance(more.get("tool_calls"), list) and more["tool_calls"]:
        said["tool_calls"] = more["tool_calls"]
    if isinstance(thought := more.get("reasoning_content"), str) and thought:
        said["reasoning_content"] = thought
    if kind == "tool" and fields.get("tool_call_id"):
        said["tool_call_id"] = fields["tool_call_id"]
    if isinstance(fields.get("name"), str) and fields["name"]:
        said["name"] = fields["name"]
    if said["role"] == "assistant":
        said |= chat.told(fields.get("response_metadata"), chat.OF_ANSWER)
    return said


def text_of(content: Any) -> Any:
    """Text; blocks of text alone become one text, as a template gets them."""
    others = content if isinstance(content, list) else []
    kinds = [each.get("type", each.get("block_type")) for each in others if isinstance(each, Mapping)]
    return chat.text_of(content) if all(kind == "text" for kind in kinds) else content


def _tool_call(call: Any, more: Mapping[str, Any]) -> Any:
    """A call as OpenAI writes it; its arguments as they were sampled, where they were kept."""
    if not isinstance(call, Mapping) or "function" in call:
        return call
    kept = more.get("tool_calls")
    for raw in kept if isinstance(kept, list) else []:
        if isinstance(raw, Mapping) and raw.get("id") == call.get("id"):
            return raw
    return chat.tool_call(call.get("name"), call.get("id"), call.get("args"))
