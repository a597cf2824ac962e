"""The pictures of one packed row.

Here is `RowImages`, which a `Batch` holds. `pack` makes it; `processor` adds what the tower takes.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tracegrad.pictures.rule import Rule
from tracegrad.pictures.table import Pictures


@dataclass(frozen=True, repr=False)
class RowImages:
    """I pictures at their places in a row of T tokens, in the order of the row; a shared prefix holds each once.

    Args:
        at: [F] int64: the token of each feature, rising; indexes `Batch.ids`.
        cu_features: [I+1] int64: place i has the features at[cu_features[i]:cu_features[i+1]].
        picture: [I] int32: row of `pictures`; the same picture may stand at several places.
        rule: how the model writes pictures.
        pictures: what they are of.
        inputs: of each distinct picture of the row, in the order of `np.unique(picture)`, what the model's processor
            made of it, joined: the keyword arguments of the tower, numpy or torch. None until they are made.
    """

    at: NDArray[np.int64]
    cu_features: NDArray[np.int64]
    picture: NDArray[np.int32]
    rule: Rule
    pictures: Pictures
    inputs: Mapping[str, Any] | None = None

    def __len__(self) -> int:
        return len(self.picture)

    def __repr__(self) -> str:
        return f"RowImages({len(self)} places of {len(np.unique(self.picture))} pictures)"
