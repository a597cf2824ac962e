"""Decode OTLP/HTTP requests in protobuf and JSON, and encode the answers.

Source: the OTLP specification 1.x (https://opentelemetry.io/docs/specs/otlp/) and the messages of the package
opentelemetry-proto. In JSON, ids are hexadecimal and enums are numbers; protobuf's own JSON has base64 and names.
"""

import base64
import json
import zlib
from collections.abc import Iterator, Mapping
from typing import Any

from google.protobuf.json_format import MessageToDict, ParseDict, ParseError
from google.protobuf.message import DecodeError, Message
from google.rpc.status_pb2 import Status
from opentelemetry.proto.collector.logs.v1.logs_service_pb2 import ExportLogsServiceRequest, ExportLogsServiceResponse
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import (
    ExportMetricsServiceRequest,
    ExportMetricsServiceResponse,
)
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from opentelemetry.proto.trace.v1.trace_pb2 import ResourceSpans, ScopeSpans
from opentelemetry.proto.trace.v1.trace_pb2 import Span as SpanMessage

from tracegrad.receive.folder import Span, encode

JSON, PROTOBUF = "application/json", "application/x-protobuf"
REQUESTS: Mapping[str, tuple[type[Message], type[Message], str]] = {
    "/v1/traces": (ExportTraceServiceRequest, ExportTraceServiceResponse, "rejected_spans"),
    "/v1/logs": (ExportLogsServiceRequest, ExportLogsServiceResponse, "rejected_log_records"),
    "/v1/metrics": (ExportMetricsServiceRequest, ExportMetricsServiceResponse, "rejected_data_points"),
}
"""Request, response, and the field of the response that counts what was rejected, by path."""
_MEMBERS = 64
_HEX_IDS = {"traceId": 16, "spanId": 8, "parentSpanId": 8}


class BadRequest(ValueError):
    """A body that is not a request of OTLP; the message says why."""


def decompress(body: bytes, encoding: str, most: int) -> bytes:
    """Return a body without its compression.

    Args:
        encoding: value of the header content-encoding.
        most: maximum size of the result.

    Returns:
        At most `most + 1` bytes.

    Raises:
        BadRequest: for another encoding than gzip, broken data, or more than 64 gzip members.
    """
    if encoding in ("", "identity"):
        return body
    if encoding != "gzip":
        raise BadRequest(f"content-encoding {encoding[:40]!r} is not supported; send gzip, or none")
    result = bytearray()
    try:
        for _ in range(_MEMBERS):  # `unused_data` copies all later members
            stream = zlib.decompressobj(wbits=31)
            result += stream.decompress(body, most + 1 - len(result))
            if not stream.eof and len(result) <= most:
                raise BadRequest("the gzip data is incomplete")
            body = stream.unused_data
            if not body or len(result) > most:
                return bytes(result)
    except zlib.error as error:
        raise BadRequest(f"the body is not gzip data: {error}") from None
    raise BadRequest(f"the gzip data has more than {_MEMBERS} members")


def decode(path: str, body: bytes, kind: str) -> Any:
    """Decode the body of a request to its message.

    Raises:
        BadRequest: if it is not one.
    """
    message = REQUESTS[path][0]()
    try:
        if kind == PROTOBUF:
            message.ParseFromString(body)
            return message
        value = json.loads(body)
        if not isinstance(value, dict):
            raise BadRequest("the body is not a JSON object")
        for resource in _objects(value, "resourceSpans"):
            for scope in _objects(resource, "scopeSpans"):
                for span in _objects(scope, "spans"):
                    _to_base64(span)
                    for link in _objects(span, "links"):
                        _to_base64(link)
        return ParseDict(value, message, ignore_unknown_fields=True)
    except (DecodeError, ParseError, ValueError, TypeError, RecursionError) as error:
        raise BadRequest(f"the body is not {path} in {kind}: {str(error)[:300]}") from None


def _objects(owner: Mapping[str, Any], key: str) -> Iterator[dict[str, Any]]:
    entries = owner.get(key)
    return (entry for entry in entries if isinstance(entry, dict)) if isinstance(entries, list) else iter(())


