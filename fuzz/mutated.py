"""Change valid files, bodies and addresses, and read them one after the other.

Each input gives a correct result or an error of this package, in limited memory and time. `run.py` calls this file.
"""

from __future__ import annotations

import asyncio
import base64
import json
import logging
import math
import random
import shutil
import sys
import time
import traceback
import warnings
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any
from urllib.parse import unquote_to_bytes

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests" / "helpers"))
sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "examples" / "quickstart"))

import stored
import tracegrad as tg
from tracegrad.errors import TracegradError

SECONDS = 10.0
"""Limit of CPU time for one input in seconds; a valid one needs milliseconds."""
Case = Callable[[random.Random], Any]
"""Make one changed input and read it; awaited if it is a coroutine."""
WORDS = ["null", "true", "-1", "0", "1e999", "NaN", "1" + "0" * 400, "9" * 5000, '"x"', '"\\ud800"', "[]", "{}", "[[[["]
WORDS += ["[" * 500 + "]" * 500, '{"a":' * 200 + "1" + "}" * 200, "2147483648", "1.5", "\x00", '""', "[null]", "[true]"]


def fuzz(target: str, seconds: int, out: Path, seed: int) -> int:
    """Run until the time is over or a fault is found, and print its seed."""
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    warnings.simplefilter("ignore")
    logging.disable(logging.CRITICAL)
    return asyncio.run(_fuzz(target, seconds, out, seed))


async def _fuzz(target: str, seconds: int, out: Path, seed: int) -> int:
    first, refused, wrong = seed, 0, ""
    async with TARGETS[target](out) as case:
        stored.bound_memory()
        until = time.monotonic() + seconds
        while time.monotonic() < until and not wrong:
            seed += 1
            began = time.process_time()
            try:
                found = case(random.Random(seed))
                if asyncio.iscoroutine(found):
                    await asyncio.wait_for(found, 60)
            except TracegradError as error:
                refused += 1
                wrong = "" if str(error).isprintable() else "an error with control characters"
            except Exception:
                traceback.print_exc()
                wrong = "not an error of ours"
            if time.process_time() - began > SECONDS:
                wrong = wrong or f"{time.process_time() - began:.1f} s"
    if wrong:
        print(f"{target}: seed {seed - 1}: {wrong}; run it again with --seed {seed - 1}")
        return 1
    taken = seed - first - refused
    print(f"{target}: {seed - first} inputs in {seconds} s from seed {first}, {refused} refused, {taken} taken")
    return 0


def changed(draw: random.Random, data: bytes) -> bytes:
    """Return the bytes with some changes: of a JSON value, or of bits, ranges and length."""
    out = bytearray(data)
    for _ in range(draw.choice([0, 1, 1, 1, 2, 3])):
        kind = draw.randrange(8)
        place = draw.randrange(len(out) + 1)
        if kind < 3 and out[:1] in (b"{", b"["):
            out = bytearray(_json_changed(draw, bytes(out)))
        elif kind == 3 and out:
            out[place % len(out)] ^= 1 << draw.randrange(8)
        elif kind == 4:
            del out[place:]
        elif kind == 5:
            out[place:place] = bytes(draw.randrange(256) for _ in range(draw.choice([1, 8, 200])))
        elif kind == 6:
            del out[place : place + draw.choice([1, 4, 64])]
        else:
            out[place : place + draw.randrange(8)] = draw.choice(WORDS).encode()
    return bytes(out)


