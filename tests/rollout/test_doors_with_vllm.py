"""Each door of examples/online against a real vLLM: what it plays is exact, proven, and trained on for a step."""

import json
import os
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

import tracegrad as tg
from running_commands import Running
from tracegrad.cli import main

pytestmark = pytest.mark.vllm
DOORS = Path(__file__).parents[2] / "examples" / "online"
QUICK = ["--steps", "1", "--groups", "2", "--samples", "4"]


@pytest.fixture
def door(served, tmp_path, monkeypatch):
    """Runs an example and gives its rows and traces."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(DOORS))
    monkeypatch.setenv("JUDGE_URL", served)
    monkeypatch.setenv("JUDGE_MODEL", "clerk")

    def run(name):
        told = [name, "--server", served, "--out", str(tmp_path / "out"), *QUICK]
        monkeypatch.setattr(sys, "argv", told)
        runpy.run_path(str(DOORS / name), run_name="__main__")
        return checked(tmp_path / "out")

    return run


def checked(out):
    """Rows and traces of a run, whose steps are proven and whose tokens are exact."""
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    traces = tg.Traces.concatenate(tg.read(path) for path in sorted((out / "played").iterdir()))
    assert len(traces) >= 8
    steps = [row for row in rows if "loss" in row]
    assert all(row["weight_check/max"] < 1e-4 and row["tokens_lost"] == 0 for row in steps)
    assert not any("failure" in trace.to_dict() for trace in traces)
    return rows, traces


@pytest.mark.parametrize("name", ["one_turn", "tools", "environment", "agent", "trl_environment", "judge"])
def test_a_door_plays_and_trains(door, name, tmp_path):
    _, traces = door(f"{name}.py")
    turns = max(len(trace.generations) for trace in traces)
    if name in ("one_turn", "judge"):
        assert turns == 1
    else:
        assert turns > 1
        assert {tool["function"]["name"] for tool in traces[0].tools} == {"price", "stock"}
    assert {trace.reward for trace in traces} & {0.0, 1.0} or name in ("one_turn", "judge")
    if name == "one_turn":
        assert set(traces[0].rewards) == {"correct", "short"}
    if name == "judge":
        assert not (tmp_path / "verdicts.jsonl").exists()  # the current folder
        verdicts = [json.loads(line) for line in (tmp_path / "out" / "verdicts.jsonl").read_text().splitlines()]
        assert verdicts
        print("\njudge:", [verdict["scores"] for verdict in verdicts], [verdict["errors"] for verdict in verdicts][:1])


@pytest.mark.nightly
def test_an_environment_of_verifiers_plays_and_trains(request, served, tmp_path):
    """The real package, whose agent streams through its own proxy and ours."""
    python = request.config.getoption("--verifiers-python")
    assert python, "pass --verifiers-python: the interpreter of an environment that holds verifiers 0.4"
    agent = tg.rollout.verifiers("verifiers_clerk", python=python, paths=[DOORS])
    tasks = agent.tasks(8)
    assert tasks[0]["data"]["total"] == "20 €"
    tg.online.train(
        DOORS.parent / "quickstart" / "model",
        tasks,
        agent=agent,
        objective=tg.presets.DAPO_DIRECT,
        config=tg.config.Config(train=tg.config.Train(groups_per_step=2), optimizer=tg.config.Optimizer(lr=4e-4)),
        online=tg.online.OnlineConfig(steps=1, steps_ahead=0),
        rollout=tg.online.RolloutConfig(group_size=4, max_tokens=48),
        servers=[served],
        out=tmp_path / "out",
    )
    _, traces = checked(tmp_path / "out")
    assert {trace.reward for trace in traces} <= {0.0, 1.0}
    for trace in traces:
        total = trace.metadata["task"]["data"]["total"]
        assert trace.reward == float(total in (trace.messages[-1]["content"] or ""))


def test_a_run_file_plays_evaluates_and_trains(served, tmp_path):
    """The example's, without its [engine], which is of the server that is running already, and with two fresh tasks."""
    head, _, rest = (DOORS / "run.toml").read_text().partition("[engine]")
    head = head.replace('"../', f'"{DOORS.parent}/')
    for file in ("clerk.py", "environment.py"):
        head = head.replace(f'"{file}:', f'"{DOORS}/{file}:')
    fresh = runpy.run_path(str(DOORS / "clerk.py"))["fresh"]()[:2]
    (tmp_path / "two.jsonl").write_text("".join(json.dumps(each) + "\n" for each in fresh))
    head = head.replace(f'eval_tasks = "{DOORS}/clerk.py:fresh"', 'eval_tasks = "two.jsonl"')
    (tmp_path / "run.toml").write_text(head + "[online]" + rest.partition("[online]")[2])
    quick = ["--server", served, "--out", str(tmp_path / "out"), "--online.steps", "1", "--train.groups_per_step", "2"]
    assert main(["online", str(tmp_path / "run.toml"), *quick]) == 0
    rows, _ = checked(tmp_path / "out")
    assert [row["eval_tasks"] for row in rows if "eval_tasks" in row] == [2, 2]


def test_the_agent_is_recorded_without_training(served, tmp_path):
    told = [str(DOORS / "agent.py") + ":agent", "--server", served, "--out", str(tmp_path / "out"), "--group-size", "2"]
    told += ["--tasks", str(DOORS / "clerk.py") + ":questions", "--groups", "3", "--rollout.max_tokens", "64"]
    assert main(["record", *told]) == 0
    [path] = (tmp_path / "out" / "played").iterdir()
    traces = tg.read(path)
    assert len(traces) == 6
    assert (
        tg.align(traces, tg.Tokenizer.from_pretrained(DOORS.parent / "quickstart" / "model")).alignment_report.rate == 0
    )


def test_any_program_is_recorded(served, tmp_path):
    with Running(tmp_path / "o", served) as proxy:
        command = ["sh", str(DOORS / "any_program.sh"), proxy.url, str(tmp_path / "o" / "key")]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, env=dict(os.environ))
        assert done.returncode == 0, done.stdout + done.stderr
        assert proxy.stop()[0] == 0
    [path] = (tmp_path / "o" / "played").iterdir()
    traces = tg.read(path)
    assert [trace.group for trace in traces] == ["lamp"] * 4
    assert [f" lamp-{n}: {trace.reward:.0f}" for n, trace in enumerate(traces, 1)] == [
        line.rpartition("}")[2] for line in done.stdout.splitlines()
    ]
    assert all(trace.generations[0].tokens for trace in traces)
