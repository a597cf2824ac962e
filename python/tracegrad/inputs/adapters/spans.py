"""Spans of tracers: rows of a tree, of which most are no call of a model. What is a call is known by its shape before.

Source: OpenTelemetry's and OpenInference's JSON (`context.trace_id`, `parent_id`), OpenAI Agents' (`trace.span`),
LlamaIndex's events (`span_id`; that a call began is one of its own). A row without a call may hold the reward: with
`--map.session` it counts for the conversation of its trace.
"""

from collections.abc import Mapping
from typing import Any

from tracegrad.inputs import chat, paths
from tracegrad.inputs.adapters.loggers import REQUESTS, RESPONSES, plain
from tracegrad.inputs.adapters.pairs import ANSWERS, PROMPTS
from tracegrad.inputs.adapters.shapes import PARENTS

_TRACES = ("trace_id", "traceId")


def of_span(record: Any) -> list[dict[str, Any]] | None:
    """No trace: a span that comes here, or the trace that spans belong to, holds no call. None of what is neither."""
    if not isinstance(record, Mapping):
        return None
    if record.get("object") == "trace" or isinstance(record.get("span_id"), str):
        return []
    traced = {*record, *chat.table(record.get("context"))}.intersection(_TRACES)
    return [] if traced and not record.keys().isdisjoint(PARENTS) else None


def of_verdict(record: Any) -> list[dict[str, Any]] | None:
    """No trace: a row that only says how good a conversation was, which stands elsewhere. None of others."""
    if not isinstance(record, Mapping) or any(map(_is_long, record.values())):
        return None
    names = {plain(str(key)) for key in record}
    if not names.isdisjoint((*REQUESTS, *RESPONSES, *map(plain, (*PROMPTS, *ANSWERS)), "messages", "choices", "calls")):
        return None
    told = [(str(key), value) for key, value in record.items() if paths.REWARD.search(str(key))]
    return [] if any(paths.verdict(value) is not None for _, value in told) else None


def _is_long(value: Any) -> bool:
    """Whether a value may hold what was said."""
    return isinstance(value, list) or (isinstance(value, Mapping) and any(map(_is_long, value.values())))
