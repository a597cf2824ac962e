"""Spans of tracers: rows of a tree, of which most are no call of a model. What is a call is known by its shape before.

Source: OpenTelemetry's and OpenInference's JSON (`context.trace_id`, `parent_id`), OpenAI Agents' (`trace.span`),
LlamaIndex's events (`span_id`; that a call began is one of its own). A row without a call may hold the reward: with
`--map.session` it counts for the conversation of its trace.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tracegrad.inputs import chat
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
