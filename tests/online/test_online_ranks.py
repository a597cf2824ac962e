"""Two ranks train online: they take the same steps, prove them together, and end together however the run ends."""

import json
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest
from safetensors.torch import load_file

import tracegrad as tg
from online_ranks import CASES
from online_runs import CONFIG
from policy_server import MODEL, PolicyServer
from ranks_output import told

pytestmark = pytest.mark.nightly  # a process group of its own; test_ranks.py has the one of every run
HERE = Path(__file__).parents[1] / "helpers"
MISTAKES = {"deaf": "deaf", "deaf, canary": "deaf", "stale, canary": "stale", "before": "before"}


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """What each of two ranks found, and the folder; started once for all cases."""
    out = tmp_path_factory.mktemp("ranks")
    with ExitStack() as stack:
        urls = [stack.enter_context(PolicyServer(MISTAKES.get(name))).url for name in CASES]
        command = [sys.executable, HERE / "online_ranks.py", out, *urls]
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300, env=told())
    assert done.returncode == 0, done.stderr[-4000:]
    return [json.loads((out / f"rank-{rank}.json").read_text()) for rank in (0, 1)], out


def test_a_quiet_run_is_proven_on_both_and_is_the_run_of_one(found, tmp_path):
    (first, second), out = found
    assert first["quiet"] == second["quiet"]
    assert [row["staleness_max"] for row in first["quiet"]["rows"]] == [0, 1, 1]
    assert all(row["weight_check/tokens"] > 0 and row["weight_check/max"] < 1e-4 for row in first["quiet"]["rows"])
    again = tg.online.replay(
        out / "quiet", MODEL, objective=tg.presets.DAPO_DIRECT, config=CONFIG, out=tmp_path / "again"
    )
    assert [row["loss"] for row in again.rows] == pytest.approx(
        [row["loss"] for row in first["quiet"]["rows"]], rel=1e-3
    )
    [checkpoint] = (out / "quiet" / "checkpoints").iterdir()
    ours, theirs = (load_file(each / "model.safetensors") for each in (checkpoint, again.checkpoint))
    # AdamW takes the sign of small gradients: rounding moves a parameter by up to lr, 2e-3, a step
    assert max(float((ours[name] - theirs[name]).abs().max()) for name in ours) < 2e-3


@pytest.mark.parametrize(
    ("case", "why"),
    [
        ("deaf", "still run the previous version's weights"),
        ("deaf, canary", "still run the previous version's weights"),
        ("stale, canary", "On a new prompt they agree"),
        ("before", "previous step's adapter"),
    ],
)
def test_a_fault_ends_both_ranks_with_the_same_words(found, case, why):
    (first, second), _ = found
    assert first[case]["said"].startswith("SyncFault: step ")
    assert why in first[case]["said"]
    assert first[case]["said"] == second[case]["said"]


def test_tasks_that_end_end_both(found):
    (first, second), _ = found
    assert first["tasks"] == second["tasks"]
    assert (first["tasks"]["stopped"], first["tasks"]["steps"]) == ("tasks", 2)


def test_what_ends_the_first_alone_ends_the_other_by_its_words(found):
    (first, second), _ = found
    assert "in a row have failed" in first["gone"]["said"]
    assert "the world is gone" in second["gone"]["said"]
    assert "This rank stops with it" in second["gone"]["said"]
