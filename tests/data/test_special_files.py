"""Pipes, sockets and devices where files are expected: an error at once, not a wait without end."""

import json
import os
import shutil
import signal
import socket

import pytest

from tracegrad import doctor
from tracegrad.data import read
from tracegrad.errors import ReadError, TracegradError
from tracegrad.rewards.recorded import ScoreCache
from tracegrad.storage.files import read_json, refuse_special
from tracegrad.user_code import load_module

RECORD = {"messages": [{"role": "user", "content": "2?"}, {"role": "assistant", "content": "4"}], "group": "g"}


@pytest.fixture(autouse=True)
def in_time():
    """Whatever waits is ended."""

    def late(*_):
        raise TimeoutError("it waits")

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(60)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


def special(kind, path):
    """Put something there that is no file."""
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "device":
        path.symlink_to("/dev/zero")
    else:
        with socket.socket(socket.AF_UNIX) as bound:
            here = os.getcwd()
            os.chdir(path.parent)
            bound.bind(path.name)
            os.chdir(here)
    return path


KINDS = ("pipe", "device", "socket")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("pattern", ["", "*.jsonl", "**/*"])
def test_what_a_folder_or_a_pattern_holds_that_is_no_file_is_named(kind, pattern, tmp_path):
    (tmp_path / "a.jsonl").write_text(json.dumps(RECORD) + "\n")
    special(kind, tmp_path / "b.jsonl")
    with pytest.raises(ReadError, match=rf"TG-DATA-038.*{kind}"):
        read(tmp_path / pattern if pattern else tmp_path)
    assert len(read(tmp_path / "a.jsonl")) == 1


@pytest.mark.parametrize("kind", KINDS)
def test_a_cache_of_scores_and_a_file_of_functions_are_files(kind, tmp_path):
    path = special(kind, tmp_path / "mine.py")
    with pytest.raises(TracegradError, match=r"TG-STORE-004.*mine\.py"):
        ScoreCache(path)
    with pytest.raises(OSError, match=f"Errno 22.*{kind}"):
        load_module(path)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "name", ["config.json", "generation_config.json", "tokenizer.json", "preprocessor_config.json"]
)
@pytest.mark.first_cases(2)
def test_a_model_whose_files_are_none_is_not_waited_for(kind, name, example, tmp_path):
    model = tmp_path / "model"
    shutil.copytree(example / "model", model)
    (model / name).unlink(missing_ok=True)
    special(kind, model / name)
    try:
        doctor.diagnose(example / "traces.jsonl.zst", model)
    except TracegradError as error:
        assert name in str(error)  # noqa: PT017 (files that the examination needs not may be passed over)


@pytest.mark.parametrize("text", ["[" * 100_000, "1" * 5000, '{"a": ' + "1" * 5000 + "}", "\xff", "", "{"])
def test_json_that_python_does_not_read_is_a_value_error(text, tmp_path):
    path = tmp_path / "config.json"
    path.write_bytes(text.encode("latin-1"))
    with pytest.raises(ValueError):  # noqa: PT011 (whatever its words)
        read_json(path)
    with pytest.raises(OSError, match=r"Errno 27.* 2 "):
        read_json(special_free(tmp_path), limit=2)


def special_free(folder):
    path = folder / "long.json"
    path.write_text("[1, 2]")
    return path


def test_a_file_and_a_folder_are_no_special_ones(tmp_path):
    refuse_special(tmp_path)
    refuse_special(special_free(tmp_path))
    refuse_special(tmp_path / "none")
