"""`tg.train`: the run of `tracegrad train` by one call."""

import json

import pytest

pytest.importorskip("torch")

import tracegrad as tg
from tracegrad.cli import main
from tracegrad.errors import ArgumentError, ReadError
from tracegrad.objective import Objective, Ratio
from tracegrad.view import runs

OPTIONS = {"data.holdout": 0.0, "train.groups_per_step": 1, "optimizer.lr": 1e-4, "train.seed": 3}


@pytest.fixture(scope="module")
def traces(example, tmp_path_factory):
    """Three steps of a group."""
    path = tmp_path_factory.mktemp("some") / "traces.jsonl"
    read = tg.read(example / "traces.jsonl.zst")
    chosen = list(dict.fromkeys(read.groups))[:3]
    tg.write(read[[row for row, group in enumerate(read.groups) if group in chosen]], path)
    return path


def rows(out):
    timed = ("seconds", "tokens_per_s")
    told = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return [{name: value for name, value in row.items() if not name.startswith(timed)} for row in told]


def test_it_is_the_run_of_the_command_line(traces, example, tmp_path):
    flags = [word for name, value in OPTIONS.items() for word in (f"--{name}", str(value))]
    told = [str(traces), "--model", str(example / "model"), "--out", str(tmp_path / "theirs"), "--recipe", "DR_GRPO"]
    assert main(["train", *told, *flags]) == 0
    said = []
    out = tmp_path / "ours"
    done = tg.train(example / "model", traces, out=out, recipe="DR_GRPO", options=OPTIONS, log=said.append)
    assert rows(out) == rows(tmp_path / "theirs")
    assert (out / "config.toml").read_text() == (tmp_path / "theirs" / "config.toml").read_text()
    assert done.step == 3
    assert (out / "report.html").is_file()
    assert json.loads((out / "summary.json").read_text())["steps"] == 3
    assert any("traces" in line for line in said)
    card = (out / "checkpoint" / "README.md").read_text()
    assert card.startswith('---\nlibrary_name: "transformers"\ntags: [tracegrad')
    assert "loss = sum of scale" in card
    assert "train.seed = 3" in card
    assert "steps           3" in card
    assert "traces in 3 groups" in card
    assert str(example) not in card
    again = tg.train(example / "model", traces, out=out, resume=True, log=said.append)  # the card breaks no seal
    assert again.step == 3


def test_an_objective_by_value_and_tokens_that_are_aligned(traces, example, tmp_path):
    sequences = tg.align(tg.read(traces), tg.Tokenizer.from_pretrained(example / "model"))
    mine = tg.presets.with_kl(tg.presets.GRPO, 0.04)
    told = {"objective": mine, "options": OPTIONS, "sinks": (), "log": lambda line: None}
    tg.train(example / "model", sequences, out=tmp_path / "a", **told)
    by_name = {**told, "objective": "GRPO", "options": {**OPTIONS, "objective.kl": 0.04}}
    tg.train(example / "model", traces, out=tmp_path / "b", **by_name)
    assert rows(tmp_path / "a") == rows(tmp_path / "b")
    assert "kl = 0.04" in (tmp_path / "a" / "config.toml").read_text()
    with pytest.raises(ArgumentError, match="TG-TRAIN-037"):
        tg.train(example / "model", sequences, out=tmp_path / "a", **told)
    again = tg.train(example / "model", sequences, out=tmp_path / "a", resume=True, sinks=(), log=lambda line: None)
    assert again.step == 3


def test_records_in_memory_train_as_their_file(traces, example, tmp_path):
    told = {"options": OPTIONS, "sinks": (), "log": lambda line: None}
    tg.train(example / "model", traces, out=tmp_path / "file", **told)
    read = tg.read(traces)
    scored = [{**trace.to_dict(), "reward": None, "score": trace.reward} for trace in read]
    mapped = {**told, "options": {**OPTIONS, "map.reward": "score"}}
    for name, source, options in (("read", read, told), ("list", list(read), told), ("dicts", iter(scored), mapped)):
        done = tg.train(example / "model", source, out=tmp_path / name, **options)
        assert done.step == 3
        assert rows(tmp_path / name) == rows(tmp_path / "file")
        summary = json.loads((tmp_path / name / "summary.json").read_text())
        assert summary["provenance"]["traces"] == []
        assert runs.page([tmp_path / name]).count("tracegrad doctor") == 0  # no file that it could read
    with pytest.raises(ReadError, match="TG-DATA-034"):
        tg.train(example / "model", [], out=tmp_path / "none", **told)
    options = {**OPTIONS, "data.on_error": "quarantine"}
    with pytest.raises(ArgumentError, match="TG-DATA-001"):
        tg.train(example / "model", scored, out=tmp_path / "none", **{**told, "options": options})
    with pytest.raises(ArgumentError, match=r"TG-DATA-039: int"):
        tg.train(example / "model", 5, out=tmp_path / "none", **told)


