"""The pictures of one packed row.

Here is `RowImages`, which a `Batch` holds. `pack` makes it; what the tower takes is made when the batch is sent.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
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
            made of it: keyword arguments of the tower. None until the batch is sent.
    """

    at: NDArray[np.int64]
    cu_features: NDArray[np.int64]
    picture: NDArray[np.int32]
    rule: Rule
    pictures: Pictures
    inputs: tuple[Mapping[str, Any], ...] | None = None

    def __len__(self) -> int:
        return len(self.picture)

    def __repr__(self) -> str:
        return f"RowImages({len(self)} places of {len(np.unique(self.picture))} pictures)"

    def to(self, device: Any) -> RowImages:
        """The same with what the tower takes, as torch tensors on a device. Places stay numpy.

        Raises:
            ReadError: if a picture cannot be read again.
            ArgumentError: if one cannot be decoded, or has other features here than its place.
        """
        inputs = self.inputs
        if inputs is None:
            features = np.diff(self.cu_features)
            rows, first = np.unique(self.picture, return_index=True)
            pairs = zip(rows.tolist(), features[first].tolist(), strict=True)
            inputs = tuple(self.rule.processor.inputs(self.pictures, row, count) for row, count in pairs)
        sent = tuple({name: value.to(device, non_blocking=True) for name, value in each.items()} for each in inputs)
        return replace(self, inputs=sent)

    def take(self, places: NDArray[np.integer], start: int) -> RowImages:
        """Some places, of a row that begins at token `start` of this one."""
        counts = np.diff(self.cu_features)[places]
        parts = [self.at[self.cu_features[place] : self.cu_features[place + 1]] for place in places.tolist()]
        picture = self.picture[places]
        inputs = self.inputs
        if inputs is not None:
            kept = np.searchsorted(np.unique(self.picture), np.unique(picture))
            inputs = tuple(inputs[number] for number in kept.tolist())
        return replace(
            self,
            at=np.concatenate(parts) - start,
            cu_features=np.concatenate([[0], np.cumsum(counts)]).astype(np.int64),
            picture=picture,
            inputs=inputs,
        )

    def twice(self, length: int) -> RowImages:
        """The same pictures again, `length` tokens further on."""
        return replace(
            self,
            at=np.concatenate([self.at, self.at + length]),
            cu_features=np.concatenate([self.cu_features, self.cu_features[1:] + len(self.at)]),
            picture=np.tile(self.picture, 2),
        )
