"""Spans of tracers: rows of a tree, of which most are no call of a model. What is a call is known by its shape before.

Source: OpenTelemetry's and OpenInference's JSON (`context.trace_id`, `parent_id`), OpenAI Agents' (`trace.span`),
LlamaIndex's events (`span_id`; that a call began is one of its own). A row without a call may hold the reward: with
`--map.session` it counts for the conversation of its trace.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_PARENTS = ("parent_id", "parent_span_id", "parentSpanId", "parentId")
_TRACES = ("trace_id", "traceId")


def _is_span(record: Any) -> bool:
    """Whether a record is a span, or the trace that spans belong to."""
    if not isinstance(record, Mapping):
        return False
    if record.get("object") == "trace" or isinstance(record.get("span_id"), str):
        return True
    context = record.get("context")
    rows = (record, context) if isinstance(context, Mapping) else (record,)
    return any(key in record for key in _PARENTS) and any(key in row for row in rows for key in _TRACES)


def of_span(record: Any) -> list[dict[str, Any]] | None:
    """No trace: a span that comes here holds no call. None of what is no span."""
    return [] if _is_span(record) else None
