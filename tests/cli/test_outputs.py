"""Files that are written: never through a link, never in place of a device, a pipe or a folder."""

import ast
import os
import socket
from pathlib import Path

import numpy as np
import pytest

import sources
import tracegrad as tg
from tracegrad.errors import ReadError
from tracegrad.metrics import JsonLines
from tracegrad.report.page import write_page
from tracegrad.rewards.recorded import ScoreCache
from tracegrad.rollout.proxy_journal import Journal
from tracegrad.storage import files as outputs
from tracegrad.storage import manifest, safetensors_file
from tracegrad.view import database

TRACE = {"messages": [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}]}


def quarantine(path):
    source = path.with_name("runs.jsonl")
    source.write_text("no record\n")
    list(tg.stream(source, on_error="quarantine", quarantine=path.with_name(path.name.split(".")[0])))


def journal(path):
    with Journal(path.parent) as kept:
        kept._append(kept.start("a", None), {"x": 1})


def take_lock(path):
    with manifest.lock(path.parent):
        pass


# Every kind of writer: what it is called with, and the name of the file that it then writes.
WRITERS = {
    "write": ("out", lambda path: outputs.write(path, b"x")),
    "append": ("out", lambda path: outputs.append(path).close()),
    "create": ("out", lambda path: outputs.create(path).close()),
    "whole": ("out", lambda path: safetensors_file.write_bytes(path, [b"x"])),
    "arrays": ("out", lambda path: safetensors_file.write(path, {"a": np.zeros(3)})),
    "page": ("out.html", lambda path: write_page(path, b"x")),
    "metrics": ("metrics.jsonl", lambda path: JsonLines(path).close()),
    "scores": ("out.scores", lambda path: ScoreCache(path).put("a", 1)),
    "index": ("index.sqlite", lambda path: database.connect(path, write=True).close()),
    "index-wal": ("index.sqlite-wal", lambda path: database.connect(path.with_name("index.sqlite"), write=True)),
    "lock": (manifest.LOCK, take_lock),
    "traces": ("out.jsonl", lambda path: tg.write(tg.Traces.from_records([TRACE]), path)),
    "traces, packed": ("out.jsonl.gz", lambda path: tg.write(tg.Traces.from_records([TRACE]), path)),
    "quarantine": ("bad.quarantine.raw", quarantine),
    "quarantine, list": ("bad.quarantine.jsonl", quarantine),
}


@pytest.mark.parametrize("there", [True, False], ids=["to a file", "to nothing"])
@pytest.mark.parametrize("name", WRITERS)
def test_nothing_is_written_through_a_link(tmp_path, name, there):
    ending, writer = WRITERS[name]
    target, path = tmp_path / "elsewhere" / "theirs", tmp_path / "here" / ending
    target.parent.mkdir()
    path.parent.mkdir()
    if there:
        target.write_bytes(b"theirs")
    path.symlink_to(target)
    with pytest.raises(ReadError, match=r"TG-(STORE-004|READ-004|READ-015)") as raised:
        writer(path)
    assert str(path.parent) in str(raised.value)
    assert os.listdir(target.parent) == (["theirs"] if there else [])
    assert not there or target.read_bytes() == b"theirs"
    assert path.is_symlink()
    assert not list(path.parent.glob("*.tmp"))


def test_a_link_under_the_name_of_a_draft_is_removed_and_not_followed(tmp_path):
    target, path = tmp_path / "theirs", tmp_path / "out"
    target.write_bytes(b"theirs")
    (tmp_path / f".tmp-{path.name}").symlink_to(tmp_path, target_is_directory=True)
    outputs.make_folder(tmp_path / f".tmp-{path.name}")
    assert not (tmp_path / f".tmp-{path.name}").is_symlink()
    assert target.read_bytes() == b"theirs"
    (tmp_path / f"out.{os.getpid()}.tmp").symlink_to(target)
    with pytest.raises(ReadError, match="TG-STORE-004"):
        safetensors_file.write_bytes(path, [b"x"])
    assert target.read_bytes() == b"theirs"


def test_another_name_of_a_file_keeps_what_it_holds(tmp_path):
    target = tmp_path / "theirs"
    target.write_bytes(b"theirs")
    (tmp_path / "bad.quarantine.raw").hardlink_to(target)
    quarantine(tmp_path / "bad.quarantine.raw")
    outputs.write(tmp_path / "theirs2", b"x")
    assert target.read_bytes() == b"theirs"
    assert (tmp_path / "bad.quarantine.raw").read_bytes() == b"no record\n"


def special(path, kind):
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    else:
        with socket.socket(socket.AF_UNIX) as door:
            before = os.getcwd()
            os.chdir(path.parent)  # names of sockets are short
            try:
                door.bind(path.name)
            finally:
                os.chdir(before)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no pipes with names")
@pytest.mark.parametrize("kind", ["pipe", "folder", "socket"])
@pytest.mark.parametrize("name", [name for name in WRITERS if not name.startswith("traces")])
def test_what_is_no_regular_file_is_refused_and_stays(tmp_path, name, kind):
    ending, writer = WRITERS[name]
    path = tmp_path / ending
    special(path, kind)
    mode = path.lstat().st_mode
    with pytest.raises(ReadError, match=r"TG-(STORE-004|READ-004)"):
        writer(path)
    assert path.lstat().st_mode == mode


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="the system has no full device")
@pytest.mark.parametrize("name", ["/dev/full", "/dev/null", "/dev/stdout"])
@pytest.mark.parametrize("writer", ["write", "append", "whole", "page", "metrics", "scores"])
def test_a_device_is_refused_and_stays(name, writer):
    mode = os.lstat(name).st_mode
    with pytest.raises(ReadError, match="TG-STORE-004"):
        WRITERS[writer][1](Path(name))
    assert os.lstat(name).st_mode == mode


# Calls that make or rename files, and the files that may: the helper itself; what reads; folders that were just made.
CALLS = {"write_text", "write_bytes", "symlink_to", "touch"}
MOVES = {("os", "replace"), ("os", "rename"), ("shutil", "copyfile"), ("shutil", "copy"), ("shutil", "move")}
OWN = {"storage/files.py"}
RENAMES = {"trainer/checkpoint.py"}


def writes(path):
    """The lines of a file that open something to write, or rename onto it, by themselves."""
    for node in sources.nodes(path):
        if not isinstance(node, ast.Call):
            continue
        function, arguments = node.func, [a.value for a in node.args if isinstance(a, ast.Constant)]
        name = function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")
        of = getattr(getattr(function, "value", None), "id", "")
        modes = [a for a in arguments if isinstance(a, str) and a and set(a) <= set("rwaxbt+") and set(a) & set("wax+")]
        opens = name == "open" and of != "os" and modes
        opens = opens or (isinstance(function, ast.Attribute) and name in CALLS and of != "safetensors_file")
        if opens or (of, name) in MOVES:
            yield node.lineno


def test_no_other_file_of_the_package_opens_one_to_write():
    known = OWN | RENAMES
    known |= {
        "cli/args.py",
        "cli/unexpected.py",
        "user_code.py",
        "rollout/watchdog.py",
    }  # descriptors and temporary files
    known |= {"storage/run_dir.py"}  # the lock file, which keeps its place
    known |= {"weight_sync/vllm_args.py", "weight_sync/lora_adapter.py"}  # a folder that was just made
    files = (path for path in sources.package_files() if path.relative_to(sources.PACKAGE).as_posix() not in known)
    assert [f"{path.relative_to(sources.PACKAGE)}:{line}" for path in files for line in writes(path)] == []
