"""Checkpoints: whole or not at all, loadable by transformers, exact to resume from."""

from __future__ import annotations

import json
import random
import resource
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from tiny import tiny_model  # noqa: E402
from tracegrad.errors import ReadError, TracegradError  # noqa: E402
from tracegrad.learner import checkpoint  # noqa: E402
from tracegrad.learner.model import load_model  # noqa: E402

PROGRESS = checkpoint.Progress(3, "abc", {"optimizer.lr": 0.1}, {"old": np.array([np.nan, -1.0], np.float32)})


def stepped(model, optimizer, seed: int):
    """One AdamW step on some gradient."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        parameter.grad = torch.randn(parameter.shape, generator=generator)
    optimizer.step()


def adamw(model):
    return torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.0)


@pytest.fixture
def run(tmp_path):
    model = tiny_model()
    optimizer = adamw(model)
    stepped(model, optimizer, 1)
    (tmp_path / "tokenizer").mkdir()
    (tmp_path / "tokenizer" / "tokenizer.json").write_text('{"x": 1}')
    return model, optimizer, tmp_path


def save(run, step: int = 3, keep: int = 2):
    model, optimizer, tmp = run
    progress = checkpoint.Progress(step, PROGRESS.fingerprint, PROGRESS.config, PROGRESS.logprobs)
    return checkpoint.save(tmp / "out", model, optimizer, progress, tokenizer=tmp / "tokenizer", keep=keep)


def test_transformers_loads_the_link_and_finds_the_same_parameters(run):
    save(run)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(run[2] / "out" / "checkpoint")
    for name, parameter in run[0].state_dict().items():
        assert torch.equal(parameter, loaded.state_dict()[name]), name
    assert (run[2] / "out" / "checkpoint" / "tokenizer.json").read_text() == '{"x": 1}'


def test_nothing_in_it_is_a_pickle(run):
    path = save(run)
    names = {file.suffix for file in path.rglob("*") if file.is_file()}
    assert names == {".json", ".safetensors"}


def test_a_restored_run_goes_on_bit_for_bit(run):
    model, optimizer, _ = run
    path = save(run)
    random.seed(5), np.random.seed(5), torch.manual_seed(5)  # noqa: NPY002
    path = save(run, step=4)
    drawn = (random.random(), np.random.random(), torch.rand(1).item())  # noqa: NPY002
    stepped(model, optimizer, 2)

    again = tiny_model(seed=9)
    other = adamw(again)
    progress = checkpoint.restore(path, again, other)
    assert (random.random(), np.random.random(), torch.rand(1).item()) == drawn  # noqa: NPY002
    stepped(again, other, 2)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), again.parameters(), strict=True))
    assert (progress.step, progress.fingerprint, dict(progress.config)) == (4, "abc", {"optimizer.lr": 0.1})
    np.testing.assert_array_equal(progress.logprobs["old"], PROGRESS.logprobs["old"])


def test_only_the_newest_stay(run):
    for step in (1, 2, 3):
        save(run, step)
    assert [p.name for p in checkpoint.list_checkpoints(run[2] / "out")] == ["step-00000002", "step-00000003"]
    assert (run[2] / "out" / "checkpoint").resolve().name == "step-00000003"


def test_what_was_left_half_written_is_no_checkpoint_and_is_cleared(run):
    save(run)
    half = run[2] / "out" / "checkpoints" / ".tmp-step-00000009"
    half.mkdir()
    (half / "model.safetensors").write_bytes(b"half")
    checkpoint.clear_staged(run[2] / "out")
    assert not half.exists()
    assert len(checkpoint.list_checkpoints(run[2] / "out")) == 1


def test_a_full_disk_is_one_error_and_leaves_the_checkpoint_before(run):
    first = save(run, step=1)
    before = {p: p.read_bytes() for p in first.rglob("*") if p.is_file()}
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, hard))  # a file past 4 KiB fails to write, as on a full disk
    try:
        with pytest.raises(TracegradError, match=r"step-00000002: .*not written; those before it are as they were"):
            save(run, step=2)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert [p.name for p in (run[2] / "out" / "checkpoints").iterdir()] == ["step-00000001"]
    assert {p: p.read_bytes() for p in first.rglob("*") if p.is_file()} == before
    assert (run[2] / "out" / "checkpoint").resolve() == first.resolve()


def test_a_folder_that_cannot_be_made_is_one_error(run):
    (run[2] / "out").write_text("a file where the folder should be")
    with pytest.raises(TracegradError, match="not written"):
        save(run)


def test_a_damaged_checkpoint_says_which_and_what_to_do(run):
    path = save(run)
    next((path / "resume" / "state").glob("*.safetensors")).write_bytes(b"short")
    again = tiny_model()
    with pytest.raises(ReadError, match=r"step-00000003: damaged: .* Delete this folder"):
        checkpoint.restore(path, again, adamw(again))


def test_a_checkpoint_of_another_model_is_refused(run):
    again = tiny_model(hidden_size=24)
    with pytest.raises(ReadError, match="not those of the model given"):
        checkpoint.restore(save(run), again, adamw(again))


def test_a_missing_folder_is_not_looked_for_on_a_hub(tmp_path):
    with pytest.raises(ReadError, match="no such folder"):
        load_model(tmp_path / "gone")


def test_a_model_without_config_or_weights_is_refused(tmp_path):
    tiny_model().save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").rename(tmp_path / "weights.bin")
    with pytest.raises(ReadError, match=r"no model.safetensors there \(config.json, .*weights.bin\)"):
        load_model(tmp_path)
    (tmp_path / "config.json").unlink()
    with pytest.raises(ReadError, match=r"config.json: .*architecture is not known"):
        load_model(tmp_path)


def test_cut_off_weights_are_refused(tmp_path):
    tiny_model().save_pretrained(tmp_path)
    whole = (tmp_path / "model.safetensors").read_bytes()
    (tmp_path / "model.safetensors").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ReadError, match="cannot load it"):
        load_model(tmp_path)


@pytest.mark.parametrize(
    "changes",
    [
        {"num_hidden_layers": 3},
        {"intermediate_size": 32},
        {"architectures": ["BertForMaskedLM"], "model_type": "bert"},
        {"architectures": ["LlamaForCausalLM"], "model_type": "llama"},
        {"model_type": "no_such_model"},
        {"architectures": ["T5ForConditionalGeneration"], "model_type": "t5"},
    ],
    ids=["too few layers", "other shapes", "an encoder", "another family", "an unknown one", "an encoder-decoder"],
)
def test_weights_of_another_architecture_are_refused_and_never_filled_with_random_numbers(tmp_path, changes):
    tiny_model().save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "layer_types": None, **changes}))
    with pytest.raises(ReadError, match="causal"):
        load_model(Path(tmp_path))
