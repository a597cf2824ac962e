"""kill -9 at any moment, inside a checkpoint's write too: the resumed run is the undisturbed one, bit for bit."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import tracegrad

pytest.importorskip("torch")
pytest.importorskip("transformers")

HERE = Path(__file__).parent


def killed(out: Path, kills: int) -> list[dict]:
    path = os.pathsep.join([str(Path(tracegrad.__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
    told = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path}
    done = subprocess.run(
        [sys.executable, HERE / "killed.py", out, str(kills)], capture_output=True, text=True, check=False, env=told
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads((out / "killed.json").read_text())


def test_five_killed_runs_come_to_the_same_parameters(tmp_path):
    found = killed(tmp_path, 5)
    assert len(found) == 5
    assert any(each["code"] == -9 for each in found)
    assert all(each["same"] for each in found), found


@pytest.mark.nightly
def test_two_hundred_killed_runs_come_to_the_same_parameters(tmp_path):
    found = killed(tmp_path, 200)
    assert all(each["same"] for each in found), found
    assert sum(each["inside_a_write"] for each in found) > 10
