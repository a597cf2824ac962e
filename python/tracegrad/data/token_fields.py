"""Put mapped token ids, logprobs and loss masks where the core reads them: on turns, or in a row of ids.

A value belongs to a turn only if that is certain: it is the only turn, the value is stored in the object of the turn,
or a list has one entry per turn, per message or per answer. Otherwise the record is refused. The core and the alignment
compare the lengths of ids and logprobs.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from tracegrad.data import chat, json_path

NAMES = ("token_ids", "logprobs", "prompt_token_ids", "loss_mask", "temperature")
"""Fields of a `FieldMap` that can have one value per turn."""
_OF_ANSWER = ("token_ids", "logprobs", "loss_mask")
_PROMPT_IDS = ("prompt_ids", "prompt_token_ids")
_SIGNS = ("messages", "request", "response", "calls", "choices", "response_length", "custom_id", "format")
"""Keys by which the core would read a row of ids in another form, in addition to all lists."""


class UncertainError(Exception):
    """A value that cannot be assigned. The arguments are the field, and the problem as a sentence."""


def values_of(record: Any, original: Any, paths: Mapping[str, str], index: int, count: int) -> dict[str, Any]:
    """Return the value at each path: in the converted record, or else in the original one.

    Args:
        record: the converted record, with the fields of the original one that it does not have itself.
        original: the original record.
        paths: path of each field.
        index, count: number of the converted record among those of the original one. A list with one entry per answer
            is replaced by its entry.

    Raises:
        UncertainError: if several answers share one list of ids, logprobs or a mask.
    """
    values = {}
    for name, path in paths.items():
        for source in (record, original):
            try:
                value = json_path.collect(source, path)
            except json_path.Missing:
                continue
            if count > 1 and _has_each(value, count):
                value = value[index]
            elif count > 1 and name in _OF_ANSWER and is_column(value) and _is_shared(record, original, path):
                raise UncertainError(name, f"it is one list, and the record has {count:,} answers")
            values[name] = value
            break
    return {name: value for name, value in values.items() if value is not None}


def _is_shared(record: Mapping[str, Any], original: Any, path: str) -> bool:
    """Return whether the value at a path is in a field that the conversion left as it was."""
    same = {key: each for key, each in chat.as_mapping(original).items() if record.get(key) is each}
    return chat.get_path(same, path) is not None


def _has_each(value: Any, count: int) -> bool:
    return isinstance(value, list) and len(value) == count and not is_column(value)


def is_column(value: Any) -> bool:
    """Return whether a value has the numbers of one turn: a list of numbers, or a list or object of logprob entries.

    >>> is_column([-0.5, None]), is_column([{"token": "a", "logprob": -0.5}]), is_column([[-0.5]])
    (True, True, False)
    """
    if isinstance(value, Mapping):
        return not value.keys().isdisjoint(("content", "token_logprobs", "tokens"))
    if not isinstance(value, list) or not value:
        return False
    present = [item for item in value if item is not None]
    entries = all(isinstance(item, Mapping) and "logprob" in item for item in present)
    return bool(present) and (entries or all(isinstance(item, (int, float)) for item in present))


def placed(record: Mapping[str, Any], values: Mapping[str, Any]) -> tuple[dict[str, Any], bool]:
    """Return the fields of a record that contain the mapped values, and whether they replace all its other fields.

    Raises:
        UncertainError: if a value cannot be assigned to one turn.
    """
    row_length = _length(values.get("loss_mask"))
    if row_length and row_length == _length(values.get("token_ids")):
        return _row(record, values), True
    if "loss_mask" in values:
        raise UncertainError("loss_mask", "it is not a list with one entry per id of map.token_ids")
    if isinstance(messages := json_path.parse_json_string(record.get("messages")), list) and messages:
        return {"messages": _messages(messages, values)}, False
    calls = record.get("calls")
    if isinstance(calls, list) and all("choices" in chat.as_mapping(chat.as_mapping(c).get("response")) for c in calls):
        turns = _per_turn(values, range(len(calls)), len(calls), False)
        return {"calls": [_call(call, fields) for call, fields in zip(calls, turns, strict=True)]}, False
    if isinstance(record.get("response"), Mapping) and "choices" in record["response"]:
        [fields] = _per_turn(values, [0], 1, False)
        return _call(record, fields, own=("response", "temperature")), False
    if (columns := _of_columns(record, values)) is not None:
        return columns, False
    if _length(values.get("token_ids")) and (
        "prompt_token_ids" in values or any(isinstance(record.get(key), list) for key in _PROMPT_IDS)
    ):
        return _row(record, values), True
    raise UncertainError(next(iter(values)), "the record has no messages, calls or ids of a prompt to which it belongs")


def _of_columns(record: Mapping[str, Any], values: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the messages or the call of TRL's columns `prompt` and `completion`, None for other records.

    Texts are the prompt and the answer of a completion, which no chat template has changed.
    """
    prompt, completion = record.get("prompt"), record.get("completion")
    unset = {"prompt": None, "completion": None}
    if isinstance(prompt, str) and isinstance(completion, str) and "prompt_token_ids" not in values:
        [fields] = _per_turn(values, [0], 1, False)
        choice = {"index": 0, "text": completion, **chat.without(fields, "temperature")}
        call = {"request": {"prompt": prompt}, "response": {"choices": [choice]}}
        return {**chat.PARTIAL, **unset, **chat.pick(fields, ["temperature"]), **call}
    if isinstance(prompt, list) and isinstance(completion, list) and all(map(chat.is_messages, (prompt, completion))):
        return {**unset, "messages": _messages([*chat.mark_not_sampled(prompt), *completion], values)}
    return None


def _length(value: Any) -> int:
    """Return the length of a list of numbers; 0 for other values."""
    return len(value) if is_column(value) and isinstance(value, list) else 0