def _json_changed(draw: random.Random, text: bytes) -> bytes:
    """Return the text with one of its values replaced, moved, repeated or removed."""
    try:
        told = json.loads(text)
    except (ValueError, RecursionError):
        return text
    at: Any = {"": told}
    while True:
        names = list(at) if isinstance(at, dict) else list(range(len(at)))
        if not names:
            break
        name = draw.choice(names)
        if isinstance(at[name], dict | list) and at[name] and draw.random() < 0.8:
            at = at[name]
            continue
        kind = draw.randrange(5)
        if kind == 0 and at is not told:
            del at[name]
        elif kind == 1 and isinstance(at, list):
            at.insert(draw.randrange(len(at) + 1), at[name])
        elif kind == 2 and isinstance(at, dict) and name:
            at[draw.choice(["", "x", "error", "choices", "index", "id", "type", "text"])] = at.pop(name)
        else:
            at[name] = _HERE
        break
    return json.dumps(told).replace(f'"{_HERE}"', draw.choice(WORDS)).encode("utf-8", "surrogatepass")


_HERE = "@@HERE@@"


@asynccontextmanager
async def images(_out: Path) -> AsyncIterator[Case]:
    """Read image files of records, and decode them: an image has the size of its header, or there is an error."""
    from image_bytes import KINDS, files
    from tracegrad.images.processor import decode_image, is_transparent
    from tracegrad.report.token_map import small

    whole = [file for _, file in files()]

    def case(draw: random.Random) -> None:
        file = draw.choice(whole)
        for _ in range(draw.choice([1, 2, 8])):
            file = changed(draw, file)
        kind = draw.choice([*KINDS.values(), "image/bmp", "x"])
        url = f"data:{kind};base64,{base64.b64encode(file).decode()}"
        if draw.random() < 0.2:
            url = changed(draw, url.encode()).decode("latin-1")
        asked = {"role": "user", "content": [{"type": "image_url", "image_url": {"url": url}}]}
        traces = tg.Traces.from_records([{"messages": [asked, {"role": "assistant", "content": "x"}]}])
        pictures = traces.images
        for row in range(len(pictures)):
            size = int(pictures.width[row]), int(pictures.height[row])
            if size[0] * size[1] > 4_000_000:
                continue
            found = decode_image(pictures.bytes_of(row), "picture", pictures.media_type[row], size)
            assert found.shape == (size[1], size[0], 3), (found.shape, size)
            is_transparent(pictures.bytes_of(row), pictures.media_type[row])
            assert small(pictures, row).startswith(b"\x89PNG")

    yield case


