"""Files of pictures: sizes as Pillow has them, pixels as vLLM has them, and what is no picture refused."""

import io

import numpy as np
import pytest
from PIL import Image, ImageOps

import tracegrad as tg
import vlm
from image_bytes import KINDS, files, saved, soft
from tracegrad import _core
from tracegrad.errors import ReadError
from tracegrad.images.processor import decode_image


def read(file, said="image/png"):
    import base64

    url = f"data:{said};base64,{base64.b64encode(file).decode()}"
    message = {"role": "user", "content": [{"type": "image_url", "image_url": {"url": url}}]}
    return tg.Traces.from_records([{"messages": [message, {"role": "assistant", "content": "x"}]}])


@pytest.mark.parametrize(("name", "file"), [pytest.param(*each, id=each[0]) for each in files()])
def test_size_by_the_header_and_pixels_are_those_of_others(name, file):
    traces = read(file)
    found = traces.images
    theirs = Image.open(io.BytesIO(file))
    kind = KINDS[theirs.format]
    theirs = ImageOps.exif_transpose(theirs)
    assert (int(found.width[0]), int(found.height[0])) == theirs.size
    assert found.media_type == (kind,)
    assert found.bytes_of(0) == file
    ours = decode_image(file, "it", kind, theirs.size)
    # As vllm.multimodal.image says it.
    if theirs.mode != "RGB" and (theirs.mode in ("RGBA", "LA", "PA") or "transparency" in theirs.info):
        clear = theirs.convert("RGBA")
        white = Image.new("RGB", clear.size, (255, 255, 255))
        white.paste(clear, mask=clear.split()[3])
        theirs = white
    assert np.array_equal(ours, np.asarray(theirs.convert("RGB")))


def test_a_jpeg_of_very_many_scans_is_refused():
    file = saved(soft(57, 31), "JPEG", progressive=True)
    at = file.rindex(b"\xff\xda")
    last = file[at : file.rindex(b"\xff\xd9")]
    assert decode_image(file[:at] + last + file[at:], "it", "image/jpeg", (57, 31)).shape == (31, 57, 3)
    with pytest.raises(ReadError, match=r"TG-IMAGE-009.*1,010.*100"):
        decode_image(file[:at] + last * 1000 + file[at:], "it", "image/jpeg", (57, 31))


def test_what_is_transparent_is_white():
    image = Image.new("RGBA", (2, 1), (255, 0, 0, 255))
    image.putpixel((1, 0), (0, 0, 255, 0))
    assert decode_image(saved(image, "PNG"), "it", "image/png", (2, 1)).tolist() == [[[255, 0, 0], [255, 255, 255]]]


def hostile():
    good = saved(soft(57, 31), "PNG")
    yield "cut", good[: len(good) // 2]
    yield "header alone", good[:33]
    huge = bytearray(good)
    huge[16:24] = (20_000).to_bytes(4, "big") * 2
    yield "bomb", bytes(huge)
    wide = bytearray(good)
    wide[16:20] = (58).to_bytes(4, "big")
    yield "another size", bytes(wide)
    yield "noise", good[:40] + bytes(range(256)) * 4


@pytest.mark.parametrize(("name", "file"), [pytest.param(*each, id=each[0]) for each in hostile()])
def test_a_hostile_file_is_refused_with_its_name(name, file):
    found = read(file).images
    if name == "bomb":
        assert len(found) == 0  # by its header, before anything is decoded
        return
    with pytest.raises(ReadError, match="TG-IMAGE-011"):
        decode_image(file, "it", found.media_type[0], (int(found.width[0]), int(found.height[0])))


def test_more_pixels_than_allowed_and_a_size_that_is_not_the_headers():
    file = saved(soft(57, 31), "PNG")
    with pytest.raises(ReadError, match=r"TG-IMAGE-008.*1,000"):
        decode_image(file, "it", "image/png", (57, 31), max_pixels=1_000)
    with pytest.raises(ReadError, match=r"TG-IMAGE-010.*57.*31"):
        decode_image(file, "it", "image/png", (31, 57))
    with pytest.raises(ReadError):
        decode_image(file, "it", "image/jpeg", (57, 31))


@pytest.mark.parametrize("kind", ["BMP", "TIFF", "PDF", "SVG", "empty"])
def test_other_kinds_are_no_pictures_and_are_named(kind, tmp_path_factory):
    svg = b"<svg xmlns='http://www.w3.org/2000/svg'/>"
    file = {"SVG": svg, "empty": b""}.get(kind) if kind in ("SVG", "empty") else saved(soft(57, 31), kind)
    traces = read(file, "image/png")
    assert len(traces.images) == 0
    folder = vlm.folder(tmp_path_factory.mktemp("vlm") / "model")
    found = tg.align(traces, tg.Tokenizer.from_pretrained(folder), text_only=True)
    assert found.has_unknown_media.all()
    named = "empty" if kind == "empty" else f"{'an' if kind == 'SVG' else 'a'} {kind}"
    assert any(
        f"whose file is {named}, and PNG, JPEG, WebP and GIF are read" in each for each in found.alignment_report.detail
    )


def test_the_digest_is_that_of_another_implementation():
    import blake3

    for file in (b"", b"x" * 10_000):
        assert _core.picture_digest(file) == blake3.blake3(file).digest()
