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
