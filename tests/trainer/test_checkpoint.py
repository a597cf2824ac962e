"""Checkpoints: whole or not at all, loadable by transformers, exact to resume from."""

import json
import random
import resource
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from tiny import tiny_model
from tracegrad.errors import ReadError, TracegradError
from tracegrad.storage import safetensors_file
from tracegrad.trainer import checkpoint, result
from tracegrad.trainer.distributed import Ranks
from tracegrad.trainer.lora import load_model

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


class Counting(torch.optim.SGD):
    """An optimizer whose state begins with what is no tensor."""

    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter].setdefault("calls", 3)
        return super().step(closure)


def test_state_that_is_no_tensor_is_kept_beside_that_which_is(run):
    model, _, tmp = run
    optimizer = Counting(model.parameters(), lr=0.1, momentum=0.9)
    stepped(model, optimizer, 1)
    path = save((model, optimizer, tmp))
    again = tiny_model(seed=9)
    other = Counting(again.parameters(), lr=0.1, momentum=0.9)
    checkpoint.restore(path, again, other)
    for old, new in zip(model.parameters(), again.parameters(), strict=True):
        assert other.state[new]["calls"] == 3
        assert torch.equal(optimizer.state[old]["momentum_buffer"], other.state[new]["momentum_buffer"])


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
        with pytest.raises(TracegradError, match=r"TG-TRAIN-014: .*step-00000002: "):
            save(run, step=2)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert [p.name for p in (run[2] / "out" / "checkpoints").iterdir()] == ["step-00000001"]
    assert {p: p.read_bytes() for p in first.rglob("*") if p.is_file()} == before
    assert (run[2] / "out" / "checkpoint").resolve() == first.resolve()


def test_a_folder_that_cannot_be_made_is_one_error(run):
    (run[2] / "out").write_text("a file where the folder should be")
    with pytest.raises(TracegradError, match="TG-TRAIN-014"):
        save(run)


def resume(path, seed=9):
    again = tiny_model(seed=seed)
    return checkpoint.restore(path, again, adamw(again))


def files_of(path):
    return [file for file in sorted((path / "resume").rglob("*")) if file.is_file()]


def test_every_file_that_is_missing_cut_or_changed_is_found_and_the_checkpoint_before_it_named(run):
    save(run, step=2)
    path = save(run)
    seen = files_of(path)
    assert len(seen) >= 6
    for file in seen:
        whole = file.read_bytes()
        changed = bytearray(whole)
        changed[-3] ^= 1  # among the tensors of a file that has some
        for spoilt in (None, b"", whole[:-1], whole + b"0", changed, b"\xff" * 8 + whole, b"[" * 100_000):
            file.unlink()
            if spoilt is not None:
                file.write_bytes(spoilt)
            if file.name == "progress.json" and spoilt is not None and bytes(spoilt).strip() == whole.strip():
                continue
            with pytest.raises(ReadError, match=r"TG-TRAIN-015.*step-00000003.*step-00000002"):
                resume(path)
            file.write_bytes(whole)
    (path / "resume" / "state" / "more.safetensors").write_bytes(whole)
    with pytest.raises(ReadError, match="TG-TRAIN-015"):
        resume(path)
    (path / "resume" / "state" / "more.safetensors").unlink()
    (path / "resume" / "state" / "more.safetensors").symlink_to("/etc/passwd")
    with pytest.raises(ReadError, match="TG-TRAIN-015"):
        resume(path)
    (path / "resume" / "state" / "more.safetensors").unlink()
    assert resume(path).step == 3


@pytest.mark.parametrize(
    ("word", "other"), [('"step": 3', '"step": 4'), ('"optimizer.lr": 0.1', '"optimizer.lr": 0.3')]
)
def test_a_word_of_the_mark_that_changed_is_found(run, word, other):
    path = save(run)
    mark = path / "resume" / "progress.json"
    assert word in mark.read_text()
    mark.write_text(mark.read_text().replace(word, other))
    with pytest.raises(ReadError, match=r"TG-TRAIN-015.*progress\.json"):
        resume(path)