def _row(record: Mapping[str, Any], values: Mapping[str, Any]) -> dict[str, Any]:
    """Return a row of ids as TRL's rollout functions return it, with the fields of the record that are no lists.

    Raises:
        UncertainError: if the ids begin with those of the prompt, and no mask tells which were sampled.
    """
    other_fields = {key: value for key, value in record.items() if key not in _SIGNS and not isinstance(value, list)}
    prompt = values.get("prompt_token_ids", next((record[key] for key in _PROMPT_IDS if record.get(key)), []))
    ids, mask, logprobs = values["token_ids"], values.get("loss_mask"), values.get("logprobs")
    has_prompt = bool(prompt) and ids[: len(prompt)] == prompt
    if has_prompt and mask is None:
        raise UncertainError("token_ids", "it begins with the ids of the prompt, which were not sampled")
    if mask is not None:
        sampled = [bool(item) for item in mask]
        first = sampled.index(True) if True in sampled else len(sampled)
        # Ids of the whole conversation contain the prompt already.
        prompt = ids[:first] if has_prompt and len(prompt) <= first else [*prompt, *ids[:first]]
        ids, mask = ids[first:], sampled[first:]
        logprobs = _of_response(logprobs, first, mask) if isinstance(logprobs, list) else logprobs
    temperature = _only(values["temperature"]) if "temperature" in values else None
    row = {"prompt_ids": prompt, "completion_ids": ids, "env_mask": mask, "logprobs": logprobs}
    row["temperature"] = record.get("temperature") if temperature is None else temperature
    return {**other_fields, **{key: value for key, value in row.items() if value is not None}}


def _of_response(logprobs: list[Any], first: int, mask: Sequence[bool]) -> list[Any]:
    """Return the logprobs from the first sampled id on, from a list for all ids or for the sampled ids.

    A list of another length is returned unchanged: the core compares it with the ids.
    """
    if len(logprobs) == first + len(mask):
        return logprobs[first:]
    if len(logprobs) == sum(mask):
        remaining = iter(logprobs)
        return [next(remaining) if is_sampled else None for is_sampled in mask]
    return logprobs


def _messages(messages: list[Any], values: Mapping[str, Any]) -> list[Any]:
    positions = [index for index, message in enumerate(messages) if chat.was_sampled(message)]
    starts_with_system = chat.role(messages[0]) == "system"
    turns = _per_turn(values, positions, len(messages), starts_with_system)
    result = list(messages)
    for position, fields in zip(positions, turns, strict=True):
        if fields:
            generation = {**chat.as_mapping(messages[position].get("generation")), **fields}
            result[position] = {**messages[position], "generation": generation}
    return result


def _call(call: Any, fields: Mapping[str, Any], own: Sequence[str] = ()) -> dict[str, Any]:
    """Return a call, or only its fields in `own`, with the values in the choice that was used."""
    response = chat.as_mapping(chat.as_mapping(call).get("response"))
    choices, number = response.get("choices"), chat.as_mapping(call).get("choice", 0)
    if not fields:
        return {} if own else call
    if not isinstance(choices, list) or not isinstance(number, int) or number >= len(choices):
        raise UncertainError(next(iter(fields)), "a call has no response with the choice to which it belongs")
    token_fields = chat.without(fields, "temperature")
    choices = [{**each, **token_fields} if index == number else each for index, each in enumerate(choices)]
    result = {**call, **chat.pick(fields, ["temperature"]), "response": {**response, "choices": choices}}
    return chat.pick(result, own) if own else result


def _per_turn(
    values: Mapping[str, Any], positions: Sequence[int], length: int, starts_with_system: bool
) -> list[dict[str, Any]]:
    """Return the values of each turn.

    Args:
        values: value of each field.
        positions: index of each turn in its list.
        length: length of that list.
        starts_with_system: whether its first item is a system message, which a converter may have added.
    """
    turns: list[dict[str, Any]] = [{} for _ in positions]
    for name, value in values.items():
        for fields, each in zip(turns, _entries(name, value, positions, length, starts_with_system), strict=True):
            if each is not None:
                fields[name] = each
    return turns


def _entries(name: str, value: Any, positions: Sequence[int], length: int, starts_with_system: bool) -> list[Any]:
    """Return the entry of each turn, None for a turn without one."""
    is_single = is_column(value) if name != "temperature" else not isinstance(value, list)
    if is_single:
        if len(positions) == 1:
            return [value]
        if name == "temperature":
            return [value] * len(positions)
        raise UncertainError(name, f"it is one list, and the record has {len(positions):,} sampled turns")
    items = [_only(item) for item in value] if isinstance(value, list) else [value]
    wrong = [item for item in items if item is not None and not (name == "temperature" or is_column(item))]
    if wrong:
        raise UncertainError(name, f"{json_path.describe_type(wrong[0])} in it is not a list of numbers")
    if starts_with_system and len(items) + 1 == length:
        items = [None, *items]
    present = [item for item in items if item is not None]
    if len(items) == length:
        entries = [items[position] for position in positions]
    elif len(items) == len(positions):
        entries = items
    elif len(present) == len(positions):
        entries = present
    else:
        raise UncertainError(
            name, f"it has {len(present):,} lists, and the record has {len(positions):,} sampled turns"
        )
    if present and not any(item is not None for item in entries):
        raise UncertainError(name, "it has values, but none of them belongs to a sampled turn")
    return entries


def _only(value: Any) -> Any:
    """Return the only item of a list with one nested list or with one number in it; None for an empty list."""
    if isinstance(value, list) and not value:
        return None
    is_nested = isinstance(value, list) and len(value) == 1 and (value[0] is None or isinstance(value[0], list))
    return _only(value[0]) if is_nested else value