def test_a_loss_of_ones_own(traces, example, tmp_path):
    def squared_error(view):
        return view.ratio * view.advantages

    mine = Objective(squared_error, Ratio("theta", "rollout"))
    done = tg.train(
        example / "model", traces, out=tmp_path, objective=mine, options=OPTIONS, sinks=(), log=lambda line: None
    )
    assert done.step == 3


@pytest.mark.nightly
def test_prepared_folders_are_trained_from_as_the_file_they_are_of(traces, example, tmp_path, capsys):
    model = str(example / "model")
    assert main(["prepare", str(traces), "--model", model, "--out", str(tmp_path / "p"), "--shard-traces", "10"]) == 0
    assert len(list((tmp_path / "p").glob("shard-*"))) > 2
    told = {"options": OPTIONS, "sinks": (), "recipe": "DR_GRPO"}
    said = []
    whole = tg.train(model, traces, out=tmp_path / "file", **told, log=lambda line: None)
    done = tg.train(model, tmp_path / "p", out=tmp_path / "folder", **told, log=said.append)
    opened = tg.train(
        model, tg.PreparedDataset.open(tmp_path / "p"), out=tmp_path / "opened", **told, log=lambda line: None
    )
    assert rows(tmp_path / "folder") == rows(tmp_path / "file") == rows(tmp_path / "opened")
    assert done.step == whole.step == opened.step
    files, folders = (json.loads((tmp_path / name / "summary.json").read_text()) for name in ("file", "folder"))
    for name in ("traces", "groups", "tokens", "terms", "levels", "alignment_report", "recorded", "exact"):
        assert folders[name] == files[name], name
    pages = [(tmp_path / name / "report.html").read_text() for name in ("file", "folder")]
    parts = [page[page.index('<section id="traces">') : page.index("<script>")] for page in pages]
    tables = [page[page.index('<section id="alignment">') : page.index('<section id="traces">')] for page in pages]
    assert parts[0] == parts[1]
    assert tables[0] == tables[1]
    flags = [str(tmp_path / "p"), "--model", model, "--out", str(tmp_path / "cli"), "--recipe", "DR_GRPO"]
    flags += [word for name, value in OPTIONS.items() for word in (f"--{name}", str(value))]
    capsys.readouterr()
    assert main(["train", *flags, "--dry-run"]) == 0
    assert "dry run  3 optimizer steps" in capsys.readouterr().out
    assert main(["train", *flags]) == 0
    assert rows(tmp_path / "cli") == rows(tmp_path / "file")


def test_prepared_folders_and_files_are_not_mixed_and_take_no_option_of_aligning(traces, example, tmp_path):
    model = example / "model"
    assert main(["prepare", str(traces), "--model", str(model), "--out", str(tmp_path / "p")]) == 0
    with pytest.raises(ArgumentError, match=r"TG-TRAIN-007.*p"):
        tg.train(model, [str(tmp_path / "p"), str(traces)], out=tmp_path / "a", log=lambda line: None)
    options = {"data.logprob_kind": "raw"}
    with pytest.raises(ArgumentError, match=r"TG-PREPARE-011.*data\.logprob_kind"):
        tg.train(model, tmp_path / "p", out=tmp_path / "a", options=options, log=lambda line: None)
    of_training = ["--data.reward", "reward", "--data.reward_weights", "2", "--accept-truncated-sampling"]
    flags = ["--model", str(model), "--out", str(tmp_path / "b"), *of_training, "--data.holdout", "0", "--dry-run"]
    assert main(["train", str(tmp_path / "p"), *flags]) == 0
