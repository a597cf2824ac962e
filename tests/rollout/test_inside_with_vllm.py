"""`vllm.LLM` in the trainer's process, behind the type of servers: proven steps, a stale cache found, refusals."""

import json
import os
import subprocess
from pathlib import Path

import pytest

import tracegrad as tg

pytestmark = [pytest.mark.vllm, pytest.mark.nightly]  # an engine of its own


@pytest.fixture(scope="module")
def found(request, example, tmp_path_factory):
    """What the runs in vLLM's interpreter found; it gets this package and what writes frames, and nothing else."""
    zstandard = pytest.importorskip("zstandard")
    python, folder = request.config.getoption("--vllm-python"), tmp_path_factory.mktemp("inside")
    for module in (tg, zstandard):
        package = Path(module.__file__).parent
        (folder / package.name).symlink_to(package, target_is_directory=True)
    told = {**os.environ, "PYTHONPATH": str(folder), "VLLM_CPU_KVCACHE_SPACE": "1", "OMP_WAIT_POLICY": "passive"}
    command = [python, Path(__file__).parents[1] / "helpers" / "inside_run.py", example / "model", folder / "out"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=told, timeout=900, cwd=folder)
    assert done.returncode == 0, done.stderr[-4000:] + done.stdout[-2000:]
    return json.loads((folder / "out" / "found.json").read_text())


@pytest.mark.parametrize(("steps_ahead", "ids"), [(0, "chat"), (1, "chat"), (0, "tokens")])
def test_each_step_is_proven(found, steps_ahead, ids):
    for row in found[f"quiet {steps_ahead} {ids}"]:
        print(
            f"\n{row['weight_check/tokens']} terms, max {row['weight_check/max']:.1e}, paused "
            f"{row['time/sync_pause']:.3f} s"
        )
        assert row["weight_check/tokens"] > 0
        assert row["weight_check/max"] < 1e-4
        assert row["tokens_lost"] == row["trajectories_failed"] == 0


def test_a_cache_that_is_not_cleared_is_found_and_named(found):
    assert "On a new prompt they agree" in found["stale"]


def test_what_does_nothing_on_a_cpu_is_refused_by_its_name(found):
    assert found["sleep"].startswith("sleep is asked of vLLM on cpu")
    assert found["wake"].startswith("wake_up is asked of vLLM on cpu")
    assert "has no address" in found["location"]


def test_requests_that_nobody_waits_for_are_let_go_and_wrong_ones_refused(found):
    assert found["left"] == 0
    assert found["after"] == "length"
    assert found["wrong"][0] == 400
    assert found["other"][0] == 404


def test_engine_arguments_stand_in_the_manifest_and_reach_the_engine(found):
    told = {"enforce_eager": True, "dtype": "float32", "max_model_len": 1024}
    assert {name: found["manifest"][name] for name in told} == told
    assert found["engine"] == [1024, "torch.float32", True]
