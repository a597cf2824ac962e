"""The index on disk: SQLite alone, which Python brings along.

One row a trace, its text, a trigram index of that text, its record, and tags; the numbers of many traces stand in one
block each, so that a hundred thousand of them are in memory within a few milliseconds. Nothing here knows what a trace
is: `features` says what is put in, `search` and `app` ask.
"""

import sqlite3
import zlib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tracegrad.errors import ReadError
from tracegrad.storage import files

COLUMNS = (
    "reward",
    "length",
    "turns",
    "messages",
    "calls",
    "characters",
    "tier",
    "drift",
    "version",
    "group",
    "source",
)
"""Numbers of a trace; NaN where one is not known. `group` and `source` are codes."""

_FORMAT = 1
_SCHEMA = """
    CREATE TABLE told(name TEXT PRIMARY KEY, value TEXT) WITHOUT ROWID;
    CREATE TABLE block(first INTEGER PRIMARY KEY, numbers BLOB);
    CREATE TABLE trace(n INTEGER PRIMARY KEY, id TEXT, grp TEXT, head TEXT, place INTEGER, text TEXT);
    CREATE TABLE record(n INTEGER PRIMARY KEY, data BLOB);
    CREATE TABLE tag(name TEXT, n INTEGER, PRIMARY KEY(name, n)) WITHOUT ROWID;
    CREATE INDEX trace_id ON trace(id);
    CREATE VIRTUAL TABLE grams USING fts5(text, content='', detail='none', tokenize='trigram');
"""


class Row(NamedTuple):
    """What is kept of one trace.

    Args:
        id, group: names.
        head: the beginning of its last user message, for the list.
        place: its row in its source.
        text: all that its messages say.
        numbers: in the order of `COLUMNS`.
        tags: `kind:name`, such as `tool:price`.
        record: as it was read; empty where the source itself is at hand.
    """

    id: str
    group: str
    head: str
    place: int
    text: str
    numbers: tuple[float, ...]
    tags: tuple[str, ...]
    record: bytes


def connect(path: Path, *, write: bool = False) -> sqlite3.Connection:
    """Opens an index; made if it is not there and `write` is asked."""
    if write:
        for ending in ("", "-wal", "-shm", "-journal"):
            files.check(path.with_name(path.name + ending))
    try:
        if write:
            new = not path.exists()
            found = sqlite3.connect(path, check_same_thread=False, isolation_level=None)
            found.executescript("PRAGMA journal_mode=WAL; PRAGMA synchronous=OFF; PRAGMA temp_store=MEMORY;")
            if new:
                found.executescript(_SCHEMA)
                found.execute("INSERT INTO told VALUES('format', ?)", (str(_FORMAT),))
            return found
        address = f"{path.absolute().as_uri()}?mode=ro"  # whatever its name: what SQLite would read into it is escaped
        return sqlite3.connect(address, uri=True, check_same_thread=False, isolation_level=None)
    except sqlite3.Error as error:
        raise ReadError(
            f"{path}: cannot be used as an index ({error}). Nothing can be searched. It needs SQLite 3.34 or newer and "
            f"free space there; this Python has {sqlite3.sqlite_version}. Give another --index."
        ) from error


def add(database: sqlite3.Connection, first: int, rows: Sequence[Row]) -> None:
    """Appends rows, numbered from `first`, in one transaction."""
    numbers = np.array([row.numbers for row in rows], np.float32).reshape(len(rows), len(COLUMNS))
    database.execute("BEGIN")
    numbered = [(n, Row(*map(_storable, row))) for n, row in enumerate(rows, first)]
    database.executemany(
        "INSERT INTO trace VALUES(?, ?, ?, ?, ?, ?)",
        ((n, row.id, row.group, row.head, row.place, row.text) for n, row in numbered),
    )
    kept = ((n, zlib.compress(row.record, 1)) for n, row in numbered if row.record)
    database.executemany("INSERT INTO record VALUES(?, ?)", kept)
    database.executemany(
        "INSERT OR IGNORE INTO tag VALUES(?, ?)", ((tag, n) for n, row in numbered for tag in row.tags)
    )
    database.execute("INSERT INTO block VALUES(?, ?)", (first, np.ascontiguousarray(numbers.T).tobytes()))
    database.execute("COMMIT")


def _storable(value: Any) -> Any:
    """Return a text without the halves of characters, which SQLite does not take; anything else as it is."""
    if isinstance(value, tuple):
        return tuple(map(_storable, value))
    return value.encode("utf-8", "replace").decode() if isinstance(value, str) else value


def add_grams(database: sqlite3.Connection, first: int, last: int) -> None:
    """Makes the text of rows `first` to `last` searchable by its trigrams."""
    database.execute("BEGIN")
    database.execute("INSERT INTO grams(rowid, text) SELECT n, text FROM trace WHERE n >= ? AND n < ?", (first, last))
    database.execute("COMMIT")


def numbers(database: sqlite3.Connection, since: int = 0) -> NDArray[np.float32]:
    """[len(COLUMNS), R - since] float32: all blocks from row `since` on, which must begin one."""
    found = database.execute("SELECT numbers FROM block WHERE first >= ? ORDER BY first", (since,))
    parts = [np.frombuffer(data, np.float32).reshape(len(COLUMNS), -1) for (data,) in found]
    return np.concatenate(parts, axis=1) if parts else np.zeros((len(COLUMNS), 0), np.float32)


def labels(database: sqlite3.Connection, wanted: Iterable[int]) -> list[tuple[int, str, str, str]]:
    """(n, id, group, head) of rows, in their order there."""
    asked = ",".join(str(int(n)) for n in wanted)
    return database.execute(f"SELECT n, id, grp, head FROM trace WHERE n IN ({asked})").fetchall()


def record(database: sqlite3.Connection, n: int) -> bytes | None:
    """The record of a row as it was read; None where the source itself is at hand."""
    found = database.execute("SELECT data FROM record WHERE n = ?", (n,)).fetchone()
    return zlib.decompress(found[0]) if found else None


def tags(database: sqlite3.Connection) -> list[tuple[str, int]]:
    """All tags with how many rows have them, the most frequent first."""
    return database.execute("SELECT name, count(*) AS k FROM tag GROUP BY name ORDER BY k DESC, name").fetchall()


def tagged(database: sqlite3.Connection, tag: str) -> NDArray[np.int32]:
    """Rows with a tag, ascending."""
    found = database.execute("SELECT n FROM tag WHERE name = ? ORDER BY n", (_storable(tag),))
    return np.array([n for (n,) in found], np.int32)


def tell(database: sqlite3.Connection, name: str, value: Any) -> None:
    """Keeps a word about the index itself."""
    database.execute("INSERT OR REPLACE INTO told VALUES(?, ?)", (name, str(value)))


def told(database: sqlite3.Connection, name: str) -> str | None:
    """What `tell` kept."""
    found = database.execute("SELECT value FROM told WHERE name = ?", (name,)).fetchone()
    return found[0] if found else None
