"""Render a diagnosis for a terminal. Control characters in text from files are escaped."""

import textwrap

from tracegrad.doctor.examination import SHOWN, Diagnosis
from tracegrad.doctor.finding import Finding, Severity

WIDTH = 110
HEAD = {
    Severity.WRONG: "training on it would be wrong",
    Severity.COSTS: "it can be trained on, at a cost",
    Severity.NOTE: "it can be trained on",
}
AROUND = "training on it as it is would be wrong; the command after `next` avoids the problem"
SCORED = "training on it as it is would be wrong; the command after `next` adds the missing rewards"
LONGEST, MOST_TYPED = 300, 1 << 17


def render_lines(diagnosis: Diagnosis) -> list[str]:
    """Return the lines to print.

    A clean file gets two lines. Otherwise there is a summary, then four or five lines for each of at most ten findings.
    The command to run next comes last.

    >>> diagnosis = Diagnosis("traces.jsonl", traces=2, turns=2, trained_tokens=14, findings=())
    >>> print("\\n".join(render_lines(diagnosis)))
    clean    2 traces, 2 turns, 14 tokens to train in traces.jsonl: nothing found
    """
    source, findings = printable(diagnosis.source), diagnosis.findings
    counts = f"{diagnosis.traces:,} traces, {diagnosis.turns:,} turns, {diagnosis.trained_tokens:,} tokens to train"
    as_text = " with logprobs, and all turns as text (--text-only)" * diagnosis.is_text
    summary = f"{counts}{as_text} in {source}"
    rewards = [f"         {diagnosis.rewards}"] if diagnosis.rewards else []
    notes = [*diagnosis.mapping_notes, *diagnosis.summary.lines()]
    if diagnosis.severity is None:
        first = [f"clean    {summary}: nothing found", *rewards, *map(printable, notes)]
        return [*first, *_suggestion_lines(diagnosis), *_advice_lines(diagnosis), *_next_lines(diagnosis)]
    count = f"{len(findings)} finding{'s' * (len(findings) > 1)}"
    shown = [line for finding in findings[:SHOWN] for line in ["", *_finding_lines(finding)]]
    more = ", ".join(finding.name for finding in findings[SHOWN:])
    return [
        f"{diagnosis.severity.name.lower():<8} {summary}",
        *rewards,
        f"         {count}; {_verdict(diagnosis)}",
        *map(printable, notes),
        *shown,
        *(["", f"more     {more}"] if more else []),
        *_suggestion_lines(diagnosis),
        *_advice_lines(diagnosis),
        *_next_lines(diagnosis),
    ]


def _verdict(diagnosis: Diagnosis) -> str:
    """Return what the worst finding means, and whether the suggested command avoids the problem."""
    if diagnosis.severity == Severity.WRONG:
        for verb, verdict in (("train", AROUND), ("score", SCORED)):
            if diagnosis.next_command and diagnosis.next_command.startswith(f"tracegrad {verb} "):
                return verdict
    return HEAD[diagnosis.severity or Severity.NOTE]


def _suggestion_lines(diagnosis: Diagnosis) -> list[str]:
    return ["", *map(printable, diagnosis.suggestions)] if diagnosis.suggestions else []


def _next_lines(diagnosis: Diagnosis) -> list[str]:
    """Return the lines of the next command, at full length so that it can be copied."""
    if not diagnosis.next_command:
        return []
    out = ["", f"next     {printable(diagnosis.next_command, MOST_TYPED)}"]
    if diagnosis.next_command.startswith("tracegrad score"):
        hint = "right(prompts, completions, **columns) in mine.py returns one number per completion:"
        out.append(f"         {hint} docs/how-to/score.md")
        if diagnosis.reward_columns:
            names = textwrap.shorten(", ".join(diagnosis.reward_columns), WIDTH - 18, placeholder=" ...")
            out.append(f"         columns: {printable(names)}")
    return out


def _finding_lines(finding: Finding) -> list[str]:
    hits = finding.hits
    share = f" of {hits.total:,}" if hits.total else ""
    out = [f"{finding.severity.name:<8} {finding.check.title}: {hits.count:,}{share} {finding.check.unit}"]
    if hits.first is not None:
        out.append(f"  first  {printable(str(hits.first))}")
    if hits.description:
        out += _row("found", printable(hits.description))
    return [*out, *_row("impact", finding.check.impact), *_row("fix", finding.fix)]


def _advice_lines(diagnosis: Diagnosis) -> list[str]:
    """Return lines with the recommended recipe, the reason and deciding figure; none unless traces were rescored."""
    if (advice := diagnosis.advice) is None:
        return []
    rows = [*_row("why", advice.reason), *_row("figure", advice.evidence), *_row("sample", str(advice.measured))]
    rows += _row("record", advice.record) if advice.record else []
    return ["", f"advice   train with {advice.name}: {advice.flags}", *rows]


def _row(head: str, text: str) -> list[str]:
    indent = " " * 9
    return textwrap.wrap(
        text, WIDTH, initial_indent=f"  {head:<7}", subsequent_indent=indent, break_on_hyphens=False
    ) or [f"  {head}"]


def printable(text: str, longest: int = LONGEST) -> str:
    """Return the text truncated, with characters that act on a terminal (controls, bidirectional marks) escaped."""
    short = text if len(text) <= longest else f"{text[:longest]}..."
    return "".join(
        character if character.isprintable() else character.encode("unicode_escape", "backslashreplace").decode()
        for character in short
    )
