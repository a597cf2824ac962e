"""A server in the test's own process that answers in vLLM's shape, with the example's tokenizer and template.

What it "samples" is a script from messages to text; its ids are the tokenizer's, its logprobs made up but lasting.
"""

import asyncio
import itertools
import json
import random

import demonstrations
import task
import tracegrad as tg

END = "<|im_end|>"


def good_clerk(prompt):
    """The script of a clerk who looks up what is needed and answers rightly."""

    def script(messages):
        answered = sum(message["role"] == "tool" for message in messages)
        plan = demonstrations.plan(prompt)
        if answered < len(plan):
            return demonstrations.call_text(plan[answered], prompt.item)
        return demonstrations.answer_text(demonstrations.right_answer(prompt), random.Random(0))

    return script


def always(text):
    return lambda messages: text


class StandIn:
    """Answers chat requests by a script; `seen` holds the bodies, `asked` the sessions and salts."""

    def __init__(self, example, script, seconds=0.0):
        self.tokenizer = tg.Tokenizer.from_pretrained(example / "model")
        self.script, self.seconds = script, seconds
        self.seen, self.asked, self.numbers = [], [], itertools.count()

    async def chat(self, body, *, session, salt=None):
        self.seen.append(json.loads(json.dumps(body)))
        self.asked.append((session, salt))
        await asyncio.sleep(self.seconds)
        return self.respond(body)

    def sampled(self, body):
        """Text and ids of an answer, cut at max_tokens."""
        ids = self.tokenizer.encode(self.script(body["messages"]) + END).tolist()
        cut = ids[: body.get("max_tokens") or len(ids)]
        return ids[-1] != cut[-1] or len(cut) < len(ids), cut

    def prompt_ids(self, body):
        return self.tokenizer.render_ids(body["messages"], body.get("tools"), add_generation_prompt=True).tolist()

    def entries(self, ids, top):
        texts = [self.tokenizer.decode([one]) for one in ids]
        return [
            {"token": text, "logprob": -0.25 - one / 4096, "bytes": list(text.encode()), "top_logprobs": [None] * top}
            for one, text in zip(ids, texts, strict=True)
        ]

    def message(self, body):
        """The assistant message, finish reason and ids of an answer."""
        cut, ids = self.sampled(body)
        text = self.tokenizer.decode(ids).removesuffix(END)
        content, calls = task.parse_tool_calls(text) if body.get("tools") and not cut else (text, [])
        message = {"role": "assistant", "content": content, "refusal": None, "reasoning": None}
        if calls:
            message["tool_calls"] = [
                {"id": f"call-{next(self.numbers)}", "type": "function", "function": call} for call in calls
            ]
        return message, "length" if cut else "tool_calls" if calls else "stop", ids

    def respond(self, body):
        message, reason, ids = self.message(body)
        wanted = body.get("return_token_ids")
        choice = {
            "index": 0,
            "message": message,
            "logprobs": {"content": self.entries(ids, body.get("top_logprobs") or 0)} if body.get("logprobs") else None,
            "finish_reason": reason,
            "stop_reason": None,
            "token_ids": ids if wanted else None,
            "routed_experts": None,
        }
        prompt = self.prompt_ids(body)
        return {
            "id": f"chatcmpl-{next(self.numbers)}",
            "object": "chat.completion",
            "created": 1795271306,
            "model": body.get("model", "clerk"),
            "choices": [choice],
            "system_fingerprint": None,
            "usage": {"prompt_tokens": len(prompt), "completion_tokens": len(ids), "total_tokens": len(prompt + ids)},
            "prompt_logprobs": None,
            "prompt_token_ids": prompt if wanted else None,
        }


def prompts(count, kind=None, seed=3):
    """Prompts of the example's evaluation split."""
    found = (one for one in task.prompts("evaluation", seed) if kind is None or one.kind == kind)
    return list(itertools.islice(found, count))
