"""docs/how-to/transformers.md under accelerate's launcher: two processes on a CPU take the steps of one."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")
pytest.importorskip("accelerate")

from ranks_output import told

SCRIPT = Path(__file__).parents[1] / "helpers/accelerated.py"
LAUNCH = ["-m", "accelerate.commands.accelerate_cli", "launch", "--multi_gpu", "--num_processes", "2"]
LAUNCH += ["--num_machines", "1", "--mixed_precision", "no", "--dynamo_backend", "no", "--main_process_port", "0"]


@pytest.mark.nightly
def test_two_processes_that_accelerate_launches_come_to_the_parameters_of_one(tmp_path):
    for words in ([], LAUNCH):
        command = [sys.executable, *words, SCRIPT, tmp_path]
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            check=False,
            timeout=300,
            env={**told(), "ACCELERATE_USE_CPU": "true"},
        )
        assert done.returncode == 0, done.stderr[-4000:]
    one, two = (torch.load(tmp_path / f"{processes}.pt") for processes in (1, 2))
    assert json.loads((tmp_path / "2.json").read_text()) == {"wrapper": "DistributedDataParallel"}
    assert float((one - two).norm() / one.norm()) < 1e-6
    assert not torch.equal(one, torch.load(tmp_path / "start.pt"))
