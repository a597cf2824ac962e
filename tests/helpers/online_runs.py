"""Run the online loop against a server in the test process, and compare two runs."""

from dataclasses import fields
from pathlib import Path

import torch
from safetensors.torch import load_file

import tracegrad as tg
from collect_run import questions
from policy_server import MODEL
from tracegrad.online import OnlineConfig, RolloutConfig

PLAY = {"steps": 2, "group_size": 4, "steps_ahead": 0, "max_resample_factor": 1, "max_tokens": 12, "max_turns": 1}

CONFIG = tg.config.Config(
    train=tg.config.Train(groups_per_step=2),
    optimizer=tg.config.Optimizer(lr=2e-3),
    advantage=tg.config.Advantage(baseline="none"),
)


def split(**told):
    """Options over `PLAY`, as `train` takes them."""
    told, of_trainer = {**PLAY, **told}, {field.name for field in fields(OnlineConfig)}
    online = {name: value for name, value in told.items() if name in of_trainer}
    return {
        "online": OnlineConfig(**online),
        "rollout": RolloutConfig(**{n: v for n, v in told.items() if n not in of_trainer}),
    }


def run(
    server, out, *, config=CONFIG, resume=False, agent=None, tasks=None, how=None, servers=(), eval_tasks=(), **more
):
    log, online = more.pop("log", lambda _: None), more

    async def answers(task_, policy):
        message = await policy.chat(task_["prompt"])
        return -float(len(message["content"] or "")) / 10

    told = {**(how or {"agent": agent or answers}), "objective": tg.presets.DAPO_DIRECT, "config": config}
    tasks = questions(count=8) if tasks is None else tasks
    told.setdefault("eval_tasks", eval_tasks)
    where = {"servers": servers or [server.url], "out": out, "resume": resume, "log": log}
    return tg.online.train(MODEL, tasks, **told, **where, **split(**online), sinks=())


def weights(folder: Path):
    return load_file(folder / "model.safetensors")


def assert_same(ours, theirs):
    assert ours.keys() == theirs.keys()
    for name, value in ours.items():
        assert torch.equal(value, theirs[name]), name
