"""A chosen set of traces as one page that opens without a server: the same scripts, and data in place of addresses.

The page allows the scripts that it was written with, by their hashes, and nothing else: not what a trace says.
"""

import base64
import hashlib
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tracegrad.errors import ArgumentError, ReadError
from tracegrad.report.page import write_page
from tracegrad.report.token_map import Thumbnails
from tracegrad.storage import files
from tracegrad.view import pieces, runs
from tracegrad.view.html import SCRIPTS, page, style
from tracegrad.view.loaded import NAMES, Session

MOST = 2000
_MOST_TEXT = 20_000  # characters of one trace that its search reads
_WHOLE = 20_000  # characters of a message


def page_of(session: Session, rows: Sequence[int]) -> str:
    """The page.

    Args:
        rows: of the index, in the order in which they are listed.
    """
    if not 0 < len(rows) <= MOST:
        raise ArgumentError(
            f"{len(rows):,} traces are to be exported. One page holds 1 to {MOST:,}. "
            "Narrow them: --where, --search, --limit."
        )
    for row in rows:
        session.where(row)
    blocks = [_block("data", _data(session, rows, {row: number for number, row in enumerate(rows)}))]
    drawn = Thumbnails(drawn=session.drawn)
    for number, row in enumerate(rows):
        told = pieces.trace(session, row, whole=_WHOLE, drawn=drawn)
        blocks.append(_block(f"trace-data-{number}", {**told, "n": number}))
    scripts = [pieces.read(name) for name in SCRIPTS]
    allowed = " ".join(f"'{_hash(script)}'" for script in scripts)
    look = style()
    policy = f"default-src 'none'; script-src {allowed}; style-src '{_hash(look)}'; base-uri 'none'; form-action 'none'"
    policy += "; img-src data:" * drawn.any
    head = f'<meta http-equiv="Content-Security-Policy" content="{policy}"><style>{look}</style>'
    return page("".join([*blocks, *(f"<script>{script}</script>" for script in scripts)]), head) + "\n"


def write(session: Session, rows: Sequence[int], path: Path) -> int:
    """Writes the page, whole or not at all; returns its bytes.

    Raises:
        ReadError: if it cannot be written.
    """
    of_runs = [file for run in session.runs for file in run.iterdir()]
    files.check_not_read([path], [*(source.path for source in session.sources), *of_runs], "--export")
    try:
        files.check(path)
        text = page_of(session, rows).encode("utf-8", "replace")
        write_page(path, text)
    except OSError as error:
        raise ReadError(f"{path}: cannot be written ({error.strerror}). Give another --export.") from error
    return len(text)


def chosen(session: Session, where: Sequence[str], search: str, sort: str, limit: int) -> list[int]:
    """Rows that a command line asks for.

    Args:
        where: conditions such as `reward<0.5` or `tool:price`, all of which hold.
        search: text that is in them.
        sort: a column, the largest first; with `:up` behind it the smallest. What is not known comes last.
        limit: at most so many, 1 or more.

    Raises:
        ArgumentError: for a column that there is not, or a limit of none.
    """
    if limit < 1:
        raise ArgumentError(f"--limit {str(limit)[:20]}: no trace would be written. Give 1 or more.")
    from tracegrad.view.search import find

    columns = session.columns()
    keep = np.ones(session.rows, bool)
    for condition in where:
        keep &= _holds(session, columns, condition)
    if search:
        found = find(str(session.indexer.path), search, False, seconds=math.inf, most=session.rows + 1)
        keep &= np.isin(np.arange(session.rows), found.rows)
    rows = np.flatnonzero(keep)
    if sort:
        name, _, up = sort.partition(":")
        column = _column(columns, name)[rows]
        rows = rows[np.argsort(column if up else -column, kind="stable")]
    return rows[:limit].tolist()


_SIGNS = {"<=": np.less_equal, ">=": np.greater_equal, "<": np.less, ">": np.greater, "=": np.equal}


def _holds(session: Session, columns: dict[str, Any], condition: str) -> Any:
    if not (sign := next((sign for sign in _SIGNS if sign in condition), "")):
        return np.isin(np.arange(session.rows), session.tagged(condition))
    name, _, value = condition.partition(sign)
    column = _column(columns, name.strip())
    try:
        return _SIGNS[sign](column, np.float32(value))
    except ValueError as error:
        raise ArgumentError(
            f"--where {condition}: {value!r} is no number. Nothing is chosen by it. Write reward<0.5, or tool:price."
        ) from error


def _column(columns: dict[str, Any], name: str) -> Any:
    if name not in columns:
        raise ArgumentError(f"there is no column {name!r}. Nothing can be chosen by it. They are {', '.join(NAMES)}.")
    return columns[name]


def _data(session: Session, rows: Sequence[int], known: dict[int, int]) -> dict[str, Any]:
    state = session.state() | {"rows": len(rows), "done": True, "problems": []}
    names = [name for name, _ in state["tags"]]
    tagged = {name: [known[row] for row in session.tagged(name).tolist() if row in known] for name in names}
    state["tags"] = [(name, len(tagged[name])) for name in names if tagged[name]]
    columns = {
        name: [None if value != value else float(value) for value in column[list(rows)].tolist()]
        for name, column in session.columns().items()
    }
    labels = {
        label["n"]: label for start in range(0, len(rows), 500) for label in session.labels(rows[start : start + 500])
    }
    groups = {}
    for row in rows:
        name = labels[row]["group"]
        if name and name not in groups:
            own = {other: known[other] for other in session.group(row, pieces.MOST) if other in known}
            groups[name] = pieces.side_by_side(session, own) if len(own) > 1 else ""
    return {
        "state": state,
        "columns": columns,
        "tagged": {name: found for name, found in tagged.items() if found},
        "rows": [{**labels[row], "n": number} for number, row in enumerate(rows)],
        "texts": [session.text(row)[:_MOST_TEXT] for row in rows],
        "groups": groups,
        "runs": runs.page(session.runs) if session.runs else "",
    }


def _block(name: str, value: Any) -> str:
    """Data inside a page: nothing in it can end the element that it stands in."""
    text = json.dumps(value, ensure_ascii=True)
    for char in "<>&":
        text = text.replace(char, f"\\u{ord(char):04x}")
    return f'<script type="application/json" id="{name}">{text}</script>'


def _hash(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
