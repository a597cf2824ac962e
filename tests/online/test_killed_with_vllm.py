"""A real vLLM that is killed while it plays: the run says so, and goes on with a new one to the end of its replay."""

import os
import random
import signal
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import online
import tracegrad as tg
from tracegrad.errors import ServerError
from tracegrad.online import OnlineConfig, RolloutConfig
from tracegrad.online.buffer import ConsumedGroups, GroupReader
from tracegrad.rollout.launch import WATCHDOG

pytestmark = [pytest.mark.vllm, pytest.mark.nightly]  # ten servers of its own
KILLS, STEPS, GROUPS = 10, 24, 4
CONFIG = tg.config.Config(train=tg.config.Train(groups_per_step=GROUPS), optimizer=tg.config.Optimizer(lr=4e-4))


def kill():
    """Kills the server of this process with all that it started: a group of its own, below its watchdog."""
    me = os.getpid()
    for keeper in Path(f"/proc/{me}/task/{me}/children").read_text().split():
        if WATCHDOG.name.encode() in Path(f"/proc/{keeper}/cmdline").read_bytes():
            for child in Path(f"/proc/{keeper}/task/{keeper}/children").read_text().split():
                os.killpg(int(child), signal.SIGKILL)


def run(request, example, out, kill_after=0):
    """The run in the folder, begun or gone on with; it raises once its server is killed."""
    left = [kill_after]

    class Killing(online.Shop):
        async def step(self, message):
            left[0] -= 1
            if left[0] == 0:
                kill()
            return await super().step(message)

    return tg.online.train(
        example / "model",
        list(online.tasks("traces", 0, STEPS * GROUPS)),
        environment=Killing,
        objective=tg.presets.DAPO_DIRECT,
        config=CONFIG,
        online=OnlineConfig(steps=STEPS, steps_ahead=1, max_resample_factor=1),
        rollout=RolloutConfig(group_size=4, max_tokens=64, max_turns=4),
        python=request.config.getoption("--vllm-python"),
        engine=online.ENGINE,
        out=out,
        resume=out.exists(),
        sinks=(),
        log=lambda _: None,
    )


def test_ten_kills_of_a_server_lose_nothing(request, example, tmp_path, monkeypatch):
    for name, value in online.ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    chance = random.Random(0)
    for _ in range(KILLS):
        began = time.monotonic()
        with pytest.raises(ServerError, match=r"TG-ROLLOUT-054.*server\.log") as raised:
            run(request, example, tmp_path / "run", chance.randint(5, 60))
        print(f"\n{time.monotonic() - began:.0f} s: {raised.value}")
    found = run(request, example, tmp_path / "run")
    played = GroupReader(tmp_path / "run" / "played").read_new()
    assert sorted(int(traces.groups[0]) for _, traces in played) == list(range(STEPS * GROUPS))
    assert all(len(traces) == 4 for _, traces in played)
    steps = ConsumedGroups(tmp_path / "run").steps
    assert sorted(place for step in steps for place in step.groups) == sorted(place for place, _ in played)
    again = tg.online.replay(
        tmp_path / "run", example / "model", objective=tg.presets.DAPO_DIRECT, config=CONFIG, out=tmp_path / "again"
    )
    ours, theirs = (load_file(each.checkpoint / "model.safetensors") for each in (found, again))
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
