"""Read traces from files, folders, addresses and data sets: `read`, `stream`, `InputStream`.

The Rust core decodes records directly if it reads their form and there is no field map. Other records are parsed in
Python, get the values of the field map, and are decoded afterwards. The module also counts the records that were
mapped, joined, converted and left out, and prints the progress line. It does not use tqdm: reading requires numpy only.
"""

import os
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import reduce
from typing import Any, TextIO

from tracegrad import _core
from tracegrad.config import FieldMap
from tracegrad.data import chat, formats, sources
from tracegrad.data.batches import Batches, is_batch_line
from tracegrad.data.field_map import BadValueError, Mapper, append_fields, parse_record, prompt_group
from tracegrad.data.formats.registry import RetryWithAdapters
from tracegrad.data.read_options import CHUNK_BYTES, MAX_RECORD_BYTES, Options
from tracegrad.data.sessions import Sessions
from tracegrad.data.sources import Place, Row, Source, resolve, without_empty_files
from tracegrad.data.span_sessions import SpanSessions
from tracegrad.data.trace import Line, ReadReport, Trace, Traces, add_reports
from tracegrad.errors import CODE, ArgumentError, ReadError, TracegradError
from tracegrad.progress import Heartbeat, ProgressPrinter, progress_line
from tracegrad.storage import files

_UNITS = ("bytes", "kB", "MB", "GB", "TB")


@dataclass(frozen=True)
class Progress:
    """Progress of a read.

    Args:
        bytes_read, total_bytes: bytes consumed and bytes of all inputs. A total of 0 means unknown.
        records: number of records read so far.
        seconds: seconds since the start.
        done: whether the read is complete.
    """

    bytes_read: int
    total_bytes: int
    records: int
    seconds: float
    done: bool = False

    def line(self, seconds: float | None = None) -> str:
        """Return the progress as a line for the terminal.

        Args:
            seconds: time since the start, if it is later than that of the counts.

        >>> Progress(500_000_000, 1_000_000_000, 12_000, 10.0).line()
        'reading  50 %  12,000 records  500.0 MB  10 s left'
        """
        return progress_line(
            "reading",
            [f"{self.records:,} records", size(self.bytes_read)],
            seconds=self.seconds if seconds is None else max(seconds, self.seconds),
            done=self.bytes_read,
            total=self.total_bytes,
        )


