"""Runs of the online loop that are killed: no group is torn, lost or played twice, and the end is that of a replay."""

import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import tracegrad as tg
from policy_server import MODEL, PolicyServer
from test_online import CONFIG, PLAY, assert_same
from tracegrad.online.frames import Follower
from tracegrad.online.ledger import Ledger

torch.set_num_threads(1)
STEPS = 6


def begun(server, out, *more):
    command = [sys.executable, str(Path(__file__).with_name("online_run.py")), server.url, str(out), str(STEPS), *more]
    return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)


def killed_and_ended(server, out, seed):
    """A run that is killed at some moment after its first step was chosen, and goes on to its end."""
    rng = np.random.default_rng(seed)
    process = begun(server, out)
    deadline = time.monotonic() + 120
    while not (out / "steps.jsonl").exists() and time.monotonic() < deadline and process.poll() is None:
        time.sleep(0.02)
    time.sleep(float(rng.uniform(0, 4)))
    process.kill()
    process.communicate()
    again = begun(server, out, "resume")
    _, said = again.communicate(timeout=300)
    assert again.returncode == 0, said.decode()


def check(out, tmp_path):
    """What must hold of the folder of a run, however often it was killed."""
    found = Follower(out / "played").look()
    numbers = [traces.groups[0] for _, traces in found]
    assert len(set(numbers)) == len(numbers)
    assert all(len(traces) == PLAY["samples"] for _, traces in found)
    steps = Ledger(out).steps
    assert [step.step for step in steps] == list(range(STEPS))
    taken = [place for step in steps for place in step.groups]
    assert len(set(taken)) == len(taken)
    assert set(taken) <= {place for place, _ in found}
    again = tg.online.replay(
        out, MODEL, objective=tg.presets.DAPO_DIRECT, config=CONFIG, out=tmp_path / "again", say=lambda _: None
    )
    assert_same(load_file(again.checkpoint / "model.safetensors"), load_file(out / "checkpoint" / "model.safetensors"))


def test_a_run_that_is_killed_goes_on_to_the_parameters_of_its_replay(tmp_path):
    with PolicyServer() as server:
        killed_and_ended(server, tmp_path / "run", 0)
    check(tmp_path / "run", tmp_path)


@pytest.mark.nightly
@pytest.mark.parametrize("seed", range(1, 51))
def test_runs_killed_at_any_moment(tmp_path, seed):
    with PolicyServer() as server:
        killed_and_ended(server, tmp_path / "run", seed)
    check(tmp_path / "run", tmp_path)
