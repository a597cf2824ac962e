"""Servers in the test process: `StandIn` returns the answers of a test, `Served` those of a script in vLLM's format.

The answers of a script have the ids of the example's tokenizer and template. Their logprobs are invented and constant.
"""

import asyncio
import itertools
import json
import random
import socket
import time

from aiohttp import web

import demonstrations
import task
import tracegrad as tg

END = "<|im_end|>"


CHAT = {"choices": [{"index": 0, "message": {"role": "assistant", "content": "hi"}, "finish_reason": "stop"}]}


def drop(request):
    """End the connection without an answer, as a server does with an idle one or when it dies."""
    request.transport.abort()
    return web.Response()


async def hang(request):
    """Send no answer for longer than any test waits."""
    await asyncio.sleep(3600)
    return web.Response()


async def until(condition):
    """Wait until `condition()` is true, for as long as another task or thread needs."""
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end, "it has not come within a minute"
        await asyncio.sleep(0.01)


def free_port():
    """Return an unused port for a server that starts later, outside the range of ephemeral ports."""
    while True:
        port = random.SystemRandom().randrange(20_000, 32_000)
        try:
            socket.create_server(("127.0.0.1", port)).close()
        except OSError:
            continue
        return port


class StandIn:
    """`answer(request, body)` returns a dict (200), an int (the status) or a response; `seen` has the requests."""

    def __init__(self, answer=lambda request, body: CHAT, port=0):
        self.answer, self.port = answer, port
        self.seen = []
        self.headers = []

    async def _handle(self, request):
        raw = await request.read()
        body = json.loads(raw) if raw else None
        self.seen.append((request.path_qs, body))
        self.headers.append(request.headers.copy())
        found = self.answer(request, body)
        if asyncio.iscoroutine(found):
            found = await found
        if isinstance(found, dict):
            return web.json_response(found)
        return (
            web.json_response({"error": {"message": f"said {found}"}}, status=found)
            if isinstance(found, int)
            else found
        )

    async def __aenter__(self):
        app = web.Application(client_max_size=1 << 30)
        app.router.add_route("*", "/{path:.*}", self._handle)
        self.runner = web.AppRunner(app, shutdown_timeout=0.1)
        await self.runner.setup()
        site = web.TCPSite(self.runner, "127.0.0.1", self.port)
        await site.start()
        self.port = self.runner.addresses[0][1]
        self.url = f"http://127.0.0.1:{self.port}"
        return self

    async def __aexit__(self, *_):
        await self.runner.cleanup()

    def asked(self, path):
        return [body for seen, body in self.seen if seen.split("?")[0] == path]


def good_clerk(prompt):
    """Return the script of a clerk that makes the needed calls and answers correctly."""

    def script(messages):
        answered = sum(message["role"] == "tool" for message in messages)
        plan = demonstrations.plan(prompt)
        if answered < len(plan):
            return demonstrations.call_text(plan[answered], prompt.item)
        return demonstrations.answer_text(demonstrations.right_answer(prompt), random.Random(0))

    return script


def always(text):
    return lambda messages: text


