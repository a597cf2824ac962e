"""The clerk learns while it plays: vLLM on this machine's CPU, 12 steps, success before and after on fresh prompts.

    python examples/quickstart/online.py --vllm-python .venv-vllm/bin/python --out out/online

The environment below is all that the task needs. Called by `make online`.
"""

from __future__ import annotations

import argparse
import itertools
import sys
import time
from pathlib import Path

import task
import tracegrad as tg
from rollout import tool_messages, wilson
from tracegrad.online import Online

HERE = Path(__file__).parent
ENGINE = {
    "enforce_eager": True,
    "dtype": "float32",
    "max_model_len": 1024,
    "enable_auto_tool_choice": True,
    "tool_call_parser": "hermes",
}


class Shop(tg.rollout.Environment):
    """One customer: tools answer from a hidden world, and the last message is checked."""

    tools = task.TOOLS

    async def reset(self, task_: dict) -> list[dict]:
        """The customer's question."""
        self.prompt = task.Prompt(**task_)
        self.messages = self.prompt.messages()
        return self.messages

    async def step(self, message: dict) -> list[dict] | None:
        """The answers of the tools that the message calls; the end where it calls none."""
        self.messages = [*self.messages, message]
        answers = tool_messages(self.prompt, message) if message.get("finish_reason") == "tool_calls" else []
        self.messages += answers
        return answers or None

    async def reward(self) -> float:
        """1 for a right answer."""
        return task.check(self.prompt, self.messages)


def tasks(split: str, seed: int, count: int | None = None):
    """Prompts of a split as dicts; without a count they do not end."""
    return ({**vars(prompt)} for prompt in itertools.islice(task.prompts(split, seed), count))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="folder of the run")
    parser.add_argument("--vllm-python", help="interpreter of an environment that has vLLM; default this one")
    parser.add_argument("--model", type=Path, default=HERE / "model")
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--max-lag", type=int, default=0)
    parser.add_argument("--prompts", type=int, default=512)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--lr", type=float, default=4e-4)
    options = parser.parse_args()
    config = tg.config.Config(train=tg.config.Train(seed=options.seed), optimizer=tg.config.Optimizer(lr=options.lr))
    online = Online(steps=options.steps, max_lag=options.max_lag, max_tokens=64, turns=4)
    began = time.perf_counter()
    found = tg.online.train(
        options.model,
        tasks("traces", options.seed),
        environment=Shop,
        objective=tg.presets.DAPO_DIRECT,
        config=config,
        online=online,
        evaluation=list(tasks("evaluation", options.seed, options.prompts)),
        python=options.vllm_python,
        engine=ENGINE,
        out=options.out,
    )
    rows = [row for row in found.rows if "loss" in row]
    parts = {name: sum(row[f"seconds_{name}"] for row in rows) for name in ("waited", "prepared", "trained", "pushed")}
    print("seconds  " + ", ".join(f"{name} {seconds:.1f}" for name, seconds in parts.items()))
    print(f"         {len(rows)} steps in {sum(parts.values()):.1f} s of {time.perf_counter() - began:.1f} s in all")
    for row in (row for row in found.rows if "eval_reward" in row):
        low, high = wilson(row["eval_reward"] * row["eval_tasks"], row["eval_tasks"])
        when = "before" if row["step"] == 0 else "after"
        print(f"{when}: success {row['eval_reward']:.1%} [{low:.1%}, {high:.1%}] on {row['eval_tasks']} fresh prompts")
    return 0


if __name__ == "__main__":
    sys.exit(main())
