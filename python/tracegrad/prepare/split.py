"""Split inputs into parts by content, so that any number of workers writes the same folder."""

import contextlib
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, BinaryIO

from tracegrad.config import FieldMap
from tracegrad.data.batches import is_batch_line
from tracegrad.data.field_map import parse_record
from tracegrad.data.formats import is_chunk, is_spans
from tracegrad.data.read_options import MAX_RECORD_BYTES, Options
from tracegrad.data.reader import open_part
from tracegrad.data.sources import Place, expand, open_place
from tracegrad.errors import ReadError, TracegradError

_BLOCK = 8 << 20
_STEP = 1 << 16
_BOM = b"\xef\xbb\xbf"


def split_file(place: Place, part_bytes: int, map: FieldMap) -> list[Place]:
    """Return a file in pieces of about `part_bytes`.

    A file that is not larger, or does not have a record per line, is returned unchanged.

    Raises:
        ReadError: if it cannot be read.
    """
    if place.kind != "file" or place.size <= part_bytes:
        return [place]
    try:
        with open(place.path, "rb", buffering=0) as file:
            if not _is_of_lines(file):
                return [place]
            bounds = [0]
            for target in range(part_bytes, place.size, part_bytes):
                bound = _find_cut(file, place, target, min(target + part_bytes, place.size), map)
                if bounds[-1] < bound < place.size:
                    bounds.append(bound)
            return _with_lines(file, place, [*bounds, place.size]) if len(bounds) > 1 else [place]
    except OSError as error:
        raise ReadError(
            f"TG-PREPARE-019: {place.path}: cannot be read ({error.strerror}). Check that the file is there."
        ) from error


def _is_of_lines(file: BinaryIO) -> bool:
    """Return whether a file starts like plain text with one JSON object per line."""
    return _begins_record(file.read(_STEP).removeprefix(_BOM).lstrip())


def _begins_record(line: bytes) -> bool:
    """Return whether a line can only be the first of a record.

    In a stream of events, no other line starts like this.
    """
    return line.startswith(b"{") and line[1:2] not in (b"", b"\n", b"\r")


def _with_lines(file: BinaryIO, place: Place, bounds: list[int]) -> list[Place]:
    """Return the pieces between byte offsets, each with the number of its first line."""
    out, line = [], 1
    file.seek(0)
    for start, end in pairwise(bounds):
        out.append(replace(place, size=end - start, start=start, end=end, line=line))
        remaining = end - start if end < place.size else 0
        while remaining and (block := file.read(min(_BLOCK, remaining))):
            line, remaining = line + block.count(b"\n"), remaining - len(block)
    return out


def _find_cut(file: BinaryIO, place: Place, target: int, limit: int, field_map: FieldMap) -> int:
    """Return the offset of the first record after `target` that starts a new group.

    If no group ends before `limit`, return the first record. If no record starts there, return 0.
    """
    start = _next_line(file, target, place.size)
    previous_group = _group_before(file, place, start, field_map)
    first = 0
    while start < limit:
        end = _next_line(file, start + 1, place.size)
        file.seek(start)
        line = file.read(min(end - start, MAX_RECORD_BYTES))
        groups = _groups(place, start, end, field_map)
        if groups and _begins_record(line) and not is_chunk(parse_record(line)):
            first = first or start
            if groups[0] is None or groups[:1] != previous_group:
                return start
        previous_group = groups[-1:] or previous_group
        start = end
    return first


def _group_before(file: BinaryIO, place: Place, start: int, field_map: FieldMap) -> list[str | None]:
    """Return the group of the last trace before `start`, or an empty list.

    Bad and blank records are skipped, up to `_BLOCK` bytes back.
    """
    end, limit = start, max(start - _BLOCK, 0)
    while end > limit:
        start_of_line = _line_before(file, end)
        if groups := _groups(place, start_of_line, end, field_map):
            return groups[-1:]
        end = start_of_line
    return []


def _groups(place: Place, start: int, end: int, field_map: FieldMap) -> list[str | None]:
    """Return the groups of the traces in these bytes, as in the complete file. A bad record yields none."""
    if start >= end:
        return []
    piece = replace(place, size=end - start, start=start, end=end, line=1)
    try:
        return [group for traces in open_part([piece], field_map, Options(on_error="skip")) for group in traces.groups]
    except TracegradError:
        return []


