"""`tracegrad receive`: OTLP over HTTP from the exporter of OpenTelemetry and by hand, and what survives kills."""

import asyncio
import gzip
import http.client
import json
import random
import re
import signal
import threading
import time
import tracemalloc
import urllib.error
from collections import Counter
from contextlib import contextmanager
from pathlib import Path

import pytest
from google.protobuf.json_format import MessageToDict
from google.rpc.status_pb2 import Status
from opentelemetry.exporter.otlp.proto.http import Compression
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.proto.collector.logs.v1.logs_service_pb2 import ExportLogsServiceRequest
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.trace import Link

import tracegrad as tg
from otlp_spans import Receiving, call, ids, lines, post, request, span
from stand_in import free_port
from tracegrad import _http_server
from tracegrad.cli import main
from tracegrad.receive import otlp, server
from tracegrad.receive.folder import FolderLimits, TraceFolder
from tracegrad.receive.server import Receiver

PROTOBUF = "application/x-protobuf"


@contextmanager
def receiving(out, limits=None, **options):
    """A receiver in a thread, and the lines that it prints."""
    said, ready, loop = [], threading.Event(), asyncio.new_event_loop()
    stopped = asyncio.Event()

    async def serve():
        with TraceFolder(out, limits) as folder:
            async with Receiver(folder, port=0, log=said.append, **options) as receiver:
                said.append(receiver.url)
                ready.set()
                await stopped.wait()

    thread = threading.Thread(target=loop.run_until_complete, args=(serve(),))
    thread.start()
    assert ready.wait(60)
    try:
        yield said.pop(0), said
    finally:
        loop.call_soon_threadsafe(stopped.set)
        thread.join(60)
        loop.close()


def test_the_exporter_of_opentelemetry_gives_the_traces_that_its_spans_have(tmp_path):
    with Receiving(tmp_path / "o", "--quiet-time", "0") as receiver:
        provider = TracerProvider(resource=Resource({"service.name": "agent", "n": 3, "ratio": 0.5, "on": True}))
        for compression in (Compression.NoCompression, Compression.Gzip):  # the second one repeats each span
            exporter = OTLPSpanExporter(endpoint=f"{receiver.url}/v1/traces", compression=compression)
            provider.add_span_processor(SimpleSpanProcessor(exporter))  # one request a span, children first
        tracer = provider.get_tracer("mine", "1.0")
        with tracer.start_as_current_span("agent", attributes={"reward": 0.25}) as root:
            for text in ("2+2?", "3 × 3?"):
                attributes = {
                    "gen_ai.request.temperature": 0.5,
                    "gen_ai.input.messages": json.dumps([{"role": "user", "content": text}]),
                    "gen_ai.output.messages": json.dumps([{"role": "assistant", "content": "4"}]),
                    "ids": [1, 2],
                }
                link = Link(root.get_span_context(), {"why": "asked"})
                with tracer.start_as_current_span("chat", attributes=attributes, links=[link]) as child:
                    child.add_event("thought", {"text": "hm"})
        code, counts, err = receiver.stop()
    expected = {"traces": 1, "spans": 3, "late": 0, "duplicates": 3, "rejected": 0, "out": str(tmp_path / "o")}
    assert (code, counts) == (0, expected)
    assert "OTEL_EXPORTER_OTLP_ENDPOINT=http://127.0.0.1:" in err
    trace, context = f"{root.get_span_context().trace_id:032x}", child.get_span_context()
    first, second, last = lines(tmp_path / "o")[trace]
    assert (last["name"], last["parentSpanId"], second["spanId"]) == ("agent", "", f"{context.span_id:016x}")
    assert second["parentSpanId"] == first["parentSpanId"] == last["spanId"] == second["links"][0]["spanId"]
    assert second["links"][0]["traceId"] == trace
    assert second["kind"] == 1  # a number, as OTLP's JSON has it
    assert second["events"][0]["name"] == "thought"
    assert int(second["endTimeUnixNano"]) == child.end_time
    values = {each["key"]: each["value"] for each in second["attributes"]}
    assert values["ids"] == {"arrayValue": {"values": [{"intValue": "1"}, {"intValue": "2"}]}}
    [path] = (tmp_path / "o").glob("*.jsonl")
    resource = json.loads(path.read_text())["resourceSpans"][0]["resource"]["attributes"]
    assert {each["key"]: each["value"] for each in resource} == {
        "service.name": {"stringValue": "agent"},
        "n": {"intValue": "3"},
        "ratio": {"doubleValue": 0.5},
        "on": {"boolValue": True},
    }
    [read] = tg.read(tmp_path / "o")
    assert (read.id, read.reward, len(read.generations)) == (trace, 0.25, 2)


