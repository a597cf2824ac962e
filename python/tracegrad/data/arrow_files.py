"""Read Parquet and Arrow files as batches of rows, in bounded memory.

The messages of an Arrow file (Arrow's `Message.fbs` and `File.fbs`) are read first, because pyarrow unpacks a whole
batch before anyone can look at its size.
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

# Bytes of a message beside its body, and of a file's footer.
MOST_BYTES = 1 << 26

_MAGIC, _CONTINUED = b"ARROW1", 0xFFFFFFFF
_DICTIONARY, _RECORDS = 2, 3


@dataclass(frozen=True)
class Message:
    """One batch of rows or of a dictionary: bytes in the file, and bytes in memory with 8 for each value."""

    is_dictionary: bool
    stored: int
    held: int


def messages(path: str | os.PathLike[str]) -> Iterator[Message]:
    """The batches of an Arrow file or stream.

    Raises:
        ValueError: if the file contradicts itself.
        OSError: if it cannot be read.
    """
    with open(path, "rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(0)
        places = _blocks(file, size) if file.read(len(_MAGIC)) == _MAGIC else None
        try:
            if places is None:
                at = 0
                while (step := _message(file, at)) is not None:
                    message, at = step
                    if message is not None:
                        yield message
            else:
                for place in places:
                    step = _message(file, place)
                    if step is not None and step[0] is not None:
                        yield step[0]
        except struct.error:
            raise ValueError("a message points behind its end") from None


def _blocks(file: BinaryIO, size: int) -> list[int]:
    """Where the batches of a file begin, by its footer."""
    file.seek(max(size - 10, 0))
    tail = file.read(10)
    length = int.from_bytes(tail[:4], "little")
    if tail[4:] != _MAGIC or length > size - 10:
        raise ValueError("it has no footer, as if it were cut")
    if length > MOST_BYTES:
        raise ValueError(f"its footer has {length} bytes")
    file.seek(size - 10 - length)
    data = file.read(length)
    try:
        footer = _Table.root(data)
        return [at for field in (2, 3) for at, _ in struct.iter_unpack("<q16s", footer.items(field, 24))]
    except struct.error:
        raise ValueError("its footer points behind its end") from None


def _message(file: BinaryIO, at: int) -> tuple[Message | None, int] | None:
    """The message at a place, `None` for another than a batch, and where the next begins; nothing at the end."""
    file.seek(at)
    head = file.read(8)
    (length,) = struct.unpack_from("<I", head.ljust(8, b"\0"))
    start = at + 4
    if length == _CONTINUED:
        (length,) = struct.unpack_from("<I", head.ljust(8, b"\0"), 4)
        start = at + 8
    if length == 0:
        return None
    if length > MOST_BYTES:
        raise ValueError(f"a message at byte {at} has {length} bytes before its body")
    file.seek(start)
    data = file.read(length)
    message = _Table.root(data)
    kind, body = message.number(1, "<B"), message.number(3, "<q")
    if body < 0:
        raise ValueError(f"a message at byte {at} has a body of {body} bytes")
    end = start + length + body
    if kind not in (_DICTIONARY, _RECORDS):
        return None, end
    rows = message.table(2)
    rows = rows and (rows.table(1) if kind == _DICTIONARY else rows)
    if rows is None:
        raise ValueError(f"a message at byte {at} holds no batch")
    values = sum(length for length, _ in struct.iter_unpack("<2q", rows.items(1, 16)))
    held = 8 * max(values, rows.number(0, "<q"))
    packed = rows.table(3) is not None
    for place, size in struct.iter_unpack("<2q", rows.items(2, 16)):
        held += size
        if packed and size >= 8:
            file.seek(start + length + place)
            (plain,) = struct.unpack("<q", file.read(8))
            held += plain - size if plain >= 0 else 0
    return Message(kind == _DICTIONARY, length + body, held), end


@dataclass(frozen=True)
class _Table:
    """A table of flatbuffers: fields by number, found over its list of places."""

    data: bytes
    at: int

    @classmethod
    def root(cls, data: bytes) -> "_Table":
        return cls(data, _unpack("<I", data, 0))

    def number(self, field: int, form: str) -> int:
        place = self._place(field)
        return 0 if place is None else _unpack(form, self.data, place)

    def table(self, field: int) -> "_Table | None":
        place = self._place(field)
        return None if place is None else _Table(self.data, place + _unpack("<I", self.data, place))

    def items(self, field: int, width: int) -> bytes:
        """The bytes of a list whose items have so many bytes each."""
        place = self._place(field)
        if place is None:
            return b""
        start = place + _unpack("<I", self.data, place)
        end = start + 4 + width * _unpack("<I", self.data, start)
        if end > len(self.data):
            raise struct.error
        return self.data[start + 4 : end]

    def _place(self, field: int) -> int | None:
        places = self.at - _unpack("<i", self.data, self.at)
        if 4 + 2 * field >= _unpack("<H", self.data, places):
            return None
        offset = _unpack("<H", self.data, places + 4 + 2 * field)
        return self.at + offset if offset else None


def _unpack(form: str, data: bytes, at: int) -> int:
    if at < 0:
        raise struct.error
    (value,) = struct.unpack_from(form, data, at)
    return int(value)


# A batch may hold so many times its own bytes, and always so many, as may the records of a whole file.
MOST_GROWTH, ALWAYS, ALWAYS_ROWS = 1000, 1 << 28, 1 << 29


class ParquetStream(RowStream):
    """Batches of traces of a Parquet file, in bounded memory.

    Args:
        path: the file.
        batch: rows in each `Traces`.
        format, on_error: as for `RowStream`.

    Raises:
        ReadError: if the file cannot be read.
        FormatError: for a bad row, with "raise".
    """

    def __init__(
        self, path: str | os.PathLike[str], *, batch: int = ROWS, format: str = "auto", on_error: str = "raise"
    ) -> None:
        path = os.fspath(path)
        super().__init__(parquet_batches(path, batch), path, format=format, on_error=on_error, most=most_bytes(path))


def most_bytes(path: str) -> int:
    """Return how many bytes the records of a file may have."""
    try:
        return max(ALWAYS_ROWS, MOST_GROWTH * os.path.getsize(path))
    except OSError:  # of which the reader tells
        return ALWAYS_ROWS


def parquet_batches(path: str, rows: int = ROWS) -> Iterator[Any]:
    """The record batches of a Parquet file, once it is known to fit the memory."""
    parquet = pyarrow("pyarrow.parquet")
    try:
        _check_parquet(path)
        with parquet.ParquetFile(path) as file:
            columns = [file.schema.column(at) for at in range(len(file.schema))]
            texts = [column.path for column in columns if column.physical_type == "BYTE_ARRAY"]
        _check_parquet(path, [column.length for column in columns])
        # Not mapped, as a file that then shrinks ends the process; not read ahead whole; shared text is held once.
        with parquet.ParquetFile(path, memory_map=False, pre_buffer=False, read_dictionary=texts) as file:
            yield from file.iter_batches(batch_size=rows)
    except TracegradError:
        raise
    except (OSError, ValueError, pyarrow("pyarrow").ArrowException) as error:
        raise ReadError(f"{path}: {error}. It cannot be read as Parquet. Write it again.") from None


def arrow_batches(path: str) -> Iterator[Any]:
    """The record batches of an Arrow file (Feather) or stream, as `datasets` keeps them."""
    pa = pyarrow("pyarrow")
    try:
        check_arrow(path)
        with pa.OSFile(path, "rb") as file:
            if file.read(6) == b"ARROW1":
                table = pa.ipc.open_file(file)
                for at in range(table.num_record_batches):
                    yield from _cut(table.get_batch(at), path)
                return
            file.seek(0)
            for batch in pa.ipc.open_stream(file):
                yield from _cut(batch, path)
    except TracegradError:
        raise
    except (OSError, ValueError, pa.ArrowException) as error:
        raise ReadError(f"{path}: {error}. It cannot be read as Arrow. Write it again.") from None


def saved_files(folder: str) -> list[str]:
    """Return the Arrow files of a folder that `datasets` has saved, in their order.

    Raises:
        FormatError: if it is none, or names files that do not stand in it.
    """
    try:
        state = read_json(Path(folder) / "state.json")
        names = [file["filename"] for file in state["_data_files"]]
        if state.get("_indices_data_files"):
            raise ValueError("rows are chosen by an index, as old versions of datasets saved them")
        if outside := [name for name in names if Path(name).name != name]:
            raise ValueError(f"{outside[0]!r} stands elsewhere")
        files = [os.path.join(folder, name) for name in names]
        for file in files:
            refuse_special(Path(file))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        why = f"{error!r} in its state.json" if isinstance(error, (KeyError, TypeError, AttributeError)) else error
        raise FormatError(f"{folder}: {why}. It cannot be read as a saved dataset. Save it again.") from None
    return files


def _cut(batch: Any, name: str) -> Iterator[Any]:
    """A batch in parts of at most `ROWS` rows."""
    check_batch(batch, name)
    for start in range(0, batch.num_rows, ROWS):
        yield batch.slice(start, ROWS)


def check_arrow(path: str) -> None:
    """Refuse an Arrow file whose batches would not fit the memory, before one is unpacked.

    Raises:
        ValueError: for such a file, or one that contradicts itself.
    """
    stored = held = 0
    for number, message in enumerate(messages(path)):
        if message.is_dictionary:
            # All of them are held together.
            stored, held = stored + message.stored, held + message.held
        else:
            _check_growth(f"batch {number}", message.stored, message.held)
        _check_growth("its dictionaries", stored, held)


def _check_growth(name: str, stored: int, held: int) -> None:
    if held > max(ALWAYS, MOST_GROWTH * stored):
        raise ValueError(f"{name} has {stored} bytes and would be {held} in memory")


def _check_parquet(path: str, widths: Sequence[int] = ()) -> None:
    """Refuse what would not fit the memory, from what the file says of itself before a value is read.

    Args:
        widths: bytes of each value of a column, 0 if they differ; a dictionary holds a wide value once. Given, the
            headers of all pages are looked at too.
    """
    for number, group in enumerate(row_groups(path, pages=bool(widths))):
        if min(group.values, default=-1) < group.rows:
            raise ValueError(f"row group {number} claims {group.rows} rows, and a column has fewer values")
        columns = zip(group.values, group.plain, widths or [0] * len(group.values), strict=True)
        held = sum(max(max(8, width) * values, plain) for values, plain, width in columns)
        _check_growth(f"row group {number}", sum(group.stored), held)
