"""`tracegrad online run.toml` against a policy behind HTTP: all that a file and the command line can tell arrives."""

import json
import os
import re
import stat
from dataclasses import asdict

import pytest
import torch

import tracegrad as tg
from few_probes import few  # noqa: F401
from policy_server import MODEL, PolicyServer
from shop_files import PLAY, dry, folder, played, rows, server, written  # noqa: F401
from tracegrad import config
from tracegrad.cli import main, run_file
from tracegrad.online import OnlineConfig, RolloutConfig

torch.set_num_threads(1)


def test_a_run_is_what_its_file_says(folder, server, capsys, monkeypatch):
    monkeypatch.chdir(folder.parent)
    told = {"environment": "shop_clerk.py:Talk", "agent": None, "eval_tasks": "shop_clerk.py:fresh", "out": "done"}
    told |= {
        "servers": [server.url],
        "rewards": ["shop_clerk.py:short", "shop_clerk.py:one"],
        "reward_weights": [0.5, 2.0],
    }
    assert main(["online", written(folder, **told)]) == 0
    out = folder / "done"  # beside the file, wherever it is called
    found = rows(out)
    assert [row["step"] for row in found if "loss" in row] == [1, 2]
    assert [row["eval_tasks"] for row in found if "eval_reward" in row] == [3, 3]
    assert all(row["weight_check/max"] < 1e-4 for row in found if "loss" in row)
    kept = json.loads((out / "run.json").read_text())
    assert kept["online"] == asdict(OnlineConfig(steps=2, steps_ahead=0, max_resample_factor=1))
    assert kept["rollout"] == asdict(RolloutConfig(group_size=4, max_tokens=12, max_turns=1))
    assert kept["objective"] == repr(tg.presets.DAPO_DIRECT)
    assert config.load(out / "config.toml").optimizer.lr == 2e-3
    for trace in played(out):
        assert trace.reward == pytest.approx(0.5 * trace.rewards["short"] + 2.0)
        assert trace.rewards["own"] == trace.rewards["short"]
    said = capsys.readouterr().out
    assert "trained  2 steps" in said
    assert "checkpoint" in said


def test_a_run_goes_on_with_what_it_was_told(folder, server, capsys):
    path = written(folder, servers=[server.url], out="done")
    assert main(["online", path, "--online.steps", "1", "--optimizer.lr", "1e-3", "--rollout.group_size", "3"]) == 0
    assert main(["online", path, "--online.steps", "1"]) == 1
    err = capsys.readouterr().err
    assert "already contains a run. Pass --resume to continue it, or another --out." in err
    (folder / "run.toml").write_text(
        (folder / "run.toml").read_text().replace("group_size = 4\n", "").replace("lr = 2e-3", "")
    )
    assert main(["online", path, "--resume"]) == 0
    assert [row["step"] for row in rows(folder / "done")] == [1, 2]
    assert {row["lr"] for row in rows(folder / "done")} == {1e-3}
    assert len(played(folder / "done")) == 2 * 2 * 3


def test_a_dry_run_says_that_vllm_would_run_in_this_process(folder, capsys):
    code, out, _ = dry(capsys, written(folder, PLAY, servers=["in-process"], out="o"))
    assert code == 0
    assert "servers  vLLM runs in this process" in out


def test_a_dry_run_prints_a_file_that_says_the_same_and_changes_nothing(folder, server, capsys):
    sections = PLAY + "[engine]\nmax_model_len = 99\nhf_overrides = {a = 1, b = [1, 2]}\n"
    path = written(
        folder, sections, servers=["in-process"], out="done", reward_weights=[1.0], rewards="shop_clerk.py:short"
    )
    code, out, _ = dry(capsys, path, "--train.seed", "3", "--engine.max_num_seqs", "7")
    assert code == 0
    toml, _, rest = out.partition("dry run ")
    assert "2 optimizer steps of 2 groups of 4 trajectories, from 8 tasks" in rest
    assert not (folder / "done").exists()
    (folder / "again.toml").write_text("\n".join(line for line in toml.splitlines() if not line.startswith("#")))
    ours, theirs = (
        run_file.read(folder / "run.toml", {}, [("train.seed", "3"), ("engine.max_num_seqs", "7")], False),
        run_file.read(folder / "again.toml", {}, [], False),
    )
    assert (ours.inputs, ours.config, ours.online, ours.engine) == (
        theirs.inputs,
        theirs.config,
        theirs.online,
        theirs.engine,
    )
    assert ours.engine == {"max_model_len": 99, "hf_overrides": {"a": 1, "b": [1, 2]}, "max_num_seqs": 7}


