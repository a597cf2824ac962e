"""Memory of training from shards follows the steps ahead and one shard's pages, not the data."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

HERE = Path(__file__).parents[1] / "helpers"
MEGA = 1_000_000

pytestmark = pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="Linux alone counts a peak anew")


def grown(folder, shards, what):
    told = [sys.executable, str(HERE / "shards_memory.py"), str(folder), str(shards), what]
    done = subprocess.run(told, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.nightly
def test_packing_every_step_takes_the_memory_of_one_shard_and_of_a_step(tmp_path):
    found = grown(tmp_path, 3, "pack")
    assert found["bytes"] > 105 * MEGA
    assert found["steps"] == 18
    assert found["anonymous"] < 45 * MEGA
    assert found["peak"] < 85 * MEGA  # the pages of one shard of 37 MB among them


@pytest.mark.nightly
def test_a_run_over_a_twentieth_of_ten_gigabytes_takes_less_than_a_twentieth_of_two(tmp_path):
    found = grown(tmp_path, 14, "train")
    assert found["bytes"] > 512 * MEGA
    assert found["steps"] == 168
    assert found["peak"] < 100 * MEGA


@pytest.mark.nightly
def test_what_is_joined_in_memory_is_seen_to_grow(tmp_path):
    found = grown(tmp_path, 4, "join")
    assert found["anonymous"] > 140 * MEGA