def test_protobuf_and_json_give_the_same_lines_and_answers(tmp_path):
    made = request(call(1, 2, parent=1, gen_ai__request__temperature=0.5), span(1, 1))
    made["resourceSpans"][0]["scopeSpans"][0]["spans"][0]["unknown"] = 1
    message = otlp.decode("/v1/traces", json.dumps(made).encode(), otlp.JSON)
    del made["resourceSpans"][0]["scopeSpans"][0]["spans"][0]["unknown"]
    sent = {"json": (json.dumps(made), "application/json; charset=utf-8")}
    sent["protobuf"] = (message.SerializeToString(), PROTOBUF)
    for name, (body, kind) in sent.items():
        with receiving(tmp_path / name) as (url, _):
            data = body if isinstance(body, bytes) else body.encode()
            status, headers, answer = post(f"{url}/v1/traces", gzip.compress(data), kind, content_encoding="gzip")
            assert (status, headers["content-type"]) == (200, kind.partition(";")[0])
            assert answer == (b"" if name == "protobuf" else b"{}")
            assert ids(tmp_path / name) == {}  # the root came, but it was not quiet for long enough
    first, second = [(tmp_path / name / "traces-00001.jsonl").read_text() for name in sent]
    assert first == second
    assert json.loads(first) == made


def test_spans_without_valid_ids_are_rejected_and_the_others_stored(tmp_path):
    wrong = [{**span(1, 1), key: value} for key, value in (("traceId", "0" * 32), ("spanId", ""), ("spanId", "ab"))]
    wrong += [{**span(1, 1), "parentSpanId": "abcd"}, {**span(1, 1), "traceId": "ab" * 8}]
    good = [{**span(1, 2), "parentSpanId": "0" * 16}, {**span(0xAB, 3), "traceId": f"{0xAB:032X}"}]
    with receiving(tmp_path / "o") as (url, said):
        status, _, answer = post(f"{url}/v1/traces", request(*wrong, *good))
        assert (status, json.loads(answer)["partialSuccess"]["rejectedSpans"]) == (200, "5")
        assert "parentSpanId" not in json.loads(answer)["partialSuccess"]["errorMessage"]
        message = ExportTraceServiceRequest()
        message.resource_spans.add().scope_spans.add().spans.add(name="empty")
        status, _, answer = post(f"{url}/v1/traces", message.SerializeToString(), PROTOBUF)
        partial = ExportTraceServiceResponse.FromString(answer).partial_success
        assert (status, partial.rejected_spans, "traceId is ''" in partial.error_message) == (200, 1, True)
        assert len([line for line in said if "rejected" in line]) == 2
    assert ids(tmp_path / "o") == {(f"{1:032x}", f"{2:016x}"): 1, (f"{0xAB:032x}", f"{3:016x}"): 1}
    assert lines(tmp_path / "o")[f"{1:032x}"][0]["parentSpanId"] == ""  # zeros are no parent


