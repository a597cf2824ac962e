"""Rows with pictures give the numbers of each branch through the model's own forward, and the same gradients."""

import io
from dataclasses import replace

import numpy as np
import pytest
import torch
from PIL import Image

import vlm
from tracegrad.errors import ArgumentError, ReadError
from tracegrad.images import ImageRule
from tracegrad.model import hidden_states, logprobs, vision
from tracegrad.model.structure import vision_encoder_modules

ONE = [3, 4, vlm.START, ("p", 0), vlm.END, 5, 6, 7, 8]
TWO = [9, vlm.START, ("p", 1), vlm.END, vlm.START, ("p", 2), vlm.END, 10, 11, 12]
# Side by side, one of them twice, and pads that are words.
ODD = [9, ("p", 0), ("p", 0), 10, ("p", 3), 11, vlm.PAD, 12, vlm.PAD, 13]
SIBLING = [*ONE[:5], 20, 21, 22]


@pytest.fixture(scope="module")
def rule(tmp_path_factory):
    return ImageRule.of(vlm.processor_folder(tmp_path_factory.mktemp("model")))


@pytest.fixture(scope="module")
def files():
    sizes = [(56, 56), (84, 56), (56, 56), (60, 100)]
    return vlm.Files([vlm.picture(*size, seed) for seed, size in enumerate(sizes)])


@pytest.fixture(scope="module", params=[vlm.qwen3_vl, vlm.qwen2_5_vl], ids=lambda make: make.__name__)
def model(request):
    return request.param()


def own_forward(model, branch, files, rule):
    """[T, H] by the model's own forward of ids, pixels and types: it finds places and positions itself."""
    row = vlm.row([branch], files, rule).to("cpu")
    shown = torch.zeros_like(row.ids)
    shown[torch.from_numpy(row.images.position)] = 1
    given = [row.images.inputs[number] for number in np.unique(row.images.image, return_inverse=True)[1]]
    pixels = {name: torch.cat([each[name] for each in given]) for name in ("pixel_values", "image_grid_thw")}
    model.model.rope_deltas = None
    how = {"mm_token_type_ids": shown[None], "use_cache": False}
    return model.model(input_ids=row.ids[None], **pixels, **how).last_hidden_state[0]


def test_packed_rows_and_trees_are_the_models_own_numbers(model, files, rule):
    wanted = [own_forward(model, branch, files, rule) for branch in (ONE, TWO, SIBLING)]
    packed = hidden_states(model, vlm.row([ONE, TWO], files, rule).to("cpu"))
    assert torch.allclose(packed, torch.cat(wanted[:2]), atol=1e-9)
    shared = vlm.row([ONE, SIBLING], files, rule, shared=5).to("cpu")
    found = hidden_states(model, shared)
    stem, whole = 8, len(wanted[0])
    assert torch.allclose(found[:whole], wanted[0], atol=1e-9)
    assert torch.allclose(torch.cat([found[:stem], found[whole:]]), wanted[2], atol=1e-9)
    # The features of a picture are in the numbers of what stands behind it, and only there.
    assert (found[whole:] - found[stem:][: len(found) - whole]).abs().max() > 0.1


def test_the_tower_learns_as_from_each_branch_alone(model, files, rule):
    def gradients(rows):
        model.zero_grad()
        for row in rows:
            (hidden_states(model, row) * torch.arange(32).sin()).sum().backward()
        named = model.named_parameters()
        return {name: each.grad.clone() for name, each in named if each.grad is not None and "lm_head" not in name}

    alone = gradients([vlm.row([branch], files, rule).to("cpu") for branch in (ONE, TWO)])
    packed = gradients([vlm.row([ONE, TWO], files, rule).to("cpu")])
    assert any("visual" in name and grad.abs().max() > 1e-3 for name, grad in packed.items())
    for name, grad in alone.items():
        assert torch.allclose(packed[name], grad, rtol=1e-6, atol=1e-6 * float(grad.abs().max())), name
    assert {id(each) for part in vision_encoder_modules(model) for each in part.parameters()} == {
        id(each) for name, each in model.named_parameters() if "visual" in name
    }


def test_a_pad_is_a_picture_only_where_one_is_recorded(model, files, rule):
    """Against features put in by hand, as the model's own forward counts pads."""
    row = vlm.row([ODD], files, rule).to("cpu")
    embeds = model.get_input_embeddings()(row.ids)
    given = [row.images.inputs[number] for number in np.unique(row.images.image, return_inverse=True)[1]]
    pixels, grid = (torch.cat([each[name] for each in given]) for name in ("pixel_values", "image_grid_thw"))
    tower = model.model.get_image_features(pixels, grid, return_dict=True)
    at = torch.from_numpy(row.images.position)
    embeds = embeds.index_copy(0, at, torch.cat(list(tower.pooler_output)))
    mask = torch.zeros(len(row.ids), dtype=torch.bool)
    mask[at] = True
    deep = getattr(tower, "deepstack_features", None)
    how = (
        {"visual_pos_masks": mask[None], "deepstack_visual_embeds": [torch.cat(list(each)) for each in deep]}
        if deep
        else {}
    )
    # Positions by hand: two of 2 x 2 side by side, a word, one of 4 rows and 2 columns, and five words.
    square = [[0, 0, 0, 0], [0, 0, 1, 1], [0, 1, 0, 1]]
    tall = [[0] * 8, [0, 0, 1, 1, 2, 2, 3, 3], [0, 1] * 4]
    columns = [
        [0, *(1 + n for n in square[k]), *(3 + n for n in square[k]), 5, *(6 + n for n in tall[k]), *range(10, 15)]
        for k in range(3)
    ]
    positions = torch.tensor(columns)[:, None]
    wanted = model.model.language_model(inputs_embeds=embeds[None], position_ids=positions, use_cache=False, **how)
    found = hidden_states(model, row)
    assert torch.allclose(found, wanted.last_hidden_state[0], atol=1e-9)


