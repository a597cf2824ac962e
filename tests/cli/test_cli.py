"""The command line: what it prints, what it writes, what it refuses, and how it stops."""

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import tracegrad
import tracegrad as tg
from tracegrad import _core
from tracegrad.cli import main

SOURCE = Path(tracegrad.__file__).parents[1]
QUICK = ["--train.groups_per_step", "2", "--optimizer.lr", "2e-4", "--epochs", "2", "--data.holdout", "0.2"]


@pytest.fixture(scope="session")
def forty(example, tmp_path_factory):
    """A file of the example's first five groups."""
    path = tmp_path_factory.mktemp("traces") / "traces.jsonl"
    tg.write(tg.read(example / "traces.jsonl.zst", limit=40), path)
    return path


def train(example, forty, out, *more):
    return ["train", str(forty), "--model", str(example / "model"), "--out", str(out), *QUICK, *more]


def test_the_version_is_the_cores(capsys):
    with pytest.raises(SystemExit) as done:
        main(["--version"])
    assert (done.value.code, capsys.readouterr().out) == (0, f"tracegrad {_core.__version__}\n")


def test_the_package_runs_as_a_module():
    told = {"check": True, "capture_output": True, "text": True, "env": {**os.environ, "PYTHONPATH": str(SOURCE)}}
    done = subprocess.run([sys.executable, "-m", "tracegrad", "--version"], **told)
    assert done.stdout == f"tracegrad {_core.__version__}\n"


