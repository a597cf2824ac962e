"""Find calls and conversations by their shape in records of unknown producers, and in rows of tracers.

Looked for are lists of messages, responses and single answers, also in JSON as text and in events of a stream; what is
ambiguous is none. Rows of a tracer form a tree, of which most are no model calls; a row without a call may hold the
reward of its trace. Sources: OpenTelemetry's and OpenInference's JSON (`context.trace_id`, `parent_id`), OpenAI Agents
(`trace.span`), LlamaIndex events (`span_id`).
"""

import itertools
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from tracegrad.data import chat, json_path
from tracegrad.data.arrow import to_json
from tracegrad.data.formats import langchain, record_fields
from tracegrad.data.formats.openai import ERRORS, REQUESTS, RESPONSES, is_list, opened, plain
from tracegrad.data.formats.prompt_response import ANSWERS, PROMPTS

DEEPEST, MOST_LOOKED = 8, 4096
ROLES = {"tool-call": "assistant", "tool-response": "user"}
"""Roles of smolagents, as it sends them."""
PARENTS = ("parent_id", "parent_span_id", "parentSpanId", "parentId")
"""Keys under which a span names the one that began it."""
_MESSAGE_KEYS = {"content", "tool_calls", "blocks"}
_PARAMETERS = (*chat.SAMPLING, "model", "tools", "max_tokens")
_WISHED = re.compile(r"expect|reference|ideal|gold|target|ground|truth|label|example", re.I)
"""Names under which stands what should have been said."""
_NOT_KEPT = ("messages", "calls", "choices", "request", "response", "prompt_token_ids")


@dataclass
class _Found:
    """What stands in a record; each with the top key it stands under, answers with what stands beside them."""

    talks: list[tuple[str, Any, list[Any]]] = field(default_factory=list)
    responses: list[tuple[str, Any]] = field(default_factory=list)
    answers: list[tuple[str, Any, Mapping[str, Any]]] = field(default_factory=list)
    lists: list[tuple[str, list[Any]]] = field(default_factory=list)
    looked: int = 0


def of_record(record: Any) -> list[dict[str, Any]] | None:
    """One trace of what stands in a record, which is looked through once: a call, the calls of one conversation, or
    else its one list of messages; None where it holds neither.
    """
    if not isinstance(record, Mapping):
        return None
    found = _look(record)
    made = _of_call(record, found)
    return _of_talk(record, found) if made is None else made


def has_call(record: Mapping[str, Any]) -> bool:
    """Whether a record holds a call, or the calls of one conversation."""
    return _of_call(record, _look(record)) is not None


def _of_call(record: Mapping[str, Any], found: _Found) -> list[dict[str, Any]] | None:
    """One trace of a call, or of the calls of one conversation as a list, with what else the record says."""
    if (one := _call(found)) is not None:
        known = _partial(found.talks[0][1], record)
        return [{**known, **_beside(record, one[0]), "request": one[1], "response": one[2]}]
    if (steps := _steps(found)) is None:
        return None
    key, rows, calls = steps
    # A list of one may as well be an export of one, whose reward stands in it.
    within = _beside(rows[0], set()) if len(rows) == 1 else {}
    return [{**within, **_beside(record, {key}), "calls": calls}]


def _of_talk(record: Mapping[str, Any], found: _Found) -> list[dict[str, Any]] | None:
    """The record with its one list of messages, in which an assistant said something, under their own name."""
    if any(plain(str(key)) in ERRORS and value for key, value in record.items()):  # a request is no conversation then
        own = (each[1] is record or "model" not in each[1] or _role(each[2][-1]) == "assistant" for each in found.talks)
        found.talks = [*itertools.compress(found.talks, own)]
    if "messages" in record or (told := _talk(found)) is None:
        return None
    key, messages = told
    return [{**_beside(record, {key}), "messages": [message(each) for each in messages]}]


def message(told: Any) -> dict[str, Any]:
    """A message of one of several spellings, as a chat template gets it.

    >>> message({"role": "tool-response", "content": [{"type": "text", "text": "4"}]})
    {'role': 'user', 'content': '4'}
    """
    if langchain.is_message(told):
        return langchain.message(told)
    said = chat.told(told, [key for key in told if key != "blocks"])
    content = told.get("content", told.get("blocks"))
    return {**said, "role": ROLES.get(said["role"], said["role"]), "content": langchain.text_of(content)}


def _beside(record: Mapping[str, Any], used: set[str]) -> dict[str, Any]:
    return chat.without(record, *used, *_NOT_KEPT)


