"""Whatever a verb raises is one line and a report; an output that takes nothing is one line."""

import asyncio
import os
import re
import stat
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tracegrad.cli import args, extras, main, unexpected
from tracegrad.cli.args import Parser

ARGUMENTS = {
    "init": ["t.jsonl"],
    "score": ["t.jsonl", "--out", "o.jsonl", "--reward", "mine.py:secret_reward"],
    "fill": ["t.jsonl", "--model", "m", "--out", "o.jsonl"],
    "train": ["t.jsonl", "--model", "m", "--out", "o"],
    "merge": ["checkpoint", "--out", "o"],
    "prepare": ["t.jsonl", "--model", "m", "--out", "o"],
    "doctor": ["t.jsonl", "--model", "m"],
    "view": ["t.jsonl"],
    "online": ["run.toml", "--out", "o"],
    "replay": ["out", "--model", "m", "--out", "o"],
    "record": ["mine.py:agent", "--tasks", "t.py:tasks", "--server", "http://h", "--out", "o"],
    "proxy": ["--server", "http://h", "--model", "m", "--out", "o"],
    "receive": ["--out", "o"],
    "pull": ["phoenix", "http://h", "--project", "p", "--out", "o"],
}


class Unreadable(Exception):
    """An error whose own text cannot be had."""

    def __str__(self):
        raise RuntimeError("no text")


class Panic(BaseException):
    """As a panic of the core comes to Python."""


def raised(error):
    raise error


def deep():
    return deep()


def late():
    raise OSError(28, "No space left on device", "/data/mine/shard")


def turned():
    raise ValueError("two\nlines \x1b[2J \u202e \ud800 of /data/mine/shard")


RAISED = {
    "KeyError": lambda: {}["x"],
    "RecursionError": deep,
    "MemoryError": lambda: raised(MemoryError()),
    "OSError": late,
    "ValueError": turned,
    "Unreadable": lambda: raised(Unreadable()),
    "Panic": lambda: raised(Panic("the core")),
    "CancelledError": lambda: raised(asyncio.CancelledError()),
    "UnicodeEncodeError": lambda: "\ud800".encode(),
}


@pytest.fixture
def reports(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def raising(monkeypatch, raise_it):
    """Makes every verb raise."""
    own = Parser.set_defaults

    def set_defaults(self, run, **more):
        own(self, run=lambda *_: raise_it(), **more)

    monkeypatch.setattr(Parser, "set_defaults", set_defaults)


def test_the_verbs_of_these_tests_are_all_verbs(capsys):
    with pytest.raises(SystemExit):
        main(["nosuch"])
    known = re.search(r"Valid names: (.*)\.", capsys.readouterr().err)[1]
    assert set(ARGUMENTS) == set(known.split(", "))


@pytest.mark.parametrize("verb", ARGUMENTS)
@pytest.mark.parametrize("name", RAISED)
def test_what_a_verb_raises_is_one_line_and_a_report(verb, name, reports, monkeypatch, capsys):
    raising(monkeypatch, RAISED[name])
    monkeypatch.setattr(extras, "is_installed", lambda name: True)  # those of pull have an environment of their own
    assert main([verb, *ARGUMENTS[verb]]) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    assert err.startswith(f"tracegrad: error: TG-CLI-031: unexpected {name}")
    (path,) = reports.glob("tracegrad-report-*.txt")
    assert str(path) in err
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    text = path.read_text()
    assert f"tracegrad {unexpected._core.__version__}\npython 3." in text
    assert f"command: tracegrad {verb}" in text
    assert "Traceback (most recent call last)" in text or 'File "' in text
    assert name in text
    assert len(text) < 1 << 20


def test_a_report_holds_no_value_of_the_command_and_no_credential(reports, monkeypatch, capsys):
    monkeypatch.setenv("MY_API_KEY", "opaque-0123")

    def leak():
        raise ValueError(
            "/data/mine/t.jsonl with opaque-0123, hf_abcdefghijklmnop, Authorization: Bearer abc.def, "
            "https://me:word@host/x?X-Amz-Signature=0a1b2c, " + str(Path.home() / "models")
        )

    raising(monkeypatch, leak)
    assert main(["train", "/data/mine/t.jsonl", "--model", "secret/model", "--out=/data/out", "--epochs", "2"]) == 1
    said = capsys.readouterr().err
    (path,) = reports.glob("tracegrad-report-*.txt")
    text = path.read_text()
    assert "command: tracegrad train VALUE --model VALUE --out=VALUE --epochs 2" in text
    for secret in ("opaque-0123", "hf_abcdefghijklmnop", "abc.def", "me:word", "0a1b2c", str(Path.home())):
        assert secret not in text.replace(str(Path(__file__).parents[2]), ""), secret
        assert secret not in said.replace(str(path), ""), secret
    assert "/data/mine/t.jsonl" not in text
    assert "secret/model" not in text


def test_without_a_place_for_reports_the_line_names_where_it_was_raised(monkeypatch, capsys):
    monkeypatch.setattr(tempfile, "tempdir", "/nowhere/at/all")
    raising(monkeypatch, RAISED["KeyError"])
    assert main(["doctor", "t.jsonl", "--model", "m"]) == 1
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    assert re.search(r"unexpected KeyError: 'x' at .*test_cli_unexpected\.py:\d+\. No report could be written", err)


FULL = pytest.mark.skipif(not os.path.exists("/dev/full"), reason="the system has no full device")


def ended(words, out, err=subprocess.PIPE, unbuffered="", cwd=None):
    environment = {**os.environ, "PYTHONUNBUFFERED": unbuffered}
    command = [sys.executable, "-m", "tracegrad", *words]
    done = subprocess.run(command, stdout=out, stderr=err, env=environment, text=True, cwd=cwd, timeout=120)
    return done.returncode, done.stderr


@FULL
@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize(
    "words", [["--version"], ["--help"], ["doctor", "--help"], ["doctor", "DATA"], ["doctor", "DATA", "--json"]]
)
@pytest.mark.first_cases(2)
def test_a_full_disk_on_standard_output_is_one_line(words, unbuffered, example):
    data = [str(example / "traces.jsonl.zst"), "--model", str(example / "model")]
    words = [word for each in words for word in (data if each == "DATA" else [each])]
    with open("/dev/full", "w") as full:
        code, err = ended(words, full, unbuffered=unbuffered)
    assert code == 1
    assert err == (
        "tracegrad: error: standard output: No space left on device. The output is incomplete. "
        "Free space there, or redirect it elsewhere.\n"
    )


@FULL
def test_a_full_disk_on_standard_error_keeps_the_exit_code(tmp_path):
    with open("/dev/full", "w") as full:
        assert ended(["doctor", "none", "--model", "none"], subprocess.DEVNULL, full, cwd=tmp_path)[0] == 1
        assert ended(["nosuch"], full, full)[0] == 2


@FULL
def test_a_stream_that_failed_in_another_thread_fails_once_in_the_main_thread():
    with open("/dev/full", "w") as full, ThreadPoolExecutor(1) as pool:
        with pytest.raises(args.OutputFailed):
            pool.submit(args.put, "a", to=full).result()
        with pytest.raises(args.OutputFailed):
            args.put("b", to=full)
        args.put("c", to=full)  # it has been reported


@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_a_pipe_that_nobody_reads_ends_without_a_word(unbuffered):
    read, write = os.pipe()
    os.close(read)
    with os.fdopen(write, "w") as pipe:
        assert ended(["doctor", "--help"], pipe, unbuffered=unbuffered) == (141, "")
