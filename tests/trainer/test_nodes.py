"""Machines that share no folder but a bucket: a run at an address, killed ranks that go on, and one that hangs."""

import json
import logging
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")
pytest.importorskip("s3fs")
pytest.importorskip("moto.server")

from nodes import FAULTS
from ranks_output import told

HERE = Path(__file__).parents[1] / "helpers"
pytestmark = pytest.mark.nightly  # process groups that are killed; test_ranks.py has the one of every run


@pytest.fixture(scope="module")
def bucket():
    """The environment in which `s3://runs` is an empty bucket of an S3 API on loopback."""
    from moto.server import ThreadedMotoServer

    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    url = f"http://{host}:{port}"
    import s3fs

    system = s3fs.S3FileSystem(key="a", secret="b", endpoint_url=url, skip_instance_cache=True)
    system.mkdir("runs")
    yield {"AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "b", "AWS_ENDPOINT_URL": url}, system
    server.stop()


@pytest.fixture(scope="module")
def found(bucket, tmp_path_factory):
    """What two machines found, started once for all cases."""
    environment, system = bucket
    out = tmp_path_factory.mktemp("nodes")
    command = [sys.executable, HERE / "nodes.py", out, *FAULTS]
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, timeout=600, env={**told(), **environment}
    )
    assert done.returncode == 0, done.stderr[-4000:]
    system.invalidate_cache()
    return json.loads((out / "nodes.json").read_text()) | {"files": system.find("runs/whole")}


def test_two_machines_leave_whole_checkpoints_metrics_and_terms_of_both_at_the_address(found):
    steps = [0, 1, 2, 3, 4]
    assert [each["step"] for each in found["whole"]] == [4, 4]
    assert found["whole"][0]["rows"] == steps
    assert {each["address"] for each in found["whole"]} == {"s3://runs/whole/checkpoints/step-00000004"}
    files = {name.removeprefix("runs/whole/") for name in found["files"]}
    for step in (3, 4):  # the newest two stay
        here = {name for name in files if name.startswith(f"checkpoints/step-0000000{step}/resume/")}
        names = {name.rpartition("/")[2] for name in here}
        assert {"progress.json", "random-0.safetensors", "random-1.safetensors", "terms-1.safetensors"} <= names
        assert len([name for name in here if "/state/shard-" in name]) == 2
    assert {name.split("/")[1] for name in files if name.startswith("checkpoints/")} == {
        "step-00000003",
        "step-00000004",
    }
    assert {f"terms/step-0000000{step}.r{rank}.safetensors" for step in steps[1:] for rank in (0, 1)} <= files
    assert {"config.toml", "metrics.jsonl"} <= files


def killed(found, case):
    first, again = found[case]["first"], found[case]["again"]
    rank = FAULTS[case][0]
    assert first[rank] == {"code": -9}
    assert "has ended" in first[1 - rank]["said"]
    assert [each["step"] for each in again] == [4, 4]
    assert again[0]["rows"] == [0, 1, 2, 3, 4]
    assert found[case]["same"]


def test_a_rank_that_hangs_is_named_with_where_it_was(found):
    first, second = found["hangs"]["first"]
    assert first["said"].startswith(
        "TracegradError: step 2: rank 1 did not come within train.timeout_s; it was last seen at step 2 (train), "
    )
    assert first["said"].endswith(" s ago. This rank stops with it.")
    assert second == {"code": -9}  # by the test, as torchrun does


@pytest.mark.parametrize("case", ["killed in a step", "killed while sending", "first killed while sending"])
def test_a_rank_killed_anywhere_goes_on_bit_for_bit(found, case):
    killed(found, case)


@pytest.mark.parametrize("name", ["ddp", "adapters"])
def test_so_it_does_under_ddp_and_with_adapters(found, name):
    entry = found[name]
    assert [each["step"] for each in (*entry["whole"], *entry["again"])] == [4, 4, 4, 4]
    assert "has ended" in entry["first"][0]["said"]
    assert entry["same"]


def test_an_error_of_one_rank_is_said_by_all(found):
    first, second = (each["said"] for each in found["raises"]["first"])
    assert second == "ZeroDivisionError: of somebody's own"
    assert first == "TracegradError: rank 1, step 2: ZeroDivisionError: of somebody's own This rank stops with it."
    first, second = (each["said"] for each in found["cannot send"]["first"])
    assert "rank 1, of somebody's own" in first
    assert "This checkpoint is not written" in first
    assert "of somebody's own" in second
    assert all(found[case]["same"] for case in ("raises", "cannot send"))
