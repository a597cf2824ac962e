"""Export selected traces as one page that works without a server. It uses the same scripts, with embedded data.

The content security policy allows only the page's own scripts, by their hashes. A trace cannot add any.
"""

import base64
import hashlib
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tracegrad.config import did_you_mean
from tracegrad.errors import ArgumentError, ReadError
from tracegrad.report.page import write_page
from tracegrad.report.token_map import Thumbnails
from tracegrad.storage import files
from tracegrad.view import pieces, runs
from tracegrad.view.html import SCRIPTS, page, style
from tracegrad.view.loaded import NAMES, Viewer

MOST = 2000
_MOST_TEXT = 20_000  # Searchable characters per trace.
_WHOLE = 20_000  # Characters shown per message.


def page_of(session: Viewer, rows: Sequence[int]) -> str:
    """Return the page.

    Args:
        rows: rows of the index, in the order of the list.

    Raises:
        ArgumentError: if there are no rows, more than `MOST`, or an unknown row.
    """
    if not 0 < len(rows) <= MOST:
        raise ArgumentError(
            f"TG-VIEW-002: {len(rows):,} traces are to be exported. One page can have 1 to {MOST:,}. "
            "Narrow them: --where, --search, --limit."
        )
    for row in rows:
        session.locate(row)
    blocks = [_block("data", _data(session, rows, {row: number for number, row in enumerate(rows)}))]
    drawn = Thumbnails(drawn=session.thumbnail_cache)
    for number, row in enumerate(rows):
        fields = pieces.trace(session, row, whole=_WHOLE, drawn=drawn)
        blocks.append(_block(f"trace-data-{number}", {**fields, "n": number}))
    scripts = [pieces.read(name) for name in SCRIPTS]
    hashes = " ".join(f"'{_hash(script)}'" for script in scripts)
    css = style()
    policy = f"default-src 'none'; script-src {hashes}; style-src '{_hash(css)}'; base-uri 'none'; form-action 'none'"
    policy += "; img-src data:" * drawn.any
    head = f'<meta http-equiv="Content-Security-Policy" content="{policy}"><style>{css}</style>'
    return page("".join([*blocks, *(f"<script>{script}</script>" for script in scripts)]), head) + "\n"


def export_page(session: Viewer, rows: Sequence[int], path: Path) -> int:
    """Write the page, completely or not at all, and return its size in bytes.

    Raises:
        ArgumentError: if `path` is an input, or the rows cannot be exported.
        ReadError: if it cannot be written.

    >>> import time
    >>> from tempfile import TemporaryDirectory
    >>> import tracegrad as tg
    >>> messages = [{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "4"}]
    >>> with TemporaryDirectory() as folder:
    ...     tg.write([tg.Trace.from_messages(messages, reward=reward) for reward in (1, 0)], f"{folder}/traces.jsonl")
    ...     with Viewer([f"{folder}/traces.jsonl"], Path(folder, "index")) as session:
    ...         while not session.state()["done"]:
    ...             time.sleep(0.01)
    ...         # The result is a number of bytes.
    ...         export_page(session, rows=[0, 1], path=Path(folder, "page.html")) > 10_000
    True
    """
    run_files = [file for run in session.runs for file in run.iterdir()]
    files.check_not_read([path], [*(source.path for source in session.sources), *run_files], "--export")
    try:
        files.check(path)
        text = page_of(session, rows).encode("utf-8", "replace")
        write_page(path, text)
    except OSError as error:
        raise ReadError(f"TG-VIEW-003: {path}: cannot be written ({error.strerror}). Give another --export.") from error
    return len(text)


