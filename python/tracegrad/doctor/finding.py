"""Define findings: `Severity`, `Place`, `Hits` of a check, `Check` with its text, and `Finding`.

The text of a check (what it detects, its thresholds, its impact, the fix) is written once, next to the check. The
terminal output, the JSON and docs/reference/findings.md all use that text.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from enum import IntEnum
from typing import Any

from tracegrad.data.trace import Traces


class Severity(IntEnum):
    """Severity of a finding.

    `WRONG`: training on the data would be wrong. `COSTS`: training is right, but something is wasted or lost. `NOTE`:
    worth knowing.

    >>> max(Severity.NOTE, Severity.WRONG, Severity.COSTS).name
    'WRONG'
    """

    NOTE = 1
    COSTS = 2
    WRONG = 3


@dataclass(frozen=True, slots=True)
class Place:
    """Location in the input.

    Args:
        file, line: where the trace was read from.
        trace: id of the trace.
        turn: generation of the trace, from 0, or None.
        token: token of the turn, from 0, or None.
        record: number of the record in the file, if one line can have several records.

    >>> print(Place("runs.jsonl", 17, trace="task-3", turn=0, token=2))
    runs.jsonl:17 trace 'task-3' turn 0 token 2
    """

    file: str | None
    line: int | None
    trace: str | None = None
    turn: int | None = None
    token: int | None = None
    record: int | None = None

    @classmethod
    def of(cls, traces: Traces, index: int, turn: int | None = None, token: int | None = None) -> "Place":
        """Return the place of a trace, or of a turn or token in it."""
        file, line = traces.core.location(index)
        line, record = line if isinstance(line, tuple) else (line, None)
        return cls(file, line, traces.core.id(index), turn, token, record)

    def __str__(self) -> str:
        parts = [f"{self.file}:{self.line}" if self.line is not None else str(self.file or "?")]
        parts += [f"record {self.record}"] if self.record is not None else []
        parts += [f"trace '{self.trace}'"] if self.trace not in (None, "", " ".join(parts)) else []
        parts += [f"turn {self.turn}"] if self.turn is not None else []
        parts += [f"token {self.token}"] if self.token is not None else []
        return " ".join(parts)


@dataclass(frozen=True)
class Hits:
    """Result of a check: how many were hit, out of how many, and the first place.

    Args:
        count: how many were hit.
        total: how many were checked; the thresholds apply to count / of.
        first: the first place, None if there is none.
        description: description of the first hit, or of all hits.
        fix: the fix for the cause that was found; empty if the check has one fix for all causes.

    >>> # The hits of two parts of a file.
    >>> hits = Hits(count=0, total=5) + Hits(count=2, total=3, first=Place("runs.jsonl", 17))
    >>> hits.count, hits.total, hits.first.line
    (2, 8, 17)
    """

    count: int = 0
    total: int = 0
    first: Place | None = None
    description: str = ""
    fix: str = ""

    def __add__(self, other: "Hits") -> "Hits":
        first = self if self.count else other
        return Hits(self.count + other.count, self.total + other.total, first.first, first.description, first.fix)


@dataclass(frozen=True)
class Check:
    """One problem that the doctor looks for.

    Args:
        name: name of the finding, such as `shifted_logprobs`.
        title: the finding in a few words.
        unit: what is counted: turns, traces, groups, tokens, records, versions.
        levels: severity to the share of hits from which the finding has it; a share of 0 means any hit.
        impact: the impact on training.
        fix: the fix.
        run: the function. Its docstring describes what it detects, its threshold, and the reason for that threshold.
        hides: names of checks whose findings only repeat this one if this one is WRONG.

    >>> from tracegrad.doctor import CHECKS
    >>> check = next(check for check in CHECKS if check.name == "bad_records")
    >>> check.title, check.unit
    ('records that cannot be read', 'records')
    >>> check.finding(Hits(count=1, total=4)).severity.name, check.finding(Hits(count=2, total=4)).severity.name
    ('COSTS', 'WRONG')
    """

    name: str
    title: str
    unit: str
    levels: Mapping[Severity, float]
    impact: str
    fix: str
    run: Callable[[Any], Hits]
    hides: tuple[str, ...] = ()

    def finding(self, hits: Hits) -> "Finding | None":
        """Return the finding for these hits; None if they reach no severity."""
        share = hits.count / hits.total if hits.total else math.inf
        reached = [level for level, least in self.levels.items() if hits.count and share >= least]
        return Finding(self, max(reached), hits) if reached else None


@dataclass(frozen=True)
class Finding:
    """One problem that was found.

    Args:
        check: the check that found it.
        severity: severity by the share of hits.
        hits: number of hits, and the first place.

    >>> from tracegrad.doctor import CHECKS
    >>> check = next(check for check in CHECKS if check.name == "bad_records")
    >>> finding = Finding(check, Severity.COSTS, Hits(count=1, total=4, first=Place("runs.jsonl", 17)))
    >>> finding.name, finding.share, finding.as_dict()["unit"], finding.hits.first.line
    ('bad_records', 0.25, 'records', 17)
    """

    check: Check
    severity: Severity
    hits: Hits

    @property
    def name(self) -> str:
        """Name of the check."""
        return self.check.name

    @property
    def share(self) -> float | None:
        """Share of hits among what was checked; None if nothing was counted."""
        return self.hits.count / self.hits.total if self.hits.total else None

    @property
    def fix(self) -> str:
        """The fix for the cause that was found."""
        return self.hits.fix or self.check.fix

    def as_dict(self) -> dict[str, Any]:
        """Return the entry of this finding in the `--json` output."""
        first = self.hits.first
        return {
            "name": self.name,
            "severity": self.severity.name.lower(),
            "title": self.check.title,
            "count": self.hits.count,
            "of": self.hits.total,
            "unit": self.check.unit,
            "first": None if first is None else asdict(first),
            "found": self.hits.description,
            "impact": self.check.impact,
            "fix": self.fix,
        }


def check(
    title: str,
    unit: str = "turns",
    *,
    impact: str,
    fix: str,
    note: float | None = None,
    costs: float | None = None,
    wrong: float | None = None,
    hides: tuple[str, ...] = (),
) -> Callable[[Callable[[Any], Hits]], Check]:
    """Return a decorator that turns a function into a `Check` of the same name.

    `note`, `costs` and `wrong` are the shares in `Check.levels`.
    """
    shares = {Severity.NOTE: note, Severity.COSTS: costs, Severity.WRONG: wrong}
    levels = {level: share for level, share in shares.items() if share is not None}

    def decorate(run: Callable[[Any], Hits]) -> Check:
        return Check(run.__name__, title, unit, levels, impact, fix, run, hides)

    return decorate
