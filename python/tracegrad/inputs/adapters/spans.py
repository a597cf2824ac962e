"""Spans of tracers: rows of a tree, of which most are no call of a model. What is a call is known by its shape before.

Source: OpenTelemetry's and OpenInference's JSON (`context.trace_id`, `parent_id`), OpenAI Agents' (`trace.span`),
LlamaIndex's events (`span_id`; that a call began is one of its own). A row without a call may hold the reward: with
`--map.session` it counts for the conversation of its trace.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from tracegrad.inputs import chat, paths
from tracegrad.inputs.adapters import fitting
from tracegrad.inputs.adapters.loggers import REQUESTS, RESPONSES, plain
from tracegrad.inputs.adapters.pairs import ANSWERS, PROMPTS
from tracegrad.inputs.adapters.shapes import PARENTS
from tracegrad.tables import to_json

_SAID = {
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
    for resource in fitting.listed(record.get("resourceSpans"), "resourceSpans"):
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
    if not _SAID.isdisjoint(plain(str(key)) for key in record):
        return False
    told = [paths.verdict(value) for key, value in record.items() if paths.REWARD.search(str(key))]
    return any(each is not None and each == each for each in told)


def _may_say(value: Any) -> bool:
    """Whether a value may hold what was said: a list, or a text that is long or has several lines."""
    if isinstance(value, Mapping):
        return any(map(_may_say, value.values()))
    return isinstance(value, list) or (isinstance(value, str) and (len(value) > _LONGEST or "\n" in value))
