"""Search ids and text of the index for text and regular expressions, within a time limit per call.

A trigram index selects candidates, whose texts are then checked. Without usable trigrams, all texts are checked. Each
result has the row to continue from, so that the page never waits. This runs in a process of its own (`searcher`),
because an expression can take forever.
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


class SearchResult(NamedTuple):
    """Matching rows, ascending. `next` is the row to continue from, or None at the end."""

    rows: list[int]
    next: int | None


def find(
    path: str, query: str, regex: bool, start: int = 0, seconds: float = SECONDS, most: int = 20_000
) -> SearchResult:
    """Return rows from `start` on whose id or text matches the query, as far as the time allows.

    Args:
        path: path of the index.
        query: text, searched without regard to case. With `regex`, a case-sensitive Python expression.
        most: maximum number of rows to return.

    Raises:
        ArgumentError: for an expression that does not compile.
    """
    matches, grams = _matcher(query, regex)
    source = database.connect(Path(path))
    try:
        end, rows = time.monotonic() + seconds, []
        for n, name, text in _texts(source, grams, start):
            if matches(name) or matches(text):
                rows.append(n)
            if time.monotonic() > end or len(rows) >= most:
                return SearchResult(rows, n + 1)
        return SearchResult(rows, None)
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
        raise ArgumentError(
            f"TG-VIEW-011: {query[:80]!r}: {error}. It is not a regular expression of Python. Correct it."
        ) from error


def _texts(source: sqlite3.Connection, grams: list[str], start: int) -> Iterator[tuple[int, str, str]]:
    """Yield row, id and text of rows from `start` on that can match, ascending.

    Rows without trigrams yet follow unfiltered.
    """
    indexed = int(database.get_property(source, "grams") or 0)
    if grams:
        expression = " AND ".join('"' + gram.replace('"', '""') + '"' for gram in grams)
        select = "SELECT rowid FROM grams WHERE grams MATCH ? AND rowid >= ? AND rowid < ? ORDER BY rowid"
        for (n,) in source.execute(select, (expression, start, indexed)):
            yield n, *source.execute("SELECT id, text FROM trace WHERE n = ?", (n,)).fetchone()
        start = max(start, indexed)
    yield from source.execute("SELECT n, id, text FROM trace WHERE n >= ? ORDER BY n", (start,))


def _grams(parts: list[str], most: int = 24) -> list[str]:
    """Return trigrams that every match contains. Only characters with an unambiguous lower case are used."""
    trigrams = dict.fromkeys(part[start : start + 3].lower() for part in parts for start in range(len(part) - 2))
    usable = [gram for gram in trigrams if gram.isascii() or gram.lower() == gram.upper()]
    return [gram for gram in usable[:: max(1, len(usable) // most)] if not re.search("[\0\ud800-\udfff]", gram)][:most]


def literals(expression: str) -> list[str]:
    r"""Return the literal strings of at least 3 characters that every match of an expression contains.

    >>> literals(r"b[ai]rch \w+ saffron(s|es)?"), literals("a|b"), literals("(?i)abc")
    (['rch ', ' saffron'], [], ['abc'])
    """
    parser: Any = getattr(re, "_parser", None)
    if parser is None:
        import sre_parse as parser  # Python 3.10
    runs, run = [], ""
    for kind, value in parser.parse(expression):
        if str(kind) == "LITERAL":
            run += chr(value)
        else:
            runs.append(run)
            run = ""
    return [literal for literal in [*runs, run] if len(literal) >= 3]
