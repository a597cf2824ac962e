"""A run of the online loop in a process of its own, which tests kill: `python online_run.py URL OUT STEPS [resume]`."""

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "examples" / "quickstart"))
torch.set_num_threads(1)


async def answers(task, policy):
    message = await policy.chat(task["prompt"])
    return -float(len(message["content"] or "")) / 10


def main():
    import tracegrad as tg
    from collect_run import questions
    from online_runs import CONFIG, split
    from policy_server import MODEL

    url, out, steps, *resume = sys.argv[1:]
    config = tg.config.update(CONFIG, [("checkpoint.every_steps", 2)])
    options = split(steps=int(steps), steps_ahead=1, max_tokens=6)
    told = {"objective": tg.presets.DAPO_DIRECT, "config": config, "servers": [url], "out": out, "sinks": ()}
    tg.online.train(MODEL, questions(count=50), agent=answers, **options, resume=bool(resume), **told)


if __name__ == "__main__":
    main()
