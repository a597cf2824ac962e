"""Text and regular expressions over the index, a slice of time at a time.

A trigram index leaves few candidates, which are then read; what it cannot narrow is walked through. Every answer says
where the next one goes on, so that the page never waits. Called in a process of its own (`searcher`), as an
expression may take for ever.
"""

import re
import sqlite3
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from tracegrad.errors import ArgumentError
from tracegrad.view import database

SECONDS = 0.12
_PART = 512


class Found(NamedTuple):
    """Rows that match, ascending; `next` is where to go on, None where all were looked at."""

    rows: list[int]
    next: int | None


def find(path: str, query: str, regex: bool, start: int = 0, seconds: float = SECONDS, most: int = 20_000) -> Found:
    """Rows from `start` on whose text has the query, as far as the time reaches.

    Args:
        path: of the index.
        query: looked for without regard to case; with `regex` a Python expression, whose case counts.
        most: stop after so many.

    Raises:
        ArgumentError: for an expression that does not compile.
    """
    matches, grams = _matcher(query, regex)
    source = database.connect(Path(path))
    try:
        end, rows = time.monotonic() + seconds, []
        for n, text in _texts(source, grams, start):
            if matches(text):
                rows.append(n)
            if time.monotonic() > end or len(rows) >= most:
                return Found(rows, n + 1)
        return Found(rows, None)
    finally:
        source.close()


def _matcher(query: str, regex: bool) -> tuple[Callable[[str], Any], list[str]]:
    if not regex:
        folded = query.lower()
        return lambda text: folded in text.lower(), _grams([query])
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            compiled = re.compile(query)
            return compiled.search, _grams(literals(query))
    except (re.error, RecursionError, OverflowError, ValueError, MemoryError) as error:
        raise ArgumentError(f"{query[:80]!r}: {error}. It is no regular expression of Python. Correct it.") from error


def _texts(source: sqlite3.Connection, grams: list[str], start: int) -> Iterator[tuple[int, str]]:
    """Rows from `start` on that can match, ascending: by the trigrams as far as those reach, then all."""
    reached = int(database.told(source, "grams") or 0)
    if grams:
        asked = " AND ".join('"' + gram.replace('"', '""') + '"' for gram in grams)
        narrowed = "SELECT rowid FROM grams WHERE grams MATCH ? AND rowid >= ? AND rowid < ? ORDER BY rowid"
        for (n,) in source.execute(narrowed, (asked, start, reached)):
            yield n, source.execute("SELECT text FROM trace WHERE n = ?", (n,)).fetchone()[0]
        start = max(start, reached)
    yield from source.execute("SELECT n, text FROM trace WHERE n >= ? ORDER BY n", (start,))


def _grams(parts: list[str], most: int = 24) -> list[str]:
    """Trigrams that every match has, of characters whose case has one form: ASCII, and what has no case."""
    found = dict.fromkeys(part[at : at + 3].lower() for part in parts for at in range(len(part) - 2))
    plain = [gram for gram in found if gram.isascii() or gram.lower() == gram.upper()]
    return [gram for gram in plain[:: max(1, len(plain) // most)] if not re.search("[\0\ud800-\udfff]", gram)][:most]


def literals(expression: str) -> list[str]:
    r"""Runs of characters that every match of an expression has.

    >>> literals(r"b[ai]rch \w+ saffron(s|es)?"), literals("a|b"), literals("(?i)abc")
    (['rch ', ' saffron'], [], ['abc'])
    """
    parser: Any = getattr(re, "_parser", None)
    if parser is None:
        import sre_parse as parser  # Python 3.10
    runs, here = [], ""
    for kind, value in parser.parse(expression):
        if str(kind) == "LITERAL":
            here += chr(value)
        else:
            runs.append(here)
            here = ""
    return [run for run in [*runs, here] if len(run) >= 3]
