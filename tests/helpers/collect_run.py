"""A collector in a process of its own: `python collect_run.py OUT MINE OF COUNT AGENT`."""

import asyncio
import itertools
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "examples" / "quickstart"))

import task
import tracegrad as tg


def questions(seed=0, count=None):
    return [{"prompt": each.messages()} for each in itertools.islice(task.prompts("traces", seed), count)]


async def answers(task_, policy):
    message = await policy.chat(task_["prompt"])
    return -float(len(message["content"] or "")) / 10


async def watches(task_, policy):
    """As `answers`, and leaves the file OUT/../seen once a push is known to be under way."""

    async def watch():
        while policy.session.newest == policy.version:
            await asyncio.sleep(0.01)
        Path(sys.argv[1]).with_name("seen").touch()

    watching = asyncio.ensure_future(watch())
    try:
        return await answers(task_, policy)
    finally:
        watching.cancel()


def main():
    out, mine, of, count = sys.argv[1], *map(int, sys.argv[2:5])
    agent = {"answers": answers, "watches": watches}[sys.argv[5]]
    found = tg.online.collect(out, iter(questions(count=count)), agent=agent, share=(mine, of), wait_s=120)
    assert not {"torch", "transformers"} & set(sys.modules)  # who only plays needs neither
    print(found)


if __name__ == "__main__":
    main()
