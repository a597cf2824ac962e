"""Nobody's data is lost: folders of others, outputs that are inputs, two runs in one folder."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import tracegrad as tg
from folder_bytes import contents
from tracegrad import cli, prepare
from tracegrad.config import Config, Data
from tracegrad.errors import ArgumentError
from tracegrad.online import OnlineConfig, RolloutConfig
from tracegrad.online.run_info import RunInfo
from tracegrad.storage import files, manifest
from tracegrad.storage.run_dir import RunDirectory, read_status
from tracegrad.trainer import api

MODEL = Path(__file__).parents[2] / "examples" / "quickstart" / "model"
RECORD = {"messages": [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}]}


def traces(path, count=2):
    if not path.exists():
        path.write_text("".join(json.dumps({**RECORD, "id": str(number)}) + "\n" for number in range(count)))
    return path


FOREIGN = {
    "a file": {"notes.txt": "mine"},
    "a config": {"config.toml": "mine"},
    "metrics of another trainer": {"metrics.jsonl": "{}", "config.toml": "x"},
    "a report": {"report.html": "mine"},
    "a plan of another tool": {"prepare.json": "{}"},
    "a list for a plan": {"prepare.json": "[]"},
    "a manifest": {"manifest.json": "{}"},
    "a hidden file": {".env": "KEY=1"},
    "another's lock": {".lock": "1234", "state": "x"},
    "a checkpoint of another trainer": {"checkpoints/step-1/model.safetensors": "x"},
}


def train(out):
    cli.main(["train", str(traces(out.with_name("t.jsonl"))), "--model", str(MODEL), "--out", str(out)])


def train_api(out):
    with RunDirectory(out).lock():
        pass


def prepare_cli(out):
    return prepare.prepare(str(traces(out.with_name("t.jsonl"))), MODEL, Data(text_only=True), out)


def prepare_resume(out):
    return prepare.prepare(str(traces(out.with_name("t.jsonl"))), MODEL, Data(text_only=True), out, resume=True)


def train_python(out):
    tg.train(MODEL, str(traces(out.with_name("t.jsonl"))), out=out)


NOBODY = "http://127.0.0.1:9"


def record(out):
    tg.online.record(["2+2?"], rewards=[len], servers=[NOBODY], out=out)


def online(out):
    tg.online.train(MODEL, ["2+2?"], rewards=[len], servers=[NOBODY], out=out)


def replay(out):
    run = out.with_name("run")
    if not run.exists():
        run.mkdir()
        (run / "config.toml").write_text("")
        RunInfo(str(MODEL), repr(api.objective_of(Config())), OnlineConfig(), RolloutConfig()).write(run, Config())
    tg.online.replay(run, MODEL, out=out)


@pytest.mark.parametrize("held", FOREIGN)
@pytest.mark.parametrize("verb", [train_api, train_python, record, online, replay, prepare_cli, prepare_resume])
def test_a_folder_of_somebody_else_is_refused_and_stays(tmp_path, verb, held):
    out = tmp_path / "out"
    for name, text in FOREIGN[held].items():
        (out / name).parent.mkdir(parents=True, exist_ok=True)
        (out / name).write_text(text)
    before = contents(out)
    with pytest.raises(ArgumentError, match=r"TG-(STORE-023|PREPARE-013).*out"):
        verb(out)
    assert contents(out) == before


def test_train_on_the_command_line_refuses_it_before_it_reads(tmp_path, capsys):
    out = tmp_path / "out"
    out.mkdir()
    (out / "config.toml").write_text("mine")
    with pytest.raises(ArgumentError, match=r"TG-STORE-023.*config\.toml"):
        tg.train(MODEL, str(traces(tmp_path / "t.jsonl")), out=out)
    assert cli.main(["train", str(tmp_path / "t.jsonl"), "--model", str(MODEL), "--out", str(out)]) != 0
    assert "is not the folder of a run" in capsys.readouterr().err
    assert contents(out) == {"config.toml": b"mine"}


def test_an_empty_folder_and_our_own_are_taken(tmp_path):
    (tmp_path / "run").mkdir()
    for _ in range(2):
        with RunDirectory(tmp_path / "run").lock():
            (tmp_path / "run" / "config.toml").write_text("ours")
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "t.jsonl.quarantine.raw").write_text("x")
    prepare_cli(tmp_path / "out")
    prepare_resume(tmp_path / "out")


def test_a_prepared_folder_is_no_folder_of_a_run(tmp_path):
    prepare_cli(tmp_path / "out")
    with pytest.raises(ArgumentError, match="TG-STORE-023"):
        train_api(tmp_path / "out")
    with RunDirectory(tmp_path / "run").lock():
        (tmp_path / "run" / "metrics.jsonl").write_text("{}")
    with pytest.raises(ArgumentError, match="TG-PREPARE-013"):
        prepare_cli(tmp_path / "run")


@pytest.mark.parametrize("verb", [train_api, train, train_python, record, online, replay])
@pytest.mark.first_cases(2)
def test_two_runs_in_one_folder_are_kept_apart(tmp_path, verb, capsys):
    """The second is refused before it reads: what cannot be read would be put aside into the folder of the first."""
    code = (
        "import sys; from tracegrad.storage.run_dir import RunDirectory, read_status\n"
        "with RunDirectory(sys.argv[1]).lock(): print('in', flush=True); sys.stdin.read()"
    )
    (tmp_path / "t.jsonl").write_text("no record\n")
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, "-c", code, str(tmp_path / "out")], **pipes) as first:
        assert first.stdout.readline() == "in\n"
        if verb is train:
            verb(tmp_path / "out")
            assert "another process is writing there" in capsys.readouterr().err
        else:
            with pytest.raises(ArgumentError, match="TG-STORE-011"):
                verb(tmp_path / "out")
        assert [path.name for path in (tmp_path / "out").iterdir()] == [manifest.LOCK]
        first.communicate("")
    train_api(tmp_path / "out")


def test_a_run_enters_its_own_folder_again_and_lets_others_in_afterwards(tmp_path):
    mirror = RunDirectory(tmp_path / "out")
    for _ in range(2):
        with mirror.lock():
            with mirror.lock():
                pass
            with pytest.raises(ArgumentError, match="TG-STORE-011"):
                train_api(tmp_path / "out")
    assert not (tmp_path / "out").exists()
    with mirror.lock():
        (tmp_path / "out" / "config.toml").write_text("ours")
    train_api(tmp_path / "out")
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [manifest.LOCK, "config.toml"]


def by_link(path):
    path.with_name("link.jsonl").symlink_to(path)
    return path.with_name("link.jsonl")


def by_hard_link(path):
    path.with_name("hard.jsonl").hardlink_to(path)
    return path.with_name("hard.jsonl")


NAMES = {
    "itself": lambda path: path,
    "relative": lambda path: os.path.relpath(path),
    "dots": lambda path: path.parent / "x" / ".." / path.name,
    "link": by_link,
    "hard link": by_hard_link,
    "pattern": lambda path: f"{path.parent}/t*.jsonl",
    "folder": lambda path: path.parent,
}


@pytest.mark.parametrize("flag", ["--out", "--cache"])
@pytest.mark.parametrize("name", NAMES)
def test_score_does_not_write_what_it_reads(tmp_path, capsys, name, flag):
    folder = tmp_path / "in"
    (folder / "x").mkdir(parents=True)
    path = traces(folder / "t.jsonl")
    (tmp_path / "r.py").write_text("def good(completion, **more): return 1.0\n")
    before = path.read_bytes()
    out = {"--out": tmp_path / "scored.jsonl", flag: path}
    flags = [word for name, value in out.items() for word in (name, str(value))]
    assert cli.main(["score", str(NAMES[name](path)), "--reward", f"{tmp_path}/r.py:good", *flags]) != 0
    assert f"TG-STORE-006: {flag} {path} " in capsys.readouterr().err
    assert path.read_bytes() == before


def test_a_quarantine_that_is_read_is_not_written(tmp_path):
    bad = tmp_path / "a.jsonl"
    bad.write_text("no record\n")
    mine = traces(tmp_path / "mine.jsonl")
    (tmp_path / "a.jsonl.quarantine.jsonl").hardlink_to(mine)
    with pytest.raises(ArgumentError, match=r"TG-STORE-006.*quarantine"):
        tg.read([bad, mine], on_error="quarantine")
    with pytest.raises(ArgumentError, match=r"TG-STORE-006.*quarantine"):
        tg.read([mine, tmp_path / "a.jsonl.quarantine.jsonl"], on_error="quarantine", quarantine=tmp_path / "a.jsonl")


def test_what_is_not_read_may_be_written(tmp_path):
    files.check_not_read([tmp_path / "new"], [traces(tmp_path / "t.jsonl"), "-", tmp_path / "none"], "--out")
    with pytest.raises(ArgumentError, match="TG-STORE-006"):
        files.check_not_read([tmp_path / "set" / "new"], [tmp_path], "--out")


@pytest.mark.parametrize("name", ["itself", "dots", "link", "hard link"])
def test_an_exported_page_does_not_replace_its_traces(tmp_path, name):
    view = pytest.importorskip("tracegrad.view")
    (tmp_path / "x").mkdir()
    path = traces(tmp_path / "t.jsonl")
    before = path.read_bytes()
    with (
        view.Viewer([path], tmp_path / "index") as session,
        pytest.raises(ArgumentError, match=r"TG-STORE-006.*--export"),
    ):
        view.export_page(session, [], Path(NAMES[name](path)))
    assert path.read_bytes() == before


def test_the_lock_of_a_run_says_whose_it_is(tmp_path):
    with RunDirectory(tmp_path / "out").lock():
        assert (tmp_path / "out" / manifest.LOCK).read_bytes() == b"tracegrad run\n"


def fail(run, error):
    with run.lock():
        run.begin()
        raise error


def test_the_lock_of_a_run_records_how_it_ended(tmp_path):
    run = RunDirectory(tmp_path / "out")
    assert read_status(run.path).state == "unknown"
    with run.lock():
        assert read_status(run.path).state == "running"  # by the lock alone
        (run.path / "config.toml").touch()  # an empty folder would be removed
    assert read_status(run.path).state == "unknown"  # it did not begin, so it did not end
    with run.lock():
        run.begin()
        run.end("done")
    assert read_status(run.path) == ("ended", "done")
    with run.lock():
        run.begin()
    assert read_status(run.path) == ("ended", "")
    for error, status in (
        (ArgumentError("TG-TRAIN-083: no"), ("failed", "TG-TRAIN-083")),
        (ValueError("secret"), ("failed", "ValueError")),
        (KeyboardInterrupt(), ("stopped", "")),
    ):
        with pytest.raises(type(error)):
            fail(run, error)
        assert read_status(run.path) == status
    with pytest.raises(ArgumentError), run.lock():
        raise ArgumentError("TG-TRAIN-083: refused before it began")
    assert read_status(run.path) == ("stopped", "")  # as before


def test_a_killed_run_is_known_by_its_free_lock(tmp_path):
    code = """
import sys, time
from tracegrad.storage.run_dir import RunDirectory
run = RunDirectory(sys.argv[1])
with run.lock():
    run.begin()
    print("begun", flush=True)
    time.sleep(60)
"""
    with subprocess.Popen([sys.executable, "-c", code, str(tmp_path / "out")], stdout=subprocess.PIPE) as process:
        process.stdout.readline()
        assert read_status(tmp_path / "out").state == "running"
        process.kill()
    assert read_status(tmp_path / "out").state == "killed"
    (tmp_path / "out" / manifest.LOCK).write_bytes(b"tracegrad run\nrunning another-machine\n")
    assert read_status(tmp_path / "out").state == "unknown"
