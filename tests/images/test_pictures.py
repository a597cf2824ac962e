"""Records with pictures from the file to the gradient: each picture at its place, or the turn held with the reason."""

import io
import json

import numpy as np
import pytest
import torch
from PIL import Image

import tracegrad as tg
import vlm
from picture_calls import PAD, PICTURES, call, prompt, read, shown
from tracegrad.alignment.align import align
from tracegrad.alignment.sequences import Sequences
from tracegrad.errors import ArgumentError, FormatError, ReadError
from tracegrad.model import logprobs
from tracegrad.trainer.load_model import load_full_model


@pytest.fixture(scope="module")
def policy(folder):
    return load_full_model(folder)


def places(found: Sequences):
    """Of each branch its pictures: which of PICTURES, and where in the branch."""
    images, out = found.images, []
    for first, last in zip(images.cu_images[:-1], images.cu_images[1:], strict=True):
        row = []
        for span in range(first, last):
            number = PICTURES.index(images.pictures.bytes_of(int(images.image[span])))
            row.append((number, images.position[images.cu_features[span] : images.cu_features[span + 1]].tolist()))
        out.append(row)
    return out


def test_pictures_of_a_record_stand_where_the_server_put_them(tokenizer, folder, policy, tmp_path):
    record = call(tokenizer, shown("look", 0, "and", 1, 0, 2), reward=1.0)
    path = tmp_path / "traces.jsonl"
    path.write_text(json.dumps(record) + "\n")
    traces = tg.read(path)
    assert traces.images.width.tolist() == [56, 84, 56]
    assert traces.images.media_type == ("image/png", "image/jpeg", "image/webp")
    assert [traces.images.bytes_of(row) for row in range(3)] == PICTURES
    assert "base64" not in json.dumps(traces[0].messages)
    found = align(traces, tokenizer)
    assert found.alignment_report.rate == 0
    assert not found.has_unknown_media.any()
    assert found.ids.tolist() == record["response"]["prompt_token_ids"] + [10, 11, 12]
    at = np.flatnonzero(found.ids == PAD).tolist()
    assert places(found) == [[(0, at[:4]), (1, at[4:10]), (0, at[10:14]), (2, at[14:])]]
    [batch] = tg.pack(found, [1.0], tokens_per_row=64)[0].batches
    assert batch.ids.tolist() == found.ids[: len(batch.ids)].tolist()
    with torch.no_grad():
        logps = logprobs(policy, batch)
        pixels = {}
        sent = batch.to("cpu").images
        for name in ("pixel_values", "image_grid_thw"):
            pixels[name] = torch.cat([sent.inputs[n][name] for n in np.unique(sent.image, return_inverse=True)[1]])
        ids = torch.from_numpy(found.ids).long()[None]
        theirs = policy(input_ids=ids, mm_token_type_ids=(ids == PAD).long(), **pixels).logits[0].log_softmax(-1)
    wanted = [theirs[t - 1, found.ids[t]].item() for t in found.terms]
    assert logps.tolist() == pytest.approx(wanted, abs=1e-5)


def test_two_pictures_of_one_size_are_never_one_prefix(tokenizer, policy):
    records = [
        call(tokenizer, shown(number, "?"), sampled=(10, 11), reward=float(number), id=f"t{number}", group="g")
        for number in (0, 2, 0)
    ]
    records[2]["id"] = "again"
    found = align(read(*records), tokenizer)
    parts = found.ids.reshape(3, -1)
    assert (parts == parts[0]).all()
    [step] = tg.pack(found, [1.0, -1.0, 0.5], tokens_per_row=64, share_prefixes=True)
    [batch] = step.batches
    assert len(batch.images) == 2
    assert sorted(batch.images.image.tolist()) == [0, 1]
    with torch.no_grad():
        shared = logprobs(policy, batch)
        alone = []
        for row in range(3):
            one = align(read(records[row]), tokenizer)
            alone.append(logprobs(policy, tg.pack(one, [1.0], tokens_per_row=64)[0].batches[0]))
    found = {}
    for value, term in zip(shared.tolist(), batch.term.tolist(), strict=True):
        found.setdefault(int(step.trace[term]), []).append(value)
    for row in range(3):
        assert found[row] == pytest.approx(alone[row].tolist(), abs=1e-5)
    assert (alone[0] - alone[1]).abs().max() > 0.05


