"""Read the rows, values and bytes of row groups from the metadata of a Parquet file, before a reader trusts it.

Implements the parts of Thrift's compact protocol that footers and page headers use (parquet-format, `parquet.thrift`).
pyarrow is not used, because it ends the process if a crafted footer contradicts itself. pyarrow also unpacks each page
to the size in the page's own header, whatever the footer states.
"""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, BinaryIO

# Most bytes of a footer, and most levels of nesting in it. Schemas are flat lists, so real footers have about eight.
MOST_BYTES, DEPTH = 1 << 26, 24
# Bytes of a page header that are read first, and at most, as in pyarrow.
_HEADER_BYTES, _MOST_HEADER_BYTES = 1 << 9, 1 << 24

_STRUCT, _TRUE, _FALSE, _BYTE, _DOUBLE, _BINARY, _LISTS, _MAP = 12, 1, 2, 3, 7, 8, (9, 10), 11


@dataclass(frozen=True)
class RowGroup:
    """One row group: number of rows, and for each column the values, bytes in the file and uncompressed bytes.

    If page headers were read, values and uncompressed bytes are the larger of the footer's and the pages' numbers.
    """

    rows: int
    values: list[int]
    file_bytes: list[int]
    uncompressed_bytes: list[int]


def row_groups(path: str | os.PathLike[str], *, pages: bool = False) -> Iterator[RowGroup]:
    """Yield the row groups of a file.

    Args:
        path: the file.
        pages: whether to read the header of each page too.

    Raises:
        ValueError: if the footer, or the header of a page, is invalid.
        OSError: if the file cannot be read.
    """
    with open(path, "rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(size - 8, 0))
        tail = file.read(8)
        length = int.from_bytes(tail[:4], "little")
        if tail[4:] != b"PAR1" or length > size - 12:
            raise ValueError("it has no footer, so it may be truncated")
        if length > MOST_BYTES:
            raise ValueError(f"its footer has {length} bytes")
        file.seek(size - 8 - length)
        footer = _Thrift(file.read(length))
        for group in _list(_struct(footer.value(_STRUCT, 0)).get(4)):
            columns = [_struct(_struct(column).get(3)) for column in _list(_struct(group).get(1))]
            values, stored, plain = ([_number(column.get(field)) for column in columns] for field in (5, 7, 6))
            for index, column in enumerate(columns if pages else ()):
                page_totals = _pages(file, column, values[index], stored[index])
                values[index], plain[index] = max(values[index], page_totals[0]), max(plain[index], page_totals[1])
            yield RowGroup(_number(_struct(group).get(3)), values, stored, plain)


def _pages(file: BinaryIO, column: dict[int, Any], values: int, stored: int) -> tuple[int, int]:
    """Return the number of values and of uncompressed bytes of a column, added over its page headers."""
    starts = [_number(column[field]) for field in (9, 11) if column.get(field)]
    value_count = plain = pages = 0
    if not starts:
        return value_count, plain
    offset = min(starts)
    end = offset + stored
    while offset < end:
        header, length = _header(file, offset)
        plain += _number(header.get(2))
        value_count += sum(_number(_struct(header[kind]).get(1)) for kind in (5, 7, 8) if kind in header)
        offset += length + _number(header.get(3))
        pages += 1
        if pages > 2 * values + 16:
            raise ValueError("a column has more pages than values")
    return value_count, plain


def _header(file: BinaryIO, offset: int) -> tuple[dict[int, Any], int]:
    """Return the header of the page at an offset of a file, and the header's length in bytes."""
    read_bytes = _HEADER_BYTES
    while True:
        file.seek(offset)
        data = file.read(read_bytes)
        header = _Thrift(data)
        try:
            return _struct(header.value(_STRUCT, 0)), header.at
        except ValueError:
            if len(data) < read_bytes or read_bytes >= _MOST_HEADER_BYTES:
                raise ValueError(f"byte {offset} is not the start of a page") from None
        read_bytes *= 8


def _struct(value: Any) -> dict[int, Any]:
    if not isinstance(value, dict):
        raise ValueError("its footer or a page lacks a part")
    return value


def _list(value: Any) -> list[Any]:
    if not isinstance(value, list):
        raise ValueError("its footer lacks a list")
    return value


def _number(value: Any) -> int:
    if not isinstance(value, int) or value < 0:
        raise ValueError("its footer or a page lacks a count")
    return value


class _Thrift:
    """Decoder of Thrift's compact protocol. Structs become dicts by field id, lists stay lists.

    Values other than integers, structs and lists are skipped and returned as None.
    """

    def __init__(self, data: bytes) -> None:
        self._data, self.at = data, 0

    def value(self, kind: int, depth: int) -> Any:
        if depth > DEPTH:
            raise ValueError("its footer is nested too deeply")
        if kind == _STRUCT:
            return self._fields(depth)
        if kind in _LISTS:
            return self._items(depth)
        if kind == _BINARY:
            return self._skip(self._varint())
        if kind in (_BYTE, _TRUE, _FALSE):
            return self._skip(1)
        if kind == _DOUBLE:
            return self._skip(8)
        if 4 <= kind <= 6:
            number = self._varint()
            return (number >> 1) ^ -(number & 1)
        raise ValueError("its footer contains a value of unknown type")

    def _fields(self, depth: int) -> dict[int, Any]:
        fields: dict[int, Any] = {}
        field = 0
        while head := self._byte():
            kind, step = head & 15, head >> 4
            field = field + step if step else self.value(4, depth)
            # The type code of a boolean contains its value, so no byte follows.
            fields[field] = None if kind in (_TRUE, _FALSE) else self.value(kind, depth + 1)
        return fields

    def _items(self, depth: int) -> list[Any]:
        head = self._byte()
        count, kind = head >> 4, head & 15
        if count == 15:
            count = self._varint()
        if count > len(self._data) - self.at:
            raise ValueError("its footer lists more values than it contains")
        return [self.value(kind, depth + 1) for _ in range(count)]

    def _byte(self) -> int:
        self._skip(1)
        return self._data[self.at - 1]

    def _skip(self, count: int) -> None:
        self.at += count
        if self.at > len(self._data):
            raise ValueError("its footer ends within a value")

    def _varint(self) -> int:
        number = shift = 0
        while True:
            byte = self._byte()
            number |= (byte & 127) << shift
            shift += 7
            if byte < 128:
                return number
            if shift > 63:
                raise ValueError("its footer contains a number of more than 64 bits")
