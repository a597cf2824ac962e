"""Find the inputs that a user names, and read records from them.

An input is a file, standard input, a folder, a glob or an fsspec address (s3://, gs://, az://, hf://, https://; extra
`cloud`). A `Source` gives decoded traces, or records that a caller changes before they are decoded.
"""

import glob
import itertools
import os
import stat
import tempfile
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tracegrad import _core
from tracegrad.data import arrow, arrow_files
from tracegrad.data.formats import eval_log
from tracegrad.data.json_path import in_numbers
from tracegrad.data.read_options import Options
from tracegrad.data.trace import Line, ReadReport, Traces, located, to_json
from tracegrad.errors import ArgumentError, FormatError, ReadError, redacted
from tracegrad.storage.files import refuse_special
from tracegrad.storage.remote import ADDRESS, system, unreadable

SUFFIXES = (".jsonl", ".json", ".ndjson", ".parquet", ".arrow", ".eval", ".traj", ".sse", ".feather", ".log", ".txt")
PACKED = (".gz", ".zst", ".zstd", ".gzip")
_FRAME = "import pandas as pd; pd.read_{}({!r}).to_json({!r}, orient='records', lines=True)"
_OTHERS = {
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
    """The suffix of a file, below that of its compression."""
    stem, last = os.path.splitext(path.lower())
    return os.path.splitext(stem)[1] if last in PACKED else last


def refuse_other(path: str) -> None:
    """Refuses what holds no JSON, by its suffix.

    Raises:
        ReadError: with the line of Python that converts it.
    """
    known = _OTHERS.get(suffix(path))
    if known is None:
        return
    what, reader = known
    line = _FRAME.format(reader, path, f"{os.path.splitext(path)[0]}.jsonl")
    raise ReadError(
        f"{path}: it is {what}. Rows of text hold no messages and no lists of logprobs, so they are not read. Convert "
        f"it, and look at what came of it: python -c {line!r}"
    )


BLOCK = 1 << 20


def listed(address: str) -> list[tuple[str, int]]:
    """The files that an address names, with their bytes: itself, those below a folder, or those of a pattern.

    Raises:
        ReadError: if there is none, or it cannot be asked.
        ArgumentError: if fsspec, or what it needs for this kind of address, is not installed.
    """
    with system(address) as (files, path):
        if any(mark in path for mark in "*?["):
            found = {name: told for name, told in files.glob(path, detail=True).items() if told["type"] == "file"}
        elif files.isdir(path):
            inside = files.find(path, detail=True)
            if f"{path.rstrip('/')}/manifest.json" in inside:
                raise ArgumentError(
                    f"{address} holds prepared shards. They are aligned already. Give that address to train alone, or "
                    "those of the traces."
                )
            found = {name: told for name, told in inside.items() if suffix(name) in SUFFIXES}
        else:
            found = {path: files.info(path)}
    if not found:
        raise ReadError(f"{address}: nothing there has such a name. There are no traces to read. Check the address.")
    for name in found:
        refuse_other(name)
    return [(files.unstrip_protocol(name), int(found[name].get("size") or 0)) for name in sorted(found, key=in_numbers)]


def local_copy(address: str, folder: str) -> str:
    """A whole file brought into a folder: what is read from its end (Parquet, Arrow, zip) needs all of it."""
    with system(address) as (files, path):
        target = os.path.join(folder, os.path.basename(path.split("?")[0].rstrip("/")) or "file")
        files.get_file(path, target)
    return target


def head(address: str, count: int = 8) -> bytes:
    """The first bytes of a file."""
    with system(address) as (files, path):
        return bytes(files.read_block(path, 0, count))


class Pipe:
    """The bytes of an address, from a path that any reader can open; `check` after the end says what went wrong."""

    def __init__(self, address: str) -> None:
        with system(address) as (files, path):
            self._begin(files.open(path, "rb", block_size=4 * BLOCK), address)

    def _begin(self, file: Any, name: str) -> None:
        self._file, self._name = file, name
        self._error: Exception | None = None
        self._out, self._in = os.pipe()
        self.path = f"/dev/fd/{self._out}"
        self._thread = threading.Thread(target=self._copy, name=f"read {redacted(name)[:40]}", daemon=True)
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
            pass  # its reader needs no more
        except Exception as error:
            self._error = error

    def opened(self) -> None:
        """Lets go of the end that is read, once another has opened it."""
        os.close(self._out)

    def check(self) -> None:
        """After the last byte.

        Raises:
            ReadError: if the address broke off.
        """
        self._thread.join(timeout=60)
        if self._error is not None:
            raise unreadable(self._name, self._error) from self._error


class Piece(Pipe):
    """Some bytes of a file of lines, behind as many line breaks as stand before them: so its lines have their numbers.

    Raises:
        ReadError: if it cannot be opened.
    """

    def __init__(self, path: str, start: int, end: int, line: int) -> None:
        self._left, self.breaks = end - start, line - 1
        try:
            file = open(path, "rb", buffering=0)  # noqa: SIM115 (the thread that copies closes it)
        except OSError as error:
            raise ReadError(f"{path}: cannot be read ({error.strerror}). Check that the file is there.") from error
        file.seek(start)
        self._begin(file, path)

    def _blocks(self) -> Iterator[bytes]:
        for done in range(0, self.breaks, BLOCK):
            yield b"\n" * min(BLOCK, self.breaks - done)
        while self._left:
            if not (block := self._file.read(min(BLOCK, self._left))):
                raise OSError("the file has become shorter while it was read")
            self._left -= len(block)
            yield block


MOST_PLACES = 1_000_000
_BEGINS = {b"PAR1": "parquet", b"ARROW1": "arrow", b"PK\x03\x04": "eval"}


@dataclass(frozen=True)
class Place:
    """One source of records.

    Args:
        kind: "file", "stdin", "parquet", "arrow", "saved" (a datasets folder), "eval" (an inspect-ai log) or "address".
        path: where it is.
        size: bytes on the disk, 0 where they are not known.
        modified: time of its last change in nanoseconds, 0 where it is not known.
        start, end: which of its bytes are read, of a file that is cut between records; all, where `end` is 0.
        line: on which these begin.
        number: from 1, among the places whose paths are the same without their secrets.
    """

    kind: str
    path: str
    size: int = 0
    modified: int = 0
    start: int = 0
    end: int = 0
    line: int = 1
    number: int = 1

    @property
    def name(self) -> str:
        """The path without secrets, as records and errors name it; no two places that are read together have one name.

        >>> [Place("address", f"https://host/a?sig={sig}", number=n).name for n, sig in enumerate("xy", 1)]
        ['https://host/a?sig=***', 'https://host/a?sig=*** (2)']
        """
        return redacted(self.path) + (f" ({self.number})" if self.number > 1 else "")


def expand(paths: Sequence[str | os.PathLike[str]]) -> list[Place]:
    """The places that names stand for, in the order of the names; what a folder or glob holds, by name, in the order of
    the numbers in them.

    Raises:
        ReadError: if there is nothing of that name, or nothing in it that could hold traces.
        ArgumentError: if standard input is named beside others.

    >>> expand(["-"])
    [Place(kind='stdin', path='-', size=0, modified=0, start=0, end=0, line=1, number=1)]
    """
    names = [os.fspath(path) for path in paths]
    if "-" in names and len(names) > 1:
        raise ArgumentError("standard input is named beside other inputs. Its end is not known. Read it alone.")
    places = [place for name in names for place in _of(name)]
    if len(places) > MOST_PLACES:
        raise ArgumentError(f"{len(places):,} files are named. At most {MOST_PLACES:,} are read. Name fewer.")
    return _numbered(places)


def _numbered(places: list[Place]) -> list[Place]:
    """The places, those that differ by secrets alone told apart."""
    paths: dict[str, dict[str, int]] = {}
    found = []
    for place in places:
        if not ADDRESS.match(place.path):
            found.append(place)
            continue
        alike = paths.setdefault(redacted(place.path), {})
        found.append(replace(place, number=alike.setdefault(place.path, len(alike) + 1)))
    return found


def filled(places: list[Place]) -> list[Place]:
    """The places that are not empty files; the first, where all are."""
    return [place for place in places if not _is_empty(place)] or places[:1]


def _is_empty(place: Place) -> bool:
    try:
        return os.path.isfile(place.path) and os.path.getsize(place.path) == 0
    except OSError:
        return False


def named(source: Any) -> tuple[list[Place], Any]:
    """The places that are named, or given, or else what holds records itself.

    Raises:
        ReadError, ArgumentError: as `expand`, or if nothing is named.
    """
    if isinstance(source, (str, os.PathLike)):
        return expand([source]), None
    if isinstance(source, Sequence) and source and all(isinstance(each, Place) for each in source):
        return list(source), None
    if isinstance(source, Sequence) and source and all(isinstance(each, (str, os.PathLike)) for each in source):
        return expand(source), None
    if isinstance(source, Sequence) and not source and not hasattr(source, "features"):
        raise ReadError("no input is named. There are no traces to read. Name a file.")
    return [], source


def _of(name: str) -> list[Place]:
    if name == "-":
        return [Place("stdin", name)]
    if ADDRESS.match(name):
        return [Place("address", path, size) for path, size in listed(name)]
    if os.path.isdir(name):
        return _folder(Path(name))
    if os.path.lexists(name):
        return [_file(name)]
    if glob.has_magic(name):
        found = sorted((path for path in glob.glob(name, recursive=True) if not _is_aside(path)), key=in_numbers)
        places = [place for path in found for place in (_folder(Path(path)) if os.path.isdir(path) else [_found(path)])]
        if places:
            return places
        raise ReadError(f"{name}: no file has such a name. There are no traces to read. Check the pattern.")
    return [Place("file", name)]  # the reader says what is wrong with it


def _folder(folder: Path) -> list[Place]:
    if (folder / "state.json").is_file() and (folder / "dataset_info.json").is_file():
        return [Place("saved", str(folder))]
    if (folder / "manifest.json").is_file():
        raise ArgumentError(
            f"{folder} holds prepared shards. They are aligned already. Give that folder to train alone, or the files "
            "of traces."
        )
    found, others = [], set()
    for root, folders, files in os.walk(folder):
        folders[:] = sorted((each for each in folders if not each.startswith(".")), key=in_numbers)
        for file in sorted(files, key=in_numbers):
            path = os.path.join(root, file)
            if file.startswith(".") or _is_aside(file):
                continue
            if suffix(file) in SUFFIXES:
                found.append(path)
            else:
                others.add(suffix(file) or file)
    if not found:
        held = f"it holds {', '.join(sorted(others)[:5])}" if others else "it is empty"
        raise ReadError(
            f"{folder}: {held}. There are no traces to read. Name the files themselves; of a folder are read: "
            f"{', '.join(SUFFIXES)}, also as .gz or .zst."
        )
    return [_found(path) for path in found]


def _found(path: str) -> Place:
    """A file that a folder or a pattern holds; a pipe is read only where its own name is given."""
    try:
        refuse_special(path)
    except OSError as error:
        raise ReadError(
            f"{path}: {error.strerror}. Of folders and patterns files alone are read. Remove it, or name the files."
        ) from error
    return _file(path)


def _is_aside(path: str) -> bool:
    """Whether a file is what a quarantine wrote."""
    return path.endswith((".quarantine.raw", ".quarantine.jsonl"))


def _file(path: str) -> Place:
    refuse_other(path)
    try:
        found = os.stat(path)
        size, modified = found.st_size, found.st_mtime_ns
        if not stat.S_ISREG(found.st_mode):
            return Place("file", path)
        with open(path, "rb") as file:
            head = file.read(8)
    except OSError:
        return Place("file", path)
    is_stream = head[:4] == b"\xff\xff\xff\xff" and suffix(path) in (".arrow", ".feather")
    return Place("arrow" if is_stream else kind_of(head), path, size, modified)


def kind_of(head: bytes) -> str:
    """The kind of a file that begins so."""
    return next((kind for begin, kind in _BEGINS.items() if head.startswith(begin)), "file")


RECORDS, RECORD_BYTES = 256, 8 << 20
"""How many records, or bytes of them, are changed at once."""

Refusal = tuple[str, str, str]
"""Why nothing can be made of a record: what was found, why it matters, what to do."""
Made = bytes | Refusal
Row = tuple[Line, bytes, Made]
"""The place and the bytes of a record, and what was made of it."""
Known = Callable[[Line, bytes], "list[Row] | None"]
"""What is made of a record at a place that the core does not read; None where nothing can be."""


class FileSource:
    """A file, a pipe, standard input or the bytes of an address, read by the core."""

    def __init__(self, place: Place, options: Options) -> None:
        self.name, self._batch, self._limit = place.name, options.batch, options.limit
        self._place, self._pipe = place, _pipe(place)
        path, name = (self._pipe.path, self.name) if self._pipe else (place.path, None)
        told = (options.on_error, options.aside, options.limit, options.max_record_bytes, options.chunk_bytes)
        self._options = options
        self._reader = _core.TraceReader(path, *told, options.format, name)
        if self._pipe:
            self._pipe.opened()
        self._patient = place.kind == "file" and place.size > 0
        self._first: list[tuple[Line, bytes]] = []

    def head(self) -> list[bytes]:
        """The first records, about 64 KiB; one of what may make a reader wait. What comes next has them again.

        Those of the whole file, where a piece of it is read.
        """
        if self._place.end:
            return FileSource(replace(self._place, start=0, end=0, line=1), self._options).head()
        if not self._first:
            self._first = self._reader.cut(16 if self._patient else 1, 1 << 16)
        return [text for _, text in self._first]

    def plain(self, known: Known) -> Iterator[Traces]:
        """The traces of the records as they are, and of a bad one what `known` makes of it."""
        try:
            if self._first:
                self._reader.put_back(self._first)
            while len(core := self._batch_of(known)):
                yield Traces(core)
        except FormatError:
            self._end()  # a record that was cut, because its address broke off
            raise
        self._end()

    def _batch_of(self, known: Known) -> _core.Traces:
        core, refused = self._reader.batch_asking(self._batch)
        parts, count = [core], len(core)
        while refused:
            if (rows := known(*refused)) is None:
                self._reader.settle_refused()
            else:
                parts.append(self._reader.decode(rows))
            core, refused = self._reader.batch_asking(max(self._batch - count, 1))
            parts.append(core)
            count = sum(map(len, parts))
        return _core.Traces.concatenate(parts) if len(parts) > 1 else core

    def records(self) -> Iterator[list[tuple[Line, bytes]]]:
        """Lines and bytes of the records; each list is to be given to `decode` before the next is asked for."""
        part = self._first or self._reader.cut(RECORDS, RECORD_BYTES)
        while part:
            yield part
            part = self._reader.cut(RECORDS, RECORD_BYTES)
        self._end()

    def finish(self) -> None:
        """After the last record was decoded: an empty file is an error, and what was put aside is whole."""
        self._reader.batch(1)

    def decode(self, made: list[Row]) -> Traces:
        """The traces of what was made of records; bad ones are settled as `on_error` says."""
        return Traces(self._reader.decode(made))

    @property
    def report(self) -> ReadReport:
        """Counts of what was read so far."""
        return ReadReport(**self._reader.report())

    @property
    def taken(self) -> int:
        """Bytes taken so far."""
        before = self._pipe.breaks if isinstance(self._pipe, Piece) else 0
        return max(self._reader.taken() - before, 0)

    def _end(self) -> None:
        # At the limit the rest of an address is still on its way, and nobody waits for it.
        if self._pipe and (self._limit is None or self.report.traces < self._limit):
            self._pipe.check()


def _pipe(place: Place) -> Pipe | None:
    """What brings the bytes of what is not read as a whole file."""
    if place.kind == "address":
        return Pipe(place.path)
    return Piece(place.path, place.start, place.end, place.line) if place.end else None


class RowSource:
    """Rows of Arrow, or records that Python has already."""

    def __init__(self, rows: arrow.RowStream, name: str, size: int, options: Options) -> None:
        self.name, self._rows, self._size, self._limit = name, rows, size, options.limit

    def head(self) -> list[bytes]:
        """The first record; it is read again by what is called next."""
        return self._rows.head()

    def plain(self, known: Known) -> Iterator[Traces]:
        """The traces of the rows as they are, and of a bad one what `known` makes of it."""
        self._rows.known = lambda line, raw: None if (rows := known(line, raw)) is None else self._decoded(rows)
        for part in self._rows:
            yield self._within(part)
            if self._limit == 0:
                return

    def records(self) -> Iterator[list[tuple[Line, bytes]]]:
        """Numbers and JSON of the rows."""
        yield from self._rows.records()

    def finish(self) -> None:
        """Nothing is left open."""

    def decode(self, made: list[Row]) -> Traces:
        """The traces of what was made of rows."""
        return self._within(self._decoded(made))

    def _within(self, traces: Traces) -> Traces:
        """As many as the limit leaves room for."""
        if self._limit is not None:
            traces = traces[: self._limit] if len(traces) > self._limit else traces
            self._limit -= len(traces)
        return traces

    def _decoded(self, made: list[Row]) -> Traces:
        good = []
        for line, _, what in made:
            if isinstance(what, bytes):
                good.append((line, what))
            else:
                self._rows.refuse(f"{located(self.name, line)}: {said(what)}", "wrong_type")
        return self._rows.decode(good) if good else Traces(_core.Traces.concatenate([]))

    @property
    def report(self) -> ReadReport:
        """Counts of what was read so far."""
        return self._rows.read_report

    @property
    def taken(self) -> int:
        """Bytes taken so far, as far as they are known: of a file its size, once a row of it was read."""
        return self._size if self._rows.read_report.records else 0


Source = FileSource | RowSource


def decoder(empty: str, name: str, options: Options) -> _core.TraceReader:
    """What decodes records of `name` that were made of several, and settles bad ones; `empty` is an empty file."""
    told = (options.on_error, options.aside, None, options.max_record_bytes, options.chunk_bytes)
    return _core.TraceReader(empty, *told, options.format, name)


def said(refusal: Refusal) -> str:
    """A refusal as an error says it."""
    return " ".join(f"{part.rstrip('.')}." for part in refusal)


class JsonRows(arrow.RowStream):
    """Records that are dicts, objects with `model_dump`, or JSON as bytes."""

    def __init__(self, records: Iterable[Any], name: str, *, format: str, on_error: str) -> None:
        super().__init__((), name, format=format, on_error=on_error)
        self._given = iter(records)

    def head(self) -> list[bytes]:
        """The first record as JSON, none where there is none; it is read again."""
        first = list(itertools.islice(self._given, 1))
        self._given = itertools.chain(first, self._given)
        return [to_json(record, 1) for record in first]

    def records(self) -> Iterator[list[tuple[Line, bytes]]]:
        """The records as JSON with their numbers, from 1."""
        numbered = enumerate(self._given, 1)
        while part := list(itertools.islice(numbered, RECORDS)):
            yield [(number, to_json(record, number)) for number, record in part]

    def _all(self) -> Iterator[Traces]:
        for part in self.records():
            yield self.decode(part)


def of_place(place: Place, options: Options, folder: str | None = None) -> Source:
    """The source of a place.

    Args:
        folder: takes copies of what must be whole before it can be read.

    Raises:
        ReadError, FormatError: if it cannot be read.
        ArgumentError: if what it needs is not installed, or `on_error` is not for rows.
    """
    if place.kind == "address" and kind_of(head(place.path)) != "file":
        local = local_copy(place.path, folder or tempfile.mkdtemp())
        return of_place(replace(expand([local])[0], size=place.size), options, folder)
    if place.kind in ("file", "stdin", "address"):
        return FileSource(place, options)
    return RowSource(_rows_of(place, options), place.name, place.size, options)


def _rows_of(place: Place, options: Options) -> arrow.RowStream:
    told: dict[str, Any] = {"format": options.format, "on_error": options.on_error}
    if place.kind == "parquet":
        return arrow_files.ParquetStream(place.path, batch=options.batch, **told)
    if place.kind == "arrow":
        most = arrow_files.most_bytes(place.path)
        return arrow.RowStream(arrow_files.arrow_batches(place.path), place.path, most=most, **told)
    if place.kind == "saved":
        files = arrow_files.saved_files(place.path)
        most = sum(map(arrow_files.most_bytes, files))
        batches = itertools.chain.from_iterable(map(arrow_files.arrow_batches, files))
        return arrow.RowStream(batches, place.path, most=most, **told)
    return JsonRows(eval_log.samples(place.path), place.path, **told)


def of_object(given: Any, options: Options) -> Source:
    """The source of what Python has already: a table, a dataset, or records."""
    told: dict[str, Any] = {"format": options.format, "on_error": options.on_error}
    if isinstance(given, Mapping) and not hasattr(given, "features"):
        given = [given]
    is_table = hasattr(given, "__arrow_c_stream__") or (hasattr(given, "with_format") and hasattr(given, "features"))
    if is_table or type(given).__name__ in ("Table", "RecordBatch"):
        rows = arrow.RowStream(arrow.batches_of(given), "<table>", **told)
    elif isinstance(given, Iterable):
        rows = JsonRows(given, "<records>", **told)
    else:
        raise ArgumentError(
            f"{type(given).__name__} holds no traces. Nothing can be read from it. Give a path, several, a table, a "
            "dataset, or records as dicts."
        )
    return RowSource(rows, rows._path, 0, options)
