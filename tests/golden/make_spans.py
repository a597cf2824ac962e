"""Makes tests/data/spans: one instrumented agent, recorded by three instrumentations, in every container of spans.

    python tests/golden/make_spans.py tests/data/spans openinference   # openinference-instrumentation-openai, pandas
    python tests/golden/make_spans.py tests/data/spans semconv         # opentelemetry-instrumentation-openai-v2
    python tests/golden/make_spans.py tests/data/spans openllmetry     # opentelemetry-instrumentation-openai 0.40.14

The client is openai's, behind a transport that answers by a script, so that no server is needed. Each of four
questions is asked twice. A run has a root span with the score, a retriever's and an embedding's span, a call that asks
for a tool, the span of the tool with a call of its own model inside, and a call with the answer: eight traces with
three calls each, one of them of the tool's model. Two runs share a session.
"""

import base64
import gzip
import json
import os
import re
import sys
from pathlib import Path

os.environ.update(
    OPENAI_API_KEY="none",
    OTEL_SEMCONV_STABILITY_OPT_IN="gen_ai_latest_experimental",
    OTEL_INSTRUMENTATION_GENAI_CAPTURE_MESSAGE_CONTENT="span_and_event",
    TRACELOOP_TRACE_CONTENT="true",
)

import httpx
import openai
from google.protobuf.json_format import MessageToDict
from opentelemetry import trace
from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
from opentelemetry.sdk._logs import LoggerProvider
from opentelemetry.sdk._logs.export import InMemoryLogRecordExporter, SimpleLogRecordProcessor
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import ConsoleSpanExporter, SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

QUESTIONS = {
    "What is the weather in Oslo?": ("Oslo", ["14 C and cloudy.", "Sunny, 30 C."]),
    "Do I need a jacket in Bergen?": ("Bergen", ["Yes, it rains.", "No."]),
    "Is it warm in Rome?": ("Rome", ["Yes, 29 C.", "It snows."]),
    "How windy is Hel?": ("Hel", ["Very, 20 m/s.", "Calm."]),
}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "Weather of a city.",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
        },
    }
]
STATE = {"calls": 0, "try": 0}


def reply(request):
    """The scripted answer to a request, with a logprob for each word of a text."""
    body = json.loads(request.content)
    STATE["calls"] += 1
    question = body["messages"][-1]["content"]
    message = {"role": "assistant", "content": None}
    if body["model"] == "summary-1b":
        message["content"] = "short: " + question[:12]
    elif body["messages"][-1]["role"] == "user":
        arguments = json.dumps({"city": QUESTIONS[question][0]})
        call = {
            "id": f"call_{STATE['calls']}",
            "type": "function",
            "function": {"name": "weather", "arguments": arguments},
        }
        message["tool_calls"] = [call]
    else:
        message["content"] = QUESTIONS[body["messages"][1]["content"]][1][STATE["try"]]
    words = re.findall(r" ?[^ ]+", message["content"] or "")
    content = [
        {"token": word, "logprob": -0.25 * (at + 1), "bytes": list(word.encode()), "top_logprobs": []}
        for at, word in enumerate(words)
    ]
    choice = {"index": 0, "message": message, "finish_reason": "tool_calls" if message.get("tool_calls") else "stop"}
    choice["logprobs"] = {"content": content, "refusal": None} if body.get("logprobs") and words else None
    usage = {"prompt_tokens": 9, "completion_tokens": len(words), "total_tokens": 9 + len(words)}
    head = {
        "id": f"chatcmpl-{STATE['calls']}",
        "object": "chat.completion",
        "created": 1795459942,
        "model": body["model"],
    }
    return httpx.Response(200, json={**head, "choices": [choice], "usage": usage})


def embed(tracer, kind):
    with tracer.start_as_current_span("embed") as span:
        span.set_attributes({**kind("EMBEDDING", "embeddings"), "embedding.embeddings.0.embedding.text": "weather"})


def agent(client, tracer, question, attempt, session, kind, score):
    """One run of the agent."""
    STATE["try"] = attempt
    asked = [{"role": "system", "content": "Look it up, then say it."}, {"role": "user", "content": question}]
    options = {"model": "agent-7b", "temperature": 0.7, "top_p": 0.9, "tools": TOOLS, "logprobs": True}
    with tracer.start_as_current_span("run") as root:
        root.set_attributes({**kind("AGENT", "invoke_agent"), **session, "input.value": question})
        with tracer.start_as_current_span("retrieve") as span:
            span.set_attributes({**kind("RETRIEVER", "retrieval"), "retrieval.documents.0.document.score": 0.5})
            embed(tracer, kind)
        first = client.chat.completions.create(messages=asked, **options).choices[0].message
        call = first.tool_calls[0]
        with tracer.start_as_current_span("weather") as span:
            span.set_attributes({**kind("TOOL", "execute_tool"), "input.value": call.function.arguments})
            inner = [{"role": "user", "content": "Shorten: rain, wind, 14 C"}]
            result = client.chat.completions.create(model="summary-1b", messages=inner).choices[0].message.content
        asked += [first.model_dump(exclude_none=True), {"role": "tool", "tool_call_id": call.id, "content": result}]
        last = client.chat.completions.create(messages=asked, **options).choices[0].message
        root.set_attributes({"output.value": last.content})
        score(root, 1.0 - attempt)


