"""A collector in a process of its own: `python collect_run.py OUT MINE OF COUNT`."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent / "examples" / "quickstart"))


async def answers(task, policy):
    message = await policy.chat(task["prompt"])
    return -float(len(message["content"] or "")) / 10


def main():
    import tracegrad as tg
    from test_online import questions

    out, mine, of, count = sys.argv[1], *map(int, sys.argv[2:])
    found = tg.online.collect(out, iter(questions(count=count)), agent=answers, share=(mine, of), wait_s=60)
    print(found)


if __name__ == "__main__":
    main()