def test_saved_pictures_come_back_with_their_files(tokenizer, folder, policy, tmp_path):
    records = [
        call(tokenizer, shown(*numbers), reward=1.0, id=str(n)) for n, numbers in enumerate([(0, 1), (2,), (0,)])
    ]
    found = align(read(*records, {**call(tokenizer, {"role": "user", "content": "x"}), "id": "text"}), tokenizer)
    found.save(tmp_path / "kept")
    again = Sequences.load(tmp_path / "kept", verify=True)
    # Five ids open a message of a user, and one each picture.
    first, second = [6, 7, 8, 9], [12, 13, 14, 15, 16, 17]
    assert places(again) == places(found) == [[(0, first), (1, second)], [(2, first)], [(0, first)], []]
    assert (tmp_path / "kept" / "media.bin").stat().st_size == sum(map(len, PICTURES))
    with pytest.raises(ArgumentError, match="TG-IMAGE-015"):
        tg.pack(again, np.ones(4), tokens_per_row=64)[0].batches[0].to("cpu")
    ready = again.with_image_processor(folder)
    with torch.no_grad():
        ours, theirs = (
            torch.cat([logprobs(policy, batch) for batch in tg.pack(each, np.ones(4), tokens_per_row=64)[0].batches])
            for each in (ready, found)
        )
    assert torch.equal(ours, theirs)


def test_a_changed_file_of_pictures_is_refused(tokenizer, folder, tmp_path):
    found = align(read(call(tokenizer, shown(0, 1))), tokenizer)
    found.save(tmp_path / "kept")
    path = tmp_path / "kept" / "media.bin"
    data = bytearray(path.read_bytes())
    data[200] ^= 1
    path.write_bytes(bytes(data))
    with pytest.raises(FormatError):
        Sequences.load(tmp_path / "kept", verify=True)
    with pytest.raises(ReadError, match="TG-IMAGE-002"):
        Sequences.load(tmp_path / "kept").images.pictures.bytes_of(0)


def test_another_models_processor_is_refused(tokenizer, folder, tmp_path):
    found = align(read(call(tokenizer, shown(0))), tokenizer)
    other = vlm.processor_folder(tmp_path / "other", patch=16)
    (other / "config.json").write_text((folder / "config.json").read_text())
    with pytest.raises(ArgumentError, match=r"TG-IMAGE-018.*patch_size"):
        found.with_image_processor(other)
    with pytest.raises(ArgumentError, match="TG-IMAGE-018"):
        found.with_image_processor(tmp_path)


def test_traces_selected_joined_and_subset_keep_their_pictures(tokenizer):
    from tracegrad.trainer.dataset import select
    from tracegrad.trainer.token_log import subset

    records = [call(tokenizer, shown(*numbers), id=str(n)) for n, numbers in enumerate([(0, 1), (2,), (1, 0)])]
    found = align(read(*records), tokenizer)
    wanted = [places(found)[row] for row in (0, 2)]
    assert places(select(found, np.array([0, 2]))) == wanted
    assert places(subset(found, np.array([0, 2]))[0]) == wanted


def test_a_picture_without_a_place_holds_the_turn(tokenizer):
    short = call(tokenizer, shown(0))
    short["response"]["prompt_token_ids"].remove(PAD)
    found = align(read(short), tokenizer)
    assert not found.trainable.any()
    assert found.has_unknown_media.all()
    assert found.images is None
    assert "R34 picture_unplaced" in found.alignment_report.table()
    [detail] = [
        each
        for each, reason in zip(found.alignment_report.detail, found.alignment_report.reason, strict=True)
        if reason == 34
    ]
    assert "56 x 56 has 4 ids" in detail
    absent = shown(0)
    absent["content"][0]["image_url"]["url"] = "https://example.org/a.png"
    found = align(read(call(tokenizer, absent, ids=prompt(tokenizer, shown(0)))), tokenizer)
    assert "R32 media_in_prompt" in found.alignment_report.table()
    assert any(
        "at an address (https:), whose bytes are not in the record" in each for each in found.alignment_report.detail
    )


