"""The file of a picture to its pixels, as vLLM sees them. Nothing is decoded that is larger than allowed.

Pillow decodes. Its errors become ours, which name the picture by its digest.
"""

import io
import warnings
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tracegrad.errors import ArgumentError, ReadError

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
