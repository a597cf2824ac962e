"""benches/gpu at tiny sizes on a CPU: every row runs, beside the peers that run here, and they compute the same."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import tracegrad

pytest.importorskip("torch")
pytest.importorskip("trl")
pytest.importorskip("peft")

BENCHES = Path(__file__).parent.parent / "benches" / "gpu"
CUDA_ALONE = {"TRL tries, varlen", "verl Triton", "CCE"}
OFTEN_ABSENT = {"Liger GRPO", "Liger NLL and entropy", "CCE", "prime-rl", "verl Triton"}


def bench(out, *options, script="run.py"):
    """Runs a command of benches/gpu in a process of its own."""
    path = os.pathsep.join([str(Path(tracegrad.__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
    told = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path}
    run = [sys.executable, BENCHES / script, "--out", out, *options]
    return subprocess.run(run, capture_output=True, text=True, check=False, timeout=900, env=told)


@pytest.fixture(scope="module")
def records(tmp_path_factory):
    out = tmp_path_factory.mktemp("gpu")
    done = bench(out, "--tiny")
    assert done.returncode == 0, done.stderr[-4000:]
    assert "what | peer | peer_rate | ours | ratio" in done.stdout
    return json.loads((out / "gpu_cpu-tiny.json").read_text())


def test_every_row_ran_and_has_its_figures(records):
    rows = {"head", "head-narrow", "head-peaked", "head-frozen", "head-memory", "small", "full"}
    rows |= {"trainer", "async", "shared", "longest", "mask"}
    assert {record["row"] for record in records} == rows
    for record in records:
        assert record["ours"] > 0, record
        assert {"what", "peer", "peer_rate", "ratio", "limit", "must", "unit", "device", "command"} <= record.keys()
        assert record["ratio"] > 0 if record["row"] not in ("small", "full") else record["peer"] is None, record


def test_an_arm_is_left_out_for_its_device_or_because_it_is_not_installed_and_says_so(records):
    for record in records:
        for name, arm in record["arms"].items():
            if "skipped" in arm:
                assert name in CUDA_ALONE | OFTEN_ABSENT, (record["what"], name, arm)
                assert name in CUDA_ALONE or "ModuleNotFoundError" in arm["skipped"], arm
                assert "NotImplementedError" not in arm["skipped"], arm  # an option that the peer does not have


def test_the_arms_take_the_same_gradient(records):
    [tries] = [record for record in records if record["row"] == "async"]
    assert tries["gradient_gap"] < 1e-5
    [trainers] = [record for record in records if record["row"] == "trainer"]
    ours, theirs = (trainers["arms"][name]["grad_norm"] for name in ("tracegrad", "TRL GRPOTrainer"))
    assert ours == pytest.approx(theirs, rel=1e-5)
    [heads, *_] = [record["arms"] for record in records if record["row"] == "head"]
    if "ms" in (scaled := heads["Liger NLL and entropy"]):
        assert scaled["implementation"] == "_FusedLinearPPOFallbackFunction"  # its kernels are for Hopper
    liger = "Liger GRPO"  # takes one advantage for eight rows
    gaps = [arm["d_weight_error"] for name, arm in heads.items() if "d_weight_error" in arm and name != liger]
    assert len(gaps) >= 5
    assert max(gaps) < 0.05  # bfloat16 beside float32


def test_ligers_head_runs_without_cutlass_where_it_would_take_its_kernels_for_hopper(monkeypatch):
    liger_module = pytest.importorskip("liger_kernel.ops.fused_linear_scaled_cross_entropy")
    torch = pytest.importorskip("torch")
    monkeypatch.syspath_prepend(str(BENCHES))
    from arms import Problem, full_logits, liger_implementation, liger_scaled

    # What Liger does on a device of capability 9.0; without nvidia-cutlass-dsl it raises ImportError.
    monkeypatch.setattr(liger_module, "_resolve_implementation", lambda device: liger_module._load_sm90_function())
    problem = Problem.of(16, 8, 50, "cpu", False)
    assert liger_implementation(problem) == "_FusedLinearPPOFallbackFunction"
    torch.testing.assert_close(liger_scaled(problem), full_logits(problem), rtol=0.01, atol=0.01)


ROWS_OF_MODELS = ["small", "full", "trainer", "async", "shared", "longest"]


@pytest.mark.nightly  # test_gpu_rehearsal.py takes the same roads in every run of the tests
def test_models_run_by_the_roads_of_a_gpu_in_bfloat16_under_flex_attention(tmp_path):
    done = bench(tmp_path, "--rehearse", "--rows", *ROWS_OF_MODELS)
    assert done.returncode == 0, done.stderr[-4000:]
    records = json.loads((tmp_path / "gpu_cpu-rehearsal.json").read_text())
    assert [record["row"] for record in records] == ROWS_OF_MODELS
    for record in records:
        assert record["ours"] > 0, record


def test_an_arm_of_ours_that_fails_is_an_error_and_stops_no_other(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHES))
    from clock import Clock
    from run import failed

    def broken():
        raise KeyError("what no list of exceptions knew")

    found = Clock("cpu", 0, 2).compare({"tracegrad": broken, "peer": lambda: None, "tracegrad, other": lambda: None})
    assert found["tracegrad"]["skipped"] == "KeyError: 'what no list of exceptions knew'"
    assert "test_benches_gpu.py" in found["tracegrad"]["raised_at"]
    assert found["peer"]["runs"] == found["tracegrad, other"]["runs"] == 2
    assert failed([{"what": "row", "arms": found}]) == ["row: tracegrad"]
    assert failed([{"what": "row", "skipped": "why"}]) == ["row"]
    assert failed([{"what": "row", "arms": {"TRL": {"skipped": "not installed"}}}]) == []


def test_no_round_is_started_when_the_time_is_over(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHES))
    from clock import Clock

    clock = Clock("cpu", 0, 5)
    clock.until = 0.0
    assert clock.compare({"a": lambda: None})["a"]["runs"] == 1


def test_a_row_measured_again_takes_the_place_of_the_one_before(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHES))
    from run import write

    write([{"row": "a", "ours": 1}, {"row": "b", "ours": 1}], tmp_path / "x.json")
    write([{"row": "a", "ours": 2}], tmp_path / "x.json")
    assert json.loads((tmp_path / "x.json").read_text()) == [{"row": "b", "ours": 1}, {"row": "a", "ours": 2}]
