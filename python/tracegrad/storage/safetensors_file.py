"""Read and write named arrays in safetensors files.

Files are written completely or not at all, memory-mapped when read, and validated because they may be hostile. A file
has eight bytes of header length, a JSON header and the buffers. This module only knows the format; `store` defines the
content. It needs only numpy, so preparation works without torch. The safetensors package can read the files.
"""

import json
import math
import os
import stat
import struct
import zlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tracegrad.errors import FormatError, ReadError
from tracegrad.storage import files

Array = NDArray[Any]

_CODES = {
    "bool": "BOOL",
    "uint8": "U8",
    "int8": "I8",
    "uint16": "U16",
    "int16": "I16",
    "float16": "F16",
    "uint32": "U32",
    "int32": "I32",
    "float32": "F32",
    "uint64": "U64",
    "int64": "I64",
    "float64": "F64",
}
_DTYPES = {code: np.dtype(name) for name, code in _CODES.items()}
_HEADER_LIMIT = 1 << 20  # Parsed JSON needs up to forty times the memory of its text.
_TENSOR_LIMIT = 10_000
_SLICE = 16 << 20
_MAX_EMPTY_DIMENSION = 1 << 16  # Maximum size of a dimension in an array without elements.


class FileChecksum(NamedTuple):
    """Size and checksum of a file. The crc32 detects corruption by a disk or a copy, not forgery."""

    bytes: int
    crc32: int


