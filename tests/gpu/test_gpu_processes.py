"""Several processes and the collectives' code on the device: two ranks over gloo that share it, one rank over NCCL.

`processes.py` beside this file is what each process runs. In the rehearsal both are gloo on the CPU.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import tracegrad

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

pytestmark = pytest.mark.gpu
SCRIPT = Path(__file__).parent / "processes.py"


def found_by(out, device, backend, ranks, mode):
    """What rank 0 wrote: distances of gradient and parameters from one process alone, and where the model was."""
    tests, root = SCRIPT.parents[1], SCRIPT.parents[2]
    folders = [Path(tracegrad.__file__).parents[1], tests / "helpers", root / "benches" / "gpu"]
    path = os.pathsep.join([*map(str, folders), os.environ.get("PYTHONPATH", "")])
    run = [sys.executable, SCRIPT, out, device.type, backend, str(ranks), mode]
    told = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path}
    done = subprocess.run(run, capture_output=True, text=True, check=False, timeout=300, env=told)
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads((out / "found.json").read_text())


def test_two_ranks_on_one_device_take_the_step_of_one_process(device, tmp_path):
    found = found_by(tmp_path, device, "gloo", 2, "ddp")
    assert found["device"].startswith(device.type)
    assert found["terms"] > 50
    assert found["gradient_apart"] < 1e-4
    assert found["parameters_apart"] < 1e-4
    assert found["norms"] == pytest.approx(found["norms_alone"], rel=1e-4)


@pytest.mark.parametrize("mode", ["ddp", "fsdp"])
def test_one_rank_over_nccl_takes_the_step_of_one_process(device, tmp_path, mode):
    """Wrappers, hooks and collectives run; with one rank there is nothing to add up."""
    backend = "nccl" if device.type == "cuda" else "gloo"
    found = found_by(tmp_path, device, backend, 1, mode)
    assert found["gradient_apart"] < 1e-4
    assert found["parameters_apart"] < 1e-4
