"""tests/gpu on the CPU, by the same code, so that the first minutes on a device are not spent on our own mistakes."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

import tracegrad

pytest.importorskip("torch")
pytest.importorskip("transformers")
pytest.importorskip("triton")

GPU = Path(__file__).parents[1] / "gpu"
TELLING = [
    "test_gpu_update.py::test_nothing_waits_for_the_device_between_the_batches_of_a_step",
    "test_gpu_compiled.py::test_the_compiled_passes_equal_the_torch_reference[bf16]",
]


def rehearse(*what, **environment):
    """Runs tests of tests/gpu in a process of their own; how many passed."""
    path = os.pathsep.join([str(Path(tracegrad.__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
    told = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path, **environment}
    run = [sys.executable, "-m", "pytest", "-m", "gpu", "-p", "no:cacheprovider", "--rehearse", *what]
    done = subprocess.run(run, cwd=GPU, capture_output=True, text=True, check=False, env=told)
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
    last = done.stdout.strip().splitlines()[-1]
    assert "skipped" not in last, last
    return int(last.split(" passed")[0].split()[-1])


@pytest.mark.nightly
def test_the_kernels_are_right_under_tritons_interpreter():
    """Triton decides at import whether it interprets, so they run in a process of their own."""
    assert rehearse("test_gpu_kernels.py", TRITON_INTERPRET="1") == 34


@pytest.mark.nightly
def test_the_telling_ones_pass():
    assert rehearse(*TELLING) == len(TELLING)


@pytest.mark.nightly
def test_all_of_them_pass():
    assert rehearse("--ignore", "test_gpu_kernels.py") >= 35


@pytest.mark.nightly
def test_without_a_device_they_fail_rather_than_skip():
    torch = pytest.importorskip("torch")
    if torch.cuda.is_available():
        pytest.skip("there is a device here")
    run = [sys.executable, "-m", "pytest", "-m", "gpu", "-p", "no:cacheprovider", f"{GPU}/test_gpu_compiled.py"]
    told = {**os.environ, "PYTHONPATH": str(Path(tracegrad.__file__).parents[1])}
    done = subprocess.run(run, capture_output=True, text=True, check=False, env=told)
    assert done.returncode == 1
    assert "There is no CUDA device here" in done.stdout
