"""`tracegrad online run.toml` against a policy behind HTTP: all that a file and the command line can tell arrives."""

import json
import os
import re
import stat
from dataclasses import asdict, fields

import pytest
import torch

import tracegrad as tg
from policy_server import MODEL, PolicyServer
from tracegrad import config
from tracegrad.cli import main, runfile
from tracegrad.online import Online

torch.set_num_threads(1)

CLERK = '''
import itertools

import task
import tracegrad as tg

questions = [{"prompt": each.messages()} for each in itertools.islice(task.prompts("traces", 0), 8)]
fresh = [{"prompt": each.messages()} for each in itertools.islice(task.prompts("evaluation", 0), 3)]
nothing = []
number = 7


def drawn():
    return iter(questions)


def broken():
    raise RuntimeError("no tasks today")


def breaking():
    yield questions[0]
    raise RuntimeError("no more today")


def endless():
    while True:
        yield from questions


async def agent(task_, policy):
    message = await policy.chat(task_["prompt"])
    return -float(len(message["content"] or "")) / 10


def alone(task_):
    return 1.0


class Talk(tg.rollout.Environment):
    def reset(self, task_):
        return task_["prompt"]

    def step(self, message):
        self.said = message["content"] or ""
        return None

    def reward(self):
        return -float(len(self.said))


class Theirs:
    """As TRL's environment_factory takes them."""

    def reset(self, **row):
        return None

    def price(self, item: str) -> str:
        """Price of one item.

        Args:
            item: the item.
        """
        return "7"

    def get_reward(self):
        return 0.5


def short(prompts, completions, **columns):
    return [-float(len(each[-1]["content"] or "")) for each in completions]


def one(prompts, completions, **columns):
    return [1.0 for _ in completions]


both = [short, one]


def price(item: str) -> int:
    """Price of one item.

    Args:
        item: the item.
    """
    return 7


def shop(task):
    return [price]
'''
PLAY = """
[online]
steps = 2
samples = 4
max_lag = 0
refill = 1
max_tokens = 12
turns = 1

[pack]
step_groups = 2

[optimizer]
lr = 2e-3

[advantage]
baseline = "none"

[objective]
preset = "DAPO_DIRECT"
"""


@pytest.fixture
def folder(tmp_path):
    """A folder with the files that a run names, and another that the tests work in."""
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "shop_clerk.py").write_text(CLERK)
    (tmp_path / "mine" / "tasks.jsonl").write_text('"What do 2 × red lamp cost?"\n\n{"prompt": "And 3?"}\n')
    return tmp_path / "mine"


@pytest.fixture(scope="module")
def server():
    with PolicyServer() as served:
        yield served


def written(folder, sections=PLAY, **told):
    told = {"model": str(MODEL), "tasks": "shop_clerk.py:questions", "agent": "shop_clerk.py:agent"} | told
    lines = [f"{key} = {json.dumps(value)}" for key, value in told.items() if value is not None]
    (folder / "run.toml").write_text("\n".join(lines) + "\n" + sections)
    return str(folder / "run.toml")


def rows(out):
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


def played(out):
    return tg.Traces.concatenate(tg.read(path) for path in sorted((out / "played").glob("*")))


def test_a_run_is_what_its_file_says(folder, server, capsys, monkeypatch):
    monkeypatch.chdir(folder.parent)
    told = {"environment": "shop_clerk.py:Talk", "agent": None, "evaluation": "shop_clerk.py:fresh", "out": "done"}
    told |= {"servers": [server.url], "rewards": ["shop_clerk.py:short", "shop_clerk.py:one"], "weights": [0.5, 2.0]}
    assert main(["online", written(folder, **told)]) == 0
    out = folder / "done"  # beside the file, wherever it is called
    found = rows(out)
    assert [row["step"] for row in found if "loss" in row] == [1, 2]
    assert [row["eval_tasks"] for row in found if "eval_reward" in row] == [3, 3]
    assert all(row["sync_max"] < 1e-4 for row in found if "loss" in row)
    kept = json.loads((out / "run.json").read_text())
    assert kept["online"] == asdict(Online(steps=2, samples=4, max_lag=0, refill=1, max_tokens=12, turns=1))
    assert kept["objective"] == repr(tg.presets.DAPO_DIRECT)
    assert config.load(out / "config.toml").optimizer.lr == 2e-3
    for trace in played(out):
        assert trace.reward == pytest.approx(0.5 * trace.rewards["short"] + 2.0)
        assert trace.rewards["own"] == trace.rewards["short"]
    said = capsys.readouterr().out
    assert "trained  2 steps" in said
    assert "checkpoint" in said


