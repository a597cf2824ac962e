"""`torchrun --nnodes 2` in two network namespaces with a bucket between: a killed rank goes on by --max-restarts."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import tracegrad
import tracegrad as tg

pytest.importorskip("torch")
pytest.importorskip("transformers")
pytest.importorskip("s3fs")
pytest.importorskip("moto.server")

HERE = Path(__file__).parents[1] / "helpers"
FLAGS = [
    "--train.groups_per_step",
    "1",
    "--pack.tokens_per_row",
    "1024",
    "--data.holdout",
    "0",
    "--optimizer.lr",
    "2e-4",
]
FLAGS += ["--checkpoint.every_steps", "1", "--parallel.mode", "fsdp", "--train.timeout_s", "120", "--resume"]


def namespaces() -> bool:
    """Whether a user may make network namespaces here."""
    tools = shutil.which("unshare") and shutil.which("ip")
    return bool(tools) and not subprocess.run(["unshare", "-Urnm", "true"], check=False, capture_output=True).returncode


@pytest.mark.nightly
@pytest.mark.skipif(not namespaces(), reason="no network namespaces without root here")
def test_a_killed_rank_of_two_nodes_goes_on_by_max_restarts_to_the_same_parameters(example, tmp_path):
    tg.write(tg.read(example / "traces.jsonl.zst", limit=32), tmp_path / "runs.jsonl")
    path = os.pathsep.join([str(Path(tracegrad.__file__).parents[1]), str(HERE)])
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "PYTHON": sys.executable}
    environment |= {"AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "b"}
    command = ["unshare", "-Urnm", "bash", HERE / "two_nodes.sh", tmp_path, example / "model", *FLAGS]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=900, env=environment)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    found = json.loads((tmp_path / "found.json").read_text())
    assert found["steps"] == [[0, 1, 2, 3, 4], [0, 1, 2, 3, 4]]
    assert found["same"]
    assert found["killed"] == 1
    assert found["folders"] == {"a": 0, "b": 1}  # what the killed process worked in is left, all else is removed
