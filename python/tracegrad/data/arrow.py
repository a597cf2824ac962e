"""Read traces from Arrow tables and Hugging Face datasets.

pyarrow is imported on use (extra `arrow`). A row is a record in any form of docs/reference/trace-format.md, most often
with TRL's column names. Columns with lists of numbers are passed from Arrow's buffers to Rust without a Python object
per token. The other columns are passed as JSON. `row_sizes` computes the JSON size of a batch before its rows are made,
because dictionaries, run-end encoding, views and unions can compress more rows than fit into memory into a few bytes.
"""

import base64
import itertools
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tracegrad import _core
from tracegrad.data.trace import Line, ReadReport, Traces, add_reports
from tracegrad.errors import ArgumentError, FormatError

Sizes = NDArray[np.int64]

# Bytes of the JSON syntax of a value, and of the longest number or date.
_VALUE, _NUMBER = 8, 16


def row_sizes(batch: Any) -> Sizes:
    """Return the approximate JSON bytes of each row of a record batch, as int64.

    >>> import pyarrow as pa
    >>> text = pa.DictionaryArray.from_arrays(pa.array([0, 0, 1], pa.int8()), pa.array(["x" * 1000, "y"]))
    >>> row_sizes(pa.record_batch({"a": text})).tolist()
    [1017, 1017, 18]
    """
    return _sizes_of_fields(batch.schema.names, batch.columns, batch.num_rows)


def _sizes_of_fields(names: list[str], columns: list[Any], rows: int) -> Sizes:
    total = np.full(rows, _VALUE, np.int64)
    for name, column in zip(names, columns, strict=True):
        total += _capped(_sizes(column) + len(name.encode()), len(names) + 1)
    return total


def _sizes(column: Any) -> Sizes:
    """Return the approximate JSON bytes of each value of an array. A null may count as much as another value."""
    import pyarrow as pa

    types, kind, rows = pa.types, column.type, len(column)
    if isinstance(column, pa.ExtensionArray):
        return _sizes(column.storage)
    if types.is_dictionary(kind):
        indices = column.indices.fill_null(0).to_numpy(zero_copy_only=False).astype(np.int64)
        return _sizes_at(_sizes(column.dictionary), indices)
    if types.is_struct(kind):
        fields = [column.field(index) for index in range(kind.num_fields)]
        return _sizes_of_fields([kind.field(index).name for index in range(kind.num_fields)], fields, rows)
    if types.is_union(kind):
        return _sizes_of_union(column)
    if _is_type(kind, "run_end_encoded"):
        ends = column.run_ends.to_numpy(zero_copy_only=False)
        return _sizes_at(_sizes(column.values), np.searchsorted(ends, column.offset + np.arange(rows), side="right"))
    if _is_type(kind, "list_view") or _is_type(kind, "large_list_view"):
        start = column.offsets.to_numpy(zero_copy_only=False).astype(np.int64)
        length = column.sizes.to_numpy(zero_copy_only=False).astype(np.int64)
        return _sizes_of_lists(lambda first, last: [column.values.slice(first, last - first)], start, start + length)
    if types.is_map(kind) or types.is_list(kind) or types.is_large_list(kind):
        bounds = column.offsets.to_numpy(zero_copy_only=False).astype(np.int64)
        children = [column.keys, column.items] if types.is_map(kind) else [column.values]
        if len(children) == 1 and types.is_primitive(children[0].type):
            return _VALUE + _NUMBER * (bounds[1:] - bounds[:-1])
        return _sizes_of_lists(
            lambda first, last: [child.slice(first, last - first) for child in children], bounds[:-1], bounds[1:]
        )
    if types.is_fixed_size_list(kind):
        width = kind.list_size
        start = (column.offset + np.arange(rows)) * width
        return _sizes_of_lists(lambda first, last: [column.values.slice(first, last - first)], start, start + width)
    return _sizes_of_plain(column)


