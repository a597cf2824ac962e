"""Pixels to what a tower takes: the image processor of a model's folder, as transformers has it.

Here is `Processor`. Its options are those of preprocessor_config.json; what it makes is float32 and is kept for the
next batch that shows the same picture, up to a limit of bytes.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from tracegrad.errors import ArgumentError, ReadError
from tracegrad.pictures.decoding import MOST_PIXELS, pixels
from tracegrad.pictures.table import Pictures

KEPT = 256 << 20
"""Bytes of processed pictures that are kept for the next batch."""


class Processor:
    """The image processor of a model's folder.

    Args:
        folder: with preprocessor_config.json.
        most_pixels: of the largest picture that is decoded.
        kept: bytes of processed pictures that are kept.

    Raises:
        ReadError: if transformers finds none there.
        ArgumentError: if transformers or Pillow is not installed.
    """

    def __init__(self, folder: Path, *, most_pixels: int = MOST_PIXELS, kept: int = KEPT) -> None:
        self.own = image_processor(folder)
        self.folder, self.most_pixels = folder, most_pixels
        self._kept: OrderedDict[bytes, Mapping[str, Any]] = OrderedDict()
        self._room = kept
        self._whole: Any = None

    @property
    def backend(self) -> str:
        """Which code resizes: "torchvision", as servers do, or "pil", whose pixels differ by a level here and there."""
        return "torchvision" if any("Torchvision" in base.__name__ for base in type(self.own).__mro__) else "pil"

    def features(self, width: int, height: int) -> int | None:
        """How many features a picture of this size has, by the size alone; None where the family does not say.

        Raises:
            ValueError: for a size that the family refuses.
        """
        merge, ask = getattr(self.own, "merge_size", None), getattr(self.own, "get_number_of_image_patches", None)
        return None if merge is None or ask is None else ask(height, width, {}) // merge**2

    def written(self, width: int, height: int) -> list[int]:
        """What the folder's whole processor writes for a picture of this size: it is shown a black one.

        Raises:
            ReadError: if transformers makes no processor of the folder.
            ValueError: for a size that the family refuses.
        """
        if width * height > self.most_pixels:
            raise ValueError(f"{width} x {height} pixels are more than {self.most_pixels}")
        if self._whole is None:
            self._whole = whole_processor(self.folder)
        told = getattr(self._whole, "boi_token", None) or self._whole.image_token
        black = np.zeros((height, width, 3), np.uint8)
        made = self._whole(text=[told], images=[[black]], add_special_tokens=False, input_data_format="channels_last")
        [ids] = made["input_ids"]
        return [int(each) for each in ids]

    def inputs(self, pictures: Pictures, row: int, features: int) -> Mapping[str, Any]:
        """What the tower takes of one picture, as torch tensors on the CPU.

        Args:
            row: of `pictures`.
            features: how many ids stand for it.

        Raises:
            ReadError: if it is not there any more, or cannot be decoded.
            ArgumentError: if the tower would make another number of features of it.
        """
        digest = pictures.digest[row].tobytes()
        if (found := self._kept.pop(digest, None)) is None:
            found = self._processed(pictures, row)
            self._room -= _bytes(found)
        self._kept[digest] = found
        while self._room < 0 and len(self._kept) > 1:
            self._room += _bytes(self._kept.popitem(last=False)[1])
        grid, merge = found.get("image_grid_thw"), getattr(self.own, "merge_size", 1)
        if grid is not None and (made := int(grid.prod()) // merge**2) != features:
            size = f"{pictures.width[row]} x {pictures.height[row]}"
            raise ArgumentError(
                f"{_name(digest)} of {size} pixels has {features} ids in its prompt, and {self.folder} makes {made} "
                "features of it. The server had other options of the image processor. Align the traces with the "
                "folder that served them."
            )
        return found

    def _processed(self, pictures: Pictures, row: int) -> Mapping[str, Any]:
        name = _name(pictures.digest[row].tobytes())
        size = int(pictures.width[row]), int(pictures.height[row])
        image = pixels(pictures.bytes_of(row), name, pictures.media_type[row], size, self.most_pixels)
        made = self.own(images=[image], return_tensors="pt", input_data_format="channels_last")
        tensors = {key: value for key, value in made.items() if hasattr(value, "is_floating_point")}
        return {key: value.float() if value.is_floating_point() else value for key, value in tensors.items()}


def _name(digest: bytes) -> str:
    return f"picture {digest.hex()[:16]}"


def image_processor(folder: Path) -> Any:
    """The image processor of a folder.

    Raises:
        ReadError: if transformers finds none there.
        ArgumentError: if it is not installed.
    """
    return _made("AutoImageProcessor", folder)


def whole_processor(folder: Path) -> Any:
    """The processor of a folder, which writes what stands for a picture in a text.

    Raises:
        ReadError: if transformers finds none there.
        ArgumentError: if it is not installed.
    """
    return _made("AutoProcessor", folder)


def _made(name: str, folder: Path) -> Any:
    try:
        import transformers
    except ImportError:
        raise ArgumentError(
            "pictures are made ready by transformers, which is not installed: pip install 'tracegrad[images]'."
        ) from None
    try:
        return getattr(transformers, name).from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # whatever the code of transformers raises over a stranger's files
        first = (str(error).strip().splitlines() or [""])[0][:200]
        raise ReadError(
            f"{folder}: transformers makes no {name} of it ({first}). What the policy sees of a picture is not known. "
            "Give a model folder with its preprocessor_config.json, and install 'tracegrad[images]'."
        ) from error


def _bytes(inputs: Mapping[str, Any]) -> int:
    return sum(value.numel() * value.element_size() for value in inputs.values())
