"""A diagnosis for a terminal. Whatever stands in a file is shown harmless: control characters are escaped."""

import textwrap

from tracegrad.doctor.examination import SHOWN, Diagnosis
from tracegrad.doctor.finding import Finding, Severity

WIDTH = 110
HEAD = {
    Severity.WRONG: "training on it would be wrong",
    Severity.COSTS: "it can be trained on, at a cost",
    Severity.NOTE: "it can be trained on",
}
AROUND = "training on it as it stands would be wrong; the command after `next` goes around that"
SCORED = "training on it as it stands would be wrong; the command after `next` gives it what it lacks"
LONGEST, MOST_TYPED = 300, 1 << 17


def lines(diagnosis: Diagnosis) -> list[str]:
    """Two lines for a clean file, else a verdict and four or five for each of ten findings; then what is next."""
    source, found = printable(diagnosis.source), diagnosis.findings
    what = f"{diagnosis.traces:,} traces, {diagnosis.turns:,} turns, {diagnosis.terms:,} tokens to train in {source}"
    rewards = [f"         {diagnosis.rewards}"] if diagnosis.rewards else []
    if diagnosis.severity is None:
        first = [f"clean    {what}: nothing found", *rewards, *map(printable, diagnosis.mapped)]
        return [*first, *_found(diagnosis), *_advised(diagnosis), *_following(diagnosis)]
    count = f"{len(found)} finding{'s' * (len(found) > 1)}"
    shown = [line for finding in found[:SHOWN] for line in ["", *_lines(finding)]]
    more = ", ".join(finding.name for finding in found[SHOWN:])
    return [
        f"{diagnosis.severity.name.lower():<8} {what}",
        *rewards,
        f"         {count}; {_verdict(diagnosis)}",
        *map(printable, diagnosis.mapped),
        *shown,
        *(["", f"more     {more}"] if more else []),
        *_found(diagnosis),
        *_advised(diagnosis),
        *_following(diagnosis),
    ]


def _verdict(diagnosis: Diagnosis) -> str:
    """What the worst finding means, and whether the command that is printed trains rightly for all that."""
    if diagnosis.severity == Severity.WRONG:
        for verb, verdict in (("train", AROUND), ("score", SCORED)):
            if diagnosis.following.startswith(f"tracegrad {verb} "):
                return verdict
    return HEAD[diagnosis.severity or Severity.NOTE]


def _found(diagnosis: Diagnosis) -> list[str]:
    return ["", *map(printable, diagnosis.found)] if diagnosis.found else []


def _following(diagnosis: Diagnosis) -> list[str]:
    """Whole, however long: it is there to be typed."""
    if not diagnosis.following:
        return []
    out = ["", f"next     {printable(diagnosis.following, MOST_TYPED)}"]
    if diagnosis.following.startswith("tracegrad score"):
        told = "right(prompts, completions, **columns) of mine.py gives a number for each text: docs/your-logs.md"
        out.append(f"         {told}")
    return out


def _lines(finding: Finding) -> list[str]:
    hits = finding.hits
    share = f" of {hits.of:,}" if hits.of else ""
    out = [f"{finding.severity.name:<8} {finding.check.title}: {hits.count:,}{share} {finding.check.unit}"]
    if hits.first is not None:
        out.append(f"  first  {printable(str(hits.first))}")
    if hits.found:
        out += _row("found", printable(hits.found))
    return [*out, *_row("hurts", finding.check.hurts), *_row("cure", finding.check.cure)]


def _advised(diagnosis: Diagnosis) -> list[str]:
    """Nothing but where traces were rescored: the recipe, why, and what decided."""
    if (advice := diagnosis.advice) is None:
        return []
    rows = [*_row("why", advice.reason), *_row("figure", advice.decided), *_row("saw", str(advice.measured))]
    rows += _row("record", advice.record) if advice.record else []
    return ["", f"advice   train with {advice.name}: {advice.spoken}", *rows]


def _row(head: str, text: str) -> list[str]:
    indent = " " * 9
    return textwrap.wrap(
        text, WIDTH, initial_indent=f"  {head:<7}", subsequent_indent=indent, break_on_hyphens=False
    ) or [f"  {head}"]


def printable(text: str, longest: int = LONGEST) -> str:
    """The text with what a terminal would obey (controls, bidirectional marks) escaped, and cut where long."""
    short = text if len(text) <= longest else f"{text[:longest]}..."
    return "".join(
        each if each.isprintable() else each.encode("unicode_escape", "backslashreplace").decode() for each in short
    )