def test_a_run_goes_on_with_what_it_was_told(folder, server, capsys):
    path = written(folder, servers=[server.url], out="done")
    assert main(["online", path, "--online.steps", "1", "--optimizer.lr", "1e-3", "--online.samples", "3"]) == 0
    assert main(["online", path, "--online.steps", "1"]) == 1
    assert "holds a run" in capsys.readouterr().err
    (folder / "run.toml").write_text(
        (folder / "run.toml").read_text().replace("samples = 4\n", "").replace("lr = 2e-3", "")
    )
    assert main(["online", path, "--resume"]) == 0
    assert [row["step"] for row in rows(folder / "done")] == [1, 2]
    assert {row["lr"] for row in rows(folder / "done")} == {1e-3}
    assert len(played(folder / "done")) == 2 * 2 * 3


def dry(capsys, *arguments):
    """What a dry run prints: its TOML and the rest."""
    code = main(["online", *arguments, "--dry-run"])
    said = capsys.readouterr()
    return code, said.out, said.err


def other(value):
    """A value that is not the default."""
    words = {"chat": "tokens", "file": "lora"}
    return words[value] if isinstance(value, str) else value + (0.5 if isinstance(value, float) else 1)


def test_every_option_of_playing_comes_from_the_file_and_from_the_command_line(folder, server):
    names = {f.name: other(f.default) for f in fields(Online)}
    lines = "\n".join(f"{name} = {json.dumps(value)}" for name, value in names.items())
    path = folder / "run.toml"
    path.write_text(f"[online]\n{lines}\n")
    assert asdict(runfile.read(path, {}, [], False).online) == names
    path.write_text("")
    told = [(f"online.{name}", str(value)) for name, value in names.items()]
    assert asdict(runfile.read(path, {}, told, False).online) == names


def test_a_dry_run_says_that_vllm_would_run_in_this_process(folder, capsys):
    code, out, _ = dry(capsys, written(folder, PLAY, servers=["in-process"], out="o"))
    assert code == 0
    assert "servers  vLLM runs in this process" in out


def test_a_dry_run_prints_a_file_that_says_the_same_and_changes_nothing(folder, server, capsys):
    sections = PLAY + "[engine]\nmax_model_len = 99\nhf_overrides = {a = 1, b = [1, 2]}\n"
    path = written(folder, sections, servers=[server.url], out="done", weights=[1.0], rewards="shop_clerk.py:short")
    before = server.calls, server.pushes
    code, out, _ = dry(capsys, path, "--train.seed", "3", "--engine.max_num_seqs", "7")
    assert code == 0
    toml, _, rest = out.partition("would    take")
    assert "2 steps of 2 groups of 4 trajectories, from 8 tasks" in rest
    assert "which serve 'clerk'" in rest
    assert (server.calls, server.pushes) == before
    assert not (folder / "done").exists()
    (folder / "again.toml").write_text("\n".join(line for line in toml.splitlines() if not line.startswith("#")))
    ours, theirs = (
        runfile.read(folder / "run.toml", {}, [("train.seed", "3"), ("engine.max_num_seqs", "7")], False),
        runfile.read(folder / "again.toml", {}, [], False),
    )
    assert (ours.named, ours.config, ours.online, ours.engine) == (
        theirs.named,
        theirs.config,
        theirs.online,
        theirs.engine,
    )
    assert ours.engine == {"max_model_len": 99, "hf_overrides": {"a": 1, "b": [1, 2]}, "max_num_seqs": 7}


def test_the_command_line_goes_over_the_file_and_its_paths_lie_where_it_is_called(folder, server, capsys, monkeypatch):
    monkeypatch.chdir(folder.parent)
    wrong = {"model": "nowhere", "tasks": "nowhere.jsonl", "servers": ["http://127.0.0.1:9"], "out": "no"}
    path = written(folder, **wrong)
    right = ["--model", os.path.relpath(MODEL), "--tasks", "mine/tasks.jsonl", "--server", server.url]
    right += ["--out", "here", "--objective", "DR_GRPO"]
    code, out, err = dry(capsys, path, *right)
    assert code == 0, err
    assert "from 2 tasks" in out
    assert 'preset = "DR_GRPO"' in out
    assert f'out = "{folder.parent / "here"}"' in out
    for left_out in ("--model", "--tasks", "--server"):
        at = right.index(left_out)
        assert dry(capsys, path, *right[:at], *right[at + 2 :])[0] == 1
    quick = ["--online.steps", "1", "--online.samples", "2", "--pack.step_groups", "1"]
    assert main(["online", path, *right, *quick]) == 0
    assert (folder.parent / "here" / "steps.jsonl").exists()
    assert "DR_GRPO" in (folder.parent / "here" / "config.toml").read_text()


