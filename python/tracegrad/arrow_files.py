"""Files of Parquet and Arrow as batches of rows, in bounded memory; `tables` makes traces of them."""

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from tracegrad.arrow_messages import messages
from tracegrad.errors import FormatError, ReadError, TracegradError
from tracegrad.footer import row_groups
from tracegrad.plain_files import read_json, refuse_special
from tracegrad.tables import ROWS, RowStream, check_batch, pyarrow

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
