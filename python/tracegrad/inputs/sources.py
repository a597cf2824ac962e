"""One source of records: a file that the core reads, or rows that Python has. Both give traces, or records to change.

A source is used one way: `plain` decodes what is there, `records` and `decode` let a caller change it between. Called
by `stream`.
"""

import itertools
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from tracegrad import _core, arrow_files, tables
from tracegrad.errors import ArgumentError, FormatError
from tracegrad.inputs import evals, remote
from tracegrad.inputs.options import Options
from tracegrad.inputs.places import Place, expand, kind_of
from tracegrad.read_report import ReadReport
from tracegrad.trace import Line, Traces, located, to_json

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
        before = self._pipe.breaks if isinstance(self._pipe, remote.Piece) else 0
        return max(self._reader.taken() - before, 0)

    def _end(self) -> None:
        # At the limit the rest of an address is still on its way, and nobody waits for it.
        if self._pipe and (self._limit is None or self.report.traces < self._limit):
            self._pipe.check()


def _pipe(place: Place) -> remote.Pipe | None:
    """What brings the bytes of what is not read as a whole file."""
    if place.kind == "address":
        return remote.Pipe(place.path)
    return remote.Piece(place.path, place.start, place.end, place.line) if place.end else None


class RowSource:
    """Rows of Arrow, or records that Python has already."""

    def __init__(self, rows: tables.RowStream, name: str, size: int, options: Options) -> None:
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


class JsonRows(tables.RowStream):
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
    if place.kind == "address" and kind_of(remote.head(place.path)) != "file":
        local = remote.local_copy(place.path, folder or tempfile.mkdtemp())
        return of_place(replace(expand([local])[0], size=place.size), options, folder)
    if place.kind in ("file", "stdin", "address"):
        return FileSource(place, options)
    return RowSource(_rows_of(place, options), place.name, place.size, options)


def _rows_of(place: Place, options: Options) -> tables.RowStream:
    told: dict[str, Any] = {"format": options.format, "on_error": options.on_error}
    if place.kind == "parquet":
        return arrow_files.ParquetStream(place.path, batch=options.batch, **told)
    if place.kind == "arrow":
        most = arrow_files.most_bytes(place.path)
        return tables.RowStream(arrow_files.arrow_batches(place.path), place.path, most=most, **told)
    if place.kind == "saved":
        files = arrow_files.saved_files(place.path)
        most = sum(map(arrow_files.most_bytes, files))
        batches = itertools.chain.from_iterable(map(arrow_files.arrow_batches, files))
        return tables.RowStream(batches, place.path, most=most, **told)
    return JsonRows(evals.samples(place.path), place.path, **told)


def of_object(given: Any, options: Options) -> Source:
    """The source of what Python has already: a table, a dataset, or records."""
    told: dict[str, Any] = {"format": options.format, "on_error": options.on_error}
    if isinstance(given, Mapping) and not hasattr(given, "features"):
        given = [given]
    is_table = hasattr(given, "__arrow_c_stream__") or (hasattr(given, "with_format") and hasattr(given, "features"))
    if is_table or type(given).__name__ in ("Table", "RecordBatch"):
        rows = tables.RowStream(tables.batches_of(given), "<table>", **told)
    elif isinstance(given, Iterable):
        rows = JsonRows(given, "<records>", **told)
    else:
        raise ArgumentError(
            f"{type(given).__name__} holds no traces. Nothing can be read from it. Give a path, several, a table, a "
            "dataset, or records as dicts."
        )
    return RowSource(rows, rows._path, 0, options)
