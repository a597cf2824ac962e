"""The distinct pictures of a set of traces: what is known of each without decoding it, and where its bytes are.

Here is `Pictures`. Nothing is decoded and nothing is fetched: bytes come from the records that were read, or from the
`media` folder of what was prepared.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from tracegrad import _core
from tracegrad.errors import ReadError

MEDIA_TYPES = ("image/png", "image/jpeg", "image/webp", "image/gif")


class Source(Protocol):
    """Where the files of pictures are."""

    def has_picture(self, digest: bytes) -> bool:
        """Whether it had the file whose blake3 is `digest` when it was made."""
        ...

    def picture_bytes(self, digest: bytes) -> bytes:
        """The file whose blake3 is `digest`, as it was recorded.

        Raises:
            ReadError: if it is not there any more, or has another digest.
        """
        ...


class _Records:
    """The records of traces, of which pictures are read again."""

    def __init__(self, traces: _core.Traces, digest: NDArray[np.uint8]) -> None:
        self._traces, self._has = traces, {row.tobytes() for row in digest}

    def has_picture(self, digest: bytes) -> bool:
        return digest in self._has

    def picture_bytes(self, digest: bytes) -> bytes:
        return _core.picture_bytes(self._traces, digest)


@dataclass(frozen=True, repr=False)
class Pictures:
    """P distinct files of pictures, no two with the same digest.

    Args:
        digest: [P, 32] uint8, the blake3 of each file.
        width, height: [P] int32, in pixels, as the file's header says.
        media_type: P of `MEDIA_TYPES`, by the bytes and not by what was said.
        sources: where `bytes_of` looks, in order.
    """

    digest: NDArray[np.uint8]
    width: NDArray[np.int32]
    height: NDArray[np.int32]
    media_type: tuple[str, ...]
    sources: Sequence[Source] = ()

    @classmethod
    def of_records(cls, traces: _core.Traces) -> "Pictures":
        """Those of traces, which the records hold."""
        digests, widths, heights, kinds = _core.pictures_of(traces)
        digest = np.frombuffer(digests, np.uint8).reshape(-1, 32)
        sizes = np.array([widths, heights], np.int32).reshape(2, -1)
        return cls(digest, sizes[0], sizes[1], tuple(kinds), (_Records(traces, digest),))

    def __len__(self) -> int:
        return len(self.digest)

    def __repr__(self) -> str:
        return f"Pictures({len(self)})"

    def bytes_of(self, row: int) -> bytes:
        """The file of a picture.

        Raises:
            ReadError: if no source has it any more.
        """
        digest = self.digest[row].tobytes()
        source = next((source for source in self.sources if source.has_picture(digest)), None)
        if source is None:
            raise ReadError(
                f"the picture {digest.hex()} is not here: only its digest is known. A policy cannot see it. Read or "
                "prepare the records that hold it."
            )
        return source.picture_bytes(digest)

    def take(self, rows: NDArray[np.integer]) -> "Pictures":
        """Some of them, in the order given."""
        kinds = tuple(self.media_type[row] for row in np.asarray(rows).tolist())
        return Pictures(self.digest[rows], self.width[rows], self.height[rows], kinds, self.sources)


def joined(parts: Sequence[Pictures]) -> tuple[Pictures, list[NDArray[np.int32]]]:
    """The distinct pictures of several tables, and for each table the row of each of its pictures."""
    names = [[digest.tobytes() for digest in part.digest] for part in parts]
    rows = {name: row for row, name in enumerate(dict.fromkeys(name for each in names for name in each))}
    places = [np.array([rows[name] for name in each], np.int32) for each in names]
    first = {name: (part, at) for part, each in zip(parts, names, strict=True) for at, name in enumerate(each)}
    found = [first[name] for name in rows]
    sources = tuple({id(source): source for part in parts for source in part.sources}.values())
    table = Pictures(
        digest=np.array([part.digest[at] for part, at in found], np.uint8).reshape(-1, 32),
        width=np.array([part.width[at] for part, at in found], np.int32),
        height=np.array([part.height[at] for part, at in found], np.int32),
        media_type=tuple(part.media_type[at] for part, at in found),
        sources=sources,
    )
    return table, places
