"""Fill the index in a background thread while the page is open, and continue as files grow.

Inputs are never changed: the index is in a folder of its own. Traces are added first, so that the list appears within a
second. Trigrams follow after every 10,000 traces.
"""

import hashlib
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from tracegrad import _core
from tracegrad._html import plural
from tracegrad.alignment.tokenizer import Tokenizer
from tracegrad.data import FieldMap, stream
from tracegrad.data.sources import Place
from tracegrad.data.trace import Traces
from tracegrad.errors import TracegradError, escape_terminal
from tracegrad.view import database
from tracegrad.view.features import Codes, Titles, rows_of
from tracegrad.view.inputs import Source
from tracegrad.view.place import IndexFolder
from tracegrad.view.tokens import TokenSets

_BATCH, _GRAMS = 500, 10_000
_LOOK_S = 1.0
_MOST_FRAME = 1 << 30
_MOST_TAIL = 64 << 20


class Indexer:
    """The index of some sources, filled in the background.

    Args:
        sources: the sources to read, in order.
        folder: folder of indexes. It is created, readable only by its owner.
        tokenizer: used for alignment and for the text of tokens, if given.
        sets: tokens of prepared shards and runs.
        map: where records store the fields of a trace.

    Attributes:
        path: path of the index.
        rows: number of indexed traces.
        done: whether everything that existed at the start is indexed. New traces may still arrive.
        aligned: whether level and mismatches come from `align`.
        problems: inputs that could not be read, one line each.
    """

    def __init__(
        self, sources: Sequence[Source], folder: Path, tokenizer: Tokenizer | None, sets: TokenSets, map: FieldMap
    ) -> None:
        self._sources, self._tokenizer, self._sets, self._map = list(sources), tokenizer, sets, map
        self._place = IndexFolder(folder, _key(sources, tokenizer, map))
        self.path = self._place.path
        self.problems: list[str] = []
        self.aligned = tokenizer is not None
        self._groups, self._titles, self._ends, self._places = Codes(), Titles(), {}, {}
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="index", daemon=True)
        self._database = database.connect(self.path, write=True)
        self.done = database.get_property(self._database, "done") == "1"
        self.rows = int(database.get_property(self._database, "rows") or 0)
        self._gramed = int(database.get_property(self._database, "grams") or 0)
        if self.done:
            sets.known.update(name for (name,) in self._database.execute("SELECT id FROM trace"))
            files = [source.path for source in self._sources if source.kind == "file" and _grows(source)]
            self._ends.update((path, path.stat().st_size) for path in files)

    def start(self) -> None:
        """Start indexing, and then watch for new traces."""
        self._thread.start()

    def close(self) -> None:
        """End the thread. An incomplete index is removed."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join()
        is_complete = database.get_property(self._database, "done") == "1" and self._gramed == self.rows
        self._database.close()
        self._place.close(keep=is_complete)

    def _run(self) -> None:
        try:
            if not self.done:
                for number, source in enumerate(self._sources):
                    self._reporting_errors(source.name, lambda n=number, s=source: self._read_all(n, s))
                self._all_grams()
                self.done = not self._stop.is_set()
                if self.done and not any(
                    source.kind in ("rollouts", "received", "token log") for source in self._sources
                ):
                    database.set_property(self._database, "done", 1)
            while not self._stop.wait(_LOOK_S):
                for number, source in enumerate(self._sources):
                    self._reporting_errors(source.name, lambda n=number, s=source: self._read_new(n, s))
                self._all_grams()
        except Exception as error:  # Report the error on the page instead of ending silently.
            self.problems.append(f"the index ended: {escape_terminal(f'{type(error).__name__}: {error}'[:300])}")
            self.done = True

    def _reporting_errors(self, name: str, step: Callable[[], None]) -> None:
        try:
            step()
        except TracegradError as error:
            line = f"{name}: {escape_terminal(str(error))[:300]}"
            if line not in self.problems:
                self.problems.append(line)

    def _read_all(self, number: int, source: Source) -> None:
        if source.kind in ("rollouts", "received", "shards", "token log"):
            self._read_new(number, source)
            return
        assert source.place is not None
        size = source.place.size
        self._read_places(number, source, source.place.path)
        self._ends[source.path] = size if self._map == FieldMap() and _grows(source) else -1

    def _read_places(self, number: int, source: Source, places: str | list[Place]) -> None:
        """Add the traces of files, or of parts of files."""
        batches = stream(places, map=self._map, batch=_BATCH, on_error="skip")
        for traces in batches:
            self._add(number, traces)
            if self._stop.is_set():
                return
        report = batches.read_report
        if report.bad:
            first = escape_terminal("; ".join(report.errors[:1]))[:300]
            self.problems.append(f"{source.name}: {plural(report.bad, 'bad record')} left out, the first: {first}")

    def _read_received(self, number: int, source: Source) -> None:
        """Add the lines at the ends of the files of a folder, which always end with complete lines."""
        places = []
        for path in sorted(source.path.glob("traces-*.jsonl")):
            start, size = self._ends.get(path, 0), path.stat().st_size
            start = 0 if size < start else start  # somebody removed lines
            if size > start:
                places.append(Place("file", str(path), size, start=start, end=size))
                self._ends[path] = size
        if places:
            self._read_places(number, source, places)

    def _read_new(self, number: int, source: Source) -> None:
        """Add what arrived since the last check."""
        if source.kind == "rollouts":
            for traces in self._rollouts(source.path):
                self._add(number, traces)
        elif source.kind == "received":
            self._read_received(number, source)
        elif source.kind in ("shards", "token log"):
            for row in self._sets.rows(source, number, self._groups):
                self._store(row)
        elif (end := self._ends.get(source.path, -1)) >= 0:
            lines, self._ends[source.path] = _tail(source.path, end)
            if lines:
                self._add(number, Traces.from_records(lines))

    def _rollouts(self, folder: Path) -> Iterator[Traces]:
        for path in sorted(folder.glob("*.jsonl.zst")):
            start = self._ends.get(path, 0)
            frames = _core.Frames(os.fspath(path), start, _MOST_FRAME)
            while not self._stop.is_set() and (frame := frames.next()) is not None:
                start = self._ends[path] = start + frame[1]
                yield Traces(frame[0])

    def _add(self, number: int, traces: Traces) -> None:
        first = self._places.get(number, 0)
        self._store(rows_of(traces, number, first, self._groups, self._tokenizer, self._titles))
        self._places[number] = first + len(traces)

    def _store(self, rows: list[database.Row]) -> None:
        if not rows:
            return
        database.add(self._database, self.rows, rows)
        self._sets.known.update(row.id for row in rows)
        self.rows += len(rows)
        database.set_property(self._database, "rows", self.rows)
        if self.rows - self._gramed >= _GRAMS:
            self._all_grams()

    def _all_grams(self) -> None:
        while self._gramed < self.rows and not self._stop.is_set():
            last = min(self._gramed + 2000, self.rows)
            database.add_grams(self._database, self._gramed, last)
            self._gramed = last
            database.set_property(self._database, "grams", last)


def _grows(source: Source) -> bool:
    """Return whether a file has plain lines of JSON, to which more may be appended: each a record of its own."""
    path = source.path
    if (source.place is not None and source.place.kind == "session") or not path.is_file() or path.stat().st_size == 0:
        return False
    with open(path, "rb") as file:
        if file.read(1) != b"{":
            return False
        file.seek(-1, os.SEEK_END)
        return file.read(1) == b"\n"


def _tail(path: Path, end: int) -> tuple[list[bytes], int]:
    """Return the complete lines after a byte offset, and the offset of their end."""
    if path.stat().st_size <= end:
        return [], end
    with open(path, "rb") as file:
        file.seek(end)
        data = file.read(_MOST_TAIL)
    complete = data.rfind(b"\n") + 1
    return [line for line in data[:complete].splitlines() if line.strip()], end + complete


def _key(sources: Sequence[Source], tokenizer: Tokenizer | None, map: FieldMap) -> str:
    """Return the key of an index, which depends on the current state of its sources."""
    parts = [f"{source.kind} {source.path.resolve()} {_stamp(source)}" for source in sources]
    text = "\n".join([str(database.FORMAT), *parts, str(map), "" if tokenizer is None else "aligned"])
    return hashlib.sha256(text.encode("utf-8", "surrogateescape")).hexdigest()[:16]


def _stamp(source: Source) -> str:
    if source.place is not None:
        return f"{source.place.kind} {source.place.size} {source.place.modified}"
    if not source.path.exists():
        return ""
    status = source.path.stat()
    return f"{status.st_size} {status.st_mtime_ns}"
