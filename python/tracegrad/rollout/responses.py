"""Check the shape of a server's answer and name the first field of a response or stream chunk that is invalid.

Only fields that clients and the record read are checked. Fields may be absent or null, and unknown fields are ignored.
Sources: openai `types/chat/chat_completion{,_chunk}.py`, `types/completion.py`, and vLLM's token ids.
"""

import json
from collections.abc import Callable, Mapping
from typing import Any

from tracegrad.rollout.client import orjson

MOST_LEVELS = 100
"""Maximum nesting of lists and objects; the core reads records with 127 levels, which contain answers a few levels
deep."""
MOST_CHOICES, MOST_CALLS = 1 << 10, 1 << 12
"""Maximum numbers of choices in a response and of tool calls in a message."""
MOST_ID = (1 << 31) - 1
Check = Callable[[Any], str | None]
"""Function that returns what is wrong with a value that is not None, worded to follow the field name; None if it is
valid."""


def parse_json(raw: bytes, *, allow_lone_surrogates: bool = False) -> Any:
    """Decode JSON strictly.

    Args:
        allow_lone_surrogates: accept lone surrogates, which JSON can represent and UTF-8 cannot.

    >>> parse_json(b'{"choices": []}')
    {'choices': []}

    Raises:
        ValueError: if it is not UTF-8 or not JSON, contains NaN, an infinity, a lone surrogate or an integer with more
            digits than Python reads, or is nested deeper than `MOST_LEVELS`.
    """
    try:
        value = orjson.loads(raw)
    except orjson.JSONDecodeError:  # orjson also refuses 1e999, and lone surrogates together with valid pairs
        try:
            value = json.loads(raw.decode("utf-8"), parse_constant=_no_number, parse_float=_finite)
            if not allow_lone_surrogates:
                json.dumps(value, ensure_ascii=False).encode()
        except UnicodeEncodeError:
            raise ValueError("it has half of a surrogate pair, which UTF-8 cannot encode") from None
        except RecursionError:
            raise ValueError(f"it is nested deeper than {MOST_LEVELS} levels") from None
    if raw.count(b"[") + raw.count(b"{") > MOST_LEVELS and is_deep(value):
        raise ValueError(f"it is nested deeper than {MOST_LEVELS} levels")
    return value


def is_deep(value: Any, levels: int = MOST_LEVELS) -> bool:
    """Return whether lists and objects are nested deeper than `levels`.

    >>> is_deep([[1]], 2), is_deep([[{}]], 2)
    (False, True)
    """
    level = [value] if isinstance(value, dict | list) else []
    while level and levels:
        inner = (item.values() if type(item) is dict else item for item in level)
        level = [item for values in inner for item in values if type(item) is dict or type(item) is list]
        levels -= 1
    return bool(level)


def check_chat(answer: Mapping[str, Any]) -> str | None:
    """Return what is wrong with a chat completion; None if it is valid.

    >>> check_chat({"choices": [{"message": {"content": "4"}, "token_ids": [True]}]})
    'choices[0].token_ids is not a list of token ids'
    """
    return _wrong(answer, _CHAT) or _no_choice(answer) or _no_message(answer)


def wrong_in_completion(answer: Mapping[str, Any]) -> str | None:
    """Return what is wrong with a text completion; None if it is valid."""
    return _wrong(answer, _COMPLETION) or _no_choice(answer)


def wrong_in_chat_chunk(chunk: Mapping[str, Any]) -> str | None:
    """Return what is wrong with a chunk of a streamed chat completion; None if it is valid.

    >>> wrong_in_chat_chunk({"choices": [{"index": "0", "delta": {}}]})
    "choices[0].index is '0', not an integer from 0 to 1023"
    """
    return _null_choices(chunk) or _wrong(chunk, _CHAT_CHUNK)


def wrong_in_completion_chunk(chunk: Mapping[str, Any]) -> str | None:
    """Return what is wrong with a chunk of a streamed completion; None if it is valid."""
    return _null_choices(chunk) or _wrong(chunk, _COMPLETION)


def wrong_in_message(answer: Mapping[str, Any]) -> str | None:
    """Return what is wrong with an answer or stream event of Anthropic's Messages API; None if it is valid."""
    return _wrong(answer, _MESSAGE)