def test_bad_requests_are_answered_with_a_status_and_change_nothing(tmp_path):
    body = json.dumps(request(span(1, 1))).encode()
    deep = b'{"resourceSpans":' + b"[" * 100_000 + b"]" * 100_000 + b"}"
    bad = {
        "not json": b"{",
        "no object": b"[]",
        "another shape": b'{"resourceSpans": 3}',
        "ids that are no hexadecimal digits": body.replace(f"{1:032x}".encode(), b"x" * 32),
        "too deep": deep,
        "lone surrogate": body.replace(b"span 1", b"\\ud800"),
    }
    with receiving(tmp_path / "o", request_bytes=300_000, decompressed_bytes=400_000) as (url, said):
        traces = f"{url}/v1/traces"
        for name, data in bad.items():
            status, headers, answer = post(traces, data)
            assert (status, json.loads(answer)["code"], headers["retry-after"]) == (400, 3, None), name
        status, _, answer = post(traces, b"\xff\xff", PROTOBUF)
        assert (status, Status.FromString(answer).code, b"/v1/traces" in answer) == (400, 3, True)
        for data in (body, gzip.compress(body)[:-9], gzip.compress(body)[:20] + b"xx"):
            assert post(traces, data, content_encoding="gzip")[0] == 400
        assert post(traces, body, content_encoding="br")[0] == 400
        assert post(traces, b" " * 300_001)[0] == 413
        bomb = gzip.compress(b" " * 400_001)
        assert (len(bomb) < 10_000, post(traces, bomb, content_encoding="gzip")[0]) == (True, 413)
        assert post(traces, bomb * 2, content_encoding="gzip")[0] == 413
        halves = gzip.compress(body[:99]) + gzip.compress(body[99:])  # two members are one file
        assert post(traces, halves, content_encoding="gzip")[0] == 200
        empty = gzip.compress(b"")  # each member would copy the later ones
        assert post(traces, gzip.compress(body) + empty * 63, content_encoding="gzip")[0] == 200
        assert post(traces, gzip.compress(body) + empty * 64, content_encoding="gzip")[0] == 400
        assert post(traces, body, "text/plain")[0] == 415  # what a page in a browser can send
        status, _, answer = post(traces, body, Origin="http://name.example")  # or of a name that now is 127.0.0.1
        assert (status, json.loads(answer)["code"]) == (403, 7)
        assert post(f"{url}/v1/profiles", body)[0] == 404
        many = request(*(span(n, 1) for n in range(1, 21)), service="x" * 170_000)  # each span has its resource
        assert post(traces, many)[0] == 400
        with pytest.raises(urllib.error.HTTPError) as error:
            urllib.request.urlopen(traces, timeout=60)
        assert error.value.code == 405
        assert len(said) == len(set(said)) > 8  # each once
    assert len(ids(tmp_path / "o")) == 1


def delimited(data, *numbers):
    """A field of protobuf with a length, in a field with the next number, and so on."""
    for number in numbers:
        size, length = b"", len(data)
        while length > 127:
            size, length = size + bytes([length & 127 | 128]), length >> 7
        data = bytes([number << 3 | 2]) + size + bytes([length]) + data
    return data


def of_span(fields):
    """A request whose span has valid ids and other fields: 5 fields more."""
    return delimited(delimited(b"t" * 16, 1) + delimited(b"s" * 8, 2) + fields, 2, 2, 1)


