"""kill -9 at any moment, inside a checkpoint's write too: the resumed run is the undisturbed one, bit for bit."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import tracegrad

pytest.importorskip("torch")
pytest.importorskip("transformers")

HERE = Path(__file__).parents[1] / "helpers"


def killed(out: Path, kills: int) -> list[dict]:
    path = os.pathsep.join([str(Path(tracegrad.__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
    told = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path}
    done = subprocess.run(
        [sys.executable, HERE / "killed.py", out, str(kills)], capture_output=True, text=True, check=False, env=told
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads((out / "killed.json").read_text())


@pytest.mark.nightly
def test_killed_runs_come_to_the_same_parameters(tmp_path):
    found = killed(tmp_path, 3)
    assert len(found) == 3
    assert any(each["code"] == -9 for each in found)
    assert all(each["same"] for each in found), found


def killed_at(out: Path, *numbers: int) -> dict:
    """What became of runs that ended at these of their operations on files; all of them without any."""
    path = os.pathsep.join([str(Path(tracegrad.__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
    told = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path}
    command = [sys.executable, HERE / "faults.py", "train", out, *map(str, numbers)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=told)
    assert done.returncode == 0, done.stderr[-4000:]
    found = json.loads((out / "found.json").read_text())
    bad = [each for each in found["found"] if each["code"] != 9 or not each["same"]]
    assert not bad, (bad[:5], done.stderr[-2000:])
    return found


@pytest.mark.nightly
def test_a_run_that_ends_inside_the_write_of_a_checkpoint_is_resumed_bit_for_bit(tmp_path):
    found = killed_at(tmp_path, 40, 75)
    assert len(found["found"]) == 2


@pytest.mark.nightly
def test_a_run_may_end_at_any_operation_on_a_file(tmp_path):
    found = killed_at(tmp_path)
    assert len(found["found"]) == found["operations"] > 50


@pytest.mark.nightly
def test_two_hundred_killed_runs_come_to_the_same_parameters(tmp_path):
    found = killed(tmp_path, 200)
    assert all(each["same"] for each in found), found
    assert sum(each["inside_a_write"] for each in found) > 10
