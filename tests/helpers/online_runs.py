"""Run the online loop against a server in the test process, and compare two runs."""

from dataclasses import fields
from pathlib import Path

import torch
from safetensors.torch import load_file

import tracegrad as tg
from collect_run import questions
from policy_server import MODEL
from tracegrad.online import OnlineConfig, RolloutConfig

PLAY = {"steps": 2, "samples": 4, "steps_ahead": 0, "refill": 1, "max_tokens": 12, "turns": 1}

CONFIG = tg.config.Config(
    pack=tg.config.Pack(step_groups=2),
    optimizer=tg.config.Optimizer(lr=2e-3),
    advantage=tg.config.Advantage(baseline="none"),
)


def split(**told):
    """Options over `PLAY`, as `train` takes them."""
    told, of_trainer = {**PLAY, **told}, {field.name for field in fields(OnlineConfig)}
    online = {name: value for name, value in told.items() if name in of_trainer}
    return {
        "online": OnlineConfig(**online),
        "play": RolloutConfig(**{n: v for n, v in told.items() if n not in of_trainer}),
    }


def run(
    server, out, *, config=CONFIG, resume=False, agent=None, tasks=None, how=None, servers=(), evaluation=(), **more
):
    say, online = more.pop("say", lambda _: None), more

    async def answers(task_, policy):
        message = await policy.chat(task_["prompt"])
        return -float(len(message["content"] or "")) / 10

    told = {**(how or {"agent": agent or answers}), "objective": tg.presets.DAPO_DIRECT, "config": config}
    tasks = questions(count=8) if tasks is None else tasks
    told.setdefault("evaluation", evaluation)
    where = {"servers": servers or [server.url], "out": out, "resume": resume, "say": say}
    return tg.online.train(MODEL, tasks, **told, **where, **split(**online), sinks=())


def weights(folder: Path):
    return load_file(folder / "model.safetensors")


def assert_same(ours, theirs):
    assert ours.keys() == theirs.keys()
    for name, value in ours.items():
        assert torch.equal(value, theirs[name]), name
