"""Hold where images stand in aligned sequences (`Images`) and in one packed row (`RowImages`).

A span holds every id that stands for one image. The marks of rows and columns that some families write between them
are text.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tracegrad.errors import ArgumentError
from tracegrad.images.image_set import Pictures, joined
from tracegrad.images.processor import Rule

MOST_KEYS = (1 << 31) - 1


@dataclass(frozen=True, repr=False)
class Images:
    """S spans of N branches, in order.

    Args:
        cu_images: [N+1] int64: branch n has spans cu_images[n]:cu_images[n+1].
        cu_features: [S+1] int64: span s has the features cu_features[s]:cu_features[s+1].
        at: [F] int32: the token of each feature, counted in its branch; all have the id `rule.pad`.
        picture: [S] int32: row of `pictures`. All spans of a picture have as many features.
        rule: how the model writes pictures; its `pad` is the id of every feature.
        pictures: what they are of.
    """

    cu_images: NDArray[np.int64]
    cu_features: NDArray[np.int64]
    at: NDArray[np.int32]
    picture: NDArray[np.int32]
    rule: Rule
    pictures: Pictures

    def __len__(self) -> int:
        return len(self.picture)

    def __repr__(self) -> str:
        return f"Images({len(self)} spans of {len(self.pictures)} pictures)"

    def of_model(self, folder: Path) -> Images:
        """The same with the image processor of a folder, which must be as that which they were aligned with.

        Raises:
            ArgumentError: if it is another, or the folder has none.
        """
        rule = Rule.of(folder)
        if rule is None or rule.digest != self.rule.digest:
            other = "has no image processor" if rule is None else f"differs in {self.rule.difference(rule)}"
            raise ArgumentError(
                f"{folder} {other}, and these traces were aligned with one. Pictures would have other features than "
                "ids. Prepare the traces with this model."
            )
        return replace(self, rule=rule)

    @property
    def features(self) -> NDArray[np.int64]:
        """[P] int64: how many features each picture has; 0 where it stands nowhere."""
        counts = np.zeros(len(self.pictures), np.int64)
        counts[self.picture] = np.diff(self.cu_features)
        return counts

    def tokens(self, cu_seqlens: NDArray[np.int64]) -> NDArray[np.int64]:
        """[F] int64: the token of each feature in the flat arrays of branches that begin at `cu_seqlens`."""
        branch = np.repeat(np.arange(len(self.cu_images) - 1), np.diff(self.cu_images))
        return self.at + np.repeat(np.asarray(cu_seqlens)[branch], np.diff(self.cu_features))

    def take(self, branches: NDArray[np.integer]) -> Images:
        """The spans of some branches, in the order given."""
        spans, counts = _runs(self.cu_images, np.asarray(branches, np.int64))
        features, lengths = _runs(self.cu_features, spans)
        return replace(
            self,
            cu_images=offsets(counts),
            cu_features=offsets(lengths),
            at=self.at[features],
            picture=self.picture[spans],
        )

    @classmethod
    def joined(cls, parts: Sequence[tuple[Images | None, int]]) -> Images | None:
        """Several, end to end, each with how many branches it is of; pictures are one where their digests are.

        Raises:
            ArgumentError: where the parts were aligned with unlike image processors.
        """
        there = [images for images, _ in parts if images is not None]
        if not there:
            return None
        if len({images.rule.digest for images in there}) > 1:
            raise ArgumentError(
                "pictures are written in unlike ways in what is joined: other ids, or other options of the image "
                "processor. Their lengths would be of two models. Align all of it with the same model."
            )
        pictures, rows = joined([images.pictures for images in there])
        counts = [np.zeros(n, np.int64) if images is None else np.diff(images.cu_images) for images, n in parts]
        return cls(
            cu_images=offsets(np.concatenate(counts)),
            cu_features=offsets(np.concatenate([np.diff(images.cu_features) for images in there])),
            at=np.concatenate([images.at for images in there]),
            picture=np.concatenate([row[images.picture] for images, row in zip(there, rows, strict=True)]),
            rule=there[0].rule,
            pictures=pictures,
        )

    def keyed(self, ids: NDArray[np.int32], cu_seqlens: NDArray[np.int64]) -> tuple[NDArray[np.int32], Keys]:
        """Ids in which each feature of each picture has a number of its own, above all ids.

        So pictures are compared where ids are, and two of one size never count as the same text.

        Raises:
            ArgumentError: if there are more numbers than 31 bits hold.
        """
        first = int(ids.max(initial=self.rule.pad)) + 1
        starts = offsets(self.features)
        if first + int(starts[-1]) > MOST_KEYS:
            raise ArgumentError(
                f"the pictures of these traces have {int(starts[-1]):,} features together. Each needs a number beside "
                "the ids of the model, and there are 2^31. Train on parts of the data."
            )
        keys = ids.copy()
        place = np.arange(len(self.at)) - np.repeat(self.cu_features[:-1], np.diff(self.cu_features))
        own = first + np.repeat(starts[self.picture], np.diff(self.cu_features)) + place
        keys[self.tokens(cu_seqlens)] = own
        return keys, Keys(first, starts)


@dataclass(frozen=True)
class Keys:
    """Which numbers `Images.keyed` gave.

    Args:
        first: the smallest.
        starts: [P+1] int64: picture p has the numbers first + starts[p] to first + starts[p+1].
    """

    first: int
    starts: NDArray[np.int64]

    def read(self, keys: NDArray[np.int32]) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int32]]:
        """The pictures of a row of keys.

        Returns:
            at [F]: where a feature stands; cu_features [I+1]: those of each picture; picture [I]: its row.
        """
        at = np.flatnonzero(keys >= self.first)
        number = keys[at].astype(np.int64) - self.first
        picture = np.searchsorted(self.starts, number, side="right") - 1
        begins = np.flatnonzero(number == self.starts[picture])
        cu = np.append(begins, len(at))
        whole = np.array_equal(np.diff(cu), np.diff(self.starts)[picture[begins]]) and (not len(at) or begins[0] == 0)
        assert whole, "a row ends within a picture"
        return at, cu, picture[begins].astype(np.int32)


def offsets(lengths: NDArray[np.integer]) -> NDArray[np.int64]:
    return np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)


def _runs(cu: NDArray[np.int64], rows: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """The entries of some rows of a ragged list, end to end, and how many each has."""
    counts = np.diff(cu)[rows]
    within = np.arange(int(counts.sum())) - np.repeat(offsets(counts)[:-1], counts)
    return np.repeat(cu[rows], counts) + within, counts


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