def test_importing_it_and_preparing_take_neither_torch_nor_transformers_nor_tqdm(example, forty, tmp_path):
    blocked = "import sys; sys.modules.update(dict.fromkeys(['torch', 'transformers', 'tqdm', 'safetensors'])); "
    arguments = ["prepare", str(forty), "--model", str(example / "model"), "--out", str(tmp_path / "o")]
    call = f"from tracegrad.cli import main; sys.exit(main({arguments!r}))"
    done = subprocess.run(
        [sys.executable, "-c", blocked + call],
        env={**os.environ, "PYTHONPATH": str(SOURCE)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def test_prepare_writes_shards_that_hold_what_align_gives(example, forty, tmp_path, capsys):
    assert (
        main(
            [
                "prepare",
                str(forty),
                "--model",
                str(example / "model"),
                "--out",
                str(tmp_path / "o"),
                "--shard-traces",
                "16",
            ]
        )
        == 0
    )
    said = capsys.readouterr().out
    assert "read     40 traces in 5 groups" in said
    whole = tg.align(tg.read(forty), tg.Tokenizer.from_pretrained(example / "model"))
    shards = [tg.Sequences.load(path) for path in sorted((tmp_path / "o").glob("shard-*"))]
    assert [shard.traces for shard in shards] == [16, 16, 8]
    np.testing.assert_array_equal(np.concatenate([shard.ids for shard in shards]), whole.ids)
    report = json.loads((tmp_path / "o" / "alignment_report.json").read_text())
    assert (report["tokens"], report["terms"], report["groups"]) == (whole.tokens, len(whole.terms), 5)
    assert report["levels"] == whole.levels()
    assert report["alignment_report"] == whole.alignment_report.table()


def test_train_takes_what_prepare_has_written(example, forty, tmp_path, capsys):
    shards = tmp_path / "shards"
    model = ["--model", str(example / "model")]
    assert main(["prepare", str(forty), *model, "--out", str(shards), "--shard-traces", "16"]) == 0
    prepared = capsys.readouterr().out.splitlines()
    assert main(train(example, shards, tmp_path / "o", "--dry-run")) == 0
    said = capsys.readouterr().out
    assert "dry run  4 optimizer steps, 2 per epoch, on 31 traces with 883 trained tokens; 8 held out" in said
    # Shards do not know the forms of the records they were made of.
    assert all(line in said for line in prepared[1:-2] if ": it has `" not in line)
    assert main(train(example, shards, tmp_path / "o", "--dry-run", "--allow-unknown-ids")) == 1
    assert "data.allow_unknown_ids has no effect" in capsys.readouterr().err


def test_prepare_does_not_mix_its_shards_with_others(example, forty, tmp_path, capsys):
    arguments = ["prepare", str(forty), "--model", str(example / "model"), "--out", str(tmp_path / "o")]
    assert (main(arguments), main(arguments)) == (0, 1)
    assert "contains shards" in capsys.readouterr().err


def test_a_bad_record_stops_or_is_left_out_or_is_written_aside(example, forty, tmp_path, capsys):
    bad = tmp_path / "bad.jsonl"
    lines = forty.read_bytes().splitlines(keepends=True)
    bad.write_bytes(b"".join([*lines[:3], b'{"messages": 7}\n', *lines[3:]]))
    arguments = ["prepare", str(bad), "--model", str(example / "model"), "--out"]
    assert main([*arguments, str(tmp_path / "a")]) == 1
    error = capsys.readouterr().err
    assert error.startswith("tracegrad: error: ")
    assert "bad.jsonl:4" in error
    assert error.count("\n") == 1
    assert main([*arguments, str(tmp_path / "b"), "--on-error", "skip"]) == 0
    assert "40 traces in 5 groups" in capsys.readouterr().out
    assert main([*arguments, str(tmp_path / "c"), "--on-error", "quarantine"]) == 0
    assert (tmp_path / "c" / "bad.jsonl.quarantine.raw").read_bytes() == b'{"messages": 7}\n'


def test_a_run_leaves_what_it_says(example, forty, tmp_path, capsys):
    transformers = pytest.importorskip("transformers")
    out = tmp_path / "out"
    assert main(train(example, forty, out)) == 0
    said = capsys.readouterr()
    assert "read     40 traces in 5 groups" in said.out
    assert "level" in said.out
    assert "ope" in said.err
    summary = json.loads((out / "summary.json").read_text())
    assert (summary["traces"], summary["groups"], summary["seed"], summary["steps"]) == (40, 5, 0, 4)
    assert {"tokens", "levels", "alignment_report", "ope"} <= summary.keys()
    assert {"read", "align", "train", "old", "verify", "checkpoint", "report"} <= summary["seconds"].keys()
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [0, 1, 2, 3, 4]
    trained = {"traces": 31, "tokens": sum(row["tokens_trained"] for row in rows[1:3])}
    assert {name: summary["trained"][name] for name in trained} == trained
    assert summary["held_out"] == {"traces": 8, "tokens": summary["terms"] - trained["tokens"]}
    part = summary["trained"]["traces_with_gradient"], summary["trained"]["tokens_with_gradient"]
    line = f"gradient from {part[0]} of 31 traces, {part[1]} of {trained['tokens']} trained tokens, in the first epoch"
    assert line in said.out
    assert f"from</dt><dd>{part[0]} of 31 traces, {part[1]} tokens" in (out / "report.html").read_text()
    assert "<svg" in (out / "report.html").read_text()
    assert rows[1]["trainer_rollout_logprob_diff_mean"] < 1e-4  # trainer and server agree on the recorded logprobs
    model = transformers.AutoModelForCausalLM.from_pretrained(out / "checkpoint")
    assert model.num_parameters() > 0
    assert tg.Tokenizer.from_pretrained(out / "checkpoint").encode("hello").tolist()
    assert tg.config.load(out / "config.toml").train.epochs == 2


def tensors(path):
    """The bytes of each tensor of a file; what else it says may stand in another order."""
    from safetensors.numpy import load_file

    return {name: (array.dtype, array.shape, array.tobytes()) for name, array in load_file(path).items()}


# Ctrl-C comes when the row of the second step has been written.
AFTER_TWO = """
import os, signal, sys
from tracegrad import metrics
from tracegrad.cli import main
log_all = metrics.log_all
def logged(sinks, row):
    log_all(sinks, row)
    if row["step"] == 2:
        os.kill(os.getpid(), signal.SIGINT)
metrics.log_all = logged
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.nightly
def test_ctrl_c_leaves_a_checkpoint_from_which_the_run_ends_bit_for_bit_as_if_it_had_not_come(
    example, forty, tmp_path, capsys
):
    torch = pytest.importorskip("torch")
    threads = str(torch.get_num_threads())  # sums may be cut by it
    more = ["--train.groups_per_step", "1", "--train.epochs", "1"]
    assert main(train(example, forty, tmp_path / "whole", *more)) == 0
    environment = {**os.environ, "PYTHONPATH": str(SOURCE), "OMP_NUM_THREADS": threads}
    command = [sys.executable, "-c", AFTER_TWO, *train(example, forty, tmp_path / "cut", *more)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 130, done.stderr
    assert "Traceback" not in done.stderr
    assert "after step 2 of 4" in done.stdout
    (again,) = re.findall(r"resume +tracegrad (.*)", done.stdout)
    assert main(shlex.split(again)) == 0
    assert "resumed after step 2" in capsys.readouterr().out
    one, other = (tmp_path / name / "checkpoint" for name in ("whole", "cut"))
    files = sorted(file.relative_to(one) for file in one.rglob("*.safetensors"))
    # One run was this process, whose random state is its own; training draws nothing from it here.
    files = [file for file in files if not file.name.startswith("random-")]
    assert len(files) >= 3  # weights, sampled logprobs, the state of the optimizer
    for file in files:
        assert tensors(one / file) == tensors(other / file), file


def test_the_config_is_printed_and_read_back(tmp_path, capsys):
    arguments = ["train", "t.jsonl", "--model", "m", "--out", str(tmp_path), "--print-config", "--objective", "GRPO"]
    assert main([*arguments, "--objective.surrogate.high", "0.3", "--seed", "7", "--train.epochs=3"]) == 0
    said = capsys.readouterr().out
    assert "\n#   S = max(-A r, -A clip(r, 0.8, 1.3)); r = theta/old\n" in said
    (tmp_path / "run.toml").write_text(said)
    told = tg.config.load(tmp_path / "run.toml")
    assert (told.train.seed, told.train.epochs, told.objective.preset) == (7, 3, "GRPO")


def test_a_dry_run_packs_each_step_once(example, forty, tmp_path, capsys, monkeypatch):
    pytest.importorskip("torch")
    from tracegrad.trainer import steps

    packed = []
    real = steps.pack_step
    monkeypatch.setattr(steps, "pack_step", lambda *given, **how: packed.append(given) or real(*given, **how))
    assert main(train(example, forty, tmp_path / "out", "--dry-run", "--json")) == 0
    assert len(packed) == json.loads(capsys.readouterr().out)["would"]["steps_per_epoch"] == 2


def test_a_dry_run_forecasts_any_number_of_ranks(example, forty, tmp_path, capsys):
    pytest.importorskip("torch")
    options = ["--dry-run", "--ranks", "8", "--parallel.mode", "fsdp", "--train.memory_mode", "low"]
    assert main(train(example, forty, tmp_path / "out", *options)) == 0
    said = capsys.readouterr().out
    assert "on the first of 8 ranks" in said
    assert "ranks    8: " in said
    assert "all-gathers of" in said
    assert "reduce-scatters of" in said
    assert main(train(example, forty, tmp_path / "out", *options, "--json")) == 0
    eight = json.loads(capsys.readouterr().out)["would"]["per_rank"]
    assert (eight["ranks"], eight["traffic"]["ranks"]) == (8, 8)
    assert main(train(example, forty, tmp_path / "out", "--dry-run", "--json")) == 0
    one = json.loads(capsys.readouterr().out)["would"]["per_rank"]
    assert (one["ranks"], one["traffic"]) == (1, None)
    # A step of one row is at its peak before its gradient is there: parameters and two moments in float32.
    assert one["state_bytes"] == 12 * one["parameters"]
    assert one["state_bytes"] / 8 < eight["state_bytes"] < one["state_bytes"]
    assert not (tmp_path / "out").exists()
    for wrong in (["--ranks", "8"], ["--dry-run", "--ranks", "0"]):
        assert main(train(example, forty, tmp_path / "out", *wrong)) == 1
        assert "TG-CLI-035" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (["--optimizer.lrr", "1"], "Did you mean optimizer.lr"),
        (["--objective", "GRPPO"], "Did you mean GRPO"),
        (["--objective.surrogate.hihg", "0.3"], "Did you mean objective.surrogate.high"),
        (["--min-ope-ess", "20"], "stop.min_ope_ess is 20"),
        (["--config", "gone.toml"], "gone.toml: cannot be read (No such file"),
        (
            ["--objective", "DAPO_DIRECT", "--train.updates_per_old_logprobs", "4"],
            "train.updates_per_old_logprobs has no effect",
        ),
        (["--pack.tokens_per_row", "30"], "tokens_per_row"),
    ],
)
def test_a_wrong_option_is_one_line_and_exit_1(example, forty, tmp_path, capsys, more, said):
    assert main(train(example, forty, tmp_path / "out", *more)) == 1
    error = capsys.readouterr().err
    assert said in error
    assert error.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "required"),
        (["trian"], "Did you mean train?"),
        (["train", "t.jsonl"], "--model"),
        (["train", "t.jsonl", "--model", "m", "--out", "o", "--epoch", "3"], "Did you mean --epochs?"),
        (["train", "t.jsonl", "--model", "m", "--out", "o", "--optimizer.lr"], "has no value"),
        (["prepare", "t.jsonl", "--model", "m", "--out", "o", "more.jsonl"], "unexpected argument more.jsonl"),
    ],
)
def test_wrong_usage_is_exit_2(capsys, arguments, said):
    with pytest.raises(SystemExit) as done:
        main(arguments)
    assert done.value.code == 2
    assert said in capsys.readouterr().err


def test_what_cannot_be_found_is_one_line(example, forty, tmp_path, capsys):
    model = str(example / "model")
    for traces, directory, said in [
        ("gone.jsonl", model, "gone.jsonl"),
        (str(forty), str(tmp_path / "gone"), "gone"),
        (str(forty), str(tmp_path), "tokenizer.json"),
    ]:
        assert main(["train", traces, "--model", directory, "--out", str(tmp_path / "out")]) == 1
        error = capsys.readouterr().err
        assert said in error
        assert error.count("\n") == 1
        assert not (tmp_path / "out").exists()


def test_a_model_without_weights_is_one_line_after_the_traces_were_read(example, forty, tmp_path, capsys):
    pytest.importorskip("transformers")
    bare = tmp_path / "model"
    bare.mkdir()
    for file in (example / "model").iterdir():
        if file.suffix != ".safetensors":
            (bare / file.name).write_bytes(file.read_bytes())
    assert main(["train", str(forty), "--model", str(bare), "--out", str(tmp_path / "out"), *QUICK]) == 1
    assert "has no model.safetensors" in capsys.readouterr().err