def test_the_fields_of_a_request_are_counted_before_they_are_parsed(tmp_path, monkeypatch):
    monkeypatch.setattr(otlp, "MOST_FIELDS", 1000)
    shapes = {
        "resources": b"\n\0" * 1000,
        "attributes": of_span(b"\x4a\0" * 995),
        "values": of_span(delimited(b"\n\0" * 992, 5, 2, 9)),  # ArrayValue, AnyValue, KeyValue
        "unknown numbers": of_span(b"\xf8\x01\0" * 995),
        "unknown messages": of_span(b"\xfa\x01\0" * 995),
        "numbers": of_span(b"\x30\0" * 995),  # kind
        "fixed numbers": of_span((b"\x39" + bytes(8)) * 495 + (b"\x85\x01" + bytes(4)) * 500),  # start, flags
    }
    values = {
        "list": "[" + "[]," * 496 + "{},1]",
        "text": '["' + '","' * 994 + '"]',
        "keys": "{" + '"":1,' * 496 + '"":[1]}',
    }
    packed = delimited(bytes(993), 2, 8, 1, 10, 2, 2, 1)  # bucket counts of an exponential histogram
    broken = {
        "a length after the end": b"\n\x05\x12\x01",
        "a length after the end of its message": delimited(b"\x1a\x03a", 1) + b"\x1a\0",
        "a message that ends after its message": delimited(b"\x12\x03", 1) + b"\x1a\x01a",
        "a number after the end of its message": delimited(b"\x20", 1) + b"\x01",
        "a group": of_span(b"\xfb\x01\xfc\x01"),
        "an endless number": b"\x20" + b"\xff" * 10 + b"\x01",
        "a field that is cut off": b"\n",
    }
    with receiving(tmp_path / "o", decompressed_bytes=2 << 20) as (url, _):
        traces = f"{url}/v1/traces"
        for name, body in shapes.items():
            assert post(traces, body, PROTOBUF)[0] == 200, name
            status, headers, answer = post(traces, body + b"\n\0", PROTOBUF)
            assert (status, Status.FromString(answer).code, headers["retry-after"]) == (413, 8, None), name
        assert post(traces, gzip.compress(b"\n\0" * 1001), PROTOBUF, content_encoding="gzip")[0] == 413
        assert post(f"{url}/v1/metrics", packed, PROTOBUF)[0] == 200  # each of these bytes becomes a number of 8
        assert post(f"{url}/v1/metrics", packed + b"\n\0", PROTOBUF)[0] == 413
        for name, body in broken.items():
            with pytest.raises(otlp.BadRequest):
                otlp._count_fields(body, ExportTraceServiceRequest.DESCRIPTOR)
            assert post(traces, body, PROTOBUF)[0] == 400, name
        for text in (",[{:" * 300, '\\",[' * 300, "\\" * 999 + '"' + "," * 999, "é,☃" * 300, "," * (1 << 20)):
            body = json.dumps({"x": [text, text[:2000]]}, ensure_ascii=False)  # text is one value, with anything in it
            assert post(traces, body.encode())[0] == 200, text[:9]
        for name, text in values.items():
            body = f'{{"x":{text},"y":2}}'.encode()
            assert sum(map(body.count, (b"[", b"{", b",", b":"))) == 999, name
            assert post(traces, body)[0] == 200, name
            for more in (b'{"z":0,', b'{"\\\\":0,', b'{"\\"":0,', b'{"' + b"a" * (1 << 20) + b'":0,'):
                assert post(traces, more + body[1:])[0] == 413, name
        assert post(traces, json.dumps({}).encode("utf-16"))[0] == 400  # one byte of a character could be a quote


def test_hostile_requests_take_little_memory(tmp_path):
    values = of_span(delimited(b"\n\0" * (5 << 20), 5, 2, 9))
    bodies = [(values, PROTOBUF), (b"[" + b"[]," * (3 << 20) + b"1]", otlp.JSON)]
    with Receiving(tmp_path / "o") as receiver:
        status = Path(f"/proc/{receiver.process.pid}/status")

        def peak_mib():
            return int(re.search(r"VmHWM:\s*(\d+) kB", status.read_text())[1]) >> 10

        before = peak_mib()
        for body, kind in bodies:  # 10 MiB each; the messages or lists would take 200 MiB and more
            packed = gzip.compress(body, 1)
            assert post(f"{receiver.url}/v1/traces", packed, kind, content_encoding="gzip")[0] == 413
        assert peak_mib() - before < 90
        assert post(f"{receiver.url}/v1/traces", request(span(1, 1)))[0] == 200
        receiver.stop()


def test_a_body_in_many_pieces_takes_little_memory():
    pieces = 20_000

    async def receive():
        nonlocal pieces
        pieces -= 1
        return {"type": "http.request", "body": bytes(2), "more_body": pieces > 0}

    tracemalloc.start()
    try:
        assert asyncio.run(_http_server.body_of(receive, 1 << 20, {})) == bytes(40_000)
        assert tracemalloc.get_traced_memory()[1] < 400_000  # a piece of its own takes 43 bytes
    finally:
        tracemalloc.stop()