def _sizes_of_plain(column: Any) -> Sizes:
    import pyarrow as pa
    import pyarrow.compute as pc

    types, kind, rows = pa.types, column.type, len(column)
    if _is_type(kind, "string_view") or _is_type(kind, "binary_view"):
        # A view has 16 bytes; the first four are the length.
        views = np.frombuffer(column.buffers()[1], np.int32)[: 4 * (column.offset + rows)]
        return np.maximum(views[4 * column.offset :: 4], 0).astype(np.int64) + _VALUE
    if types.is_binary(kind) or types.is_string(kind) or types.is_large_binary(kind) or types.is_large_string(kind):
        lengths = pc.call_function("binary_length", [column]).fill_null(0).to_numpy(zero_copy_only=False)
        return lengths.astype(np.int64) + _VALUE
    if types.is_fixed_size_binary(kind):
        return np.full(rows, kind.byte_width + _VALUE, np.int64)
    return np.full(rows, _VALUE if types.is_null(kind) else _NUMBER, np.int64)


def _sizes_of_union(column: Any) -> Sizes:
    """Return the JSON bytes of each value of a union.

    Values of a dense union can share an item of a child. In a sparse union, every child has all rows.
    """
    kind, rows = column.type, len(column)
    codes = column.type_codes.to_numpy(zero_copy_only=False)
    dense = kind.mode == "dense"
    indices = column.offsets.to_numpy(zero_copy_only=False) if dense else np.arange(rows)
    total = np.zeros(rows, np.int64)
    for index, code in enumerate(kind.type_codes):
        selected = codes == code
        total[selected] = _sizes_at(_sizes(column.field(index)), indices[selected])
    return total + _VALUE


def _sizes_of_lists(items_of: Any, start: Sizes, end: Sizes) -> Sizes:
    """Return the JSON bytes of lists from those of their items, which lists can share.

    Args:
        items_of: returns the arrays of items from a first to a last index.
        start, end: range of the items of each list.
    """
    non_empty = end > start
    if not non_empty.any():
        return np.full(len(start), _VALUE, np.int64)
    first, last = int(start[non_empty].min()), int(end[non_empty].max())
    sizes = np.zeros(last - first, np.int64)
    children = items_of(first, last)
    for child in children:
        sizes += _capped(_sizes(child), 2 * (last - first) + 2)
    cumulative = np.concatenate([[0], np.cumsum(sizes)])
    total = np.full(len(start), _VALUE, np.int64)
    total[non_empty] += cumulative[end[non_empty] - first] - cumulative[start[non_empty] - first]
    return total


def _sizes_at(sizes: Sizes, indices: Any) -> Sizes:
    return sizes[indices] if len(sizes) else np.full(len(indices), _VALUE, np.int64)


