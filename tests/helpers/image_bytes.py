"""Make image files of every kind, whole and broken."""

import io

import numpy as np
from PIL import Image

import vlm

KINDS = {"PNG": "image/png", "JPEG": "image/jpeg", "WEBP": "image/webp", "GIF": "image/gif"}


def saved(image, kind, **how):
    out = io.BytesIO()
    image.save(out, kind, **how)
    return out.getvalue()


def soft(width, height, mode="RGB"):
    image = Image.open(io.BytesIO(vlm.picture(width, height, 3)))
    return image.convert(mode)


def files():
    """(name, file) of what strangers send."""
    for kind in KINDS:
        for size in ((8, 8), (57, 31), (300, 9)):
            yield f"{kind} {size}", saved(soft(*size), kind)
    yield "lossless", saved(soft(57, 31), "WEBP", lossless=True)
    yield "alpha webp", saved(soft(57, 31, "RGBA"), "WEBP")
    yield "progressive", saved(soft(57, 31), "JPEG", progressive=True)
    yield "grey", saved(soft(57, 31, "L"), "JPEG")
    yield "cmyk", saved(soft(57, 31, "CMYK"), "JPEG")
    yield "palette", saved(soft(57, 31).quantize(8), "PNG")
    yield "16 bit", saved(Image.fromarray(np.arange(57 * 31, dtype=np.uint16).reshape(31, 57) * 30), "PNG")
    yield "one bit", saved(soft(57, 31, "1"), "PNG")
    frames = [soft(57, 31), soft(57, 31).transpose(Image.Transpose.ROTATE_180)]
    for kind in ("GIF", "WEBP", "PNG"):
        yield f"animated {kind}", saved(frames[0], kind, save_all=True, append_images=frames[1:])
    for turn in range(1, 9):
        exif = Image.Exif()
        exif[0x0112] = turn
        for kind in ("JPEG", "PNG", "WEBP"):
            yield f"turned {turn} {kind}", saved(soft(57, 31), kind, exif=exif)