def wrong_in_response(answer: Mapping[str, Any]) -> str | None:
    """Return what is wrong with an answer or stream event of the Responses API; None if it is valid."""
    return _wrong(answer, _RESPONSE)


def _wrong(value: Mapping[str, Any], fields: Mapping[str, Check]) -> str | None:
    for name, content in value.items():
        if content is not None and (check := fields.get(name)) is not None and (problem := check(content)) is not None:
            return name + problem
    return None


def _null_choices(chunk: Mapping[str, Any]) -> str | None:
    """Refuse a null `choices` field: clients iterate over the choices of every chunk that has the field."""
    return "choices is null, not a list" if chunk.get("choices", ()) is None else None


def _no_choice(answer: Mapping[str, Any]) -> str | None:
    return None if answer.get("choices") else "choices is empty"


def _no_message(answer: Mapping[str, Any]) -> str | None:
    missing = (number for number, choice in enumerate(answer["choices"]) if not isinstance(choice.get("message"), dict))
    return next((f"choices[{number}] has no message" for number in missing), None)


def _text(value: Any) -> str | None:
    return None if type(value) is str else f" is {_brief(value)}, not a text"


def _text_or_parts(value: Any) -> str | None:
    """Check for a text, or a list of its parts."""
    return None if type(value) is str else _parts(value)


def _arguments(value: Any) -> str | None:
    return None if isinstance(value, str | dict) else f" is {_brief(value)}, not a text"


def _stop(value: Any) -> str | None:
    """Check for a stop string, or the id of a stop token."""
    return None if type(value) is str or _is_count(value, MOST_ID) else f" is {_brief(value)}, not a text"


def _count(most: int = MOST_ID) -> Check:
    def check(value: Any) -> str | None:
        return None if _is_count(value, most) else f" is {_brief(value)}, not an integer from 0 to {most}"

    return check


def _number(value: Any) -> str | None:
    return None if _is_number(value) else f" is {_brief(value)}, not a number"


def _ids(value: Any) -> str | None:
    return None if _are_counts(value, MOST_ID) else " is not a list of token ids"


def _counts(value: Any) -> str | None:
    return None if _are_counts(value, MOST_ID) else f" is not a list of integers from 0 to {MOST_ID}"


def _bytes(value: Any) -> str | None:
    return None if _are_counts(value, 255) else " is not a list of bytes"


def _numbers(value: Any) -> str | None:
    """Check for a list of logprobs, some of which may be null."""
    is_valid = type(value) is list and all(number is None or _is_number(number) for number in value)
    return None if is_valid else " is not a list of numbers"


def _texts(value: Any) -> str | None:
    return None if type(value) is list and all(type(text) is str for text in value) else " is not a list of texts"


def _list(value: Any) -> str | None:
    return None if type(value) is list else f" is {_brief(value)}, not a list"


def _object(fields: Mapping[str, Check]) -> Check:
    def check(value: Any) -> str | None:
        if type(value) is not dict:
            return f" is {_brief(value)}, not an object"
        return None if (problem := _wrong(value, fields)) is None else f".{problem}"

    return check


def _objects(fields: Mapping[str, Check], most: int) -> Check:
    def check(value: Any) -> str | None:
        if type(value) is not list:
            return f" is {_brief(value)}, not a list"
        if len(value) > most:
            return f" has {len(value):,} entries, more than {most:,}"
        for number, entry in enumerate(value):
            if type(entry) is not dict:
                return f"[{number}] is {_brief(entry)}, not an object"
            if (problem := _wrong(entry, fields)) is not None:
                return f"[{number}].{problem}"
        return None

    return check


def _delta(value: Any) -> str | None:
    """Check a delta: an object in events of the Messages API, mostly a text in events of the Responses API."""
    return None if isinstance(value, str | dict) else f" is {_brief(value)}, not an object or a text"


def _is_number(value: Any) -> bool:
    return type(value) is float or (type(value) is int and abs(value) < 1 << 53)


def _are_counts(value: Any, most: int) -> bool:
    return type(value) is list and all(type(number) is int and 0 <= number <= most for number in value)


def _is_count(value: Any, most: int) -> bool:
    return type(value) is int and 0 <= value <= most


