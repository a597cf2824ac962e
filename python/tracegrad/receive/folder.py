"""Store spans durably until their trace is whole, then write the trace as one line of a JSON Lines file.

A folder has files `traces-00001.jsonl`, `traces-00002.jsonl`, ... with one line per trace id, and a hidden folder
`.receive` with a SQLite database: the spans of open traces, and where the line of each written trace is.

A file of traces is never changed in place. A changed copy is written as a draft, one transaction makes the draft valid
and deletes the spans that it contains, and then the draft replaces the file. If the process is killed, the next one
completes or deletes the draft, so a span is in the database or in a file, and never in both. A reader sees the file
before or after a change. If more spans of a written trace arrive, a new line at the end of the file has all of them,
and blanks replace the old line, so that the other lines keep their places.
"""

import errno
import json
import os
import shutil
import sqlite3
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from tracegrad.errors import ArgumentError, FormatError, TracegradError, escape_terminal
from tracegrad.storage import files, manifest
from tracegrad.storage.safetensors_file import flush

HIDDEN = ".receive"
_DATABASE = "spans.sqlite"
_MARK = b"tracegrad receive\n"
_FORMAT = 1
_SCHEMA = """
    CREATE TABLE span(trace TEXT, id TEXT, root INTEGER, data BLOB, UNIQUE(trace, id));
    CREATE TABLE line(trace TEXT PRIMARY KEY, file INTEGER, start INTEGER, length INTEGER) WITHOUT ROWID;
    CREATE TABLE file(number INTEGER PRIMARY KEY, version INTEGER);
    CREATE TABLE property(name TEXT PRIMARY KEY, value TEXT) WITHOUT ROWID;
"""


class Span(NamedTuple):
    """One span in OTLP's JSON form.

    Args:
        trace, id: ids in lower-case hexadecimal digits.
        is_root: whether it has no parent.
        data: JSON of `[resource, scope, span]`: the entries of `resourceSpans` and of `scopeSpans` without their lists,
            and the span.
    """

    trace: str
    id: str
    is_root: bool
    data: bytes


class FolderFull(Exception):
    """Spans cannot be stored now. `retry_after_s` is the time after which the sender may try again, in seconds."""

    def __init__(self, reason: str, retry_after_s: int) -> None:
        super().__init__(reason)
        self.retry_after_s = retry_after_s


@dataclass(frozen=True)
class FolderLimits:
    """Bounds of a folder.

    Args:
        open_traces, open_bytes: most open traces, and bytes of their spans.
        trace_bytes: most bytes of the spans of one trace, written ones included; `tracegrad.read` reads records of at
            most 1 GiB.
        file_bytes: size after which a new file of traces is started. Each write copies the newest file.
        free_bytes: free disk space below which no span is stored.
    """

    open_traces: int = 100_000
    open_bytes: int = 8 << 30
    trace_bytes: int = 512 << 20
    file_bytes: int = 4 << 20
    free_bytes: int = 256 << 20


@dataclass
class _Open:
    """An open trace: its last arrival (monotonic), whether its root span arrived, the bytes of its spans."""

    last: float
    has_root: bool = False
    size: int = 0


def split(record: Mapping[str, Any]) -> Iterator[tuple[Any, Any, Any]]:
    """Yield resource, scope and span of each span of a line, as in `Span.data`."""
    for resource in record["resourceSpans"]:
        for scope in resource["scopeSpans"]:
            for span in scope["spans"]:
                yield _without(resource, "scopeSpans"), _without(scope, "spans"), span


def join(spans: Iterable[Sequence[Any]]) -> bytes:
    """Return the line of a trace, as the file exporter of an OpenTelemetry collector writes it.

    Args:
        spans: resource, scope and span of each, as in `Span.data`.

    >>> join([({"resource": {}}, {"scope": {}}, {"spanId": "1"}), ({"resource": {}}, {"scope": {}}, {"spanId": "2"})])
    b'{"resourceSpans":[{"resource":{},"scopeSpans":[{"scope":{},"spans":[{"spanId":"1"},{"spanId":"2"}]}]}]}'
    """
    resources: dict[bytes, tuple[Any, dict[bytes, Any]]] = {}
    for resource, scope, span in spans:
        scopes = resources.setdefault(encode(resource), (resource, {}))[1]
        scopes.setdefault(encode(scope), {**scope, "spans": []})["spans"].append(span)
    entries = [{**resource, "scopeSpans": list(scopes.values())} for resource, scopes in resources.values()]
    return encode({"resourceSpans": entries})


