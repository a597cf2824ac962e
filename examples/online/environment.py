"""Many turns in a world of one's own: reset, step, reward.

python examples/online/environment.py --python .venv-vllm/bin/python --out out/environment
"""

import json

from clerk import TOOLS, look_up, questions, right, told

import tracegrad as tg


class Shop(tg.rollout.Environment):
    """One customer of the shop; methods may be plain or asynchronous."""

    tools = TOOLS  # descriptions for the model; `step` answers its calls

    def reset(self, task):
        """Return the first messages of the trajectory."""
        self.customer, self.messages = task["customer"], list(task["prompt"])
        return self.messages

    def step(self, message):
        """Return the answer of the shop; None ends the trajectory."""
        self.messages.append(message)
        answers = [self.answer(call["id"], call["function"]) for call in message.get("tool_calls") or []]
        self.messages += answers
        return answers or None

    def answer(self, number, call):
        """The answer to one call."""
        try:
            said = look_up(self.customer, call["name"], json.loads(call["arguments"])["item"])
        except (ValueError, KeyError, TypeError):
            said = "that is no call"
        return {"role": "tool", "tool_call_id": number, "content": said}

    def reward(self):
        """One number, or some by name."""
        return right(self.customer, self.messages)


if __name__ == "__main__":
    tg.online.train(tasks=questions(), environment=Shop, **told())
