"""Convert messages whose text, tool calls and tool results are parts, in any key and of any common spelling.

Forms: parts under another key than `content` (Semantic Kernel's `items`, `parts`, `blocks`), an agent's complete run as
the parts of one assistant message (AgentScope), and tool calls under another key than `tool_calls`. A message is split
into assistant and tool messages if its order and ids leave one reading. Otherwise the record is refused, because the
core would lose what is in such fields: chat templates read only `content` and `tool_calls`.
"""

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from tracegrad.data import chat
from tracegrad.data.field_map import BadValueError

NAME = "message_parts"
_TEXT_KEYS = ("text", "value", "body", "utterance", "markdown", "message")
_RESULT_KEYS = ("output", "result")
"""Fields that contain the text of a message which has no content, and those of a tool's message."""
_PART_KEYS = (
    "items",
    "parts",
    "blocks",
    "content_blocks",
    "contentBlocks",
    "content_parts",
    "contentParts",
    "contents",
)
_KIND_KEYS = ("type", "content_type", "kind", "part_kind", "block_type")
_KINDS = {
    **dict.fromkeys(("text", "inputtext", "outputtext", "textcontent", "textpart"), "text"),
    **dict.fromkeys(("thinking", "reasoning", "thought", "think"), "thought"),
    **dict.fromkeys(("toolcall", "tooluse", "functioncall", "customtoolcall", "toolcallpart"), "call"),
    **dict.fromkeys(("toolresult", "functionresult", "functioncalloutput", "toolcallresult"), "result"),
    **dict.fromkeys(("toolresponse", "functionresponse", "toolcallresponse", "tooloutput"), "result"),
}
"""Kinds of parts by their names, in lower case and without `_` and `-`."""
_IDS = ("tool_call_id", "toolCallId", "tool_use_id", "toolUseId", "call_id", "callId", "id")
_NAMES = ("name", "tool_name", "toolName", "function_name", "tool", "action")
_ARGUMENTS = ("arguments", "args", "input", "parameters", "inputParameters", "input_parameters", "tool_input")
_RESULTS = ("result", "output", "content", "response", "text", "value")
_OF_EACH = ("role", "name", "sampled", "trainable", "weight")
"""Fields that all assistant messages of a split message keep. The last one also keeps the others."""
_MEDIA = re.compile(r"image|audio|video|file|document|media", re.I)
_LABELS = re.compile(r"meta|extra|kwargs|provider|error|usage|invalid|reason|think", re.I)
"""Names of fields that repeat or describe calls."""
_TOKENS = ("logprobs", "token_ids", "prompt_token_ids", "cumulative_logprob")
_FIX = "Write text as `content`, calls as `tool_calls`, and each result as a message of the role `tool`"


class _Part(NamedTuple):
    kind: str
    """text, thought, call, result, or other."""
    value: Any
    """The text, the call in OpenAI's form, the text of the result, or the part itself."""
    identity: Any = None
    name: Any = None


def of_record(record: Any) -> list[dict[str, Any]] | None:
    """Convert the messages of a record; None if none of its messages needs it.

    Raises:
        BadValueError: if a message can be read in several ways.
    """
    messages = chat.as_mapping(record).get("messages")
    if not chat.is_messages(messages) or "response" in record or not chat.has_answer(messages):
        return None
    if not any(map(needs_conversion, messages)):
        return None
    return [{**record, "messages": convert(messages)}]


def needs_conversion(message: Any) -> bool:
    """Return whether a message has text, calls or results where no chat template reads them."""
    if not isinstance(message, Mapping):
        return False
    content = message.get("content")
    if isinstance(content, list):
        is_object = any(isinstance(chat.as_mapping(part).get("text"), Mapping) for part in content)
        return is_object or any(_part(part).kind in ("call", "result") for part in content)
    return _holder(message) is not None or _call_key(message) is not None


def convert(messages: list[Any]) -> list[dict[str, Any]]:
    """Return messages in the form that chat templates expect; one with results inside becomes several.

    Raises:
        BadValueError: if a message can be read in several ways.

    >>> call = {"type": "tool_call", "id": "c", "name": "add", "input": "{}"}
    >>> result = {"type": "tool_result", "id": "c", "output": "4"}
    >>> told = [{"role": "assistant", "content": [call, result, {"type": "text", "text": "It is 4."}]}]
    >>> [(each["role"], each["content"]) for each in convert(told)]
    [('assistant', ''), ('tool', '4'), ('assistant', 'It is 4.')]
    """
    converted: list[dict[str, Any]] = []
    for index, message in enumerate(messages):
        if not needs_conversion(message):
            converted.append(message)
        elif (key := _call_key(message)) is not None and (message.get("content") or key not in _PART_KEYS):
            converted += _with_calls(index, message, key, messages[index + 1 :])
        else:
            converted += _split(index, message)
    return converted


