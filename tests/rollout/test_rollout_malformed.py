"""Servers that answer the proxy with what their API does not say: an error for the client, and a record that stays."""

import asyncio
import json

import pytest
from aiohttp import web

import tracegrad as tg
from malformed_answers import (
    ANY,
    ASKED,
    CHAT,
    CHUNKS,
    COMPLETIONS,
    GOOD,
    LOGPROBS,
    MESSAGES,
    RESPONSES,
    chunk,
    event,
    whole_of,
    wrong,
)
from proxied import QUESTION, driven
from tracegrad.rollout import responses
from tracegrad.rollout.proxy import ENDPOINTS, AddedFields, EventStream, MalformedAnswer
from tracegrad.rollout.proxy_journal import Journal

DEEP = b"[" * 100_000 + b"]" * 100_000


BYTES = {
    "words": b"hello",
    "half an object": b'{"choices": ',
    "a list": b"[1]",
    "a number": b"5",
    "null": b"null",
    "a text": b'"x"',
    "no UTF-8": b'{"choices": [{"delta": {"content": "\xff\xfe"}}]}',
    "UTF-16": '{"choices": []}'.encode("utf-16"),
    "NaN": b'{"choices": [{"logprobs": {"content": [{"token": "a", "logprob": NaN}]}}]}',
    "infinity": b'{"choices": [], "x": 1e999}',
    "half a character": b'{"choices": [{"delta": {"content": "\\ud800"}}]}',
    "many digits": b'{"choices": [], "x": ' + b"9" * 5000 + b"}",
    "deep": b'{"choices": [], "x": ' + DEEP + b"}",
    "200 levels": b'{"choices": [], "x": ' + b"[" * 200 + b"]" * 200 + b"}",
    "twice": b'{"choices": [], "choices": 5}',
}
TEXTS = {
    "text": [chunk(text=value) for value in wrong(ANY, str)],
    "tokens": [chunk(text="a", logprobs={"tokens": value}) for value in [*wrong(ANY, list), [5], [None]]],
    "token_logprobs": [chunk(text="a", logprobs={"token_logprobs": value}) for value in [*ANY, [True], [10**400]]],
    "text_offset": [chunk(text="a", logprobs={"text_offset": value}) for value in [*ANY, [-1], [10**400]]],
}
EVENTS = {
    MESSAGES: [
        {"type": 5},
        {"type": "content_block_delta", "delta": 5},
        {"type": "content_block_delta", "index": "x", "delta": {}},
        {"type": "content_block_delta", "index": 10**30, "delta": {}},
        {"type": "message_start", "message": [1]},
        {"type": "message_start", "message": {"content": "x"}},
        {"type": "content_block_start", "content_block": 5},
        {"type": "message_delta", "delta": {}, "usage": [1]},
        {"type": "message", "choices": 5},
        {"type": "message", "choices": [{"token_ids": 5}]},
        {"type": "message", "content": {"a": 1}},
        {"type": "message", "content": [5]},
        {"type": "message", "content": [{"type": "text", "text": 5}]},
    ],
    RESPONSES: [
        {"type": ["x"]},
        {"type": "response.output_text.delta", "delta": 5},
        {"type": "response.output_text.delta", "delta": "a", "output_index": -1},
        {"type": "response.output_text.delta", "delta": "a", "content_index": 1 << 40},
        {"type": "response.completed", "response": [1]},
        {"type": "response.completed", "response": {"output": {"a": 1}}},
        {"type": "response.output_item.added", "item": 5},
        {"output": [5]},
        {"output": [], "choices": [5]},
        {"output": [{"type": "message", "content": 5}]},
        {"output": [], "usage": "x"},
    ],
}


GOOD[CHAT][0]["prompt_token_ids"] = GOOD[COMPLETIONS][0]["prompt_token_ids"] = [1, 2]
MALFORMED = {
    CHAT: [*BYTES.values(), *(one for each in CHUNKS.values() for one in each)],
    COMPLETIONS: [
        *BYTES.values(),
        *(one for name in ("choices", "index", "token_ids", "usage") for one in CHUNKS[name]),
    ]
    + [one for each in TEXTS.values() for one in each],
    MESSAGES: [*BYTES.values(), *EVENTS[MESSAGES]],
    RESPONSES: [*BYTES.values(), *EVENTS[RESPONSES]],
}


def errors(stream):
    """The error events of a stream, and whether it ends by one."""
    told = [line[6:] for line in stream.splitlines() if line.startswith(b"data: {")]
    found = [json.loads(one)["error"] for one in told if b'"error"' in one]
    return found, bool(told) and b'"error"' in told[-1]