@pytest.mark.parametrize("spoil", ["positions", "picture", "mask", "alpha", "jpeg", "bfloat16", "pixels"])
def test_each_silent_fault_would_show(model, files, rule, spoil, monkeypatch):
    """What the numbers would be with it is far from what they are: so the tests above would find it."""
    batch = vlm.row([ONE, TWO], files, rule).to("cpu")
    right = hidden_states(model, batch)
    if spoil == "positions":
        monkeypatch.setattr(vision, "_positions", lambda body, row, seen: row.positions[None])
        wrong = hidden_states(model, batch)
    elif spoil == "picture":
        swapped = replace(batch.images, image=np.array([2, 1, 0], np.int32))
        wrong = hidden_states(model, replace(batch, images=replace(swapped, inputs=None).to("cpu")))
    elif spoil == "mask":
        monkeypatch.setattr(vision, "dense_mask", lambda *_, **__: None)
        wrong = hidden_states(model, batch)
    elif spoil == "pixels":
        dark = [{**each, "pixel_values": torch.zeros_like(each["pixel_values"])} for each in batch.images.inputs]
        wrong = hidden_states(model, replace(batch, images=replace(batch.images, inputs=tuple(dark))))
    elif spoil == "bfloat16":
        low = [{**each, "pixel_values": each["pixel_values"].bfloat16().float()} for each in batch.images.inputs]
        wrong = hidden_states(model, replace(batch, images=replace(batch.images, inputs=tuple(low))))
    else:
        first = vlm.picture(56, 56, 0, "RGBA") if spoil == "alpha" else next(iter(files.files.values()))
        image = Image.open(io.BytesIO(first))
        out = io.BytesIO()
        (image.convert("RGB") if spoil == "alpha" else image).save(out, "PNG" if spoil == "alpha" else "JPEG")
        rest = list(files.files.values())[1:]
        right = hidden_states(model, vlm.row([ONE], vlm.Files([first, *rest]), rule).to("cpu"))
        wrong = hidden_states(model, vlm.row([ONE], vlm.Files([out.getvalue(), *rest]), rule).to("cpu"))
    least = 1e-4 if spoil == "bfloat16" else 0.05
    assert (wrong - right).abs().max() > least


def test_a_model_that_is_not_its_own_forward_is_refused(files, rule, monkeypatch):
    model = vlm.qwen3_vl()
    batch = vlm.row([ONE, TWO], files, rule).to("cpu")
    monkeypatch.setattr(vision, "_positions", lambda body, row, seen: row.positions[None])
    with pytest.raises(ArgumentError, match="TG-MODEL-019"):
        hidden_states(model, batch)


def test_a_row_that_no_mask_keeps_apart_runs_branch_by_branch_and_is_not_shared(files, rule, monkeypatch):
    model = vlm.qwen3_vl()
    batch = vlm.row([ONE, TWO], files, rule).to("cpu")
    right = hidden_states(model, batch)
    fresh = vlm.qwen3_vl()
    monkeypatch.setattr(vision, "dense_mask", lambda *_, **__: None)
    assert torch.allclose(hidden_states(fresh, batch), right, atol=1e-9)
    with pytest.raises(ArgumentError, match="TG-MODEL-020"):
        hidden_states(fresh, vlm.row([ONE, SIBLING], files, rule, shared=5).to("cpu"))


def test_text_and_pads_without_pictures(model, files, rule):
    text = replace(vlm.row([[3, 4, 5, 6]], files, rule), images=None)
    assert torch.isfinite(hidden_states(model, text.to("cpu"))).all()
    pads = replace(vlm.row([[3, vlm.PAD, 5, 6]], files, rule), images=None)
    with pytest.raises(ArgumentError, match="TG-MODEL-007"):
        hidden_states(model, pads.to("cpu"))


def test_a_picture_that_is_lost_or_another_size_is_named(files, rule, tmp_path):
    assert ImageRule.of(rule.folder).processor is rule.processor  # which keeps what it made for the next step
    row = vlm.row([ONE], files, ImageRule.of(vlm.processor_folder(tmp_path)))
    name = row.images.pictures.digest[0].tobytes()
    gone = replace(row, images=replace(row.images, pictures=replace(row.images.pictures, sources=())))
    with pytest.raises(ReadError, match=f"TG-IMAGE-006.*{name.hex()[:16]}"):
        gone.to("cpu")
    fewer = replace(row.images, position=row.images.position[:-1], cu_features=row.images.cu_features - [0, 1])
    with pytest.raises(ArgumentError, match=r"TG-IMAGE-012.*3"):
        replace(row, images=fewer).to("cpu")


def test_logprobs_of_a_row_are_those_of_its_head(model, files, rule):
    row = vlm.row([ONE, TWO], files, rule)
    row = replace(row, logit_row=np.array([9, 11], np.int32), term=np.arange(2))
    with torch.no_grad():
        found = logprobs(model, row)
        every = torch.log_softmax(model.lm_head(hidden_states(model, row.to("cpu"))), -1)
    wanted = [float(every[t, int(row.ids[t + 1])]) for t in (9, 11)]
    assert found.tolist() == pytest.approx(wanted, abs=1e-9)
