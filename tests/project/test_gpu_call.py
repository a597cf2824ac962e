"""benches/gpu/call.sh: its parts exist, a part that hangs or fails ends as it should, and both calls end on a CPU."""

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

import tracegrad

ROOT = Path(__file__).parents[2]
CALL = ROOT / "benches" / "gpu" / "call.sh"
PYTHON = os.pathsep.join([str(Path(tracegrad.__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
PARTS = {
    "1": ["check kernels", "check qwen3", "check gemma3", "check step", "check rest", "row head-narrow", "row trainer"],
    "2": ["row small", "where", "row shared", "row mask", "ncu", "row head", "row longest"],
}
MOST_FILES = 8
# What pytest collects for each list of arguments, in one process, as torch takes seconds to import.
COLLECT = """
import contextlib, json, sys, pytest
class Items:
    def pytest_collection_finish(self, session):
        self.ids = [item.nodeid for item in session.items]
collected = []
for arguments in json.loads(sys.argv[1]):
    items = Items()
    with contextlib.redirect_stdout(sys.stderr):
        pytest.main([*arguments, "--collect-only"], plugins=[items])
    collected.append(items.ids)
print(json.dumps(collected))
"""


def call(number, tmp_path, **environment):
    """Run a call; returns the process and the lines of its diary."""
    settings = {
        **os.environ,
        "P": sys.executable,
        "PYTHONPATH": PYTHON,
        "OUT": str(tmp_path / "out"),
        "OMP_NUM_THREADS": "1",
    }
    settings |= {"SCRATCH": str(tmp_path / "scratch"), "WHEELS": str(tmp_path / "wheels"), **environment}
    done = subprocess.run([CALL, number], cwd=tmp_path, env=settings, capture_output=True, text=True, check=False)
    diary = tmp_path / "out" / "day.txt"
    return done, [line for line in diary.read_text().splitlines() if line.startswith("==")] if diary.exists() else []


def plan(number, tmp_path):
    """The command of each part, by the part's name."""
    done, _ = call(number, tmp_path, PLAN="1")
    assert done.returncode == 0, done.stderr
    lines = [line.partition(": ") for line in done.stdout.splitlines()]
    return {name: shlex.split(command) for name, _, command in lines}


def stub(tmp_path, script):
    """A program in the place of the interpreter."""
    path = tmp_path / "python"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return str(path)


@pytest.mark.parametrize("number", ["1", "2"])
def test_a_call_has_the_parts_that_it_is_to_have(number, tmp_path):
    subprocess.run(["bash", "-n", CALL], check=True)
    parts = list(plan(number, tmp_path))
    assert sorted(parts) == sorted(PARTS[number])
    assert [name for name in parts if name.startswith("row")] == [n for n in PARTS[number] if n.startswith("row")]


@pytest.mark.nightly
def test_every_test_that_a_call_names_is_collected(tmp_path):
    pytest.importorskip("torch")
    pytest.importorskip("transformers")
    pytest.importorskip("triton")
    commands = {name: command for name, command in plan("1", tmp_path).items() if name.startswith("check")}
    selections = [command[command.index("pytest") + 1 :] for command in commands.values()]
    done = subprocess.run(
        [sys.executable, "-c", COLLECT, json.dumps(selections)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": PYTHON},
        capture_output=True,
        text=True,
        check=True,
    )
    for arguments, ids in zip(selections, json.loads(done.stdout), strict=True):
        wanted = [each for each in arguments if each.endswith(".py")]
        if "-k" in arguments:
            wanted += arguments[arguments.index("-k") + 1].split(" or ")
        assert wanted
        for each in wanted:
            assert any(each in name for name in ids), f"{each} selects no test of {ids}"


@pytest.mark.parametrize("number", ["1", "2"])
def test_every_row_flag_and_kernel_that_a_call_names_exists(number, tmp_path, monkeypatch):
    pytest.importorskip("torch")
    pytest.importorskip("transformers")
    monkeypatch.syspath_prepend(str(CALL.parent))
    import run
    import where

    for name, command in plan(number, tmp_path).items():
        if name.startswith("row"):
            options = run.parser().parse_args(command[command.index("benches/gpu/run.py") + 1 :])
            assert (options.rows, options.quick) == ([name.removeprefix("row ")], True)
        elif name in ("where", "ncu"):
            options = where.parser().parse_args(command[command.index("benches/gpu/where.py") + 1 :])
            assert options.head == (name == "ncu")
        if name == "ncu":
            kernels = command[command.index("-k") + 1].removeprefix("regex:").split("|")
            source = (ROOT / "python/tracegrad/model/lm_head_triton.py").read_text()
            jitted = re.findall(r"@triton\.jit\ndef (\w+)", source)
            assert all(any(kernel in name for name in jitted) for kernel in kernels), jitted


@pytest.mark.parametrize("number", ["1", "2"])
def test_a_part_that_hangs_is_ended_and_the_next_begins(number, tmp_path):
    rehearse = "1" if number == "2" else ""  # without ncu, which this machine may not have
    done, diary = call(number, tmp_path, P=stub(tmp_path, "exec sleep 30"), MOST="1", REHEARSE=rehearse)
    assert done.returncode == 1
    if number == "2":
        assert [line.split(",")[0] for line in diary] == [f"== {name}: exit status 124" for name in PARTS["2"]]
    else:  # the checks run side by side
        assert sum("exit status 124" in line for line in diary) == 5
        assert diary[-1].startswith("== stopped: the kernels or Qwen3 are wrong")


@pytest.mark.parametrize("number", ["1", "2"])
def test_no_part_begins_without_time(number, tmp_path):
    done, diary = call(number, tmp_path, P=stub(tmp_path, "exit 0"), LIMIT="30" if number == "1" else "15")
    assert done.returncode == 1
    names = [name for name in PARTS[number] if number == "2" or not name.startswith("row")]
    assert sorted(line.split(":")[0].removeprefix("== ") for line in diary if "not begun" in line) == sorted(names)
    assert not any("exit status" in line for line in diary)


@pytest.mark.parametrize("wrong", ["test_gpu_kernels.py", "Qwen3", "Gemma3"])
def test_nothing_is_timed_if_the_kernels_or_qwen3_are_wrong(wrong, tmp_path):
    """Wrong answers for Gemma 3 alone are reported, and the rows, which measure Qwen3, are timed."""
    done, diary = call("1", tmp_path, P=stub(tmp_path, f'case "$*" in *{wrong}*) exit 1 ;; esac'))
    assert done.returncode == 1
    rows = [line.split(",")[0] for line in diary if line.startswith("== row")]
    assert rows == (["== row head-narrow: exit status 0", "== row trainer: exit status 0"] if wrong == "Gemma3" else [])
    assert any(line.startswith("== stopped") for line in diary) == (wrong != "Gemma3")


def test_wheels_and_caches_are_unpacked_outside_the_results(tmp_path):
    """The wheels stand before what is installed; nothing of them comes back, and the caches do."""
    import zipfile

    (tmp_path / "wheels").mkdir()
    with zipfile.ZipFile(tmp_path / "wheels" / "peer-1-py3-none-any.whl", "w") as wheel:
        wheel.writestr("peer.py", "")
        wheel.writestr("peer-1.data/purelib/beside.py", "")
    seen = tmp_path / "seen"
    script = f'if [ "$2" = zipfile ]; then exec {sys.executable} "$@"; fi; echo "$PYTHONPATH" >{seen}'
    script += '; mkdir -p "$TRITON_CACHE_DIR"; touch "$TRITON_CACHE_DIR/kernel"'
    done, _ = call("1", tmp_path, P=stub(tmp_path, script))
    assert done.returncode == 0, done.stdout + done.stderr
    site = Path(seen.read_text().split(os.pathsep)[0])
    assert {path.name for path in site.iterdir()} == {"peer.py", "beside.py", "peer-1.data"}
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["cache.tgz.0", "checks.log", "day.txt"]
    headings = re.findall("^==> .*check_(.*).log <==$", (tmp_path / "out" / "checks.log").read_text(), re.MULTILINE)
    assert headings == ["gemma3", "kernels", "qwen3", "rest", "step"]
    assert not (tmp_path / "out").samefile(site.parent)
    cache = (tmp_path / "out" / "cache.tgz.0").read_bytes()
    (tmp_path / "wheels" / "cache.tgz.0").write_bytes(cache[:50])  # as a large one comes home: in pieces
    (tmp_path / "wheels" / "cache.tgz.1").write_bytes(cache[50:])
    call("2", tmp_path, P=stub(tmp_path, "exit 0"), SCRATCH=str(tmp_path / "other"))
    assert (tmp_path / "other" / "cache" / "triton" / "kernel").is_file()


@pytest.mark.nightly
@pytest.mark.parametrize("number", ["1", "2"])
def test_the_rehearsal_of_a_call_ends_and_writes_its_results(number, tmp_path):
    pytest.importorskip("trl")
    pytest.importorskip("peft")
    pytest.importorskip("triton")
    done, diary = call(number, tmp_path, REHEARSE="1")
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
    assert sorted(line.split(":")[0].removeprefix("== ") for line in diary) == sorted(PARTS[number])
    assert done.stdout.endswith((tmp_path / "out" / "day.txt").read_text()[-1000:])
    assert len(done.stdout) <= 12_000
    files = {path.name for path in (tmp_path / "out").iterdir()}
    assert len(files) <= MOST_FILES, files
    records = json.loads((tmp_path / "out" / "gpu_cpu-rehearsal.json").read_text())
    rows = [name.removeprefix("row ") for name in PARTS[number] if name.startswith("row")]
    assert list(dict.fromkeys(record["row"] for record in records)) == rows
    assert all(record["ours"] > 0 for record in records)
    if number == "1":
        assert "cache.tgz.0" in files
    else:
        parts = json.loads((tmp_path / "out" / "where_cpu-rehearsal.json").read_text())
        assert parts["step"]["kernels"]