def test_a_server_is_started_by_the_interpreter_and_with_the_arguments_that_the_file_names(folder, capsys):
    """One that only writes down how it was called."""
    fake = folder / "fake"
    fake.write_text(f'#!/bin/sh\necho "$@" >> {folder}/called\nexit 3\n')
    fake.chmod(fake.stat().st_mode | stat.S_IXUSR)
    path = written(folder, PLAY + "[engine]\nmax_model_len = 99\n", python="./fake", out="o")
    assert main(["online", path, "--engine.max_num_seqs", "7"]) == 1
    assert "vLLM ended with status 3" in capsys.readouterr().err
    called = (folder / "called").read_text()
    assert "--max-model-len=99" in called
    assert "--max-num-seqs=7" in called
    assert dry(capsys, path)[0] == 1
    other = folder.parent / "other"
    other.write_text(f"#!/bin/sh\ntouch {folder}/other-called\nexit 0\n")
    other.chmod(0o755)
    code, out, _ = dry(capsys, path, "--python", str(other))
    assert code == 0
    assert f"one is started by {other}" in out
    assert (folder / "other-called").exists()


def test_a_key_is_read_from_its_file(folder, capsys):
    with PolicyServer() as server:
        server.key = "a secret of the servers"
        told = {"servers": [server.url], "out": "o"}
        assert dry(capsys, written(folder, **told))[0] == 1
        (folder / "key").write_text(server.key + "\n")
        assert dry(capsys, written(folder, **told, key_file="key"))[0] == 0
        quick = ["--online.steps", "1", "--online.samples", "2", "--pack.step_groups", "1"]
        assert main(["online", written(folder, **told, key_file="key"), *quick]) == 0
    assert "secret" not in (folder / "o" / "run.json").read_text()


@pytest.mark.parametrize(
    ("told", "first"),
    [
        ({"agent": "shop_clerk.py:Talk"}, {"reward"}),
        ({"agent": None, "environment": "shop_clerk.py:Theirs"}, {"Theirs"}),
        ({"agent": None, "rewards": "shop_clerk.py:both"}, {"short", "one"}),
        ({"agent": None, "rewards": ["shop_clerk.py:short"], "tools": "shop_clerk.py:shop"}, {"short"}),
        ({"agent": None, "rewards": "shop_clerk.py:one", "tools": ["shop_clerk.py:price"]}, {"one"}),
    ],
)
def test_every_way_to_play_can_be_named(folder, server, told, first):
    path = written(folder, servers=[server.url], out="o", **told)
    quick = ["--online.steps", "1", "--online.samples", "2", "--pack.step_groups", "1"]
    quick += ["--data.reward", "Theirs"] if first == {"Theirs"} else []
    assert main(["online", path, *quick]) == 0
    trace = played(folder / "o")[0]
    assert (set(trace.rewards) or {"reward"}) == first
    assert bool(trace.tools) == ("tools" in told or "Theirs" in str(told))


