"""What a Parquet file says of itself: the rows, values and bytes of its row groups, before a reader trusts any of it.

Thrift's compact protocol, as far as footers and headers of pages need it (parquet-format, `parquet.thrift`). pyarrow
ends the process where a crafted footer contradicts itself, so it is not asked. It unpacks each page to the size that
the page's own header names, whatever the footer says. Called by `arrow`.
"""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, BinaryIO

# Bytes of a footer, and levels of nesting in it: schemas are flat lists, so real ones have about eight.
MOST_BYTES, DEPTH = 1 << 26, 24
# Bytes of a page's header that are read at first, and at most, as in pyarrow.
_HEADER_BYTES, _MOST_HEADER_BYTES = 1 << 9, 1 << 24

_STRUCT, _TRUE, _FALSE, _BYTE, _DOUBLE, _BINARY, _LISTS, _MAP = 12, 1, 2, 3, 7, 8, (9, 10), 11


@dataclass(frozen=True)
class RowGroup:
    """One row group: its rows, and of each column values, bytes in the file and bytes before compression.

    Of values and bytes before compression each is the larger one of the footer's and of what the pages claim, if asked.
    """

    rows: int
    values: list[int]
    stored: list[int]
    plain: list[int]


def row_groups(path: str | os.PathLike[str], *, pages: bool = False) -> Iterator[RowGroup]:
    """The row groups of a file.

    Args:
        pages: whether to look at the header of each page too.

    Raises:
        ValueError: if the footer, or the header of a page, is not one.
        OSError: if the file cannot be read.
    """
    with open(path, "rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(size - 8, 0))
        tail = file.read(8)
        length = int.from_bytes(tail[:4], "little")
        if tail[4:] != b"PAR1" or length > size - 12:
            raise ValueError("it has no footer, as if it were cut")
        if length > MOST_BYTES:
            raise ValueError(f"its footer has {length} bytes")
        file.seek(size - 8 - length)
        footer = _Thrift(file.read(length))
        for group in _list(_struct(footer.value(_STRUCT, 0)).get(4)):
            columns = [_struct(_struct(column).get(3)) for column in _list(_struct(group).get(1))]
            values, stored, plain = ([_number(column.get(field)) for column in columns] for field in (5, 7, 6))
            for at, column in enumerate(columns if pages else ()):
                found = _pages(file, column, values[at], stored[at])
                values[at], plain[at] = max(values[at], found[0]), max(plain[at], found[1])
            yield RowGroup(_number(_struct(group).get(3)), values, stored, plain)


def _pages(file: BinaryIO, column: dict[int, Any], values: int, stored: int) -> tuple[int, int]:
    """Values, and bytes before compression, of all pages of a column, as their headers have it."""
    starts = [_number(column[field]) for field in (9, 11) if column.get(field)]
    held = plain = pages = 0
    if not starts:
        return held, plain
    at = min(starts)
    end = at + stored
    while at < end:
        header, length = _header(file, at)
        plain += _number(header.get(2))
        held += sum(_number(_struct(header[kind]).get(1)) for kind in (5, 7, 8) if kind in header)
        at += length + _number(header.get(3))
        pages += 1
        if pages > 2 * values + 16:
            raise ValueError("a column has more pages than values")
    return held, plain


def _header(file: BinaryIO, at: int) -> tuple[dict[int, Any], int]:
    """The header of the page that begins at a place of a file, and its length."""
    most = _HEADER_BYTES
    while True:
        file.seek(at)
        data = file.read(most)
        header = _Thrift(data)
        try:
            return _struct(header.value(_STRUCT, 0)), header.at
        except ValueError:
            if len(data) < most or most >= _MOST_HEADER_BYTES:
                raise ValueError(f"no page begins at byte {at}") from None
        most *= 8


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
    """Values of the compact protocol: structs as dicts by field, lists as lists; what no count stands in is None."""

    def __init__(self, data: bytes) -> None:
        self._data, self.at = data, 0

    def value(self, kind: int, depth: int) -> Any:
        if depth > DEPTH:
            raise ValueError("its footer is nested without end")
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
        raise ValueError("its footer holds a value of no known kind")

    def _fields(self, depth: int) -> dict[int, Any]:
        fields: dict[int, Any] = {}
        field = 0
        while head := self._byte():
            kind, step = head & 15, head >> 4
            field = field + step if step else self.value(4, depth)
            # Of a boolean the kind is the value.
            fields[field] = None if kind in (_TRUE, _FALSE) else self.value(kind, depth + 1)
        return fields

    def _items(self, depth: int) -> list[Any]:
        head = self._byte()
        count, kind = head >> 4, head & 15
        if count == 15:
            count = self._varint()
        if count > len(self._data) - self.at:
            raise ValueError("its footer lists more than it holds")
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
                raise ValueError("its footer holds a number of more than 64 bits")
