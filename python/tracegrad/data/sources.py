"""Find the inputs that a user names, and read records from them.

An input is a file, standard input, a folder, a glob or an fsspec address (s3://, gs://, az://, hf://, https://; extra
`cloud`). A `Source` yields decoded traces, or undecoded records that a caller can change first.
"""

import contextlib
import glob
import itertools
import os
import shlex
import sqlite3
import stat
import tempfile
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from tracegrad import _core
from tracegrad.data import arrow, arrow_files
from tracegrad.data.formats import eval_log, session_files
from tracegrad.data.json_path import natural_sort_key
from tracegrad.data.read_options import Options
from tracegrad.data.trace import Line, ReadReport, Traces, format_location, to_json
from tracegrad.errors import ArgumentError, FormatError, ReadError, redact
from tracegrad.storage.files import refuse_special
from tracegrad.storage.remote import ADDRESS, as_read_error, system

SUFFIXES = (".jsonl", ".json", ".ndjson", ".parquet", ".arrow", ".eval", ".traj", ".sse", ".feather", ".log", ".txt")
PACKED = (".gz", ".zst", ".zstd", ".gzip")
_CONVERSION = "import pandas as pd; pd.read_{}({!r}).to_json({!r}, orient='records', lines=True)"
_UNREADABLE = {
    ".csv": ("a CSV file", "csv"),
    ".tsv": ("a TSV file", "table"),
    ".xlsx": ("an Excel file", "excel"),
    ".xls": ("an Excel file", "excel"),
    ".orc": ("an ORC file", "orc"),
    ".pkl": ("a pickle", "pickle"),
    ".pickle": ("a pickle", "pickle"),
    ".xml": ("an XML file", "xml"),
    ".html": ("an HTML file", "html"),
}


def suffix(path: str) -> str:
    """Return the lower-case suffix of a file, without the suffix of its compression."""
    stem, last = os.path.splitext(path.lower())
    return os.path.splitext(stem)[1] if last in PACKED else last


def refuse_unsupported_suffix(path: str) -> None:
    """Refuse a file whose suffix belongs to a format without JSON, such as CSV.

    Raises:
        ReadError: if the suffix is one of these; the message contains a line of Python that converts the file.
    """
    format_info = _UNREADABLE.get(suffix(path))
    if format_info is None:
        return
    kind, reader = format_info
    line = _CONVERSION.format(reader, path, f"{os.path.splitext(path)[0]}.jsonl")
    raise ReadError(
        f"TG-DATA-028: {path}: it is {kind}, which cannot store messages or lists of logprobs. "
        f"Convert it, and check the result: python -c {line!r}"
    )


BLOCK = 1 << 20


def list_address(address: str) -> list[tuple[str, int]]:
    """Return the files that an address names, with their sizes in bytes.

    The address is a file, a folder (all files below it with a supported suffix) or a pattern.

    Raises:
        ReadError: if there are no such files, or the file system cannot be queried.
        ArgumentError: if the folder contains prepared shards, or if fsspec (or the package that it needs for this kind
            of address) is not installed.
    """
    with system(address) as (files, path):
        if any(mark in path for mark in "*?["):
            file_info = {name: info for name, info in files.glob(path, detail=True).items() if info["type"] == "file"}
        elif files.isdir(path):
            below = files.find(path, detail=True)
            if f"{path.rstrip('/')}/manifest.json" in below:
                raise ArgumentError(
                    f"TG-DATA-029: {address} contains prepared shards, which are aligned already. Pass this address "
                    "only to train, or pass the addresses of the traces."
                )
            file_info = {name: info for name, info in below.items() if suffix(name) in SUFFIXES}
        else:
            file_info = {path: files.info(path)}
    if not file_info:
        raise ReadError(f"TG-DATA-030: {address}: no file matches this address. Check the address.")
    for name in file_info:
        refuse_unsupported_suffix(name)
    return [
        (files.unstrip_protocol(name), int(file_info[name].get("size") or 0))
        for name in sorted(file_info, key=natural_sort_key)
    ]