def _brief(value: Any) -> str:
    if isinstance(value, dict):
        return "an object"
    if isinstance(value, list):
        return "a list"
    if type(value) is int and abs(value) >= 1 << 64:
        return "an integer of many digits"
    return repr(value)[:40]


def _no_number(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


def _finite(text: str) -> float:
    if (value := float(text)) - value != 0:
        raise ValueError(f"{text[:20]} is too large for a number")
    return value


_parts = _objects({}, 1 << 20)
_FUNCTION: dict[str, Check] = {"name": _text, "arguments": _arguments}
_CALL: dict[str, Check] = {"index": _count(MOST_CALLS), "id": _text, "type": _text, "function": _object(_FUNCTION)}
_MESSAGE_FIELDS: dict[str, Check] = {
    "role": _text,
    "content": _text_or_parts,
    "reasoning": _text,
    "reasoning_content": _text,
    "refusal": _text,
    "tool_calls": _objects(_CALL, MOST_CALLS),
    "function_call": _object(_FUNCTION),
    "token_ids": _ids,
}
_ENTRY: dict[str, Check] = {
    "token": _text,
    "logprob": _number,
    "bytes": _bytes,
    "top_logprobs": _list,
    "token_id": _count(),
}
_ENTRIES = _object({"content": _objects(_ENTRY, 1 << 24), "refusal": _objects(_ENTRY, 1 << 24)})
_ANY_CHOICE: dict[str, Check] = {
    "index": _count(MOST_CHOICES - 1),
    "finish_reason": _text,
    "stop_reason": _stop,
    "token_ids": _ids,
    "prompt_token_ids": _ids,
}
_USAGE = _object({"prompt_tokens": _count(), "completion_tokens": _count(), "total_tokens": _count()})
_ANY_RESPONSE: dict[str, Check] = {
    "usage": _USAGE,
    "prompt_token_ids": _ids,
    "id": _text,
    "model": _text,
    "object": _text,
}
_CHAT: dict[str, Check] = {
    "choices": _objects({**_ANY_CHOICE, "message": _object(_MESSAGE_FIELDS), "logprobs": _ENTRIES}, MOST_CHOICES),
    **_ANY_RESPONSE,
}
_CHAT_CHUNK: dict[str, Check] = {
    "choices": _objects({**_ANY_CHOICE, "delta": _object(_MESSAGE_FIELDS), "logprobs": _ENTRIES}, MOST_CHOICES),
    **_ANY_RESPONSE,
}
_TOKENS = _object({"tokens": _texts, "token_logprobs": _numbers, "text_offset": _counts, "top_logprobs": _list})
_COMPLETION: dict[str, Check] = {
    "choices": _objects({**_ANY_CHOICE, "text": _text, "logprobs": _TOKENS}, MOST_CHOICES),
    **_ANY_RESPONSE,
}
_TOKEN_USAGE = _object({"input_tokens": _count(), "output_tokens": _count()})
_EVENT: dict[str, Check] = {"type": _text, "index": _count(MOST_CALLS), "usage": _TOKEN_USAGE, "delta": _delta}
# Neither API has choices. If a server sends them, their tokens are counted and the record is read with them.
_EVENT |= {"id": _text, "model": _text, "role": _text, "choices": _CHAT_CHUNK["choices"], "prompt_token_ids": _ids}
_PARTS = _objects({"type": _text, "text": _text, "thinking": _text, "id": _text, "name": _text}, 1 << 20)
_TURN: dict[str, Check] = {"content": _PARTS, "stop_reason": _text, "usage": _TOKEN_USAGE, "role": _text}
_MESSAGE: dict[str, Check] = {**_EVENT, **_TURN, "message": _object(_TURN), "content_block": _object({"type": _text})}
_ITEM: dict[str, Check] = {"type": _text, "role": _text, "content": _PARTS, "name": _text, "arguments": _text}
_OUTPUT: dict[str, Check] = {"output": _objects(_ITEM, 1 << 20), "status": _text, "usage": _TOKEN_USAGE}
_RESPONSE: dict[str, Check] = {
    **_EVENT,
    **_OUTPUT,
    "response": _object(_OUTPUT),
    "item": _object(_ITEM),
    "output_index": _count(MOST_CALLS),
    "content_index": _count(MOST_CALLS),
}
