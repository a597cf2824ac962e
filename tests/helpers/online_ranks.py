"""Two processes that train online together, and how each of them ends: run by test_online_ranks.py, which has servers.

`python online_ranks.py OUT URL...` takes a URL for each of the cases below and writes `rank-N.json` into OUT.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "examples" / "quickstart"))

import tracegrad as tg
from collect_run import questions
from online_runs import CONFIG, split
from policy_server import MODEL
from ranks import forked, joined

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "quiet": ("fsdp", {"steps_ahead": 1, "steps": 3}),
    "deaf": ("fsdp", {"steps_ahead": 0, "steps": 4}),
    "deaf, canary": ("ddp", {"steps_ahead": 1, "steps": 6}),
    "stale, canary": ("fsdp", {"steps_ahead": 1, "steps": 6}),
    "before": ("fsdp", {"steps_ahead": 1, "steps": 6, "sync": "lora"}),
    "tasks": ("ddp", {"steps_ahead": 0, "steps": 9}),
    "gone": ("fsdp", {"steps_ahead": 0, "steps": 9, "failures": 8}),
}
"""How the parameters are laid over ranks, and options; "gone" last, as it ends the process group."""


def config(name: str) -> Any:
    lora = [("train.lora_rank", 4), ("optimizer.lr", 5e-2)] if name == "before" else []
    return tg.config.update(CONFIG, [("parallel.mode", CASES[name][0]), *lora])


def case(name: str, url: str, out: Path) -> dict[str, Any]:
    async def agent(task: Any, policy: Any) -> float:
        if name == "gone" and policy.version == 1:
            raise RuntimeError("the world is gone")
        message = await policy.chat(task["prompt"])
        return -float(len(message["content"] or "")) / 10

    told: dict[str, Any] = {"objective": tg.presets.DAPO_DIRECT, "config": config(name), "servers": [url], "out": out}
    options = split(**CASES[name][1])
    tasks = iter(questions(count=3)) if name == "tasks" else questions(count=50)
    try:
        found = tg.online.train(MODEL, tasks, agent=agent, **options, sinks=(), log=lambda _: None, **told)
    except Exception as error:
        return {"said": f"{type(error).__name__}: {error}"}
    rows = [
        {key: row[key] for key in ("step", "weight_check/tokens", "weight_check/max", "staleness_max", "loss")}
        for row in found.rows
    ]
    return {"rows": rows, "stopped": found.stopped, "steps": found.steps}


def rank_main(port: int, ranks: int, rank: int, out: Path, urls: list[str]) -> None:
    joined(port, ranks, rank)
    found = {}
    for name, url in zip(CASES, urls, strict=True):
        found[name] = case(name, url, out / name)
        (out / f"rank-{rank}.json").write_text(json.dumps(found))


def main(out: Path, *urls: str) -> int:
    import transformers.models.qwen3.modeling_qwen3  # noqa: F401  (once, before the fork)

    torch.set_num_threads(1)
    codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in forked(2, rank_main, out, list(urls))]
    return max(map(abs, codes))


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), *sys.argv[2:]))
