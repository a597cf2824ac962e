"""Spans of images in aligned sequences (`ImageSpans`) and in one packed row (`RowImages`).

A span is all placeholder ids of one image. The row and column marks that some model families write between them are
text.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tracegrad.errors import ArgumentError
from tracegrad.images.image_set import Images, merge
from tracegrad.images.processor import ImageRule

MOST_KEYS = (1 << 31) - 1


@dataclass(frozen=True, repr=False)
class ImageSpans:
    """S spans of images in N branches, in order.

    Args:
        cu_images: [N+1] int64: branch n has spans cu_images[n]:cu_images[n+1].
        cu_features: [S+1] int64: span s has the features cu_features[s]:cu_features[s+1].
        position: [F] int32: the token of each feature, as an index in its branch; all have the id `rule.pad`.
        image: [S] int32: row of `pictures`. All spans of an image have the same number of features.
        rule: the placeholder ids of the model; its `pad` is the id of every feature.
        pictures: the distinct images.
    """

    cu_images: NDArray[np.int64]
    cu_features: NDArray[np.int64]
    position: NDArray[np.int32]
    image: NDArray[np.int32]
    rule: ImageRule
    pictures: Images

    def __len__(self) -> int:
        return len(self.image)

    def __repr__(self) -> str:
        return f"Images({len(self)} spans of {len(self.pictures)} pictures)"

    def of_model(self, folder: Path) -> ImageSpans:
        """Return the images with the image processor of a folder. It must equal the one that alignment used.

        Raises:
            ArgumentError: if the image processor differs, or the folder has none.
        """
        rule = ImageRule.of(folder)
        if rule is None or rule.digest != self.rule.digest:
            problem = "has no image processor" if rule is None else f"differs in {self.rule.difference(rule)}"
            raise ArgumentError(
                f"TG-IMAGE-018: {folder} {problem}, and these traces were aligned with one. Pictures would have other "
                "features than ids. Prepare the traces with this model."
            )
        return replace(self, rule=rule)

    @property
    def features(self) -> NDArray[np.int64]:
        """[P] int64: the number of features of each image; 0 if it has no span."""
        counts = np.zeros(len(self.pictures), np.int64)
        counts[self.image] = np.diff(self.cu_features)
        return counts

    def tokens(self, cu_seqlens: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return [F] int64: the token of each feature, as an index in flat arrays of branches at `cu_seqlens`."""
        branch = np.repeat(np.arange(len(self.cu_images) - 1), np.diff(self.cu_images))
        return self.position + np.repeat(np.asarray(cu_seqlens)[branch], np.diff(self.cu_features))

    def take(self, branches: NDArray[np.integer]) -> ImageSpans:
        """Return the spans of some branches, in the order of `branches`."""
        spans, counts = _runs(self.cu_images, np.asarray(branches, np.int64))
        features, lengths = _runs(self.cu_features, spans)
        return replace(
            self,
            cu_images=offsets(counts),
            cu_features=offsets(lengths),
            position=self.position[features],
            image=self.image[spans],
        )

    @classmethod
    def concatenate(cls, parts: Sequence[tuple[ImageSpans | None, int]]) -> ImageSpans | None:
        """Concatenate several parts. Images with the same digest are merged.

        Args:
            parts: (images or None, number of branches) of each part.

        Raises:
            ArgumentError: if the parts were aligned with different image processors.
        """
        present = [images for images, _ in parts if images is not None]
        if not present:
            return None
        if len({images.rule.digest for images in present}) > 1:
            raise ArgumentError(
                "TG-IMAGE-019: the joined parts have images with different ids, or different options of "
                "the image processor. Their lengths would be of two models. Align all of it with the same model."
            )
        pictures, rows = merge([images.pictures for images in present])
        counts = [np.zeros(n, np.int64) if images is None else np.diff(images.cu_images) for images, n in parts]
        return cls(
            cu_images=offsets(np.concatenate(counts)),
            cu_features=offsets(np.concatenate([np.diff(images.cu_features) for images in present])),
            position=np.concatenate([images.position for images in present]),
            image=np.concatenate([new_rows[images.image] for images, new_rows in zip(present, rows, strict=True)]),
            rule=present[0].rule,
            pictures=pictures,
        )

    def with_image_keys(
        self, ids: NDArray[np.int32], cu_seqlens: NDArray[np.int64]
    ) -> tuple[NDArray[np.int32], ImageKeys]:
        """Return ids in which each feature of each distinct image has a unique number, greater than all ids.

        A comparison of these ids also compares images: two images of the same size are never equal.

        Raises:
            ArgumentError: if the numbers do not fit 31 bits.
        """
        first = int(ids.max(initial=self.rule.pad)) + 1
        starts = offsets(self.features)
        if first + int(starts[-1]) > MOST_KEYS:
            raise ArgumentError(
                f"TG-IMAGE-020: the images of the traces have {int(starts[-1]):,} features together. Each needs a "
                "number in addition to the ids of the model, and there are 2^31. Train on parts of the data."
            )
        keys = ids.copy()
        feature = np.arange(len(self.position)) - np.repeat(self.cu_features[:-1], np.diff(self.cu_features))
        numbers = first + np.repeat(starts[self.image], np.diff(self.cu_features)) + feature
        keys[self.tokens(cu_seqlens)] = numbers
        return keys, ImageKeys(first, starts)


