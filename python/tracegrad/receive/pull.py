"""Pull traces from a trace store into a folder: new ones, and those that changed since the last pull.

A source lists all traces of a project with a fingerprint of what can change: spans, scores, tags. Traces with a new
fingerprint are fetched completely, and their lines replace older ones. Scores become events `gen_ai.evaluation.result`,
as OpenTelemetry's conventions for generative AI define them, of the span that they are about.
"""

import hashlib
import json
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from typing import Any, Protocol

from tracegrad.errors import ArgumentError, ServerError, TracegradError, redact
from tracegrad.receive.folder import TraceFolder

BATCH, BATCH_BYTES = 100, 4 << 20
"""Most traces, and bytes of lines after which no further trace is added, that are written at once."""


@dataclass(frozen=True)
class PulledTrace:
    """One trace of a store.

    Args:
        trace: trace id in lower-case hexadecimal digits.
        fingerprint: hash of all that can change.
        line: its line in the folder.
    """

    trace: str
    fingerprint: str
    line: bytes


class TraceStore(Protocol):
    """A project in a trace store.

    Attributes:
        name: kind, address and project, which identify it.
    """

    name: str

    def changed(self, is_known: Callable[[str, str], bool], counts: Counter[str]) -> Iterator[PulledTrace]:
        """Yield the traces for which `is_known(trace, fingerprint)` is false.

        Args:
            counts: counters of what is not yielded: "unchanged", "unfinished", "unreadable".
        """
        ...


def open_store(kind: str, url: str, project: str, key: str | None) -> TraceStore:
    """Return a project of a trace store, connected to its server.

    Args:
        kind: "phoenix" or "mlflow".
        key: token that the server requires, if it does.

    Raises:
        ArgumentError: if the server has no such project.
        ServerError: if it cannot be reached.
    """
    module = import_module(f"tracegrad.receive.{kind}_traces")
    with errors_of(f"{kind} {redact(url)}"):
        return module.PhoenixTraces(url, project, key) if kind == "phoenix" else module.MlflowTraces(url, project, key)


def unknown_project(name: str, known: Sequence[str]) -> ArgumentError:
    """Build the error for a project that a store does not have."""
    return ArgumentError(
        f"TG-RECEIVE-010: {name}: there is no such project. There are: {', '.join(sorted(known)[:20])}. Give one of "
        "them as --project."
    )


@contextmanager
def errors_of(name: str) -> Iterator[None]:
    """Convert any error of a store's client, whose classes are not listed anywhere, to one of tracegrad.

    Raises:
        ServerError: in place of an error of the client.
    """
    try:
        yield
    except TracegradError:
        raise
    except Exception as error:
        raise ServerError(
            f"TG-RECEIVE-009: {name}: {type(error).__name__}: {str(error)[:300]}. No further trace was pulled. Check "
            "the address and the token, and pull again."
        ) from error


def pull(store: TraceStore, folder: TraceFolder) -> dict[str, int]:
    """Write the new and changed traces of a store to a folder.

    Returns:
        Number of "new", "changed", "unchanged", "unfinished" and "unreadable" traces. An unfinished one is pulled once
        it has ended. The server has no valid spans of an unreadable one.

    Raises:
        ArgumentError: if the folder was written by `receive`.
        ServerError: if the store cannot be read. Traces that are written already stay.
        TracegradError: if the folder cannot be written.
    """
    folder.claim("pull")
    counts: Counter[str] = Counter(new=0, changed=0, unchanged=0, unfinished=0, unreadable=0)
    prefix = hashlib.sha256(store.name.encode()).hexdigest()[:16]

    def is_known(trace: str, fingerprint: str) -> bool:
        return folder.property_value(f"{prefix} {trace}") == fingerprint and folder.has_line(trace)

    traces = store.changed(is_known, counts)
    while batch := _next_batch(traces, store.name):
        lines = {each.trace: each.line for each in batch}

        def line(trace: str, earlier: bytes | None, lines: Mapping[str, bytes] = lines) -> bytes | None:
            counts["new" if earlier is None else "unchanged" if earlier == lines[trace] else "changed"] += 1
            return None if earlier == lines[trace] else lines[trace]

        properties = {f"{prefix} {each.trace}": each.fingerprint for each in batch}
        folder.write_lines(lines, line, lambda values=properties: folder.set_properties(values))
    return dict(counts)


def _next_batch(traces: Iterator[PulledTrace], name: str) -> list[PulledTrace]:
    batch: list[PulledTrace] = []
    size = 0
    with errors_of(name):
        while len(batch) < BATCH and size < BATCH_BYTES and (trace := next(traces, None)) is not None:
            batch.append(trace)
            size += len(trace.line)
    return batch


def fingerprint_of(value: Any) -> str:
    """Return a hash of a JSON value."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:32]


def attribute_list(values: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return attributes as OTLP's JSON has them, without those that are None.

    >>> attribute_list({"n": 3, "tags": ["a", None], "none": None})
    [{'key': 'n', 'value': {'intValue': '3'}}, {'key': 'tags', 'value': {'arrayValue': {'values': [{'stringValue': 'a'}, {}]}}}]
    >>> attribute_list({"score": -math.inf})
    [{'key': 'score', 'value': {'doubleValue': '-Infinity'}}]
    """  # noqa: E501
    return [{"key": str(key), "value": _any_value(value)} for key, value in values.items() if value is not None]


_NOT_FINITE = {"nan": "NaN", "inf": "Infinity", "-inf": "-Infinity"}


def _any_value(value: Any) -> dict[str, Any]:
    if isinstance(value, bool):
        return {"boolValue": value}
    if isinstance(value, int):
        return {"intValue": str(value)}
    if isinstance(value, float):
        return {"doubleValue": value if math.isfinite(value) else _NOT_FINITE[str(value)]}
    if isinstance(value, Mapping):
        return {"kvlistValue": {"values": attribute_list(value)}}
    if isinstance(value, (list, tuple)):
        return {"arrayValue": {"values": [_any_value(entry) for entry in value]}}
    return {} if value is None else {"stringValue": str(value)}


def evaluation_event(
    name: str, time_ns: int, *, score: float | None, label: str | None, explanation: str | None, source: str | None
) -> dict[str, Any]:
    """Return an event with the result of an evaluation.

    Args:
        source: who evaluated: a kind or an id of a judge, a person or a program.
    """
    values = {
        "gen_ai.evaluation.name": name,
        "gen_ai.evaluation.score.value": None if score is None else float(score),
        "gen_ai.evaluation.score.label": label,
        "gen_ai.evaluation.explanation": explanation,
        "evaluation.source": source,
    }
    return {"name": "gen_ai.evaluation.result", "timeUnixNano": str(time_ns), "attributes": attribute_list(values)}


def root_of(spans: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the span without a parent, or the first one if none is there."""
    return next((span for span in spans if not span["parentSpanId"]), spans[0])
