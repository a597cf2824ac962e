"""Findings of the doctor about pictures: which traces are not trained and why, and logprob differences after them."""

import base64
import io
import json
import re
import shutil

import pytest
import torch
from PIL import Image

import tracegrad as tg
import vlm
from picture_calls import PAD, call, read, shown
from picture_pages import golden
from tracegrad.doctor import diagnose
from tracegrad.model import logprobs
from tracegrad.trainer.load_model import load_full_model
from view_pages import written


def diagnosed(records, tmp_path, folder, **more):
    return diagnose(written(tmp_path / "t.jsonl", records), folder, **more)


def found_in(diagnosis):
    return {finding.name: finding for finding in diagnosis.findings}


def test_pictures_that_the_record_holds_are_no_finding(folder, tmp_path):
    found = found_in(diagnosed(golden("one", "two", "tool", "sampled_pads", "turns", "literal"), tmp_path, folder))
    assert not found.keys() & {"media", "picture_unplaced", "doubled_pictures", "pictures_as_sent", "other_prompt"}


@pytest.mark.parametrize(
    ("part", "said"),
    [
        ({"type": "image_url", "image_url": {"url": "https://example.org/a.png"}}, "at an address (https:)"),
        ({"type": "image_url", "image_url": {"url": "data:"}, "uuid": "x"}, "by `uuid`"),
        ({"type": "image_url", "image_url": {"url": "data:image/png;base64,JVBERi0xLjc="}}, "PDF"),
        ({"type": "video_url", "video_url": {"url": "https://example.org/a.mp4"}}, "video_url"),
    ],
)
def test_what_is_not_in_the_record_is_said_with_its_reason(tokenizer, folder, tmp_path, part, said):
    record = call(tokenizer, shown(0), reward=1.0)
    record["request"]["messages"][0]["content"][0] = part
    found = diagnosed([record, call(tokenizer, shown(0), reward=0.0)], tmp_path, folder)
    media = found_in(found)["media"]
    assert (media.severity.name, media.hits.count, media.hits.total) == ("WRONG", 1, 2)
    assert said in media.hits.description
    assert "no road yet" not in media.check.fix


def test_ids_that_do_not_fit_their_pictures_are_found(tokenizer, folder, tmp_path):
    right = call(tokenizer, shown("look", 0), reward=1.0)
    ids = right["response"]["prompt_token_ids"]
    at = ids.index(PAD)
    spoiled = {
        "has 4 ids by the model's image processor, and its prompt has 3 there": ids[:at] + ids[at + 1 :],
        "more than the pictures of its messages have": ids[:at] + [PAD] * 3 + ids[at:],
        "its ids have a place for 0 of the 1 pictures": [each for each in ids if each != PAD],
    }
    for words, other in spoiled.items():
        record = call(tokenizer, shown("look", 0), ids=other, reward=0.0)
        found = found_in(diagnosed([right, record], tmp_path, folder))
        assert words in found["picture_unplaced"].hits.description
        assert found["picture_unplaced"].severity.name == "WRONG"
        assert found["picture_unplaced"].hits.count == 1
        assert "other_prompt" not in found


def test_another_image_processor_is_found_by_the_lengths_of_pictures(folder, tmp_path):
    other = tmp_path / "other"
    shutil.copytree(folder, other)
    options = json.loads((other / "preprocessor_config.json").read_text())
    (other / "preprocessor_config.json").write_text(json.dumps({**options, "patch_size": 7}))
    found = found_in(diagnosed(golden("one", "two", "four"), tmp_path, other))["picture_unplaced"]
    assert (found.severity.name, found.hits.count) == ("WRONG", 3)
    assert "preprocessor_config.json" in found.check.fix


def test_prompts_as_they_were_sent_are_a_note(tokenizer, folder, tmp_path):
    ids = tokenizer.render_ids([shown("look", 0)], add_generation_prompt=True).tolist()
    found = found_in(diagnosed([call(tokenizer, shown("look", 0), ids=ids, reward=1.0)], tmp_path, folder))
    assert found["pictures_as_sent"].severity.name == "NOTE"
    assert "picture_unplaced" not in found


def test_ids_that_were_expanded_twice_are_found_by_what_stands_beside_the_pictures(folder, tmp_path):
    found = found_in(diagnosed(golden("one", "two", "doubled", "literal"), tmp_path, folder))["doubled_pictures"]
    assert (found.hits.count, found.hits.total, found.severity.name) == (1, 4, "COSTS")
    assert found.hits.first.trace == "doubled"
    # Features 4 and 6, two of the ids that were sent were expanded, so 8 are words.
    assert found.hits.description == "8 image ids in addition to the 10 of 2 images"


def test_rescore_sees_pictures_and_a_true_recording_is_clean(folder, tmp_path):
    found = found_in(diagnosed(golden(), tmp_path, folder, check_logprobs=32))
    assert not found.keys() & {"other_model", "other_pictures", "shifted_logprobs"}


def swapped(records, change):
    """Return records with another file for each picture."""

    def new(hit):
        return f"data:image/png;base64,{base64.b64encode(change(base64.b64decode(hit[1]))).decode()}"

    return [json.loads(re.sub(r"data:image/\w+;base64,([A-Za-z0-9+/=]+)", new, json.dumps(each))) for each in records]


