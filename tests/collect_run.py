"""A collector in a process of its own: `python collect_run.py OUT MINE OF COUNT AGENT`."""

import asyncio
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent / "examples" / "quickstart"))


async def answers(task, policy):
    message = await policy.chat(task["prompt"])
    return -float(len(message["content"] or "")) / 10


async def watches(task, policy):
    """As `answers`, and leaves the file OUT/../seen once a push is known to be under way."""

    async def watch():
        while policy.session.newest == policy.version:
            await asyncio.sleep(0.01)
        Path(sys.argv[1]).with_name("seen").touch()

    watching = asyncio.ensure_future(watch())
    try:
        return await answers(task, policy)
    finally:
        watching.cancel()


def main():
    import tracegrad as tg
    from test_online import questions

    out, mine, of, count = sys.argv[1], *map(int, sys.argv[2:5])
    agent = {"answers": answers, "watches": watches}[sys.argv[5]]
    found = tg.online.collect(out, iter(questions(count=count)), agent=agent, share=(mine, of), wait_s=120)
    print(found)


if __name__ == "__main__":
    main()
