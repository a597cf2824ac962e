"""Where the pictures of `Sequences` stand: a list of spans for each branch.

Here is `Images`. A span holds every id that stands for one picture; what else is between them (the marks of rows and
columns that some families write) is text.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tracegrad.pictures.table import Pictures


@dataclass(frozen=True, repr=False)
class Images:
    """S spans of N branches, in order. Tokens count in the flat arrays of the `Sequences`.

    Args:
        cu_images: [N+1] int64: branch n has spans cu_images[n]:cu_images[n+1].
        cu_features: [S+1] int64: span s has the features cu_features[s]:cu_features[s+1].
        at: [F] int64: the token of each feature, rising; all have the id `pad`.
        picture: [S] int32: row of `pictures`.
        pad: the id that stands for a picture.
        pictures: what they are of.
    """

    cu_images: NDArray[np.int64]
    cu_features: NDArray[np.int64]
    at: NDArray[np.int64]
    picture: NDArray[np.int32]
    pad: int
    pictures: Pictures

    def __len__(self) -> int:
        return len(self.picture)

    def __repr__(self) -> str:
        return f"Images({len(self)} spans of {len(self.pictures)} pictures)"
