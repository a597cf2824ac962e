"""What of an input is read together: parts, which depend on the input and their size alone, not on who reads them."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tracegrad.config import Map
from tracegrad.inputs.places import Place, expand
from tracegrad.prepare.cuts import pieces

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