def sealed_anew(path):
    """The mark of a forger, who knows how checksums are made."""
    folder = path / "resume"
    said = json.loads((folder / "progress.json").read_text())
    said["files"] = {
        n: [w.bytes, f"{w.crc32:08x}"]
        for n, w in checkpoint._measure_files(folder, checkpoint._list_files(folder)).items()
    }
    (folder / "progress.json").write_text(json.dumps(checkpoint.with_checksum(said)))


def header(file):
    length = int.from_bytes(file.read_bytes()[:8], "little")
    return json.loads(file.read_bytes()[8 : 8 + length]), file.read_bytes()[8 + length :]


def with_header(file, change):
    told, body = header(file)
    change(told)
    text = json.dumps(told).encode()
    file.write_bytes(len(text).to_bytes(8, "little") + text + body)


def rename_one(told):
    name = next(n for n in told if n.startswith("exp_avg:"))
    told["exp_avg:nobody"] = told.pop(name)


def flatten_one(told):
    name = next(n for n in told if n.startswith("exp_avg:") and len(told[n]["shape"]) == 2)
    told[name]["shape"] = [int(np.prod(told[name]["shape"]))]


def retype_params(told):
    for name, entry in told.items():
        if name.startswith("param:"):
            entry["dtype"] = "I32"


def longer(told):
    next(entry for entry in told.values() if "data_offsets" in entry)["data_offsets"][1] = 2**60


@pytest.mark.parametrize("change", [rename_one, flatten_one, retype_params, longer])
def test_a_forged_header_of_the_state_is_an_error_of_ours(run, change):
    path = save(run)
    with_header(next((path / "resume" / "state").glob("*.safetensors")), change)
    sealed_anew(path)
    with pytest.raises(ReadError, match=r"TG-TRAIN-01[15].*step-00000003"):
        resume(path)


def test_a_header_that_claims_2_to_the_60_bytes_is_not_read(run):
    path = save(run)
    file = next((path / "resume" / "state").glob("*.safetensors"))
    file.write_bytes((2**60).to_bytes(8, "little") + file.read_bytes()[8:])
    sealed_anew(path)
    with pytest.raises(ReadError, match="TG-TRAIN-015"):
        resume(path)


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("torch", lambda a: a[:-1]),
        ("torch", lambda a: np.zeros(0, np.uint8)),
        ("numpy_keys", lambda a: a[:-1]),
        ("numpy_keys", lambda a: a - (1 << 40)),
        ("numpy_rest", lambda a: np.array([10**9, 0, 0.0])),  # numpy would draw from memory that is not its own
        ("numpy_rest", lambda a: np.array([np.nan, 0, 0.0])),
        ("numpy_rest", lambda a: np.zeros(2)),
        ("numpy_rest", None),
    ],
)
def test_a_random_state_of_a_wrong_size_is_refused_before_one_is_set(run, name, change):
    from safetensors.numpy import load_file, save_file

    path = save(run)
    file = path / "resume" / "random-0.safetensors"
    states = load_file(file)
    states[name] = change(states[name]) if change else states.pop(name)[:0]
    save_file(states, file, metadata={"python": json.dumps(random.getstate())})
    sealed_anew(path)
    before = (random.getstate(), np.random.get_state()[2], torch.get_rng_state().tolist())  # noqa: NPY002
    with pytest.raises((ValueError, KeyError)):
        checkpoint.restore_random(file)
    assert (random.getstate(), np.random.get_state()[2], torch.get_rng_state().tolist()) == before  # noqa: NPY002
    with pytest.raises(ReadError, match="TG-TRAIN-015"):
        resume(path)


@pytest.mark.parametrize("python", [None, "[]", "[3, [1, 2], null]", "{", '[3, ["a"], null]'])
def test_a_random_state_of_python_that_is_none_is_refused(run, python):
    from safetensors.numpy import load_file, save_file

    path = save(run)
    file = path / "resume" / "random-0.safetensors"
    save_file(load_file(file), file, metadata=None if python is None else {"python": python})
    sealed_anew(path)
    with pytest.raises(ReadError, match="TG-TRAIN-015"):
        resume(path)


