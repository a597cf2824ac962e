"""Each fault between a run and a real vLLM is named; benches/online/faults.py runs all of them in both precisions."""

import pytest

from fault_proxy import FAULTS
from fault_runs import played

pytestmark = pytest.mark.vllm


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_between_a_run_and_vllm_is_named(served, tmp_path, fault):
    seen = played(served, fault, tmp_path)
    print(f"\n{seen.said}")
    assert seen.named


def test_without_a_fault_the_run_ends_by_itself(served, tmp_path):
    seen = played(served, None, tmp_path, steps=2)
    assert seen.steps == 2, seen.said
