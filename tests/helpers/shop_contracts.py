"""Play the example's shop as agent, tools and environment."""

import asyncio
import json

import task as clerk
import tracegrad as tg
from tracegrad.rollout import Environment, run_rollout


def run(contract, task, chat, **options):
    return asyncio.run(run_rollout(contract, task, chat=chat, **options))


def read(played):
    """The record, as it comes back from a file."""
    return tg.Traces.from_records([json.loads(json.dumps(played.record, allow_nan=False))])


def shop_tools(prompt):
    def price(item: str) -> dict:
        """Price of one item in €."""
        return json.loads(clerk.execute(prompt, "price", {"item": item}))

    async def stock(item: str) -> dict:
        """How many of an item are left."""
        return json.loads(clerk.execute(prompt, "stock", {"item": item}))

    return [price, stock]


class Clerk(Environment):
    tools = clerk.TOOLS

    async def reset(self, task):
        self.prompt, self.messages = task["question"], task["question"].messages()
        return list(self.messages)

    def step(self, message):
        self.messages.append(message)
        if not message.get("tool_calls"):
            return None
        import record

        answers = record.tool_messages(self.prompt, message)
        self.messages += answers
        return answers

    async def reward(self):
        return {"correct": clerk.check(self.prompt, self.messages), "turns": len(self.messages)}


class TrlShop:
    """As TRL's `environment_factory` takes it."""

    made = 0

    def __init__(self):
        TrlShop.made += 1

    def reset(self, prompt, question, **row):
        self.question, self.asked = question, []
        return None

    def price(self, item: str) -> str:
        """Price of one item in €.

        Args:
            item: its name
        """
        self.asked.append("price")
        return clerk.execute(self.question, "price", {"item": item})

    def stock(self, item: str) -> str:
        """How many of an item are left.

        Args:
            item: its name
        """
        self.asked.append("stock")
        return clerk.execute(self.question, "stock", {"item": item})

    def _hidden(self):
        raise AssertionError

    def get_reward(self):
        return float(self.asked == ["stock", "price"])


def correct(task, prompt, completion):
    return clerk.check(task["question"], completion)
