"""`--json`: one object on standard output, what is told meanwhile on standard error; and the table of exit codes."""

import json
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import urllib.request
from pathlib import Path

import pytest

from few_probes import few  # noqa: F401
from policy_server import MODEL
from shop_files import folder, played, server, written  # noqa: F401
from tracegrad.cli import extras, main
from tracegrad.cli.args import Parser
from tracegrad.errors import ExitCode

DOCS = Path(__file__).parents[2] / "docs"
COMMAND = [sys.executable, "-m", "tracegrad.cli"]
VERBS = ("init", "train", "merge", "prepare", "doctor", "score", "view", "online", "replay", "record", "proxy")
VERBS += ("receive", "pull")


def told(capsys, *words, code=0):
    """The one object that a command prints, and what it said beside it."""
    assert main([*map(str, words), "--json"]) == code
    said = capsys.readouterr()
    return json.loads(said.out), said.err


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_takes_it(verb, capsys):
    with pytest.raises(SystemExit):
        main([verb, "--help"])
    assert "--json" in capsys.readouterr().out


def test_runs_that_play_and_the_same_again(folder, server, capsys):
    path = written(folder, servers=[server.url], out="done")
    would, said = told(capsys, "online", path, "--dry-run")
    assert (would["would"]["steps"], would["would"]["samples"]) == (2, 4)
    assert server.url in would["would"]["servers"]
    assert "[online]" in said
    found, said = told(capsys, "online", path)
    assert (found["steps"], found["stopped"], found["exit_code"], found["last"]["step"]) == (2, "done", 0, 2)
    assert Path(found["checkpoint"]).is_dir()
    assert Path(found["played"]).is_dir()
    assert said.count("step ") >= 2
    again, _ = told(capsys, "replay", folder / "done", "--model", MODEL, "--out", folder / "again", *OBJECTIVE)
    assert (again["steps"], again["exit_code"]) == (2, 0)
    assert Path(again["checkpoint"]).is_dir()


OBJECTIVE = ("--objective", "DAPO_DIRECT")


def test_what_is_recorded_and_trained_on(folder, server, capsys, monkeypatch):
    monkeypatch.chdir(folder)
    quick = ["--group-size", "2", "--rollout.max_tokens", "8"]
    command = ["record", "shop_clerk.py:agent", "--server", server.url, "--out", "o", "--tasks", "shop_clerk.py:fresh"]
    found, _ = told(capsys, *command, *quick)
    assert (found["trajectories"], found["groups"], found["failed"], found["before"]) == (6, 3, 0, 0)
    assert found["reward"] == pytest.approx(float(played(folder / "o").reward.mean()))
    trained, said = told(capsys, "train", found["file"], "--model", MODEL, "--out", "run", "--data.holdout", "0")
    assert (trained["steps"], trained["stopped"], trained["exit_code"]) == (trained["planned"], "done", 0)
    assert all(Path(path).exists() for path in trained["files"].values())
    assert "step 1/" in said
    assert "read     6 traces" in said


