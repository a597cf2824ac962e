"""Where a large file of lines may be cut between records, and on which line each piece of it begins.

A cut is a function of the file alone: the first line behind a multiple of the size of a part that begins a record of
another group than the record before it. Called by `parts`.
"""

from dataclasses import replace
from itertools import pairwise
from typing import BinaryIO

from tracegrad.config import Map
from tracegrad.errors import ReadError, TracegradError
from tracegrad.inputs.adapters import is_chunk
from tracegrad.inputs.mapping import loads
from tracegrad.inputs.options import MAX_RECORD_BYTES, Options
from tracegrad.inputs.places import Place
from tracegrad.inputs.reading import of_part

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
