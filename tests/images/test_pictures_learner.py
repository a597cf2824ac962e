"""Runs on traces with pictures: from records and from prepared folders, with the tower frozen or trained."""

import filecmp
import json
from dataclasses import replace
from types import SimpleNamespace

import pytest
from safetensors.torch import load_file

import tracegrad as tg
from picture_pages import GOLDEN
from tracegrad import prepare
from tracegrad.config import Config, Data
from tracegrad.config.schema import Images
from tracegrad.errors import ArgumentError
from tracegrad.trainer.load_model import auto_class_name
from tracegrad.trainer.setup import check_images_on_ranks


@pytest.fixture(scope="module")
def traces(tmp_path_factory):
    """The recording of a real server, twice over, with rewards that differ within groups."""
    path = tmp_path_factory.mktemp("traces") / "traces.jsonl"
    recorded = tg.read(GOLDEN)
    rows = [json.loads(recorded.core.record(row)) for row in range(len(recorded))]
    lines = [
        json.dumps({**row, "id": f"{row['id']} {n}", "group": str(n % 5), "reward": float(n % 3 == 0)})
        for n, row in enumerate(rows * 2)
    ]
    path.write_text("\n".join(lines) + "\n")
    return path


def trained(traces, folder, out, **options):
    # A logit_bias made the server sample the pads of pictures.
    told = {"data.accept_truncated_sampling": True, "optimizer.lr": 1e-3, "train.epochs": 1, "data.holdout": 0.0}
    told |= {"pack.tokens_per_row": 512, **options}
    done = tg.train(folder, traces, out=out, options=told)
    return done, load_file(done.checkpoint / "model.safetensors") if not options.get("train.lora_rank") else None


def test_shards_train_as_records_do_and_any_number_of_workers_prepares_them(traces, folder, tmp_path):
    _, memory = trained(traces, folder, tmp_path / "memory")
    for workers in (1, 2):
        prepare.prepare([str(traces)], folder, Data(), tmp_path / str(workers), workers=workers)
    names = [path.relative_to(tmp_path / "1") for path in (tmp_path / "1").rglob("*.*") if path.is_file()]
    assert any(name.name == "media.bin" for name in names)
    assert not [name for name in names if not filecmp.cmp(tmp_path / "1" / name, tmp_path / "2" / name, False)]
    _, shards = trained(tg.PreparedDataset.open(tmp_path / "1"), folder, tmp_path / "shards")
    assert all(memory[name].equal(shards[name]) for name in memory)


@pytest.mark.parametrize("tower", ["frozen", "trained"])
def test_the_tower_is_trained_on_request(traces, folder, tmp_path, tower):
    before = load_file(folder / "model.safetensors")
    done, after = trained(traces, folder, tmp_path / "run", **{"images.vision_encoder": tower})
    assert auto_class_name(done.checkpoint) == "AutoModelForImageTextToText"
    moved = {name for name in before if not before[name].equal(after[name])}
    assert any("language_model" in name for name in moved)
    assert any("visual" in name for name in moved) == (tower == "trained")
    [ratio] = [row["ratio_mean"] for row in done.rows if "ratio_mean" in row]
    assert ratio == pytest.approx(1.0, abs=1e-4)


@pytest.mark.parametrize("tower", ["frozen", "trained"])
def test_adapters_stand_on_the_tower_on_request(traces, folder, tmp_path, tower):
    done, _ = trained(traces, folder, tmp_path / "run", **{"images.vision_encoder": tower, "train.lora_rank": 2})
    adapters = load_file(done.checkpoint / "adapter_model.safetensors")
    assert any("visual" in name for name in adapters) == (tower == "trained")
    assert any(
        "language_model" in name and value.abs().max() > 0 for name, value in adapters.items() if "lora_B" in name
    )


def test_a_model_without_a_tower_is_refused(traces, folder, example, tmp_path):
    sequences = tg.align(tg.read(traces), tg.Tokenizer.from_pretrained(folder))
    with pytest.raises(ArgumentError, match="TG-IMAGE-018"):
        tg.train(example / "model", sequences, out=tmp_path / "run")


@pytest.mark.parametrize(
    ("mode", "alone", "tower", "refused"),
    [
        ("fsdp", False, "frozen", r"TG-TRAIN-065.*parallel\.mode"),
        ("ddp", False, "trained", r"TG-TRAIN-065.*images\.vision_encoder"),
        ("ddp", False, "frozen", None),
        ("none", True, "trained", None),
    ],
)
def test_ranks_that_would_run_the_tower_unlike_often_are_refused(traces, folder, mode, alone, tower, refused):
    sequences = tg.align(tg.read(traces), tg.Tokenizer.from_pretrained(folder))
    target = SimpleNamespace(mode=mode, ranks=SimpleNamespace(is_single=alone))
    config = replace(Config(), images=Images(tower))
    if refused is None:
        check_images_on_ranks(sequences, target, config)
        return
    check_images_on_ranks(replace(sequences, images=None), target, config)
    with pytest.raises(ArgumentError, match=refused):
        check_images_on_ranks(sequences, target, config)


def test_whether_shards_show_pictures_is_known_without_a_token(traces, folder, example, tmp_path):
    for name, model, source in (("seen", folder, traces), ("text", example / "model", example / "traces.jsonl.zst")):
        prepare.prepare([str(source)], model, Data(), tmp_path / name)
        shards = tg.PreparedDataset.open(tmp_path / name)
        assert shards.has_images == (name == "seen")
        assert not shards._mapped  # a run on text alone would otherwise read all of it before its first step