@dataclass(frozen=True)
class ImageKeys:
    """The numbers that `ImageSpans.with_image_keys` used.

    Args:
        first: the smallest number.
        starts: [P+1] int64: image p has the numbers first + starts[p] to first + starts[p+1].
    """

    first: int
    starts: NDArray[np.int64]

    def read(self, keys: NDArray[np.int32]) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int32]]:
        """Find the images of a row of keys.

        Returns:
            at [F]: the position of each feature; cu_features [I+1]: offsets of each image; picture [I]: its row.
        """
        positions = np.flatnonzero(keys >= self.first)
        number = keys[positions].astype(np.int64) - self.first
        picture = np.searchsorted(self.starts, number, side="right") - 1
        first_features = np.flatnonzero(number == self.starts[picture])
        cu_features = np.append(first_features, len(positions))
        is_complete = np.array_equal(np.diff(cu_features), np.diff(self.starts)[picture[first_features]]) and (
            not len(positions) or first_features[0] == 0
        )
        assert is_complete, "a row ends within an image"
        return positions, cu_features, picture[first_features].astype(np.int32)


def offsets(lengths: NDArray[np.integer]) -> NDArray[np.int64]:
    return np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)


def _runs(cu: NDArray[np.int64], rows: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the concatenated entry indices of some rows of a ragged list, and the number of entries of each row."""
    counts = np.diff(cu)[rows]
    within = np.arange(int(counts.sum())) - np.repeat(offsets(counts)[:-1], counts)
    return np.repeat(cu[rows], counts) + within, counts


@dataclass(frozen=True, repr=False)
class RowImages:
    """I spans of images in a row of T tokens, in the order of the row. An image in a shared prefix has one span.

    Args:
        position: [F] int64: the token of each feature, ascending; indexes `Batch.ids`.
        cu_features: [I+1] int64: span i has the features at[cu_features[i]:cu_features[i+1]].
        image: [I] int32: row of `pictures`; an image may have several spans.
        rule: the placeholder ids of the model.
        pictures: the distinct images.
        inputs: the output of the model's image processor for each distinct image of the row, in the order of
            `np.unique(picture)`: keyword arguments of the vision tower. None until `to` is called.
    """

    position: NDArray[np.int64]
    cu_features: NDArray[np.int64]
    image: NDArray[np.int32]
    rule: ImageRule
    pictures: Images
    inputs: tuple[Mapping[str, Any], ...] | None = None

    def __len__(self) -> int:
        return len(self.image)

    def __repr__(self) -> str:
        return f"RowImages({len(self)} places of {len(np.unique(self.image))} pictures)"

    def to(self, device: Any) -> RowImages:
        """Return the spans with the inputs of the vision tower, as torch tensors on a device. Other arrays stay numpy.

        Raises:
            ReadError: if an image cannot be read again or cannot be decoded.
            ArgumentError: if an image has another number of features than its span.
        """
        inputs = self.inputs
        if inputs is None:
            features = np.diff(self.cu_features)
            rows, first = np.unique(self.image, return_index=True)
            pairs = zip(rows.tolist(), features[first].tolist(), strict=True)
            inputs = tuple(self.rule.processor.inputs(self.pictures, row, count) for row, count in pairs)
        moved = tuple(
            {name: value.to(device, non_blocking=True) for name, value in image_inputs.items()}
            for image_inputs in inputs
        )
        return replace(self, inputs=moved)

    def take(self, places: NDArray[np.integer], start: int) -> RowImages:
        """Return some spans, for a row that starts at token `start` of this row."""
        counts = np.diff(self.cu_features)[places]
        parts = [self.position[self.cu_features[span] : self.cu_features[span + 1]] for span in places.tolist()]
        picture = self.image[places]
        inputs = self.inputs
        if inputs is not None:
            indices = np.searchsorted(np.unique(self.image), np.unique(picture))
            inputs = tuple(inputs[number] for number in indices.tolist())
        return replace(
            self,
            position=np.concatenate(parts) - start,
            cu_features=np.concatenate([[0], np.cumsum(counts)]).astype(np.int64),
            image=picture,
            inputs=inputs,
        )

    def repeat(self, length: int) -> RowImages:
        """Return the spans, followed by a copy that is shifted by `length` tokens."""
        return replace(
            self,
            position=np.concatenate([self.position, self.position + length]),
            cu_features=np.concatenate([self.cu_features, self.cu_features[1:] + len(self.position)]),
            image=np.tile(self.image, 2),
        )
