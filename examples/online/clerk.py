"""Shared code of the examples of this folder: the shop's customers as tasks, a checker, and a command line.

The task itself is examples/quickstart/task.py. Not an example.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Iterator
from pathlib import Path

QUICKSTART = Path(__file__).parent.parent / "quickstart"
sys.path.append(str(QUICKSTART))

import task  # noqa: E402
import tracegrad as tg  # noqa: E402
from task import TOOLS  # noqa: E402

__all__ = ["TOOLS", "correct", "customers", "fresh", "look_up", "questions", "right", "told"]

ENGINE = {"enforce_eager": True, "dtype": "float32", "max_model_len": 1024}
ENGINE |= {"enable_auto_tool_choice": True, "tool_call_parser": "hermes"}


def customers(*kinds: str, split: str = "traces", seed: int = 0) -> Iterator[dict]:
    """Yield endless tasks: the first messages of a customer, and the data for a checker."""
    for prompt in task.prompts(split, seed):
        if prompt.kind in (kinds or task.KINDS):
            yield {"prompt": prompt.messages(), "customer": vars(prompt)}


def questions() -> Iterator[dict]:
    """Tasks of all kinds."""
    return customers()


def fresh() -> list[dict]:
    """Tasks for evaluations."""
    return list(itertools.islice(customers(split="evaluation"), 64))


def right(customer: dict, messages: list[dict]) -> float:
    """1 for a right last message."""
    return task.check(task.Prompt(**customer), messages)


def correct(prompts, completions, customer, **columns) -> list[float]:
    """The same as a reward function in TRL's convention, over a group; `customer` is a column of the tasks."""
    return [right(one, completion) for one, completion in zip(customer, completions, strict=True)]


def look_up(customer: dict, tool: str, item: str) -> str:
    """Return the result of a tool of the shop."""
    return task.execute(task.Prompt(**customer), tool, {"item": item})


def told() -> dict:
    """Arguments of `tg.online.train` from the command line."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", required=True, help="folder of the run")
    parser.add_argument("--server", help="URL of a running vLLM; default: one is started")
    parser.add_argument("--python", help="interpreter of an environment that has vLLM, to start one")
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--groups", type=int, default=16, help="in a step")
    parser.add_argument("--samples", type=int, default=8, help="trajectories in a group")
    options = parser.parse_args()
    server = {"servers": [options.server]} if options.server else {"python": options.python, "engine": ENGINE}
    train, optimizer = tg.config.Train(groups_per_step=options.groups), tg.config.Optimizer(lr=4e-4)
    return {
        "model": QUICKSTART / "model",
        "objective": tg.presets.DAPO_DIRECT,
        "config": tg.config.Config(train=train, optimizer=optimizer),
        "online": tg.online.OnlineConfig(steps=options.steps),
        "rollout": tg.online.RolloutConfig(group_size=options.samples, max_tokens=64, max_turns=4),
        "out": options.out,
        **server,
    }
