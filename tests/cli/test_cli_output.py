"""Standard output under `--json` holds one object, whatever the code that a command loads prints, and however."""

import json
import os
import subprocess
import sys

import pytest

from few_probes import few  # noqa: F401
from shop_files import folder, server, written  # noqa: F401
from tracegrad.cli import args, main

COMMAND = [sys.executable, "-m", "tracegrad.cli"]
NOISE = """
import ctypes, os, subprocess, sys
def noise(where):
    print(where, "by print")
    sys.__stdout__.write(where + " by what it kept\\n")
    os.write(1, (where + " by descriptor\\n").encode())
    ctypes.CDLL(None).puts((where + " by C").encode())
    subprocess.run(["echo", where, "by a child"], check=True)
noise("import")
"""
WAYS = ("print", "what it kept", "descriptor", "C", "a child")
SCORED = """
def reward(completions, **columns):
    noise("reward")
    return [1.0 for _ in completions]
"""
PLAYED = """
tasks = [{"prompt": "2?"}]
async def agent(task, policy):
    await policy.chat([{"role": "user", "content": task["prompt"]}])
    noise("agent")
    return 1.0
"""


def run(command, folder):
    """A process that ends well, and that holds back what it prints into a pipe."""
    held = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    done = subprocess.run(command, cwd=folder, env=held, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done


def ended(command, folder):
    """What a command tells and what it says beside it."""
    done = run([*COMMAND, *command], folder)
    return json.loads(done.stdout), done.stderr


def scored(tmp_path):
    said = [{"role": "user", "content": "2?"}, {"role": "assistant", "content": "4"}]
    (tmp_path / "t.jsonl").write_text(json.dumps({"messages": said, "group": "g"}) + "\n")
    (tmp_path / "mine.py").write_text(NOISE + SCORED)
    return ["score", "t.jsonl", "--reward", "mine.py:reward", "--out", "s.jsonl"]


def test_what_a_reward_function_prints_is_no_part_of_the_object(tmp_path):
    told, said = ended([*scored(tmp_path), "--json"], tmp_path)
    assert (told["groups"], told["unscored"]) == (1, 0)
    assert [way for way in WAYS if f"import by {way}\n" not in said] == []
    # A worker process is killed at the end, with what Python and C hold back in it.
    assert {way for way in WAYS if f"reward by {way}\n" not in said} <= {"what it kept", "C"}


def test_what_an_agent_and_a_file_of_tasks_print_is_no_part_of_the_object(tmp_path, server):
    (tmp_path / "mine.py").write_text(NOISE + PLAYED)
    command = ["record", "mine.py:agent", "--tasks", "mine.py:tasks", "--server", server.url, "--out", "o", "--json"]
    told, said = ended([*command, "--group-size", "1", "--rollout.max_tokens", "2"], tmp_path)
    assert (told["trajectories"], told["failed"]) == (1, 0)
    for where in ("import", "agent"):
        assert [way for way in WAYS if f"{where} by {way}\n" not in said] == []


def test_what_a_run_prints_is_no_part_of_the_object(folder):
    (folder / "mine.py").write_text(NOISE + PLAYED)
    path = written(folder, agent="mine.py:agent", tasks="mine.py:tasks", servers=["in-process"], out="o")
    told, said = ended(["online", path, "--dry-run", "--json"], folder)
    assert told["would"]["steps"] == 2
    assert [way for way in WAYS if f"import by {way}\n" not in said] == []


CALLER = """
import os, sys
from tracegrad.cli import main
before = len(os.listdir("/proc/self/fd"))
print("before")
assert main([*sys.argv[1:], "--json"]) == 0
assert len(os.listdir("/proc/self/fd")) == before
print("after")
os.write(1, b"by descriptor")
"""


def test_a_caller_in_the_same_process_has_its_standard_output_again(tmp_path):
    done = run([sys.executable, "-c", CALLER, *scored(tmp_path)], tmp_path)
    assert done.stdout.startswith("before\n{")
    # Python holds "after" back until it ends.
    assert done.stdout.endswith("}\nby descriptorafter\n")


@pytest.mark.parametrize("closed", ["1", "2"])
def test_a_closed_descriptor_stops_nothing(tmp_path, closed):
    command = [*COMMAND, "train", "t.jsonl", "--model", "m", "--out", "o", "--print-config", "--json"]
    done = run(["bash", "-c", f'"$@" {closed}>&-', "bash", *command], tmp_path)
    assert done.stderr == ""
    assert done.stdout == "" if closed == "1" else json.loads(done.stdout)["config"]


def test_a_caller_with_a_stream_of_its_own_reads_it_there(tmp_path, capsys, monkeypatch):
    command = scored(tmp_path)
    monkeypatch.chdir(tmp_path)
    assert main([*command, "--json"]) == 0
    said = capsys.readouterr()
    assert json.loads(said.out)["groups"] == 1
    assert "import by print" in said.err
    assert args.stream() is sys.stdout


def test_a_number_that_is_none_is_told_as_json_has_it(capsys):
    args.print_json({"last": {"low": float("nan"), "ok": 0.5}, "all": [float("inf"), (float("-inf"), 1)]}, line=True)
    assert capsys.readouterr().out == '{"last": {"low": null, "ok": 0.5}, "all": [null, [null, 1]]}\n'


def test_a_config_is_printed_for_machines(capsys):
    command = ["train", "t.jsonl", "--model", "m", "--out", "o", "--print-config", "--objective", "GRPO", "--json"]
    assert main([*command, "--seed", "7", "--objective.surrogate.high", "0.3"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["config"]["train.seed"], told["config"]["objective.preset"]) == (7, "GRPO")
    assert told["config"]["objective.surrogate.high"] == 0.3
    assert "clip(r, 0.8, 1.3)" in told["objective"]
