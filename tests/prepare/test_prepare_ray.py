"""Parts through Ray Data: the same bytes as without Ray, on one node and on two, and after an actor was killed.

Nightly: a local cluster needs about 20 s to start. Ray is not in the test extra, because it needs 200 MB of disk.
"""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

import tracegrad as tg
from doc_blocks import blocks
from folder_bytes import contents
from tracegrad import prepare
from tracegrad.config import Data, FieldMap
from tracegrad.errors import ArgumentError, FormatError, TracegradError
from tracegrad.prepare import ray_backend
from tracegrad.prepare.part import Job
from tracegrad.storage import manifest

HOUSE = str(Path(tg.__file__).parents[1])


@pytest.fixture
def ray(monkeypatch):
    found = pytest.importorskip("ray", reason="ray is not installed: pip install 'tracegrad[ray]'")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([HOUSE, *filter(None, [os.environ.get("PYTHONPATH")])]))
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    yield found
    found.shutdown()


@pytest.fixture
def make(example, tmp_path):
    path = tmp_path / "t.jsonl"
    tg.write(tg.read(example / "traces.jsonl.zst", limit=64), path)

    def made(out, source=path, **more):
        told = {"shard_traces": 8, "part_bytes": 40_000, **more}
        return prepare.prepare(str(source), example / "model", Data(), tmp_path / out, **told)

    return made


def test_ray_address_without_ray_names_the_extra(make, monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ArgumentError, match="TG-PREPARE-008"):
        make("o", ray_address="")


