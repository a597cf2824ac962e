"""Where the tests of this folder run: on a CUDA device, or with --rehearse on the CPU by the same code.

python -m pytest -m gpu tests/gpu               # on a CUDA device; an error where there is none
python -m pytest -m gpu tests/gpu --rehearse    # on the CPU; Triton's kernels need TRITON_INTERPRET=1 beside it
"""

import sys
from pathlib import Path

import pytest
import torch

TESTS = Path(__file__).parent.parent
for folder in (TESTS / "helpers", TESTS.parent / "benches" / "gpu"):
    sys.path.insert(0, str(folder))


def pytest_addoption(parser):
    parser.addoption("--rehearse", action="store_true", help="run the GPU tests on the CPU, by the same code")


@pytest.fixture(scope="session")
def rehearsal(request):
    """Whether the CPU stands for the device."""
    return bool(request.config.getoption("--rehearse", False))


@pytest.fixture(scope="session")
def device(rehearsal):
    """The device under test."""
    if rehearsal:
        return torch.device("cpu")
    assert torch.cuda.is_available(), "There is no CUDA device here. --rehearse runs these tests on the CPU."
    return torch.device("cuda:0")


@pytest.fixture(autouse=True)
def attention(rehearsal):
    """On a device flex_attention that is not fused is an error; on a CPU it is compiled without kernels."""
    from rehearsal import flex_attention_on_the_cpu, fused_attention_alone

    with flex_attention_on_the_cpu() if rehearsal else fused_attention_alone():
        yield