WRONG = {
    "no file": ({"agent": "shop.py:agent"}, r"shop\.py:agent: there is no file .*mine/shop\.py"),
    "no name": ({"agent": "shop_clerk.py:agnet"}, r"there is no agnet in it\. Did you mean agent\?"),
    "no colon": ({"agent": "shop_clerk.py"}, r"names nothing\. Write file\.py:name"),
    "no module": ({"agent": "not_installed_here:agent"}, r"cannot be imported: ModuleNotFoundError"),
    "one argument": (
        {"agent": "shop_clerk.py:alone"},
        r"a function of \(task_\)\. It would be called with \(task, policy\)",
    ),
    "no function": ({"agent": "shop_clerk.py:number"}, r"is a int\. It would be called"),
    "no class": ({"agent": None, "environment": "shop_clerk.py:alone"}, r"An environment is a class with reset"),
    "no reward function": ({"agent": None, "rewards": "shop_clerk.py:number"}, r"rewards are functions"),
    "a class as reward": ({"agent": None, "rewards": "shop_clerk.py:Talk"}, r"the class Talk\. rewards are functions"),
    "a tool without hints": (
        {"agent": None, "rewards": "shop_clerk.py:one", "tools": ["shop_clerk.py:short"]},
        r"tool short takes \*\*columns",
    ),
    "two ways": ({"environment": "shop_clerk.py:Talk"}, r"agent and environment are both given"),
    "no way": ({"agent": None}, r"neither an agent, an environment nor rewards"),
    "weights": ({"weights": [1.0, 2.0], "rewards": "shop_clerk.py:one"}, r"weights has 2 numbers for 1 rewards"),
    "no tasks": ({"tasks": None}, r"tasks is missing"),
    "no model": ({"model": None}, r"model is missing"),
    "no out": ({"out": None}, r"out is missing"),
    "no task file": ({"tasks": "gone.jsonl"}, r"gone\.jsonl: No such file"),
    "empty tasks": ({"tasks": "shop_clerk.py:nothing"}, r"nothing is empty\. There is nothing to play"),
    "tasks of no kind": ({"tasks": "shop_clerk.py:number"}, r"number is a int"),
    "broken tasks": (
        {"tasks": "shop_clerk.py:broken"},
        r"RuntimeError: no tasks today \(.*shop_clerk\.py:\d+ in broken\)",
    ),
    "endless evaluation": ({"evaluation": "shop_clerk.py:endless"}, r"more than 100,000 tasks"),
    "unknown key": ({"modell": "x"}, r"modell is no key here.*Did you mean model\?"),
    "a number as text": ({"model": 7}, r"model is 7\. It must be a text"),
    "servers as text": ({"servers": "http://127.0.0.1:9"}, r"must be a list of URLs"),
    "server down": ({"servers": ["http://127.0.0.1:9"]}, r"127\.0\.0\.1:9.*lists no model"),
    "no interpreter": ({"python": "/nowhere/python"}, r"nowhere/python: it cannot be run"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_cannot_be_played_is_said_before_anything_is(folder, capsys, name):
    told, why = WRONG[name]
    code, _, err = dry(capsys, written(folder, **{"out": "o", **told}))
    assert code == 1
    assert err.startswith("tracegrad: error: ")
    assert err.count("\n") == 1
    assert re.search(why, err), err


SECTIONS = {
    "[online]\nstepz = 3": r"run\.toml: online\.stepz is no option.*Did you mean online\.steps\?",
    "[online]\nsteps = 0": r"online\.steps is 0",
    "[online]\nsteps = 'x'": r"online\.steps is 'x'\. It must be a whole number",
    "[train]\nepochs = 3": r"train\.epochs has no effect on an online run",
    "[optimizer]\nlrr = 3": r"optimizer\.lrr is no option",
    "[nothing]\na = 3": r"nothing\.a is no option",
}


@pytest.mark.parametrize("section", SECTIONS)
def test_options_that_would_have_no_effect_are_refused(folder, capsys, section):
    code, _, err = dry(capsys, written(folder, section, out="o", servers=["http://127.0.0.1:9"]))
    assert code == 1
    assert re.search(SECTIONS[section], err), err


@pytest.mark.parametrize("name", runfile.OF_FILES)
def test_what_is_of_training_from_files_is_refused_on_the_command_line_too(folder, capsys, name):
    code, _, err = dry(capsys, written(folder, out="o"), f"--{name}", "1")
    assert (code, f"{name} has no effect" in err) == (1, True)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "has no line"),
        ('"a"\n7\n', r"t\.jsonl:2: no task: it is 7"),
        ('"a"\n{\n', r"t\.jsonl:2: no task"),
        ("[" * 100_000, r"t\.jsonl:1: no task"),
    ],
)
def test_a_file_of_tasks_is_read_line_by_line(folder, capsys, text, why):
    (folder / "t.jsonl").write_text(text)
    code, _, err = dry(capsys, written(folder, out="o", tasks="t.jsonl"))
    assert code == 1
    assert re.search(why, err), err


def test_tasks_that_are_iterated_end_the_run_or_say_where_they_broke(folder, server, capsys):
    quick = ["--online.samples", "2", "--pack.step_groups", "1", "--online.steps", "3"]
    told = {"servers": [server.url], "agent": "shop_clerk.py:agent"}
    assert main(["online", written(folder, **told, tasks="shop_clerk.py:breaking", out="a"), *quick]) == 1
    assert re.search(r"RuntimeError: no more today \(.*in breaking\)", capsys.readouterr().err)
    assert main(["online", written(folder, **told, tasks="shop_clerk.py:drawn", out="b"), *quick]) == 0


def test_the_example_of_a_run_file_can_be_run(server, capsys, tmp_path):
    path = MODEL.parent.parent / "online" / "run.toml"
    code, out, err = dry(capsys, str(path), "--server", server.url, "--out", str(tmp_path))
    assert code == 0, err
    assert "evaluate on 64 tasks" in out
