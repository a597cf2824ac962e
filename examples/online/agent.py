"""An agent that exists: it only gets an address, at which its calls are recorded.

    pip install openai
    python examples/online/agent.py --python .venv-vllm/bin/python --out out/agent

`tracegrad record examples/online/agent.py:agent --tasks tasks.jsonl --server URL --out DIR` plays it without training.
"""

import json

import openai
from clerk import TOOLS, look_up, questions, right, told

import tracegrad as tg


async def answer_customer(question, shop, base_url, api_key):
    """Independent of training: sends requests to a model, calls tools, and returns the conversation."""
    async with openai.AsyncOpenAI(base_url=base_url, api_key=api_key) as client:
        messages = list(question)
        for _ in range(4):
            answer = await client.chat.completions.create(model="policy", messages=messages, tools=list(TOOLS))
            message = answer.choices[0].message
            messages.append(message.model_dump(exclude_none=True, include={"role", "content", "tool_calls"}))
            for call in message.tool_calls or []:
                said = shop(call.function.name, json.loads(call.function.arguments).get("item"))
                messages.append({"role": "tool", "tool_call_id": call.id, "content": said})
            if not message.tool_calls:
                break
        return messages


async def agent(task, policy):
    """The contract: play one task with the policy, return a number, or some by name."""

    def shop(tool, item):
        return look_up(task["customer"], tool, item)

    messages = await answer_customer(task["prompt"], shop, policy.base_url, policy.key)
    return right(task["customer"], messages)


if __name__ == "__main__":
    tg.online.train(tasks=questions(), agent=agent, **told())
