"""Read traces from files, folders, addresses and data sets: `read`, `stream`, `InputStream`.

Records in a form that the core reads, without a field map, go through the core as they are. Others are parsed here,
get what the field map finds in them, and are decoded from there. Also the counts of what was mapped, joined,
converted and left out, and the progress line (not tqdm: reading needs numpy alone).
"""

import os
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import reduce
from typing import Any, TextIO

from tracegrad import _core
from tracegrad.config import Map
from tracegrad.data import chat, formats, sources
from tracegrad.data.field_map import Mapper, Unfit, add, loads, prompt_of
from tracegrad.data.formats.registry import Again
from tracegrad.data.read_options import CHUNK_BYTES, MAX_RECORD_BYTES, Options
from tracegrad.data.sessions import Sessions
from tracegrad.data.sources import Place, Row, Source, filled, named
from tracegrad.data.trace import Line, ReadReport, Traces, summed
from tracegrad.errors import ArgumentError, ReadError, TracegradError
from tracegrad.storage import files

_UNITS = ("bytes", "kB", "MB", "GB", "TB")
EVERY_S, PLAIN_EVERY_S = 0.2, 30.0


@dataclass(frozen=True)
class Progress:
    """What was read so far.

    Args:
        taken, total: bytes of the inputs; a total of 0 is not known.
        records: read so far.
        seconds: since reading began.
        done: whether it is the last word.
    """

    taken: int
    total: int
    records: int
    seconds: float
    done: bool = False

    def line(self) -> str:
        """The same in words.

        >>> Progress(500_000_000, 1_000_000_000, 12_000, 10.0).line()
        'read     500.0 MB of 1.0 GB (50%), 12,000 records, 50.0 MB a second, 10 s left'
        """
        rate = self.taken / self.seconds if self.seconds > 0 else 0.0
        share = f" of {size(self.total)} ({min(self.taken / self.total, 1):.0%})" if self.total else ""
        left = ""
        if self.total and rate and not self.done:
            left = f", {max(self.total - self.taken, 0) / rate:.0f} s left"
        return f"read     {size(self.taken)}{share}, {self.records:,} records, {size(rate)} a second{left}"


class Bar:
    """Says progress on a stream, not more often than anybody can read; `close` says the last word."""

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = stream or sys.stderr
        self._terminal = self._stream.isatty()
        self._every = EVERY_S if self._terminal else PLAIN_EVERY_S
        self._next = time.monotonic() + (1.0 if self._terminal else self._every)
        self._width = 0

    def __call__(self, progress: Progress) -> None:
        """Says it, if it is time."""
        now = time.monotonic()
        if progress.done:
            if self._width:
                self._write("\r" + " " * self._width + "\r")
            return
        if now < self._next:
            return
        self._next = now + self._every
        line = progress.line()
        if self._terminal:
            self._write("\r" + line.ljust(self._width))
            self._width = max(self._width, len(line))
        else:
            self._write(line + "\n")

    def _write(self, text: str) -> None:
        self._stream.write(text)
        self._stream.flush()


def size(count: float) -> str:
    """Bytes in the unit that suits them.

    >>> size(999), size(1_500_000)
    ('999 bytes', '1.5 MB')
    """
    unit = 0
    while count >= 1000 and unit < len(_UNITS) - 1:
        count, unit = count / 1000, unit + 1
    return f"{count:.0f} {_UNITS[unit]}" if unit == 0 else f"{count:.1f} {_UNITS[unit]}"


