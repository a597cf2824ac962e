"""Calls a second of the recording proxy on one core: 64 sampled tokens with logprobs each, server in another process.

The clients are a third process. Sessions are kept in files call by call and written as groups, as `tracegrad
proxy` does. CPU seconds are the proxy's own, so calls per second and core exclude other processes; wall time says
the throughput.

    python benches/online/proxy.py --out benches/results/online.json
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import socket
import tempfile
import time
from pathlib import Path

import aiohttp

import machine

COMMAND = "python benches/online/proxy.py --out benches/results/online.json"
KEY = "a key of this bench"
TOKENS, PROMPT = 64, 256


def response(stream: bool) -> bytes:
    """The answer of a vLLM server: 64 tokens with logprobs and ids after a prompt of 256."""
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


async def _head(reader: asyncio.StreamReader) -> bytes:
    """The head of the next request; empty if the client has closed."""
    try:
        return await reader.readuntil(b"\r\n\r\n")
    except asyncio.IncompleteReadError:
        return b""


def serve(listening: socket.socket, stream: bool) -> None:
    """A server that answers every request alike, on the bare protocol so that it needs little CPU time."""
    body = response(stream)
    kind = "text/event-stream" if stream else "application/json"
    answer = f"HTTP/1.1 200 OK\r\ncontent-type: {kind}\r\ncontent-length: {len(body)}\r\n\r\n".encode() + body

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while head := await _head(reader):
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
    """`clients` sessions at once, four calls and a reward each, until this number of calls is reached."""
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


async def measure(calls: int, clients: int, stream: bool, out: Path) -> dict[str, float]:
    """Seconds of wall and of the proxy's CPU for this number of calls, recorded and written."""
    from tracegrad.online.buffer import ROLLOUT_FOLDER, GroupWriter
    from tracegrad.rollout.proxy import Proxy
    from tracegrad.rollout.proxy_journal import Journal

    context = multiprocessing.get_context("spawn")
    listening = socket.create_server(("127.0.0.1", 0))
    upstream = f"http://127.0.0.1:{listening.getsockname()[1]}"
    server = context.Process(target=serve, args=(listening, stream), daemon=True)
    server.start()
    try:
        with GroupWriter(out / ROLLOUT_FOLDER) as writer, Journal(out / "open") as journal:

            async def finished(record: dict) -> None:
                await asyncio.to_thread(writer.write, [record])

            async with Proxy(upstream, key=KEY, finished=finished, journal=journal) as proxy:
                client = context.Process(target=drive, args=(proxy.url, calls, clients, stream))
                wall, cpu = time.perf_counter(), time.process_time()
                client.start()
                await asyncio.to_thread(client.join)
                wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
                assert client.exitcode == 0
    finally:
        server.terminate()
    return {"rate": calls / cpu, "wall_rate": calls / wall, "cpu_ms": 1000 * cpu / calls}


def main() -> None:
    """Prints and writes the figures."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--calls", type=int, default=4000)
    parser.add_argument("--clients", type=int, default=32)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    rows = []
    for name, stream in (("proxy", False), ("proxy, streamed", True)):
        with tempfile.TemporaryDirectory() as folder:
            figures = asyncio.run(measure(options.calls, options.clients, stream, Path(folder)))
        told = {"tokens": TOKENS, "prompt_tokens": PROMPT, **figures}
        rows.append(machine.row(name, COMMAND, unit="calls/s of a core", must=400.0, **told))
        print(f"{name}: {figures['rate']:.0f} calls/s of a core, {figures['wall_rate']:.0f} came through")
    machine.keep(options.out, rows)


if __name__ == "__main__":
    main()