def local_copy(address: str, folder: str) -> str:
    """Download a file into a folder and return its path.

    Formats that are read from their end (Parquet, Arrow, zip) need a complete local copy.
    """
    with system(address) as (files, path):
        target = os.path.join(folder, os.path.basename(path.split("?")[0].rstrip("/")) or "file")
        files.get_file(path, target)
    return target


def read_head(address: str, count: int = 8) -> bytes:
    """Return the first `count` bytes of a file."""
    with system(address) as (files, path):
        return bytes(files.read_block(path, 0, count))


class Pipe:
    """The bytes of an address, copied by a thread into an OS pipe.

    Any reader can open `path`. Call `check` after the last byte: it raises the error of the copying thread.
    """

    def __init__(self, address: str) -> None:
        with system(address) as (files, path):
            self._begin(files.open(path, "rb", block_size=4 * BLOCK), address)

    def _begin(self, file: Any, name: str) -> None:
        self._file, self._name = file, name
        self._error: Exception | None = None
        self._out, self._in = os.pipe()
        self.path = f"/dev/fd/{self._out}"
        self._thread = threading.Thread(target=self._copy, name=f"read {redact(name)[:40]}", daemon=True)
        self._thread.start()

    def _blocks(self) -> Iterator[bytes]:
        while block := self._file.read(BLOCK):
            yield block

    def _copy(self) -> None:
        try:
            with self._file, os.fdopen(self._in, "wb", buffering=0) as pipe:
                for block in self._blocks():
                    pipe.write(block)
        except BrokenPipeError:
            pass  # The reader closed its end early, for example at the limit.
        except Exception as error:
            self._error = error

    def opened(self) -> None:
        """Close this process's handle of the read end, after the reader has opened `path`."""
        os.close(self._out)

    def check(self) -> None:
        """Wait for the copying thread, after the last byte was read.

        Raises:
            ReadError: if the address could not be read to its end.
        """
        self._thread.join(timeout=60)
        if self._error is not None:
            raise as_read_error(self._name, self._error) from self._error


class Piece(Pipe):
    """A range of bytes of a file of lines.

    The pipe starts with `line - 1` line breaks, so that the reader counts the original line numbers.

    Raises:
        ReadError: if the file cannot be opened.
    """

    def __init__(self, path: str, start: int, end: int, line: int) -> None:
        self._left, self.breaks = end - start, line - 1
        try:
            file = open(path, "rb", buffering=0)  # noqa: SIM115 (the thread that copies closes it)
        except OSError as error:
            raise ReadError(
                f"TG-DATA-031: {path}: cannot be read ({error.strerror}). Check that the file is there."
            ) from error
        file.seek(start)
        self._begin(file, path)

    def _blocks(self) -> Iterator[bytes]:
        for done in range(0, self.breaks, BLOCK):
            yield b"\n" * min(BLOCK, self.breaks - done)
        while self._left:
            if not (block := self._file.read(min(BLOCK, self._left))):
                raise OSError("the file was truncated while it was read")
            self._left -= len(block)
            yield block


MOST_PLACES = 1_000_000
MOST_TABLES = 12
_SQLITE = b"SQLite format 3\0"
_MAGIC = {b"PAR1": "parquet", b"ARROW1": "arrow", b"PK\x03\x04": "eval"}


