"""The proxy records everything and hands the client exactly what the server would have sent without it."""

import asyncio
import contextlib
import json
import re

import aiohttp
import numpy as np
import pytest
from aiohttp import web

import task as clerk
import tracegrad as tg
from proxied import KEY, QUESTION, driven
from stand_in import compact, good_clerk, prompts, until
from tracegrad import _http_server as exchange
from tracegrad.rollout.proxy import Proxy


def same(ours, theirs):
    """Whether two answers are equal but for their numbers."""
    blank = [re.sub(rb'"(chatcmpl|call)-[0-9a-z]+"', b"?", one) for one in (ours, theirs)]
    assert blank[0] == blank[1]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("tools", [False, True])
@pytest.mark.parametrize(
    "more",
    [
        {},
        {"logprobs": True},
        {"logprobs": True, "top_logprobs": 2},
        {"return_token_ids": True},
        {"logprobs": True, "return_token_ids": True},
        {"logprobs": False, "stream_options": {"include_usage": True}},
    ],
    ids=str,
)
def test_the_client_gets_the_bytes_that_it_would_have_got(example, stream, tools, more):
    [prompt] = prompts(1, "price")
    body = {"model": "clerk", "messages": prompt.messages(), "stream": stream, **more}
    body |= {"tools": list(clerk.TOOLS)} if tools else {}

    async def test(bench):
        status, ours = await bench.ask("/s/one/v1/chat/completions", body)
        assert status == 200
        same(ours, await bench.plain("/v1/chat/completions", body))
        sent = bench.scripted.seen[0]
        assert (sent["logprobs"], sent["return_token_ids"], sent["temperature"]) == (True, True, 1.0)
        assert sent["top_logprobs"] == more.get("top_logprobs", 0)
        assert (await bench.ask("/s/one/reward", {"reward": 0.5}))[0] == 200
        traces = tg.Traces.from_records(bench.records)
        sequences = tg.align(traces, bench.scripted.tokenizer)
        assert sequences.alignment_report.rate == 0
        _, _, ids = bench.scripted.message(body)
        assert sequences.ids[sequences.trainable].tolist() == ids
        assert sequences.ids.tolist() == bench.scripted.prompt_ids(body) + ids
        assert not np.isnan(sequences.rollout_logprobs[sequences.trainable]).any()
        assert (traces[0].id, traces[0].reward) == ("one", 0.5)
        assert "calls_without_ids" not in traces[0].metadata

    driven(example, script=good_clerk(prompt))(test)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("more", [{}, {"logprobs": 0}, {"return_token_ids": True}], ids=str)
def test_completions_pass_and_are_recorded(example, stream, more):
    body = {"model": "clerk", "prompt": "2 × 20?", "stream": stream, **more}

    async def test(bench):
        status, ours = await bench.ask("/v1/completions", body, x_tracegrad_session="two", x_tracegrad_group="g")
        assert status == 200
        assert ours == await bench.plain("/v1/completions", body)
        await bench.ask("/reward", {"rewards": {"a": 1, "b": None}}, x_tracegrad_session="two")
        [trace] = tg.Traces.from_records(bench.records)
        assert (trace.id, trace.group) == ("two", "g")
        assert trace.rewards["a"] == 1.0
        assert np.isnan(trace.rewards["b"])
        [generation] = trace.generations
        ids = bench.scripted.tokenizer.encode("2 × 20 = 40 €<|im_end|>").tolist()
        assert generation.token_ids.tolist() == ids
        assert generation.prompt_token_ids.tolist() == bench.scripted.tokenizer.encode("2 × 20?").tolist()
        np.testing.assert_allclose(generation.logprobs, [-0.25 - one / 4096 for one in ids], rtol=1e-6)

    driven(example)(test)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("path", "more"),
    [
        *[("chat/completions", {"n": 2}), ("completions", {"n": 2}), ("completions", {"best_of": 2})],
        *[("chat/completions", {"use_beam_search": True, "n": 1}), ("completions", {"echo": True})],
        ("completions", {"prompt": ["2?", "3?"]}),
    ],
    ids=str,
)
def test_a_request_for_several_answers_is_refused_by_name_and_leaves_nothing(example, stream, path, more):
    async def test(bench):
        body = {**QUESTION, "prompt": "2?", "stream": stream, **more}
        status, answer = await bench.ask(f"/s/a/v1/{path}", body)
        error = json.loads(answer)["error"]
        assert (status, error["type"], error["code"]) == (400, "invalid_request_error", 400)
        assert "sets " + next(iter(more)) + "=" in error["message"]
        assert (await bench.ask("/s/a/reward", {"reward": 1}))[0] == 404
        assert (await bench.ask("/s/a/v1/chat/completions", {**QUESTION, "n": 1, "top_p": 0.5}))[0] == 200
        assert (await bench.ask(f"/s/a/v1/{path}", body))[0] == 400
        await bench.ask("/s/a/reward", {"reward": 1})
        [record] = bench.records
        assert len(record["calls"]) == len(bench.served.seen) == 1  # no other was sent

    driven(example)(test)