@pytest.mark.parametrize("path", list(ENDPOINTS))
@pytest.mark.first_cases(2)
def test_a_malformed_chunk_is_an_error_event_and_what_came_before_it_is_recorded(example, path, tmp_path, capfd):
    cases = MALFORMED[path]

    def spoil(_path, body, _number):
        at = int(body["model"])
        data = b"".join(map(event, GOOD[path])) + event(cases[at]) + event(GOOD[path][0]) + event(b"[DONE]")
        return web.Response(body=data, content_type="text/event-stream")

    async def test(bench):
        for at, case in enumerate(cases):
            status, stream = await bench.ask(f"/s/a{path}", {**ASKED, "stream": True, "model": str(at)})
            found, last = errors(stream)
            assert (status, len(found), last) == (200, 1, True), (case, stream)
            assert found[0]["message"].startswith("the server sent a"), found
            assert found[0]["code"] == 502
            lines = (tmp_path / "open" / "a.jsonl").read_bytes().splitlines()
            assert len([json.loads(line) for line in lines]) == at + 2, case  # on the disk before the next is asked
        assert (await bench.ask("/s/a/reward", {"reward": 1}))[0] == 200
        [record] = bench.records
        if path in (CHAT, COMPLETIONS):
            assert "lost_calls" not in record
            [trace] = tg.Traces.from_records([record])
            ids = [5] * len(GOOD[path])
            assert [each.token_ids.tolist() for each in trace.generations] == [ids] * len(cases)

    with Journal(tmp_path / "open") as journal:
        driven(example, spoil=spoil, journal=journal)(test)
    assert "Traceback" not in capfd.readouterr().err


@pytest.mark.parametrize("path", list(ENDPOINTS))
def test_a_malformed_whole_answer_is_an_error_and_is_not_recorded(example, path, capfd):
    cases = [one if isinstance(one, bytes) else whole_of(one) if path == CHAT else one for one in MALFORMED[path]]
    if path in (CHAT, COMPLETIONS):
        cases += [{}, {"choices": []}, {"choices": None}] + ([{"choices": [{"text": "x"}]}] if path == CHAT else [])

    def spoil(_path, body, _number):
        if (at := body["model"]) == "clerk":
            return None
        data = cases[int(at)]
        data = data if isinstance(data, bytes) else json.dumps(data).encode()
        return web.Response(body=data, content_type="application/json")

    async def test(bench):
        for at, case in enumerate(cases):
            status, answer = await bench.ask(f"/s/a{path}", {**ASKED, "model": str(at)})
            assert status == 502, (case, answer)
            assert json.loads(answer)["error"]["message"].startswith("the server's answer"), answer
        assert (await bench.ask(f"/s/a{path}", ASKED))[0] == 200
        await bench.ask("/s/a/reward", {"reward": 1})
        [record] = bench.records
        assert record["lost_calls"]["count"] == len(cases)
        assert len(tg.Traces.from_records([record])[0].generations) == 1

    driven(example, spoil=spoil)(test)
    assert "Traceback" not in capfd.readouterr().err


def test_a_stream_that_is_too_long_or_breaks_off_ends_by_an_error_event(example):
    def spoil(_path, body, _number):
        if body["model"] == "long":
            data = event(GOOD[CHAT][0]) + event(chunk(delta={"content": "y" * 3_000_000}))
            return web.Response(body=data, content_type="text/event-stream")
        return breaking()

    async def test(bench):
        for model, why in [("long", "more than 1000000 bytes"), ("broken", "broke off")]:
            status, stream = await bench.ask(f"/s/{model}{CHAT}", {**ASKED, "stream": True, "model": model})
            found, last = errors(stream)
            assert (status, last) == (200, True), stream[-300:]
            assert why in found[0]["message"]
            await bench.ask(f"/s/{model}/reward", {"reward": 1})
            [trace] = tg.Traces.from_records(bench.records[-1:])
            assert [each.token_ids.tolist() for each in trace.generations] == [[5]]

    class breaking(web.StreamResponse):
        def __init__(self):
            super().__init__(headers={"Content-Type": "text/event-stream"})

        async def prepare(self, request):
            writer = await super().prepare(request)
            await self.write(event(GOOD[CHAT][0]))
            await asyncio.sleep(0.1)
            request.transport.abort()
            return writer

    driven(example, spoil=spoil, response_bytes=1_000_000)(test)