def test_logs_and_metrics_are_counted_and_not_stored(tmp_path):
    logs = {"resourceLogs": [{"scopeLogs": [{"logRecords": [{"traceId": "ab" * 16}, {}]}]}]}
    point = {"dataPoints": [{"asInt": "1"}]}
    metrics = {"resourceMetrics": [{"scopeMetrics": [{"metrics": [{"gauge": point}, {"sum": point}, {"name": "x"}]}]}]}
    both = {"logs": (logs, ExportLogsServiceRequest, "rejectedLogRecords")}
    both["metrics"] = (metrics, ExportMetricsServiceRequest, "rejectedDataPoints")
    with receiving(tmp_path / "o") as (url, said):
        for name, (body, message, field) in both.items():
            status, _, answer = post(f"{url}/v1/{name}", body)
            assert (status, json.loads(answer)["partialSuccess"][field]) == (200, "2")
            assert json.loads(post(f"{url}/v1/{name}", {})[2]) == {}
            data = otlp.decode(f"/v1/{name}", json.dumps(body).encode(), otlp.JSON).SerializeToString()
            status, _, answer = post(f"{url}/v1/{name}", data, PROTOBUF)
            response = otlp.REQUESTS[f"/v1/{name}"][1].FromString(answer)
            assert (status, MessageToDict(response)["partialSuccess"][field]) == (200, "2")
            assert message.FromString(data) == otlp.decode(f"/v1/{name}", data, PROTOBUF)
        assert len(said) == 2


def test_what_cannot_be_stored_now_is_to_be_sent_again(tmp_path, monkeypatch):
    with receiving(tmp_path / "o", FolderLimits(open_traces=1), idle_s=0.0, quiet_s=0.0) as (url, _):
        status, headers, answer = post(f"{url}/v1/traces", request(span(1, 1), span(2, 1)))
        assert (status, headers["retry-after"], json.loads(answer)["code"]) == (429, "10", 8)
    with receiving(tmp_path / "o", FolderLimits(free_bytes=1 << 60)) as (url, _):
        status, headers, answer = post(f"{url}/v1/traces", request(span(1, 1)))
        assert (status, headers["retry-after"], json.loads(answer)["code"]) == (503, "30", 14)
    with receiving(tmp_path / "o", requests=0) as (url, _):
        assert (status := post(f"{url}/v1/traces", request(span(1, 1))))[0] == 503
        assert status[1]["retry-after"] == "1"
    assert ids(tmp_path / "o") == {}
    monkeypatch.setattr(otlp, "spans_of", lambda *_: 1 / 0)
    with receiving(tmp_path / "o") as (url, said):
        status, headers, _ = post(f"{url}/v1/traces", request(span(1, 1)))
        assert (status, headers["retry-after"], "ZeroDivisionError" in said[-1]) == (503, "30", True)


def test_a_token_is_required_where_it_is_set_and_for_other_machines(tmp_path, capsys):
    (tmp_path / "token").write_text("a token of the agents\n")
    with Receiving(tmp_path / "o", "--key-file", str(tmp_path / "token"), otlp="0.0.0.0:0") as receiver:
        url = receiver.url.replace("0.0.0.0", "127.0.0.1") + "/v1/traces"
        for sent in ({}, {"Authorization": "Bearer another"}):
            status, _, answer = post(url, request(span(1, 1)), **sent)
            assert (status, json.loads(answer)["code"]) == (401, 16)
        token = {"Authorization": "Bearer a token of the agents", "Origin": "http://a.example"}
        assert post(url, request(span(2, 1)), **token)[0] == 200
        code, _, err = receiver.stop(signal.SIGTERM)
        assert (code, "a token of" in err) == (0, False)
    assert list(lines(tmp_path / "o")) == [f"{2:032x}"]
    for address, code in (
        ("0.0.0.0:0", 6),
        ("[::]:0", 6),
        ("a.example:1", 5),
        ("127.0.0.1", 5),
        ("127.0.0.1:65536", 5),
    ):
        assert main(["receive", "--otlp", address, "--out", str(tmp_path / "p")]) == 1
        assert f"TG-RECEIVE-00{code}" in capsys.readouterr().err
    for flag in ("--quiet-time", "--idle-timeout"):
        assert main(["receive", "--out", str(tmp_path / "p"), flag, "-1"]) == 1
        assert f"{flag} is -1.0" in capsys.readouterr().err
    assert not (tmp_path / "p").exists()