def _next_line(file: BinaryIO, offset: int, size: int) -> int:
    """Return the offset of the first line that starts at `at` or later, or the file size."""
    file.seek(offset - 1)
    position = offset - 1
    while block := file.read(_STEP):
        if (newline := block.find(b"\n")) >= 0:
            return min(position + newline + 1, size)
        position += len(block)
    return size


def _line_before(file: BinaryIO, start: int) -> int:
    """Return the offset of the line before the one that starts at `start`.

    The search is limited to the maximum size of a record.
    """
    end = start - 1
    while end > max(start - MAX_RECORD_BYTES, 0):
        begin = max(end - _STEP, 0)
        file.seek(begin)
        block = file.read(end - begin)
        if (newline := block.rfind(b"\n")) >= 0:
            return begin + newline + 1
        end = begin
    return max(end, 0)


PART_BYTES = 256 << 20
"""Default number of input bytes in a part."""


@dataclass(frozen=True)
class Part:
    """A portion of the input that one worker reads.

    Args:
        index: its number, from 0.
        places: files or pieces of files, in order.
        is_only: whether it is the only part.
    """

    index: int
    places: tuple[Place, ...]
    is_only: bool = False

    @property
    def name(self) -> str:
        """Return the prefix for the names of its record and of its files with bad records."""
        return f"part-{self.index:05d}"

    @property
    def size(self) -> int:
        """Return its size on disk in bytes."""
        return sum(place.size for place in self.places)

    def __str__(self) -> str:
        first = self.places[0]
        offset = f" from byte {first.start:,}" if first.start else ""
        others = f" and {len(self.places) - 1:,} files more" if len(self.places) > 1 else ""
        return f"{self.name} ({first.path}{offset}{others})"


def split_inputs(
    source: str | Sequence[str | os.PathLike[str]], part_bytes: int = PART_BYTES, map: FieldMap | None = None
) -> tuple[list[Part], str | None]:
    """Split an input into parts.

    Files are combined in order until a part has `part_bytes`. A larger file is split between records of different
    groups if it is local, uncompressed and has a record per line. Any other file stays in one part.

    Args:
        source: one or several names that `tracegrad.read` accepts.
        part_bytes: size of a part, in bytes of the files on disk.
        map: as for `tracegrad.read`.

    Returns:
        The parts. If an input larger than `part_bytes` had to stay in one part, also the reason in a sentence,
            otherwise None.

    Raises:
        ReadError, ArgumentError: as for `tracegrad.read`, if a name matches nothing.
    """
    field_map = map or FieldMap()
    places = expand([source] if isinstance(source, (str, os.PathLike)) else source)
    if reason := _reason_not_cut(places, field_map, part_bytes):
        return [Part(0, tuple(places), is_only=True)], reason if _size(places) > part_bytes else None
    parts: list[list[Place]] = [[]]
    for place in places:
        for piece in split_file(place, part_bytes, field_map):
            size = _size(parts[-1])
            if size and piece.size and size + piece.size > part_bytes:  # Empty files do not start a part.
                parts.append([])
            parts[-1].append(piece)
    return [Part(index, tuple(part_places), is_only=len(parts) == 1) for index, part_places in enumerate(parts)], None


def _reason_not_cut(places: list[Place], field_map: FieldMap, part_bytes: int) -> str | None:
    """Return the reason why an input is not split, or None."""
    if field_map.session:
        return "--map.session joins records of all inputs"
    if any(not _can_reread(place) for place in places):
        return "a pipe can be read only once"
    for head in map(_head, places) if _size(places) > part_bytes else ():
        if any(map(is_spans, head)):
            return "the spans of a trace can be in any of its files"
        if len(places) > 1 and any(map(is_batch_line, head)):
            return "the lines of a batch are joined by custom_id over all inputs"
    return None


def _head(place: Place) -> list[Any]:
    """Return the first records of an input, parsed; [] if it cannot be read, which its reader reports."""
    with contextlib.suppress(TracegradError):
        return [parse_record(record) for record in open_place(place, Options(on_error="skip")).head()]
    return []


def _can_reread(place: Place) -> bool:
    """Return whether an input can be read again."""
    return place.kind not in ("file", "stdin") or os.path.isfile(place.path)


def _size(places: Sequence[Any]) -> int:
    return sum(place.size for place in places)