@pytest.mark.parametrize(
    ("path", "body", "text"),
    [
        ("/v1/responses", {"model": "clerk", "input": "2+2?"}, "4"),
        ("/v1/messages", {"model": "clerk", "max_tokens": 9, "messages": [{"role": "user", "content": "2+2?"}]}, "4"),
    ],
)
def test_responses_and_messages_pass_as_they_are_and_are_recorded(example, path, body, text):
    async def test(bench):
        status, ours = await bench.ask(f"/s/three{path}", body)
        assert status == 200
        assert ours == await bench.plain(path, body)
        assert bench.scripted.seen[0] == body
        await bench.ask("/s/three/reward", {"reward": 1})
        [trace] = tg.Traces.from_records(bench.records)
        assert trace.messages[-1]["content"] in (text, [{"type": "text", "text": text}])
        assert trace.reward == 1.0

    driven(example)(test)


def test_models_are_the_servers(example):
    async def test(bench):
        assert await bench.ask("/v1/models", None, method="GET") == (200, b'{"object":"list","data":[{"id":"clerk"}]}')
        assert "authorization" not in bench.served.headers[0]

    driven(example)(test)


def test_the_servers_key_and_model_are_ours(example):
    names = iter(["clerk-v1", "clerk-v2"])

    async def test(bench):
        for _ in range(2):
            await bench.ask("/s/one/v1/chat/completions", QUESTION)
        assert [body["model"] for body in bench.scripted.seen] == ["clerk-v1", "clerk-v2"]
        assert {one["authorization"] for one in bench.served.headers} == {"Bearer upstream"}
        assert all(KEY not in str(one) for one in bench.served.headers)
        assert [body["cache_salt"] for body in bench.scripted.seen] == ["v7", "v7"]
        await bench.ask("/s/one/reward", {"reward": 1})
        calls = bench.records[0]["calls"]
        assert [call["request"]["model"] for call in calls] == ["clerk-v1", "clerk-v2"]
        assert [call["policy_version"] for call in calls] == [7, 7]
        assert "cache_salt" not in calls[0]["request"]

    options = {"upstream_key": "upstream", "model": lambda: next(names), "salt": lambda: "v7", "version": lambda: 7}
    driven(example, **options)(test)


@pytest.mark.parametrize(
    ("path", "body", "key", "method", "status", "words"),
    [
        ("/s/a/v1/chat/completions", QUESTION, "wrong", "POST", 401, "no key"),
        ("/s/a/v1/chat/completions", QUESTION, "ü", "POST", 401, "no key"),
        ("/v1/models", None, "", "GET", 401, "no key"),
        ("/v1/chat/completions", QUESTION, KEY, "POST", 400, "no session"),
        ("/s/a/v1/chat/completions", b"{", KEY, "POST", 400, "not JSON"),
        ("/s/a/v1/chat/completions", b"[" * 5000, KEY, "POST", 400, "not JSON"),
        ("/s/a/v1/chat/completions", [1], KEY, "POST", 400, "not a JSON object"),
        ("/s/a/v1/chat/completions", b" " * 70_000, KEY, "POST", 413, "more than 65536 bytes"),
        ("/s/a/v1/embeddings", QUESTION, KEY, "POST", 404, "is not served here"),
        ("/s/a/v1/chat/completions", None, KEY, "GET", 405, "is not served here"),
        ("/s/a%20b/v1/chat/completions", QUESTION, KEY, "POST", 400, "name has 1 to 128"),
        ("/s//v1/chat/completions", QUESTION, KEY, "POST", 400, "name has 1 to 128"),
        ("/s/" + "a" * 200 + "/v1/chat/completions", QUESTION, KEY, "POST", 400, "name has 1 to 128"),
        ("/s/unknown/reward", {"reward": 1}, KEY, "POST", 404, "had no calls"),
        ("/collective_rpc", {}, KEY, "POST", 404, "is not served here"),
    ],
)
def test_what_is_not_served_is_refused_and_never_sent_on(example, path, body, key, method, status, words):
    async def test(bench):
        told, answer = await bench.ask(path, body, key, method)
        assert told == status
        assert words in json.loads(answer)["error"]["message"]
        assert bench.served.paths == []

    driven(example, request_bytes=65536)(test)


