"""Store the index on disk in SQLite, which is part of Python.

The tables have one row per trace, its text, a trigram index of its id and text, its record, and tags. The numbers of
many traces are stored in one block, so that 100,000 load within a few milliseconds. This module does not interpret
traces: `features` fills it, and `search` and `app` query it.
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
    "level",
    "mismatches",
    "version",
    "group",
    "source",
)
"""Numbers of a trace, NaN if unknown. `group` and `source` are codes."""

FORMAT = 3
"""Version of the tables. An index of another version is not used."""
_SCHEMA = """
    CREATE TABLE property(name TEXT PRIMARY KEY, value TEXT) WITHOUT ROWID;
    CREATE TABLE block(first INTEGER PRIMARY KEY, numbers BLOB);
    CREATE TABLE trace(n INTEGER PRIMARY KEY, id TEXT, grp TEXT, head TEXT, place INTEGER, text TEXT);
    CREATE TABLE record(n INTEGER PRIMARY KEY, data BLOB);
    CREATE TABLE tag(name TEXT, n INTEGER, PRIMARY KEY(name, n)) WITHOUT ROWID;
    CREATE INDEX trace_id ON trace(id);
    CREATE VIRTUAL TABLE grams USING fts5(text, content='', detail='none', tokenize='trigram');
"""


class Row(NamedTuple):
    """The index entry of one trace.

    Args:
        id, group: names.
        head: its title in the list, as `features.Titles` makes it.
        place: its index in its source.
        text: the text of all its messages.
        numbers: values in the order of `COLUMNS`.
        tags: `kind:name`, such as `tool:price`.
        record: the original record. Empty if the trace comes from prepared shards or a run.
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
    """Open an index. With `write`, it is created if it does not exist.

    Raises:
        ReadError: if SQLite cannot use the file.
    """
    if write:
        for ending in ("", "-wal", "-shm", "-journal"):
            files.check(path.with_name(path.name + ending))
    try:
        if write:
            new = not path.exists()
            connection = sqlite3.connect(path, check_same_thread=False, isolation_level=None)
            connection.executescript("PRAGMA journal_mode=WAL; PRAGMA synchronous=OFF; PRAGMA temp_store=MEMORY;")
            if new:
                connection.executescript(_SCHEMA)
                connection.execute("INSERT INTO property VALUES('format', ?)", (str(FORMAT),))
            return connection
        address = f"{path.absolute().as_uri()}?mode=ro"  # `as_uri` escapes characters that SQLite would interpret.
        return sqlite3.connect(address, uri=True, check_same_thread=False, isolation_level=None)
    except sqlite3.Error as error:
        raise ReadError(
            f"TG-VIEW-001: {path}: cannot be used as an index ({error}). Nothing can be searched. It needs SQLite 3.34 "
            f"or newer and free space there; this Python has {sqlite3.sqlite_version}. Give another --index."
        ) from error


def add(database: sqlite3.Connection, first: int, rows: Sequence[Row]) -> None:
    """Append rows, numbered from `first`, in one transaction."""
    numbers = np.array([row.numbers for row in rows], np.float32).reshape(len(rows), len(COLUMNS))
    database.execute("BEGIN")
    numbered_rows = [(n, Row(*map(_storable, row))) for n, row in enumerate(rows, first)]
    database.executemany(
        "INSERT INTO trace VALUES(?, ?, ?, ?, ?, ?)",
        ((n, row.id, row.group, row.head, row.place, row.text) for n, row in numbered_rows),
    )
    records = ((n, zlib.compress(row.record, 1)) for n, row in numbered_rows if row.record)
    database.executemany("INSERT INTO record VALUES(?, ?)", records)
    database.executemany(
        "INSERT OR IGNORE INTO tag VALUES(?, ?)", ((tag, n) for n, row in numbered_rows for tag in row.tags)
    )
    database.execute("INSERT INTO block VALUES(?, ?)", (first, np.ascontiguousarray(numbers.T).tobytes()))
    database.execute("COMMIT")


def _storable(value: Any) -> Any:
    """Return a text without lone surrogates, which SQLite rejects. Other values are unchanged."""
    if isinstance(value, tuple):
        return tuple(map(_storable, value))
    return value.encode("utf-8", "replace").decode() if isinstance(value, str) else value


def add_grams(database: sqlite3.Connection, first: int, last: int) -> None:
    """Add the id and text of rows `first` to `last` (exclusive) to the trigram index."""
    database.execute("BEGIN")
    rows = "SELECT n, id || char(10) || text FROM trace WHERE n >= ? AND n < ?"
    database.execute(f"INSERT INTO grams(rowid, text) {rows}", (first, last))
    database.execute("COMMIT")


def numbers(database: sqlite3.Connection, since: int = 0) -> NDArray[np.float32]:
    """Return [len(COLUMNS), R - since] float32: all blocks from row `since` on, which must be the start of a block."""
    blocks = database.execute("SELECT numbers FROM block WHERE first >= ? ORDER BY first", (since,))
    parts = [np.frombuffer(data, np.float32).reshape(len(COLUMNS), -1) for (data,) in blocks]
    return np.concatenate(parts, axis=1) if parts else np.zeros((len(COLUMNS), 0), np.float32)


def labels(database: sqlite3.Connection, wanted: Iterable[int]) -> list[tuple[int, str, str, str]]:
    """Return (n, id, group, head) of rows, in the order of the index."""
    numbers_wanted = ",".join(str(int(n)) for n in wanted)
    return database.execute(f"SELECT n, id, grp, head FROM trace WHERE n IN ({numbers_wanted})").fetchall()


def record(database: sqlite3.Connection, n: int) -> bytes | None:
    """Return the original record of a row, or None if the index does not have it."""
    row = database.execute("SELECT data FROM record WHERE n = ?", (n,)).fetchone()
    return zlib.decompress(row[0]) if row else None


def tags(database: sqlite3.Connection) -> list[tuple[str, int]]:
    """Return all tags with their numbers of rows, the most frequent first."""
    return database.execute("SELECT name, count(*) AS k FROM tag GROUP BY name ORDER BY k DESC, name").fetchall()


def rows_with_tag(database: sqlite3.Connection, tag: str) -> NDArray[np.int32]:
    """Return the rows with a tag, ascending."""
    rows = database.execute("SELECT n FROM tag WHERE name = ? ORDER BY n", (_storable(tag),))
    return np.array([n for (n,) in rows], np.int32)


def set_property(database: sqlite3.Connection, name: str, value: Any) -> None:
    """Store a property of the index itself."""
    database.execute("INSERT OR REPLACE INTO property VALUES(?, ?)", (name, str(value)))


def get_property(database: sqlite3.Connection, name: str) -> str | None:
    """Return a property that `set_property` stored, or None."""
    row = database.execute("SELECT value FROM property WHERE name = ?", (name,)).fetchone()
    return row[0] if row else None
