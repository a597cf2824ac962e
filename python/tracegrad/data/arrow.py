"""Read traces from Arrow tables and Hugging Face datasets.

pyarrow is imported on use (extra `arrow`). A row is a record in any form of docs/trace-format.md, most often with TRL's
column names. Columns of token numbers go from Arrow's buffers to Rust without a Python object per token; the other
columns go as JSON. `row_sizes` bounds what a batch becomes before its rows are made: dictionaries, runs, views and
unions let a few bytes stand for more rows than fit into memory.
"""

import base64
import itertools
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tracegrad import _core
from tracegrad.data.trace import Line, ReadReport, Traces, summed
from tracegrad.errors import ArgumentError, FormatError

Sizes = NDArray[np.int64]

# Bytes of a value beside its text, and of the longest number or date.
_VALUE, _NUMBER = 8, 16


def row_sizes(batch: Any) -> Sizes:
    """Return about how many bytes each row of a record batch becomes as JSON.

    >>> import pyarrow as pa
    >>> text = pa.DictionaryArray.from_arrays(pa.array([0, 0, 1], pa.int8()), pa.array(["x" * 1000, "y"]))
    >>> row_sizes(pa.record_batch({"a": text})).tolist()
    [1017, 1017, 18]
    """
    return _of_fields(batch.schema.names, batch.columns, batch.num_rows)


def _of_fields(names: list[str], columns: list[Any], rows: int) -> Sizes:
    total = np.full(rows, _VALUE, np.int64)
    for name, column in zip(names, columns, strict=True):
        total += _capped(_sizes(column) + len(name.encode()), len(names) + 1)
    return total


def _sizes(column: Any) -> Sizes:
    """Bytes of each value of an array; a null may count as much as another value."""
    import pyarrow as pa

    types, kind, rows = pa.types, column.type, len(column)
    if isinstance(column, pa.ExtensionArray):
        return _sizes(column.storage)
    if types.is_dictionary(kind):
        places = column.indices.fill_null(0).to_numpy(zero_copy_only=False).astype(np.int64)
        return _taken(_sizes(column.dictionary), places)
    if types.is_struct(kind):
        fields = [column.field(at) for at in range(kind.num_fields)]
        return _of_fields([kind.field(at).name for at in range(kind.num_fields)], fields, rows)
    if types.is_union(kind):
        return _of_union(column)
    if _is(kind, "run_end_encoded"):
        ends = column.run_ends.to_numpy(zero_copy_only=False)
        return _taken(_sizes(column.values), np.searchsorted(ends, column.offset + np.arange(rows), side="right"))
    if _is(kind, "list_view") or _is(kind, "large_list_view"):
        start = column.offsets.to_numpy(zero_copy_only=False).astype(np.int64)
        length = column.sizes.to_numpy(zero_copy_only=False).astype(np.int64)
        return _between(lambda first, last: [column.values.slice(first, last - first)], start, start + length)
    if types.is_map(kind) or types.is_list(kind) or types.is_large_list(kind):
        bounds = column.offsets.to_numpy(zero_copy_only=False).astype(np.int64)
        inner = [column.keys, column.items] if types.is_map(kind) else [column.values]
        if len(inner) == 1 and types.is_primitive(inner[0].type):
            return _VALUE + _NUMBER * (bounds[1:] - bounds[:-1])
        return _between(
            lambda first, last: [each.slice(first, last - first) for each in inner], bounds[:-1], bounds[1:]
        )
    if types.is_fixed_size_list(kind):
        width = kind.list_size
        start = (column.offset + np.arange(rows)) * width
        return _between(lambda first, last: [column.values.slice(first, last - first)], start, start + width)
    return _of_plain(column)


def _of_plain(column: Any) -> Sizes:
    import pyarrow as pa
    import pyarrow.compute as pc

    types, kind, rows = pa.types, column.type, len(column)
    if _is(kind, "string_view") or _is(kind, "binary_view"):
        # A view is 16 bytes, and the first four are the length.
        views = np.frombuffer(column.buffers()[1], np.int32)[: 4 * (column.offset + rows)]
        return np.maximum(views[4 * column.offset :: 4], 0).astype(np.int64) + _VALUE
    if types.is_binary(kind) or types.is_string(kind) or types.is_large_binary(kind) or types.is_large_string(kind):
        lengths = pc.call_function("binary_length", [column]).fill_null(0).to_numpy(zero_copy_only=False)
        return lengths.astype(np.int64) + _VALUE
    if types.is_fixed_size_binary(kind):
        return np.full(rows, kind.byte_width + _VALUE, np.int64)
    return np.full(rows, _VALUE if types.is_null(kind) else _NUMBER, np.int64)


