"""Decode images, expand them to token ids, and make the vision encoder's inputs as transformers does.

Pillow decodes images up to a limit of pixels. `ImageRule` has the placeholder id of images and computes the ids of an
image of a given size. `Processor` runs the image processor of the model folder (preprocessor_config.json). Its
float32 output
is cached for later batches with the same image, up to a limit of bytes.
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
from tracegrad.images.image_set import Images
from tracegrad.storage.files import read_json

MOST_PIXELS = 178_956_970
"""Maximum number of pixels of an image that is decoded: the limit of Pillow and vLLM."""
MOST_SCANS = 100
"""Maximum number of scans of a JPEG. Each scan covers all pixels; encoders write about ten."""
KINDS = {"image/png": "PNG", "image/jpeg": "JPEG", "image/webp": "WEBP", "image/gif": "GIF"}


def decode_image(
    file: bytes, name: str, media_type: str, size: tuple[int, int], max_pixels: int = MOST_PIXELS
) -> NDArray[np.uint8]:
    """Decode an image to [height, width, 3] uint8, red, green and blue. An animation is decoded to its first frame.

    The image is rotated by its EXIF orientation, and transparent pixels become white, as in vLLM
    (vllm.multimodal.image, `normalize_image` and `convert_image_mode`). An image of mode RGB is not changed, even if it
    marks a colour as transparent.

    Args:
        file: as it was recorded.
        name: the name of the image in errors.
        media_type: one of `KINDS`, detected from the first bytes; no other decoder is tried.
        size: width and height from the header.
        max_pixels: maximum number of pixels.

    Raises:
        ReadError: if the image is too large, cannot be decoded completely, or its size differs from `size`.
        ArgumentError: if Pillow is not installed.
    """
    try:
        from PIL import Image, ImageOps
    except ImportError:
        raise ArgumentError(
            "TG-IMAGE-007: pictures are decoded by Pillow, which is not installed: pip install pillow."
        ) from None
    width, height = size
    if width * height > max_pixels:
        raise ReadError(
            f"TG-IMAGE-008: {name}: {width:,} x {height:,} pixels, and at most {max_pixels:,} are decoded. One "
            f"picture would "
            "take all memory. Leave its trace out."
        )
    if media_type == "image/jpeg" and (scans := file.count(b"\xff\xda")) > MOST_SCANS:
        raise ReadError(
            f"TG-IMAGE-009: {name}: a JPEG of {scans:,} scans, and at most {MOST_SCANS} are decoded. Each scan "
            "costs as much time as a complete image. Leave its trace out."
        )
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            image: Any = Image.open(io.BytesIO(file), formats=[KINDS[media_type]])
            stored = image.size
            image = ImageOps.exif_transpose(image)
            if image.size != size:
                raise ReadError(
                    f"TG-IMAGE-010: {name}: decodes to {image.size[0]} x {image.size[1]} pixels (stored as {stored[0]} "
                    f"x {stored[1]}), and its header was read as {width} x {height}. Its ids would be another "
                    "picture's. Leave its trace out."
                )
            image.load()
            if image.mode != "RGB" and (image.mode in ("RGBA", "LA", "PA") or "transparency" in image.info):
                transparent = image.convert("RGBA")
                image = Image.new("RGB", transparent.size, (255, 255, 255))
                image.paste(transparent, mask=transparent.split()[3])
            elif image.mode != "RGB":
                image = image.convert("RGB")
            return np.array(image)
    except ReadError:
        raise
    except Exception as error:  # a decoder may raise anything for an untrusted file
        raise ReadError(
            f"TG-IMAGE-011: {name}: cannot be decoded ({type(error).__name__}: {str(error)[:80]}). The policy had the "
            "complete image, or the server refused it. Leave its trace out."
        ) from error


def is_transparent(file: bytes, media_type: str) -> bool:
    """Return whether an image, which `decode_image` can decode, has transparent pixels."""
    from PIL import Image

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        image: Any = Image.open(io.BytesIO(file), formats=[KINDS[media_type]])
        if image.mode == "RGB" or not (image.mode in ("RGBA", "LA", "PA") or "transparency" in image.info):
            return False
        return image.convert("RGBA").getextrema()[3][0] < 255


CACHE_BYTES = 256 << 20
"""Maximum size of the cache of processed images, in bytes."""


class Processor:
    """The image processor of a model's folder.

    Args:
        folder: with preprocessor_config.json.
        most_pixels: maximum number of pixels of an image.
        cache_bytes: maximum size of the cache of processed images, in bytes.

    Raises:
        ReadError: if transformers cannot load an image processor from the folder.
        ArgumentError: if transformers or Pillow is not installed.
    """

    def __init__(self, folder: Path, *, most_pixels: int = MOST_PIXELS, cache_bytes: int = CACHE_BYTES) -> None:
        self.image_processor = image_processor(folder)
        self.folder, self.most_pixels = folder, most_pixels
        self._kept: OrderedDict[bytes, Mapping[str, Any]] = OrderedDict()
        self._free_bytes = cache_bytes
        self._full_processor: Any = None

    @property
    def backend(self) -> str:
        """The code that resizes: "torchvision", as on servers, or "pil", where some pixels differ by one level."""
        return (
            "torchvision"
            if any("Torchvision" in base.__name__ for base in type(self.image_processor).__mro__)
            else "pil"
        )

    def features(self, width: int, height: int) -> int | None:
        """Return the number of features of an image of this size; None if the model family cannot compute it.

        Raises:
            ValueError: if the model family rejects the size.
        """
        merge, count_patches = (
            getattr(self.image_processor, "merge_size", None),
            getattr(self.image_processor, "get_number_of_image_patches", None),
        )
        return None if merge is None or count_patches is None else count_patches(height, width, {}) // merge**2

    def placeholder_ids(self, width: int, height: int) -> list[int]:
        """Return the ids that the folder's multimodal processor writes for a black image of this size.

        Raises:
            ReadError: if transformers cannot load a processor from the folder.
            ValueError: if the image is too large or the model family rejects the size.
        """
        if width * height > self.most_pixels:
            raise ValueError(f"{width} x {height} pixels are more than {self.most_pixels}")
        if self._full_processor is None:
            self._full_processor = multimodal_processor(self.folder)
        token = getattr(self._full_processor, "boi_token", None) or self._full_processor.image_token
        black = np.zeros((height, width, 3), np.uint8)
        output = self._full_processor(
            text=[token], images=[[black]], add_special_tokens=False, input_data_format="channels_last"
        )
        [ids] = output["input_ids"]
        return [int(id_) for id_ in ids]

    def inputs(self, pictures: Images, row: int, features: int) -> Mapping[str, Any]:
        """Return the inputs of the vision tower for one image, as torch tensors on the CPU.

        Args:
            pictures: the images.
            row: the image, as a row of `pictures`.
            features: the number of ids of the image in its prompt.

        Raises:
            ReadError: if the image cannot be read again, or cannot be decoded.
            ArgumentError: if the tower would compute another number of features.
        """
        digest = pictures.digest[row].tobytes()
        if (tensors := self._kept.pop(digest, None)) is None:
            tensors = self._process(pictures, row)
            self._free_bytes -= _bytes(tensors)
        self._kept[digest] = tensors
        while self._free_bytes < 0 and len(self._kept) > 1:
            self._free_bytes += _bytes(self._kept.popitem(last=False)[1])
        grid, merge = tensors.get("image_grid_thw"), getattr(self.image_processor, "merge_size", 1)
        if grid is not None and (computed := int(grid.prod()) // merge**2) != features:
            size = f"{pictures.width[row]} x {pictures.height[row]}"
            raise ArgumentError(
                f"TG-IMAGE-012: {_name(digest)} of {size} pixels has {features} ids in its prompt, and {self.folder} "
                f"makes {computed} features of it. The server had other options of the image processor. Align the "
                "traces with the folder that served them."
            )
        return tensors

    def _process(self, pictures: Images, row: int) -> Mapping[str, Any]:
        name = _name(pictures.digest[row].tobytes())
        size = int(pictures.width[row]), int(pictures.height[row])
        image = decode_image(pictures.bytes_of(row), name, pictures.media_type[row], size, self.most_pixels)
        output = self.image_processor(images=[image], return_tensors="pt", input_data_format="channels_last")
        tensors = {key: value for key, value in output.items() if hasattr(value, "is_floating_point")}
        return {key: value.float() if value.is_floating_point() else value for key, value in tensors.items()}


def _name(digest: bytes) -> str:
    return f"picture {digest.hex()[:16]}"


def image_processor(folder: Path) -> Any:
    """Load the image processor of a folder.

    Raises:
        ReadError: if transformers cannot load one from the folder.
        ArgumentError: if transformers is not installed.
    """
    return _load("AutoImageProcessor", folder)


def multimodal_processor(folder: Path) -> Any:
    """Load the multimodal processor of a folder, which writes the placeholder ids of images.

    Raises:
        ReadError: if transformers cannot load one from the folder.
        ArgumentError: if transformers is not installed.
    """
    return _load("AutoProcessor", folder)


def _load(name: str, folder: Path) -> Any:
    try:
        import transformers
    except ImportError:
        raise ArgumentError(
            "TG-IMAGE-013: pictures are made ready by transformers, which is not installed: pip install "
            "'tracegrad[images]'."
        ) from None
    try:
        return getattr(transformers, name).from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # transformers may raise anything for untrusted files
        message = (str(error).strip().splitlines() or [""])[0][:200]
        raise ReadError(
            f"TG-IMAGE-014: {folder}: transformers makes no {name} of it ({message}). Without it, the input "
            "of the policy is unknown. Give a model folder with its preprocessor_config.json, and install "
            "'tracegrad[images]'."
        ) from error


def _bytes(inputs: Mapping[str, Any]) -> int:
    return sum(value.numel() * value.element_size() for value in inputs.values())


_IMAGE_PROCESSOR_FILE, _PROCESSOR_FILE = "preprocessor_config.json", "processor_config.json"


@dataclass(frozen=True)
class ImageRule:
    """The rule by which one model writes images as ids.

    Args:
        pad: the placeholder id, repeated once for each feature.
        frames: ids that templates write around images.
        options: of the image processor, from preprocessor_config.json or processor_config.json.
        folder: of the model; None if it is unknown on this machine.
    """

    pad: int
    frames: tuple[int, ...]
    options: Mapping[str, Any] = field(default_factory=dict)
    folder: Path | None = None

    @classmethod
    def of(cls, folder: Path) -> ImageRule | None:
        """Read the rule from the folder of a model; None if it has no image processor or no image id.

        Raises:
            ReadError: if its files are not JSON objects.
        """
        if (folder / _IMAGE_PROCESSOR_FILE).is_file():
            options = _read(folder / _IMAGE_PROCESSOR_FILE)
        elif (folder / _PROCESSOR_FILE).is_file():  # transformers 5 saves this file
            options = _read(folder / _PROCESSOR_FILE).get("image_processor")
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
        """SHA-256 of the pad id and the options, as hex."""
        return hashlib.sha256(json.dumps([self.pad, self.options], sort_keys=True).encode()).hexdigest()

    def difference(self, other: ImageRule) -> str:
        """Describe the difference from another rule: up to three options by name."""
        names = {name for name in {*self.options, *other.options} if self.options.get(name) != other.options.get(name)}
        differences = [
            f"{name} ({self.options.get(name)!r:.40} and {other.options.get(name)!r:.40})" for name in sorted(names)
        ]
        return ", ".join(differences[:3]) or f"the id of pictures ({self.pad} and {other.pad})"

    @property
    def processor(self) -> Processor:
        """The image processor of the folder. It is cached per folder, so that rules share its cache of images.

        Raises:
            ArgumentError: if the folder is unknown.
        """
        if self.folder is None:
            raise ArgumentError(
                "TG-IMAGE-015: the image processor of these images is unknown. The vision encoder needs "
                "its output. Pass sequences.with_image_processor(folder)."
            )
        return _processor(self.folder)

    def expansions(self, widths: NDArray[np.integer], heights: NDArray[np.integer]) -> dict[tuple[int, int], list[int]]:
        """Return the ids of an image by (width, height). They replace the ids that the template writes for an image.

        Sizes that the processor rejects, for example because of their aspect ratio, are left out.

        Raises:
            ReadError: if transformers cannot load the folder's processor.
        """
        sizes = sorted(set(zip(widths.tolist(), heights.tolist(), strict=True)))
        expansions = {size: self._expansion(*size) for size in sizes}
        return {size: ids for size, ids in expansions.items() if ids is not None}

    def _expansion(self, width: int, height: int) -> list[int] | None:
        try:
            count = self.processor.features(width, height)
            return self.processor.placeholder_ids(width, height) if count is None else [self.pad] * count
        except ValueError:
            return None

    def as_dict(self) -> dict[str, Any]:
        """Return the rule as a dict for JSON, without the folder."""
        return {"pad": self.pad, "frames": list(self.frames), "options": dict(self.options)}

    @classmethod
    def of_dict(cls, values: Mapping[str, Any]) -> ImageRule:
        """Create the rule from the dict that `as_dict` returned.

        Raises:
            KeyError, TypeError, ValueError: if the dict is invalid.
        """
        pad, frames, options = values["pad"], tuple(values["frames"]), values["options"]
        if any(type(id_) is not int or not 0 <= id_ < 1 << 31 for id_ in (pad, *frames)) or type(options) is not dict:
            raise ValueError("ids of pictures are none")
        return cls(pad, frames, options)


@lru_cache(maxsize=4)
def _processor(folder: Path) -> Processor:
    return Processor(folder)


def _read(path: Path) -> dict[str, Any]:
    try:
        contents = read_json(path)
    except (OSError, ValueError) as error:
        raise ReadError(f"TG-IMAGE-016: {path}: {error}. Without it, the ids of an image are unknown.") from error
    if not isinstance(contents, dict):
        raise ReadError(f"TG-IMAGE-017: {path}: not a JSON object. Without it, the ids of an image are unknown.")
    return contents
