"""Calls a second of the recording proxy on one core: 64 sampled tokens with logprobs each, server in another process.

The clients are a third process. CPU seconds are the proxy's own, so that calls a second of a core is what it could do
alone; wall time says what came through here.

    python benches/proxy.py --calls 4000 --out benches/results/proxy.json
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import os
import platform
import socket
import time
from pathlib import Path

import aiohttp

KEY = "a key of this bench"
TOKENS, PROMPT = 64, 256


def response(stream: bool) -> bytes:
    """What a vLLM answers: 64 tokens with logprobs and ids after a prompt of 256."""
    entries = [
        {"token": f" w{one}", "logprob": -0.9253435134887695 - one / 7, "bytes": [32, 119, 48], "top_logprobs": []}
        for one in range(TOKENS)
    ]
    head = {"id": "chatcmpl-1", "object": "chat.completion", "created": 1795271306, "model": "clerk"}
    ids, prompt = list(range(1000, 1000 + TOKENS)), list(range(5000, 5000 + PROMPT))
    if stream:
        choice = {"index": 0, "delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None}
        chunks = [{**head, "choices": [choice], "prompt_token_ids": prompt}]
        for one, entry in zip(ids, entries, strict=True):
            delta = {"content": entry["token"]}
            told = {"delta": delta, "logprobs": {"content": [entry]}, "finish_reason": None, "token_ids": [one]}
            chunks.append({**head, "choices": [{"index": 0, **told}]})
        chunks[-1]["choices"][0]["finish_reason"] = "stop"
        written = [json.dumps(chunk, separators=(",", ":")) for chunk in chunks]
        return "".join(f"data: {text}\n\n" for text in [*written, "[DONE]"]).encode()
    message = {"role": "assistant", "content": " w" * TOKENS, "refusal": None, "annotations": None, "reasoning": None}
    choice = {"index": 0, "message": message, "logprobs": {"content": entries}, "finish_reason": "stop"}
    choice |= {"stop_reason": None, "token_ids": ids}
    usage = {"prompt_tokens": PROMPT, "completion_tokens": TOKENS, "total_tokens": PROMPT + TOKENS}
    whole = {**head, "choices": [choice], "usage": usage, "prompt_token_ids": prompt}
    return json.dumps(whole, separators=(",", ":")).encode()


def serve(listening: socket.socket, stream: bool) -> None:
    """A server that answers every request alike, on the bare protocol so that it takes little of the machine."""
    body = response(stream)
    kind = "text/event-stream" if stream else "application/json"
    answer = f"HTTP/1.1 200 OK\r\ncontent-type: {kind}\r\ncontent-length: {len(body)}\r\n\r\n".encode() + body

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while not reader.at_eof():
            head = await reader.readuntil(b"\r\n\r\n")
            length = next(
                int(line.split(b":")[1]) for line in head.split(b"\r\n") if line.lower().startswith(b"content-length")
            )
            await reader.readexactly(length)
            writer.write(answer)
            await writer.drain()

    async def main() -> None:
        async with await asyncio.start_server(handle, sock=listening) as server:
            await server.serve_forever()

    asyncio.run(main())


def drive(url: str, calls: int, clients: int, stream: bool) -> None:
    """`clients` sessions at once, four calls and a reward each, until so many calls are made."""
    messages = [{"role": "system", "content": "You are a clerk. " * 20}, {"role": "user", "content": "2 x 20? " * 10}]
    body = json.dumps({"model": "clerk", "messages": messages, "max_tokens": TOKENS, "stream": stream}).encode()
    headers = {"Authorization": f"Bearer {KEY}", "Content-Type": "application/json"}

    async def one(session: aiohttp.ClientSession, number: int) -> None:
        for trajectory in range(calls // clients // 4):
            base = f"{url}/s/c{number}-{trajectory}"
            for _ in range(4):
                async with session.post(f"{base}/v1/chat/completions", data=body) as answer:
                    assert answer.status == 200, await answer.text()
                    await answer.read()
            async with session.post(f"{base}/reward", data=b'{"reward": 1.0}') as answer:
                assert answer.status == 200, await answer.text()

    async def main() -> None:
        async with aiohttp.ClientSession(headers=headers) as session:
            await asyncio.gather(*(one(session, number) for number in range(clients)))

    asyncio.run(main())


async def measure(calls: int, clients: int, stream: bool) -> dict[str, float]:
    """Seconds of wall and of the proxy's CPU for so many calls, recorded and written as JSON lines."""
    from tracegrad.rollout.proxy import Proxy

    written = 0

    def finished(record: dict) -> None:
        nonlocal written
        written += len(json.dumps(record, ensure_ascii=False).encode())

    context = multiprocessing.get_context("spawn")
    listening = socket.create_server(("127.0.0.1", 0))
    upstream = f"http://127.0.0.1:{listening.getsockname()[1]}"
    server = context.Process(target=serve, args=(listening, stream), daemon=True)
    server.start()
    try:
        async with Proxy(upstream, key=KEY, finished=finished) as proxy:
            client = context.Process(target=drive, args=(proxy.url, calls, clients, stream))
            wall, cpu = time.perf_counter(), time.process_time()
            client.start()
            await asyncio.to_thread(client.join)
            wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
            assert client.exitcode == 0
    finally:
        server.terminate()
    return {"calls_per_core_s": calls / cpu, "calls_per_s_wall": calls / wall, "cpu_ms_a_call": 1000 * cpu / calls}


def main() -> None:
    """Prints and writes the figures."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--calls", type=int, default=4000)
    parser.add_argument("--clients", type=int, default=32)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    found = {"tokens": TOKENS, "prompt_tokens": PROMPT, "python": platform.python_version(), "cores": os.cpu_count()}
    for name, stream in (("whole", False), ("stream", True)):
        figures = asyncio.run(measure(options.calls, options.clients, stream))
        found[name] = {key: round(value, 2) for key, value in figures.items()}
        print(name, found[name])
    if options.out is not None:
        options.out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
