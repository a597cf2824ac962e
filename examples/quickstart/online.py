"""The clerk learns while it plays: vLLM on this machine's CPU, 12 steps, success before and after on fresh prompts.

    python examples/quickstart/online.py --vllm-python .venv-vllm/bin/python --out out/online

The environment below is all that the task needs. Called by `make online`.
"""

from __future__ import annotations

import argparse
import itertools
import os
import sys
import time
from pathlib import Path

import task
import tracegrad as tg
from rollout import tool_messages, wilson
from tracegrad.online import OnlineConfig, RolloutConfig

HERE = Path(__file__).parent
ENGINE = {
    "enforce_eager": True,
    "dtype": "float32",
    "max_model_len": 1024,
    "enable_auto_tool_choice": True,
    "tool_call_parser": "hermes",
    "distributed_executor_backend": "uni",
    # Only full blocks of a prompt are reused: by 128, the default on CPU, a third of all prompt tokens is not.
    "block_size": 32,
}
# One thread computes, in the engine's process. A worker process, vLLM's default on CPU, is waited for in a busy loop;
# for a model of this size several threads, or a compiled reading of logprobs, cost more than they give.
ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "TORCHDYNAMO_DISABLE": "1",
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
        """Return the answers of the tools that the message calls; the end if it calls none."""
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
    parser.add_argument("--steps-ahead", type=int, default=1)
    parser.add_argument("--prompts", type=int, default=512)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--lr", type=float, default=4e-4)
    options = parser.parse_args()
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    config = tg.config.Config(
        train=tg.config.Train(groups_per_step=32, seed=options.seed),
        optimizer=tg.config.Optimizer(lr=options.lr, beta2=0.95),
        # Late on most groups are right but for one sample: over its group's deviation that one still counts.
        advantage=tg.config.Advantage(scale="std"),
        pack=tg.config.Pack(tokens_per_row=2048, share_prefixes=True, skip_zero_weight=True),
    )
    online = OnlineConfig(steps=options.steps, steps_ahead=options.steps_ahead, max_resample_factor=1)
    began = time.perf_counter()
    found = tg.online.train(
        options.model,
        tasks("traces", options.seed),
        environment=Shop,
        objective=tg.presets.DAPO_DIRECT,
        config=config,
        online=online,
        rollout=RolloutConfig(group_size=8, max_tokens=64, max_turns=4),
        eval_tasks=list(tasks("evaluation", options.seed, options.prompts)),
        python=options.vllm_python,
        engine=ENGINE,
        out=options.out,
    )
    rows = [row for row in found.rows if "loss" in row]
    parts = {
        name: sum(row[f"time/{name}"] for row in rows) for name in ("rollout_wait", "prepare", "train", "weight_sync")
    }
    print("seconds  " + ", ".join(f"{name} {seconds:.1f}" for name, seconds in parts.items()))
    print(f"         {len(rows)} steps in {sum(parts.values()):.1f} s of {time.perf_counter() - began:.1f} s in all")
    for row in (row for row in found.rows if "eval_reward" in row):
        low, high = wilson(row["eval_reward"] * row["eval_tasks"], row["eval_tasks"])
        when = "before" if row["step"] == 0 else "after"
        print(f"{when}: success {row['eval_reward']:.1%} [{low:.1%}, {high:.1%}] on {row['eval_tasks']} fresh prompts")
    return 0


if __name__ == "__main__":
    sys.exit(main())