@dataclass
class Tally:
    """Counts of one stream.

    Args:
        empty: empty files, which are left out.
        bare: files without a record of a call, and `first_bare`, the error of the first of them.
        promptless: traces without a prompt, where groups are by prompt.
        adapted: records that adapters took, by what they are, and `callless`, those that hold no call.
        mapper: what the mapping found: the fields of `Mapper` but `told`.
        sessions: lines about conversations that were joined.
    """

    empty: int = 0
    bare: int = 0
    first_bare: str = ""
    promptless: int = 0
    adapted: dict[str, int] = field(default_factory=dict)
    callless: dict[str, int] = field(default_factory=dict)
    mapper: dict[str, Any] = field(default_factory=dict)
    sessions: list[str] = field(default_factory=list)

    def as_dict(self) -> dict[str, Any]:
        """The same as JSON has it."""
        return asdict(self)

    def check(self, told: Map) -> None:
        """Refuses a mapping of which a path matches nothing.

        Raises:
            ArgumentError: with the nearest path that there is.
        """
        _mapper(told, [self.mapper]).check()

    def lines(self, told: Map, report: ReadReport, blank: str) -> list[str]:
        """The same for a terminal; `blank` is what the reader says of a file without records."""
        count = report.reasons.get("failed_call", 0)
        calls = "1 call failed: no answer in it" if count == 1 else f"{count:,} calls failed: no answer in them"
        adapted = formats.Adapted()
        adapted.counts, adapted.empty = Counter(self.adapted), Counter(self.callless)
        first = self.first_bare.partition(f": {blank}")[0]
        alone = f"map      group: {self.promptless:,} traces have no prompt and are alone"
        return [
            *([f"         {self.empty:,} empty files are left out"] if self.empty else []),
            *(
                [f"         {self.bare:,} files without a record of a call are left out, {first} first"]
                if self.bare
                else []
            ),
            *adapted.lines(),
            *([f"         {calls}"] if count else []),
            *_mapper(told, [self.mapper]).lines(),
            *self.sessions,
            *([alone] if self.promptless else []),
        ]


def state(mapper: Mapper) -> dict[str, Any]:
    """What a mapper has found, as JSON has it."""
    return {
        "seen": {name: dict(kinds) for name, kinds in mapper.seen.items()},
        "records": mapper.records,
        "bounds": [mapper.low, mapper.high] if mapper.low <= mapper.high else [],
        "names": sorted(mapper.names),
        "words": mapper.words,
        "paths": list(mapper.paths),
    }


def _mapper(told: Map, states: Sequence[dict[str, Any]]) -> Mapper:
    """One mapper that has found what several have."""
    out = Mapper(told)
    for each in states:
        for name, kinds in each.get("seen", {}).items():
            out.seen.setdefault(name, Counter()).update(kinds)
        out.records += each.get("records", 0)
        for bound in each.get("bounds", ()):
            out.low, out.high = min(out.low, bound), max(out.high, bound)
        out.names.update(each.get("names", ()))
        out.words = {**out.words, **each.get("words", {})}
        out.paths |= dict.fromkeys(each.get("paths", ()))
    return out


def added(tallies: Sequence[Tally], told: Map) -> Tally:
    """The counts of several streams together, in their order."""
    out = Tally(mapper=state(_mapper(told, [each.mapper for each in tallies])))
    for each in tallies:
        out.empty, out.bare = out.empty + each.empty, out.bare + each.bare
        out.promptless += each.promptless
        out.first_bare = out.first_bare or each.first_bare
        out.adapted = _plus(out.adapted, each.adapted)
        out.callless = _plus(out.callless, each.callless)
        out.sessions += each.sessions
    return out


def _plus(one: dict[str, int], other: dict[str, int]) -> dict[str, int]:
    return {name: one.get(name, 0) + other.get(name, 0) for name in [*one, *other]}


Path = str | os.PathLike[str]
BLANK = "there is no record in it"
"""What the core says of a file whose records were none, or were none of a call."""


def read(source: Any, **options: Any) -> Traces:
    """Reads all traces of what is named: files, folders, patterns, addresses, tables, datasets, records.

    Args:
        source: a path, folder, pattern or address (s3://...), or several; "-" for standard input; an Arrow table, a
            `datasets.Dataset`, or records as dicts. Files hold JSONL, a JSON array, pretty-printed objects, events,
            Parquet or Arrow; plain, gzip or zstd.
        options: as for `stream`, but `batch`.

    Raises:
        ReadError: if something cannot be read, is empty, or, with "raise", breaks off.
        FormatError: if a record is bad, with "raise".

    >>> messages = [{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "4"}]
    >>> read([{"messages": messages, "metadata": {"score": "1"}}], map={"reward": "metadata.score"}).reward.tolist()
    [1.0]
    """
    return together(stream(source, **options))


