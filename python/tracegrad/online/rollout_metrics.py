"""Take metrics from the records of a step: outcomes of tool calls, and what reward functions logged."""

import math
from collections.abc import Iterable, Mapping
from typing import Any

from tracegrad import metrics
from tracegrad.data.trace import Trace

_CALLED, _BESIDE = "called", ("cut",)
"""Of `Tools.counts`: calls that were answered, and what is counted in addition to one of the outcomes."""


def tools_of(traces: Iterable[Trace]) -> dict[str, float]:
    """Return `tools/*` of the trajectories; nothing if none of them had tools."""
    counts = [_metadata(trace).get("tools") or {} for trace in traces]
    if not any(counts):
        return {}
    calls = [sum(count for kind, count in each.items() if kind not in _BESIDE) for each in counts]
    failed = [total - each.get(_CALLED, 0) for total, each in zip(calls, counts, strict=True)]
    return metrics.tools(calls, failed).named()


def functions_of(traces: Iterable[Trace]) -> dict[str, float]:
    """Return the mean of each metric that reward functions gave to `log_metric`, over all their calls, as in TRL."""
    return mean_of(map(_metadata, traces))


def mean_of(metadata: Iterable[Mapping[str, Any]]) -> dict[str, float]:
    """Return the same of the records' metadata."""
    values: dict[str, list[float]] = {}
    for each in metadata:
        for name, said in (each.get("log_metric") or {}).items():
            values.setdefault(name, []).extend(value for value in said if value is not None)
    return {name: math.fsum(said) / len(said) for name, said in values.items() if said}


def beside(row: Mapping[str, Any], said: Mapping[str, float]) -> dict[str, Any]:
    """Return the row with what functions logged; a name that the row has already gets `log_metric/` before it.

    >>> beside({"loss": 0.5}, {"loss": 2.0, "accuracy": 1.0})
    {'loss': 0.5, 'log_metric/loss': 2.0, 'accuracy': 1.0}
    """
    return {**row, **{f"log_metric/{name}" if name in row else name: value for name, value in said.items()}}


def _metadata(trace: Trace) -> Mapping[str, Any]:
    return trace.metadata if isinstance(trace.metadata, dict) else {}