@dataclass(frozen=True)
class Place:
    """One source of records.

    Args:
        kind: "file", "stdin", "parquet", "arrow", "saved" (a datasets folder), "eval" (an inspect-ai log), "address",
            or "session" (a file whose lines are one session of an agent, or a folder of its events).
        path: local path, address, or "-" for standard input.
        size: size in bytes, 0 if unknown.
        modified: time of the last change in nanoseconds, 0 if unknown.
        start, end: range of bytes to read, if the file is split between records. An `end` of 0 means the complete file.
        line: number of the line at `start`.
        number: from 1, among the places whose paths are equal once their secrets are removed.
        hidden: paths of the files of its folder that are not read because their names begin with a dot. The first place
            of a folder has them.
    """

    kind: str
    path: str
    size: int = 0
    modified: int = 0
    start: int = 0
    end: int = 0
    line: int = 1
    number: int = 1
    hidden: tuple[str, ...] = field(default=(), compare=False, repr=False)

    @property
    def name(self) -> str:
        """The path without secrets, as records and errors name it. It is unique among the places of one read.

        >>> [Place("address", f"https://host/a?sig={sig}", number=n).name for n, sig in enumerate("xy", 1)]
        ['https://host/a?sig=***', 'https://host/a?sig=*** (2)']
        """
        return redact(self.path) + (f" ({self.number})" if self.number > 1 else "")


def expand(paths: Sequence[str | os.PathLike[str]]) -> list[Place]:
    """Return the places that paths, patterns and addresses name, in the order of `paths`.

    The files of a folder or glob are in natural order: by name, with the numbers in names compared as numbers.

    Raises:
        ReadError: if a path does not exist, or a folder contains no file with a supported suffix.
        ArgumentError: if standard input is named together with other inputs, if a folder contains prepared shards, or
            if there are more than `MOST_PLACES` files.

    >>> expand(["-"])
    [Place(kind='stdin', path='-', size=0, modified=0, start=0, end=0, line=1, number=1)]
    """
    names = [os.fspath(path) for path in paths]
    if "-" in names and len(names) > 1:
        raise ArgumentError("TG-DATA-032: standard input cannot be combined with other inputs. Read it separately.")
    places = [place for name in names for place in _places_of(name)]
    if len(places) > MOST_PLACES:
        raise ArgumentError(
            f"TG-DATA-033: the inputs contain {len(places):,} files. The maximum is {MOST_PLACES:,}. Pass fewer."
        )
    return _numbered(places)


def _numbered(places: list[Place]) -> list[Place]:
    """Number the addresses whose paths differ only in their secrets, so that their names are unique."""
    paths: dict[str, dict[str, int]] = {}
    numbered = []
    for place in places:
        if not ADDRESS.match(place.path):
            numbered.append(place)
            continue
        numbers = paths.setdefault(redact(place.path), {})
        numbered.append(replace(place, number=numbers.setdefault(place.path, len(numbers) + 1)))
    return numbered


def without_empty_files(places: list[Place]) -> list[Place]:
    """Return the places without empty files; if all files are empty, only the first place."""
    return [place for place in places if not _is_empty(place)] or places[:1]


def _is_empty(place: Place) -> bool:
    try:
        return os.path.isfile(place.path) and os.path.getsize(place.path) == 0
    except OSError:
        return False


def resolve(source: Any) -> tuple[list[Place], Any]:
    """Return (places, None) if `source` names inputs, else ([], source): an object that contains the records itself.

    Raises:
        ReadError, ArgumentError: as for `expand`; ReadError also if `source` is an empty sequence.
    """
    if isinstance(source, (str, os.PathLike)):
        return expand([source]), None
    if isinstance(source, Sequence) and source and all(isinstance(item, Place) for item in source):
        return list(source), None
    if isinstance(source, Sequence) and source and all(isinstance(item, (str, os.PathLike)) for item in source):
        return expand(source), None
    if isinstance(source, Sequence) and not source and not hasattr(source, "features"):
        raise ReadError("TG-DATA-034: no input is given. Pass at least one file.")
    return [], source


def _places_of(name: str) -> list[Place]:
    if name == "-":
        return [Place("stdin", name)]
    if ADDRESS.match(name):
        return [Place("address", path, size) for path, size in list_address(name)]
    if os.path.isdir(name):
        return _folder(Path(name))
    if os.path.lexists(name):
        return [_file(name)]
    if glob.has_magic(name):
        matches = sorted(
            (path for path in glob.glob(name, recursive=True) if not _is_quarantine(path)), key=natural_sort_key
        )
        places = [
            place
            for path in matches
            for place in (_folder(Path(path)) if os.path.isdir(path) else [_place_in_folder(path)])
        ]
        if places:
            return places
        raise ReadError(f"TG-DATA-035: {name}: no file matches this pattern. Check the pattern.")
    return [Place("file", name)]  # The reader reports that the file does not exist.