class ProgressBar:
    """Progress line of a read on a stream: every 0.2 s on a terminal, every ten seconds elsewhere.

    The last call, with `done` set, clears the line. In a `with` block, lines also come while no batch ends, for example
    because a batch is aligned.

    Args:
        stream: default standard error.
        clock: returns seconds.
    """

    def __init__(self, stream: TextIO | None = None, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._printer, self._clock = ProgressPrinter(stream=stream, clock=clock), clock
        self._last: tuple[Progress, float] | None = None
        self._heartbeat: Heartbeat | None = None

    def __call__(self, progress: Progress) -> None:
        """Print the progress, unless the last line is too recent."""
        if progress.done:
            self._last = None
            self._printer.clear()
        else:
            self._last = progress, self._clock()
            self.repeat()

    def repeat(self) -> None:
        """Print the last progress again, with the time that has passed since, unless the last line is too recent."""
        if (last := self._last) is not None:
            progress, at = last
            self._printer.tick(lambda _: progress.line(progress.seconds + self._clock() - at))

    def __enter__(self) -> "ProgressBar":
        self._heartbeat = Heartbeat(self.repeat).__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        if self._heartbeat is not None:
            self._heartbeat.__exit__(*error)
        self._printer.clear()


def size(count: float) -> str:
    """Format a number of bytes in a readable unit.

    >>> size(999), size(1_500_000)
    ('999 bytes', '1.5 MB')
    """
    unit = 0
    while count >= 1000 and unit < len(_UNITS) - 1:
        count, unit = count / 1000, unit + 1
    return f"{count:.0f} {_UNITS[unit]}" if unit == 0 else f"{count:.1f} {_UNITS[unit]}"


@dataclass
class StreamCounts:
    """Counts of one stream.

    Args:
        empty: number of empty files, which are left out.
        hidden: names of files of folders that are left out because they begin with a dot.
        files_without_calls: number of files without a record of a call.
        first_bare: error of the first of these files.
        traces_without_prompt: number of traces without a prompt, if traces are grouped by prompt.
        adapted: number of records that adapters converted, by adapter.
        records_without_call: number of these that contain no call, by adapter.
        left_out: number of parts of records that are in no trace, by "adapter: reason".
        mapper: statistics of the field map: the fields of `Mapper` except `told`.
        sessions: lines about joined conversations.
    """

    empty: int = 0
    hidden: list[str] = field(default_factory=list)
    files_without_calls: int = 0
    first_bare: str | None = None
    traces_without_prompt: int = 0
    adapted: dict[str, int] = field(default_factory=dict)
    records_without_call: dict[str, int] = field(default_factory=dict)
    left_out: dict[str, int] = field(default_factory=dict)
    mapper: dict[str, Any] = field(default_factory=dict)
    sessions: list[str] = field(default_factory=list)

    def as_dict(self) -> dict[str, Any]:
        """Return the counts as a JSON-serializable dict."""
        return asdict(self)

    def check(self, field_map: FieldMap) -> None:
        """Check that every path of the field map matched a record.

        Raises:
            ArgumentError: if a path matched nothing; the message names the nearest existing path.
        """
        _mapper(field_map, [self.mapper]).check()

    def lines(self, field_map: FieldMap, report: ReadReport, blank: str) -> list[str]:
        """Return the counts as lines for a terminal.

        Args:
            field_map: the field map.
            report: statistics of the read.
            blank: the core's message for a file without records, which is removed from the first error.
        """
        count = report.reasons.get("failed_call", 0)
        calls = "1 call failed: no answer in it" if count == 1 else f"{count:,} calls failed: no answer in them"
        converted = formats.RecordConverter()
        converted.counts, converted.empty = Counter(self.adapted), Counter(self.records_without_call)
        converted.left_out = Counter(self.left_out)
        first_error = CODE.sub("", self.first_bare or "").partition(f": {blank}")[0]
        promptless_line = f"map      group: {self.traces_without_prompt:,} traces have no prompt and are alone"
        return [
            *([f"         {self.empty:,} empty files are left out"] if self.empty else []),
            *([f"         {_hidden(self.hidden)}"] if self.hidden else []),
            *(
                [
                    f"         {self.files_without_calls:,} files without a record of a call are left out, "
                    f"{first_error} first"
                ]
                if self.files_without_calls
                else []
            ),
            *converted.lines(),
            *([f"         {calls}"] if count else []),
            *_mapper(field_map, [self.mapper]).lines(),
            *self.sessions,
            *([promptless_line] if self.traces_without_prompt else []),
        ]


def _hidden(names: Sequence[str]) -> str:
    """Describe the hidden files of folders."""
    shown = ", ".join(sorted({os.path.basename(name) for name in names})[:3])
    return f"{len(names):,} hidden files are left out ({shown}): name those that you want to read"


def mapper_counts(mapper: Mapper) -> dict[str, Any]:
    """Return the statistics of a mapper as a JSON-serializable dict."""
    return {
        "seen": {name: dict(kinds) for name, kinds in mapper.kind_counts.items()},
        "records": mapper.records,
        "bounds": [mapper.low, mapper.high] if mapper.low <= mapper.high else [],
        "names": sorted(mapper.names),
        "words": mapper.word_rewards,
        "paths": list(mapper.paths),
    }


def _mapper(field_map: FieldMap, statistics: Sequence[dict[str, Any]]) -> Mapper:
    """Merge the statistics of several mappers into a new one."""
    merged = Mapper(field_map)
    for counts in statistics:
        for name, kinds in counts.get("seen", {}).items():
            merged.kind_counts.setdefault(name, Counter()).update(kinds)
        merged.records += counts.get("records", 0)
        for bound in counts.get("bounds", ()):
            merged.low, merged.high = min(merged.low, bound), max(merged.high, bound)
        merged.names.update(counts.get("names", ()))
        merged.word_rewards = {**merged.word_rewards, **counts.get("words", {})}
        merged.paths |= dict.fromkeys(counts.get("paths", ()))
    return merged


def add_tallies(tallies: Sequence[StreamCounts], told: FieldMap) -> StreamCounts:
    """Add the counts of several streams, in their order."""
    total = StreamCounts(mapper=mapper_counts(_mapper(told, [tally.mapper for tally in tallies])))
    for tally in tallies:
        total.empty, total.files_without_calls = (
            total.empty + tally.empty,
            total.files_without_calls + tally.files_without_calls,
        )
        total.hidden += tally.hidden
        total.traces_without_prompt += tally.traces_without_prompt
        total.first_bare = total.first_bare or tally.first_bare
        total.adapted = _added_counts(total.adapted, tally.adapted)
        total.records_without_call = _added_counts(total.records_without_call, tally.records_without_call)
        total.left_out = _added_counts(total.left_out, tally.left_out)
        total.sessions += tally.sessions
    return total


def _added_counts(left: dict[str, int], right: dict[str, int]) -> dict[str, int]:
    return {name: left.get(name, 0) + right.get(name, 0) for name in [*left, *right]}


Path = str | os.PathLike[str]
BLANK = "there is no record in it"
"""The core's message for a file without records, or without a record of a call."""


def read(source: Any, **options: Any) -> Traces:
    """Read all traces from files, folders, patterns, addresses, tables, datasets or records.

    Args:
        source: a path, folder, pattern or address (s3://...), or several; "-" for standard input; an Arrow table, a
            `datasets.Dataset`, or records as dicts. Files contain JSONL, a JSON array, pretty-printed objects,
            server-sent events, Parquet or Arrow; plain, gzip or zstd.
        options: as for `stream`, except `batch`.

    Raises:
        ReadError: if an input cannot be read or is empty, or if it is truncated and `on_error` is "raise".
        FormatError: if a record is bad and `on_error` is "raise".

    >>> messages = [{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "4"}]
    >>> read([{"messages": messages, "metadata": {"score": "1"}}], map={"reward": "metadata.score"}).reward.tolist()
    [1.0]
    """
    return concatenate(stream(source, **options))


def stream(
    source: Any,
    *,
    map: FieldMap | Mapping[str, str] | None = None,
    batch: int = 1024,
    format: str = "auto",
    on_error: str = "raise",
    quarantine: Path | None = None,
    limit: int | None = None,
    max_record_bytes: int = MAX_RECORD_BYTES,
    chunk_bytes: int = CHUNK_BYTES,
    progress: Callable[[Progress], None] | None = None,
) -> "InputStream":
    """Read inputs of any size in bounded memory.

    Args:
        source: as for `read`.
        map: fields of the records that contain the reward, group, session, ...: a `FieldMap` or a dict of its fields,
            such as {"reward": "metadata.score"}.
        batch: approximate number of traces in each `Traces`.
        format: "auto" detects the form of each record from its structure; `read_report.formats` lists the forms and the
            reasons. The name of one form of docs/reference/trace-format.md requires every record to have that form.
        on_error: "raise", "skip" (counted in `read_report`), or "quarantine". Quarantine writes bad records byte for
            byte to `PREFIX.quarantine.raw`, and with file, line and reason to `PREFIX.quarantine.jsonl`.
        quarantine: PREFIX; by default the path of the input. The second of several files uses PREFIX-1, and so on.
        limit: maximum number of traces.
        max_record_bytes: a longer record is bad.
        chunk_bytes: bytes of records parsed at once; the result does not depend on it.
        progress: called with a `Progress` after each batch.

    Raises:
        ArgumentError: if an option is invalid, or `format` is set together with `map.session`.
        ReadError: if the first input cannot be opened.

    >>> messages = [{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "4"}]
    >>> records = [{"messages": messages, "reward": reward} for reward in (1, 0, 1)]
    >>> parts = stream(records)
    >>> for traces in parts:
    ...     print(len(traces), traces.reward.tolist())
    3 [1.0, 0.0, 1.0]
    >>> parts.read_report.traces, parts.read_report.bad
    (3, 0)
    """
    options = Options(batch, format, on_error, quarantine, limit, max_record_bytes, chunk_bytes)
    field_map = FieldMap(**map) if isinstance(map, Mapping) else map or FieldMap()
    if field_map.session and format != "auto":
        raise ArgumentError(
            f"TG-DATA-025: format is {format!r}, but only call logs have sessions to join. Leave format out."
        )
    return InputStream(source, field_map, options, progress)


class InputStream(Iterator[Traces]):
    """Iterator over batches of traces.

    `read_report` counts the records read so far. `lines` describes how they were mapped, joined and converted.
    """

    def __init__(
        self,
        source: Any,
        field_map: FieldMap,
        options: Options,
        progress: Callable[[Progress], None] | None = None,
        *,
        is_part: bool = False,
    ) -> None:
        self._is_part = is_part
        self._field_map, self._options, self._progress = field_map, options, progress
        self._finished = ReadReport()
        self._taken = 0
        self._stopped = False
        self._start = time.monotonic()
        self._empty_files = self._promptless = 0
        self._bare_errors: list[ReadError] = []
        self._mapper = Mapper(field_map)
        self._adapted = formats.RecordConverter()
        self._sessions: Sessions | None = None
        self._batches: Batches | None = None
        self._spans: SpanSessions | None = None
        self._joined_name = ""
        self._forms: list[str] = []
        self._form_counts: dict[str, int] = {}
        self._retry: RetryWithAdapters | None = None
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._places, self._object = resolve(source)
        self._hidden = [name for place in self._places if place.start == 0 for name in place.hidden]
        non_empty = without_empty_files(self._places)
        self._empty_files, self._places = len(self._places) - len(non_empty), non_empty
        self._check_quarantine()
        self._total = sum(place.size for place in non_empty)
        # Open the first input now, so that an unreadable one raises here and not with the first batch.
        self._source: Source | None = self._open(0)
        self._traces = self._read_all()

    def __next__(self) -> Traces:
        if self._stopped:
            raise ArgumentError(
                "TG-DATA-026: the stream was interrupted during a read, and the traces of that read are lost. "
                "Open it again."
            )
        try:
            for traces in self._traces:
                self._report_progress()
                self._note_forms()
                if len(traces):
                    return traces
        except TracegradError:
            raise
        except BaseException:
            self._stopped = True
            raise
        self._report_progress(done=True)
        raise StopIteration

    @property
    def read_report(self) -> ReadReport:
        """Counts of the records read so far."""
        if self._source is None:
            return self._finished
        retried = [self._retry.report] if self._retry else []
        return reduce(add_reports, [self._finished, self._source.report, *retried])

    def lines(self) -> list[str]:
        """Return how records were mapped, joined and converted, as lines for a terminal."""
        return self.tally().lines(self._field_map, self.read_report, BLANK)

    def tally(self) -> StreamCounts:
        """Return the counts of mapped, joined and converted records."""
        return StreamCounts(
            empty=self._empty_files,
            hidden=self._hidden,
            files_without_calls=len(self._bare_errors),
            first_bare=str(self._bare_errors[0]) if self._bare_errors else None,
            traces_without_prompt=self._promptless,
            adapted=dict(self._adapted.counts),
            records_without_call=dict(self._adapted.empty),
            left_out=dict(self._adapted.left_out),
            mapper=mapper_counts(self._mapper),
            sessions=[line for each in (self._batches, self._sessions, self._spans) if each for line in each.lines()],
        )

    def producers(self, part: Traces) -> list[str]:
        """Return the producer of each trace of the batch that was returned last.

        It is the adapter that converted its record, or else the form of the record. Joined conversations and lines of a
        batch have one name.
        """
        if self._joined_name:
            return [self._joined_name] * len(part)
        lines = [trace.core.location(trace.index)[1] for trace in part]
        names = [None if line is None else self._adapted.names.get(line) for line in lines]
        if len(self._forms) == 1:
            return [name or self._forms[0] for name in names]
        return [name or _form_of(trace) for name, trace in zip(names, part, strict=True)]

    def _note_forms(self) -> None:
        """Store the forms of the records of the last batch."""
        counts = {name: count for name, (count, _) in self.read_report.formats.items()}
        self._forms = [name for name, count in counts.items() if count > self._form_counts.get(name, 0)]
        self._form_counts = counts

    def unjoined(self) -> dict[str, int]:
        """Return the numbers of lines of a batch without their other side, by their description."""
        return self._batches.unjoined() if self._batches else {}

    def _read_all(self) -> Iterator[Traces]:
        for number in range(max(len(self._places), 1)):
            if number:
                self._source = self._open(number)
            assert self._source is not None
            try:
                yield from self._read_source(self._source, number)
            except ReadError as error:
                if BLANK not in str(error):
                    raise
                self._bare_errors.append(error)
            self._taken += self._source.bytes_read
            self._finished = self.read_report
            self._source = self._retry = None
            if self._options.limit is not None and self._finished.traces >= self._options.limit:
                break
        if self._bare_errors and len(self._bare_errors) == len(self._places) and not self._is_part:
            raise self._bare_errors[0]
        if self._batches is not None:
            yield from self._of_batches(self._batches)
        if not self._is_part:
            self._mapper.check()
        for sessions in (self._sessions, self._spans):
            if sessions is not None:
                yield from self._joined(sessions)
        if self._spans is not None and not self._finished.records and not self._is_part:
            self._spans.check()
        if self._folder is not None:
            self._folder.cleanup()

    def _read_source(self, source: Source, number: int) -> Iterator[Traces]:
        head = source.head()
        adapts = self._options.format == "auto" and formats.needs_adapter(head, source.name)
        adapts = adapts or (self._joins_batches and any(is_batch_line(parse_record(each)) for each in head))
        if not self._field_map.paths() and not adapts:
            yield from self._directly_read(source, number)
            return
        gather = formats.ChunkJoiner()
        self._adapted.roots = self._options.format == "auto" and formats.only_roots(head)
        for chunk in source.records():
            self._adapted.names.clear()
            rows = (row for line, raw in chunk for row in self._made(number, line, raw, gather, source.name))
            yield from self._decoded(source, rows)
        yield from self._decoded(source, (row for record in gather.flush() for row in self._mapped(number, *record)))
        if self._sessions is None and self._batches is None and self._spans is None:
            source.finish()

    @property
    def _joins_batches(self) -> bool:
        """Whether lines of a batch are joined: if several inputs are named, and their form is not set."""
        return len(self._places) > 1 and self._options.format == "auto"

    def _of_batches(self, joined: Batches) -> Iterator[Traces]:
        """Yield the answers of batches with their requests, or add them to the sessions."""
        self._joined_name = "batch"
        decoders: dict[int, Any] = {}
        count = 0
        for each in joined.join():
            record = parse_record(each.raw)
            if rows := self._mapped(each.place, each.line, each.raw, each.raw, record):
                if each.place not in decoders:
                    decoders[each.place] = self._decoder(each.place, "-batch")
                core = decoders[each.place].decode(rows)
                count += len(core)
                yield self._grouped(Traces(core))
            if self._options.limit is not None and count >= self._options.limit:
                break
        self._add_reports(decoders.values())

    def _add_reports(self, decoders: Iterable[Any]) -> None:
        for decoder in decoders:
            self._finished = add_reports(self._finished, replace(ReadReport(**decoder.report()), bytes=0))

    def _directly_read(self, source: Source, number: int) -> Iterator[Traces]:
        """Yield traces decoded by the core without conversion.

        A record is tried with the adapters a second time if its answer may be stored outside its messages.
        """
        previous_unused, remaining, adapts = 0, self._options.limit, self._options.format == "auto"
        remaining = None if remaining is None else remaining - self._finished.traces
        for traces in source.decode_directly(
            lambda line, raw: self._adapted.rows(source.name, line, raw) if adapts else None
        ):
            unused_choices = source.report.unused_choices
            suspects = [*range(len(traces))] if unused_choices > previous_unused else traces.core.open(formats.ANSWERS)
            previous_unused = unused_choices
            if suspects and adapts:
                self._retry = self._retry or RetryWithAdapters(self._adapted, lambda: self._decoder(number, "-again"))
                traces = self._retry.traces(traces, suspects)
                traces = traces if remaining is None else traces[:remaining]
            remaining = None if remaining is None else remaining - len(traces)
            yield traces
            self._adapted.names.clear()

    def _decoded(self, source: Source, rows: Iterable[Row]) -> Iterator[Traces]:
        """Decode converted rows, at most about `RECORD_BYTES` at once: one record can become many rows."""
        chunk: list[Row] = []
        chunk_bytes = 0
        for row in rows:
            chunk.append(row)
            chunk_bytes += _size(row)
            if chunk_bytes > sources.RECORD_BYTES:
                yield self._grouped(source.decode(chunk))
                chunk, chunk_bytes = [], 0
        if chunk:
            yield self._grouped(source.decode(chunk))

    def _made(self, number: int, line: Line, raw: bytes, gather: formats.ChunkJoiner, name: str) -> list[Row]:
        """Return the rows to decode for one record of the file, or its refusal if an adapter cannot convert it."""
        record = parse_record(raw)
        if formats.is_chunk(record):
            return [row for merged in gather.add(line, raw, record) for row in self._mapped(number, *merged)]
        if formats.is_spans(record):
            self._spans = self._spans or SpanSessions(self._field_map, [place.path for place in self._places])
            return self._spans.add_spans(number, line, raw, record, self._mapper)
        try:
            if self._joins_batches and is_batch_line(record):
                self._batches = self._batches or Batches([place.name for place in self._places])
                self._batches.add(number, line, raw, record)
                return []
            converted = self._adapted.adapt(record, len(raw), name, line)
        except BadValueError as unfit:
            return [(line, raw, unfit.args[0])]
        session = self._field_map.session
        if (
            converted is None
            and session
            and formats.is_reward_row(record, self._field_map.reward)
            and chat.get_path(record, session) is not None
        ):
            converted = []
        if converted is None:
            return self._mapped(number, line, raw, raw, record)
        if not converted and session:
            return self._mapped(number, line, raw, raw, record, silent=True)
        rows, origin = [], raw
        for index, (place, text, item) in enumerate(converted):
            # A failed call is refused at its own line; its values do not apply to its conversation.
            if formats.is_failed(item):
                rows.append((place, origin, text))
            else:
                rows += self._mapped(number, place, origin, text, item, record, answer=(index, len(converted)))
            # Count and keep the original bytes once. A quarantine needs them for each bad record.
            origin = raw if self._options.on_error == "quarantine" else b""
        return rows

    def _mapped(
        self,
        number: int,
        line: Line,
        origin: bytes,
        raw: bytes,
        record: Any,
        original: Any = None,
        silent: bool = False,
        answer: tuple[int, int] = (0, 1),
    ) -> list[Row]:
        """Add the mapped values to a record. `original` is used for values that `record` lacks.

        `answer` is the index and number of the records that were converted from `original`.
        """
        if not isinstance(record, dict):
            return [(line, origin, raw)]
        merged = {**original, **record} if isinstance(original, dict) else record
        try:
            header = self._mapper.header(merged)
            if not silent:
                raw, merged = self._mapper.put_tokens(raw, merged, original, *answer)
            if not self._field_map.session:
                return [(line, origin, append_fields(raw, header))]
            if self._sessions is None:
                self._sessions = Sessions(self._field_map, [place.path for place in self._places])
            self._sessions.add(number, line, raw, merged, header, silent=silent)
        except BadValueError as unfit:
            return [(line, origin, unfit.args[0])]
        return []

    def _joined(self, sessions: Sessions) -> Iterator[Traces]:
        """Yield the joined conversations, each with the file and line of its first call."""
        self._joined_name = ", ".join(sorted(name for name, count in self._adapted.counts.items() if count)) or "calls"
        decoders: dict[int, Any] = {}
        count = 0
        for place, row in sessions.join():
            if place not in decoders:
                decoders[place] = self._decoder(place, "-joined")
            core = decoders[place].decode([row])
            count += len(core)
            yield self._grouped(Traces(core))
            if self._options.limit is not None and count >= self._options.limit:
                break
        self._add_reports(decoders.values())
        sessions.close()

    def _decoder(self, number: int, end: str) -> Any:
        """Return a reader for converted records of a place, whose quarantine prefix ends with `end`."""
        name = self._places[number].path if self._places else "<records>"
        with tempfile.NamedTemporaryFile(prefix="tracegrad-empty-") as file:
            return sources.open_decoder(
                file.name, name, replace(self._options, quarantine=self._quarantine_prefix(number, end))
            )

    def _grouped(self, traces: Traces) -> Traces:
        """Set the group of each trace to its prompt, if the field map requests it."""
        if self._field_map.group != "prompt" or not len(traces):
            return traces
        parts = []
        for trace in traces:
            file, line = trace.core.location(trace.index)
            prompt = prompt_group(trace)
            self._promptless += prompt is None
            text = append_fields(trace.record, {"group": prompt})
            core, _ = _core.Traces.decode([text], file or "<records>", line or 1, self._options.format)
            parts.append(core)
        return Traces(_core.Traces.concatenate(parts))

    def _open(self, number: int) -> Source:
        limit = self._options.limit
        if self._field_map.session:
            limit = None
        elif limit is not None:
            limit = max(limit - self._finished.traces, 0)
        options = replace(self._options, limit=limit, quarantine=self._quarantine_prefix(number))
        if not self._places:
            return sources.open_object(self._object, options)
        place = self._places[number]
        if place.kind == "address" and self._folder is None:
            self._folder = tempfile.TemporaryDirectory(prefix="tracegrad-")
        return sources.open_place(place, options, self._folder.name if self._folder else None)

    def _check_quarantine(self) -> None:
        """Raise if a quarantine file is one of the inputs."""
        if self._options.on_error == "quarantine":
            prefix = self._options.quarantine_prefix
            names = (
                f"{prefix}-{number}" if prefix and number else prefix or place.path
                for number, place in enumerate(self._places)
            )
            outputs = (f"{name}.quarantine.{ending}" for name in names for ending in ("raw", "jsonl"))
            files.check_not_read(outputs, (place.path for place in self._places), "the quarantine")

    def _quarantine_prefix(self, number: int, end: str = "") -> str | None:
        """Return the quarantine prefix of a place, None without quarantine."""
        if self._options.on_error != "quarantine":
            return None
        if (prefix := self._options.quarantine_prefix) is not None:
            return (f"{prefix}-{number}" if number else prefix) + end
        place = self._places[number] if self._places else None
        if place is None or place.kind != "file":
            subject = "standard input" if place is not None and place.kind == "stdin" else "it"
            raise ArgumentError(f"TG-DATA-027: {subject} has no name for its quarantine. Pass quarantine=PREFIX.")
        return place.path + end

    def _report_progress(self, done: bool = False) -> None:
        if self._progress is not None:
            taken = self._taken + (self._source.bytes_read if self._source else 0)
            seconds = time.monotonic() - self._start
            self._progress(Progress(taken, self._total, self.read_report.records, seconds, done))


def _form_of(trace: Trace) -> str:
    """Return the form of the record of a trace."""
    _, report = _core.Traces.decode([trace.record], "<record>", 1, "auto")
    return next(iter(report["formats"]), "")


def _size(row: Row) -> int:
    """Return the bytes of a row in memory, all of which its decoding copies."""
    return len(row[1]) + (len(row[2]) if isinstance(row[2], bytes) else 0)


def open_part(
    places: list[Place],
    told: FieldMap,
    options: Options,
    progress: Callable[[Progress], None] | None = None,
) -> InputStream:
    """Return a stream of some places of an input.

    It does not raise if all of these places contain no record of a call, or if a mapped path matches nothing in them.
    """
    return InputStream(places, told, options, progress, is_part=True)


def concatenate(parts: InputStream) -> Traces:
    """Return all traces of a stream as one `Traces`, with its read report."""
    return Traces(_core.Traces.concatenate([part.core for part in parts]), parts.read_report)
