"""Decode OTLP/HTTP requests in protobuf and JSON, and encode the answers.

Source: the OTLP specification 1.x (https://opentelemetry.io/docs/specs/otlp/) and the messages of the package
opentelemetry-proto. In JSON, ids are hexadecimal and enums are numbers; protobuf's own JSON has base64 and names.
"""

import base64
import json
import zlib
from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any

import numpy as np
from google.protobuf.descriptor import FieldDescriptor
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
MOST_FIELDS = 2_000_000
"""Most fields of a request in protobuf, or values in JSON: an empty one has 2 bytes, and about 100 as an object."""
_MEMBERS = 64
_JSON_BLOCK = 1 << 20
_HEX_IDS = {"traceId": 16, "spanId": 8, "parentSpanId": 8}


class BadRequest(ValueError):
    """A body that is not a request of OTLP; the message says why."""


class TooManyFields(ValueError):
    """A body with more than `MOST_FIELDS` fields; the message says so."""


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
    """Decode the body of a request to its message. Its fields are counted before they are parsed.

    Raises:
        BadRequest: if it is not one.
        TooManyFields: if it has too many.
    """
    message = REQUESTS[path][0]()
    try:
        count = _count_fields(body, message.DESCRIPTOR) if kind == PROTOBUF else _count_values(body)
        if count > MOST_FIELDS:
            raise TooManyFields(f"the request has more than {MOST_FIELDS:,} fields; send fewer spans at once")
        if kind == PROTOBUF:
            message.ParseFromString(body)
            return message
        value = json.loads(body.decode())
        if not isinstance(value, dict):
            raise BadRequest("the body is not a JSON object")
        for resource in _objects(value, "resourceSpans"):
            for scope in _objects(resource, "scopeSpans"):
                for span in _objects(scope, "spans"):
                    _to_base64(span)
                    for link in _objects(span, "links"):
                        _to_base64(link)
        return ParseDict(value, message, ignore_unknown_fields=True)
    except TooManyFields:
        raise
    except (DecodeError, ParseError, ValueError, TypeError, RecursionError) as error:
        raise BadRequest(f"the body is not {path} in {kind}: {str(error)[:300]}") from None


@cache
def _nested(message: Any) -> dict[int, Any]:
    """Return the messages of a message's fields by number; None for numbers, which can be a packed list."""
    unpacked = FieldDescriptor.TYPE_STRING, FieldDescriptor.TYPE_BYTES
    return {field.number: field.message_type for field in message.fields if field.type not in unpacked}


def _count_fields(body: bytes, message: Any) -> int:
    """Return the number of fields of a message in protobuf, and of all messages in it; a packed list has its bytes.

    Counting ends after `MOST_FIELDS`. `message` is the descriptor of the message.

    Raises:
        BadRequest: if a field ends after its message or is a group, which OTLP does not use.
    """
    count, position = 0, 0
    levels = [(len(body), _nested(message))]
    try:
        while levels and count <= MOST_FIELDS:
            end, nested = levels[-1]
            if position >= end:
                levels.pop()
                continue
            count += 1
            tag, position = _varint(body, position)
            wire_type = tag & 7
            if wire_type == 2:
                length, position = _varint(body, position)
                number = tag >> 3
                inner = nested.get(number)
                if inner is not None:
                    levels.append((position + length, _nested(inner)))
                else:
                    count += length if number in nested else 0
                    position += length
            elif wire_type == 0:
                position = _varint(body, position)[1]
            elif wire_type in (1, 5):
                position += 8 if wire_type == 1 else 4
            else:
                raise BadRequest(f"a field before byte {position} has wire type {wire_type}")
            if position > end or levels[-1][0] > end:
                raise BadRequest(f"the field before byte {position} ends after its message")
    except IndexError:
        raise BadRequest("the last field is incomplete") from None
    return count


def _varint(body: bytes, position: int) -> tuple[int, int]:
    """Return the number at a position, and the position after it."""
    byte = body[position]
    if byte < 0x80:
        return byte, position + 1
    value, shift = byte & 0x7F, 7
    while shift < 70:
        position += 1
        byte = body[position]
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, position + 1
        shift += 7
    raise BadRequest(f"the number before byte {position} has more than 10 bytes")


def _count_values(body: bytes) -> int:
    """Return at least the number of values of a text in JSON: of the brackets, commas and colons outside of strings."""
    text = body.replace(b"\\\\", b"").replace(b'\\"', b"")
    count, in_string = 1, False
    for start in range(0, len(text), _JSON_BLOCK):
        block = np.frombuffer(text, np.uint8, min(_JSON_BLOCK, len(text) - start), start)
        is_inside = np.logical_xor.accumulate(block == ord('"')) ^ in_string
        count += int(np.count_nonzero(np.isin(block, list(b"[{,:")) & ~is_inside))
        in_string = bool(is_inside[-1])
    return count


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
