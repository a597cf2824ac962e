"""Cut inputs into parts by content, so that any number of workers writes the same folder."""

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, BinaryIO

from tracegrad.config import Map
from tracegrad.data.field_map import loads
from tracegrad.data.formats import is_chunk
from tracegrad.data.read_options import MAX_RECORD_BYTES, Options
from tracegrad.data.reader import of_part
from tracegrad.data.sources import Place, expand
from tracegrad.errors import ReadError, TracegradError

_BLOCK = 8 << 20
_STEP = 1 << 16
_BOM = b"\xef\xbb\xbf"


def pieces(place: Place, part_bytes: int, told: Map) -> list[Place]:
    """A file in pieces of about `part_bytes`; itself alone, where it is not of lines or not larger.

    Raises:
        ReadError: if it cannot be read.
    """
    if place.kind != "file" or place.size <= part_bytes:
        return [place]
    try:
        with open(place.path, "rb", buffering=0) as file:
            if not _is_of_lines(file):
                return [place]
            found = [0]
            for at in range(part_bytes, place.size, part_bytes):
                where = _cut(file, place, at, min(at + part_bytes, place.size), told)
                if found[-1] < where < place.size:
                    found.append(where)
            return _numbered(file, place, [*found, place.size]) if len(found) > 1 else [place]
    except OSError as error:
        raise ReadError(f"{place.path}: cannot be read ({error.strerror}). Check that the file is there.") from error


def _is_of_lines(file: BinaryIO) -> bool:
    """Whether a file begins as one object on each line does, in plain text."""
    return _begins_record(file.read(_STEP).removeprefix(_BOM).lstrip())


def _begins_record(line: bytes) -> bool:
    """Whether a line can only be the first of a record: in a stream of events none begins so."""
    return line.startswith(b"{") and line[1:2] not in (b"", b"\n", b"\r")


def _numbered(file: BinaryIO, place: Place, bounds: list[int]) -> list[Place]:
    """The pieces between these bytes, each with the line on which it begins."""
    out, line = [], 1
    file.seek(0)
    for start, end in pairwise(bounds):
        out.append(replace(place, size=end - start, start=start, end=end, line=line))
        left = end - start if end < place.size else 0
        while left and (block := file.read(min(_BLOCK, left))):
            line, left = line + block.count(b"\n"), left - len(block)
    return out


def _cut(file: BinaryIO, place: Place, at: int, most: int, told: Map) -> int:
    """Where the first record behind `at` begins whose group is not that of the one before it.

    A group without an end before `most` is cut at the first record; where none begins, the answer is 0.
    """
    start = _next_line(file, at, place.size)
    before = _before(file, place, start, told)
    first = 0
    while start < most:
        end = _next_line(file, start + 1, place.size)
        file.seek(start)
        line = file.read(min(end - start, MAX_RECORD_BYTES))
        groups = _groups(place, start, end, told)
        if groups and _begins_record(line) and not is_chunk(loads(line)):
            first = first or start
            if groups[0] is None or groups[:1] != before:
                return start
        before = groups[-1:] or before
        start = end
    return first


def _before(file: BinaryIO, place: Place, start: int, told: Map) -> list[str | None]:
    """The group of the last trace that begins before a line: of the record before it, or where that is bad or blank,
    of one before that.
    """
    end, least = start, max(start - _BLOCK, 0)
    while end > least:
        begin = _line_before(file, end)
        if groups := _groups(place, begin, end, told):
            return groups[-1:]
        end = begin
    return []


def _groups(place: Place, start: int, end: int, told: Map) -> list[str | None]:
    """The groups of the traces that are made of these bytes, as they are in the whole file; none of a bad record."""
    if start >= end:
        return []
    one = replace(place, size=end - start, start=start, end=end, line=1)
    try:
        return [group for traces in of_part([one], told, Options(on_error="skip")) for group in traces.groups]
    except TracegradError:
        return []


def _next_line(file: BinaryIO, at: int, size: int) -> int:
    """Where the first line begins at `at` or behind it; the size of the file, where none does."""
    file.seek(at - 1)
    place = at - 1
    while block := file.read(_STEP):
        if (found := block.find(b"\n")) >= 0:
            return min(place + found + 1, size)
        place += len(block)
    return size


def _line_before(file: BinaryIO, start: int) -> int:
    """Where the last line begins that ends before `start`, which begins one; at most a record's bytes before it."""
    end = start - 1
    while end > max(start - MAX_RECORD_BYTES, 0):
        begin = max(end - _STEP, 0)
        file.seek(begin)
        block = file.read(end - begin)
        if (found := block.rfind(b"\n")) >= 0:
            return begin + found + 1
        end = begin
    return max(end, 0)


PART_BYTES = 256 << 20
"""Bytes of inputs in a part."""


@dataclass(frozen=True)
class Part:
    """Some of an input that is read in one go.

    Args:
        index: its number, from 0.
        places: files, or pieces of them, in order.
        alone: whether there is no other.
    """

    index: int
    places: tuple[Place, ...]
    alone: bool = False

    @property
    def name(self) -> str:
        """What its record and its files aside are called."""
        return f"part-{self.index:05d}"

    @property
    def size(self) -> int:
        """Bytes on the disk."""
        return sum(place.size for place in self.places)

    def __str__(self) -> str:
        first = self.places[0]
        where = f" from byte {first.start:,}" if first.start else ""
        more = f" and {len(self.places) - 1:,} files more" if len(self.places) > 1 else ""
        return f"{self.name} ({first.path}{where}{more})"


def cut(
    source: str | Sequence[str | os.PathLike[str]], part_bytes: int = PART_BYTES, map: Map | None = None
) -> tuple[list[Part], str]:
    """Cuts an input into parts.

    Files are put together in their order until a part has `part_bytes`. A larger file of lines on this machine, without
    compression, is cut between records where the group changes; any other is a part as a whole.

    Args:
        source: what `tracegrad.read` takes as names, one or several.
        part_bytes: of the files as they are on the disk.
        map: as for `tracegrad.read`.

    Returns:
        The parts, and where there is one alone although there are more bytes, why, in a sentence.

    Raises:
        ReadError, ArgumentError: as for `tracegrad.read`, for names of nothing.
    """
    told = map or Map()
    places = expand([source] if isinstance(source, (str, os.PathLike)) else source)
    if why := _whole(places, told):
        return [Part(0, tuple(places), alone=True)], why if _size(places) > part_bytes else ""
    parts: list[list[Place]] = [[]]
    for place in places:
        for piece in pieces(place, part_bytes, told):
            held = _size(parts[-1])
            if held and piece.size and held + piece.size > part_bytes:  # empty files stay with those before them
                parts.append([])
            parts[-1].append(piece)
    return [Part(index, tuple(each), alone=len(parts) == 1) for index, each in enumerate(parts)], ""


def _whole(places: list[Place], told: Map) -> str:
    """Why an input is not cut; "" where it may be."""
    if told.session:
        return "--map.session joins records of the whole input"
    if any(not _is_there(place) for place in places):
        return "what comes through a pipe can be read once"
    return ""


def _is_there(place: Place) -> bool:
    """Whether a place can be read again."""
    return place.kind not in ("file", "stdin") or os.path.isfile(place.path)


def _size(places: Sequence[Any]) -> int:
    return sum(place.size for place in places)