def test_a_proxy_says_first_where_it_is_and_at_last_what_it_has_recorded(tmp_path, server):
    command = [*COMMAND, "proxy", "--server", server.url, "--out", str(tmp_path / "o"), "--json"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        first = json.loads(process.stdout.readline())
        key = Path(first["key_file"]).read_text().strip()
        body = {"model": "clerk", "messages": [{"role": "user", "content": "2?"}], "max_tokens": 4, "temperature": 1.0}
        for path, sent in (("v1/chat/completions", body), ("reward", {"reward": 1.0})):
            asked = urllib.request.Request(f"{first['url']}/s/a/{path}", json.dumps(sent).encode())
            asked.add_header("Authorization", f"Bearer {key}")
            with urllib.request.urlopen(asked, timeout=60) as answer:
                assert answer.status == 200
        process.send_signal(signal.SIGINT)
        [last] = process.stdout.read().splitlines()
        assert "OPENAI_BASE_URL" in process.stderr.read()
    found = json.loads(last)
    assert found["trajectories"] == 1
    assert Path(found["file"]).is_file()


def table():
    """The codes of docs/reference/cli.md and what they mean."""
    page = (DOCS / "reference" / "cli.md").read_text()
    rows = re.findall(r"^\| ([0-9, ]+) \| (.+) \|$", page[page.index("| exit code |") :], re.MULTILINE)
    return {int(code): meaning for codes, meaning in rows for code in codes.split(",")}


def ended(process):
    """A code as a shell says it: 128 + signal of one that a signal ended."""
    code = process.wait(60)
    return 128 - code if code < 0 else code


def waiting():
    """A command that reads what never ends; it has begun when it has taken more than a pipe holds."""
    command = [*COMMAND, "doctor", "-", "--model", str(MODEL)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    process.stdin.write(b"\n" * (1 << 20))
    process.stdin.flush()
    return process


def test_the_table_of_exit_codes_is_true(tmp_path, group):
    traces = tmp_path / "t.jsonl"
    shutil.copy(group, traces)
    quick = ["--logprob-kind", "raw"]
    found = {0: "done", 1: "training would be wrong", 2: "no such flag", 130: "", 141: "", 143: ""}
    assert set(table()) == set(found) == {*ExitCode}
    assert main(["doctor", str(traces), "--model", str(MODEL), *quick]) == 0
    (tmp_path / "text.jsonl").write_text(json.dumps({"prompt": "a", "response": "b"}) + "\n")
    assert main(["doctor", str(tmp_path / "text.jsonl"), "--model", str(MODEL)]) == 1
    assert main(["doctor", str(tmp_path / "none.jsonl"), "--model", str(MODEL)]) == 1
    with pytest.raises(SystemExit) as usage:
        main(["doctor", str(traces), "--model", str(MODEL), "--nothing"])
    assert usage.value.code == 2
    for number, code in ((signal.SIGINT, 130), (signal.SIGTERM, 143)):
        process = waiting()
        process.send_signal(number)
        assert ended(process) == code
    process = subprocess.Popen([*COMMAND, "doctor", str(traces), "--model", str(MODEL)], stdout=subprocess.PIPE)
    process.stdout.close()
    assert ended(process) == 141


def failed(capsys, *words):
    """The code, location and exit code of a command that fails, of the one object on standard output."""
    try:
        code = main([*map(str, words), "--json"])
    except SystemExit as ended:
        code = ended.code
    found = json.loads(capsys.readouterr().out)
    assert set(found) == {"error", "exit_code"}
    assert set(found["error"]) == {"code", "message", "location"}
    assert found["exit_code"] == code
    assert found["error"]["message"].count(found["error"]["code"]) == 1
    return found["error"]["code"], found["error"]["location"], code


TRAIN = ["train", "none.jsonl", "--model", "m", "--out", "o"]
ARGUMENTS = {
    "init": ["none.jsonl"],
    "score": ["none.jsonl", "--out", "o.jsonl", "--judge", "http://h", "--judge-model", "m"],
    "train": TRAIN[1:],
    "merge": ["none", "--out", "o"],
    "prepare": ["none.jsonl", "--model", "m", "--out", "o"],
    "doctor": ["none.jsonl", "--model", "m"],
    "view": ["none.jsonl"],
    "online": ["run.toml"],
    "replay": ["none", "--model", "m", "--out", "o"],
    "record": ["mine.py:agent", "--tasks", "none", "--server", "http://h", "--out", "o"],
    "proxy": ["--server", "http://h", "--out", "o"],
    "receive": ["--out", "o"],
    "pull": ["phoenix", "http://h", "--project", "p", "--out", "o"],
}


@pytest.mark.parametrize("verb", VERBS)
def test_every_error_of_a_verb_is_one_object(verb, tmp_path, monkeypatch, capsys):
    """Wrong usage, an option of another verb, an exception nobody expected, a signal, and a missing package."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run.toml").write_text("model = 'm'\n")
    command = [verb, *ARGUMENTS[verb]]
    assert failed(capsys, *command, "--nothing") == ("TG-CLI-021", {"flag": "--nothing"}, 2)
    code, location, status = failed(capsys, *command, "--nothing.here", "1")
    assert (code in ("TG-CLI-010", "TG-CLI-012", "TG-CONFIG-001"), location, status) == (True, location, 1)
    monkeypatch.setattr(extras, "is_installed", lambda name: False)
    if verb in extras.VERB_EXTRAS or verb == "score":
        assert failed(capsys, *command) == ("TG-CLI-011", {"flag": "--judge"} if verb == "score" else None, 1)
    monkeypatch.setattr(extras, "is_installed", lambda name: True)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    set_defaults = Parser.set_defaults
    for error, expected in ((KeyError("x"), "TG-CLI-031"), (SystemExit(7), "TG-CLI-055"), (KeyboardInterrupt(), 130)):

        def fail(*_, error=error):
            raise error

        monkeypatch.setattr(
            Parser, "set_defaults", lambda self, run, fail=fail, **more: set_defaults(self, run=fail, **more)
        )
        expected, status = ("TG-CLI-029", 130) if expected == 130 else (expected, 1)
        assert failed(capsys, *command) == (expected, None, status)


def test_wrong_usage_is_one_object(capsys):
    assert failed(capsys, "trian") == ("TG-CLI-015", None, 2)
    assert failed(capsys) == ("TG-CLI-022", None, 2)
    assert failed(capsys, "train") == ("TG-CLI-022", None, 2)
    assert failed(capsys, *TRAIN, "--on-error", "skp") == ("TG-CLI-019", {"flag": "--on-error"}, 2)
    assert failed(capsys, *TRAIN, "--shard-traces") == ("TG-CLI-021", {"flag": "--shard-traces"}, 2)
    prepare = ["prepare", "none.jsonl", "--model", "m", "--out", "o"]
    assert failed(capsys, *prepare, "--workers", "x") == ("TG-CLI-022", {"flag": "--workers"}, 2)
    assert failed(capsys, *prepare, "--workers", "0") == ("TG-CLI-020", {"flag": "--workers"}, 1)


def test_an_error_has_its_place(tmp_path, capsys):
    assert failed(capsys, *TRAIN, "--optimizer.lr", "x") == ("TG-CONFIG-003", {"option": "optimizer.lr"}, 1)
    (tmp_path / "run.toml").write_text("[optimizer]\nlr = 'x'\n")
    path = str(tmp_path / "run.toml")
    assert failed(capsys, *TRAIN, "--config", path) == ("TG-CONFIG-003", {"file": path}, 1)
    (tmp_path / "t.jsonl").write_text(json.dumps({"prompt": "a", "response": "b"}) + "\n{\n")
    code, location, _ = failed(capsys, "doctor", tmp_path / "t.jsonl", "--model", tmp_path)
    assert code.startswith("TG-TOKENIZER-")
    traces = str(tmp_path / "t.jsonl")
    code, location, _ = failed(capsys, "prepare", traces, "--model", MODEL, "--out", tmp_path / "o", "--text-only")
    assert (code[:10], location["file"], location["line"]) == ("TG-FORMAT-", traces, 2)
    (tmp_path / "tasks.jsonl").write_text('"a"\n7\n')
    (tmp_path / "mine.py").write_text("async def agent(task, policy): ...\n")
    record = ["record", f"{tmp_path / 'mine.py'}:agent", "--server", "http://h", "--out", tmp_path / "o"]
    tasks = str(tmp_path / "tasks.jsonl")
    assert failed(capsys, *record, "--tasks", tasks) == ("TG-CLI-048", {"file": tasks, "line": 2}, 1)