def test_a_server_of_the_command_line_goes_over_the_one_that_the_file_would_start(folder, server, capsys):
    path = written(folder, PLAY + "[engine]\nmax_model_len = 99\n", python="/nowhere/python", out="done")
    before = server.calls, server.pushes
    code, out, _ = dry(capsys, path, "--server", server.url)
    assert (code, "with model 'clerk'" in out, "max_model_len" in out) == (0, True, False)
    assert (server.calls, server.pushes) == before
    assert main(["online", path, "--server", server.url, "--online.steps", "1"]) == 0
    capsys.readouterr()
    for more in ({"python": "python3"}, {}):  # named in the file itself both are refused, planned or run
        path = written(folder, PLAY + ("" if more else "[engine]\nseed = 1\n"), servers=[server.url], out="o", **more)
        for told in ([path, "--dry-run"], [path]):
            assert main(["online", *told]) == 1
            idle = "--python" if more else "engine.seed"
            assert f"{idle} has no effect" in capsys.readouterr().err
    code, _, err = dry(capsys, path, "--server", server.url, "--engine.seed", "2")
    assert (code, "engine.seed has no effect" in err) == (1, True)


def test_the_command_line_goes_over_the_file_and_its_paths_lie_where_it_is_called(folder, server, capsys, monkeypatch):
    monkeypatch.chdir(folder.parent)
    wrong = {"model": "nowhere", "tasks": "nowhere.jsonl", "servers": ["http://127.0.0.1:9"], "out": "no"}
    path = written(folder, **wrong)
    right = ["--model", os.path.relpath(MODEL), "--tasks", "mine/tasks.jsonl", "--server", server.url]
    right += ["--out", "here", "--objective", "DR_GRPO"]
    code, out, err = dry(capsys, path, *right)
    assert code == 0, err
    assert "from 2 tasks" in out
    assert 'preset = "DR_GRPO"' in out
    assert f'out = "{folder.parent / "here"}"' in out
    for left_out in ("--model", "--tasks", "--server"):
        at = right.index(left_out)
        assert dry(capsys, path, *right[:at], *right[at + 2 :])[0] == 1
    quick = ["--online.steps", "1", "--rollout.group_size", "2", "--train.groups_per_step", "1"]
    assert main(["online", path, *right, *quick]) == 0
    assert (folder.parent / "here" / "steps.jsonl").exists()
    assert "DR_GRPO" in (folder.parent / "here" / "config.toml").read_text()


def test_a_run_begins_with_a_recipe_or_a_peers_config_and_what_is_told_wins_and_is_said(folder, server, capsys):
    path = written(folder, PLAY.partition("[advantage]")[0], servers=[server.url], out="o")
    code, out, err = dry(capsys, path, "--recipe", "GSPO", "--advantage.ddof", "0")
    assert code == 0, err
    assert "# recipe   GSPO: objective = GSPO, advantage.baseline = group_mean, advantage.scale = std" in out
    assert "# override these options replace the recipe's: advantage.ddof = 0 (not 1)" in out
    assert all(line in out.split("\n") for line in ('preset = "GSPO"', 'scale = "std"', "ddof = 0", "lr = 0.002"))
    (folder / "theirs.json").write_text('{"loss_type": "dr_grpo", "num_train_epochs": 2, "learning_rate": 1e-4}')
    code, out, err = dry(capsys, path, "--from-config", f"trl:{folder / 'theirs.json'}")
    assert code == 0, err
    assert "ignored, because only training from a file uses it: train.epochs = 2" in out
    assert "# override these options replace the recipe's: optimizer.lr = 0.002 (not 0.0001)" in out
    assert dry(capsys, path, "--from-config", f"trl:{folder / 'theirs.json'}", "--recipe", "GSPO")[0] == 1
    quick = ["--online.steps", "1", "--rollout.group_size", "2", "--train.groups_per_step", "1", "--recipe", "DR_GRPO"]
    assert main(["online", path, *quick]) == 0
    assert 'preset = "DR_GRPO"' in (folder / "o" / "config.toml").read_text()


