"""The distinct pictures of a set of traces: what is known of each without decoding it, and where its bytes are.

Here is `Pictures`. Nothing is decoded and nothing is fetched: bytes come from the records that were read, or from the
`media` folder of what was prepared.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray


class Source(Protocol):
    """Where the files of pictures are."""

    def picture_bytes(self, digest: bytes) -> bytes:
        """The file whose blake3 is `digest`, as it was recorded.

        Raises:
            ReadError: if it is not there any more, or has another digest.
        """
        ...


@dataclass(frozen=True, repr=False)
class Pictures:
    """P distinct files of pictures, no two with the same digest.

    Args:
        digest: [P, 32] uint8, the blake3 of each file.
        width, height: [P] int32, in pixels, as the file's header says.
        media_type: P of "image/png", "image/jpeg", "image/webp", "image/gif", by the bytes and not by what was said.
        sources: where `bytes_of` looks, in order.
    """

    digest: NDArray[np.uint8]
    width: NDArray[np.int32]
    height: NDArray[np.int32]
    media_type: tuple[str, ...]
    sources: Sequence[Source] = ()

    def __len__(self) -> int:
        return len(self.digest)

    def __repr__(self) -> str:
        return f"Pictures({len(self)})"
