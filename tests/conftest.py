"""Options of the suite and the folder of the example on the path."""

import sys
from pathlib import Path

import pytest
from hypothesis import settings

# A clone is judged by the same drawn cases each time; `make nightly` draws new ones.
settings.register_profile("pinned", derandomize=True, deadline=None)
settings.register_profile("drawn", deadline=None)
settings.load_profile("pinned")

sys.path.insert(0, str(Path(__file__).parent.parent / "examples" / "quickstart"))


def pytest_addoption(parser):
    parser.addoption("--vllm-python", help="interpreter of an environment that holds vLLM")
    parser.addoption("--strings", type=int, default=20_000, help="adversarial strings for each tokenizer")


@pytest.fixture(scope="session")
def example():
    return Path(__file__).parent.parent / "examples" / "quickstart"
