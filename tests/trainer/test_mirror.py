"""A run at an address: what lies there after it, and what another machine with an empty folder goes on from."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import tracegrad as tg
from tracegrad.cli import main
from tracegrad.errors import ArgumentError, ReadError, TracegradError
from tracegrad.storage import remote
from tracegrad.storage.run_dir import RunDirectory

fsspec = pytest.importorskip("fsspec")
pytest.importorskip("torch")
pytest.importorskip("transformers")

from ranks import told, vector
from tiny import sampled, tiny_model
from tracegrad.objective import presets
from tracegrad.trainer import train


@pytest.fixture
def files():
    """A file system in memory, empty before and after."""
    system = fsspec.filesystem("memory")
    yield system
    system.store.clear()
    system.pseudo_dirs[:] = [""]


def run(out, *, resume=False, log=lambda _: None, **changes):
    model = tiny_model(0)
    given = {"objective": presets.DAPO, "out": out, "sinks": (), "log": log, "resume": resume}
    options = told(checkpoint__every_steps=1, train__epochs=1, **changes)
    done = train(sampled(tiny_model(), groups=12), model, config=options, **given)
    return done, vector(model)


# --- files ---


def test_what_changed_is_sent_what_is_gone_is_removed_and_checkpoints_go_their_own_way(files):
    mirror = RunDirectory("memory://runs/a/")
    (mirror.path / "terms").mkdir()
    (mirror.path / "checkpoints").mkdir()
    for name in ("metrics.jsonl", "terms/one", "terms/half.tmp", "checkpoints/x"):
        (mirror.path / name).write_text("1")
    (mirror.path / "link").symlink_to(mirror.path / "metrics.jsonl")
    mirror.sync()
    assert mirror.remote_files() == {"metrics.jsonl": 1, "terms/one": 1}
    files.pipe("/runs/a/metrics.jsonl", b"of another")
    (mirror.path / "terms" / "one").unlink()
    (mirror.path / "terms" / "two").write_text("22")
    mirror.sync()
    assert mirror.remote_files() == {"metrics.jsonl": 10, "terms/two": 2}  # what did not change is not sent again
    other = RunDirectory("memory://runs/a")
    other.download(other.remote_files())
    assert (other.path / "terms" / "two").read_text() == "22"
    (other.path / "metrics.jsonl").unlink()
    other.sync()
    assert mirror.remote_files() == {"terms/two": 2}
    assert mirror.address_of(mirror.path / "terms" / "two") == "memory://runs/a/terms/two"


def test_a_folder_of_this_machine_is_left_as_it_is(tmp_path):
    mirror = RunDirectory(tmp_path)
    (tmp_path / "a").write_text("1")
    mirror.sync()
    assert (mirror.path, mirror.address, mirror.address_of(tmp_path / "a")) == (tmp_path, None, None)
    assert RunDirectory(f"file://{tmp_path}").path == tmp_path
    assert RunDirectory.of(mirror) is mirror


def test_the_folder_of_this_machine_is_removed_at_the_end_of_the_process_that_made_it(tmp_path):
    code = """if True:
        import os
        from tracegrad.storage.run_dir import RunDirectory
        path = RunDirectory("memory://a").path
        if os.fork() == 0:
            raise SystemExit
        os.wait()
        assert path.is_dir()
        print(path)
    """
    environment = {**os.environ, "TMPDIR": str(tmp_path), "PYTHONPATH": str(Path(tg.__file__).parents[1])}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment)
    assert Path(done.stdout.strip()).parent == tmp_path
    assert not list(tmp_path.iterdir())


def test_a_place_without_room_is_said(monkeypatch, tmp_path):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "gone"))
    with pytest.raises(TracegradError, match=r"TG-STORE-022.*memory://a"):
        _ = RunDirectory("memory://a").path
    mirror = RunDirectory("memory://a")
    mirror.share(tmp_path / "none")
    (tmp_path / "none").write_text("a file")
    with pytest.raises(ReadError, match="TG-STORE-025"):
        mirror.download(["b/c"])


# --- runs ---


def test_a_run_at_an_address_is_that_of_a_folder_and_goes_on_from_an_empty_machine(files, tmp_path):
    changes = {"train__updates_per_old_logprobs": 1, "checkpoint__keep": 1}
    wanted, _ = run(tmp_path / "whole", **changes)
    done, _ = run("memory://runs/b", **changes)
    assert done.address == f"memory://runs/b/checkpoints/step-{wanted.step:08d}"
    assert (done.checkpoint / "model.safetensors").read_bytes() == (
        wanted.checkpoint / "model.safetensors"
    ).read_bytes()
    names = remote.sizes("memory://runs/b")
    local = {path.relative_to(tmp_path / "whole").as_posix() for path in (tmp_path / "whole").rglob("*")}
    assert {name for name in names if "checkpoint" in name} == {
        name for name in local if name.startswith("checkpoints/") and "." in name.rpartition("/")[2]
    }
    assert {"config.toml", "metrics.jsonl", "terms/step-00000001.r0.safetensors"} <= names.keys()
    kept = {path.name for path in (tmp_path / "whole" / "checkpoints").glob("step-*")}
    assert {
        name.split("/")[1] for name in names if name.startswith("checkpoints/step-")
    } == kept  # no file of an old one


def test_a_run_that_stands_at_an_address_is_not_overwritten_and_is_taken_up(files, tmp_path):
    wanted, parameters = run(tmp_path / "whole", train__groups_per_step=4)

    class Full(Exception):
        pass

    class Sink:
        def log(self, row):
            if row["step"] == 2:
                raise Full

        def close(self):
            pass

    model = tiny_model(0)
    options = told(checkpoint__every_steps=1, train__epochs=1, train__groups_per_step=4)
    given = {"objective": presets.DAPO, "out": "memory://runs/a", "config": options, "log": lambda _: None}
    with pytest.raises(Full):
        train(sampled(tiny_model(), groups=12), model, sinks=[Sink()], **given)
    files.pipe("/runs/a/checkpoints/step-00000002/resume/state/x", b"half")  # killed while it sent
    with pytest.raises(ArgumentError, match=r"TG-TRAIN-037.*memory://runs/a.*step-00000001"):
        run("memory://runs/a", train__groups_per_step=4)
    assert files.exists("/runs/a/checkpoints/step-00000002/resume/state/x")
    said = []
    done, found = run("memory://runs/a", resume=True, log=said.append, train__groups_per_step=4)
    assert any("resumed after step 1 of" in line for line in said)
    assert (found == parameters).all()
    assert [row["step"] for row in done.rows] == [row["step"] for row in wanted.rows]
    assert not files.exists("/runs/a/checkpoints/step-00000002/resume/state/x")
    rows = remote.read("memory://runs/a/metrics.jsonl", 1 << 20).splitlines()
    assert [json.loads(row)["step"] for row in rows] == [row["step"] for row in wanted.rows]


def test_a_checkpoint_that_was_changed_at_the_address_is_refused(files):
    done, _ = run("memory://runs/a")
    path = f"/runs/a/checkpoints/{done.checkpoint.name}/resume/random-0.safetensors"
    files.pipe(path, files.cat(path)[:-1] + b"x")
    with pytest.raises(ReadError, match=r"TG-TRAIN-015.*random-0\.safetensors"):
        run("memory://runs/a", resume=True, checkpoint__keep=1)
    files.pipe(path.replace("random-0.safetensors", "progress.json"), b"[]")
    with pytest.raises(ReadError, match=r"TG-TRAIN-009.*progress\.json"):
        run("memory://runs/a", resume=True)


def test_an_address_that_takes_nothing_ends_the_run_with_what_it_says(files, monkeypatch):
    def refuse(path, address):
        raise ReadError(f"{address}: PermissionError: not yours.")

    monkeypatch.setattr(remote, "upload", refuse)
    with pytest.raises(TracegradError, match=r"TG-TRAIN-014.*PermissionError.*yours"):
        run("memory://runs/a")


@pytest.mark.filterwarnings("ignore")
def test_the_command_leaves_everything_at_the_address_and_resumes_there(files, example, group, capsys):
    flags = [
        "--train.groups_per_step",
        "1",
        "--pack.tokens_per_row",
        "1024",
        "--data.holdout",
        "0",
        "--optimizer.lr",
        "2e-4",
    ]
    words = ["train", str(group), "--model", str(example / "model"), "--out", "memory://runs/c", *flags]
    assert main(words) == 0
    said = capsys.readouterr().out
    assert "memory://runs/c/checkpoints/step-00000001  loads with" in said
    assert "memory://runs/c/report.html" in said
    names = remote.sizes("memory://runs/c")
    assert {"config.toml", "metrics.jsonl", "summary.json", "report.html"} <= names.keys()
    assert "checkpoints/step-00000001/README.md" in names
    summary = json.loads(remote.read("memory://runs/c/summary.json", 1 << 20))
    assert summary["checkpoint"] == "memory://runs/c/checkpoints/step-00000001"
    assert main([*words, "--resume", "--train.epochs", "2", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["steps"] == 2
    assert told["files"]["checkpoint"] == "memory://runs/c/checkpoints/step-00000002"
    # options that were told the first time alone
    assert main(["train", str(group), *words[2:6], "--resume", "--print-config", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["config"]["optimizer.lr"] == 2e-4
