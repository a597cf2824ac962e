"""Define a metric: its name, unit, compared policies, denominator, and formula over sums.

The module has the row type, the markdown tables of docs/reference/metrics.md, and `MetricSums`: sums together with the
names that are computed from them. The rows are defined next to their sums, in `training`, `off_policy` and
`integrations.metrics`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from tracegrad.errors import ArgumentError
from tracegrad.metrics.aggregate import AllReduce, Sums


@dataclass(frozen=True)
class Metric:
    """One metric: a row of a table in docs/reference/metrics.md.

    Args:
        name: key under which it is logged; a peer's name may contain a placeholder in braces.
        unit: unit of the value.
        ratio: which policies it compares, numerator first; None if it compares none.
        per: denominator of the mean; None if it is not a mean.
        meaning: definition in one sentence.
        value: the formula over its sums; None if the trainer computes it (see `trainer.step_metrics`).

    >>> mean = Metric("entropy", "nats", "", "tokens", "Mean entropy.", lambda sums: sums["entropy"] / sums["tokens"])
    >>> float(mean.value(Sums.of(totals={"entropy": 3.0}, counts={"tokens": 2})))
    1.5
    """

    name: str
    unit: str
    ratio: str | None
    per: str | None
    meaning: str
    value: Callable[[Sums], Any] | None = None


@dataclass(frozen=True)
class MetricSet:
    """Metrics, and the names of the sums that they read.

    Args:
        rows: metrics of a table.
        prefix: prefix of the names of the sums.
        placeholders: values of the placeholders in the metrics' names.

    >>> mean = Metric("{name}/mean", "", "", "tokens", "Mean.", lambda sums: sums["total"] / sums["tokens"])
    >>> sums = Sums.of(totals={"total": 3.0}, counts={"tokens": 2})
    >>> MetricSet((mean,), placeholders={"name": "entropy"}).values(sums)
    {'entropy/mean': 1.5}
    """

    rows: tuple[Metric, ...]
    prefix: str = ""
    placeholders: Mapping[str, str] = field(default_factory=dict)

    def values(self, sums: Sums) -> dict[str, float]:
        """Return the name and value of each metric."""
        own_sums = sums.without_prefix(self.prefix) if self.prefix else sums
        return {
            row.name.format(**self.placeholders): float(row.value(own_sums))
            for row in self.rows
            if row.value is not None
        }


@dataclass(frozen=True)
class MetricSums:
    """Sums of one part of a step, and the metrics that are computed from them. Add parts first, then call `values`
    once.

    Args:
        sums: mergeable.
        readings: metrics over them.

    >>> from tracegrad.metrics import tools
    >>> # Calls and failures of each trace, on two ranks.
    >>> first, second = tools([2, 0], [1, 0]), tools([4], [2])
    >>> (first + second).values()  # 6 calls / 3 traces, 3 failures / 6 calls
    {'tools/call_frequency': 2.0, 'tools/failure_frequency': 0.5}
    """

    sums: Sums
    readings: tuple[MetricSet, ...]

    def __add__(self, other: MetricSums) -> MetricSums:
        """Return both parts together."""
        if self.readings != other.readings:
            raise ArgumentError(
                "TG-METRIC-003: these parts are read by different names. Their sums would mix two definitions. "
                "Measure every part with the same options."
            )
        return MetricSums(self.sums + other.sums, self.readings)

    def __or__(self, other: MetricSums) -> MetricSums:
        """Return these metrics together with other metrics of the same part."""
        return MetricSums(self.sums | other.sums, (*self.readings, *other.readings))

    def all_reduce(self, all_reduce: AllReduce) -> MetricSums:
        """Return the same over all ranks."""
        return MetricSums(self.sums.all_reduce(all_reduce), self.readings)

    def values(self) -> dict[str, float]:
        """Return names to values; a mean over nothing is NaN."""
        return {name: value for reading in self.readings for name, value in reading.values(self.sums).items()}


def table(rows: Iterable[Metric]) -> str:
    """Return metrics as a markdown table.

    >>> print(table([Metric("kl", "nats", "theta / ref", "tokens", "How far.")]))
    | name | unit | which ratio | divided by | meaning |
    |---|---|---|---|---|
    | `kl` | nats | theta / ref | tokens | How far. |
    """
    cells = [(f"`{m.name}`", m.unit, m.ratio or "-", m.per or "-", m.meaning) for m in rows]
    lines = [" | ".join(cell.replace("|", "\\|") for cell in row) for row in cells]
    head = ["| name | unit | which ratio | divided by | meaning |", "|---|---|---|---|---|"]
    return "\n".join([*head, *(f"| {line} |" for line in lines)])
