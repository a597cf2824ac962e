"""Plain functions as tools: their schemas are read from signatures and docstrings.

    python examples/online/tools.py --python .venv-vllm/bin/python --out out/tools

Where tools need not know the task, `tools` is a list of functions.
"""

from clerk import correct, look_up, questions, told

import tracegrad as tg


def shop(task):
    """The tools of one customer's shop."""

    def price(item: str) -> str:
        """Price of one item in €."""
        return look_up(task["customer"], "price", item)

    def stock(item: str) -> str:
        """How many of an item are left."""
        return look_up(task["customer"], "stock", item)

    return [price, stock]


if __name__ == "__main__":
    tg.online.train(tasks=questions(), tools=shop, rewards=[correct], **told())