def _capped(sizes: Sizes, terms: int) -> Sizes:
    """Clip sizes so that the sum of `terms` of them fits in 63 bits. A clipped size still exceeds every limit."""
    return np.minimum(sizes, (1 << 62) // terms)


def _is_type(kind: Any, name: str) -> bool:
    """Return whether a type is one that older versions of pyarrow do not define."""
    import pyarrow as pa

    check = getattr(pa.types, f"is_{name}", None)
    return check is not None and check(kind)


ROWS = 1024
# Bytes of JSON that are made at once, and bytes in one `Traces` of a stream, except for its last rows.
PART_BYTES, BATCH_BYTES = 1 << 24, 1 << 30
# Limits of JSON bytes: of a row, of a batch in any case, and of a batch as a multiple of its own bytes. The multiple
# allows each of `ROWS` rows to share all bytes of the batch, twice.
RECORD_BYTES, ALWAYS_BYTES, MOST_GROWTH = 1 << 30, 1 << 28, 2 * ROWS
# Most levels of nested types, as in Parquet's own readers.
DEPTH = 100


def from_arrow(table: Any, *, format: str = "auto", name: str = "<table>") -> Traces:
    """Create traces from a table; every row is one record.

    Args:
        table: `pyarrow.Table` or `RecordBatch`, a `datasets.Dataset`, or anything with `__arrow_c_stream__` (polars,
            duckdb).
        format: as for `tracegrad.read`.
        name: name of the table in errors.

    Raises:
        FormatError: if a row has no accepted form. Its line is its number, from 1.
        ArgumentError: if pyarrow is not installed, or `table` is not a table.

    >>> import pyarrow as pa
    >>> rows = {"prompt_ids": [[5, 6]], "completion_ids": [[7, 8]], "logprobs": [[-0.5, -0.1]], "reward": [1.0]}
    >>> traces = from_arrow(pa.table(rows))
    >>> traces[0].generations[0].token_ids.tolist(), traces[0].reward
    ([7, 8], 1.0)
    """
    parts, report, first = [], ReadReport(), 1
    for batch in batches_of(table):
        for rows, _ in _parts(batch, name, _spans(batch, name, first)):
            core, counts = _core.Traces.compose(rows, name, first, format)
            parts.append(core)
            report = add_reports(report, ReadReport(**counts))
            first += len(rows)
    return Traces(_core.Traces.concatenate(parts), report)


class RowStream(Iterator[Traces]):
    """Iterator over batches of traces from Arrow record batches, in bounded memory.

    Args:
        batches: `pyarrow.RecordBatch`es.
        name: name of the file in errors.
        format: as for `tracegrad.read`.
        on_error: "raise", or "skip" to leave out a bad row and count it in `read_report`.
        max_bytes: approximate limit of the JSON bytes of all records; None means no limit.

    Raises:
        FormatError: for a bad row, if `on_error` is "raise", or if a limit is exceeded.
        ArgumentError: if `on_error` has another value.
    """

    def __init__(
        self,
        batches: Iterable[Any],
        name: str,
        *,
        format: str = "auto",
        on_error: str = "raise",
        max_bytes: int | None = None,
    ) -> None:
        if on_error not in ("raise", "skip"):
            raise ArgumentError(
                f"TG-DATA-001: on_error is {on_error!r} for {name}, whose records are rows. A row has no bytes that a "
                "quarantine could store. Pass 'raise' or 'skip', or write the traces as JSONL first."
            )
        self.read_report = ReadReport()
        self._batches, self._path = iter(batches), name
        self._format, self._skip = format, on_error == "skip"
        self._most, self._spent = max_bytes, 0
        self.convert_refused: Callable[[Line, bytes], Traces | None] | None = None
        self._traces = self._read_all()

    def head(self) -> list[bytes]:
        """Return the first row as JSON, without consuming it; an empty list if there are no rows."""
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
        """Yield chunks of (row number, JSON); numbers start at 1. Convert the rows, then pass them to `decode`."""
        first = 1
        for batch in self._batches:
            check_batch(batch, self._path)
            for start, end, _ in self._spans(batch, first):
                heads = _heads(batch.slice(start, end - start), self._path)
                yield [(first + start + offset, to_json(_without_none(head))) for offset, head in enumerate(heads)]
            first += batch.num_rows

    def decode(self, rows: list[tuple[Line, bytes]]) -> Traces:
        """Decode converted rows."""
        return self._read([[text.decode()] for _, text in rows], [line for line, _ in rows])

    def _read_all(self) -> Iterator[Traces]:
        for batch in self._batches:
            yield from self._read_batch(batch)

    def _read_batch(self, batch: Any) -> Iterator[Traces]:
        parts: list[_core.Traces] = []
        part_bytes = 0
        for rows, size in _parts(batch, self._path, self._spans(batch, self.read_report.records + 1)):
            first = self.read_report.records + 1
            parts.append(self._read(rows, list(range(first, first + len(rows)))).core)
            part_bytes += size
            if part_bytes > BATCH_BYTES:
                yield Traces(_core.Traces.concatenate(parts))
                parts, part_bytes = [], 0
        yield Traces(_core.Traces.concatenate(parts))

    def _spans(self, batch: Any, first: int) -> Iterator[tuple[int, int, int]]:
        for start, end, size in _spans(batch, self._path, first):
            self._spent += size
            if self._most is not None and self._spent > self._most:
                raise FormatError(
                    f"TG-DATA-002: {self._path}:{first + start}: its records have more than {self._most:,} bytes up to "
                    "here, far more than the file. Values that rows share are copied to each record. Split the "
                    "file."
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
                core, counts = _core.Traces.compose(rows, self._path, first, self._format)
            except FormatError:
                pass  # The loop below decodes row by row and finds the bad one.
            else:
                self.read_report = add_reports(self.read_report, ReadReport(**counts))
                return Traces(core)
        cores = []
        for line, row in zip(lines, rows, strict=True):
            try:
                core, counts = _core.Traces.compose([row], self._path, line, self._format)
            except FormatError as error:
                if (converted := self._converted(line, row)) is None:
                    self.refuse(str(error), "failed_call" if ": the call failed: " in str(error) else "row")
                else:
                    cores.append(converted.core)
                continue
            self.read_report = add_reports(self.read_report, ReadReport(**counts))
            cores.append(core)
        return Traces(_core.Traces.concatenate(cores))

    def _converted(self, line: Line, row: list[Any]) -> Traces | None:
        """Convert a row that the core refuses with the callback `known`. None if it cannot be converted."""
        convert, self.convert_refused = self.convert_refused, None
        try:
            return (
                convert(line, "".join(row).encode()) if convert and all(isinstance(each, str) for each in row) else None
            )
        finally:
            self.convert_refused = convert

    def refuse(self, error: str, reason: str) -> None:
        """Count a bad row, or raise its error."""
        if not self._skip:
            raise FormatError(error)
        bad = ReadReport(records=1, bad=1, reasons={reason: 1}, errors=(error,))
        self.read_report = add_reports(self.read_report, bad)


def _parts(batch: Any, name: str, spans: Iterable[tuple[int, int, int]]) -> Iterator[tuple[list[list[Any]], int]]:
    """Yield (rows as pieces, approximate bytes) for each span of a batch."""
    check_batch(batch, name)
    numbers = {field: _number_lists(column) for field, column in zip(batch.schema.names, batch.columns, strict=True)}
    others = batch.select([field for field, lists in numbers.items() if lists is None])
    lists = {field: arrays for field, arrays in numbers.items() if arrays is not None}
    for start, end, size in spans:
        heads = _heads(others.slice(start, end - start), name)
        yield [_row(head, lists, start + offset) for offset, head in enumerate(heads)], size


def _spans(batch: Any, name: str, first: int) -> Iterator[tuple[int, int, int]]:
    """Split a checked batch into spans that are read at once: yield (first row, end, approximate JSON bytes).

    Raises:
        FormatError: if the JSON of the rows exceeds a limit. Values that rows share are written for each of them.
    """
    if not batch.num_rows:
        return
    sizes = np.minimum(row_sizes(batch), RECORD_BYTES + 1)
    cumulative = np.cumsum(sizes)
    max_bytes = max(ALWAYS_BYTES, MOST_GROWTH * batch.nbytes)
    if sizes.max() > RECORD_BYTES or cumulative[-1] > max_bytes:
        is_too_long = sizes > RECORD_BYTES
        row = (
            int(np.argmax(is_too_long))
            if is_too_long.any()
            else int(np.searchsorted(cumulative, max_bytes, side="right"))
        )
        excess = (
            f"a record of more than {RECORD_BYTES:,} bytes"
            if is_too_long.any()
            else f"more than {max_bytes:,} bytes of records"
        )
        raise FormatError(
            f"TG-DATA-003: {name}:{first + row}: the columns, which have {batch.nbytes:,} bytes, become {excess}. "
            "Values that rows or lists share are copied to each record. Write fewer rows per batch, or "
            "store the values without sharing."
        )
    start = 0
    while start < batch.num_rows:
        bytes_before = int(cumulative[start - 1]) if start else 0
        end = int(np.searchsorted(cumulative, bytes_before + PART_BYTES, side="right"))
        end = min(max(end, start + 1), start + ROWS, batch.num_rows)
        yield start, end, int(cumulative[end - 1]) - bytes_before
        start = end


def _heads(batch: Any, name: str) -> list[dict[str, Any]]:
    """Convert rows to dicts."""
    if batch.num_columns == 0:
        return [{}] * batch.num_rows
    try:
        return batch.to_pylist()
    except (ValueError, OverflowError, pyarrow("pyarrow").ArrowException) as error:
        raise FormatError(
            f"TG-DATA-004: {name}: {error}. A value of a column cannot be converted to JSON. "
            "Convert the column to text or numbers."
        ) from None


def check_batch(batch: Any, name: str) -> None:
    """Check the columns of a batch.

    Raises:
        FormatError: if two columns have the same name, a type is nested too deeply, or the data is inconsistent.
    """
    if duplicates := [field for field in batch.schema.names if batch.schema.names.count(field) > 1]:
        raise FormatError(f"TG-DATA-005: {name}: two columns are called {duplicates[0]!r}. Rename one.")
    if any(_depth(field.type) > DEPTH for field in batch.schema):
        raise FormatError(
            f"TG-DATA-006: {name}: a column is nested deeper than {DEPTH} levels. It would exhaust the stack. "
            "Store the nested part as text."
        )
    try:
        batch.validate(full=True)
    except pyarrow("pyarrow").ArrowInvalid as error:
        raise FormatError(f"TG-DATA-007: {name}: {error}. Its columns are inconsistent. Write it again.") from None


def _depth(kind: Any) -> int:
    """Return the levels of a nested type, at most `DEPTH` + 1."""
    depth, level = 0, [kind]
    while level and depth <= DEPTH:
        level = [kind.field(index).type for kind in level for index in range(kind.num_fields)]
        depth += 1
    return depth


def pyarrow(module: str) -> Any:
    """Import a module of pyarrow.

    Raises:
        ArgumentError: if pyarrow is not installed.
    """
    import importlib

    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ArgumentError(
            f"TG-DATA-008: {error}. Arrow tables and Parquet files require it. Run pip install 'tracegrad[arrow]'"
        ) from error


def batches_of(table: Any) -> Iterable[Any]:
    """Yield the record batches of a table or dataset.

    Raises:
        ArgumentError: if `table` is not a table, or pyarrow is not installed.
    """
    pa = pyarrow("pyarrow")
    if hasattr(table, "with_format") and hasattr(table, "features"):
        # A datasets.Dataset has its own order and selection of rows, which the table inside it does not have.
        for part in table.with_format("arrow").iter(batch_size=ROWS):
            yield from part.to_batches()
        return
    if isinstance(table, pa.RecordBatch):
        yield table
        return
    if not isinstance(table, pa.Table):
        if not hasattr(table, "__arrow_c_stream__"):
            raise ArgumentError(
                f"TG-DATA-009: {type(table).__name__} is not an Arrow table. Pass a pyarrow.Table, a "
                "datasets.Dataset, or "
                "an object with __arrow_c_stream__."
            )
        table = pa.table(table)
    yield from table.to_batches(max_chunksize=ROWS)


def _row(head: dict[str, Any], lists: dict[str, tuple[Any, Any, Any, Any]], row: int) -> list[Any]:
    """Return a row as pieces: JSON text, with arrays of numbers in between."""
    text = to_json(_without_none(head)).decode()[:-1]
    pieces: list[Any] = [text]
    separator = ", " if len(text) > 1 else ""
    for name, (values, starts, ends, valid) in lists.items():
        if valid is None or valid[row]:
            pieces += [f"{separator}{json.dumps(name)}: ", values[starts[row] : ends[row]]]
            separator = ", "
    return [*pieces, "}"]


def to_json(record: Any) -> bytes:
    """Return a record as JSON. Bytes become base64; other values without a JSON form become their `str`."""
    text = json.dumps(record, ensure_ascii=False, default=_to_string)
    try:
        return text.encode()
    except UnicodeEncodeError:
        return json.dumps(record, default=_to_string).encode()


def _to_string(value: Any) -> str:
    return base64.b64encode(value).decode() if isinstance(value, (bytes, bytearray, memoryview)) else str(value)


def _without_none(head: dict[str, Any]) -> dict[str, Any]:
    """Return a row without nulls. Arrow adds a null for every key that only other rows have."""
    return {key: _without_nulls(value) for key, value in head.items() if value is not None}


def _without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        # Arrow adds a null for a key that only other messages have. A null `content` is kept, as it has a meaning.
        return {key: _without_nulls(item) for key, item in value.items() if item is not None or key == "content"}
    return [_without_nulls(item) for item in value] if isinstance(value, list) else value


def _number_lists(column: Any) -> tuple[Any, Any, Any, Any] | None:
    """Return values, starts, ends and validity of a column of lists of numbers; None for other columns."""
    pa = pyarrow("pyarrow")
    kind = column.type
    is_list = pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind)
    if not is_list:
        return None
    item_type = kind.value_type
    if pa.types.is_boolean(item_type) or pa.types.is_float16(item_type):
        column = column.cast(pa.large_list(pa.uint8() if pa.types.is_boolean(item_type) else pa.float32()))
    elif not (pa.types.is_integer(item_type) or pa.types.is_floating(item_type)):
        return None
    elif pa.types.is_fixed_size_list(kind):
        column = column.cast(pa.large_list(item_type))
    offsets = column.offsets.to_numpy(zero_copy_only=False)
    first, last = (int(offsets[0]), int(offsets[-1])) if len(offsets) else (0, 0)
    values, offsets = column.values.slice(first, last - first), offsets - first
    if values.null_count:
        if not pa.types.is_floating(values.type):
            return None
        values = values.fill_null(float("nan"))
    valid = None if column.null_count == 0 else column.is_valid().to_numpy(zero_copy_only=False)
    return np.ascontiguousarray(values.to_numpy(zero_copy_only=False)), offsets[:-1], offsets[1:], valid