class Scripted:
    """Answer chat requests with a script. `seen` has the bodies, `asked` the sessions and salts."""

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

    def chunks(self, body):
        """Return the chunks of a stream of vLLM: fields that are not requested are null, empty chunks are not sent."""
        message, reason, ids = self.message(body)
        logprobs, wanted = body.get("logprobs"), body.get("return_token_ids")
        head = {"id": "chatcmpl-s", "object": "chat.completion.chunk", "created": 1795271306, "model": "clerk"}
        first = {"index": 0, "delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None}
        yield {**head, "choices": [first], "prompt_token_ids": self.prompt_ids(body) if wanted else None}
        calls = message.get("tool_calls")
        for number, one in enumerate(ids):
            last = number == len(ids) - 1
            text = self.tokenizer.decode([one])
            delta = {} if calls else {"content": "" if text == END else text}
            if calls and number == len(ids) - 2:
                delta = {"tool_calls": [{"index": n, **call} for n, call in enumerate(calls)]}
            if not delta and not last and not logprobs and not wanted:
                continue
            choice = {
                "index": 0,
                "delta": delta,
                "logprobs": {"content": self.entries([one], body.get("top_logprobs") or 0)} if logprobs else None,
                "finish_reason": reason if last else None,
                **({"stop_reason": None} if last else {}),
                "token_ids": [one] if wanted else None,
            }
            yield {**head, "choices": [choice]}
        if (body.get("stream_options") or {}).get("include_usage"):
            yield {
                **head,
                "choices": [],
                "usage": {"prompt_tokens": 1, "completion_tokens": len(ids), "total_tokens": 1},
            }

    def complete(self, body):
        """A legacy completion of a text."""
        ids = self.tokenizer.encode(self.script([{"role": "user", "content": body["prompt"]}]) + END).tolist()
        texts = [self.tokenizer.decode([one]) for one in ids]
        numbers = [-0.25 - one / 4096 for one in ids]
        logprobs = {"text_offset": [0] * len(ids), "token_logprobs": numbers, "tokens": texts, "top_logprobs": [None]}
        wanted = body.get("return_token_ids")
        choice = {
            "index": 0,
            "text": "".join(texts[:-1]),
            "logprobs": logprobs if body.get("logprobs") is not None else None,
            "finish_reason": "stop",
            "stop_reason": None,
            "token_ids": ids if wanted else None,
            "prompt_token_ids": self.tokenizer.encode(body["prompt"]).tolist() if wanted else None,
        }
        return {"id": "cmpl-1", "object": "text_completion", "created": 1, "model": "clerk", "choices": [choice]}


RESPONSE = {
    "object": "response",
    "status": "completed",
    "error": None,
    "output": [{"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "4"}]}],
}
MESSAGE = {
    "type": "message",
    "role": "assistant",
    "content": [{"type": "text", "text": "4"}],
    "stop_reason": "end_turn",
    "usage": {"input_tokens": 3, "output_tokens": 1},
}


class Served(StandIn):
    """A server with a script; `sent` counts chunks, `dropped` requests whose client disconnected.

    Args:
        scripted: answers, while `free` is set.
        wait_s: before each chunk of a stream, and before a complete answer.
        spoil: `(path, body, number) -> response or None`: replaces the answer of the script.
    """

    def __init__(self, scripted, wait_s=0.0, spoil=None):
        super().__init__(self.by_script)
        self.scripted, self.wait_s, self.spoil = scripted, wait_s, spoil
        self.dropped = self.sent = 0
        self.free = asyncio.Event()
        self.free.set()

    @property
    def paths(self):
        return [path for path, _ in self.seen]

    async def by_script(self, request, body):
        if request.path == "/v1/models":
            return compact({"object": "list", "data": [{"id": "clerk"}]})
        self.scripted.seen.append(body)
        if self.spoil and (spoilt := self.spoil(request.path, body, len(self.seen))) is not None:
            return spoilt
        if body.get("stream"):
            return await self.stream(request, body)
        await self.waited(request)
        if request.path == "/v1/chat/completions":
            return compact(self.scripted.respond(body))
        if request.path == "/v1/completions":
            return compact(self.scripted.complete(body))
        return compact(RESPONSE if request.path == "/v1/responses" else MESSAGE)

    async def waited(self, request):
        """Wait, and record if the client disconnects."""
        for _ in range(int(self.wait_s / 0.02)):
            await asyncio.sleep(0.02)
            if request.transport is None:
                self.dropped += 1
                return
        await self.free.wait()

    async def stream(self, request, body):
        answer = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8"})
        chat = request.path == "/v1/chat/completions"
        try:
            await answer.prepare(request)
            for chunk in self.scripted.chunks(body) if chat else [self.scripted.complete(body)]:
                await asyncio.sleep(self.wait_s)
                await answer.write(b"data: " + said(chunk).encode() + b"\n\n")
                self.sent += 1
            await answer.write(b"data: [DONE]\n\n")
        except ConnectionResetError:
            self.dropped += 1
        return answer


def said(value):
    """Return JSON in the format of vLLM's server."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


def compact(value, status=200):
    return web.json_response(value, status=status, dumps=said)


def prompts(count, kind=None, seed=3):
    """Prompts of the example's evaluation split."""
    found = (one for one in task.prompts("evaluation", seed) if kind is None or one.kind == kind)
    return list(itertools.islice(found, count))
