"""What a finding says: `Severity`, `Place`, `Hits` of a check, `Check` with its words, `Finding`.

No check stands here. The words of a check (what it sees, its thresholds, why it hurts, the cure) are written once,
beside it; the terminal, the JSON and docs/doctor.md all take them from there.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from enum import IntEnum
from typing import Any

from tracegrad.data.trace import Traces


class Severity(IntEnum):
    """How bad: `WRONG` (training on it would be wrong), `COSTS` (right, but it wastes or loses), `NOTE` (to know)."""

    NOTE = 1
    COSTS = 2
    WRONG = 3


@dataclass(frozen=True, slots=True)
class Place:
    """Where something stands.

    Args:
        file, line: where the trace was read from.
        trace: its id.
        turn: generation of the trace, from 0, or None.
        token: token of the turn, from 0, or None.
        record: its number in the file, where several may stand on one line.
    """

    file: str | None
    line: int | None
    trace: str | None = None
    turn: int | None = None
    token: int | None = None
    record: int | None = None

    @classmethod
    def of(cls, traces: Traces, index: int, turn: int | None = None, token: int | None = None) -> "Place":
        """The place of a trace, or in it."""
        file, line = traces.core.location(index)
        line, record = line if isinstance(line, tuple) else (line, None)
        return cls(file, line, traces.core.id(index), turn, token, record)

    def __str__(self) -> str:
        where = [f"{self.file}:{self.line}" if self.line is not None else str(self.file or "?")]
        where += [f"record {self.record}"] if self.record is not None else []
        where += [f"trace '{self.trace}'"] if self.trace not in (None, "", " ".join(where)) else []
        where += [f"turn {self.turn}"] if self.turn is not None else []
        where += [f"token {self.token}"] if self.token is not None else []
        return " ".join(where)


@dataclass(frozen=True)
class Hits:
    """What a check saw: how often, of how many, where first, in which words.

    Args:
        count: how many were hit.
        of: how many were looked at; count / of is what the thresholds are about.
        first: the first place, None where there is none.
        found: what was found at the first place, or overall.
    """

    count: int = 0
    of: int = 0
    first: Place | None = None
    found: str = ""

    def __add__(self, other: "Hits") -> "Hits":
        first = self if self.count else other
        return Hits(self.count + other.count, self.of + other.of, first.first, first.found)


@dataclass(frozen=True)
class Check:
    """One thing the doctor looks for.

    Args:
        name: of the finding, such as `shifted_logprobs`.
        title: the finding in a few words.
        unit: what is counted: turns, traces, groups, tokens, records, versions.
        levels: severity to the share of hits from which the finding has it; a share of 0 means any hit.
        hurts: why it hurts training.
        cure: what to do.
        run: the function; its docstring says what it sees, its threshold, and why that threshold.
        hides: names of checks whose finding only repeats this one where this one is WRONG.
    """

    name: str
    title: str
    unit: str
    levels: Mapping[Severity, float]
    hurts: str
    cure: str
    run: Callable[[Any], Hits]
    hides: tuple[str, ...] = ()

    def finding(self, hits: Hits) -> "Finding | None":
        """The finding of these hits, None where they are none."""
        share = hits.count / hits.of if hits.of else math.inf
        reached = [level for level, least in self.levels.items() if hits.count and share >= least]
        return Finding(self, max(reached), hits) if reached else None


@dataclass(frozen=True)
class Finding:
    """One thing found.

    Args:
        check: what was looked for.
        severity: by the share of hits.
        hits: how often, where first.
    """

    check: Check
    severity: Severity
    hits: Hits

    @property
    def name(self) -> str:
        """The check's name."""
        return self.check.name

    @property
    def share(self) -> float | None:
        """Hits among what was looked at, None where that has no meaning."""
        return self.hits.count / self.hits.of if self.hits.of else None

    def as_dict(self) -> dict[str, Any]:
        """What `--json` holds of it."""
        first = self.hits.first
        return {
            "name": self.name,
            "severity": self.severity.name.lower(),
            "title": self.check.title,
            "count": self.hits.count,
            "of": self.hits.of,
            "unit": self.check.unit,
            "first": None if first is None else asdict(first),
            "found": self.hits.found,
            "hurts": self.check.hurts,
            "cure": self.check.cure,
        }


def check(
    title: str,
    unit: str = "turns",
    *,
    hurts: str,
    cure: str,
    note: float | None = None,
    costs: float | None = None,
    wrong: float | None = None,
    hides: tuple[str, ...] = (),
) -> Callable[[Callable[[Any], Hits]], Check]:
    """Makes a function a `Check` of its own name; the numbers are the shares of `Check.levels`."""
    given = {Severity.NOTE: note, Severity.COSTS: costs, Severity.WRONG: wrong}
    levels = {level: share for level, share in given.items() if share is not None}

    def made(run: Callable[[Any], Hits]) -> Check:
        return Check(run.__name__, title, unit, levels, hurts, cure, run, hides)

    return made
