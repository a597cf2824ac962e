"""Read metrics from the records of a step: outcomes of tool calls, and values logged by reward functions."""

import math
from collections.abc import Iterable, Mapping
from typing import Any

from tracegrad import metrics
from tracegrad.data.trace import Trace

_CALLED, _ADDITIONAL = "called", ("cut",)
"""Keys of `Tools.counts`: answered calls, and events that are counted in addition to one of the outcomes."""


def tool_metrics(traces: Iterable[Trace]) -> dict[str, float]:
    """Return the `tools/*` metrics of trajectories; an empty dict if none of them had tools."""
    counts = [_metadata(trace).get("tools") or {} for trace in traces]
    if not any(counts):
        return {}
    calls = [sum(count for kind, count in outcomes.items() if kind not in _ADDITIONAL) for outcomes in counts]
    failed = [total - outcomes.get(_CALLED, 0) for total, outcomes in zip(calls, counts, strict=True)]
    return metrics.tools(calls, failed).values()


def logged_metrics(traces: Iterable[Trace]) -> dict[str, float]:
    """Return the mean of each metric that reward functions passed to `log_metric`, over all their calls, as in TRL."""
    return mean_of(map(_metadata, traces))


def mean_of(metadata: Iterable[Mapping[str, Any]]) -> dict[str, float]:
    """Return the mean of each `log_metric` value in the metadata of records."""
    values: dict[str, list[float]] = {}
    for record_metadata in metadata:
        for name, logged in (record_metadata.get("log_metric") or {}).items():
            values.setdefault(name, []).extend(value for value in logged if value is not None)
    return {name: math.fsum(logged) / len(logged) for name, logged in values.items() if logged}


def add_logged_metrics(row: Mapping[str, Any], logged: Mapping[str, float]) -> dict[str, Any]:
    """Return the row with logged values added; a name already in the row gets the prefix `log_metric/`.

    >>> add_logged_metrics({"loss": 0.5}, {"loss": 2.0, "accuracy": 1.0})
    {'loss': 0.5, 'log_metric/loss': 2.0, 'accuracy': 1.0}
    """
    return {**row, **{f"log_metric/{name}" if name in row else name: value for name, value in logged.items()}}


def _metadata(trace: Trace) -> Mapping[str, Any]:
    return trace.metadata if isinstance(trace.metadata, dict) else {}