def stream(
    source: Any,
    *,
    map: Map | Mapping[str, str] | None = None,
    batch: int = 1024,
    format: str = "auto",
    on_error: str = "raise",
    quarantine: Path | None = None,
    limit: int | None = None,
    max_record_bytes: int = MAX_RECORD_BYTES,
    chunk_bytes: int = CHUNK_BYTES,
    progress: Callable[[Progress], None] | None = None,
) -> "InputStream":
    """Reads inputs of any size in bounded memory.

    Args:
        source: as for `read`.
        map: where the records hold what a trace needs, as `Map` or its fields: {"reward": "metadata.score"}.
        batch: traces in each `Traces`, about.
        format: "auto" tells each record's form by its structure, and `read_report.formats` says which and why; or the
            name of one form of docs/trace-format.md, which every record must then have.
        on_error: "raise", "skip" (counted in `read_report`), or "quarantine": bad records go to
            `PREFIX.quarantine.raw` byte for byte and, with file, line and reason, to `PREFIX.quarantine.jsonl`.
        quarantine: PREFIX; the path itself by default. Of several files the second has PREFIX-1, and so on.
        limit: stop after so many traces.
        max_record_bytes: a longer record is bad.
        chunk_bytes: bytes of records parsed at once; the result does not depend on it.
        progress: called with how far it is.
    """
    options = Options(batch, format, on_error, quarantine, limit, max_record_bytes, chunk_bytes)
    told = Map(**map) if isinstance(map, Mapping) else map or Map()
    if told.session and format != "auto":
        raise ArgumentError(
            f"format is {format!r} and sessions are joined. What is joined is a call log. Leave format out."
        )
    return InputStream(source, told, options, progress)


