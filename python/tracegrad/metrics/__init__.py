"""Names, units and denominators of what a run measures, and where the numbers go."""

from tracegrad.metrics.sinks import (
    JsonLines,
    Progress,
    Row,
    Sink,
    Stopwatch,
    TensorBoard,
    finite,
    log_all,
    progress_line,
    read_rows,
)
from tracegrad.metrics.table import METRICS, Metric, Tally, table

__all__ = [
    "METRICS",
    "JsonLines",
    "Metric",
    "Progress",
    "Row",
    "Sink",
    "Stopwatch",
    "Tally",
    "TensorBoard",
    "finite",
    "log_all",
    "progress_line",
    "read_rows",
    "table",
]
