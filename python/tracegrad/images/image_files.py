"""Store images in a folder that `save` or `prepare` writes, and read them back.

`arrays_of` and `images_of` convert `ImageSpans` to named arrays and back. `MediaFile` reads image files from
`media.bin`, which contains each distinct image once, as it was recorded, one after the other.
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
from tracegrad.images.image_set import MEDIA_TYPES, Images
from tracegrad.images.processor import ImageRule
from tracegrad.images.spans import ImageSpans

MEDIA = "media.bin"
PREFIX = "images."
_DTYPES: dict[str, Any] = {
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
    """Concatenated image files, indexed by their digests.

    Args:
        path: of the file.
        digest: [P, 32] uint8.
        end: [P] int64: the end of each image, in bytes (exclusive).
    """

    def __init__(self, path: Path, digest: NDArray[np.uint8], end: NDArray[np.int64]) -> None:
        starts = [0, *end[:-1].tolist()]
        self.path = path
        self._ranges = {row.tobytes(): (a, b) for row, a, b in zip(digest, starts, end.tolist(), strict=True)}

    def has_picture(self, digest: bytes) -> bool:
        """Return whether there is an image with this digest."""
        return digest in self._ranges

    def picture_bytes(self, digest: bytes) -> bytes:
        """Read the image with this digest.

        Raises:
            ReadError: if the file cannot be read, or the bytes have changed.
        """
        start, end = self._ranges[digest]
        try:
            with self.path.open("rb") as file:
                size = os.fstat(file.fileno()).st_size
                file.seek(min(start, size))
                data = file.read(min(end, size) - min(start, size))
        except OSError as error:
            raise ReadError(
                f"TG-IMAGE-001: {self.path}: {error.strerror}. It contains the images of the traces. Copy the "
                f"folder again."
            ) from error
        if _core.picture_digest(data) != digest:
            raise ReadError(
                f"TG-IMAGE-002: {self.path}: the bytes of picture {digest.hex()} are not those that were written. A "
                "policy would see another picture. Copy the folder again, or prepare the records again."
            )
        return data


def drop_unused(images: ImageSpans) -> ImageSpans:
    """Return the images without unused pictures, in the order of their first span."""
    _, first, number = np.unique(images.image, return_index=True, return_inverse=True)
    order = np.argsort(first, kind="stable")
    rows = images.image[np.sort(first)]
    new_index = np.empty(len(order), np.int32)
    new_index[order] = np.arange(len(order), dtype=np.int32)
    return replace(images, image=new_index[number.reshape(-1)], pictures=images.pictures.take(rows))


def media_of(images: ImageSpans) -> Iterator[bytes]:
    """Yield the bytes of the image files, in order.

    Raises:
        ReadError: if an image cannot be read from its source again.
    """
    return (images.pictures.bytes_of(row) for row in range(len(images.pictures)))


def arrays_of(images: ImageSpans, media_end: NDArray[np.int64]) -> dict[str, NDArray[Any]]:
    """Return the arrays of images by name.

    Args:
        images: from `drop_unused`.
        media_end: [P] int64, the end of each file in `media.bin`, in bytes.
    """
    pictures = images.pictures
    codes = np.array([MEDIA_TYPES.index(media_type) for media_type in pictures.media_type], np.uint8)
    columns = {
        "cu_images": images.cu_images,
        "cu_features": images.cu_features,
        "at": images.position,
        "picture": images.image,
    }
    columns |= {"digest": pictures.digest, "width": pictures.width, "height": pictures.height}
    columns |= {"media_type": codes, "media_end": media_end}
    return {PREFIX + name: np.ascontiguousarray(columns[name], dtype) for name, dtype in _DTYPES.items()}


def images_of(arrays: Mapping[str, NDArray[Any]], rule: ImageRule, folder: Path) -> ImageSpans:
    """Create images from the arrays that `arrays_of` returned.

    Args:
        arrays: by name.
        rule: of the model.
        folder: with `media.bin`.

    Raises:
        KeyError: if an array is missing.
        FormatError: if an array has another dtype, shape or invalid values.
    """
    columns = {name: arrays[PREFIX + name] for name in _DTYPES}
    count = len(columns["media_end"])
    for name, dtype in _DTYPES.items():
        shape = (count, 32) if name == "digest" else (len(columns[name]),)
        if columns[name].dtype != dtype or columns[name].shape != shape:
            raise FormatError(f"TG-IMAGE-003: {PREFIX}{name} is {columns[name].dtype} of shape {columns[name].shape}.")
    if len({count, *(len(columns[name]) for name in ("digest", "width", "height", "media_type"))}) > 1:
        raise FormatError("TG-IMAGE-004: the columns of its pictures have unlike lengths.")
    if count and (
        columns["media_type"].max() >= len(MEDIA_TYPES) or np.any(np.diff(columns["media_end"], prepend=0) < 1)
    ):
        raise FormatError("TG-IMAGE-005: the kinds or ends of its pictures are none.")
    media_types = tuple(MEDIA_TYPES[code] for code in columns["media_type"].tolist())
    source = MediaFile(folder / MEDIA, columns["digest"], columns["media_end"])
    pictures = Images(columns["digest"], columns["width"], columns["height"], media_types, (source,))
    return ImageSpans(
        cu_images=columns["cu_images"],
        cu_features=columns["cu_features"],
        position=columns["at"],
        image=columns["picture"],
        rule=rule,
        pictures=pictures,
    )


def find_problem(images: ImageSpans, ids: NDArray[np.int32], cu_seqlens: NDArray[np.int64]) -> str | None:
    """Describe, in a sentence, why the spans of images do not match valid token arrays; None if they match."""
    lengths = np.diff(cu_seqlens)
    for name, cu, total in (
        ("cu_images", images.cu_images, len(images)),
        ("cu_features", images.cu_features, len(images.position)),
    ):
        if not len(cu) or cu[0] != 0 or cu[-1] != total or np.any(np.diff(cu) < 0):
            return f"images.{name} does not rise from 0 to {total}."
    if len(images.cu_images) != len(lengths) + 1 or len(images.cu_features) != len(images) + 1:
        return f"images.cu_images is not of {len(lengths)} branches, or images.cu_features not of {len(images)} places."
    rows, features = images.image, np.diff(images.cu_features)
    if len(rows) and (rows.min() < 0 or rows.max() >= len(images.pictures) or np.any(features < 1)):
        return "images.picture names pictures that are not there, or a picture without a feature."
    if np.any(images.features[rows] != features):
        return "a picture has other features at another place."
    branch = np.repeat(np.arange(len(lengths)), np.diff(images.cu_images))
    owner = np.repeat(branch, features)
    if np.any(images.position < 0) or np.any(images.position >= lengths[owner]):
        return "images.at leads out of its branch."
    tokens = images.tokens(cu_seqlens)
    if np.any(np.diff(tokens) <= 0) or np.any(ids[tokens] != images.rule.pad):
        return "images.at does not rise, or a token of a picture is not its pad."
    return None