class InputStream(Iterator[Traces]):
    """Batches of traces as they are read; `read_report` counts what was read so far, `lines` says what was mapped."""

    def __init__(
        self,
        source: Any,
        told: Map,
        options: Options,
        progress: Callable[[Progress], None] | None = None,
        *,
        is_part: bool = False,
    ) -> None:
        self._is_part = is_part
        self._told, self._options, self._progress = told, options, progress
        self._done = ReadReport()
        self._taken = 0
        self._stopped = False
        self._began = time.monotonic()
        self._empty = self._promptless = 0
        self._bare: list[ReadError] = []
        self._mapper = Mapper(told)
        self._adapted = formats.Adapted()
        self._sessions: Sessions | None = None
        self._again: Again | None = None
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._places, self._given = named(source)
        kept = filled(self._places)
        self._empty, self._places = len(self._places) - len(kept), kept
        self._check_aside()
        self._total = sum(place.size for place in kept)
        # What cannot be read is said at once, not with the first batch.
        self._source: Source | None = self._open(0)
        self._traces = self._all()

    def __next__(self) -> Traces:
        if self._stopped:
            raise ArgumentError(
                "the stream was stopped while it was read. Traces that it had read are gone, and the next ones would "
                "follow as if there were none. Open it again."
            )
        try:
            for traces in self._traces:
                self._say()
                if len(traces):
                    return traces
        except TracegradError:
            raise
        except BaseException:
            self._stopped = True
            raise
        self._say(done=True)
        raise StopIteration

    @property
    def read_report(self) -> ReadReport:
        """Counts of what was read so far."""
        if self._source is None:
            return self._done
        again = [self._again.report] if self._again else []
        return reduce(summed, [self._done, self._source.report, *again])

    def lines(self) -> list[str]:
        """What was mapped, joined and converted, for a terminal."""
        return self.tally().lines(self._told, self.read_report, BLANK)

    def tally(self) -> Tally:
        """The same as counts."""
        return Tally(
            empty=self._empty,
            bare=len(self._bare),
            first_bare=str(self._bare[0]) if self._bare else "",
            promptless=self._promptless,
            adapted=dict(self._adapted.counts),
            callless=dict(self._adapted.empty),
            mapper=state(self._mapper),
            sessions=self._sessions.lines() if self._sessions else [],
        )

    def _all(self) -> Iterator[Traces]:
        for number in range(max(len(self._places), 1)):
            if number:
                self._source = self._open(number)
            assert self._source is not None
            try:
                yield from self._of(self._source, number)
            except ReadError as error:
                if BLANK not in str(error):
                    raise
                self._bare.append(error)
            self._taken += self._source.taken
            self._done = self.read_report
            self._source = self._again = None
            if self._options.limit is not None and self._done.traces >= self._options.limit:
                break
        if self._bare and len(self._bare) == len(self._places) and not self._is_part:
            raise self._bare[0]
        if not self._is_part:
            self._mapper.check()
        if self._sessions is not None:
            yield from self._joined(self._sessions)
        if self._folder is not None:
            self._folder.cleanup()

    def _of(self, source: Source, number: int) -> Iterator[Traces]:
        head = source.head()
        adapts = self._options.format == "auto" and formats.needed(head, source.name)
        if not self._told.told() and not adapts:
            yield from self._plain(source, number)
            return
        gather = formats.Gather()
        self._adapted.roots = self._options.format == "auto" and formats.only_roots(head)
        for part in source.records():
            rows = (row for line, raw in part for row in self._made(number, line, raw, gather, source.name))
            yield from self._decoded(source, rows)
        yield from self._decoded(source, (row for whole in gather.rest() for row in self._mapped(number, *whole)))
        if self._sessions is None:
            source.finish()

    def _plain(self, source: Source, number: int) -> Iterator[Traces]:
        """The traces of records as they are; those whose answer may stand beside them are looked at one by one."""
        unused, left, adapts = 0, self._options.limit, self._options.format == "auto"
        left = None if left is None else left - self._done.traces
        for part in source.plain(lambda line, raw: self._adapted.rows(source.name, line, raw) if adapts else None):
            now = source.report.unused_choices
            odd = [*range(len(part))] if now > unused else part.core.open(formats.ANSWERS)
            unused = now
            if odd and adapts:
                self._again = self._again or Again(self._adapted, lambda: self._decoder(number, "-again"))
                part = self._again.traces(part, odd)
                part = part if left is None else part[:left]
            left = None if left is None else left - len(part)
            yield part

    def _decoded(self, source: Source, made: Iterable[Row]) -> Iterator[Traces]:
        """The traces of what is made of a few records, of which there may be much: a few bytes at once."""
        part: list[Row] = []
        held = 0
        for row in made:
            part.append(row)
            held += _size(row)
            if held > sources.RECORD_BYTES:
                yield self._grouped(source.decode(part))
                part, held = [], 0
        if part:
            yield self._grouped(source.decode(part))

    def _made(self, number: int, line: Line, raw: bytes, gather: formats.Gather, name: str) -> list[Row]:
        """The records to decode in place of one of the file; the refusal of one of which an adapter makes none."""
        record = loads(raw)
        if formats.is_chunk(record):
            return [row for whole in gather.take(line, raw, record) for row in self._mapped(number, *whole)]
        try:
            found = self._adapted.adapt(record, len(raw), name, line)
        except Unfit as unfit:
            return [(line, raw, unfit.args[0])]
        session = self._told.session
        if found is None and session and formats.is_verdict(record) and chat.within(record, session) is not None:
            found = []
        if found is None:
            return self._mapped(number, line, raw, raw, record)
        if not found and session:
            return self._mapped(number, line, raw, raw, record, silent=True)
        rows, origin = [], raw
        for place, text, each in found:
            # A failed call is refused where it stands, and says nothing of its conversation.
            is_failed = formats.is_failed(each)
            rows += [(place, origin, text)] if is_failed else self._mapped(number, place, origin, text, each, record)
            # Its own bytes are held and counted once, but where each bad one of them is put aside with them.
            origin = raw if self._options.on_error == "quarantine" else b""
        return rows

    def _mapped(
        self, number: int, line: Line, origin: bytes, raw: bytes, record: Any, outer: Any = None, silent: bool = False
    ) -> list[Row]:
        """With the header that the mapping finds in the record, or else in the one that it was made of."""
        if not isinstance(record, dict):
            return [(line, origin, raw)]
        whole = {**outer, **record} if isinstance(outer, dict) else record
        try:
            header = self._mapper.header(whole)
            if not self._told.session:
                return [(line, origin, add(raw, header))]
            if self._sessions is None:
                self._sessions = Sessions(self._told, [place.path for place in self._places])
            self._sessions.take(number, line, raw, whole, header, silent=silent)
        except Unfit as unfit:
            return [(line, origin, unfit.args[0])]
        return []

    def _joined(self, sessions: Sessions) -> Iterator[Traces]:
        """The conversations, decoded as if they stood where their first calls do."""
        decoders: dict[int, Any] = {}
        made = 0
        for place, row in sessions.joined():
            if place not in decoders:
                decoders[place] = self._decoder(place, "-joined")
            core = decoders[place].decode([row])
            made += len(core)
            yield self._grouped(Traces(core))
            if self._options.limit is not None and made >= self._options.limit:
                break
        for decoder in decoders.values():
            self._done = summed(self._done, replace(ReadReport(**decoder.report()), bytes=0))
        sessions.close()

    def _decoder(self, number: int, end: str) -> Any:
        """What decodes records of a place that were made of others; bad ones go aside under a name of their own."""
        name = self._places[number].path if self._places else "<records>"
        with tempfile.NamedTemporaryFile(prefix="tracegrad-empty-") as empty:
            return sources.decoder(empty.name, name, replace(self._options, quarantine=self._aside(number, end)))

    def _grouped(self, traces: Traces) -> Traces:
        """With groups by their prompts, where that is told."""
        if self._told.group != "prompt" or not len(traces):
            return traces
        parts = []
        for trace in traces:
            file, line = trace.core.location(trace.index)
            prompt = prompt_of(trace)
            self._promptless += prompt is None
            text = add(trace.record, {"group": prompt})
            core, _ = _core.Traces.decode([text], file or "<records>", line or 1, self._options.format)
            parts.append(core)
        return Traces(_core.Traces.concatenate(parts))

    def _open(self, number: int) -> Source:
        limit = self._options.limit
        if self._told.session:
            limit = None
        elif limit is not None:
            limit = max(limit - self._done.traces, 0)
        options = replace(self._options, limit=limit, quarantine=self._aside(number))
        if not self._places:
            return sources.of_object(self._given, options)
        place = self._places[number]
        if place.kind == "address" and self._folder is None:
            self._folder = tempfile.TemporaryDirectory(prefix="tracegrad-")
        return sources.of_place(place, options, self._folder.name if self._folder else None)

    def _check_aside(self) -> None:
        """Refuses a quarantine that is one of the inputs."""
        if self._options.on_error == "quarantine":
            prefix = self._options.aside
            names = (
                f"{prefix}-{number}" if prefix and number else prefix or place.path
                for number, place in enumerate(self._places)
            )
            made = (f"{name}.quarantine.{ending}" for name in names for ending in ("raw", "jsonl"))
            files.check_not_read(made, (place.path for place in self._places), "the quarantine")

    def _aside(self, number: int, end: str = "") -> str | None:
        """The prefix of a place's quarantine."""
        if self._options.on_error != "quarantine":
            return None
        if (prefix := self._options.aside) is not None:
            return (f"{prefix}-{number}" if number else prefix) + end
        place = self._places[number] if self._places else None
        if place is None or place.kind != "file":
            what = "standard input" if place is not None and place.kind == "stdin" else "it"
            raise ArgumentError(f"{what} has no name for its quarantine. Pass quarantine=PREFIX.")
        return place.path + end

    def _say(self, done: bool = False) -> None:
        if self._progress is not None:
            taken = self._taken + (self._source.taken if self._source else 0)
            spent = time.monotonic() - self._began
            self._progress(Progress(taken, self._total, self.read_report.records, spent, done))


def _size(row: Row) -> int:
    """Bytes that a row holds, and that its decoding copies."""
    return len(row[1]) + (len(row[2]) if isinstance(row[2], bytes) else 0)


def of_part(
    places: list[Place],
    told: Map,
    options: Options,
    progress: Callable[[Progress], None] | None = None,
) -> InputStream:
    """A stream of some places of an input, of which all may be without a record of a call."""
    return InputStream(places, told, options, progress, is_part=True)


def together(parts: InputStream) -> Traces:
    """All that a stream gives."""
    return Traces(_core.Traces.concatenate([part.core for part in parts]), parts.read_report)
