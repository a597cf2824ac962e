"""Requests of OTLP in JSON, written by hand, and `tracegrad receive` in a process of its own."""

import json
import signal
import subprocess
import urllib.error
import urllib.request
from collections import Counter

from running_commands import WITHOUT_TORCH


def attributes(**values):
    """Return attributes of a span; `__` in a name is a dot."""
    kinds = {str: "stringValue", float: "doubleValue"}
    return [{"key": name.replace("__", "."), "value": {kinds[type(value)]: value}} for name, value in values.items()]


def span(trace, number, parent=None, start=0, **values):
    """Return a span: ids are numbers, `parent` is None for a root."""
    made = {
        "traceId": f"{trace:032x}",
        "spanId": f"{number:016x}",
        "parentSpanId": "" if parent is None else f"{parent:016x}",
        "name": f"span {number}",
        "kind": 1,
        "startTimeUnixNano": str(start or number),
        "endTimeUnixNano": str((start or number) + 1),
        "status": {},
    }
    return {**made, "attributes": attributes(**values)} if values else made


def call(trace, number, parent=None, answer="4", **values):
    """Return a span with a call of a model, in the conventions for generative AI."""
    messages = [{"role": "user", "parts": [{"type": "text", "content": "2+2?"}]}]
    said = [{"role": "assistant", "parts": [{"type": "text", "content": answer}], "finish_reason": "stop"}]
    told = {"gen_ai__input__messages": json.dumps(messages), "gen_ai__output__messages": json.dumps(said)}
    return span(trace, number, parent, **told, **values)


def request(*spans, service="agent"):
    """Return a request with spans of one resource and scope."""
    resource = {"attributes": attributes(service__name=service)}
    return {"resourceSpans": [{"resource": resource, "scopeSpans": [{"scope": {"name": "mine"}, "spans": [*spans]}]}]}


def post(url, body, kind="application/json", **headers):
    """Post a body, and return status, headers and body of the answer."""
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    sent = {"Content-Type": kind, **{name.replace("_", "-"): value for name, value in headers.items()}}
    try:
        with urllib.request.urlopen(urllib.request.Request(url, data, sent), timeout=60) as answer:
            return answer.status, answer.headers, answer.read()
    except urllib.error.HTTPError as error:
        return error.code, error.headers, error.read()


def lines(folder):
    """Return the spans of each line of a folder by trace id; the test fails if a trace has two lines."""
    found = {}
    for path in sorted(folder.glob("traces-*.jsonl")):
        for line in path.read_text().splitlines():
            if line.strip():
                scopes = [scope for each in json.loads(line)["resourceSpans"] for scope in each["scopeSpans"]]
                spans = [each for scope in scopes for each in scope["spans"]]
                [trace] = {each["traceId"] for each in spans}
                assert trace not in found, f"{trace} has two lines"
                found[trace] = spans
    return found


def ids(folder):
    """Count the spans of a folder by (trace, span)."""
    return Counter((trace, each["spanId"]) for trace, spans in lines(folder).items() for each in spans)


class Receiving:
    """`tracegrad receive` in a process of its own."""

    def __init__(self, out, *more, otlp="127.0.0.1:0"):
        command = [*WITHOUT_TORCH, "receive", "--otlp", otlp, "--out", str(out), "--json", *more]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        first = self.process.stdout.readline()
        self.opened = json.loads(first)
        self.url = self.opened.get("url")

    def __enter__(self):
        return self

    def __exit__(self, *_):
        if self.process.poll() is None:
            self.process.kill()
        self.process.communicate(timeout=60)

    def stop(self, number=signal.SIGINT):
        """End it, and return its exit code, what it counted, and its lines for people."""
        self.process.send_signal(number)
        out, err = self.process.communicate(timeout=60)
        return self.process.returncode, json.loads(out.splitlines()[-1]), err
