"""Names, units and denominators of what a run measures, and where the numbers go.

In come per-term arrays of a step; out go named numbers, whose sums merge over micro-batches and ranks, and sinks for
them. Here are the rows (`table.Row`) of docs/metrics.md: each has a name, a unit, a denominator and its formula over
sums, so that a number in metrics.jsonl leads to its row by name. Its files, each using those before it alone: `sums`,
`histogram`, `groups` (how sums are kept); `columns`, `table`, `offpolicy_rows`, `offpolicy`, `rewards`, `completions`,
`tally`; `sinks`, `dashboards`; `peers` (other trainers' names).
"""

from tracegrad.metrics.completions import COMPLETIONS, TOOLS, completions, tools
from tracegrad.metrics.groups import Rows
from tracegrad.metrics.offpolicy import OffPolicy
from tracegrad.metrics.offpolicy_rows import OFF_POLICY
from tracegrad.metrics.rewards import REWARDS, Rewards
from tracegrad.metrics.sinks import (
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
from tracegrad.metrics.sums import Moments, Sums, moments
from tracegrad.metrics.table import Measured, Metric, Reading, table, with_tables
from tracegrad.metrics.tally import TRAINING, Tally

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
    "with_tables",
]
