"""Traces from Arrow: tables, Parquet files and Hugging Face datasets. pyarrow is imported on use (extra `arrow`).

A row is a record in any form of docs/trace-format.md, most often with TRL's column names. Columns of token numbers go
from Arrow's buffers to Rust without a Python object per token; the other columns are small and go as JSON.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np

from tracegrad import _core
from tracegrad.errors import ArgumentError, FormatError, ReadError
from tracegrad.trace import ReadReport, Traces

MAGIC = b"PAR1"
ROWS = 1024
FIRST_ERRORS = 5


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
    for batch in _batches(table):
        core, found = _core.Traces.compose(list(_rows(batch)), name, first, format)
        parts.append(core)
        report = _sum(report, ReadReport(**found))
        first += batch.num_rows
    return Traces(_core.Traces.concatenate(parts), report)


def is_parquet(path: str | os.PathLike[str]) -> bool:
    """Whether a file begins as Parquet does."""
    try:
        with open(path, "rb") as file:
            return file.read(len(MAGIC)) == MAGIC
    except OSError:
        return False


class ParquetStream(Iterator[Traces]):
    """Batches of traces of a Parquet file, in bounded memory.

    Args:
        path: the file.
        batch: rows in each `Traces`.
        format: as for `tracegrad.read`.
        on_error: "raise", or "skip" to leave a bad row out, counted in `read_report`.

    Raises:
        ReadError: if the file cannot be read.
        FormatError: for a bad row, with "raise".
    """

    def __init__(
        self, path: str | os.PathLike[str], *, batch: int = ROWS, format: str = "auto", on_error: str = "raise"
    ) -> None:
        if on_error not in ("raise", "skip"):
            raise ArgumentError(
                f"on_error is {on_error!r} for a Parquet file. A row has no bytes of its own to write aside. "
                "Pass 'raise' or 'skip', or write the traces as JSONL first."
            )
        self.read_report = ReadReport()
        self._path, self._format, self._skip = os.fspath(path), format, on_error == "skip"
        self._batches = self._open(batch)

    def _open(self, rows: int) -> Iterator[Any]:
        parquet = _pyarrow("pyarrow.parquet")
        try:
            with parquet.ParquetFile(self._path, memory_map=True) as file:
                yield from file.iter_batches(batch_size=rows)
        except (OSError, _pyarrow("pyarrow").ArrowException) as error:
            raise ReadError(f"{self._path}: {error}. It cannot be read as Parquet. Write it again.") from error

    def __next__(self) -> Traces:
        for batch in self._batches:
            traces = self._read(list(_rows(batch)))
            if len(traces):
                return traces
        raise StopIteration

    def _read(self, rows: list[list[Any]]) -> Traces:
        first = self.read_report.records + 1
        try:
            core, found = _core.Traces.compose(rows, self._path, first, self._format)
        except FormatError:
            if not self._skip:
                raise
            return self._read_one_by_one(rows, first)
        self.read_report = _sum(self.read_report, ReadReport(**found))
        return Traces(core)

    def _read_one_by_one(self, rows: list[list[Any]], first: int) -> Traces:
        good = []
        for line, row in enumerate(rows, first):
            try:
                core, found = _core.Traces.compose([row], self._path, line, self._format)
            except FormatError as error:
                bad = ReadReport(records=1, bad=1, reasons={"row": 1}, errors=(str(error),))
                self.read_report = _sum(self.read_report, bad)
                continue
            self.read_report = _sum(self.read_report, ReadReport(**found))
            good.append(core)
        return Traces(_core.Traces.concatenate(good))


def _pyarrow(module: str) -> Any:
    import importlib

    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ArgumentError(
            f"{error}. Arrow tables and Parquet files need it. pip install 'tracegrad[arrow]'"
        ) from error


def _batches(table: Any) -> Iterable[Any]:
    pa = _pyarrow("pyarrow")
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


def _rows(batch: Any) -> Iterator[list[Any]]:
    """The rows of a record batch as pieces: JSON text, and between it arrays of numbers."""
    numbers, others = {}, []
    for name, column in zip(batch.schema.names, batch.columns, strict=True):
        lists = _number_lists(column)
        if lists is None:
            others.append(name)
        else:
            numbers[name] = lists
    heads = batch.select(others).to_pylist() if others else [{}] * batch.num_rows
    for row, head in enumerate(heads):
        text = json.dumps(_without_none(head), ensure_ascii=False, default=str)[:-1]
        pieces: list[Any] = [text]
        separator = ", " if len(text) > 1 else ""
        for name, (values, starts, ends, valid) in numbers.items():
            if valid is None or valid[row]:
                pieces += [f"{separator}{json.dumps(name)}: ", values[starts[row] : ends[row]]]
                separator = ", "
        yield [*pieces, "}"]


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
    pa = _pyarrow("pyarrow")
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
    values = column.values
    if values.null_count:
        if not pa.types.is_floating(values.type):
            return None
        values = values.fill_null(float("nan"))
    offsets = column.offsets.to_numpy(zero_copy_only=False)
    valid = None if column.null_count == 0 else column.is_valid().to_numpy(zero_copy_only=False)
    return np.ascontiguousarray(values.to_numpy(zero_copy_only=False)), offsets[:-1], offsets[1:], valid


def _sum(left: ReadReport, right: ReadReport) -> ReadReport:
    def add(one: Any, other: Any) -> dict[str, Any]:
        return {key: _plus(one.get(key), other.get(key)) for key in [*one, *(key for key in other if key not in one)]}

    counts = {
        name: getattr(left, name) + getattr(right, name) for name, value in vars(left).items() if isinstance(value, int)
    }
    return replace(
        left,
        **counts,
        formats=add(left.formats, right.formats),
        reasons=add(left.reasons, right.reasons),
        errors=(*left.errors, *right.errors)[:FIRST_ERRORS],
    )


def _plus(one: Any, other: Any) -> Any:
    if one is None or other is None:
        return other if one is None else one
    return (one[0] + other[0], one[1]) if isinstance(one, tuple) else one + other