def _folder(folder: Path) -> list[Place]:
    if (folder / "state.json").is_file() and (folder / "dataset_info.json").is_file():
        return [Place("saved", str(folder))]
    if (folder / "manifest.json").is_file():
        raise ArgumentError(
            f"TG-DATA-036: {folder} contains prepared shards, which are aligned already. Pass this folder "
            "only to train, or pass the files of traces."
        )
    paths, hidden, others = [], [], set()
    for root, folders, files in os.walk(folder):
        folders[:] = sorted((name for name in folders if not name.startswith(".")), key=natural_sort_key)
        if is_session := session_files.is_event_folder(files):
            paths.append(root)
        for file in sorted(files, key=natural_sort_key):
            path = os.path.join(root, file)
            if file.startswith("."):
                hidden += [] if _is_empty(Place("file", path)) else [path]  # Locks are empty.
                continue
            if _is_quarantine(file) or is_session:
                continue
            if suffix(file) in SUFFIXES:
                paths.append(path)
            else:
                others.add(suffix(file) or file)
    if not paths:
        names = ", ".join(sorted({os.path.basename(path) for path in hidden})[:5])
        parts = [", ".join(sorted(others)[:5])] if others else []
        parts += [f"{len(hidden):,} hidden files, which are read only if you name them ({names})"] if hidden else []
        content = f"it holds {' and '.join(parts)}" if parts else "it is empty"
        raise ReadError(
            f"TG-DATA-037: {folder}: {content}. No traces can be read. Name the files themselves; of a folder "
            f"are read: {', '.join(SUFFIXES)}, also as .gz or .zst."
        )
    first, *rest = map(_place_in_folder, paths)
    return [replace(first, hidden=tuple(hidden)), *rest]


def _place_in_folder(path: str) -> Place:
    """Return the place of a file in a folder or pattern. A pipe is read only if the user names it directly."""
    if os.path.isdir(path):
        parts = [entry.stat() for entry in os.scandir(path)]
        return Place("session", path, sum(each.st_size for each in parts), max(each.st_mtime_ns for each in parts))
    try:
        refuse_special(path)
    except OSError as error:
        raise ReadError(
            f"TG-DATA-038: {path}: {error.strerror}. In folders and patterns, only regular files are read. Remove it, "
            f"or pass the files themselves."
        ) from error
    return _file(path)


def _is_quarantine(path: str) -> bool:
    """Return whether a file was written by a quarantine."""
    return path.endswith((".quarantine.raw", ".quarantine.jsonl"))


def _file(path: str) -> Place:
    refuse_unsupported_suffix(path)
    try:
        info = os.stat(path)
        size, modified = info.st_size, info.st_mtime_ns
        if not stat.S_ISREG(info.st_mode):
            return Place("file", path)
        with open(path, "rb") as file:
            head = file.read(session_files.HEAD_BYTES)
    except OSError:
        return Place("file", path)
    if head.startswith(_SQLITE):
        _refuse_database(path)
    is_stream = head[:4] == b"\xff\xff\xff\xff" and suffix(path) in (".arrow", ".feather")
    kind = "arrow" if is_stream else kind_of(head)
    if kind == "file" and session_files.producer_of_file(path, head):
        kind = "session"
    return Place(kind, path, size, modified)