def record(instrument, kind, session, score):
    """Run the agent for every question twice. Return the finished spans and log records."""
    spans, logs = InMemorySpanExporter(), InMemoryLogRecordExporter()
    provider, loggers = TracerProvider(resource=Resource({"service.name": "toy"})), LoggerProvider()
    provider.add_span_processor(SimpleSpanProcessor(spans))
    loggers.add_log_record_processor(SimpleLogRecordProcessor(logs))
    trace.set_tracer_provider(provider)
    instrument(provider, loggers)
    client = openai.OpenAI(http_client=httpx.Client(transport=httpx.MockTransport(reply)), max_retries=0)
    for number, question in enumerate(QUESTIONS):
        for attempt in (0, 1):
            agent(client, provider.get_tracer("toy"), question, attempt, session(f"s{number}"), kind, score)
    return list(spans.get_finished_spans()), list(logs.get_finished_logs())


def hexed(node):
    """OTLP's JSON of a protobuf's: ids in hex, enums as numbers, as the collector and the file exporter write them."""
    if isinstance(node, list):
        return [hexed(each) for each in node]
    if not isinstance(node, dict):
        return node
    ids = ("traceId", "spanId", "parentSpanId")
    return {key: base64.b64decode(value).hex() if key in ids else hexed(value) for key, value in node.items()}


def otlp(spans):
    return MessageToDict(encode_spans(spans), use_integers_for_enums=True)


def write(name, text):
    """Write a file; gzip without a time, so that equal spans make equal files."""
    (OUT / name).write_bytes(gzip.compress(text.encode(), mtime=0) if name.endswith(".gz") else text.encode())


def lines(rows):
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)


def containers(stem, spans):
    """OTLP with many traces in a line, OTLP with one trace over many lines, and protobuf's own JSON (base64 ids)."""
    write(f"{stem}_otlp.jsonl.gz", lines([hexed(otlp(spans[:30])), hexed(otlp(spans[30:]))]))
    write(f"{stem}_otlp_split.jsonl.gz", lines(hexed(otlp([each])) for each in spans))
    write(f"{stem}_otlp_base64.json.gz", json.dumps(otlp(spans)))


def openinference():
    """OpenInference: console exporter, Phoenix's table and REST answer, a list, ClickHouse's and Zipkin's forms."""
    import pandas as pd
    from openinference.instrumentation.openai import OpenAIInstrumentor
    from opentelemetry.exporter.zipkin.json.v2 import JsonV2Encoder
    from opentelemetry.exporter.zipkin.node_endpoint import NodeEndpoint
    from phoenix.client.helpers.spans import dataframe_to_spans

    spans, _ = record(
        lambda provider, _: OpenAIInstrumentor().instrument(tracer_provider=provider),
        lambda name, _: {"openinference.span.kind": name},
        lambda name: {"session.id": name},
        lambda root, value: root.set_attribute("eval.right.score", value),
    )
    containers("openinference", spans)
    console = []
    exporter = ConsoleSpanExporter(out=type("Out", (), {"write": console.append, "flush": lambda *_: None})())
    exporter.export(spans)
    write("openinference_console.json.gz", "".join(console))
    rows = [json.loads(each.to_json()) for each in spans]
    write("openinference_list.json.gz", json.dumps(rows))
    write("openinference_zipkin.json.gz", JsonV2Encoder(max_tag_value_length=10_000).serialize(spans, NodeEndpoint()))
    table = pd.DataFrame([phoenix_row(each) for each in rows])
    small = {"compression": "zstd", "write_statistics": False, "use_dictionary": False, "store_schema": False}
    table.to_parquet(OUT / "openinference_phoenix.parquet", **small)
    write("openinference_phoenix.jsonl.gz", table.to_json(orient="records", lines=True, date_format="iso"))
    for name in ("start_time", "end_time"):
        table[name] = pd.to_datetime(table[name])
    write(
        "openinference_phoenix_rest.json.gz",
        json.dumps({"data": dataframe_to_spans(table), "next_cursor": None}, default=str),
    )
    write("openinference_clickhouse.jsonl.gz", lines(map(clickhouse_row, rows)))
    write("openinference_jaeger.json.gz", json.dumps(jaeger(rows)))


def unfold(flat):
    """Nested attributes, as Phoenix stores them (phoenix.trace.attributes.unflatten): numbered names become lists."""
    tree = {}
    for name, value in flat.items():
        at, parts = tree, name.split(".")
        for part in parts[:-1]:
            at = at.setdefault(part, {})
        at[parts[-1]] = value

    def lists(node):
        if not isinstance(node, dict):
            return node
        if node and all(key.isdigit() for key in node):
            return [lists(node[key]) for key in sorted(node, key=int)]
        return {key: lists(value) for key, value in node.items()}

    return lists(tree)