def test_a_family_that_writes_marks_of_rows_between_parts_of_a_picture(tmp_path):
    """As its own processor writes it; positions are those of text."""
    from transformers import AutoProcessor

    folder = vlm.split_folder(tmp_path / "model")
    tokenizer, policy = tg.Tokenizer.from_pretrained(folder), load_full_model(folder)
    whole, pad = AutoProcessor.from_pretrained(folder), 641
    messages = [shown("look", 0, "and", 1)]
    rendered = tokenizer.render(messages, add_generation_prompt=True).text
    images = [Image.open(io.BytesIO(PICTURES[number])).convert("RGB") for number in (0, 1)]
    made = whole(text=[rendered], images=[images], return_tensors="pt")
    record = call(tokenizer, *messages, ids=made["input_ids"][0].tolist())
    found = align(read(record), tokenizer)
    assert found.alignment_report.rate == 0
    assert not found.has_unknown_media.any()
    assert len(found.alignment_report) == 0
    at = np.flatnonzero(found.ids == pad)
    assert found.images.position.tolist() == at.tolist()
    assert np.diff(found.images.cu_features).tolist() == [20, 20]  # four parts and the whole, four features each
    assert (found.source[at] == 0).all()
    [batch] = tg.pack(found, [1.0], tokens_per_row=256)[0].batches
    ids = torch.from_numpy(found.ids).long()[None]
    with torch.no_grad():
        pixels = {name: made[name] for name in ("pixel_values", "pixel_attention_mask")}
        theirs = policy(input_ids=ids, **pixels).logits[0].log_softmax(-1)
        wanted = [theirs[t - 1, found.ids[t]].item() for t in found.terms]
        assert logprobs(policy, batch).tolist() == pytest.approx(wanted, abs=1e-5)


def test_a_family_whose_pictures_see_one_another_is_refused(tmp_path):
    """Gemma 3: its own forward opens the mask within a picture, and no causal row does."""
    from dataclasses import replace

    from tracegrad.images import ImageRule, RowImages

    batch = replace(vlm.row([[3, 4, *[vlm.PAD] * 4, 5, 6, 7]], vlm.Files([]), None), images=None)
    inputs = ({"pixel_values": torch.randn(1, 3, 56, 56, generator=torch.Generator().manual_seed(0))},)
    places = np.arange(2, 6), np.array([0, 4]), np.array([0], np.int32)
    batch = replace(batch.to("cpu"), images=RowImages(*places, ImageRule(vlm.PAD, ()), None, inputs))
    with pytest.raises(ArgumentError, match="TG-MODEL-019"):
        logprobs(vlm.gemma3(), batch)


def test_rows_for_other_trainers_do_not_drop_pictures(tokenizer):
    from tracegrad.integrations._common import RecordedTraces

    found = align(read(call(tokenizer, shown(0))), tokenizer)
    with pytest.raises(ArgumentError, match="TG-INTEG-004"):
        RecordedTraces.of(found, [1.0], tg.presets.DAPO, "mask")


def test_what_a_tower_costs_is_balanced_over_ranks(tokenizer, policy):
    """One trace with a picture and three of text alone: its rank gets less of them where its tower is counted."""
    from dataclasses import replace

    from tracegrad.packing import ModelShape

    shape = ModelShape.of(policy.config)
    assert (shape.tower_layers, shape.tower_hidden, shape.tower_intermediate, shape.tower_patches) == (3, 32, 48, 4)
    assert shape.feature_flop == 2 * 4 * 3 * (4 * 32 * 32 + 2 * 32 * 48)
    words = {"role": "user", "content": "one two three four five six seven"}
    records = [call(tokenizer, shown(1)), *(call(tokenizer, words) for _ in range(3))]
    found = align(read(*({**record, "id": str(n)} for n, record in enumerate(records))), tokenizer)
    many = {"tokens_per_row": 64, "ranks": 2}
    plain = tg.pack(found, np.ones(4), shape=replace(shape, tower_layers=0), **many)[0].load
    heavy = replace(shape, tower_layers=3000)
    seen = tg.pack(found, np.ones(4), shape=heavy, **many)[0].load
    extra = 6 * heavy.feature_flop
    assert seen.sum() - plain.sum() == pytest.approx(extra, abs=shape.term_flop)
    assert seen.max() > extra
    ranks = [
        {int(each) for each in tg.pack(found, np.ones(4), shape=heavy, rank=rank, **many)[0].trace} for rank in (0, 1)
    ]
    assert {0} in ranks


def test_a_pickled_tokenizer_places_pictures_too(tokenizer):
    import pickle

    again = pickle.loads(pickle.dumps(tokenizer))
    assert places(align(read(call(tokenizer, shown(0))), again)) == [[(0, [6, 7, 8, 9])]]
