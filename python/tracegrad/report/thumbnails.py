"""Pictures on a page: small ones, drawn anew from the pixels of what was recorded, or a box that says why not.

Here is `Thumbnails`. Nothing of a stranger's file gets into a page but colours: the file is decoded within limits, made
small, and written as another PNG inside the page's own text. Called by `tokens`, and by `view` for messages.
"""

import base64
import io
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tracegrad.errors import TracegradError
from tracegrad.pictures import Pictures
from tracegrad.pictures.decoding import pixels
from tracegrad.report.text import escape

MOST = 64
"""Distinct pictures of a page that are drawn; the others are boxes."""
SIDE = 96
"""Pixels of the longer side of what is drawn."""
MOST_PIXELS = 40_000_000
"""Of a picture that is decoded to be drawn small: a camera's, and no bomb."""
PAGE_PIXELS = 4 * MOST_PIXELS
"""Of all pictures that are decoded for one page."""
MOST_HTML = 2_000_000
"""Characters of all that is drawn on a page: one picture may stand at many places."""


class Thumbnails:
    """What stands for pictures on one page.

    Args:
        most: distinct pictures that are drawn.
        drawn: what other pages have drawn, by digest: an address of data, or why there is none. It grows by what this
            page draws.
    """

    def __init__(self, most: int = MOST, drawn: dict[bytes, tuple[str, str]] | None = None) -> None:
        self.most, self.room, self.pixels = most, MOST_HTML, PAGE_PIXELS
        self.drawn = {} if drawn is None else drawn
        self._here: set[bytes] = set()

    @property
    def any(self) -> bool:
        """Whether the page has a picture that was drawn."""
        return self.room < MOST_HTML

    def html(self, pictures: Pictures, row: int, more: str = "") -> str:
        """One picture.

        Args:
            row: of `pictures`.
            more: what is said of its place when it is pointed at.
        """
        digest = pictures.digest[row].tobytes()
        size = f"picture {pictures.width[row]} x {pictures.height[row]}"
        told = "  ·  ".join([size, pictures.media_type[row], f"blake3 {digest.hex()[:16]}", *([more] if more else [])])
        source, why = self._drawn(pictures, row, digest)
        if not source:
            return (
                f'<span class="picture box" data-n="{escape(told)}">{escape(f"{size}: {why}" if why else size)}</span>'
            )
        alt = escape(f"{size}, blake3 {digest.hex()}")
        # The address is of our own making, and `=` at its end would look like an attribute of a stranger's.
        found = f'<span class="picture" data-n="{escape(told)}"><img alt="{alt}" src="{source}"></span>'
        self.room -= len(found)
        return found

    def absent(self, name: str) -> str:
        """What stands for a picture of which the record has a digest alone."""
        return f'<span class="picture box">{escape(f"picture {name[:23]}: it is not in the record")}</span>'

    def _drawn(self, pictures: Pictures, row: int, digest: bytes) -> tuple[str, str]:
        """An address of data, or why there is none; both are empty where there are enough."""
        if self.room <= 0 or (digest not in self._here and len(self._here) >= self.most):
            return "", ""
        if digest not in self.drawn:
            count = int(pictures.width[row]) * int(pictures.height[row])
            if self.pixels < count <= MOST_PIXELS:
                return "", f"the pictures of this page have more than {PAGE_PIXELS:,} pixels"
            self.pixels -= count if count <= MOST_PIXELS else 0
            try:
                self.drawn[digest] = "data:image/png;base64," + base64.b64encode(small(pictures, row)).decode(), ""
            except TracegradError as error:
                self.drawn[digest] = "", str(error)[:400]
        self._here.add(digest)
        return self.drawn[digest]


def small(pictures: Pictures, row: int, side: int = SIDE) -> bytes:
    """A PNG of at most `side` pixels on its longer side and 256 colours, made from the pixels of a picture.

    Raises:
        ReadError: if it is not here any more, cannot be decoded, or is too large.
        ArgumentError: if Pillow is not installed.
    """
    size = int(pictures.width[row]), int(pictures.height[row])
    name = f"picture {pictures.digest[row].tobytes().hex()[:16]}"
    return _png(pixels(pictures.bytes_of(row), name, pictures.media_type[row], size, MOST_PIXELS), side)


def _png(found: NDArray[np.uint8], side: int) -> bytes:
    from PIL import Image

    image: Any = Image.fromarray(found)
    image.thumbnail((side, side))
    out = io.BytesIO()
    image.quantize(256).save(out, "PNG", optimize=True)
    return out.getvalue()