def _holder(message: Mapping[str, Any]) -> str | None:
    """Return the key of the text or parts of a message without content; None unless there is exactly one text."""
    if message.get("content") or message.get("refusal"):
        return None
    lists = [key for key in _PART_KEYS if isinstance(message.get(key), list) and message[key]]
    names = (*_TEXT_KEYS, *(_RESULT_KEYS if message.get("role") in ("tool", "function") else ()))
    texts = [key for key in names if isinstance(message.get(key), str) and message[key].strip()]
    read = [[_part(part) for part in message[key]] for key in lists]
    if any(each.kind == "other" and not _MEDIA.search(_kind(each.value)) for parts in read for each in parts):
        return None
    if len({*map(_text, read), *(message[key] for key in texts)}) > 1 or len(lists) > 1:
        return None
    return next(iter([*lists, *texts]), None)


def _split(index: int, message: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Convert a message with parts, or with text under another key."""
    key = "content" if isinstance(message.get("content"), list) and message["content"] else _holder(message) or ""
    fields = chat.without(message, "content", key)
    if isinstance(message[key], str):
        return [{**fields, "content": message[key]}]
    parts = [_part(part) for part in message[key]]
    has_calls = any(each.kind == "call" for each in parts)
    if has_calls and (message["role"] != "assistant" or message.get("tool_calls")):
        raise _refusal(index, "has a call among its parts, and it has other calls or is not of the assistant")
    return _with_fields(index, fields, [*_groups(index, message["role"], parts)])


def _text(parts: list[_Part]) -> str:
    return "".join(each.value for each in parts if each.kind == "text")


def _groups(index: int, role: str, parts: list[_Part]) -> Iterator[dict[str, Any]]:
    """Yield a message for each group of parts that one call of the model sampled, and one for each result."""
    group: list[_Part] = []
    pending: list[_Part] = []
    for part in parts:
        if part.kind != "result":
            if pending and not group:
                raise _refusal(index, "has parts between its calls and their results")
            group.append(part)
            continue
        if group:
            yield _message(index, role, group)
            pending, group = [each for each in group if each.kind == "call"], []
        yield _result(index, role, part, pending)
    if group or not parts:
        yield _message(index, role, group)


def _result(index: int, role: str, part: _Part, pending: list[_Part]) -> dict[str, Any]:
    """Return the message of a result, and remove its call from the pending ones."""
    call = None
    if role == "assistant":
        with_id = [each for each in pending if part.identity is not None and each.identity == part.identity]
        without_ids = part.identity is None and pending and all(each.identity is None for each in pending)
        call = with_id[0] if len(with_id) == 1 else pending[0] if without_ids else None
        if call is None or (part.name is not None and call.name != part.name):
            raise _refusal(index, "has a result whose call is not before it")
        pending.remove(call)
    name = part.name if part.name is not None else call and call.name
    fields = {"tool_call_id": part.identity, "name": name}
    return {"role": "tool", **chat.pick(fields, fields), "content": part.value}


def _message(index: int, role: str, parts: list[_Part]) -> dict[str, Any]:
    """Return the message of parts that have no result between them."""
    calls = [at for at, part in enumerate(parts) if part.kind == "call"]
    texts = [at for at, part in enumerate(parts) if part.kind in ("text", "other") and part.value]
    if calls and any(at < calls[-1] for at in texts) and any(at > calls[0] for at in texts):
        raise _refusal(index, "has text on both sides of a call that has no result between them")
    if any(part.kind == "other" for part in parts):
        content: Any = [
            part.value if part.kind == "other" else {"type": "text", "text": part.value}
            for part in parts
            if part.kind in ("text", "other")
        ]
    else:
        content = _text(parts)
    thoughts = "".join(part.value for part in parts if part.kind == "thought")
    converted = {"role": role, "content": content} | ({"reasoning_content": thoughts} if thoughts else {})
    return converted | ({"tool_calls": [parts[at].value for at in calls]} if calls else {})


def _with_fields(index: int, fields: dict[str, Any], messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Give the other fields of a message to the messages that it became."""
    own = [at for at, each in enumerate(messages) if each["role"] == fields["role"]]
    if len(own) > 1 and chat.pick(fields, _TOKENS):
        raise _refusal(index, "became several answers, and its token ids or logprobs are of all of them")
    last = own[-1] if own else len(messages) - 1
    return [
        {**(fields if at == last else chat.pick(fields, _OF_EACH) if at in own else {}), **each}
        for at, each in enumerate(messages)
    ]


def _with_calls(index: int, message: Mapping[str, Any], key: str, later: list[Any]) -> list[dict[str, Any]]:
    """Convert a message with tool calls under another key than `tool_calls`.

    Calls without results inside are followed by their tool messages. If results are inside, the message must have no
    text, because it could be from before or after the calls.
    """
    parts = [_part(each, "call") for each in message[key]]
    results = [_first(chat.as_mapping(each), ("output", "result", "response")) for each in message[key]]
    fields = chat.without(message, key, "content")
    content = message.get("content") or ""
    answered = 0
    while answered < len(later) and chat.role(later[answered]) in ("tool", "function"):
        answered += 1
    call_message = {**fields, "content": content, "tool_calls": [part.value for part in parts]}
    if all(part.kind == "call" for part in parts):
        if all(result is None for result in results) and (answered == len(parts) or not (content or answered)):
            return [call_message]
        if all(result is not None for result in results) and not content and not answered:
            named = zip(results, parts, strict=True)
            told = [_Part("result", _result_text(each), part.identity, part.name) for each, part in named]
            return [call_message, *(_result(index, "tool", each, []) for each in told)]
    problem = f"has tool calls under `{key}`, and it is unknown whether its text was sampled before or after them"
    raise _refusal(index, problem)


def _call_key(message: Mapping[str, Any]) -> str | None:
    """Return the key of a list of tool calls that chat templates do not read."""
    if message.get("role") != "assistant" or message.get("tool_calls"):
        return None
    for key, value in message.items():
        if isinstance(value, list) and value and key not in ("content", "tool_calls") and not _LABELS.search(key):
            calls = [_part(each, "call") for each in value if isinstance(each, Mapping)]
            if len(calls) == len(value) and all(each.kind == "call" for each in calls):
                return key
    return None


def _part(part: Any, kind: str | None = None) -> _Part:
    """Classify a part of a message. `kind` is that of a part whose name does not tell it."""
    if isinstance(part, str):
        return _Part("text", part)
    fields = chat.as_mapping(part)
    name = _kind(part) or None
    if name is None and kind is None:
        wrapped = [(key, value) for key, value in fields.items() if _normal(key) in _KINDS and value is not None]
        if len(wrapped) != 1:
            return _Part("other", part)
        name, value = wrapped[0]
        fields = value if isinstance(value, Mapping) else {"text": value}
    kind = kind or _KINDS.get(_normal(name or ""), "other")
    identity, tool = _first(fields, _IDS), _first(fields, _NAMES)
    if kind in ("text", "thought"):
        text = _first(fields, ("text", "thinking", "reasoning", "thought", "content", "value"))
        text = text.get("value") if isinstance(text, Mapping) else text  # As in messages of OpenAI's Assistants.
        return _Part(kind, text) if isinstance(text, str) else _Part("other", part)
    if kind == "call":
        function = fields.get("function")
        inner = function if isinstance(function, Mapping) else fields
        tool, arguments = _first(inner, _NAMES), _first(inner, _ARGUMENTS)
        is_schema = isinstance(arguments, Mapping) and "properties" in arguments
        if isinstance(tool, str) and isinstance(arguments, (str, Mapping)) and not is_schema:
            return _Part(kind, chat.tool_call(tool, identity, arguments), identity, tool)
        return _Part("other", part)
    if kind == "result":
        return _Part(kind, _result_text(_first(fields, _RESULTS)), identity, tool)
    return _Part("other", part)


def _kind(part: Any) -> str:
    """Return the name of the kind of a part, empty if it has none."""
    fields = chat.as_mapping(part)
    return next((fields[key] for key in _KIND_KEYS if isinstance(fields.get(key), str)), "")


def _result_text(result: Any) -> str:
    """Return the text of a result: its own, that of its parts, or its JSON."""
    text = chat.text_of(result)
    return text if isinstance(text, str) else "" if text is None else json.dumps(text, ensure_ascii=False)


def _first(fields: Mapping[str, Any], names: tuple[str, ...]) -> Any:
    return next((fields[name] for name in names if fields.get(name) is not None), None)


def _normal(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.lower())


def _refusal(index: int, problem: str) -> BadValueError:
    return BadValueError((f"message {index} {problem}", "What was sampled in which order would be guessed", _FIX))
