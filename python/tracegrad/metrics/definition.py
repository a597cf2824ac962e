"""What a metric is: a name, a unit, which policies it compares, by what it is divided, and the formula over sums.

Here are the row type, the markdown tables of docs/metrics.md, and `Measured`, sums that know the names they are read
by. The rows themselves stand beside their sums, in `training`, `off_policy` and
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
    """One row of a table.

    Args:
        name: key under which it is logged; a peer's name may hold a placeholder in braces.
        unit: of the value.
        ratio: which policies it compares, numerator first; "" where it compares none.
        per: what the sum is divided by; "" where it is no mean.
        meaning: definition in one sentence.
        value: the formula over its sums; None if the trainer computes it (see `trainer.step_metrics`).
    """

    name: str
    unit: str
    ratio: str
    per: str
    meaning: str
    value: Callable[[Sums], Any] | None = None


@dataclass(frozen=True)
class Reading:
    """Rows and where the sums that they read stand.

    Args:
        rows: of a table.
        prefix: of the names of the sums.
        words: what stands in the braces of the rows' names.
    """

    rows: tuple[Metric, ...]
    prefix: str = ""
    words: Mapping[str, str] = field(default_factory=dict)

    def named(self, sums: Sums) -> dict[str, float]:
        """Each row's name and value."""
        here = sums.under(self.prefix) if self.prefix else sums
        return {row.name.format(**self.words): float(row.value(here)) for row in self.rows if row.value is not None}


@dataclass(frozen=True)
class Measured:
    """Sums of one part of a step, and the names that they are read by. Parts are added, then named once.

    Args:
        sums: mergeable.
        readings: rows over them.
    """

    sums: Sums
    readings: tuple[Reading, ...]

    def __add__(self, other: Measured) -> Measured:
        """Both parts together."""
        if self.readings != other.readings:
            raise ArgumentError(
                "these parts are read by different names. Their sums would mix two definitions. Measure every part "
                "with the same options."
            )
        return Measured(self.sums + other.sums, self.readings)

    def __or__(self, other: Measured) -> Measured:
        """Other metrics of the same part beside these."""
        return Measured(self.sums | other.sums, (*self.readings, *other.readings))

    def all_reduce(self, all_reduce: AllReduce) -> Measured:
        """The same over all ranks."""
        return Measured(self.sums.all_reduce(all_reduce), self.readings)

    def named(self) -> dict[str, float]:
        """Names to values; a mean over nothing is NaN."""
        return {name: value for reading in self.readings for name, value in reading.named(self.sums).items()}


def table(rows: Iterable[Metric]) -> str:
    """Rows as a markdown table.

    >>> print(table([Metric("kl", "nats", "theta / ref", "terms", "How far.")]))
    | name | unit | which ratio | divided by | meaning |
    |---|---|---|---|---|
    | `kl` | nats | theta / ref | terms | How far. |
    """
    cells = [(f"`{m.name}`", m.unit, m.ratio or "-", m.per or "-", m.meaning) for m in rows]
    lines = [" | ".join(cell.replace("|", "\\|") for cell in row) for row in cells]
    head = ["| name | unit | which ratio | divided by | meaning |", "|---|---|---|---|---|"]
    return "\n".join([*head, *(f"| {line} |" for line in lines)])
