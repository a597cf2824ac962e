"""What a dry run forecasts for each rank is what ranks hold and say: bytes and calls counted on 1, 2 and 4 of them."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

from ranks_output import told
from tiny import tiny_model
from tracegrad.trainer.memory import Memory
from tracegrad.trainer.resource_estimate import CommunicationEstimate, estimate_communication, groups_of
from traffic_run import RUNS

HERE = Path(__file__).parents[1] / "helpers"


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """What was counted of runs in every mode, started once."""
    out = tmp_path_factory.mktemp("traffic")
    command = [sys.executable, HERE / "traffic_run.py", out]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=600, env=told())
    assert done.returncode == 0, done.stderr[-4000:]
    rows = [json.loads(line) for line in (out / "found.jsonl").read_text().splitlines()]
    return {(row["ranks"], row["mode"], row["memory"], row["adapters"]): row for row in rows}


def total(counted, name):
    sizes = counted.get(name, [])
    return [len(sizes), sum(sizes)]


def is_as_forecast(row):
    said, first, most = row["forecast"], *row["steps"]
    assert min(most["rows"], first["rows"]) > 1
    # Under FSDP shards take the place of the whole parameters; what torch's operations hold within is not counted.
    counted = row["peak"] + (0 if row["mode"] == "fsdp" else row["parameters"])
    assert 0.95 < (said["state_bytes"] + said["row_bytes"]) / counted < 1.1
    assert 1.0 <= said["imbalance"] < 1.3
    if row["ranks"] == 1:
        assert said["traffic"] is None
        return
    assert most["rows"] == first["rows"]  # what is forecast is of one step
    between = said["traffic"]
    assert total(most, "allgather_base") == [between["gathers"], between["gather_bytes"]]
    # Beside the gradient a sum of one number, the loss, goes over ranks; DDP sends positions of the model as well, and
    # sums the whole gradient of the first step by one call, as its buckets are cut after it.
    sums = "reduce_scatter_base" if row["mode"] == "fsdp" else "allreduce"
    loss = [0, 0] if row["mode"] == "fsdp" else [1, 8]
    assert total(most, sums) == [between["sums"] + loss[0], between["sum_bytes"] + loss[1]]
    passes = [each for each in row["measured"] if each["rows"] == most["rows"]]
    each = total(passes[0], "allgather_base")
    assert [2 * number for number in each] == [between["measure_gathers"], between["measure_bytes"]]  # old and ref


@pytest.mark.nightly  # process groups; test_ranks.py has the one of every run
@pytest.mark.parametrize("case", RUNS)
def test_memory_calls_and_bytes_are_as_forecast_in_every_mode_on_1_2_and_4_ranks(found, case):
    is_as_forecast(found[case])


def test_a_step_by_hand():
    # Two layers of 1,968 parameters and, with the embedding tied to the head, 48 * 16 + 16 = 784 in the rest.
    groups = groups_of(tiny_model())
    assert [group.bytes(1, 1) for group in groups] == [1968, 1968, 784]
    given = {"fsdp": True, "rows": 3, "policy_passes": 1, "reference_passes": 0}
    kept = estimate_communication(groups, ranks=2, memory=Memory.of("speed"), **given)
    assert (kept.gathers, kept.gather_bytes) == (3 * 3, 3 * 4 * 4720)
    assert (kept.measure_gathers, kept.measure_bytes) == (3, 4 * 4720)
    assert (kept.sums, kept.sum_bytes) == (3, 4 * 4720)
    assert kept.sent_bytes == (3 + 1 + 1) * 4 * 4720 / 2
    low = estimate_communication(groups, ranks=2, memory=Memory.of("low"), gathered_in=2, **given)
    assert (low.gathers, low.gather_bytes) == (3 * 5, 3 * 2 * (2 * 2 * 1968 + 784))
    assert (low.measure_gathers, low.measure_bytes) == (3 * 2 + 1, 2 * (3 * 2 * 1968 + 784))
    assert (low.sums, low.sum_bytes) == (3 * 3, 3 * 4 * 4720)
    other = estimate_communication(
        groups, ranks=2, memory=Memory.of("low"), **{**given, "policy_passes": 0, "reference_passes": 1}
    )
    assert (other.measure_gathers, other.measure_bytes) == (3 * 3, 3 * 4 * 4720)
    copies = estimate_communication(groups, ranks=4, memory=Memory.of("low"), **{**given, "fsdp": False})
    assert copies == CommunicationEstimate(4, 0, 0, 0, 0, 1, 4 * 4720, "all-reduce")
    assert copies.sent_bytes == 2 * 4 * 4720 * 3 / 4


def test_a_first_dimension_that_the_ranks_do_not_divide_is_padded():
    # On five ranks 48 rows are 50, 16 are 20, 24 are 25, 8 are 10.
    [*_, rest] = groups_of(tiny_model())
    assert rest.bytes(5, 1) == 50 * 16 + 20


def test_adapters_alone_are_summed():
    groups = groups_of(tiny_model(), adapters=2)
    # q 16 -> 16, k and v 16 -> 8, o 16 -> 16, gate and up 16 -> 24, down 24 -> 16, each with rank 2
    by_hand = 2 * (32 + 24 + 24 + 32 + 40 + 40 + 40)
    assert [group.bytes(1, 1, trained_only=True) for group in groups] == [by_hand, by_hand, 0]
    said = estimate_communication(
        groups, fsdp=True, ranks=2, rows=1, policy_passes=0, reference_passes=0, memory=Memory.of("speed")
    )
    assert (said.sums, said.sum_bytes) == (2, 2 * 4 * by_hand)
    assert said.gather_bytes == 4 * (4720 + 2 * by_hand)