def flat_messages(value):
    """Lists of messages in Phoenix's table have dotted keys, one level deep."""
    if isinstance(value, list):
        return [flat_messages(each) for each in value]
    if not isinstance(value, dict):
        return value
    out = {}
    for key, each in value.items():
        if isinstance(each, dict):
            out |= {f"{key}.{name}": inner for name, inner in flat_messages(each).items()}
        else:
            out[key] = flat_messages(each)
    return out


def phoenix_row(span):
    """A row of get_spans_dataframe, after its server: attributes flattened to columns, lists kept."""
    columns = flat_messages({"attributes": unfold(span["attributes"])})
    kind = columns.get("attributes.openinference.span.kind", "UNKNOWN")
    return {
        "name": span["name"],
        "span_kind": kind,
        "parent_id": span["parent_id"] and span["parent_id"][2:],
        "start_time": span["start_time"],
        "end_time": span["end_time"],
        "status_code": span["status"]["status_code"],
        "status_message": "",
        "events": span["events"],
        "context.span_id": span["context"]["span_id"][2:],
        "context.trace_id": span["context"]["trace_id"][2:],
        **columns,
    }


def clickhouse_row(span):
    """A row of otel_traces, the table of the collector's ClickHouse exporter, as FORMAT JSONEachRow writes it."""
    return {
        "Timestamp": span["start_time"].replace("T", " ").rstrip("Z") + "000",
        "TraceId": span["context"]["trace_id"][2:],
        "SpanId": span["context"]["span_id"][2:],
        "ParentSpanId": (span["parent_id"] or "")[2:],
        "TraceState": "",
        "SpanName": span["name"],
        "SpanKind": "Internal",
        "ServiceName": "toy",
        "ResourceAttributes": {"service.name": "toy"},
        "ScopeName": "",
        "ScopeVersion": "",
        "SpanAttributes": {
            key: value if isinstance(value, str) else json.dumps(value) for key, value in span["attributes"].items()
        },
        "Duration": "1000",
        "StatusCode": "Unset",
        "StatusMessage": "",
        "Events.Timestamp": [],
        "Events.Name": [],
        "Events.Attributes": [],
        "Links.TraceId": [],
        "Links.SpanId": [],
        "Links.TraceState": [],
        "Links.Attributes": [],
    }


def jaeger(rows):
    """The answer of Jaeger's query API, after jaeger/model/json: spans in traces, typed tags, times in microseconds."""
    from datetime import datetime

    types = {str: "string", bool: "bool", int: "int64", float: "float64"}
    traces = {}
    for span in rows:
        name = span["context"]["trace_id"][2:]
        refs = [{"refType": "CHILD_OF", "traceID": name, "spanID": span["parent_id"][2:]}] if span["parent_id"] else []
        tags = [{"key": key, "type": types[type(value)], "value": value} for key, value in span["attributes"].items()]
        fields = {
            "traceID": name,
            "spanID": span["context"]["span_id"][2:],
            "operationName": span["name"],
            "references": refs,
        }
        start = int(datetime.fromisoformat(span["start_time"].replace("Z", "+00:00")).timestamp() * 1e6)
        fields |= {"startTime": start, "duration": 10, "tags": tags, "logs": [], "processID": "p1", "warnings": None}
        traces.setdefault(name, []).append(fields)
    processes = {"p1": {"serviceName": "toy", "tags": []}}
    data = [
        {"traceID": name, "spans": spans, "processes": processes, "warnings": None} for name, spans in traces.items()
    ]
    return {"data": data, "total": 0, "limit": 0, "offset": 0, "errors": None}


def semconv():
    """OpenTelemetry's conventions: messages as attributes; and as log records, with the score as a log record."""
    from opentelemetry.exporter.otlp.proto.common._log_encoder import encode_logs
    from opentelemetry.instrumentation.openai_v2 import OpenAIInstrumentor

    def instrument(provider, loggers):
        OpenAIInstrumentor().instrument(tracer_provider=provider, logger_provider=loggers)

    spans, logs = record(
        instrument,
        lambda _, name: {"gen_ai.operation.name": name},
        lambda name: {"gen_ai.conversation.id": name},
        lambda root, value: root.add_event(
            "gen_ai.evaluation.result", {"gen_ai.evaluation.name": "right", "gen_ai.evaluation.score.value": value}
        ),
    )
    containers("semconv", spans)
    write("semconv_logs.jsonl.gz", lines([hexed(MessageToDict(encode_logs(logs), use_integers_for_enums=True))]))


def openllmetry():
    """OpenLLMetry: numbered attributes (gen_ai.prompt.0.content)."""
    from opentelemetry.instrumentation.openai import OpenAIInstrumentor

    spans, _ = record(
        lambda provider, _: OpenAIInstrumentor().instrument(tracer_provider=provider),
        lambda name, _: {"traceloop.span.kind": {"AGENT": "agent", "TOOL": "tool"}.get(name, "task")},
        lambda name: {"traceloop.association.properties.session_id": name},
        lambda root, value: root.set_attribute("traceloop.association.properties.score", value),
    )
    containers("openllmetry", spans)


if __name__ == "__main__":
    OUT = Path(sys.argv[1])
    OUT.mkdir(parents=True, exist_ok=True)
    globals()[sys.argv[2]]()
