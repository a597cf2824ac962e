"""A server in the test's own process that answers in vLLM's shape, with the example's tokenizer and template.

What it "samples" is a script from messages to text; its ids are the tokenizer's, its logprobs made up but lasting.
"""

import asyncio
import contextlib
import itertools
import json
import random
import socket

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

    def chunks(self, body):
        """The chunks of a stream as vLLM sends them: what was not asked for is null, what says nothing is not sent."""
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


class Served:
    """The stand-in behind HTTP in this process; `headers` and `paths` are what it was asked with.

    Args:
        stand_in: answers.
        wait_s: before each chunk of a stream, and before a whole answer.
        spoil: `(path, body, number) -> response or None`: answers in the stand-in's place.
    """

    def __init__(self, stand_in, wait_s=0.0, spoil=None):
        self.stand_in, self.wait_s, self.spoil = stand_in, wait_s, spoil
        self.headers, self.paths, self.dropped, self.sent = [], [], 0, 0

    async def __aenter__(self):
        import uvicorn
        from starlette.applications import Starlette
        from starlette.routing import Route

        app = Starlette(routes=[Route("/{path:path}", self.answer, methods=["GET", "POST"])])
        listening = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{listening.getsockname()[1]}"
        config = uvicorn.Config(app, log_level="error", lifespan="off", timeout_graceful_shutdown=1)
        self.server = uvicorn.Server(config)
        self.server.capture_signals = contextlib.nullcontext
        self.serving = asyncio.ensure_future(self.server.serve(sockets=[listening]))
        while not self.server.started:
            await asyncio.sleep(0.005)
        return self

    async def __aexit__(self, *_):
        self.server.should_exit = True
        await self.serving

    async def answer(self, request):
        from starlette.responses import JSONResponse, StreamingResponse

        path, body = request.url.path, json.loads(await request.body() or b"null")
        self.paths.append(path)
        self.headers.append(dict(request.headers))
        if path == "/v1/models":
            return JSONResponse({"object": "list", "data": [{"id": "clerk"}]})
        self.stand_in.seen.append(body)
        if self.spoil and (spoilt := self.spoil(path, body, len(self.paths))) is not None:
            return spoilt
        if body.get("stream"):
            return StreamingResponse(self.stream(path, body), media_type="text/event-stream")
        await self.waited(request)
        if path == "/v1/chat/completions":
            return JSONResponse(self.stand_in.respond(body))
        if path == "/v1/completions":
            return JSONResponse(self.stand_in.complete(body))
        return JSONResponse(RESPONSE if path == "/v1/responses" else MESSAGE)

    async def waited(self, request):
        """Waits, and sees whether the client goes away meanwhile."""
        for _ in range(int(self.wait_s / 0.02)):
            await asyncio.sleep(0.02)
            if await request.is_disconnected():
                self.dropped += 1
                return

    async def stream(self, path, body):
        ended = False
        try:
            chunks = self.stand_in.chunks(body) if path == "/v1/chat/completions" else [self.stand_in.complete(body)]
            for chunk in chunks:
                await asyncio.sleep(self.wait_s)
                yield b"data: " + json.dumps(chunk, ensure_ascii=False, separators=(",", ":")).encode() + b"\n\n"
                self.sent += 1
            yield b"data: [DONE]\n\n"
            ended = True
        finally:
            self.dropped += not ended


def prompts(count, kind=None, seed=3):
    """Prompts of the example's evaluation split."""
    found = (one for one in task.prompts("evaluation", seed) if kind is None or one.kind == kind)
    return list(itertools.islice(found, count))