def select_rows(session: Viewer, where: Sequence[str], search: str, sort: str, limit: int) -> list[int]:
    """Return the rows that the flags of a command select.

    Args:
        where: conditions such as `reward<0.5` or `tool:price`. All must hold.
        search: text that the traces contain.
        sort: a column, the largest first, or with `:up` the smallest first. Unknown values come last.
        limit: maximum number of rows, at least 1.

    Raises:
        ArgumentError: for an unknown column, or a limit below 1.

    >>> import time
    >>> from tempfile import TemporaryDirectory
    >>> import tracegrad as tg
    >>> messages = [{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "4"}]
    >>> with TemporaryDirectory() as folder:
    ...     tg.write([tg.Trace.from_messages(messages, reward=reward) for reward in (1, 0)], f"{folder}/traces.jsonl")
    ...     with Viewer([f"{folder}/traces.jsonl"], Path(folder, "index")) as session:
    ...         while not session.state()["done"]:
    ...             time.sleep(0.01)
    ...         select_rows(session, where=["reward<0.5"], search="", sort="", limit=10)
    [1]
    """
    if limit < 1:
        raise ArgumentError(f"TG-VIEW-004: --limit {str(limit)[:20]}: no trace would be written. Give 1 or more.")
    from tracegrad.view.search import find

    columns = session.columns()
    keep = np.ones(session.rows, bool)
    for condition in where:
        keep &= _holds(session, columns, condition)
    if search:
        matches = find(str(session.indexer.path), search, False, seconds=math.inf, most=session.rows + 1)
        keep &= np.isin(np.arange(session.rows), matches.rows)
    rows = np.flatnonzero(keep)
    if sort:
        name, _, ascending = sort.partition(":")
        column = _column(columns, name)[rows]
        rows = rows[np.argsort(column if ascending else -column, kind="stable")]
    return rows[:limit].tolist()


_SIGNS = {"<=": np.less_equal, ">=": np.greater_equal, "<": np.less, ">": np.greater, "=": np.equal}


def _holds(session: Viewer, columns: dict[str, Any], condition: str) -> Any:
    if not (sign := next((sign for sign in _SIGNS if sign in condition), "")):
        return np.isin(np.arange(session.rows), session.tagged(condition))
    name, _, value = condition.partition(sign)
    column = _column(columns, name.strip())
    try:
        return _SIGNS[sign](column, np.float32(value))
    except ValueError as error:
        raise ArgumentError(
            f"TG-VIEW-005: --where {condition}: {value!r} is not a number, so it selects no trace. Write "
            f"reward<0.5, or tool:price."
        ) from error


def _column(columns: dict[str, Any], name: str) -> Any:
    if name not in columns:
        raise ArgumentError(
            f"TG-VIEW-006: column {name!r} does not exist, so it selects nothing. The columns are {', '.join(NAMES)}."
            f"{did_you_mean(name, columns)}"
        )
    return columns[name]


def _data(session: Viewer, rows: Sequence[int], numbers_of_rows: dict[int, int]) -> dict[str, Any]:
    state = session.state() | {"rows": len(rows), "done": True, "problems": []}
    names = [name for name, _ in state["tags"]]
    tagged = {
        name: [numbers_of_rows[row] for row in session.tagged(name).tolist() if row in numbers_of_rows]
        for name in names
    }
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
            members = {
                other: numbers_of_rows[other] for other in session.group(row, pieces.MOST) if other in numbers_of_rows
            }
            groups[name] = pieces.side_by_side(session, members) if len(members) > 1 else ""
    return {
        "state": state,
        "columns": columns,
        "tagged": {name: numbers for name, numbers in tagged.items() if numbers},
        "rows": [{**labels[row], "n": number} for number, row in enumerate(rows)],
        "texts": [session.text(row)[:_MOST_TEXT] for row in rows],
        "groups": groups,
        "runs": runs.page(session.runs) if session.runs else "",
    }


def _block(name: str, value: Any) -> str:
    """Return data as a script element. Nothing in it can close the element."""
    text = json.dumps(value, ensure_ascii=True)
    for char in "<>&":
        text = text.replace(char, f"\\u{ord(char):04x}")
    return f'<script type="application/json" id="{name}">{text}</script>'


def _hash(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