@pytest.mark.parametrize(
    ("file", "place", "value"),
    [
        ("progress.json", ("step",), "3"),
        ("progress.json", ("step",), 2**80),
        ("progress.json", ("step",), True),
        ("progress.json", ("fingerprint",), 3),
        ("progress.json", ("config",), []),
        ("progress.json", ("control",), {"coef": float("nan")}),
        ("progress.json", ("control",), {"coef": "1"}),
        ("progress.json", ("seconds",), [1]),
        ("progress.json", ("files",), []),
        ("progress.json", ("files", "../../x"), [1, "00000000"]),
        ("progress.json", ("format",), ["x"] * 1000),
        ("state/optimizer.json", ("groups",), []),
        ("state/optimizer.json", ("groups",), [{"params": [0, 0]}]),
        ("state/optimizer.json", ("groups",), [{"lr": "fast"}]),
        ("state/optimizer.json", ("groups",), [{"eps": float("nan")}]),
        ("state/optimizer.json", ("groups",), [{"betas": [0.9]}]),
        ("state/optimizer.json", ("groups",), 5),
        ("state/optimizer.json", ("state",), {"step:nobody": 3}),
        ("state/optimizer.json", ("state",), None),
    ],
)
def test_forged_words_are_refused(run, file, place, value):
    path = save(run)
    there = path / "resume" / file
    told = json.loads(there.read_text())
    node = told
    for name in place[:-1]:
        node = node[name]
    node[place[-1]] = value
    there.write_text(json.dumps(checkpoint.with_checksum(told) if file == "progress.json" else told))
    if file != "progress.json":
        sealed_anew(path)
    with pytest.raises(ReadError, match=r"TG-TRAIN-01[05]") as raised:
        resume(path)
    assert len(str(raised.value)) < 1500


def test_terms_for_the_report_come_back_and_other_arrays_are_refused(run, tmp_path):
    model, optimizer, tmp = run
    columns = {name: np.arange(2).astype(kind) for name, kind in result._COLUMNS.items()}
    terms = [result.TokenRecord(step, **columns) for step in (1, 3)]
    path = checkpoint.save(tmp / "out", model, optimizer, PROGRESS, tokenizer=None, keep=1, terms=terms)
    back = checkpoint.read_terms(path, Ranks())
    assert [term.step for term in back] == [1, 3]
    assert all(
        np.array_equal(getattr(one, n), getattr(two, n)) for one, two in zip(back, terms, strict=True) for n in columns
    )
    for change in (
        {"origin": np.zeros(4, np.int32)},
        {"ratio": np.zeros(3, np.float32)},
        {"step": np.array([3, 1, 1, 1])},
    ):
        arrays = {name: np.tile(column, 2) for name, column in columns.items()} | {"step": np.array([1, 1, 3, 3])}
        safetensors_file.write(path / "resume" / "terms-0.safetensors", arrays | change)
        with pytest.raises(ReadError, match="TG-TRAIN-015"):
            checkpoint.read_terms(path, Ranks())


def test_a_checkpoint_of_another_model_is_refused(run):
    again = tiny_model(hidden_size=24)
    with pytest.raises(ReadError, match="TG-TRAIN-011"):
        checkpoint.restore(save(run), again, adamw(again))


def test_a_missing_folder_is_not_looked_for_on_a_hub(tmp_path):
    with pytest.raises(ReadError, match="TG-TRAIN-032"):
        load_model(tmp_path / "gone")


def test_a_model_without_config_or_weights_is_refused(tmp_path):
    tiny_model().save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").rename(tmp_path / "weights.bin")
    with pytest.raises(ReadError, match=r"TG-TRAIN-030.*config\.json.*generation_config\.json.*weights\.bin"):
        load_model(tmp_path)
    (tmp_path / "config.json").unlink()
    with pytest.raises(ReadError, match=r"TG-TRAIN-033.*config\.json.*Errno.*2.*No"):
        load_model(tmp_path)


def test_cut_off_weights_are_refused(tmp_path):
    tiny_model().save_pretrained(tmp_path)
    whole = (tmp_path / "model.safetensors").read_bytes()
    (tmp_path / "model.safetensors").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ReadError, match="TG-TRAIN-096"):
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
    with pytest.raises(ReadError, match=r"TG-TRAIN-0[39]6"):
        load_model(Path(tmp_path))
