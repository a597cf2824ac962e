"""Change Parquet and Arrow files of several producers, also with valid checksums, and read them.

Each file gives traces, or an error of this package that names the file, in limited memory and time. If the process is
killed, the faulty file is in the folder. `stored` calls this file.
"""

from __future__ import annotations

import itertools
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from tracegrad.data.arrow import from_arrow
from tracegrad.data.arrow_files import ParquetStream
from tracegrad.errors import TracegradError

MAGIC = b"PAR1"
# Numbers that replace counts, sizes and offsets of a footer, before Thrift doubles them.
NUMBERS = [0, 1, 2, 7, 127, 128, 1 << 16, 1 << 24, (1 << 31) - 1, 1 << 31, 1 << 32, 1 << 40, (1 << 62), (1 << 63) - 1]


def tables(whole: Path) -> tuple[Path, Callable[[Path, bool], None], Callable[[Path], None]]:
    """Make a folder of files of all layouts, and read the changed ones."""
    shutil.rmtree(whole, ignore_errors=True)
    whole.mkdir(parents=True)
    for name, table, options in layouts():
        pq.write_table(table, whole / f"{name}.parquet", **options)
        with pa.OSFile(str(whole / f"{name}.arrow"), "wb") as file, pa.ipc.new_file(file, table.schema) as writer:
            writer.write_table(table, max_chunksize=3)
    before = {path.name: path.read_bytes() for path in whole.iterdir()}
    right = {name: _records(whole / name) for name in before}
    assert all(len(records) == 6 for records in right.values()), right

    def load(folder: Path, same: bool) -> None:
        del same  # without checksums, other numbers make another valid file
        refused = None
        for path in sorted(folder.iterdir()):
            if folder == whole or path.read_bytes() != before[path.name]:
                try:
                    _records(path)
                except TracegradError as error:
                    refused = error
        if refused:
            raise refused

    def sealed(folder: Path) -> None:
        for path in folder.glob("*.parquet"):
            data = path.read_bytes()
            if data != before[path.name]:
                path.write_bytes(_with_footer(data, before[path.name]))

    return whole, load, sealed


def layouts() -> list[tuple[str, pa.Table, dict[str, Any]]]:
    """Yield names, tables of six records, and the options with which Parquet writes them."""
    flat = [
        {"prompt_ids": [1, 2, at], "completion_ids": [3, 4], "logprobs": [-0.5, -0.25], "reward": float(at)}
        for at in range(6)
    ]
    said = {"role": "assistant", "content": "4", "tool_calls": [{"function": {"name": "f", "arguments": "{}"}}]}
    asked = {"role": "user", "content": "2+2?", "tool_calls": None}
    nested = [
        {"id": str(at), "messages": [asked, said], "metadata": {"a": [[[at]], []]}, "reward": 1.0} for at in range(6)
    ]
    plain = pa.Table.from_pylist(flat)
    texts = pa.Table.from_pylist(nested)
    named = plain.append_column("group", pa.array(["a", "b"] * 3).dictionary_encode())
    narrow = pa.table(
        {
            "prompt_ids": pa.array([[1, 2]] * 6, pa.list_(pa.int32(), 2)),
            "completion_ids": pa.array([[3, 4]] * 6, pa.large_list(pa.uint16())),
            "logprobs": pa.array([[-0.5, None]] * 6, pa.list_(pa.float32())),
            "metadata": pa.array([[("k", "v")]] * 6, pa.map_(pa.string(), pa.string())),
            "reward": pa.array([1] * 6, pa.int8()),
        }
    )
    delta = {"prompt_ids.list.element": "DELTA_BINARY_PACKED", "completion_ids.list.element": "DELTA_BINARY_PACKED"}
    delta |= {"logprobs.list.element": "BYTE_STREAM_SPLIT", "reward": "BYTE_STREAM_SPLIT"}
    return [
        ("flat", plain, {}),
        ("bare", plain, {"compression": "none", "use_dictionary": False, "write_statistics": False}),
        ("delta", plain, {"use_dictionary": False, "column_encoding": delta, "compression": "zstd"}),
        ("named", named, {"compression": "gzip", "row_group_size": 2, "data_page_size": 16}),
        ("nested", texts, {"compression": "zstd", "data_page_version": "2.0", "write_page_index": True}),
        ("narrow", narrow, {"compression": "lz4", "store_schema": True, "write_page_checksum": True}),
    ]


def change(draw: random.Random, file: Path) -> None:
    """Make one change: a bit, a range, the end, or a number of the footer or of a page header."""
    data = bytearray(file.read_bytes())
    start = _footer_at(data)
    inside = (start, len(data) - 8) if draw.random() < 0.6 and start < len(data) - 8 else (0, len(data))
    place = draw.randrange(*inside) if inside[0] < inside[1] else 0
    kind = draw.randrange(7)
    if kind == 0 and data:
        data[place] ^= 1 << draw.randrange(8)
    elif kind == 1 and draw.random() < 0.3:
        del data[place:]
    elif kind == 2:
        del data[place : place + draw.choice([1, 2, 8, 64])]
    elif kind == 3:
        data[place:place] = data[draw.randrange(len(data) + 1) :][: draw.choice([1, 8, 64, 1024])]
    elif kind == 4:
        data[place : place + draw.choice([1, 4, 8])] = draw.choice(NUMBERS).to_bytes(8, "little")[
            : draw.choice([1, 4, 8])
        ]
    elif data:
        data[place : _varint_end(data, place)] = _varint(2 * draw.choice(NUMBERS))
    file.write_bytes(data)


def _records(path: Path) -> list[Any]:
    """Read a file. An error of this package must name it."""
    try:
        if path.suffix == ".parquet":
            return list(itertools.chain.from_iterable(ParquetStream(path, batch=4, on_error="skip")))
        with pa.OSFile(str(path)) as file:
            table = pa.ipc.open_file(file).read_all()
        return list(from_arrow(table, name=path.name))
    except TracegradError as error:
        if path.name not in str(error):
            raise RuntimeError("the error does not name the file") from error
        raise
    except (pa.ArrowException, OSError, KeyError, ValueError) as error:
        if path.suffix == ".parquet":
            raise
        # Only pyarrow read that file.
        raise TracegradError(f"{path.name}: pyarrow refused it, {type(error).__name__}. None. None.") from error


def _footer_at(data: bytes | bytearray) -> int:
    return max(len(data) - 8 - int.from_bytes(data[-8:-4], "little"), 0) if data[-4:] == MAGIC else 0


def _with_footer(data: bytes, whole: bytes) -> bytes:
    """Return the file with a footer at the place that its tail names: its own, or else the original one."""
    mine = data[-4:] == MAGIC
    # A footer of another length still starts at the same offset.
    body = whole[: _footer_at(whole)]
    footer = data[len(body) : -8] if mine and data.startswith(body) else whole[len(body) : -8]
    kept = body if mine and data.startswith(body) else data[: len(body)]
    return kept + footer + len(footer).to_bytes(4, "little") + MAGIC


def _varint_end(data: bytearray, place: int) -> int:
    end = place
    while end < len(data) - 1 and data[end] & 128 and end - place < 9:
        end += 1
    return end + 1


def _varint(number: int) -> bytes:
    out = bytearray()
    while number > 127:
        out.append(number & 127 | 128)
        number >>= 7
    return bytes([*out, number])