def closed_port():
    """Return a loopback port without a listener."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return taken.getsockname()[1]


@pytest.mark.parametrize("scheme", ["", "ray://"])
def test_an_unreachable_address_is_refused_before_files_are_written(make, tmp_path, scheme):
    address, began = f"{scheme}127.0.0.1:{closed_port()}", time.monotonic()
    with pytest.raises(ArgumentError, match=rf"TG-PREPARE-007.*{address}"):
        make("o", ray_address=address)
    assert time.monotonic() - began < 5
    assert not (tmp_path / "o").exists()


def test_an_unreachable_address_of_the_environment_is_named(make, monkeypatch):
    monkeypatch.setenv("RAY_ADDRESS", f"127.0.0.1:{closed_port()}")
    with pytest.raises(ArgumentError, match=r"TG-PREPARE-007.*RAY_ADDRESS.*127\.0\.0\.1:"):
        make("o", ray_address="")
    with pytest.raises(ArgumentError, match=r"TG-PREPARE-007.*--ray.*1\]:1"):
        make("o", ray_address="[::1]:1")


def test_a_listener_that_is_not_a_cluster_is_refused_in_time(make, monkeypatch):
    """A subprocess connects, because a call into Ray cannot be interrupted."""
    monkeypatch.setattr(ray_backend, "ANSWER_S", 2.0)
    monkeypatch.setattr(ray_backend, "_JOIN", "import time; time.sleep(60)")
    monkeypatch.setattr(
        ray_backend.importlib, "import_module", lambda name: SimpleNamespace(is_initialized=lambda: False)
    )
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        address, began = f"127.0.0.1:{silent.getsockname()[1]}", time.monotonic()
        with pytest.raises(ArgumentError, match=rf"TG-PREPARE-009.*{address}"):
            ray_backend.check(address)
        monkeypatch.setattr(ray_backend, "_JOIN", "raise ConnectionError('no cluster of this version')")
        with pytest.raises(ArgumentError, match=rf"TG-PREPARE-021.*{address}"):
            ray_backend.check(address)
        ray_backend.check("")  # no address is given or found, so a cluster is started
    assert time.monotonic() - began < 30


@pytest.mark.nightly
def test_connecting_to_another_listener_does_not_wait_for_ray(ray, make, monkeypatch):
    monkeypatch.setattr(ray_backend, "ANSWER_S", 10.0)
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        with pytest.raises(ArgumentError, match=r"TG-PREPARE-009.*10 s"):
            make("o", ray_address=f"127.0.0.1:{silent.getsockname()[1]}")


def test_an_actor_prepares_parts_and_returns_errors(make, example, tmp_path, monkeypatch):
    """Run an actor without a cluster: it changes to the folder of its caller."""
    monkeypatch.chdir(tmp_path)
    make("one")
    parts, _ = prepare.split_inputs(str(tmp_path / "t.jsonl"), 40_000)
    (tmp_path / "two").mkdir()
    told = ("t.jsonl", str(example / "model"), str(tmp_path / "two"), Data(), FieldMap(), 8)
    rows = [ray_backend._serialize((Job(*told), part, str(tmp_path))) for part in parts]
    actor = ray_backend.Preparer()
    found = [ray_backend._deserialize(outcome) for outcome in actor({"part": rows})["outcome"]]
    assert [part for part, _ in found] == parts
    wanted = contents(tmp_path / "one")
    assert all(wanted[name] == text for name, text in contents(tmp_path / "two").items())
    (tmp_path / "t.jsonl").write_bytes(b"{}\n" * (1 << 17))
    [(part, error)] = map(ray_backend._deserialize, actor({"part": rows[:1]})["outcome"])
    assert (part, type(error), error.line) == (parts[0], FormatError, 1)


def test_an_actor_resolves_paths_from_the_folder_of_its_caller(make, example, tmp_path, monkeypatch):
    """Actors of a cluster that was started in another folder have that working directory."""
    (tmp_path / "model").symlink_to(example / "model")
    monkeypatch.chdir(tmp_path)
    prepare.prepare("t.jsonl", Path("model"), Data(), "one", shard_traces=8, part_bytes=40_000)
    [part, *_], _ = prepare.split_inputs("t.jsonl", 40_000)
    row = ray_backend._serialize((Job("t.jsonl", "model", "two", Data(), FieldMap(), 8), part, str(tmp_path)))
    (tmp_path / "two").mkdir()
    monkeypatch.chdir("/")
    [(_, record)] = map(ray_backend._deserialize, ray_backend.Preparer()({"part": [row]})["outcome"])
    assert record == json.loads((tmp_path / "one" / "part-00000.json").read_text())
    wanted, found = contents(tmp_path / "one"), contents(tmp_path / "two")
    assert found == {name: wanted[name] for name in found}
    assert "shard-00000-00000/manifest.json" in found


@pytest.mark.nightly
def test_a_local_cluster_writes_the_same_bytes(ray, make, tmp_path):
    lines = (tmp_path / "t.jsonl").read_bytes().splitlines(keepends=True)
    dealt = tmp_path / "dealt.jsonl"
    dealt.write_bytes(b"".join(lines[0::2] + lines[1::2]))  # so that groups are in several parts
    one = make("one", dealt)
    account = make("ray", dealt, ray_address="", workers=2)
    assert contents(tmp_path / "ray") == contents(tmp_path / "one")
    assert account.parts > 2
    assert account.lines() == one.lines()
    assert account.cut_groups == one.cut_groups > 0
    assert not ray.is_initialized()  # the cluster that was started for this call is stopped
    (tmp_path / "bad.jsonl").write_bytes((tmp_path / "t.jsonl").read_bytes() + b"{\n" * 10)
    with pytest.raises(FormatError, match=r"TG-FORMAT-.*bad\.jsonl:65: ") as found:
        make("bad", tmp_path / "bad.jsonl", ray_address="")
    assert found.value.line == 65


class Unknown(ray_backend.Preparer):
    """A class that no actor can import."""


@pytest.mark.nightly
def test_a_package_that_the_cluster_lacks_is_one_error_line(ray, make, monkeypatch):
    monkeypatch.setattr(ray_backend, "Preparer", Unknown)
    with pytest.raises(TracegradError, match=r"TG-PREPARE-006.*ModuleNotFoundError: .*'test_prepare_ray'"):
        make("o", ray_address="")


def actors():
    """Return the child processes that are actors of Ray Data."""
    found, below = [], {os.getpid()}
    for line in subprocess.run(["ps", "-eo", "pid,ppid,args"], capture_output=True, text=True, check=True).stdout.split(
        "\n"
    )[1:-1]:
        process, parent, told = line.split(None, 2)
        if int(parent) in below:
            below.add(int(process))
            found += [int(process)] * told.startswith("ray::MapWorker")
    return found


@pytest.mark.nightly
def test_two_nodes_write_the_same_bytes_if_an_actor_is_killed(ray, make, tmp_path):
    from ray.cluster_utils import Cluster

    make("one")
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1})
    cluster.add_node(num_cpus=1)
    try:
        ray.init(address=cluster.address, log_to_driver=False)
        assert len([node for node in ray.nodes() if node["Alive"]]) == 2
        killed = []

        def kill(progress):
            if not killed:
                killed.extend(actors()[:1])
                for process in killed:
                    os.kill(process, signal.SIGKILL)

        make("ray", ray_address="", progress=kill)
        assert killed
        assert contents(tmp_path / "ray") == contents(tmp_path / "one")
    finally:
        ray.shutdown()
        cluster.shutdown()


@pytest.mark.nightly
def test_the_ray_example_of_the_docs_runs(ray, example, tmp_path, monkeypatch):
    page = "how-to/prepare-with-your-engine.md"
    [block] = [block for block in blocks("python") if block.page == page and "ray.data" in block.text]
    tg.write(tg.read(example / "traces.jsonl.zst", limit=64), tmp_path / "traces.jsonl")
    (tmp_path / "model").symlink_to(example / "model")
    monkeypatch.chdir(tmp_path)
    exec(compile(block.text, str(block), "exec"), {"__name__": "page"})
    assert tg.Sequences.load("out/ray", verify=True).traces == 64
    assert next(iter(manifest.read(Path("out/ray")).shards)) == "shard-00000"