def _refuse_database(path: str) -> None:
    """Refuse an SQLite database, which traces are not read from.

    Raises:
        ReadError: always; the message names the tables, and contains a line of Python that writes one as JSON lines.
    """
    uri = f"{Path(path).absolute().as_uri()}?mode=ro&immutable=1"
    try:
        with contextlib.closing(sqlite3.connect(uri, uri=True)) as database:
            rows = database.execute("SELECT name FROM sqlite_master WHERE type = 'table' ORDER BY name").fetchall()
    except sqlite3.Error:
        rows = []
    tables = [str(name) for (name,) in rows if not str(name).startswith("sqlite_")]
    names = ", ".join(tables[:MOST_TABLES]) + (f" and {len(tables) - MOST_TABLES} others" * (len(tables) > MOST_TABLES))
    select = "SELECT * FROM TABLE"
    line = (
        f"import json, sqlite3; d = sqlite3.connect({path!r}); d.row_factory = sqlite3.Row; "
        f"[print(json.dumps(dict(row), default=str)) for row in d.execute({select!r})]"
    )
    raise ReadError(
        f"TG-DATA-048: {path}: it is an SQLite database, with the tables {names or '(none can be listed)'}. Write the "
        f"table that has the conversations to a file of JSON lines, and check the result: "
        f"python -c {shlex.quote(line)} > traces.jsonl"
    )


def kind_of(head: bytes) -> str:
    """Return the kind of a file from its first bytes."""
    return next((kind for begin, kind in _MAGIC.items() if head.startswith(begin)), "file")


RECORDS, RECORD_BYTES = 256, 8 << 20
"""Most records, and most bytes of records, in one chunk that Python converts."""

Refusal = tuple[str, str, str]
"""The reason for which a record is refused: (problem, why it matters, what to do)."""
JsonOrRefusal = bytes | Refusal
Row = tuple[Line, bytes, JsonOrRefusal]
"""(line, original bytes, converted JSON or the refusal) of a record."""
ConvertRefused = Callable[[Line, bytes], "list[Row] | None"]
"""Converts a record that the core refuses, given its line and bytes. None if no adapter recognizes the record."""


class FileSource:
    """A file, a pipe, standard input or the bytes of an address, read by the Rust core."""

    def __init__(self, place: Place, options: Options) -> None:
        self.name, self._batch, self._limit = place.name, options.batch, options.limit
        self._place, self._pipe = place, _pipe(place)
        path, name = (self._pipe.path, self.name) if self._pipe else (place.path, None)
        settings = (
            options.on_error,
            options.quarantine_prefix,
            options.limit,
            options.max_record_bytes,
            options.chunk_bytes,
        )
        self._options = options
        self._reader = _core.TraceReader(path, *settings, options.format, name)
        if self._pipe:
            self._pipe.opened()
        self._patient = place.kind == "file" and place.size > 0
        self._first: list[tuple[Line, bytes]] = []

    def head(self) -> list[bytes]:
        """Return the first records, at most 16 and about 64 KiB, without consuming them.

        Only one record is returned if the source may block (a pipe, standard input, an address). For a piece of a file,
        these are the first records of the complete file.
        """
        if self._place.end:
            return FileSource(replace(self._place, start=0, end=0, line=1), self._options).head()
        if not self._first:
            self._first = self._reader.cut(16 if self._patient else 1, 1 << 16)
        return [text for _, text in self._first]

    def decode_directly(self, convert: ConvertRefused) -> Iterator[Traces]:
        """Yield traces decoded by the core. `convert` converts the records that the core refuses."""
        try:
            if self._first:
                self._reader.put_back(self._first)
            while len(core := self._batch_of(convert)):
                yield Traces(core)
        except FormatError:
            self._end()  # An address that broke off leaves a truncated record: then raise that error instead.
            raise
        self._end()

    def _batch_of(self, convert: ConvertRefused) -> _core.Traces:
        core, refused = self._reader.batch_asking(self._batch)
        parts, traces = [core], len(core)
        while refused:
            if (rows := convert(*refused)) is None:
                self._reader.settle_refused()
            else:
                parts.append(self._reader.decode(rows))
            core, refused = self._reader.batch_asking(max(self._batch - traces, 1))
            parts.append(core)
            traces = sum(map(len, parts))
        return _core.Traces.concatenate(parts) if len(parts) > 1 else core

    def records(self) -> Iterator[list[tuple[Line, bytes]]]:
        """Yield chunks of (line, bytes). Pass the records of each chunk to `decode` before you request the next one."""
        chunk = self._first or self._reader.cut(RECORDS, RECORD_BYTES)
        while chunk:
            yield chunk
            chunk = self._reader.cut(RECORDS, RECORD_BYTES)
        self._end()

    def finish(self) -> None:
        """Finish after the last record was decoded: complete the quarantine, and raise if the file was empty."""
        self._reader.batch(1)

    def decode(self, made: list[Row]) -> Traces:
        """Decode converted records. Bad records are handled as `on_error` specifies."""
        return Traces(self._reader.decode(made))

    @property
    def report(self) -> ReadReport:
        """Counts of the records read so far."""
        return ReadReport(**self._reader.report())

    @property
    def bytes_read(self) -> int:
        """Bytes consumed so far."""
        before = self._pipe.breaks if isinstance(self._pipe, Piece) else 0
        return max(self._reader.taken() - before, 0)

    def _end(self) -> None:
        # If the limit was reached, the remaining bytes of an address are not needed: do not wait for them.
        if self._pipe and (self._limit is None or self.report.traces < self._limit):
            self._pipe.check()