def test_a_body_in_pieces_is_bounded_too(example):
    async def test(bench):
        async def pieces():
            for _ in range(100):
                yield b" " * 1024

        headers = {"Authorization": f"Bearer {KEY}"}
        url = f"{bench.proxy.url}/s/a/v1/chat/completions"
        with contextlib.suppress(aiohttp.ClientError):  # it may stop reading before we stop writing
            async with bench.client.post(url, data=pieces(), headers=headers) as answer:
                assert answer.status == 413
        assert bench.served.paths == []
        assert (await bench.ask("/s/a/reward", {"reward": 1}))[0] == 404  # no trajectory has begun

    driven(example, request_bytes=65536)(test)


HEAD = f"POST /s/a/v1/chat/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {KEY}\r\n".encode()


@pytest.mark.parametrize("again", [False, True], ids=["first request", "second request"])
@pytest.mark.parametrize(
    ("begins", "trickles", "status"),
    [
        (b"", False, b""),
        (HEAD, False, b""),
        (HEAD, True, b""),
        (HEAD + b"x: " + b"y" * 70_000, False, b"400"),
        (HEAD + b"content-length: 100\r\n\r\n{", False, b"408"),
        (HEAD + b"content-length: 1000000\r\n\r\n{", True, b"408"),
        (HEAD + b"transfer-encoding: chunked\r\n\r\n1\r\n{\r\n", False, b"408"),
        (HEAD.replace(KEY.encode(), b"wrong") + b"content-length: 1000000\r\n\r\n{", True, b"401"),
    ],
    ids=["nothing", "half a head", "a slow head", "a large head", "half a body", "a slow body", "chunks", "no key"],
)
def test_a_client_that_is_slow_or_large_is_closed_and_leaves_nothing(
    example, monkeypatch, begins, trickles, status, again
):
    monkeypatch.setattr(exchange, "HEAD_S", 0.3)
    monkeypatch.setattr(exchange, "BODY_S", 0.3)

    async def test(bench):
        host, port = bench.proxy.url.removeprefix("http://").split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        if again:
            writer.write(f"GET /v1/models HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {KEY}\r\n\r\n".encode())
            await reader.readuntil(b"}]}")

        async def trickle():
            with contextlib.suppress(ConnectionError):
                while trickles:
                    writer.write(b"a")
                    await writer.drain()
                    await asyncio.sleep(0.02)

        writer.write(begins)
        slow = asyncio.ensure_future(trickle())
        try:
            answer = await reader.read()  # until it is closed
        except ConnectionError:
            answer = status
        slow.cancel()
        writer.close()
        assert answer[9:12] == status or answer == status
        assert (await bench.ask("/s/a/reward", {"reward": 1}))[0] == 404
        assert bench.records == []
        assert (await bench.ask("/s/a/v1/chat/completions", QUESTION))[0] == 200  # others are served

    driven(example)(test)


@pytest.mark.parametrize("value", [{"reward": "1"}, {"reward": [1]}, {}, {"rewards": {"a": "b"}}, {"rewards": 1e999}])
def test_what_is_no_reward_is_refused_and_the_session_stays(example, value):
    async def test(bench):
        await bench.ask("/s/a/v1/chat/completions", QUESTION)
        assert (await bench.ask("/s/a/reward", json.dumps(value).encode()))[0] == 400
        assert bench.records == []
        assert (await bench.ask("/s/a/reward", {"reward": None, "group": "g", "metadata": {"n": 3}}))[0] == 200
        [trace] = tg.Traces.from_records(bench.records)
        assert (trace.reward, trace.group, trace.metadata) == (None, "g", {"n": 3, "ended": "done"})

    driven(example)(test)


def test_a_finished_session_takes_nothing_more(example):
    async def test(bench):
        await bench.ask("/s/a/v1/chat/completions", QUESTION)
        assert (await bench.ask("/s/a/reward", {"reward": 1}))[0] == 200
        assert (await bench.ask("/s/a/reward", {"reward": 0}))[0] == 409
        assert (await bench.ask("/s/a/v1/chat/completions", QUESTION))[0] == 409
        assert len(bench.records) == 1

    driven(example)(test)


