"""Distinct images of a set of traces (`Images`): digest, size and type of each, and the source of its bytes.

No image is decoded or downloaded here. The bytes come from the records that were read, or from the `media.bin` of
prepared data.
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
    """A source of image files."""

    def has_picture(self, digest: bytes) -> bool:
        """Return whether the source had the file with this blake3 digest when the source was created."""
        ...

    def picture_bytes(self, digest: bytes) -> bytes:
        """Return the file with this blake3 digest, as it was recorded.

        Raises:
            ReadError: if the file is missing now, or has another digest.
        """
        ...


class _Records:
    """A source that reads images again from the records of traces."""

    def __init__(self, traces: _core.Traces, digest: NDArray[np.uint8]) -> None:
        self._traces, self._digests = traces, {row.tobytes() for row in digest}

    def has_picture(self, digest: bytes) -> bool:
        return digest in self._digests

    def picture_bytes(self, digest: bytes) -> bytes:
        return _core.picture_bytes(self._traces, digest)


@dataclass(frozen=True, repr=False)
class Images:
    """P distinct image files, with different digests.

    Args:
        digest: [P, 32] uint8, the blake3 of each file.
        width, height: [P] int32, in pixels, from the header of the file.
        media_type: P of `MEDIA_TYPES`, detected from the bytes. The type in the record is ignored.
        sources: the sources that `bytes_of` searches, in order.
    """

    digest: NDArray[np.uint8]
    width: NDArray[np.int32]
    height: NDArray[np.int32]
    media_type: tuple[str, ...]
    sources: Sequence[Source] = ()

    @classmethod
    def of_records(cls, traces: _core.Traces) -> "Images":
        """Return the images that are embedded in the records of traces."""
        images = _core.pictures_of(traces)
        digest = np.frombuffer(images["digests"], np.uint8).reshape(-1, 32)
        widths, heights = np.array(images["widths"], np.int32), np.array(images["heights"], np.int32)
        return cls(digest, widths, heights, tuple(images["media_types"]), (_Records(traces, digest),))

    def __len__(self) -> int:
        return len(self.digest)

    def __repr__(self) -> str:
        return f"Pictures({len(self)})"

    def bytes_of(self, row: int) -> bytes:
        """Return the file of an image.

        Raises:
            ReadError: if no source has the file.
        """
        digest = self.digest[row].tobytes()
        source = next((source for source in self.sources if source.has_picture(digest)), None)
        if source is None:
            raise ReadError(
                f"TG-IMAGE-006: the image {digest.hex()} is missing: only its digest is recorded. A policy cannot use "
                "it. Read or prepare the records that contain it."
            )
        return source.picture_bytes(digest)

    def take(self, rows: NDArray[np.integer]) -> "Images":
        """Return the images of some rows, in the order of `rows`."""
        kinds = tuple(self.media_type[row] for row in np.asarray(rows).tolist())
        return Images(self.digest[rows], self.width[rows], self.height[rows], kinds, self.sources)


def merge(parts: Sequence[Images]) -> tuple[Images, list[NDArray[np.int32]]]:
    """Merge several sets of images.

    Returns:
        the distinct images, and for each part the new row of each of its images.
    """
    digests = [[digest.tobytes() for digest in part.digest] for part in parts]
    rows = {
        digest: row
        for row, digest in enumerate(dict.fromkeys(digest for part_digests in digests for digest in part_digests))
    }
    new_rows = [np.array([rows[digest] for digest in part_digests], np.int32) for part_digests in digests]
    location = {
        digest: (part, at)
        for part, part_digests in zip(parts, digests, strict=True)
        for at, digest in enumerate(part_digests)
    }
    locations = [location[digest] for digest in rows]
    sources = tuple({id(source): source for part in parts for source in part.sources}.values())
    table = Images(
        digest=np.array([part.digest[at] for part, at in locations], np.uint8).reshape(-1, 32),
        width=np.array([part.width[at] for part, at in locations], np.int32),
        height=np.array([part.height[at] for part, at in locations], np.int32),
        media_type=tuple(part.media_type[at] for part, at in locations),
        sources=sources,
    )
    return table, new_rows