def _pipe(place: Place) -> Pipe | None:
    """Return the pipe for an address or a piece of a file, None for other places."""
    if place.kind == "address":
        return Pipe(place.path)
    return Piece(place.path, place.start, place.end, place.line) if place.end else None


class RowSource:
    """Rows of Arrow data, or records that are Python objects."""

    def __init__(self, rows: arrow.RowStream, name: str, size: int, options: Options) -> None:
        self.name, self._rows, self._size, self._limit = name, rows, size, options.limit

    def head(self) -> list[bytes]:
        """Return the first record, without consuming it."""
        return self._rows.head()

    def decode_directly(self, convert: ConvertRefused) -> Iterator[Traces]:
        """Yield traces decoded from the rows. `convert` converts the rows that the core refuses."""
        self._rows.convert_refused = lambda line, raw: (
            None if (rows := convert(line, raw)) is None else self._decoded(rows)
        )
        for traces in self._rows:
            yield self._within(traces)
            if self._limit == 0:
                return

    def records(self) -> Iterator[list[tuple[Line, bytes]]]:
        """Yield chunks of (row number, JSON)."""
        yield from self._rows.records()

    def finish(self) -> None:
        """Do nothing: rows leave nothing open."""

    def decode(self, made: list[Row]) -> Traces:
        """Decode converted rows, up to the limit."""
        return self._within(self._decoded(made))

    def _within(self, traces: Traces) -> Traces:
        """Truncate traces to the remaining limit, and subtract them from it."""
        if self._limit is not None:
            traces = traces[: self._limit] if len(traces) > self._limit else traces
            self._limit -= len(traces)
        return traces

    def _decoded(self, rows: list[Row]) -> Traces:
        accepted = []
        for line, _, converted in rows:
            if isinstance(converted, bytes):
                accepted.append((line, converted))
            else:
                self._rows.refuse(
                    f"TG-DATA-043: {format_location(self.name, line)}: {format_refusal(converted)}", "wrong_type"
                )
        return self._rows.decode(accepted) if accepted else Traces(_core.Traces.concatenate([]))

    @property
    def report(self) -> ReadReport:
        """Counts of the records read so far."""
        return self._rows.read_report

    @property
    def bytes_read(self) -> int:
        """Bytes consumed so far: 0 before the first row, then the size of the file."""
        return self._size if self._rows.read_report.records else 0


Source = FileSource | RowSource


def open_decoder(empty: str, name: str, options: Options) -> _core.TraceReader:
    """Return a core reader for records that were converted or joined from `name`; it also handles bad ones.

    Args:
        empty: path of an empty file, which the reader opens in place of the input.
        name: name of the input, for errors.
        options: reader options.
    """
    settings = (options.on_error, options.quarantine_prefix, None, options.max_record_bytes, options.chunk_bytes)
    return _core.TraceReader(empty, *settings, options.format, name)