def _to_base64(entry: dict[str, Any]) -> None:
    """Replace the hexadecimal ids of a span or link by base64, as protobuf's JSON has them."""
    for name in _HEX_IDS:
        if isinstance(value := entry.get(name), str):
            entry[name] = base64.b64encode(bytes.fromhex(value)).decode()


def spans_of(request: ExportTraceServiceRequest, most: int) -> tuple[list[Span], str | None, int]:
    """Return the spans of a request, the problem of a rejected one, and the number of those.

    Args:
        most: maximum sum of the bytes of the spans. Each has its resource, which a request has once for many spans.

    Raises:
        BadRequest: if they have more.
    """
    spans: list[Span] = []
    rejected, problem, size = 0, None, 0
    for resource in request.resource_spans:
        resource_json = _plain(ResourceSpans(resource=resource.resource, schema_url=resource.schema_url), "resource")
        for scope in resource.scope_spans:
            scope_json = _plain(ScopeSpans(scope=scope.scope, schema_url=scope.schema_url), "scope")
            for span in scope.spans:
                if (wrong := _wrong_id(span)) is not None:
                    rejected, problem = rejected + 1, wrong
                    continue
                data = encode([resource_json, scope_json, _span_json(span)])
                if (size := size + len(data)) > most:
                    raise BadRequest(f"the spans with their resources have more than {most} bytes as JSON")
                spans.append(Span(span.trace_id.hex(), span.span_id.hex(), not any(span.parent_span_id), data))
    return spans, problem, rejected


def _wrong_id(span: SpanMessage) -> str | None:
    """Return what is wrong with the ids of a span, None if they are valid."""
    ids = (("traceId", span.trace_id), ("spanId", span.span_id), ("parentSpanId", span.parent_span_id))
    for name, value in ids:
        is_parent = name == "parentSpanId"
        is_valid = len(value) == _HEX_IDS[name] and (is_parent or any(value))
        if not (is_valid or (is_parent and not value)):
            return f"span {span.name[:80]!r}: {name} is {value[:32].hex()!r}, not {_HEX_IDS[name]} bytes"
    return None


def _plain(message: Message, always: str) -> dict[str, Any]:
    """Return a message in OTLP's JSON form, with an empty object for an absent field `always`."""
    return {always: {}, **MessageToDict(message, use_integers_for_enums=True)}


def _span_json(span: SpanMessage) -> dict[str, Any]:
    parent = span.parent_span_id.hex() if any(span.parent_span_id) else ""
    result = _plain(span, "name") | {"traceId": span.trace_id.hex(), "spanId": span.span_id.hex()}
    result["parentSpanId"] = parent
    for link, message in zip(result.get("links", ()), span.links, strict=False):
        link |= {"traceId": message.trace_id.hex(), "spanId": message.span_id.hex()}
    return result


def count_items(path: str, request: Any) -> int:
    """Return the number of log records or data points of a request."""
    if path == "/v1/logs":
        return sum(len(scope.log_records) for resource in request.resource_logs for scope in resource.scope_logs)
    metrics = (
        metric
        for resource in request.resource_metrics
        for scope in resource.scope_metrics
        for metric in scope.metrics
        if metric.WhichOneof("data")
    )
    return sum(len(getattr(metric, metric.WhichOneof("data")).data_points) for metric in metrics)


def success(path: str, kind: str, rejected: int = 0, problem: str | None = None) -> bytes:
    """Encode the answer to a request whose data was stored, apart from `rejected` items."""
    _, response, field = REQUESTS[path]
    message: Any = response()
    if rejected:
        setattr(message.partial_success, field, rejected)
        message.partial_success.error_message = problem or ""
    return _encode(message, kind)


def failure(code: int, text: str, kind: str) -> bytes:
    """Encode the answer to a request that was refused: google.rpc.Status.

    Args:
        code: number of a gRPC status.
    """
    return _encode(Status(code=code, message=text), kind)


def _encode(message: Message, kind: str) -> bytes:
    return message.SerializeToString() if kind == PROTOBUF else encode(MessageToDict(message))
