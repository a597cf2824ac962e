"""Define what a run measures, and write it.

Each `Metric` has a name, a unit, a denominator and its formula over sums, so that a number in metrics.jsonl leads to
its definition by name. Sums merge over micro-batches and ranks. docs/metrics.md lists them.
"""

from tracegrad.metrics.aggregate import Moments, Rows, Sums, moments
from tracegrad.metrics.definition import Measured, Metric, Reading, table
from tracegrad.metrics.loggers import (
    JsonLines,
    Progress,
    Row,
    Sink,
    Stopwatch,
    finite,
    log_all,
    off_policy_value_of,
    progress_line,
    read_rows,
)
from tracegrad.metrics.off_policy import OFF_POLICY, OffPolicy
from tracegrad.metrics.training import COMPLETIONS, REWARDS, TOOLS, TRAINING, Rewards, Tally, completions, tools

METRICS: tuple[Metric, ...] = (*TRAINING, *REWARDS, *COMPLETIONS, *TOOLS, *OFF_POLICY)
"""All that metrics.jsonl may hold, `NAME/turn_0` and the like under the name before the stroke."""

__all__ = [
    "COMPLETIONS",
    "METRICS",
    "OFF_POLICY",
    "REWARDS",
    "TOOLS",
    "TRAINING",
    "JsonLines",
    "Measured",
    "Metric",
    "Moments",
    "OffPolicy",
    "Progress",
    "Reading",
    "Rewards",
    "Row",
    "Rows",
    "Sink",
    "Stopwatch",
    "Sums",
    "Tally",
    "completions",
    "finite",
    "log_all",
    "moments",
    "off_policy_value_of",
    "progress_line",
    "read_rows",
    "table",
    "tools",
]
