"""What a run looks at before its first step: the device, the ids, pictures, and how rows can be run."""

import weakref
from dataclasses import replace

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from families import model_of
from tiny import sampled, tiny_model
from tracegrad import config
from tracegrad import model as policy
from tracegrad.alignment.sequences import Sequences
from tracegrad.errors import ArgumentError
from tracegrad.objective import presets
from tracegrad.packing import pack
from tracegrad.trainer import loop, train
from tracegrad.trainer.setup import check_media, check_vocabulary, device_of, row_padding
from tracegrad.trainer.steps import TrainingData


def told(**changes):
    base = {"optimizer.lr": 3e-3, "train.groups_per_step": 6, "pack.tokens_per_row": 64, "data.holdout": 0}
    return config.load(overrides=[*base.items(), *((name.replace("__", "."), v) for name, v in changes.items())])


# --- the device of a rank ---


@pytest.fixture
def devices(monkeypatch):
    """A machine with CUDA, and which of its devices was set."""
    taken, empty = [], torch.empty
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: taken.append(str(device)))
    monkeypatch.setattr(torch, "empty", lambda *size, device=None: empty(*size))
    return taken


@pytest.mark.parametrize(
    ("asked", "local", "device"), [("auto", 2, "cuda:2"), ("cuda", 3, "cuda:3"), ("cuda:1", 0, "cuda:1")]
)
def test_the_device_of_a_run_is_set_and_is_that_of_the_local_rank_unless_numbered(
    devices, monkeypatch, asked, local, device
):
    monkeypatch.setenv("LOCAL_RANK", str(local))
    assert str(device_of(told(train__device=asked))) == device
    assert devices == [device]


def test_one_numbered_device_for_several_ranks_of_a_machine_is_refused(devices, monkeypatch):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    with pytest.raises(ArgumentError, match=r"TG-TRAIN-027.*cuda:1.*4"):
        device_of(told(train__device="cuda:1"))
    assert devices == []


def test_a_short_row_on_cuda_is_padded_by_an_eighth_of_the_budget_at_most(devices):
    assert row_padding(told(pack__tokens_per_row=16384)) == 2048
    assert row_padding(told(pack__tokens_per_row=9000)) == 1152  # 9 blocks of 128
    assert row_padding(told(pack__tokens_per_row=64)) == 64
    assert row_padding(told(train__device="cpu")) == 1


# --- ids ---


def test_ids_without_a_row_in_the_embedding_or_the_head_are_refused_before_anything_runs():
    s, model = sampled(tiny_model(), groups=2), tiny_model(tie_word_embeddings=False)
    check_vocabulary(s, model)
    for wrong in (48, -1):
        with pytest.raises(ArgumentError, match=rf"TG-TRAIN-062.*{wrong}"):
            check_vocabulary(replace(s, ids=np.r_[s.ids[:-1], wrong].astype(np.int32)), model)
    with pytest.raises(ArgumentError, match=r"TG-TRAIN-062.*0.*48"):
        check_vocabulary(replace(s, ids=np.r_[48, s.ids[1:]].astype(np.int32)), model)
    model.lm_head = torch.nn.Linear(16, int(s.ids.max()), bias=False)
    with pytest.raises(ArgumentError, match="TG-TRAIN-062"):
        check_vocabulary(s, model)


def pictured(trained_behind):
    """Ids 9 9 stand for a picture."""
    ids, trainable = [4, 5, 9, 9, 6, 7], [False, True, False, False, False, trained_behind]
    logprobs = np.where(trainable, -1.0, np.nan)
    return Sequences.from_arrays(ids, [0, 6], logprobs, trainable, rewards=[1.0])


def test_what_was_sampled_behind_a_picture_is_not_trained_by_a_decoder_alone(tmp_path):
    model = model_of("gemma3")
    model.config.image_token_index = 9
    with pytest.raises(ArgumentError, match=r"TG-TRAIN-063.*1.*0"):
        check_media(pictured(True), model)
    assert check_media(pictured(False), model) == []  # all that is trained stands before
    [step] = pack(pictured(True), [1.0], tokens_per_row=8)
    with pytest.raises(ArgumentError, match="TG-MODEL-007"):
        policy.logprobs(model, step.batches[0])
    [step] = pack(pictured(False), [1.0], tokens_per_row=8)
    assert len(policy.logprobs(model, step.batches[0])) == 1
    # The text decoder of a larger model, loaded from its folder, does not name the id itself.
    (tmp_path / "config.json").write_text('{"image_token_id": 9, "vision_config": {}}')
    alone = tiny_model()
    alone.config._name_or_path = str(tmp_path)
    with pytest.raises(ArgumentError, match="TG-TRAIN-063"):
        check_media(pictured(True), alone)


# --- how rows are run ---


def test_a_run_whose_model_cannot_share_prefixes_says_so_and_packs_plain_rows(tmp_path):
    said = []
    changes = {"pack__share_prefixes": True, "train__epochs": 1}
    how = {"objective": presets.DAPO, "out": tmp_path, "config": told(**changes), "sinks": (), "log": said.append}
    done = train(sampled(tiny_model(), groups=6), model_of("mpt"), **how)
    assert done.step == 1
    [why] = [line for line in said if "prefixes are not shared" in line]
    assert "MptForCausalLM" in why


# Two epochs of six steps, each measured for `old` and trained on. DAPO_DIRECT needs no `old`.
@pytest.mark.parametrize(
    ("objective", "room", "packings", "most"),
    [
        (presets.DAPO, 6, 12, 8),
        (presets.DAPO, 3, 12 + 2 * 3, 6),
        (presets.DAPO, 0, 24, 3),
        (presets.DAPO_DIRECT, 6, 12, 3),
    ],
)
def test_an_epoch_is_planned_once_and_a_step_packed_once_if_there_is_room(
    tmp_path, monkeypatch, objective, room, packings, most
):
    plans, packed, alive, cut, planned = [], [], [], TrainingData.assign_steps, TrainingData.pack_step
    monkeypatch.setattr(TrainingData, "assign_steps", lambda self, seed: plans.append(seed) or cut(self, seed))
    monkeypatch.setattr(loop, "array_bytes", lambda _: 1)
    monkeypatch.setattr(loop, "_MAX_PACKED_BYTES", room)

    def step(self, rows):
        made = planned(self, rows)
        packed.append(weakref.ref(made))
        alive.append(sum(each() is not None for each in packed))
        return made

    monkeypatch.setattr(TrainingData, "pack_step", step)
    changes = {"pack__share_prefixes": True, "train__epochs": 2}
    how = {"objective": objective, "out": tmp_path, "config": told(**changes), "sinks": (), "log": lambda _: None}
    train(sampled(tiny_model(), groups=36), tiny_model(attn_implementation="sdpa"), **how)
    assert len(plans) == 2  # one for each epoch
    assert len(packed) == packings
    assert max(alive) <= most  # without room: the one that is taken, the one ahead, and the one before while it is made