def test_chunks_of_megabytes_streams_without_an_end_and_comments_pass(example):
    large = chunk(delta={"content": "y" * 3_000_000}, logprobs=LOGPROBS)
    noise = b": ping\n\nevent: x\nid: 5\nretry: 9\n\n"
    lines = b"event: x\r\ndata: " + json.dumps(large).encode() + b"\r\n\r\n"

    def spoil(_path, _body, _number):
        return web.Response(body=event(GOOD[CHAT][0]) + noise + lines, content_type="text/event-stream")

    async def test(bench):
        status, stream = await bench.ask(f"/s/a{CHAT}", {**ASKED, "stream": True})
        assert status == 200
        assert errors(stream) == ([], False)
        assert b'token_ids":[' not in stream  # what the client did not ask for is taken out of every event
        assert noise in stream
        await bench.ask("/s/a/reward", {"reward": 1})
        [trace] = tg.Traces.from_records(bench.records)
        assert [each.token_ids.tolist() for each in trace.generations] == [[5, 5]]

    driven(example, spoil=spoil)(test)


@pytest.mark.parametrize("status", [201, 204, 205, 304, 404, 500, 599, 600, 999])
def test_any_status_of_a_server_is_answered(example, status, capfd):
    def spoil(_path, body, _number):
        empty = {} if status in (204, 304) else {"body": b'{"error": {"message": "no"}}'}
        return web.Response(status=status, content_type="application/json", **empty)

    async def test(bench):
        assert (await bench.ask(f"/s/a{CHAT}", ASKED))[0] == (status if status < 600 else 502)
        await bench.ask("/s/a/reward", {"reward": 1})
        assert bench.records[0]["lost_calls"]["count"] == 1

    driven(example, spoil=spoil)(test)
    assert "Traceback" not in capfd.readouterr().err


REQUESTS = [
    b"{",
    b"[]",
    b'{"messages": ' + DEEP + b"}",
    b'{"messages": ' + b"[" * 200 + b"]" * 200 + b"}",
    b'{"temperature": NaN}',
    b'{"temperature": 1e999}',
    b'{"n": ' + b"9" * 5000 + b"}",
    b"\xff",
]
ODD = [None, True, -1, 1.5, 10**400, "x", [], [5], [[]], {}, {"a": 1}]


def test_odd_requests_are_refused_or_passed_on_and_spoil_no_record(example, capfd):
    async def test(bench):
        for body in REQUESTS:
            status, answer = await bench.ask(f"/s/a{CHAT}", body)
            assert status == 400, answer
            assert "the request is not" in json.loads(answer)["error"]["message"]
        bench.served.spoil = lambda *_: web.json_response(whole_of(GOOD[CHAT][0]))
        names = ("messages", "tools", "n", "best_of", "echo", "logprobs", "top_logprobs", "return_token_ids", "prompt")
        names += ("max_tokens", "max_completion_tokens", "temperature", "top_p", "stop", "model", "stream_options")
        names += ("stream",)
        passed = 0
        for name in names:
            for value in ODD:
                status, answer = await bench.ask(f"/s/a{CHAT}", {**QUESTION, name: value})
                assert status in (200, 400), (name, value, answer)
                passed += status == 200
        await bench.ask("/s/a/reward", {"reward": 1})
        [record] = bench.records
        [trace] = tg.Traces.from_records([record])
        lost = record.get("lost_calls", {"count": 0})["count"]
        assert len(trace.generations) + lost == passed
        assert len(trace.generations) > passed / 2

    driven(example, sampling={"max_tokens": 9})(test)
    assert "Traceback" not in capfd.readouterr().err


def test_a_large_event_in_small_pieces_takes_linear_time():
    events = EventStream(AddedFields({}, {}), responses.wrong_in_chat_chunk, 1 << 30)
    data = event(chunk(delta={"content": "y" * 20_000_000}))
    pieces = [data[at : at + 4096] for at in range(0, len(data), 4096)]
    out = b"".join(b"".join(events.feed(piece)) for piece in pieces)
    assert (out, events.chunks) == (data, 1)


@pytest.mark.parametrize("cut", range(1, 8))
def test_events_are_found_however_their_bytes_come(cut):
    data = b"data: {}\n\ndata: {}\r\n\r\n: x\r\n\r\ndata: [DONE]\n\n"
    events = EventStream(AddedFields({}, {}), responses.wrong_in_chat_chunk, 1 << 30)
    passed = [one for at in range(0, len(data), cut) for one in events.feed(data[at : at + cut])]
    assert passed == [b"data: {}\n\n", b"data: {}\r\n\r\n", b": x\r\n\r\n", b"data: [DONE]\n\n"]
    assert events.finish() == b""


def test_a_malformed_end_is_malformed_too():
    events = EventStream(AddedFields({}, {}), responses.wrong_in_chat_chunk, 1 << 30)
    assert list(events.feed(b"data: 5")) == []
    with pytest.raises(MalformedAnswer):
        events.finish()