def write(
    path: str | os.PathLike[str], arrays: Mapping[str, Array], metadata: Mapping[str, str] | None = None
) -> FileChecksum:
    """Write named arrays to a safetensors file, which gets its name only when it is complete.

    Args:
        path: path of the file. Its folder must exist.
        arrays: numpy arrays of a plain integer, float or bool dtype.
        metadata: strings for the header.

    Returns:
        Size and checksum of the file.

    Raises:
        FormatError: for a dtype that safetensors does not have.
        ReadError: if the file cannot be written, as on a full disk.
    """
    path = Path(path)
    columns = {name: np.asarray(array) for name, array in arrays.items()}
    ordered = sorted(
        columns, key=lambda name: (-columns[name].dtype.itemsize, name)
    )  # Wide dtypes first, so that all are aligned.
    header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    offset = 0
    for name in ordered:
        array = columns[name]
        if array.dtype.name not in _CODES:
            raise FormatError(
                f"TG-STORE-026: array '{name}' has dtype {array.dtype}. Supported are {', '.join(_CODES)}. Convert "
                f"it first."
            )
        end = offset + array.nbytes
        header[name] = {"dtype": _CODES[array.dtype.name], "shape": list(array.shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return write_bytes(path, [struct.pack("<Q", len(text)), text, *(_bytes(columns[name]) for name in ordered)])


def write_bytes(path: Path, parts: Iterable[Any]) -> FileChecksum:
    """Write parts to a file, which gets its name only when it is complete and synced to disk.

    Raises:
        ReadError: if it cannot be written.
    """
    size = checksum = 0
    try:
        with files.write_atomically(path, flush=True) as file:
            for part in parts:
                file.write(part)
                size, checksum = size + len(part), zlib.crc32(part, checksum)
        flush(path.parent)
    except OSError as error:
        raise ReadError(
            f"TG-STORE-027: {path}: cannot be written ({error.strerror}). Free space there or choose another folder."
        ) from error
    return FileChecksum(size, checksum)


def flush(path: Path) -> None:
    """Sync a file, or the names in a folder, to disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def open_file(path: Path) -> BinaryIO:
    """Open a regular file for reading. Links are not followed.

    Raises:
        ReadError: if it is a link, a folder, a pipe or a device, or cannot be opened.
    """
    try:
        handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        if path.is_symlink():
            raise ReadError(
                f"TG-STORE-028: {path}: a symbolic link, which could point to any file of this machine. Copy the file "
                f"itself there (cp -L)."
            ) from error
        raise ReadError(
            f"TG-STORE-029: {path}: cannot be read ({error.strerror}). Check that the file is there."
        ) from error
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise ReadError(f"TG-STORE-030: {path}: a folder, a pipe or a device, and not a regular file. Remove it.")
    return os.fdopen(handle, "rb")


def measure(path: Path) -> FileChecksum:
    """Return size and checksum of a file.

    Raises:
        ReadError: if it cannot be read.
    """
    size = checksum = 0
    with open_file(path) as file:
        while part := _part(path, file, _SLICE):
            size, checksum = size + len(part), zlib.crc32(part, checksum)
    return FileChecksum(size, checksum)


def read_text(path: Path, limit: int) -> bytes:
    """Return all bytes of a file of at most `limit` bytes.

    Raises:
        ReadError: if it cannot be read.
        FormatError: if it is larger.
    """
    with open_file(path) as file:
        text = _part(path, file, min(limit, os.fstat(file.fileno()).st_size) + 1)
    if len(text) > limit:
        raise FormatError(
            f"TG-STORE-031: {path}: longer than {limit:,} bytes, the maximum for this file. Write it again."
        )
    return text


def _part(path: Path, file: BinaryIO, size: int) -> bytes:
    try:
        return file.read(size)
    except OSError as error:
        raise ReadError(f"TG-STORE-032: {path}: cannot be read ({error.strerror}). Check the disk.") from error


def read(path: str | os.PathLike[str]) -> tuple[dict[str, Array], dict[str, str]]:
    """Return the arrays of a safetensors file, memory-mapped and read-only, and its metadata.

    Only the header (at most 1 MiB) and bool arrays are read. Everything is validated before use: offsets must lie
    within the file, must follow one another without gap or overlap, and must fit shape and dtype.

    Raises:
        ReadError: if the file cannot be opened.
        FormatError: if it is not a safetensors file that numpy can represent.
    """
    path = Path(path)
    with open_file(path) as file:
        size = os.fstat(file.fileno()).st_size
        length = _header_length(path, _part(path, file, 8), size)
        header = _header(path, _part(path, file, length))
        metadata = header.pop("__metadata__", {})
        if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
            raise _broken(path, "its metadata is not a table of strings")
        _check_layout(path, header, size - 8 - length)
        data = np.memmap(file, np.uint8, "r", 8 + length) if size > 8 + length else np.zeros(0, np.uint8)
    arrays = {name: _view(data, entry) for name, entry in header.items()}
    for name, array in arrays.items():
        if array.dtype == bool and array.size and array.view(np.uint8).max() > 1:
            raise _broken(path, f"array '{name[:80]}' is of booleans and has bytes other than 0 and 1")
    return arrays, metadata


def _bytes(array: Array) -> Any:
    array = np.ascontiguousarray(array, array.dtype.newbyteorder("<"))
    return array.reshape(-1).view(np.uint8).data if array.size else b""


def _header_length(path: Path, prefix: bytes, size: int) -> int:
    if len(prefix) < 8:
        raise _broken(path, f"it has {size} bytes, too few for a header")
    length = int(struct.unpack("<Q", prefix)[0])
    if length > min(_HEADER_LIMIT, size - 8):
        raise _broken(path, f"its header claims {length} bytes of a file of {size} (the limit is {_HEADER_LIMIT})")
    return length


def _header(path: Path, text: bytes) -> dict[str, Any]:
    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        table = dict(pairs)
        if len(table) != len(pairs):
            raise ValueError("a name occurs twice")
        return table

    try:
        header = json.loads(text, object_pairs_hook=unique)
    except (ValueError, RecursionError) as error:
        raise _broken(path, f"its header is not JSON ({str(error)[:80]})") from error
    if not isinstance(header, dict) or len(header) > _TENSOR_LIMIT:
        raise _broken(path, "its header is not a table of arrays")
    return header


def _check_layout(path: Path, header: dict[str, Any], size: int) -> None:
    end = 0
    for name, entry in sorted(header.items(), key=lambda item: _offsets(path, *item)):
        start, stop = _offsets(path, name, entry)
        array, code, shape = f"array '{name[:80]}'", entry.get("dtype"), entry.get("shape")
        if not isinstance(code, str) or code not in _DTYPES:
            raise _broken(path, f"{array} has dtype {str(code)[:20]!r}, which numpy does not support")
        max_dimension = max(size, _MAX_EMPTY_DIMENSION)
        if (
            not isinstance(shape, list)
            or not all(type(n) is int and 0 <= n <= max_dimension for n in shape)
            or len(shape) > 8
        ):
            raise _broken(path, f"{array} has shape {str(shape)[:80]}")
        expected_bytes = math.prod(shape) * _DTYPES[code].itemsize
        if stop - start != expected_bytes:
            raise _broken(path, f"{array} has {stop - start} bytes, but its shape and dtype need {expected_bytes}")
        if start != end:
            raise _broken(path, f"{array} begins at byte {start} and not at {end}")
        end = stop
    if end != size:
        raise _broken(path, f"its arrays end at byte {end} of {size}")


def _offsets(path: Path, name: str, entry: Any) -> tuple[int, int]:
    offsets = entry.get("data_offsets") if isinstance(entry, dict) else None
    if not isinstance(offsets, list) or len(offsets) != 2 or not all(type(n) is int and n >= 0 for n in offsets):
        raise _broken(path, f"array '{name[:80]}' has no valid data_offsets")
    return offsets[0], offsets[1]


def _view(data: Array, entry: dict[str, Any]) -> Array:
    start, stop = entry["data_offsets"]
    dtype = _DTYPES[entry["dtype"]].newbyteorder("<")
    part = data[start:stop]
    if part.ctypes.data % dtype.itemsize:
        part = part.copy()  # Files of other writers may be unaligned.
    return part.view(dtype).reshape(entry["shape"])


def _broken(path: Path, what: str) -> FormatError:
    return FormatError(
        f"TG-STORE-033: {path}: {what}. It is not a safetensors file, or it was truncated or changed. Write it again "
        f"from its source."
    )