def test_a_server_is_started_by_the_interpreter_and_with_the_arguments_that_the_file_names(folder, capsys):
    """One that only writes down how it was called."""
    fake = folder / "fake"
    fake.write_text(f'#!/bin/sh\necho "$@" >> {folder}/called\nexit 3\n')
    fake.chmod(fake.stat().st_mode | stat.S_IXUSR)
    path = written(folder, PLAY + "[engine]\nmax_model_len = 99\n", python="./fake", out="o")
    assert main(["online", path, "--engine.max_num_seqs", "7"]) == 1
    assert "ended with status 3. Its last output" in capsys.readouterr().err
    called = (folder / "called").read_text()
    assert "--max-model-len=99" in called
    assert "--max-num-seqs=7" in called
    assert dry(capsys, path)[0] == 1
    other = folder.parent / "other"
    other.write_text(f"#!/bin/sh\ntouch {folder}/other-called\nexit 0\n")
    other.chmod(0o755)
    code, out, _ = dry(capsys, path, "--python", str(other))
    assert code == 0
    assert f"vLLM is started by {other}" in out
    assert (folder / "other-called").exists()


def test_a_key_is_read_from_its_file(folder, capsys):
    with PolicyServer() as server:
        server.key = "a secret of the servers"
        told = {"servers": [server.url], "out": "o"}
        assert dry(capsys, written(folder, **told))[0] == 1
        (folder / "key").write_text(server.key + "\n")
        assert dry(capsys, written(folder, **told, key_file="key"))[0] == 0
        quick = ["--online.steps", "1", "--rollout.group_size", "2", "--train.groups_per_step", "1"]
        assert main(["online", written(folder, **told, key_file="key"), *quick]) == 0
    assert "secret" not in (folder / "o" / "run.json").read_text()


@pytest.mark.parametrize(
    ("told", "first"),
    [
        ({"agent": "shop_clerk.py:Talk"}, {"reward"}),
        ({"agent": None, "environment": "shop_clerk.py:Theirs"}, {"Theirs"}),
        ({"agent": None, "rewards": "shop_clerk.py:both"}, {"short", "one"}),
        ({"agent": None, "rewards": ["shop_clerk.py:short"], "tools": "shop_clerk.py:shop"}, {"short"}),
        ({"agent": None, "rewards": "shop_clerk.py:one", "tools": ["shop_clerk.py:price"]}, {"one"}),
    ],
)
@pytest.mark.first_cases(1)
def test_every_way_to_play_can_be_named(folder, server, told, first):
    path = written(folder, servers=[server.url], out="o", **told)
    quick = ["--online.steps", "1", "--rollout.group_size", "2", "--train.groups_per_step", "1"]
    quick += ["--data.reward", "Theirs"] if first == {"Theirs"} else []
    assert main(["online", path, *quick]) == 0
    trace = played(folder / "o")[0]
    assert (set(trace.rewards) or {"reward"}) == first
    assert bool(trace.tools) == ("tools" in told or "Theirs" in str(told))


@pytest.mark.nightly
def test_tasks_that_are_iterated_end_the_run_or_say_where_they_broke(folder, server, capsys):
    quick = ["--rollout.group_size", "2", "--train.groups_per_step", "1", "--online.steps", "3"]
    told = {"servers": [server.url], "agent": "shop_clerk.py:agent"}
    assert main(["online", written(folder, **told, tasks="shop_clerk.py:breaking", out="a"), *quick]) == 1
    assert re.search(r"RuntimeError: no more today \(.*in breaking\)", capsys.readouterr().err)
    assert main(["online", written(folder, **told, tasks="shop_clerk.py:drawn", out="b"), *quick]) == 0


def test_the_example_of_a_run_file_can_be_run(server, capsys, tmp_path):
    path = MODEL.parent.parent / "online" / "run.toml"
    code, out, err = dry(capsys, str(path), "--server", server.url, "--out", str(tmp_path))
    assert code == 0, err
    assert "evaluation on 64 tasks" in out
