"""A run of one's own on two ranks is that of one process, under FSDP2 and DDP, with adapters and without."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

from ranks_output import told

pytestmark = pytest.mark.nightly  # a process group of its own; test_ranks.py has the one of every run
HERE = Path(__file__).parents[1] / "helpers"
TIMES = {"seconds", "tokens_per_s"}
CASES = [(mode, adapters) for mode in ("fsdp", "ddp") for adapters in (0, 2)]


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """What each of two ranks found, and the rows of one process; started once for all cases."""
    out = tmp_path_factory.mktemp("ranks")
    command = [sys.executable, HERE / "ranks_run.py", out]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300, env=told())
    assert done.returncode == 0, done.stderr[-4000:]
    names = ("rank-0", "rank-1", "alone-0", "alone-2")
    return {name: json.loads((out / f"{name}.json").read_text()) for name in names}


@pytest.mark.parametrize(("mode", "adapters"), CASES)
def test_two_ranks_come_to_the_weights_of_one_and_the_first_has_them_whole(found, mode, adapters):
    first, second = (found[rank][f"{mode}, {adapters}"] for rank in ("rank-0", "rank-1"))
    assert first["exact"] == 0  # those of the parameters, or the adapters' alone
    # AdamW takes the sign of small gradients: rounding moves a parameter by up to lr, 3e-3, a step
    assert 0 <= first["apart"] < 2e-3
    assert first["names"] > 20
    assert second["names"] == 0


@pytest.mark.parametrize(("mode", "adapters"), CASES)
def test_each_rank_says_the_numbers_of_the_whole_step(found, mode, adapters):
    alone = found[f"alone-{adapters}"]
    for rank in ("rank-0", "rank-1"):
        for row, wanted in zip(found[rank][f"{mode}, {adapters}"]["rows"], alone, strict=True):
            assert row.keys() == wanted.keys() | {"imbalance"}
            assert 1 <= row["imbalance"] < 1.5
            assert row["traces"] == 24
            assert row["staleness_mean"] == row["staleness_max"] == row["step"]  # versions 4, 5, 6 on terms of 3
            for key in wanted.keys() - TIMES:
                assert row[key] == pytest.approx(wanted[key], rel=2e-3, abs=2e-4, nan_ok=True), key


def test_ranks_go_on_with_what_they_saved(found):
    assert found["rank-0"]["restored"] == {"apart": 0.0, "step": 3}


def test_what_one_rank_must_refuse_no_rank_takes(found):
    first, second = (found[rank]["refused"] for rank in ("rank-0", "rank-1"))
    assert second["said"].startswith("ArgumentError: version is 6, and a term was sampled by version 12")
    assert "another rank could not do its part" in first["said"]
    assert first["step"] == second["step"] == 3