def _call(found: _Found) -> tuple[set[str], dict[str, Any], Any] | None:
    """The top keys, request and response of the one call that was found."""
    if len(found.talks) != 1:
        return None
    key, parent, talk = found.talks[0]
    used = {key}
    if len(found.responses) == 1:
        under, response = found.responses[0]
    elif not found.responses and len(found.answers) == 1 and _role(talk[-1]) != "assistant":
        under, said, beside = found.answers[0]
        response = langchain.of_message(message(said), _sampled(beside))
        if _is_choice(beside):
            used.add("usage")  # Of all choices of the response that it was taken out of.
    else:
        return None
    return {*used, under}, {**_parameters(parent), "messages": [message(each) for each in talk]}, response


def _partial(parent: Mapping[str, Any], record: Mapping[str, Any]) -> dict[str, Any]:
    """What is said of a call whose messages stand in no request: one is an object of its own that names a model."""
    return {} if parent is not record and "model" in parent and "messages" in parent else dict(chat.PARTIAL)


def _sampled(beside: Mapping[str, Any]) -> dict[str, Any]:
    """What stands beside an answer and says how it was sampled, as in a choice that was taken out of its response."""
    kinds = {"logprobs": Mapping, "finish_reason": str, "token_ids": list}
    return {key: beside[key] for key, kind in kinds.items() if isinstance(beside.get(key), kind)}


def _parameters(parent: Mapping[str, Any]) -> dict[str, Any]:
    """What was asked of the model, where messages stand: in their request, or in an object beside them."""
    if isinstance(parent.get("messages"), list):
        return chat.told(parent, _PARAMETERS)
    told: dict[str, Any] = {}
    for each in (*parent.values(), parent):
        told |= chat.sampling(each)
    return told


def _steps(found: _Found) -> tuple[str, list[Any], list[dict[str, Any]]] | None:
    """The one list that holds calls, its rows and its calls, if each goes on from what the first was asked; in a tree
    of spans else those of the one parent whose calls do, as what a tool or a guard asks is none of the conversation.
    """
    if found.talks or found.responses:
        return None
    held = []
    for key, rows in found.lists:
        looked = [(each, _look(each)) for each in rows if isinstance(each, Mapping)]
        within = [(row, inner, _call(inner)) for row, inner in looked]
        called = [
            (_parent_of(row), {**_partial(inner.talks[0][1], row), "request": call[1], "response": call[2]})
            for row, inner, call in within
            if call
        ]
        if called:
            held.append((key, rows, called))
    if len(held) != 1:
        return None
    key, rows, called = held[0]
    if _go_on(calls := [call for _, call in called]):
        return key, rows, calls
    of_parents: dict[Any, list[dict[str, Any]]] = {}
    for above, call in called:
        of_parents.setdefault(above, []).append(call)
    longer = [calls for above, calls in of_parents.items() if above and len(calls) > 1 and _go_on(calls)]
    return (key, rows, longer[0]) if len(longer) == 1 else None


def _go_on(calls: list[dict[str, Any]]) -> bool:
    """Whether each call goes on from what the first was asked."""
    asked = [call["request"]["messages"] for call in calls]
    return all(len(each) > len(asked[0]) and each[: len(asked[0])] == asked[0] for each in asked[1:])


def _parent_of(span: Mapping[str, Any]) -> Any:
    """The id of the span that began a span, None where it names none."""
    return next((span[key] for key in PARENTS if isinstance(span.get(key), str)), None)


def _talk(found: _Found) -> tuple[str, list[Any]] | None:
    """The key and the messages of the one conversation that was found."""
    talks = [(key, talk) for key, _, talk in found.talks if any(_role(each) == "assistant" for each in talk)]
    talks = [(key, talk) for key, talk in talks if not _asks(key, talk)]
    if len(talks) != 1 or found.responses:
        return None
    return talks[0] if all(said == talks[0][1][-1] for _, said, _ in found.answers) else None


def _asks(key: str, messages: list[Any]) -> bool:
    """Whether messages are a prompt, whose answers of the assistant were not sampled here."""
    return key in (*PROMPTS, "prompts") and _role(messages[-1]) != "assistant"


def _look(record: Mapping[str, Any]) -> _Found:
    found = _Found()
    for key, value in record.items():
        if not _WISHED.search(str(key)):
            _into(found, str(key), value, record, 1)
    return found


def _into(found: _Found, key: str, value: Any, parent: Mapping[str, Any], depth: int) -> None:
    """Looks at a value below a top key, and into it where it is neither messages nor a response."""
    found.looked += 1
    if found.looked > MOST_LOOKED or depth > DEEPEST or not isinstance(value, (str, Mapping, list)):
        return
    value = opened(value)
    if _is_response(value):
        found.responses.append((key, value))
    elif isinstance(value, Mapping):
        before = len(found.responses)
        for name, each in value.items():
            if not _WISHED.search(str(name)):
                _into(found, key, each, value, depth + 1)
        if _is_message(value) and _role(value) == "assistant" and len(found.responses) == before:
            found.answers.append((key, value, parent))
    elif isinstance(value, list) and value:
        if all(map(_is_message, value)):
            if len(value) == 1 and _role(value[0]) == "assistant":
                found.answers.append((key, value[0], parent))
            else:
                found.talks.append((key, parent, value))
        elif all(map(_is_choice, value)):
            found.responses.append((key, {"choices": value}))
        elif isinstance(value[0], Mapping):
            found.lists.append((key, value))
        elif len(value) == 1:
            _into(found, key, value[0], parent, depth + 1)