def format_refusal(refusal: Refusal) -> str:
    """Return the three parts of a refusal as sentences, for an error message."""
    return " ".join(f"{part.rstrip('.')}." for part in refusal)


class JsonRows(arrow.RowStream):
    """Records that are dicts, objects with `model_dump`, or JSON as bytes."""

    def __init__(self, records: Iterable[Any], name: str, *, format: str, on_error: str) -> None:
        super().__init__((), name, format=format, on_error=on_error)
        self._records = iter(records)

    def head(self) -> list[bytes]:
        """Return the first record as JSON, without consuming it; an empty list if there are no records."""
        first = list(itertools.islice(self._records, 1))
        self._records = itertools.chain(first, self._records)
        return [to_json(record, 1) for record in first]

    def records(self) -> Iterator[list[tuple[Line, bytes]]]:
        """Yield chunks of (number, JSON); numbers start at 1."""
        numbered = enumerate(self._records, 1)
        while chunk := list(itertools.islice(numbered, RECORDS)):
            yield [(number, to_json(record, number)) for number, record in chunk]

    def _read_all(self) -> Iterator[Traces]:
        for chunk in self.records():
            yield self.decode(chunk)


def open_place(place: Place, options: Options, folder: str | None = None) -> Source:
    """Return the source of a place.

    Args:
        place: the input.
        options: reader options.
        folder: directory for downloads of files that need a complete local copy; a temporary one if None.

    Raises:
        ReadError, FormatError: if the place cannot be read.
        ArgumentError: if a required package is not installed, or rows do not support this `on_error`.
    """
    head = read_head(place.path, session_files.HEAD_BYTES) if place.kind == "address" else b""
    if kind_of(head) != "file" or session_files.may_be_lines_of_a_session(head):
        local = local_copy(place.path, folder or tempfile.mkdtemp())
        return open_place(replace(expand([local])[0], size=place.size), options, folder)
    if place.kind in ("file", "stdin", "address"):
        return FileSource(place, options)
    return RowSource(_rows_of(place, options), place.name, place.size, options)


def _rows_of(place: Place, options: Options) -> arrow.RowStream:
    settings: dict[str, Any] = {"format": options.format, "on_error": options.on_error}
    if place.kind == "parquet":
        return arrow_files.ParquetStream(place.path, batch=options.batch, **settings)
    if place.kind == "arrow":
        max_bytes = arrow_files.max_record_bytes(place.path)
        return arrow.RowStream(arrow_files.arrow_batches(place.path), place.path, max_bytes=max_bytes, **settings)
    if place.kind == "saved":
        files = arrow_files.saved_files(place.path)
        max_bytes = sum(map(arrow_files.max_record_bytes, files))
        batches = itertools.chain.from_iterable(map(arrow_files.arrow_batches, files))
        return arrow.RowStream(batches, place.path, max_bytes=max_bytes, **settings)
    read = session_files.records if place.kind == "session" else eval_log.samples
    return JsonRows(read(place.path), place.path, **settings)


def open_object(records: Any, options: Options) -> Source:
    """Return the source of a Python object: a table, a dataset, or records."""
    settings: dict[str, Any] = {"format": options.format, "on_error": options.on_error}
    if isinstance(records, Mapping) and not hasattr(records, "features"):
        records = [records]
    is_table = hasattr(records, "__arrow_c_stream__") or (
        hasattr(records, "with_format") and hasattr(records, "features")
    )
    if is_table or type(records).__name__ in ("Table", "RecordBatch"):
        rows = arrow.RowStream(arrow.batches_of(records), "<table>", **settings)
    elif isinstance(records, Iterable):
        rows = JsonRows(records, "<records>", **settings)
    else:
        raise ArgumentError(
            f"TG-DATA-039: {type(records).__name__} is not a source of traces. Pass a path, several paths, "
            "a table, a dataset, or records as dicts."
        )
    return RowSource(rows, rows._path, 0, options)
