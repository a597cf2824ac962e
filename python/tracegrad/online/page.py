"""report.html of a run: all its curves, and the tokens of its newest step; written with each checkpoint."""

from __future__ import annotations

from pathlib import Path

from tracegrad import metrics
from tracegrad.learner.record import TermRecord
from tracegrad.report import write_report
from tracegrad.sequence import Sequences
from tracegrad.tokenizer import Tokenizer

NAME = "report.html"


def write_page(folder: Path, sequences: Sequences, terms: TermRecord, tokenizer: Tokenizer) -> None:
    """Writes the page of a run as far as it has come."""
    rows = metrics.read_rows(folder / "metrics.jsonl")
    title = f"{folder.name}, the tokens of step {terms.step}"
    write_report(folder / NAME, rows=rows, sequences=sequences, tokenizer=tokenizer, terms=[terms], title=title)