def _of_union(column: Any) -> Sizes:
    """Of a dense union several values may be the same item of a child; of a sparse one each child has all rows."""
    kind, rows = column.type, len(column)
    codes = column.type_codes.to_numpy(zero_copy_only=False)
    dense = kind.mode == "dense"
    places = column.offsets.to_numpy(zero_copy_only=False) if dense else np.arange(rows)
    total = np.zeros(rows, np.int64)
    for at, code in enumerate(kind.type_codes):
        here = codes == code
        total[here] = _taken(_sizes(column.field(at)), places[here])
    return total + _VALUE


def _between(inner: Any, start: Sizes, end: Sizes) -> Sizes:
    """Bytes of lists from the bytes of their items, which may be shared; `inner` gives the items of a span."""
    full = end > start
    if not full.any():
        return np.full(len(start), _VALUE, np.int64)
    first, last = int(start[full].min()), int(end[full].max())
    sizes = np.zeros(last - first, np.int64)
    children = inner(first, last)
    for child in children:
        sizes += _capped(_sizes(child), 2 * (last - first) + 2)
    until = np.concatenate([[0], np.cumsum(sizes)])
    total = np.full(len(start), _VALUE, np.int64)
    total[full] += until[end[full] - first] - until[start[full] - first]
    return total


def _taken(sizes: Sizes, places: Any) -> Sizes:
    return sizes[places] if len(sizes) else np.full(len(places), _VALUE, np.int64)


