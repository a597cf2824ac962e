"""Pictures in a folder that `save` or `prepare` wrote: arrays beside those of the tokens, and the files end to end.

Here are `arrays_of` and `images_of`, which turn `Images` into named arrays and back, and `MediaFile`, which reads
pictures again from `media.bin`. Each distinct picture stands there once, as it was recorded.
"""

import os
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tracegrad import _core
from tracegrad.errors import FormatError, ReadError
from tracegrad.images.image_set import MEDIA_TYPES, Pictures
from tracegrad.images.processor import Rule
from tracegrad.images.spans import Images

MEDIA = "media.bin"
PREFIX = "images."
_KINDS: dict[str, Any] = {
    "cu_images": np.int64,
    "cu_features": np.int64,
    "at": np.int32,
    "picture": np.int32,
    "digest": np.uint8,
    "width": np.int32,
    "height": np.int32,
    "media_type": np.uint8,
    "media_end": np.int64,
}


class MediaFile:
    """The files of pictures end to end, found by their digests.

    Args:
        path: of the file.
        digest: [P, 32] uint8.
        end: [P] int64: the byte behind each.
    """

    def __init__(self, path: Path, digest: NDArray[np.uint8], end: NDArray[np.int64]) -> None:
        starts = [0, *end[:-1].tolist()]
        self.path = path
        self._place = {row.tobytes(): (a, b) for row, a, b in zip(digest, starts, end.tolist(), strict=True)}

    def has_picture(self, digest: bytes) -> bool:
        """Whether the file with this digest is there."""
        return digest in self._place

    def picture_bytes(self, digest: bytes) -> bytes:
        """The file with this digest.

        Raises:
            ReadError: if it is not there, or not the same any more.
        """
        start, end = self._place[digest]
        try:
            with self.path.open("rb") as file:
                size = os.fstat(file.fileno()).st_size
                file.seek(min(start, size))
                found = file.read(min(end, size) - min(start, size))
        except OSError as error:
            raise ReadError(
                f"{self.path}: {error.strerror}. The pictures of these traces are in it. Copy the folder again."
            ) from error
        if _core.picture_digest(found) != digest:
            raise ReadError(
                f"{self.path}: the bytes of picture {digest.hex()} are not those that were written. A policy would see "
                "another picture. Copy the folder again, or prepare the records again."
            )
        return found


def used(images: Images) -> Images:
    """The same with those pictures alone that stand somewhere, in the order in which they first do."""
    _, first, number = np.unique(images.picture, return_index=True, return_inverse=True)
    order = np.argsort(first, kind="stable")
    rows = images.picture[np.sort(first)]
    place = np.empty(len(order), np.int32)
    place[order] = np.arange(len(order), dtype=np.int32)
    return replace(images, picture=place[number.reshape(-1)], pictures=images.pictures.take(rows))


def media_of(images: Images) -> Iterator[bytes]:
    """The files of the pictures, in order.

    Raises:
        ReadError: if one cannot be read again where it was recorded.
    """
    return (images.pictures.bytes_of(row) for row in range(len(images.pictures)))


def arrays_of(images: Images, media_end: NDArray[np.int64]) -> dict[str, NDArray[Any]]:
    """The arrays of `used` images by name, with where each file ends in `media.bin`."""
    pictures = images.pictures
    codes = np.array([MEDIA_TYPES.index(kind) for kind in pictures.media_type], np.uint8)
    columns = {name: getattr(images, name) for name in ("cu_images", "cu_features", "at", "picture")}
    columns |= {"digest": pictures.digest, "width": pictures.width, "height": pictures.height}
    columns |= {"media_type": codes, "media_end": media_end}
    return {PREFIX + name: np.ascontiguousarray(columns[name], kind) for name, kind in _KINDS.items()}


def images_of(arrays: Mapping[str, NDArray[Any]], rule: Rule, folder: Path) -> Images:
    """What `arrays_of` gave, of which the caller takes the arrays.

    Raises:
        FormatError, KeyError: if it is not what `arrays_of` gives.
    """
    found = {name: arrays[PREFIX + name] for name in _KINDS}
    count = len(found["media_end"])
    for name, kind in _KINDS.items():
        shape = (count, 32) if name == "digest" else (len(found[name]),)
        if found[name].dtype != kind or found[name].shape != shape:
            raise FormatError(f"{PREFIX}{name} is {found[name].dtype} of shape {found[name].shape}.")
    if len({count, *(len(found[name]) for name in ("digest", "width", "height", "media_type"))}) > 1:
        raise FormatError("the columns of its pictures have unlike lengths.")
    if count and (found["media_type"].max() >= len(MEDIA_TYPES) or np.any(np.diff(found["media_end"], prepend=0) < 1)):
        raise FormatError("the kinds or ends of its pictures are none.")
    kinds = tuple(MEDIA_TYPES[code] for code in found["media_type"].tolist())
    source = MediaFile(folder / MEDIA, found["digest"], found["media_end"])
    pictures = Pictures(found["digest"], found["width"], found["height"], kinds, (source,))
    places = {name: found[name] for name in ("cu_images", "cu_features", "at", "picture")}
    return Images(**places, rule=rule, pictures=pictures)


def misfit(images: Images, ids: NDArray[np.int32], cu_seqlens: NDArray[np.int64]) -> str:
    """What is wrong with the places of pictures among tokens that are right, as a sentence; or ""."""
    lengths = np.diff(cu_seqlens)
    for name, cu, total in (
        ("cu_images", images.cu_images, len(images)),
        ("cu_features", images.cu_features, len(images.at)),
    ):
        if not len(cu) or cu[0] != 0 or cu[-1] != total or np.any(np.diff(cu) < 0):
            return f"images.{name} does not rise from 0 to {total}."
    if len(images.cu_images) != len(lengths) + 1 or len(images.cu_features) != len(images) + 1:
        return f"images.cu_images is not of {len(lengths)} branches, or images.cu_features not of {len(images)} places."
    rows, features = images.picture, np.diff(images.cu_features)
    if len(rows) and (rows.min() < 0 or rows.max() >= len(images.pictures) or np.any(features < 1)):
        return "images.picture names pictures that are not there, or a picture without a feature."
    if np.any(images.features[rows] != features):
        return "a picture has other features at another place."
    branch = np.repeat(np.arange(len(lengths)), np.diff(images.cu_images))
    owner = np.repeat(branch, features)
    if np.any(images.at < 0) or np.any(images.at >= lengths[owner]):
        return "images.at leads out of its branch."
    tokens = images.tokens(cu_seqlens)
    if np.any(np.diff(tokens) <= 0) or np.any(ids[tokens] != images.rule.pad):
        return "images.at does not rise, or a token of a picture is not its pad."
    return ""
