"""A response of several choices, or a list of whole responses: a record for each of them, which is a trace, all of one
group.

Of a list beside them that is as long as they are, each takes its own value, wherever it stands. Where a reward stands
beside them as one value, whose it is cannot be known: the record stays as it is, and the choices that the core leaves
out are counted.
"""

import itertools
from collections.abc import Mapping
from typing import Any

from tracegrad import _core
from tracegrad.errors import FormatError
from tracegrad.inputs import chat, paths
from tracegrad.inputs.adapters import chunks, pairs, samples
from tracegrad.tables import to_json

_SAID = ("request", "response", "messages", "choices", "tools", "usage")


def of_call(record: Any) -> list[dict[str, Any]] | None:
    """As `of_response`, of a request beside a response of several choices, or several responses; None of others."""
    told = chat.table(record)
    response, asks = told.get("response"), isinstance(told.get("request"), Mapping)
    several = len(_choices(response)) > 1 or _are_whole(response)
    return of_response(record) if asks and several else None


def of_made(record: Mapping[str, Any]) -> list[dict[str, Any]] | None:
    """As `of_response`, of a record that an adapter made: only a response of choices, or of chunks, may be several."""
    response = record.get("response")
    several = len(_choices(response)) > 1 or (isinstance(response, list) and len(response) > 1)
    return of_response(record) if several else None


def _are_whole(response: Any) -> bool:
    """Whether a response is a list of several objects of which none is a chunk, or holds several choices."""

    def is_part(each: Any) -> bool:
        return not isinstance(each, Mapping) or chunks.is_chunk(each) or len(_choices(each)) > 1

    return isinstance(response, list) and len(response) > 1 and not any(map(is_part, response))


def _is_further(chunk: Any) -> bool:
    """Whether a chunk of a stream is of another choice than the first."""
    return any(chat.table(each).get("index") for each in _choices(chunk))


def of_response(record: Any) -> list[dict[str, Any]] | None:
    """One record for each choice of a record that the core reads as one call; None where it leaves no choice out, or
    where whose reward it is cannot be known.

    Raises:
        Unfit: if what stands beside them fits no choice, or they share too much.
    """
    if not isinstance(record, Mapping) or "calls" in record or "choice" in record:
        return None
    response, request = record.get("response"), record.get("request")
    known = isinstance(request, Mapping) and len(_choices(response)) > 1
    count = len(_choices(response)) if known else 1 + _unused(record)
    if count == 1 or not _tells_apart(chat.without(record, *_SAID), count):
        return None
    asked = request.get("messages") if isinstance(request, Mapping) else record.get("messages")
    group = pairs.group_of(record, record.get("prompt_token_ids", []) if asked is None else asked)
    if isinstance(response, Mapping) and len(_choices(response)) == count:
        return _of_choices(record, response, count, group)
    if len(_choices(record)) == count:
        told = samples.rows(record, count, ("choices", "usage"), {})
        return [
            {"group": group, **row, **of_answer, "choices": [choice]}
            for (row, of_answer), choice in zip(told, record["choices"], strict=True)
        ]
    if isinstance(response, list) and _are_whole(response) and len(response) == count:
        kept = {key: record[key] for key in _SAID if key in record and key not in ("response", "usage")}
        told = samples.rows(record, count, _SAID, kept)
        return [
            {"group": group, **row, **of_answer, **kept, "response": each}
            for (row, of_answer), each in zip(told, response, strict=True)
        ]
    # Of a stream, or of another API, which says itself which choice is which.
    told = samples.rows(record, count, ("response", "usage"), response)
    kept = chat.told(record, ["response"])
    return [{"group": group, **row, **of_answer, "choice": at, **kept} for at, (row, of_answer) in enumerate(told)]


def _of_choices(record: Mapping[str, Any], response: Mapping[str, Any], count: int, group: Any) -> list[dict[str, Any]]:
    # Its usage counts all of them.
    whole = chat.without(response, "usage", "choices")
    kept = {key: record[key] for key in _SAID if key in record and key not in ("response", "usage")}
    made = []
    told = samples.rows(record, count, _SAID, (kept, whole))
    for (row, of_answer), choice in zip(told, _choices(response), strict=True):
        name = {"id": f"{whole['id']}-{len(made)}"} if isinstance(whole.get("id"), (str, int)) else {}
        prompt_ids = {key: of_answer.pop(key) for key in ("prompt_token_ids",) if key in of_answer}
        choice = {**of_answer, **choice} if isinstance(choice, Mapping) else choice
        made.append({"group": group, **row, **kept, "response": {**prompt_ids, **whole, **name, "choices": [choice]}})
    return made


def _choices(value: Any) -> list[Any]:
    found = chat.table(value).get("choices")
    return found if isinstance(found, list) else []


def _unused(record: Mapping[str, Any]) -> int:
    """How many choices of a record of one call the core leaves out."""
    bare = to_json(chat.without(record, "reward", "rewards"))
    try:
        core, report = _core.Traces.decode([bare], "<record>", 1, "auto")
    except FormatError:
        return 0
    return report["unused_choices"] if len(core) == report["generations"] == 1 else 0


def _tells_apart(outer: Mapping[str, Any], count: int) -> bool:
    """Whether each choice has a reward of its own, or there is none beside them at all."""
    leaves = {path for path, _ in paths.leaves(outer)}
    own = [path for path, _ in paths.leaves(samples.part(outer, 0, count)) if path not in leaves]
    if any(map(paths.REWARD.search, own)):
        return True
    beside = itertools.islice(paths.leaves(outer), paths.MOST_WALKED)
    return not any(paths.REWARD.search(path) and paths.verdict(value) is not None for path, value in beside)