def test_a_port_or_folder_that_is_in_use_is_refused(tmp_path, capsys):
    with receiving(tmp_path / "o") as (url, _):
        same = url.removeprefix("http://")
        assert main(["receive", "--otlp", same, "--out", str(tmp_path / "p")]) == 1
        assert f"TG-RECEIVE-008: --otlp {same}" in capsys.readouterr().err
        assert main(["receive", "--otlp", "127.0.0.1:0", "--out", str(tmp_path / "o")]) == 1
        assert "TG-STORE-011" in capsys.readouterr().err


def test_traces_are_written_while_it_runs_and_what_is_open_at_the_end(tmp_path, monkeypatch):
    monkeypatch.setattr(server, "CHECK_S", 0.05)
    with receiving(tmp_path / "o", quiet_s=0.0, idle_s=0.2) as (url, said):
        post(f"{url}/v1/traces", request(span(1, 2, parent=1)))
        post(f"{url}/v1/traces", request(span(2, 1)))
        end = time.monotonic() + 60
        while len(lines(tmp_path / "o")) < 2 and time.monotonic() < end:
            time.sleep(0.02)
        assert len(lines(tmp_path / "o")) == 2
        for number in range(101):
            assert post(f"{url}/v1/traces", {}, f"text/{number}")[0] == 415
        with monkeypatch.context() as patch:
            patch.setattr(TraceFolder, "write_whole", lambda *_: 1 / 0)
            while not any("writing failed: ZeroDivisionError" in line for line in said):
                assert time.monotonic() < end
                time.sleep(0.02)
        post(f"{url}/v1/traces", request(span(3, 2, parent=1)))
        (tmp_path / "o" / "traces-00001.jsonl").rename(tmp_path / "kept")
        (tmp_path / "o" / "traces-00001.jsonl").mkdir()  # nothing can be written; spans are stored on
        time.sleep(0.3)
        assert post(f"{url}/v1/traces", request(span(4, 1)))[0] == 200
        (tmp_path / "o" / "traces-00001.jsonl").rmdir()
        (tmp_path / "kept").rename(tmp_path / "o" / "traces-00001.jsonl")
    assert len(ids(tmp_path / "o")) == 4


@pytest.mark.parametrize("kills", [2, pytest.param(20, marks=pytest.mark.nightly)])
def test_kills_lose_and_double_nothing_that_was_acknowledged(tmp_path, kills):
    """Exporters send each request until it is acknowledged, while the receiver is killed and started again."""
    out, port, draw, sent = tmp_path / "o", free_port(), random.Random(kills), Counter()
    done = threading.Event()

    def send(trace):
        order = [(2, 1), (3, 2), (1, None)] if trace % 3 else [(1, None), (2, 1), (3, 2)]  # late spans, in every third
        for number, parent in order:
            body = request(span(trace, number, parent=parent, text="x" * 2000))
            while True:
                try:
                    if post(f"http://127.0.0.1:{port}/v1/traces", body)[0] == 200:
                        break
                except (OSError, http.client.HTTPException):  # killed before, in or after the answer
                    time.sleep(0.02)
            sent[f"{trace:032x}", f"{number:016x}"] += 1

    def export(first):
        trace = first
        while not done.is_set():
            send(trace)
            trace += 4
            time.sleep(0.01)

    exporters = [threading.Thread(target=export, args=(n,)) for n in (1, 2, 3, 4)]
    options = ["--quiet-time", "0.2", "--idle-timeout", "0.4"]
    for number in range(kills + 1):
        with Receiving(out, *options, otlp=f"127.0.0.1:{port}") as receiver:
            if number == 0:
                for exporter in exporters:
                    exporter.start()
            if number < kills:
                time.sleep(draw.uniform(0.2, 1.6))  # a write is tried twice a second
                continue  # killed
            done.set()
            for exporter in exporters:
                exporter.join(60)
            assert receiver.stop()[0] == 0
    assert ids(out) == sent
    assert len(lines(out)) > 10 * kills
    assert set(sent.values()) == {1}
