"""Scores of a judge, relative within a group, in addition to a checker. Any OpenAI-compatible model can be the judge.

    python examples/online/judge.py --python .venv-vllm/bin/python --out out/judge

JUDGE_URL and JUDGE_MODEL name it. Where its answer cannot be read twice in a row, its score is left out, never 0. Where
it does not answer at all, the function raises, and the run reports it. Verdicts are stored in verdicts.jsonl of --out.
"""

import json
import os
from pathlib import Path

from clerk import correct, customers, told

import tracegrad as tg
from tracegrad.rollout.client import Servers

URL, MODEL = os.environ.get("JUDGE_URL", "http://127.0.0.1:8001"), os.environ.get("JUDGE_MODEL", "judge")
RUBRIC = "- A friendly answer with the right total scores most.\n- A wrong total scores 0."


async def relative(prompts, completions, **columns):
    """A reward function that may be asynchronous, as it only waits for the judge."""
    async with Servers([URL], model=MODEL, timeout_s=60) as servers:
        judge = tg.rewards.Judge(servers.chat, rubric=RUBRIC, sampling={"max_tokens": 512}, on_vote=keep)
        judged = await judge.score([[*prompt, *said] for prompt, said in zip(prompts, completions, strict=True)])
    if judged.errors and not any(answer for verdict in judged.verdicts for answer in verdict.answers):
        raise ConnectionError(f"the judge does not answer: {judged.errors[0]}")
    return [None if score != score else float(score) for score in judged.scores]


def keep(verdict):
    """Every verdict with its prompt, so that `Judge.rejudge` can judge the run from the file."""
    if OUT is not None:
        with (OUT / "verdicts.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps(verdict) + "\n")


OUT = None
if __name__ == "__main__":
    options = told()
    OUT = Path(options["out"])
    tg.online.train(tasks=customers("offer"), rewards=[correct, relative], reward_weights=[1.0, 0.5], **options)
