"""One run.toml for the process that trains and for those that play: `--trainer-only` and `--collect i/n`."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from few_probes import few  # noqa: F401
from policy_server import MODEL, PolicyServer
from shop_files import dry, folder, played, rows, written  # noqa: F401
from tracegrad.cli import main
from tracegrad.online.buffer import GroupReader

torch.set_num_threads(1)


def collector(path, share):
    paths = os.pathsep.join([str(MODEL.parent), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, "-m", "tracegrad.cli", "online", path, "--collect", share]
    told = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    return subprocess.Popen(command, env={**os.environ, "PYTHONPATH": paths}, **told)


@pytest.mark.nightly
def test_two_collectors_play_what_the_file_says_and_the_trainer_plays_its_evaluation_alone(folder, capsys):
    (folder / "key").write_text("a secret of the servers")
    with PolicyServer() as server:
        server.key = "a secret of the servers"
        told = {"servers": [server.url], "key_file": "key", "out": "o", "eval_tasks": "shop_clerk.py:fresh"}
        path = written(folder, **told, rewards=["shop_clerk.py:short"], reward_weights=[0.5])
        processes = [collector(path, f"{mine}/2") for mine in range(2)]
        assert main(["online", path, "--trainer-only", "--online.steps", "3"]) == 0
        said = [process.communicate(timeout=120)[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0], said
    assert [row["eval_tasks"] for row in rows(folder / "o") if "eval_reward" in row] == [3, 3]
    groups = {}
    for place, traces in GroupReader(folder / "o" / "played").read_new():
        groups.setdefault(place.file, []).append(int(traces.groups[0]))
    assert sorted(sorted(each) for each in groups.values()) == [[0, 2, 4], [1, 3, 5]]  # steps_ahead 0: 3 steps of 2
    for mine, words in enumerate(said):
        assert f"collector {mine} of 2, from 0, writes rollouts to {folder / 'o' / 'played'}" in words
        assert "rollout  12 trajectories in 3 groups; 0 failed; the run has ended" in words
    for trace in played(folder / "o"):
        assert trace.reward == pytest.approx(0.5 * trace.rewards["short"])


def caught(process, number):
    """Whether a process has a handler for a signal by now."""
    status = Path(f"/proc/{process.pid}/status").read_text()
    return int(re.search(r"SigCgt:\s*([0-9a-f]+)", status)[1], 16) >> (number - 1) & 1


def test_a_collector_that_is_stopped_says_how_to_go_on(folder):
    path = written(folder, out="o")
    process = collector(path, "0/2")
    while not caught(process, signal.SIGTERM):
        assert process.poll() is None
        time.sleep(0.05)
    process.terminate()
    said = process.communicate(timeout=120)[0]
    assert process.returncode == 128 + signal.SIGTERM, said
    assert "stopped on request" in said
    assert f"resume   tracegrad online {path} --collect 0/2\n" in said


@pytest.mark.parametrize(
    ("flags", "told", "why"),
    [
        (["--collect", "2/2"], {}, r"--collect is '2/2'.*Collectors count from 0"),
        (["--collect", "1"], {}, r"--collect is '1'.*write 0/2 and 1/2"),
        (["--collect", "0/1", "--resume"], {}, "--resume has no effect on a collector"),
        (["--collect", "0/1", "--server", "http://a"], {}, "--server has no effect on a collector"),
        (["--collect", "0/1", "--model", "m"], {}, "--model has no effect on a collector"),
        (["--collect", "0/1", "--python", "p"], {}, "--python has no effect on a collector"),
        (["--collect", "0/1", "--dry-run"], {}, "--dry-run has no effect on a collector"),
        (["--collect", "0/1", "--trainer-only"], {}, "--trainer-only has no effect on a collector"),
        (["--collect", "0/1", "--objective", "DAPO"], {}, "--objective has no effect on a collector"),
        (["--collect", "0/1", "--online.steps", "3"], {}, r"--online\.steps has no effect on a collector"),
        (["--collect", "0/1"], {"out": None}, "out is missing"),
        (["--collect", "0/1"], {"tasks": None}, "tasks is missing"),
        (["--collect", "0/1"], {"agent": None}, "agent, environment and rewards are all missing"),
        (
            ["--trainer-only", "--server", "http://a", "--online.weight_sync", "lora"],
            {},
            r"online\.weight_sync is 'lora'",
        ),
    ],
)
def test_what_a_collector_cannot_be_told_is_said_at_once(folder, capsys, flags, told, why):
    assert main(["online", written(folder, **{"out": "o", **told}), *flags]) == 1
    assert re.search(why, capsys.readouterr().err)
    assert not (folder / "o").exists()


def test_a_trainer_that_plays_nothing_needs_neither_tasks_nor_what_plays_them(folder, capsys):
    with PolicyServer() as server:
        told = {"tasks": None, "agent": None, "servers": [server.url], "out": "o"}
        assert dry(capsys, written(folder, **told))[0] == 1
        code, out, err = dry(capsys, written(folder, **told), "--trainer-only")
    assert code == 0, err
    assert "from tasks of remote collectors" in out