def encode(value: Any) -> bytes:
    """Encode a value as JSON on one line. A lone surrogate becomes JSON's escape for it."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode(errors="backslashreplace")


def _without(entry: Mapping[str, Any], key: str) -> dict[str, Any]:
    return {name: value for name, value in entry.items() if name != key}


class TraceFolder:
    """A folder of traces that one process writes; a context manager. Use it from one thread.

    Args:
        out: the folder; created if it does not exist.
        limits: its bounds.

    Attributes:
        counts: counters since the start: "spans" stored, "duplicates" ignored, "traces" written, "late" traces that got
            more spans after they were written.

    Raises:
        ArgumentError: on entering, if the folder has files of something else, or another process writes there.
        TracegradError: on entering, if it cannot be written.
    """

    def __init__(self, out: Path, limits: FolderLimits | None = None) -> None:
        self.out, self.limits = out, limits or FolderLimits()
        self.counts: Counter[str] = Counter()
        self._open: dict[str, _Open] = {}
        self._size = 0
        self._stack = ExitStack()

    def __enter__(self) -> "TraceFolder":
        self._check_own()
        hidden = self.out / HIDDEN
        with self._stack as stack:
            try:
                self.out.mkdir(parents=True, exist_ok=True)
                stack.enter_context(manifest.lock(self.out, _MARK))
                hidden.mkdir(mode=0o700, exist_ok=True)
                if hidden.is_symlink():
                    raise OSError(errno.ELOOP, "it is a symbolic link", os.fspath(hidden))
                for ending in ("", "-wal", "-shm", "-journal"):
                    files.check(hidden / f"{_DATABASE}{ending}")
                self._connect(hidden / _DATABASE, stack)
                flush(hidden)
                flush(self.out)
                self._complete_drafts()
                self._load_open()
            except (OSError, sqlite3.OperationalError) as error:
                path, reason = getattr(error, "filename", None), getattr(error, "strerror", None)
                raise TracegradError(
                    f"TG-RECEIVE-001: {path or self.out}: {reason or error}. Traces cannot be stored there. Choose "
                    "another folder with --out."
                ) from error
            except sqlite3.Error as error:
                raise FormatError(
                    f"TG-RECEIVE-003: {hidden / _DATABASE}: cannot be used ({error}), so it is unknown which traces "
                    "are written. Move the files of traces to another folder, and choose a new one with --out."
                ) from error
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    @property
    def open_traces(self) -> int:
        """Number of traces with spans that are not written yet."""
        return len(self._open)

    def _check_own(self) -> None:
        """Raise if the folder has files and no database of `receive`."""
        names = {path.name for path in self.out.iterdir()} - {manifest.LOCK} if self.out.is_dir() else set()
        if names and not (self.out / HIDDEN / _DATABASE).is_file():
            raise ArgumentError(
                f"TG-RECEIVE-002: {self.out} contains {escape_terminal(min(names))[:80]!r} and was not written by "
                "tracegrad receive or pull. Its files could be replaced. Choose another folder with --out."
            )

    def _connect(self, path: Path, stack: ExitStack) -> None:
        self._database = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
        stack.callback(self._database.close)
        for setting in ("journal_mode = WAL", "synchronous = FULL", f"journal_size_limit = {64 << 20}"):
            self._database.execute(f"PRAGMA {setting}")
        version = self._database.execute("PRAGMA user_version").fetchone()[0]
        if version == 0:
            with self._transaction():
                for statement in filter(str.strip, _SCHEMA.split(";")):
                    self._database.execute(statement)
                self._database.execute(f"PRAGMA user_version = {_FORMAT}")
        elif version != _FORMAT:
            raise sqlite3.DatabaseError(f"version {version}, this tracegrad knows {_FORMAT}")

    def _load_open(self) -> None:
        now = time.monotonic()
        rows = "SELECT trace, max(root), sum(length(data)) FROM span GROUP BY trace"
        for trace, root, size in self._database.execute(rows):
            self._open[trace] = _Open(now, bool(root), size)
            self._size += size

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        """Commit on leaving; the changes are then on disk. Roll back if the block raises."""
        self._database.execute("BEGIN IMMEDIATE")
        try:
            yield
            self._database.execute("COMMIT")
        except BaseException:
            if self._database.in_transaction:
                self._database.execute("ROLLBACK")
            raise

    def add(self, spans: Sequence[Span]) -> int:
        """Store spans. They are on disk when this returns, and a span that is stored already is ignored.

        Returns:
            The number of refused spans, whose traces have too many bytes.

        Raises:
            FolderFull: if they cannot be stored now. None of them is stored.
        """
        sizes: Counter[str] = Counter()
        for span in spans:
            sizes[span.trace] += len(span.data)
        now, stored = time.monotonic(), []
        try:
            refused = {trace for trace, size in sizes.items() if self._bytes_of(trace) + size > self.limits.trace_bytes}
            kept = [span for span in spans if span.trace not in refused]
            self._check_space(sizes.keys() - refused - self._open.keys(), sum(len(span.data) for span in kept))
            with self._transaction():
                for span in kept:
                    row = self._database.execute("INSERT OR IGNORE INTO span VALUES (?, ?, ?, ?)", span)
                    stored.append(row.rowcount > 0)
        except sqlite3.Error as error:
            raise FolderFull(f"the spans could not be written to disk: {error}", 30) from error
        for span, is_new in zip(kept, stored, strict=True):
            trace = self._open.setdefault(span.trace, _Open(now))
            trace.last, trace.has_root = now, trace.has_root or span.is_root
            trace.size += len(span.data) * is_new
            self._size += len(span.data) * is_new
            self.counts["spans" if is_new else "duplicates"] += 1
        return len(spans) - len(kept)

    def _bytes_of(self, trace: str) -> int:
        line = self._database.execute("SELECT length FROM line WHERE trace = ?", (trace,)).fetchone()
        return (line[0] if line else 0) + (self._open[trace].size if trace in self._open else 0)

    def _check_space(self, new_traces: set[str], size: int) -> None:
        limits = self.limits
        if len(self._open) + len(new_traces) > limits.open_traces:
            raise FolderFull(f"{len(self._open):,} traces are open; the maximum is {limits.open_traces:,}", 10)
        if self._size + size > limits.open_bytes:
            raise FolderFull(f"the open traces have {self._size:,} bytes; the maximum is {limits.open_bytes:,}", 10)
        try:
            free = shutil.disk_usage(self.out).free
        except OSError as error:
            raise FolderFull(f"{self.out}: {error.strerror}", 30) from error
        if free < limits.free_bytes + size:
            raise FolderFull(f"the disk of the folder has {free:,} free bytes", 30)

    def write_whole(self, quiet_s: float, idle_s: float) -> int:
        """Write the traces that are whole.

        Args:
            quiet_s: a trace with a root span is whole if no span arrived for so many seconds.
            idle_s: the same for a trace without a root span.

        Returns:
            The number of traces that were written or got more spans.

        Raises:
            TracegradError: if they cannot be written. They stay open.
        """
        now = time.monotonic()
        whole = [
            trace for trace, state in self._open.items() if now - state.last >= (quiet_s if state.has_root else idle_s)
        ]
        written = 0
        while whole:
            size, count = 0, 0
            while count < len(whole) and size <= self.limits.file_bytes:
                size += self._open[whole[count]].size
                count += 1
            written += self._write_open(whole[:count])
            del whole[:count]
        return written

    def _write_open(self, traces: Sequence[str]) -> int:
        counts: Counter[str] = Counter()

        def line(trace: str, earlier: bytes | None) -> bytes | None:
            rows = self._database.execute("SELECT data FROM span WHERE trace = ? ORDER BY rowid", (trace,))
            spans = [json.loads(data) for (data,) in rows]
            known = [] if earlier is None else list(split(json.loads(earlier)))
            ids = {span["spanId"] for _, _, span in known}
            new = [entry for entry in spans if entry[2]["spanId"] not in ids]
            counts["late"] += bool(known and new)
            counts["traces"] += bool(new and not known)
            counts["duplicates"] += len(spans) - len(new)
            counts["spans"] -= len(spans) - len(new)
            return join([*known, *new]) if new else None

        def delete() -> None:
            self._database.executemany("DELETE FROM span WHERE trace = ?", ((trace,) for trace in traces))

        written = self.write_lines(traces, line, delete)
        for trace in traces:
            self._size -= self._open.pop(trace).size
        self.counts.update(counts)
        return written

    def write_lines(
        self,
        traces: Iterable[str],
        line: Callable[[str, bytes | None], bytes | None],
        with_last: Callable[[], None] = lambda: None,
    ) -> int:
        """Write or replace the lines of traces.

        Args:
            traces: their ids.
            line: returns the line of a trace without a line break, from its id and its line in the folder, if it has
                one; None leaves the trace as it is.
            with_last: changes the database in the transaction of the last file.

        Returns:
            The number of lines.

        Raises:
            TracegradError: if they cannot be written. Lines of earlier files may be.
        """
        with _write_errors(self.out):
            self._complete_drafts()
            places = {trace: self._place(trace) for trace in traces}
            newest = self._database.execute("SELECT max(number) FROM file").fetchone()[0] or 1
            if self._file_size(newest) > self.limits.file_bytes:
                newest += 1
            numbers: dict[int, list[str]] = {}
            for trace, place in places.items():
                numbers.setdefault(newest if place is None else place[0], []).append(trace)
            if not numbers:
                with self._transaction():
                    with_last()
            written = 0
            for count, (number, names) in enumerate(sorted(numbers.items()), 1):
                is_last = count == len(numbers)
                written += self._write_file(number, names, places, line, with_last if is_last else lambda: None)
            return written

    def _write_file(
        self,
        number: int,
        traces: Sequence[str],
        places: Mapping[str, tuple[int, int, int] | None],
        line: Callable[[str, bytes | None], bytes | None],
        with_commit: Callable[[], None],
    ) -> int:
        path = self._path(number)
        with _write_errors(path):
            files.check(path)
            content = bytearray(path.read_bytes() if path.exists() else b"")
            if content and not content.endswith(b"\n"):  # somebody edited it
                content += b"\n"
            lines: list[tuple[str, int, int, int]] = []
            for trace in traces:
                place = places[trace]
                start, length = (0, 0) if place is None else place[1:]
                new = line(trace, bytes(content[start : start + length]) if place else None)
                if new is None:
                    continue
                content[start : start + length] = b" " * length
                lines.append((trace, number, len(content), len(new)))
                content += new + b"\n"
            version = self._version(number) + bool(lines)
            draft = self.out / HIDDEN / f"{path.name}.{version}"
            if lines:
                with files.create(draft) as file:
                    file.write(content)
                    file.flush()
                    os.fsync(file.fileno())
                flush(draft.parent)
            with self._transaction():
                self._database.executemany("INSERT OR REPLACE INTO line VALUES (?, ?, ?, ?)", lines)
                self._database.execute("INSERT OR REPLACE INTO file VALUES (?, ?)", (number, version))
                with_commit()
            if lines:
                files.replace(draft, path)
                flush(self.out)
        return len(lines)

    def has_line(self, trace: str) -> bool:
        """Return whether the folder has the line of a trace."""
        return self._place(trace) is not None

    def claim(self, verb: str) -> None:
        """Store which of `receive` and `pull` writes the folder.

        Raises:
            ArgumentError: if the other one has written there.
        """
        writer = self.property_value("writer") or verb
        if writer != verb:
            raise ArgumentError(
                f"TG-RECEIVE-011: {self.out} was written by tracegrad {writer}. A pulled trace would replace the spans "
                "that were received of it. Choose another folder with --out."
            )
        with self._transaction():
            self.set_properties({"writer": verb})

    def property_value(self, name: str) -> str | None:
        """Return a value that `set_properties` stored, None if there is none."""
        row = self._database.execute("SELECT value FROM property WHERE name = ?", (name,)).fetchone()
        return None if row is None else row[0]

    def set_properties(self, values: Mapping[str, str]) -> None:
        """Store values by name, in the transaction of `write_lines`."""
        self._database.executemany("INSERT OR REPLACE INTO property VALUES (?, ?)", values.items())

    def _complete_drafts(self) -> None:
        """Move drafts that were committed to their places, and delete the others."""
        with _write_errors(self.out / HIDDEN):
            for draft in (self.out / HIDDEN).glob("traces-*.jsonl.*"):
                name, _, version = draft.name.rpartition(".")
                number = int(name.removeprefix("traces-").removesuffix(".jsonl"))
                if int(version) == self._version(number):
                    files.replace(draft, self.out / name)
                    flush(self.out)
                else:
                    draft.unlink()

    def _place(self, trace: str) -> tuple[int, int, int] | None:
        """Return the file, start and length of the line of a trace; None if the folder does not have it (any more)."""
        row = self._database.execute("SELECT file, start, length FROM line WHERE trace = ?", (trace,)).fetchone()
        if row is None:
            return None
        try:
            with self._path(row[0]).open("rb") as file:
                file.seek(row[1])
                line = file.read(row[2] + 1)
        except OSError:
            return None
        return row if line.endswith(b"\n") and trace.encode() in line else None

    def _path(self, number: int) -> Path:
        return self.out / f"traces-{number:05d}.jsonl"

    def _file_size(self, number: int) -> int:
        path = self._path(number)
        return path.stat().st_size if path.exists() else 0

    def _version(self, number: int) -> int:
        row = self._database.execute("SELECT version FROM file WHERE number = ?", (number,)).fetchone()
        return row[0] if row else 0


@contextmanager
def _write_errors(path: Path) -> Iterator[None]:
    """Convert errors of the disk, of the database and of damaged files of traces."""
    try:
        yield
    except TracegradError:
        raise
    except (OSError, sqlite3.Error, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise TracegradError(
            f"TG-RECEIVE-004: {path}: {reason}. Traces could not be written; their spans are kept in {HIDDEN}. Free "
            "disk space, or start again with the same --out."
        ) from error