@asynccontextmanager
async def bodies(_out: Path) -> AsyncIterator[Case]:
    """Send bodies of requests and answers, complete and streamed, through the proxy: its records can be read."""
    import aiohttp
    from aiohttp import web

    from malformed_answers import ASKED, CHAT, CHUNKS, COMPLETIONS, GOOD, event, whole_of
    from stand_in import StandIn, free_port
    from tracegrad.rollout.proxy import ENDPOINTS, Proxy

    records: list[dict[str, Any]] = []
    sent: dict[str, Any] = {}
    good = {path: [*GOOD[path], {"usage": {"completion_tokens": 1}, "choices": []}] for path in (CHAT, COMPLETIONS)}
    shapes = [one for each in CHUNKS.values() for one in each]
    whole: dict[str, Any] = {CHAT: whole_of(GOOD[CHAT][0]), COMPLETIONS: GOOD[COMPLETIONS][0]}
    whole["/v1/messages"] = {"type": "message", "role": "assistant", "content": [{"type": "text", "text": "4"}]}
    whole["/v1/responses"] = {"output": [{"type": "message", "content": [{"type": "output_text", "text": "4"}]}]}

    def answer(_request: Any, _body: Any) -> Any:
        return web.Response(body=sent["body"], headers={"Content-Type": sent["kind"]}, status=sent["status"])

    async def handle(request: Any) -> Any:
        await request.read()
        return answer(request, None)

    server = StandIn(port=free_port())
    server._handle = handle  # the received bodies are not JSON
    async with (
        server,
        aiohttp.ClientSession() as client,
        Proxy(f"http://127.0.0.1:{server.port}", key="a key that is long", finished=records.append) as proxy,
    ):
        headers = {"Authorization": f"Bearer {proxy.key}"}

        async def case(draw: random.Random) -> None:
            name, passed = f"s{draw.getrandbits(60)}", 0
            for _ in range(draw.randint(1, 4)):
                path = draw.choice(list(ENDPOINTS))
                stream = draw.random() < 0.6
                if stream:
                    chunks = [json.dumps(one).encode() for one in good.get(path, GOOD[path])]
                    chunks += [json.dumps(draw.choice(shapes)).encode()] if draw.random() < 0.1 else []
                    body = b"".join(event(changed(draw, one)) for one in chunks) + event(b"[DONE]")
                    body = changed(draw, body) if draw.random() < 0.2 else body
                else:
                    body = changed(draw, json.dumps(whole[path]).encode())
                kind = "text/event-stream" if stream else "application/json"
                status = 200 if draw.random() < 0.95 else draw.choice([204, 400, 422, 500, 600])
                sent.update(body=b"" if status == 204 else body, kind=kind, status=status)
                asked = json.dumps({**ASKED, "stream": stream}).encode()
                asked = changed(draw, asked) if draw.random() < 0.3 else asked
                async with client.post(f"{proxy.url}/s/{name}{path}", data=asked, headers=headers) as response:
                    told = await response.read()
                    assert response.status in (200, 204, 400, 422, 502) or response.status == status, told
                    assert response.status != 500 or status == 500, told
                    assert b"the proxy failed" not in told, told
                    passed += response.status == 200
            async with client.post(f"{proxy.url}/s/{name}/reward", data=b'{"reward": 1}', headers=headers) as response:
                assert response.status in (200, 404), await response.read()
            if response.status == 200:
                traces = tg.Traces.from_records([json.loads(json.dumps(records.pop()))])
                assert len(traces[0].generations) <= passed
            if not passed:
                raise TracegradError("no answer passed")

        yield case


@asynccontextmanager
async def addresses(out: Path) -> AsyncIterator[Case]:
    """Request paths and queries of the viewer: every status is below 500."""
    from tracegrad.view import Viewer
    from tracegrad.view.app import application
    from view_pages import record, written

    paths = ["", "static/page.js", "state", "columns", "rows?n=1,2", "tag?name=tool:price", "search?q=amber&start=1"]
    paths += ["search?q=amb.r&regex=1", "trace/1", "trace/1?run=a&step=2", "message/1?message=1&start=0", "group/2"]
    paths += ["runs", "runs?run=a&run=b", "export?n=1,2"]
    odd = [
        "9" * 400,
        "-1",
        "%00",
        "%ff",
        "../..",
        "//",
        "\u0661",
        "1e3",
        "(",
        "[a",
        "%ED%A0%80",
        "&&",
        "=",
        "?",
    ]

    with Viewer([written(out / "t.jsonl", [record(n) for n in range(16)])], out / "index") as session:
        while not (session.indexer.done and session.indexer._gramed == session.rows):
            time.sleep(0.01)
        app = application(session, "secret")

        async def ask(path: str, query: bytes) -> list[int]:
            scope = {"type": "http", "method": "GET", "path": path, "headers": [(b"host", b"127.0.0.1:1")]}
            scope |= {"query_string": query, "http_version": "1.1", "scheme": "http", "root_path": "", "client": None}
            statuses: list[int] = []

            async def send(message: Any) -> None:
                if message["type"] == "http.response.start":
                    statuses.append(message["status"])

            async def receive() -> Any:
                return {"type": "http.request", "body": b"", "more_body": False}

            await app({**scope, "server": ("127.0.0.1", 1)}, receive, send)
            return statuses

        async def case(draw: random.Random) -> None:
            asked = "/secret/" + draw.choice(paths)
            for _ in range(draw.choice([1, 1, 2, 4])):
                at = draw.randint(7, len(asked))
                piece = draw.choice(
                    [draw.choice(odd), asked[draw.randrange(len(asked)) :][:5], chr(draw.randrange(1, 999))]
                )
                asked = asked[:at] + piece + asked[at + draw.choice([0, 0, 1, 3]) :]
            path, _, query = asked.partition("?")
            # A server passes a path to its application like this, including bytes that are not UTF-8.
            path = unquote_to_bytes(path).decode("utf-8", draw.choice(["replace", "surrogateescape"]))
            statuses = await ask(path, query.encode("utf-8", "surrogatepass"))
            assert len(statuses) == 1, asked
            assert statuses[0] < 500, (statuses, asked)
            if statuses[0] >= 400:
                raise TracegradError("refused")

        await ask("/secret/search", b"q=amber")  # starts the search process
        yield case


