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
    """Writes the page of a run as far as it has come.

    Args:
        folder: of the run; its metrics.jsonl has the rows, those before a resume included.
        sequences, terms: of the newest step; over several ranks the terms of the first one.
        tokenizer: of the model.

    Raises:
        ReadError: if the rows cannot be read or the page cannot be written.
    """
    rows = metrics.read_rows(folder / "metrics.jsonl")
    title = f"{folder.name}, the tokens of step {terms.step}"
    write_report(folder / NAME, rows=rows, sequences=sequences, tokenizer=tokenizer, terms=[terms], title=title)