def as_jpeg(file):
    out = io.BytesIO()
    Image.open(io.BytesIO(file)).convert("RGB").save(out, "JPEG", quality=20)
    return out.getvalue()


def other_alpha(file):
    """Return the picture on white that equals this transparent picture on another background colour."""
    image = Image.open(io.BytesIO(file))
    red, green, blue, alpha = image.split()
    out = io.BytesIO()
    Image.merge("RGBA", (red, green, blue, alpha.point(lambda value: 255 - value))).save(out, "PNG")
    return out.getvalue()


@pytest.fixture(scope="module")
def text(folder, tokenizer):
    """Return calls without a picture, with the logprobs of the model."""
    policy, out = load_full_model(folder), []
    for n in range(4):
        record = call(tokenizer, {"role": "user", "content": f"number {n}"}, sampled=(20 + n, 30, 40, 50), reward=1.0)
        [batch] = tg.pack(tg.align(read(record), tokenizer), [1.0], tokens_per_row=256)[0].batches
        with torch.no_grad():
            values = logprobs(policy, batch).tolist()
        for told, value in zip(record["response"]["choices"][0]["logprobs"]["content"], values, strict=True):
            told["logprob"] = value
        out.append({**record, "id": f"text{n}"})
    return out


def test_pictures_that_were_written_again_are_further_off_than_text(folder, tmp_path, text):
    clean = found_in(diagnosed(golden("one", "two", "four") + text, tmp_path, folder, check_logprobs=32))
    assert not clean.keys() & {"other_model", "other_pictures"}
    found = found_in(
        diagnosed(swapped(golden("one", "two", "four"), as_jpeg) + text, tmp_path, folder, check_logprobs=32)
    )
    seen = found["other_pictures"]
    assert seen.hits.total == 24  # 8 tokens each, after pictures
    assert seen.hits.first.trace == "one"
    assert re.match(r"0\.\d+ nats on 24 tokens after images, \S+ nats on 16 tokens elsewhere; ", seen.hits.description)
    far, near = (float(each) for each in re.findall(r"(\S+) nats", seen.hits.description))
    assert far > 0.05 > 1e-4 > near
    assert "resized by torchvision here" in seen.hits.description
    assert "transparent" not in seen.hits.description


def test_transparent_pixels_are_said_where_logprobs_differ(folder, tmp_path):
    assert "other_pictures" not in found_in(diagnosed(golden("alpha"), tmp_path, folder, check_logprobs=4))
    found = found_in(diagnosed(swapped(golden("alpha"), other_alpha), tmp_path, folder, check_logprobs=4))
    for name in found.keys() & {"other_model", "other_pictures"}:
        assert "1 of 1 have transparent pixels, which are white here" in found[name].hits.description
    assert "other_pictures" in found


def test_text_that_is_off_as_far_as_pictures_is_another_finding(folder, tmp_path, text):
    """With another model the pixels are not the cause."""
    off = json.loads(json.dumps(text))
    for record in off:
        for told in record["response"]["choices"][0]["logprobs"]["content"]:
            told["logprob"] -= 3.0
    found = found_in(diagnosed(swapped(golden("one"), as_jpeg) + off, tmp_path, folder, check_logprobs=32))
    assert "other_model" in found
    assert "other_pictures" not in found


def test_a_picture_that_cannot_be_decoded_is_found_and_the_others_are_rescored(folder, tmp_path, text):
    def cut(file):
        return file[: len(file) * 2 // 3] if file[:4] == b"RIFF" else file

    # The third file is WebP: if it is truncated, its header is complete.
    rows = swapped(golden("one", "two", "adjacent"), cut)
    found = found_in(diagnosed(rows, tmp_path, folder, check_logprobs=32))
    broken = found["broken_pictures"]
    assert (broken.severity.name, broken.hits.count, broken.hits.total) == ("WRONG", 1, 3)
    assert broken.hits.first.trace == "adjacent"
    assert "cannot be decoded" in broken.hits.description
    assert not found.keys() & {"other_model", "other_pictures"}
    alone = found_in(diagnosed(rows[2:], tmp_path, folder, check_logprobs=32))
    assert alone["broken_pictures"].hits.count == 1
    assert "broken_pictures" not in found_in(diagnosed(golden("adjacent") + text, tmp_path, folder, check_logprobs=32))


def test_pads_that_a_user_wrote_are_words_and_no_second_expansion(tokenizer, folder, tmp_path):
    two = call(tokenizer, shown(0, "a <|image_pad|> b <|image_pad|> c"), reward=1.0)  # 4 features: twice would leave 3
    one = call(
        tokenizer, shown(0), ids=tokenizer.render_ids([shown(0)], add_generation_prompt=True).tolist(), reward=0.0
    )
    small = base64.b64encode(vlm.picture(28, 28, 7)).decode()  # of one feature: expanded twice it would leave none
    one["request"]["messages"][0]["content"][0]["image_url"]["url"] = f"data:image/png;base64,{small}"
    found = tg.align(read(two, one), tokenizer)
    assert found.images.features.tolist() == [4, 1]
    assert "doubled_pictures" not in found_in(diagnosed([two, one], tmp_path, folder))
