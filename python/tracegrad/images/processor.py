"""Decode images, expand them to token ids, and make the vision encoder's inputs as transformers does.

Pillow decodes, within a limit of pixels. `Rule` holds which id stands for an image and how many of them an image of a
size takes. `Processor` runs the image processor of the model folder (preprocessor_config.json); its float32 output is
kept for the next batch with the same image, within a limit of bytes.
"""

from __future__ import annotations

import hashlib
import io
import json
import warnings
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tracegrad.errors import ArgumentError, ReadError
from tracegrad.images.image_set import Pictures
from tracegrad.storage.files import read_json

MOST_PIXELS = 178_956_970
"""Pixels of the largest picture that is decoded: what Pillow and vLLM take."""
MOST_SCANS = 100
"""Scans of a JPEG, each of which goes over all its pixels; encoders write about ten."""
KINDS = {"image/png": "PNG", "image/jpeg": "JPEG", "image/webp": "WEBP", "image/gif": "GIF"}


def pixels(
    file: bytes, name: str, media_type: str, size: tuple[int, int], most: int = MOST_PIXELS
) -> NDArray[np.uint8]:
    """[height, width, 3] uint8, red, green and blue; of an animation the first frame.

    Turned as EXIF says, and what is transparent shows white, as vLLM does (vllm.multimodal.image, `normalize_image` and
    `convert_image_mode`); a picture of red, green and blue stays, whatever colour it marks as transparent.

    Args:
        file: as it was recorded.
        name: what the picture is called in errors.
        media_type: one of `KINDS`, by its first bytes; no other decoder is tried.
        size: width and height, as its header was read.
        most: pixels.

    Raises:
        ReadError: if it cannot be decoded whole, or has another size than its header says.
        ArgumentError: if Pillow is not installed.
    """
    try:
        from PIL import Image, ImageOps
    except ImportError:
        raise ArgumentError("pictures are decoded by Pillow, which is not installed: pip install pillow.") from None
    width, height = size
    if width * height > most:
        raise ReadError(
            f"{name}: {width:,} x {height:,} pixels, and at most {most:,} are decoded. One picture would take all "
            "memory. Leave its trace out."
        )
    if media_type == "image/jpeg" and (scans := file.count(b"\xff\xda")) > MOST_SCANS:
        raise ReadError(
            f"{name}: a JPEG of {scans:,} scans, and at most {MOST_SCANS} are decoded. Each of them takes as long as a "
            "whole picture. Leave its trace out."
        )
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            image: Any = Image.open(io.BytesIO(file), formats=[KINDS[media_type]])
            stored = image.size
            image = ImageOps.exif_transpose(image)
            if image.size != size:
                raise ReadError(
                    f"{name}: decodes to {image.size[0]} x {image.size[1]} pixels (stored as {stored[0]} x "
                    f"{stored[1]}), and its header was read as {width} x {height}. Its ids would be another "
                    "picture's. Leave its trace out."
                )
            image.load()
            if image.mode != "RGB" and (image.mode in ("RGBA", "LA", "PA") or "transparency" in image.info):
                clear = image.convert("RGBA")
                image = Image.new("RGB", clear.size, (255, 255, 255))
                image.paste(clear, mask=clear.split()[3])
            elif image.mode != "RGB":
                image = image.convert("RGB")
            return np.array(image)
    except ReadError:
        raise
    except Exception as error:  # a decoder may raise anything for a stranger's file
        raise ReadError(
            f"{name}: cannot be decoded ({type(error).__name__}: {str(error)[:80]}). The policy saw it whole, or the "
            "server refused it. Leave its trace out."
        ) from error


def is_transparent(file: bytes, media_type: str) -> bool:
    """Whether a picture that `pixels` has decoded has pixels that show what it is laid on."""
    from PIL import Image

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        image: Any = Image.open(io.BytesIO(file), formats=[KINDS[media_type]])
        if image.mode == "RGB" or not (image.mode in ("RGBA", "LA", "PA") or "transparency" in image.info):
            return False
        return image.convert("RGBA").getextrema()[3][0] < 255


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


_FILE, _WHOLE = "preprocessor_config.json", "processor_config.json"


