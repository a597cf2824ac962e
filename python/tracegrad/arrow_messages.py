"""What the messages of an Arrow file say of themselves: bytes stored, and bytes held once they are read.

Flatbuffers as far as record batches need them (Arrow's `Message.fbs` and `File.fbs`). pyarrow unpacks a whole batch
before anyone can look at it, so it is not asked. Called by `arrow_files`.
"""

import os
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import BinaryIO

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