def _capped(sizes: Sizes, terms: int) -> Sizes:
    """Sizes of which so many can be summed in 63 bits; what is cut is beyond every limit."""
    return np.minimum(sizes, (1 << 62) // terms)


def _is(kind: Any, name: str) -> bool:
    """Whether it is of a type that an older pyarrow does not have."""
    import pyarrow as pa

    check = getattr(pa.types, f"is_{name}", None)
    return check is not None and check(kind)


ROWS = 1024
# Bytes of JSON that are made at once, and that one `Traces` of a stream has, but for its last rows.
PART_BYTES, BATCH_BYTES = 1 << 24, 1 << 30
# Bytes that a row may become, that all rows of a batch always may, and how many times the batch's own bytes: as often
# as each of `ROWS` rows may share all of them, and as much again.
RECORD_BYTES, ALWAYS_BYTES, MOST_GROWTH = 1 << 30, 1 << 28, 2 * ROWS
# Levels of nested types, as Parquet's own readers have it.
DEPTH = 100


def from_arrow(table: Any, *, format: str = "auto", name: str = "<table>") -> Traces:
    """Takes every row of a table as one record.

    Args:
        table: `pyarrow.Table` or `RecordBatch`, a `datasets.Dataset`, or anything with `__arrow_c_stream__` (polars,
            duckdb).
        format: as for `tracegrad.read`.
        name: stands for the file in errors.

    Raises:
        FormatError: if a row is in no accepted form; its line is its number, from 1.
        ArgumentError: if pyarrow is not installed, or the table is none.

    >>> import pyarrow as pa
    >>> rows = {"prompt_ids": [[5, 6]], "completion_ids": [[7, 8]], "logprobs": [[-0.5, -0.1]], "reward": [1.0]}
    >>> traces = from_arrow(pa.table(rows))
    >>> traces[0].generations[0].token_ids.tolist(), traces[0].reward
    ([7, 8], 1.0)
    """
    parts, report, first = [], ReadReport(), 1
    for batch in batches_of(table):
        for rows, _ in _parts(batch, name, _spans(batch, name, first)):
            core, found = _core.Traces.compose(rows, name, first, format)
            parts.append(core)
            report = summed(report, ReadReport(**found))
            first += len(rows)
    return Traces(_core.Traces.concatenate(parts), report)


class RowStream(Iterator[Traces]):
    """Batches of traces of Arrow record batches, in bounded memory.

    Args:
        batches: `pyarrow.RecordBatch`es.
        name: stands for the file in errors.
        format: as for `tracegrad.read`.
        on_error: "raise", or "skip" to leave a bad row out, counted in `read_report`.
        most: about how many bytes all records may have; default no limit.

    Raises:
        FormatError: for a bad row, with "raise".
    """

    def __init__(
        self,
        batches: Iterable[Any],
        name: str,
        *,
        format: str = "auto",
        on_error: str = "raise",
        most: int | None = None,
    ) -> None:
        if on_error not in ("raise", "skip"):
            raise ArgumentError(
                f"on_error is {on_error!r} for {name}, whose records are rows. A row has no bytes of its own to write "
                "aside. Pass 'raise' or 'skip', or write the traces as JSONL first."
            )
        self.read_report = ReadReport()
        self._batches, self._path = iter(batches), name
        self._format, self._skip = format, on_error == "skip"
        self._most, self._spent = most, 0
        self.known: Callable[[Line, bytes], Traces | None] | None = None
        self._traces = self._all()

    def head(self) -> list[bytes]:
        """The first row as JSON, none where there is none; it is read again."""
        first = next(self._batches, None)
        if first is None:
            return []
        self._batches = itertools.chain([first], self._batches)
        row = first.slice(0, 1)
        check_batch(row, self._path)
        for _ in _spans(row, self._path, 1):
            return [to_json(_without_none(head)) for head in _heads(row, self._path)]
        return []

    def records(self) -> Iterator[list[tuple[Line, bytes]]]:
        """The rows as JSON with their numbers, from 1, for a caller that changes them; `decode` reads what it made."""
        first = 1
        for batch in self._batches:
            check_batch(batch, self._path)
            for start, end, _ in self._spans(batch, first):
                heads = _heads(batch.slice(start, end - start), self._path)
                yield [(first + start + at, to_json(_without_none(head))) for at, head in enumerate(heads)]
            first += batch.num_rows

    def decode(self, rows: list[tuple[Line, bytes]]) -> Traces:
        """The traces of rows that were changed."""
        return self._read([[text.decode()] for _, text in rows], [line for line, _ in rows])

    def _all(self) -> Iterator[Traces]:
        for batch in self._batches:
            yield from self._of(batch)

    def _of(self, batch: Any) -> Iterator[Traces]:
        parts: list[_core.Traces] = []
        waiting = 0
        for rows, size in _parts(batch, self._path, self._spans(batch, self.read_report.records + 1)):
            first = self.read_report.records + 1
            parts.append(self._read(rows, list(range(first, first + len(rows)))).core)
            waiting += size
            if waiting > BATCH_BYTES:
                yield Traces(_core.Traces.concatenate(parts))
                parts, waiting = [], 0
        yield Traces(_core.Traces.concatenate(parts))

    def _spans(self, batch: Any, first: int) -> Iterator[tuple[int, int, int]]:
        for start, end, size in _spans(batch, self._path, first):
            self._spent += size
            if self._most is not None and self._spent > self._most:
                raise FormatError(
                    f"{self._path}:{first + start}: its records have more than {self._most:,} bytes up to here, far "
                    "more than the file. Values that rows share are written out for each of them. Split the file."
                )
            yield start, end, size

    def __next__(self) -> Traces:
        for traces in self._traces:
            if len(traces):
                return traces
        raise StopIteration

    def _read(self, rows: list[list[Any]], lines: Sequence[Line]) -> Traces:
        first = lines[0]
        if isinstance(first, int) and lines == list(range(first, first + len(lines))):
            try:
                core, found = _core.Traces.compose(rows, self._path, first, self._format)
            except FormatError:
                pass  # whose row it is, is found below
            else:
                self.read_report = summed(self.read_report, ReadReport(**found))
                return Traces(core)
        good = []
        for line, row in zip(lines, rows, strict=True):
            try:
                core, found = _core.Traces.compose([row], self._path, line, self._format)
            except FormatError as error:
                if (known := self._known(line, row)) is None:
                    self.refuse(str(error), "failed_call" if ": the call failed: " in str(error) else "row")
                else:
                    good.append(known.core)
                continue
            self.read_report = summed(self.read_report, ReadReport(**found))
            good.append(core)
        return Traces(_core.Traces.concatenate(good))

    def _known(self, line: Line, row: list[Any]) -> Traces | None:
        """What the caller makes of a row that is not read as it stands."""
        known, self.known = self.known, None
        try:
            return known(line, "".join(row).encode()) if known and all(isinstance(each, str) for each in row) else None
        finally:
            self.known = known

    def refuse(self, error: str, reason: str) -> None:
        """Counts a bad row, or raises its error."""
        if not self._skip:
            raise FormatError(error)
        bad = ReadReport(records=1, bad=1, reasons={reason: 1}, errors=(error,))
        self.read_report = summed(self.read_report, bad)


def _parts(batch: Any, name: str, spans: Iterable[tuple[int, int, int]]) -> Iterator[tuple[list[list[Any]], int]]:
    """The rows of a batch as pieces, a span at a time, and about how many bytes they have."""
    check_batch(batch, name)
    numbers = {field: _number_lists(column) for field, column in zip(batch.schema.names, batch.columns, strict=True)}
    others = batch.select([field for field, lists in numbers.items() if lists is None])
    lists = {field: found for field, found in numbers.items() if found is not None}
    for start, end, size in spans:
        heads = _heads(others.slice(start, end - start), name)
        yield [_row(head, lists, start + at) for at, head in enumerate(heads)], size


def _spans(batch: Any, name: str, first: int) -> Iterator[tuple[int, int, int]]:
    """Yield the parts in which a checked batch is read: first row, end, and about how many bytes its records have.

    Raises:
        FormatError: if its rows would not fit the memory, as what several of them share is written out for each.
    """
    if not batch.num_rows:
        return
    sizes = np.minimum(row_sizes(batch), RECORD_BYTES + 1)
    until = np.cumsum(sizes)
    most = max(ALWAYS_BYTES, MOST_GROWTH * batch.nbytes)
    if sizes.max() > RECORD_BYTES or until[-1] > most:
        long = sizes > RECORD_BYTES
        row = int(np.argmax(long)) if long.any() else int(np.searchsorted(until, most, side="right"))
        what = f"a record of more than {RECORD_BYTES:,} bytes" if long.any() else f"more than {most:,} bytes of records"
        raise FormatError(
            f"{name}:{first + row}: the columns, which have {batch.nbytes:,} bytes, become {what}. Values that rows "
            "or lists share are written out for each of them. Write fewer rows in a batch, or the values themselves."
        )
    start = 0
    while start < batch.num_rows:
        before = int(until[start - 1]) if start else 0
        end = int(np.searchsorted(until, before + PART_BYTES, side="right"))
        end = min(max(end, start + 1), start + ROWS, batch.num_rows)
        yield start, end, int(until[end - 1]) - before
        start = end


def _heads(batch: Any, name: str) -> list[dict[str, Any]]:
    """Rows as Python has them."""
    if batch.num_columns == 0:
        return [{}] * batch.num_rows
    try:
        return batch.to_pylist()
    except (ValueError, OverflowError, pyarrow("pyarrow").ArrowException) as error:
        raise FormatError(
            f"{name}: {error}. A value of a column has no form in JSON, so a record cannot be made of it. Convert the "
            "column to text or numbers."
        ) from None


def check_batch(batch: Any, name: str) -> None:
    if twice := [field for field in batch.schema.names if batch.schema.names.count(field) > 1]:
        raise FormatError(
            f"{name}: two columns are called {twice[0]!r}. Which of them counts cannot be known. Rename one."
        )
    if any(_depth(field.type) > DEPTH for field in batch.schema):
        raise FormatError(
            f"{name}: a column is nested deeper than {DEPTH} levels. A record so deep is not a trace and would exhaust "
            "the stack. Store the nested part as text."
        )
    try:
        batch.validate(full=True)
    except pyarrow("pyarrow").ArrowInvalid as error:
        raise FormatError(
            f"{name}: {error}. Its columns contradict themselves, and what they hold cannot be known. Write it again."
        ) from None


def _depth(kind: Any) -> int:
    """Levels of a nested type, counted up to one more than there may be."""
    depth, level = 0, [kind]
    while level and depth <= DEPTH:
        level = [kind.field(at).type for kind in level for at in range(kind.num_fields)]
        depth += 1
    return depth


def pyarrow(module: str) -> Any:
    """A module of pyarrow; raises ArgumentError if it is not installed."""
    import importlib

    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ArgumentError(
            f"{error}. Arrow tables and Parquet files need it. pip install 'tracegrad[arrow]'"
        ) from error


def batches_of(table: Any) -> Iterable[Any]:
    """The record batches of a table or dataset."""
    pa = pyarrow("pyarrow")
    if hasattr(table, "with_format") and hasattr(table, "features"):
        # A datasets.Dataset; its own order and selection count, not those of the table behind it.
        for part in table.with_format("arrow").iter(batch_size=ROWS):
            yield from part.to_batches()
        return
    if isinstance(table, pa.RecordBatch):
        yield table
        return
    if not isinstance(table, pa.Table):
        if not hasattr(table, "__arrow_c_stream__"):
            raise ArgumentError(
                f"{type(table).__name__} is no Arrow table. Give a pyarrow.Table, a datasets.Dataset, or what has "
                "__arrow_c_stream__."
            )
        table = pa.table(table)
    yield from table.to_batches(max_chunksize=ROWS)


def _row(head: dict[str, Any], lists: dict[str, tuple[Any, Any, Any, Any]], row: int) -> list[Any]:
    """A row as pieces: JSON text, and between it arrays of numbers."""
    text = to_json(_without_none(head)).decode()[:-1]
    pieces: list[Any] = [text]
    separator = ", " if len(text) > 1 else ""
    for name, (values, starts, ends, valid) in lists.items():
        if valid is None or valid[row]:
            pieces += [f"{separator}{json.dumps(name)}: ", values[starts[row] : ends[row]]]
            separator = ", "
    return [*pieces, "}"]


def to_json(record: Any) -> bytes:
    """A record as JSON; bytes are base64, and what else JSON has no form for is written as Python's `str` says it."""
    text = json.dumps(record, ensure_ascii=False, default=_formless)
    try:
        return text.encode()
    except UnicodeEncodeError:
        return json.dumps(record, default=_formless).encode()


def _formless(value: Any) -> str:
    return base64.b64encode(value).decode() if isinstance(value, (bytes, bytearray, memoryview)) else str(value)


def _without_none(head: dict[str, Any]) -> dict[str, Any]:
    """A row without the nulls that Arrow puts where other rows have a key."""
    return {key: _pruned(value) for key, value in head.items() if value is not None}


def _pruned(value: Any) -> Any:
    if isinstance(value, dict):
        # A key of a message that no row but another has is null here; content alone may be null and mean it.
        return {key: _pruned(item) for key, item in value.items() if item is not None or key == "content"}
    return [_pruned(item) for item in value] if isinstance(value, list) else value


def _number_lists(column: Any) -> tuple[Any, Any, Any, Any] | None:
    """Values, starts, ends and validity of a column of lists of numbers; None where it is something else."""
    pa = pyarrow("pyarrow")
    kind = column.type
    lists = pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind)
    if not lists:
        return None
    inner = kind.value_type
    if pa.types.is_boolean(inner) or pa.types.is_float16(inner):
        column = column.cast(pa.large_list(pa.uint8() if pa.types.is_boolean(inner) else pa.float32()))
    elif not (pa.types.is_integer(inner) or pa.types.is_floating(inner)):
        return None
    elif pa.types.is_fixed_size_list(kind):
        column = column.cast(pa.large_list(inner))
    offsets = column.offsets.to_numpy(zero_copy_only=False)
    first, last = (int(offsets[0]), int(offsets[-1])) if len(offsets) else (0, 0)
    values, offsets = column.values.slice(first, last - first), offsets - first
    if values.null_count:
        if not pa.types.is_floating(values.type):
            return None
        values = values.fill_null(float("nan"))
    valid = None if column.null_count == 0 else column.is_valid().to_numpy(zero_copy_only=False)
    return np.ascontiguousarray(values.to_numpy(zero_copy_only=False)), offsets[:-1], offsets[1:], valid