@dataclass(frozen=True)
class Rule:
    """How one model writes pictures.

    Args:
        pad: the id that is repeated, once for each feature.
        frames: ids that templates write around pictures.
        options: of the image processor, as preprocessor_config.json or processor_config.json has them.
        folder: of the model; None where it is not known on this machine.
    """

    pad: int
    frames: tuple[int, ...]
    options: Mapping[str, Any] = field(default_factory=dict)
    folder: Path | None = None

    @classmethod
    def of(cls, folder: Path) -> Rule | None:
        """What the folder of a model says; None where it has no image processor.

        Raises:
            ReadError: if its files are no JSON objects.
        """
        if (folder / _FILE).is_file():
            options = _read(folder / _FILE)
        elif (folder / _WHOLE).is_file():  # as transformers 5 saves it
            options = _read(folder / _WHOLE).get("image_processor")
        else:
            options = None
        if not isinstance(options, dict) or not (folder / "config.json").is_file():
            return None
        config = _read(folder / "config.json")
        pad = next((config[name] for name in ("image_token_id", "image_token_index") if name in config), None)
        if type(pad) is not int:
            return None
        names = ("vision_start_token_id", "vision_end_token_id", "boi_token_index", "eoi_token_index")
        frames = tuple(config[name] for name in names if type(config.get(name)) is int)
        return cls(pad, frames, options, folder)

    @property
    def digest(self) -> str:
        """The same for the same ids and options."""
        return hashlib.sha256(json.dumps([self.pad, self.options], sort_keys=True).encode()).hexdigest()

    def difference(self, other: Rule) -> str:
        """In what another is not the same: the first few options by name."""
        names = {name for name in {*self.options, *other.options} if self.options.get(name) != other.options.get(name)}
        found = [
            f"{name} ({self.options.get(name)!r:.40} and {other.options.get(name)!r:.40})" for name in sorted(names)
        ]
        return ", ".join(found[:3]) or f"the id of pictures ({self.pad} and {other.pad})"

    @property
    def processor(self) -> Processor:
        """The image processor of the folder; one for a folder, so that what it made is made once.

        Raises:
            ArgumentError: if it is not known which folder that is.
        """
        if self.folder is None:
            raise ArgumentError(
                "it is not known which image processor makes these pictures ready. The tower takes what it makes. Pass "
                "sequences.of_model(folder)."
            )
        return _processor(self.folder)

    def expansions(self, widths: NDArray[np.integer], heights: NDArray[np.integer]) -> dict[tuple[int, int], list[int]]:
        """The ids that stand for a picture of each (width, height), in place of what the template writes for one.

        Sizes that the processor refuses, such as a ratio of sides, are left out.

        Raises:
            ReadError: if the folder's processor cannot be made, or does not expand what the template writes.
        """
        sizes = sorted(set(zip(widths.tolist(), heights.tolist(), strict=True)))
        found = {size: self._expansion(*size) for size in sizes}
        return {size: ids for size, ids in found.items() if ids is not None}

    def _expansion(self, width: int, height: int) -> list[int] | None:
        try:
            count = self.processor.features(width, height)
            return self.processor.written(width, height) if count is None else [self.pad] * count
        except ValueError:
            return None

    def as_dict(self) -> dict[str, Any]:
        """As JSON has it."""
        return {"pad": self.pad, "frames": list(self.frames), "options": dict(self.options)}

    @classmethod
    def of_dict(cls, told: Mapping[str, Any]) -> Rule:
        """What `as_dict` gave.

        Raises:
            KeyError, TypeError, ValueError: if it is something else.
        """
        pad, frames, options = told["pad"], tuple(told["frames"]), told["options"]
        if (
            any(type(each) is not int or not 0 <= each < 1 << 31 for each in (pad, *frames))
            or type(options) is not dict
        ):
            raise ValueError("ids of pictures are none")
        return cls(pad, frames, options)


@lru_cache(maxsize=4)
def _processor(folder: Path) -> Processor:
    return Processor(folder)


def _read(path: Path) -> dict[str, Any]:
    try:
        found = read_json(path)
    except (OSError, ValueError) as error:
        raise ReadError(f"{path}: {error}. How the model writes pictures is not known without it.") from error
    if not isinstance(found, dict):
        raise ReadError(f"{path}: no JSON object. How the model writes pictures is not known without it.")
    return found
