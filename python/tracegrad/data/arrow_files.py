"""Read Parquet and Arrow files as batches of rows, in bounded memory.

The messages of an Arrow file (Arrow's `Message.fbs` and `File.fbs`) are read first, because pyarrow unpacks a complete
batch before its size can be checked.
"""

import os
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from tracegrad.data.arrow import ROWS, RowStream, check_batch, pyarrow
from tracegrad.data.parquet_footer import row_groups
from tracegrad.errors import FormatError, ReadError, TracegradError
from tracegrad.storage.files import read_json, refuse_special

# Most bytes of the header of a message, and of the footer of a file.
MOST_BYTES = 1 << 26

_MAGIC, _CONTINUED = b"ARROW1", 0xFFFFFFFF
_DICTIONARY, _RECORDS = 2, 3


@dataclass(frozen=True)
class Message:
    """One batch of rows or of a dictionary.

    Args:
        is_dictionary: whether it is a batch of a dictionary.
        file_bytes: bytes in the file.
        memory_bytes: estimated bytes in memory, with 8 bytes for each value.
    """

    is_dictionary: bool
    file_bytes: int
    memory_bytes: int


def messages(path: str | os.PathLike[str]) -> Iterator[Message]:
    """Yield the batches of an Arrow file or stream.

    Raises:
        ValueError: if the file is inconsistent.
        OSError: if it cannot be read.
    """
    with open(path, "rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(0)
        offsets = _batch_offsets(file, size) if file.read(len(_MAGIC)) == _MAGIC else None
        try:
            if offsets is None:
                next_offset = 0
                while (result := _message(file, next_offset)) is not None:
                    message, next_offset = result
                    if message is not None:
                        yield message
            else:
                for offset in offsets:
                    result = _message(file, offset)
                    if result is not None and result[0] is not None:
                        yield result[0]
        except struct.error:
            raise ValueError("a message points behind its end") from None


def _batch_offsets(file: BinaryIO, size: int) -> list[int]:
    """Return the offsets of the batches in a file, from its footer."""
    file.seek(max(size - 10, 0))
    tail = file.read(10)
    length = int.from_bytes(tail[:4], "little")
    if tail[4:] != _MAGIC or length > size - 10:
        raise ValueError("it has no footer, so it may be truncated")
    if length > MOST_BYTES:
        raise ValueError(f"its footer has {length} bytes")
    file.seek(size - 10 - length)
    data = file.read(length)
    try:
        footer = _Table.root(data)
        return [offset for field in (2, 3) for offset, _ in struct.iter_unpack("<q16s", footer.items(field, 24))]
    except struct.error:
        raise ValueError("its footer points behind its end") from None


def _message(file: BinaryIO, offset: int) -> tuple[Message | None, int] | None:
    """Read the message at an offset: return (message, offset of the next one), or None at the end.

    The message is None if it is not a batch.
    """
    file.seek(offset)
    head = file.read(8)
    (length,) = struct.unpack_from("<I", head.ljust(8, b"\0"))
    start = offset + 4
    if length == _CONTINUED:
        (length,) = struct.unpack_from("<I", head.ljust(8, b"\0"), 4)
        start = offset + 8
    if length == 0:
        return None
    if length > MOST_BYTES:
        raise ValueError(f"a message at byte {offset} has {length} bytes before its body")
    file.seek(start)
    data = file.read(length)
    message = _Table.root(data)
    kind, body = message.number(1, "<B"), message.number(3, "<q")
    if body < 0:
        raise ValueError(f"a message at byte {offset} has a body of {body} bytes")
    end = start + length + body
    if kind not in (_DICTIONARY, _RECORDS):
        return None, end
    rows = message.table(2)
    rows = rows and (rows.table(1) if kind == _DICTIONARY else rows)
    if rows is None:
        raise ValueError(f"a message at byte {offset} contains no batch")
    values = sum(length for length, _ in struct.iter_unpack("<2q", rows.items(1, 16)))
    memory_bytes = 8 * max(values, rows.number(0, "<q"))
    is_compressed = rows.table(3) is not None
    for buffer_offset, size in struct.iter_unpack("<2q", rows.items(2, 16)):
        memory_bytes += size
        if is_compressed and size >= 8:
            file.seek(start + length + buffer_offset)
            (unpacked_bytes,) = struct.unpack("<q", file.read(8))
            memory_bytes += unpacked_bytes - size if unpacked_bytes >= 0 else 0
    return Message(kind == _DICTIONARY, length + body, memory_bytes), end


@dataclass(frozen=True)
class _Table:
    """A flatbuffers table, whose fields are found by number through its vtable."""

    data: bytes
    at: int

    @classmethod
    def root(cls, data: bytes) -> "_Table":
        return cls(data, _unpack("<I", data, 0))

    def number(self, field: int, form: str) -> int:
        position = self._position(field)
        return 0 if position is None else _unpack(form, self.data, position)

    def table(self, field: int) -> "_Table | None":
        position = self._position(field)
        return None if position is None else _Table(self.data, position + _unpack("<I", self.data, position))

    def items(self, field: int, width: int) -> bytes:
        """Return the bytes of a list with items of `width` bytes."""
        position = self._position(field)
        if position is None:
            return b""
        start = position + _unpack("<I", self.data, position)
        end = start + 4 + width * _unpack("<I", self.data, start)
        if end > len(self.data):
            raise struct.error
        return self.data[start + 4 : end]

    def _position(self, field: int) -> int | None:
        vtable = self.at - _unpack("<i", self.data, self.at)
        if 4 + 2 * field >= _unpack("<H", self.data, vtable):
            return None
        offset = _unpack("<H", self.data, vtable + 4 + 2 * field)
        return self.at + offset if offset else None


def _unpack(form: str, data: bytes, offset: int) -> int:
    if offset < 0:
        raise struct.error
    (value,) = struct.unpack_from(form, data, offset)
    return int(value)


# Limits of bytes in memory: a batch as a multiple of its own bytes, a batch in any case, the records of a file in any
# case.
MOST_GROWTH, ALWAYS, ALWAYS_ROWS = 1000, 1 << 28, 1 << 29


class ParquetStream(RowStream):
    """Iterator over batches of traces of a Parquet file, in bounded memory.

    Args:
        path: the file.
        batch: rows in each `Traces`.
        format, on_error: as for `RowStream`.

    Raises:
        ReadError: if the file cannot be read.
        FormatError: for a bad row, if `on_error` is "raise".
    """

    def __init__(
        self, path: str | os.PathLike[str], *, batch: int = ROWS, format: str = "auto", on_error: str = "raise"
    ) -> None:
        path = os.fspath(path)
        super().__init__(
            parquet_batches(path, batch), path, format=format, on_error=on_error, max_bytes=max_record_bytes(path)
        )


def max_record_bytes(path: str) -> int:
    """Return the most bytes that the records of a file may have."""
    try:
        return max(ALWAYS_ROWS, MOST_GROWTH * os.path.getsize(path))
    except OSError:  # The reader reports it.
        return ALWAYS_ROWS


def parquet_batches(path: str, rows: int = ROWS) -> Iterator[Any]:
    """Yield the record batches of a Parquet file, after a check that they fit in memory.

    Raises:
        ReadError: if the file cannot be read, or its batches are too large.
    """
    parquet = pyarrow("pyarrow.parquet")
    try:
        _check_parquet(path)
        with parquet.ParquetFile(path) as file:
            columns = [file.schema.column(index) for index in range(len(file.schema))]
            text_columns = [column.path for column in columns if column.physical_type == "BYTE_ARRAY"]
        _check_parquet(path, [column.length for column in columns])
        # No memory map: the process would crash if the file shrank. No pre-buffering of complete row groups. Dictionary
        # columns, so that repeated text is in memory once.
        with parquet.ParquetFile(path, memory_map=False, pre_buffer=False, read_dictionary=text_columns) as file:
            yield from file.iter_batches(batch_size=rows)
    except TracegradError:
        raise
    except (OSError, ValueError, pyarrow("pyarrow").ArrowException) as error:
        raise ReadError(f"TG-DATA-010: {path}: {error}. It cannot be read as Parquet. Write it again.") from None


def arrow_batches(path: str) -> Iterator[Any]:
    """Yield the record batches of an Arrow file (Feather) or stream, as `datasets` stores them.

    Raises:
        ReadError: if the file cannot be read, or its batches are too large.
    """
    pa = pyarrow("pyarrow")
    try:
        check_arrow(path)
        with pa.OSFile(path, "rb") as file:
            if file.read(6) == b"ARROW1":
                reader = pa.ipc.open_file(file)
                for index in range(reader.num_record_batches):
                    yield from _split(reader.get_batch(index), path)
                return
            file.seek(0)
            for batch in pa.ipc.open_stream(file):
                yield from _split(batch, path)
    except TracegradError:
        raise
    except (OSError, ValueError, pa.ArrowException) as error:
        raise ReadError(f"TG-DATA-011: {path}: {error}. It cannot be read as Arrow. Write it again.") from None


def saved_files(folder: str) -> list[str]:
    """Return the Arrow files of a folder that `datasets` has saved, in their order.

    Raises:
        FormatError: if the folder is not a saved dataset, or names files outside itself.
    """
    try:
        state = read_json(Path(folder) / "state.json")
        names = [file["filename"] for file in state["_data_files"]]
        if state.get("_indices_data_files"):
            raise ValueError("rows are chosen by an index, as old versions of datasets saved them")
        if outside_names := [name for name in names if Path(name).name != name]:
            raise ValueError(f"{outside_names[0]!r} is outside the folder")
        files = [os.path.join(folder, name) for name in names]
        for file in files:
            refuse_special(Path(file))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        reason = f"{error!r} in its state.json" if isinstance(error, (KeyError, TypeError, AttributeError)) else error
        raise FormatError(
            f"TG-DATA-012: {folder}: {reason}. It cannot be read as a saved dataset. Save it again."
        ) from None
    return files


def _split(batch: Any, name: str) -> Iterator[Any]:
    """Split a batch into parts of at most `ROWS` rows."""
    check_batch(batch, name)
    for start in range(0, batch.num_rows, ROWS):
        yield batch.slice(start, ROWS)


def check_arrow(path: str) -> None:
    """Refuse an Arrow file whose batches would not fit in memory, before one is unpacked.

    Raises:
        ValueError: if a batch is too large, or the file is inconsistent.
    """
    stored = memory_bytes = 0
    for number, message in enumerate(messages(path)):
        if message.is_dictionary:
            # All dictionaries are in memory at the same time.
            stored, memory_bytes = stored + message.file_bytes, memory_bytes + message.memory_bytes
        else:
            _check_growth(f"batch {number}", message.file_bytes, message.memory_bytes)
        _check_growth("its dictionaries", stored, memory_bytes)


def _check_growth(name: str, stored: int, memory_bytes: int) -> None:
    if memory_bytes > max(ALWAYS, MOST_GROWTH * stored):
        raise ValueError(f"{name} has {stored} bytes and would be {memory_bytes} in memory")


def _check_parquet(path: str, widths: Sequence[int] = ()) -> None:
    """Refuse a Parquet file whose row groups would not fit in memory, from its metadata and before a value is read.

    Args:
        path: the file.
        widths: bytes of each value by column, 0 if they differ: a dictionary stores a wide value only once. If set, the
            headers of all pages are read too.

    Raises:
        ValueError: if a row group is too large, or the metadata is inconsistent.
    """
    for number, group in enumerate(row_groups(path, pages=bool(widths))):
        if min(group.values, default=-1) < group.rows:
            raise ValueError(f"row group {number} claims {group.rows} rows, and a column has fewer values")
        columns = zip(group.values, group.uncompressed_bytes, widths or [0] * len(group.values), strict=True)
        memory_bytes = sum(max(max(8, width) * values, plain) for values, plain, width in columns)
        _check_growth(f"row group {number}", sum(group.file_bytes), memory_bytes)