def _is_response(value: Any) -> bool:
    choices = chat.table(value).get("choices")
    if not isinstance(choices, list) or not choices:
        return is_list(value)
    return all(isinstance(chat.table(each).get("message"), Mapping) for each in choices)


def _is_choice(value: Any) -> bool:
    said = chat.table(value).get("message")
    return _is_message(said) and _role(said) == "assistant"


def _is_message(value: Any) -> bool:
    if langchain.is_message(value):
        return True
    return isinstance(value, Mapping) and isinstance(value.get("role"), str) and bool(_MESSAGE_KEYS & value.keys())


def _role(value: Any) -> Any:
    return message(value)["role"]


_CALL_KEYS = {
    *(*REQUESTS, *RESPONSES, *map(plain, (*PROMPTS, *ANSWERS)), "messages", "choices", "calls"),
    *("user", "human", "assistant", "bot", "text", "content", "reply", "solution"),
}
"""Names, by their letters alone, under which a call or what was said may stand."""
_LONGEST = 200
_TRACES = ("trace_id", "traceId")


def of_span(record: Any) -> list[dict[str, Any]] | None:
    """No trace: a span that comes here, or the trace that spans belong to, holds no call. None of what is neither."""
    if not isinstance(record, Mapping):
        return None
    if record.get("object") == "trace" or isinstance(record.get("span_id"), str):
        return []
    traced = {*record, *chat.table(record.get("context"))}.intersection(_TRACES)
    return [] if traced and not record.keys().isdisjoint(PARENTS) else None


def of_several(record: Any) -> list[dict[str, Any]] | None:
    """One record for each trace, where the spans of a record, or of an export of OTLP, are of several; None else.

    A trace in which no model was called is left out.
    """
    if not isinstance(record, Mapping) or any(record.get(key) is not None for key in ("id", *_TRACES, "rollout_id")):
        return None
    names = dict.fromkeys(_trace(span) for span in _spans(record))
    if len(names) < 2:
        return None
    made = [each for each in (_part(record, name) for name in names) if any(map(_may_call, _spans(each)))]
    return made if len(made) > 1 else None


def _spans(record: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """All spans of a record."""
    held = [record.get("spans")]
    for resource in record_fields.listed(record.get("resourceSpans"), "resourceSpans"):
        held += [chat.table(scope).get("spans") for scope in chat.table(resource).get("scopeSpans") or ()]
    for spans in held:
        yield from (chat.table(span) for span in spans or () if isinstance(spans, list))


def _trace(span: Any) -> Any:
    """The trace that a span is of."""
    told = chat.table(span)
    return next(
        (each[key] for each in (told, chat.table(told.get("context"))) for key in _TRACES if each.get(key)), None
    )


def _may_call(span: Mapping[str, Any]) -> bool:
    """Whether a span says something of a model, as a call of one does."""
    return any(map(to_json(span.get("attributes") or {}).count, (b'"gen_ai.', b'"llm.', b"token_ids")))


def _part(record: Mapping[str, Any], name: Any) -> dict[str, Any]:
    """A record with the spans of one trace."""

    def only(spans: Any) -> list[Any]:
        return [span for span in spans or () if _trace(span) == name]

    out = {**record, **({"id": name} if isinstance(name, str) else {})}
    if record.get("spans"):
        out["spans"] = only(record["spans"])
    if "resourceSpans" in record:
        scopes = [
            [{**scope, "spans": own} for scope in resource.get("scopeSpans") or () if (own := only(scope.get("spans")))]
            for resource in record["resourceSpans"]
        ]
        out["resourceSpans"] = [
            {**resource, "scopeSpans": own}
            for resource, own in zip(record["resourceSpans"], scopes, strict=True)
            if own
        ]
    return out


def is_verdict(record: Any) -> bool:
    """Whether a row only says how good a conversation was, which stands elsewhere: flat, and without a text."""
    if not isinstance(record, Mapping) or any(map(_may_say, record.values())):
        return False
    if not _CALL_KEYS.isdisjoint(plain(str(key)) for key in record):
        return False
    told = [json_path.verdict(value) for key, value in record.items() if json_path.REWARD.search(str(key))]
    return any(each is not None and each == each for each in told)


def _may_say(value: Any) -> bool:
    """Whether a value may hold what was said: a list, or a text that is long or has several lines."""
    if isinstance(value, Mapping):
        return any(map(_may_say, value.values()))
    return isinstance(value, list) or (isinstance(value, str) and (len(value) > _LONGEST or "\n" in value))