@asynccontextmanager
async def scores(out: Path) -> AsyncIterator[Case]:
    """Read caches of scores, and answers of a judge: every score is a number from 0 to 1, or missing."""
    from tracegrad.rewards import judge_traces
    from tracegrad.rewards.recorded import score_traces

    asked = {"role": "user", "content": "2+2?"}
    said = [
        {"messages": [asked, {"role": "assistant", "content": text}], "group": "ab"[at // 2]}
        for at, text in enumerate("4567")
    ]
    traces = tg.Traces.from_records(said)
    good = json.dumps({"scores": [{"id": str(n), "explanation": "x", "score": n / 4} for n in (1, 2)]}).encode()
    answers: list[Any] = []

    async def reward(completions: list[Any], **_: Any) -> list[float]:
        return [0.5 for _ in completions]

    async def chat(body: Any, **_: Any) -> Any:
        return answers.pop() if answers else {"choices": [{"message": {"content": good.decode()}}], "model": "m"}

    cache = out / "scores"
    kept: dict[str, bytes] = {}
    await judge_traces(traces, chat, cache=cache)
    kept["judged"] = cache.read_bytes()
    cache.unlink()
    await asyncio.to_thread(score_traces, traces, reward, cache=cache)
    kept["recorded"] = cache.read_bytes()

    async def case(draw: random.Random) -> None:
        kind = draw.choice(["judged", "recorded"])
        lines = [changed(draw, line) for line in kept[kind].splitlines()]
        whole = b"\n".join(lines) + draw.choice([b"\n", b"", b"\r\n"])
        cache.write_bytes(changed(draw, whole) if draw.random() < 0.2 else whole)
        if kind == "recorded":
            done: Any = await asyncio.to_thread(score_traces, traces, reward, cache=cache)
        else:
            if draw.random() < 0.5:
                cache.unlink()
            for _ in range(draw.randrange(5)):
                text = changed(draw, good).decode("utf-8", draw.choice(["replace", "surrogateescape"]))
                response = {"choices": [{"message": {"content": text}}], "model": "m", "usage": {"prompt_tokens": 1}}
                odd = draw.random() < 0.3
                answers.append(_loads(changed(draw, json.dumps(response).encode())) if odd else response)
            done = await judge_traces(traces, chat, cache=cache)
        assert set(done.rows) == {0, 1, 2, 3}
        for total, named in done.rows.values():
            for value in (total, *named):
                assert value is None or (type(value) in (int, float) and math.isfinite(value)), value
                assert kind == "recorded" or value is None or 0 <= value <= 1, value
        assert done.unscored_traces == sum(total is None for total, _ in done.rows.values())
        assert np.isfinite(done.prompt_tokens if kind == "judged" else 0)
        assert len(done.traces) == 4
        answers.clear()
        if done.unscored_traces or done.counts:
            raise TracegradError("not all were scored")

    yield case


def _loads(data: bytes) -> Any:
    try:
        return json.loads(data)
    except (ValueError, RecursionError):
        return data.decode("latin-1")


TARGETS: dict[str, Callable[[Path], AbstractAsyncContextManager[Case]]] = {
    "images": images,
    "bodies": bodies,
    "addresses": addresses,
    "scores": scores,
}