def test_sessions_that_nobody_uses_are_finished_and_those_open_are_bounded(example):
    async def test(bench):
        bench.served.free.clear()
        calls = [asyncio.ensure_future(bench.ask(f"/s/{name}/v1/chat/completions", QUESTION)) for name in "ab"]
        await until(lambda: len(bench.served.seen) == 2)
        assert (await bench.ask("/s/c/v1/chat/completions", QUESTION))[0] == 503
        bench.served.free.set()
        assert [(await call)[0] for call in calls] == [200, 200]
        await until(lambda: len(bench.records) == 2)
        assert {record["id"] for record in bench.records} == {"a", "b"}
        assert {record["metadata"]["ended"] for record in bench.records} == {"idle"}
        assert {record["reward"] for record in bench.records} == {None}
        assert (await bench.ask("/s/c/v1/chat/completions", QUESTION))[0] == 200

    driven(example, sessions=2, idle_s=0.4)(test)


def test_a_reward_waits_for_calls_that_are_under_way(example):
    async def test(bench):
        bench.served.free.clear()
        calling = asyncio.ensure_future(bench.ask("/s/a/v1/chat/completions", QUESTION))
        await until(lambda: bench.served.seen)
        ending = asyncio.ensure_future(bench.ask("/s/a/reward", {"reward": 1}))
        await asyncio.sleep(0.1)  # for what must not come
        assert not ending.done()
        bench.served.free.set()
        assert (await ending)[0] == 200
        assert (await calling)[0] == 200
        assert len(bench.records[0]["calls"]) == 1

    driven(example)(test)


def test_a_client_that_closes_early_leaves_what_came_and_the_server_is_dropped(example):
    async def test(bench):
        url, headers = f"{bench.proxy.url}/s/a/v1/chat/completions", {"Authorization": f"Bearer {KEY}"}
        answer = await bench.client.post(url, json={**QUESTION, "stream": True}, headers=headers)
        for _ in range(3):
            await answer.content.readuntil(b"\n\n")
        answer.close()
        await until(lambda: bench.served.dropped)
        sent = bench.served.sent
        await asyncio.sleep(0.2)
        assert bench.served.sent == sent  # no more is sampled for nobody
        await bench.ask("/s/a/reward", {"reward": 0})
        [trace] = tg.Traces.from_records(bench.records)
        [generation] = trace.generations
        ids = bench.scripted.message(QUESTION)[2]
        count = len(generation.token_ids)
        assert 2 <= count < len(ids)
        assert generation.token_ids.tolist() == ids[:count]

    driven(example, wait_s=0.05)(test)


def test_a_client_that_closes_before_a_whole_answer_drops_the_request(example):
    async def test(bench):
        calling = asyncio.ensure_future(bench.ask("/s/a/v1/chat/completions", QUESTION))
        await until(lambda: bench.served.seen)
        calling.cancel()
        await until(lambda: bench.served.dropped)
        await bench.ask("/s/a/reward", {"reward": 0})
        [record] = bench.records
        assert record["lost_calls"]["last"][0]["error"] == "the client closed before the answer"
        assert len(tg.Traces.from_records([record])[0].generations) == 0

    driven(example, wait_s=600.0)(test)


def broken(kind):
    def spoil(path, body, number):
        return {
            "status": lambda: compact({"error": {"message": "too long"}}, 400),
            "text": lambda: web.Response(text="<html>", content_type="text/html"),
            "nothing": lambda: compact({"choices": []}),
            "list": lambda: compact([]),
            "large": lambda: web.Response(body=b"x" * 2_000_000, content_type="application/json"),
        }[kind]()

    return spoil


@pytest.mark.parametrize(
    ("kind", "status", "words"),
    [
        ("status", 400, "too long"),
        ("text", 502, "<html>"),
        ("nothing", 502, "choices"),
        ("list", 502, "[]"),
        ("large", 502, "more than 1000000 bytes"),
    ],
)
def test_an_answer_that_is_none_is_an_error_and_spoils_no_record(example, kind, status, words):
    spoil = broken(kind)

    async def test(bench):
        told, answer = await bench.ask("/s/a/v1/chat/completions", QUESTION)
        assert told == status
        assert words in answer.decode()
        bench.served.spoil = None
        assert (await bench.ask("/s/a/v1/chat/completions", QUESTION))[0] == 200
        await bench.ask("/s/a/reward", {"reward": 1})
        [record] = bench.records
        assert record["lost_calls"]["count"] == 1
        [trace] = tg.Traces.from_records(bench.records)
        assert len(trace.generations) == 1

    driven(example, spoil=spoil, response_bytes=1_000_000)(test)


async def test_a_server_that_is_not_there_is_502(example):
    async with Proxy("http://127.0.0.1:9", key=KEY, finished=print) as proxy, aiohttp.ClientSession() as client:
        headers = {"Authorization": f"Bearer {KEY}"}
        async with client.post(f"{proxy.url}/s/a/v1/chat/completions", json=QUESTION, headers=headers) as answer:
            assert answer.status == 502
            assert "is not reachable" in (await answer.json())["error"]["message"]
