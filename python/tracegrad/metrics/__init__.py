"""Define the metrics of a run, and write them.

Each `Metric` has a name, a unit, a denominator and a formula over sums, so that you can look up each number of
metrics.jsonl by its name. Sums merge over micro-batches and ranks. docs/reference/metrics.md lists all metrics.

    >>> from tracegrad.metrics import METRICS, Row
    >>> row: Row = {"step": 1, "loss": -0.0123}  # of metrics.jsonl
    >>> for metric in METRICS:
    ...     if metric.name in row:
    ...         print(f"{metric.name}: {metric.meaning}")
    step: Optimizer steps so far, this one included; 0 is before the first.
    loss: What was minimised: surrogate plus penalties.
"""

from tracegrad.metrics.aggregate import Moments, Rows, Sums, moments
from tracegrad.metrics.definition import Metric, MetricSet, MetricSums, table
from tracegrad.metrics.loggers import (
    MIN_ESS,
    MIN_ESS_FRACTION,
    JsonLines,
    Progress,
    Row,
    Sink,
    Stopwatch,
    finite,
    log_all,
    off_policy_estimate,
    read_rows,
    reported_stages,
    step_metrics_text,
    unreliable_reason,
    unreliable_sample_reason,
)
from tracegrad.metrics.off_policy import OFF_POLICY, OffPolicySums
from tracegrad.metrics.training import (
    COMPLETIONS,
    REWARDS,
    TOOLS,
    TRAINING,
    MetricAccumulator,
    Rewards,
    completions,
    tools,
)

METRICS: tuple[Metric, ...] = (*TRAINING, *REWARDS, *COMPLETIONS, *TOOLS, *OFF_POLICY)
"""All metrics of metrics.jsonl. Breakdowns such as `NAME/turn_0` are listed under the name before the slash."""

__all__ = [
    "COMPLETIONS",
    "METRICS",
    "MIN_ESS",
    "MIN_ESS_FRACTION",
    "OFF_POLICY",
    "REWARDS",
    "TOOLS",
    "TRAINING",
    "JsonLines",
    "Metric",
    "MetricAccumulator",
    "MetricSet",
    "MetricSums",
    "Moments",
    "OffPolicySums",
    "Progress",
    "Rewards",
    "Row",
    "Rows",
    "Sink",
    "Stopwatch",
    "Sums",
    "completions",
    "finite",
    "log_all",
    "moments",
    "off_policy_estimate",
    "read_rows",
    "reported_stages",
    "step_metrics_text",
    "table",
    "tools",
    "unreliable_reason",
    "unreliable_sample_reason",
]
