"""A diagnosis for a terminal. Whatever stands in a file is shown harmless: control characters are escaped."""

from __future__ import annotations

import textwrap

from tracegrad.doctor.examination import SHOWN, Diagnosis
from tracegrad.doctor.finding import Finding, Severity

WIDTH = 110
HEAD = {
    Severity.WRONG: "training on it would be wrong",
    Severity.COSTS: "it can be trained on, at a cost",
    Severity.NOTE: "it can be trained on",
}
LONGEST = 300


def lines(diagnosis: Diagnosis) -> list[str]:
    """One line for a clean file; else a verdict, and four or five lines for each of at most ten findings."""
    source, found = printable(diagnosis.source), diagnosis.findings
    what = f"{diagnosis.traces:,} traces, {diagnosis.turns:,} turns, {diagnosis.terms:,} tokens to train in {source}"
    if diagnosis.severity is None:
        return [f"clean    {what}: nothing found"]
    count = f"{len(found)} finding{'s' * (len(found) > 1)}"
    shown = [line for finding in found[:SHOWN] for line in ["", *_lines(finding)]]
    more = ", ".join(finding.name for finding in found[SHOWN:])
    return [
        f"{diagnosis.severity.name.lower():<8} {what}",
        f"         {count}; {HEAD[diagnosis.severity]}",
        *shown,
        *(["", f"more     {more}"] if more else []),
    ]


def _lines(finding: Finding) -> list[str]:
    hits = finding.hits
    share = f" of {hits.of:,}" if hits.of else ""
    out = [f"{finding.severity.name:<8} {finding.check.title}: {hits.count:,}{share} {finding.check.unit}"]
    if hits.first is not None:
        out.append(f"  first  {printable(str(hits.first))}")
    if hits.found:
        out += _row("found", printable(hits.found))
    return [*out, *_row("hurts", finding.check.hurts), *_row("cure", finding.check.cure)]


def _row(head: str, text: str) -> list[str]:
    indent = " " * 9
    return textwrap.wrap(
        text, WIDTH, initial_indent=f"  {head:<7}", subsequent_indent=indent, break_on_hyphens=False
    ) or [f"  {head}"]


def printable(text: str) -> str:
    """The text with what a terminal would obey (controls, bidirectional marks) escaped, and cut where long."""
    short = text if len(text) <= LONGEST else f"{text[:LONGEST]}..."
    return "".join(
        each if each.isprintable() else each.encode("unicode_escape", "backslashreplace").decode() for each in short
    )
