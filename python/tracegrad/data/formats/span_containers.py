"""Take containers of OpenTelemetry spans apart: OTLP JSON, spans of the SDKs, span tables, Jaeger, Zipkin, ClickHouse.

Every span becomes a record in the layout of the Python SDK's `to_json`, whatever its container: `name`, `context` with
`trace_id` and `span_id`, `parent_id`, `start_time` in seconds, flat `attributes`, `events` and `status`, and `scores`.
So a path such as `attributes.session.id` names the same value in all of them. Log records become spans too, as they
name the span to which they belong.

Sources: opentelemetry-proto (`trace.proto`, `logs.proto`) and its JSON encoding, opentelemetry-sdk `ReadableSpan`,
arize-phoenix-client `spans`, Jaeger's `model/json`, Zipkin's v2 API, the collector's `clickhouseexporter`.
"""

import base64
import math
import re
from collections.abc import Iterator, Mapping
from typing import Any

from tracegrad.data import chat, json_path
from tracegrad.data.field_map import BadValueError
from tracegrad.data.formats import record_fields

TRACE = "context.trace_id"
"""Path of the trace id in the records of this module."""
DEEPEST = 16
"""Values that are nested deeper are left out."""
_TRACE_IDS = ("trace_id", "traceId", "traceID", "TraceId")
_SPAN_IDS = ("span_id", "spanId", "spanID", "SpanId")
_PARENT_IDS = ("parent_id", "parent_span_id", "parentSpanId", "parentSpanID", "parentId", "ParentSpanId")
_STARTS = ("start_time", "startTimeUnixNano", "start_time_unix_nano", "startTime", "Timestamp", "timestamp")
_LOG_TIMES = ("timeUnixNano", "time_unix_nano", "observedTimeUnixNano", "observed_time_unix_nano")
_NAMES = ("name", "operationName", "SpanName", "eventName", "event_name")
_FIELDS = {
    *(*_TRACE_IDS, *_SPAN_IDS, *_PARENT_IDS, *_STARTS, *_LOG_TIMES, *_NAMES, "context", "attributes", "tags", "status"),
    *("events", "logs", "SpanAttributes", "id", "body", "references", "resource", "links", "flags", "kind", "duration"),
    *("end_time", "endTimeUnixNano", "end_time_unix_nano", "annotations", "localEndpoint", "processID", "warnings"),
    *("status_code", "status_message", "StatusCode", "StatusMessage", "span_kind", "SpanKind", "trace_state"),
    *("traceState", "TraceState", "ResourceAttributes", "ScopeName", "ScopeVersion", "ServiceName", "Duration"),
    *("droppedAttributesCount", "droppedEventsCount", "droppedLinksCount", "spans", "__index_level_0__"),
}
"""Fields of a span that are read under one name, or not at all. Others are kept: they may contain a score."""
_DROPPED = ("droppedAttributesCount", "dropped_attributes_count")
_RESULT = "gen_ai.evaluation.result"
_SCORED = re.compile(r"(?:^|\.)(?:annotations|evaluations)\.\d+\.(annotation|evaluation)\.name$")


KEYS = ("resourceSpans", "spans", "attributes")
"""Keys of the containers that the core could read too, but only as a record of one conversation."""


def is_spans(record: Any) -> bool:
    """Return whether a record is a span, or a container of spans or of log records, also of bad ones.

    A call that was converted from spans, and written with its reward, is none.
    """
    fields = record if isinstance(record, Mapping) else {}
    if isinstance(fields.get("calls"), list) or all(
        isinstance(fields.get(key), Mapping) for key in ("request", "response")
    ):
        return False
    try:
        return _parts(record) is not None
    except BadValueError:
        return True


def spans_of(record: Any) -> list[dict[str, Any]] | None:
    """Return all spans of a record in one layout; None if it contains none.

    >>> value = {"key": "session.id", "value": {"stringValue": "s"}}
    >>> times = {"startTimeUnixNano": "1700000000500000000"}
    >>> span = {"traceId": "0A", "spanId": "0b", **times, "attributes": [value]}
    >>> [each] = spans_of({"resourceSpans": [{"scopeSpans": [{"spans": [span]}]}]})
    >>> each["context"], each["start_time"], each["attributes"]
    ({'trace_id': '0a', 'span_id': '0b'}, 1700000000.5, {'session.id': 's'})

    Raises:
        BadValueError: if a list of spans contains something else.
    """
    if (parts := _parts(record)) is None:
        return None
    with record_fields.refuse_on_error("spans"):
        return [_span(span, shared) for span, shared in parts]


_Part = tuple[Mapping[str, Any], dict[str, Any]]
"""(span, fields of its container that apply to it)."""


def _parts(record: Any) -> list[_Part] | None:
    """Return the spans of a container, not converted; None if the record is none."""
    if isinstance(record, list):
        return [(each, {}) for each in record] if record and all(map(_is_span, record)) else None
    if not isinstance(record, Mapping) or "rollout_id" in record or "triplets" in record:
        return None  # Agent Lightning's spans are ordered by their own numbers: the core reads them.
    for names in (("resourceSpans", "resource_spans"), ("resourceLogs", "resource_logs"), ("batches",)):
        resources = next((record[name] for name in names if isinstance(record.get(name), list)), None)
        if resources is not None:
            return list(_of_resources(resources))
    if _is_span(record) or _is_annotation(record):
        return [(record, {})]
    data, spans = record.get("data"), record.get("spans")
    if isinstance(data, list) and data and all(isinstance(each, Mapping) for each in data):
        inner = [_parts(each) for each in data]
        return None if any(each is None for each in inner) else [part for each in inner for part in each or ()]
    if isinstance(spans, list) and _are_spans(spans):
        # The id of a record with spans is the id of its conversation, whatever the ids of their traces.
        own = next((record[name] for name in ("id", *_TRACE_IDS) if record.get(name) is not None), None)
        shared = {**chat.without(record, "spans", "id", "processes"), **({} if own is None else {"trace": own})}
        return [(each, shared) for each in spans]
    return None


def _are_spans(spans: list[Any]) -> bool:
    """Return whether a list is of spans of a record: each has an id, and one has attributes, as empty ones may lack."""
    has_ids = all(isinstance(each, Mapping) and _span_id(each) is not None for each in spans)
    return has_ids and any(_attributes_of(each) is not None for each in spans)


def _of_resources(resources: list[Any]) -> Iterator[_Part]:
    """Yield the spans and log records of OTLP's lists of resources, also of older versions of it."""
    for resource in resources:
        fields = chat.as_mapping(resource)
        names = ("scopeSpans", "scope_spans", "instrumentationLibrarySpans", "scopeLogs", "scope_logs")
        for name in names:
            for scope in record_fields.require_list(fields.get(name), name):
                inner = chat.as_mapping(scope)
                for key in ("spans", "logRecords", "log_records"):
                    yield from ((each, {}) for each in record_fields.require_list(inner.get(key), key))


def _is_span(record: Any) -> bool:
    """Return whether a record is a span: it has a trace id, a span id, and attributes or only a span's fields."""
    if not isinstance(record, Mapping) or "rollout_id" in record:
        return False
    has_ids = _first(record, _TRACE_IDS) is not None and _span_id(record) is not None
    return has_ids and (_attributes_of(record) is not None or record.keys() <= _FIELDS)


def _is_annotation(record: Mapping[str, Any]) -> bool:
    """Return whether a record is an annotation of Phoenix: the name and result of an evaluation of a span."""
    return isinstance(record.get("span_id"), str) and "annotator_kind" in record and _annotation(record) != {}


def _annotation(record: Mapping[str, Any]) -> dict[str, Any]:
    """Return the score of an annotation by its name; {} without one. Without a number, the label is the score."""
    result = chat.as_mapping(json_path.parse_json_string(record.get("result")))
    name = record.get("annotation_name", record.get("name"))
    values = [
        value for key in ("score", "label") for value in (result.get(key), record.get(f"result.{key}"), record.get(key))
    ]
    value = next((value for value in values if value is not None), None)
    return {name: value} if isinstance(name, str) and value is not None else {}


def _first(record: Mapping[str, Any], names: tuple[str, ...]) -> Any:
    """Return the first value under one of these names, also in `context`, as an object or as columns of a table."""
    context = chat.as_mapping(json_path.parse_json_string(record.get("context")))
    for name in names:
        for value in (record.get(name), context.get(name), record.get(f"context.{name}")):
            if value is not None and value != "":
                return value
    return None


def _span_id(record: Mapping[str, Any]) -> Any:
    own = _first(record, _SPAN_IDS)
    return record.get("id") if own is None and _is_zipkin(record) else own


_ZIPKIN_LENGTH = 128
"""Characters to which the exporters of Zipkin cut a value by default."""


def _is_zipkin(span: Mapping[str, Any]) -> bool:
    return isinstance(span.get("tags"), Mapping) and "traceId" in span


def _attributes_of(record: Mapping[str, Any]) -> Any:
    """Return the attributes of a span as its container has them; None if it has none."""
    for name in ("attributes", "SpanAttributes", "tags"):
        value = json_path.parse_json_string(record.get(name))
        if isinstance(value, (Mapping, list)):
            return value
    columns = {key[11:]: value for key, value in record.items() if key.startswith("attributes.")}
    return columns or None


def _span(span: Any, shared: Mapping[str, Any]) -> dict[str, Any]:
    """Return a span in the layout of this module."""
    if not isinstance(span, Mapping):
        raise TypeError(f"a span is {json_path.describe_type(span)}")
    if _attributes_of(span) is None and _is_annotation(span):
        span = {"context": {"span_id": span["span_id"]}, "attributes": {}, "scores": _annotation(span)}
    attributes = flat(_pairs(_attributes_of(span)))
    events = [_event(each) for each in _events_of(span)]
    body = span.get("body")
    name = next((span[key] for key in _NAMES if isinstance(span.get(key), str) and span[key]), None)
    name = name or attributes.get("event.name") or ""
    if isinstance(body := plain(body), Mapping) and body:  # A log record.
        attributes = {**flat(body), **attributes}
    references = record_fields.require_list(span.get("references"), "references")
    parents = [each.get("spanID") for each in map(chat.as_mapping, references) if each.get("refType") == "CHILD_OF"]
    parent = next((span[key] for key in _PARENT_IDS if span.get(key)), next(iter(parents), None))
    others = {key: value for key, value in span.items() if key not in _FIELDS and value is not None}
    others = {key: value for key, value in others.items() if not key.startswith(_COLUMNS)}
    trace = shared.get("trace", _first(span, _TRACE_IDS))
    record: dict[str, Any] = {
        **chat.without(shared, "trace", *_TRACE_IDS),
        **others,
        "name": name,
        "context": {"trace_id": _hex(trace), "span_id": _hex(_span_id(span))},
        "parent_id": _hex(parent),
        "start_time": _start(span),
        "attributes": attributes,
        "events": events,
        "status": _status(span),
    }
    if _is_zipkin(span) and any(
        isinstance(value, str) and len(value) == _ZIPKIN_LENGTH for value in attributes.values()
    ):
        record["is_cut"] = True
    if dropped := next((span[key] for key in _DROPPED if span.get(key)), None):
        record["dropped_attributes"] = dropped
    if scores := _scores(name, attributes, events):
        record["scores"] = scores
    return record


_COLUMNS = ("attributes.", "context.", "Events.", "Links.", "dropped")


def plain(value: Any, depth: int = 0) -> Any:
    """Return OTLP's typed value as a plain one; other values unchanged.

    >>> plain({"kvlistValue": {"values": [{"key": "a", "value": {"arrayValue": {"values": [{"intValue": "1"}]}}}]}})
    {'a': [1]}
    """
    if not isinstance(value, Mapping) or depth > DEEPEST:
        return value if depth <= DEEPEST else None
    if len(value) != 1:
        return value
    [(key, inner)] = value.items()
    kind = key.replace("_v", "V") if isinstance(key, str) else ""
    if kind in ("stringValue", "boolValue", "bytesValue"):
        return inner
    if kind in ("intValue", "doubleValue"):
        number = json_path.number(inner) if isinstance(inner, str) else inner
        return int(inner) if kind == "intValue" and isinstance(inner, str) else number
    if kind == "arrayValue":
        return [plain(each, depth + 1) for each in chat.as_mapping(inner).get("values") or ()]
    if kind == "kvlistValue":
        return {each["key"]: plain(each.get("value"), depth + 1) for each in chat.as_mapping(inner).get("values") or ()}
    return value


def _pairs(attributes: Any) -> dict[str, Any]:
    """Return attributes as a dict: an object, OTLP's or Jaeger's list of keys and values, or the entries of a map."""
    if isinstance(attributes, Mapping):
        return {str(key): value for key, value in attributes.items() if value is not None}
    fields: dict[str, Any] = {}
    for each in attributes or ():
        if isinstance(each, Mapping):
            fields[each["key"]] = plain(each.get("value"))
        else:
            key, fields[str(key)] = each
    return {key: value for key, value in fields.items() if value is not None}


def flat(attributes: Mapping[str, Any], prefix: str = "", depth: int = 0) -> dict[str, Any]:
    """Return attributes without nested objects: their names are joined with dots. Lists and nulls are left as they are.

    >>> flat({"llm": {"model_name": "m"}, "a.b": [{"c": 1}]})
    {'llm.model_name': 'm', 'a.b': [{'c': 1}]}
    """
    fields: dict[str, Any] = {}
    for key, value in attributes.items():
        if isinstance(value, Mapping) and value and depth < DEEPEST:
            fields |= flat(value, f"{prefix}{key}.", depth + 1)
        elif value is not None:
            fields[f"{prefix}{key}"] = value
    return fields


def unfold(attributes: Mapping[str, Any], prefix: str) -> Any:
    """Return the value at a prefix, of which numbered names (`prefix.0.role`), dotted keys and JSON text are unfolded.

    >>> unfold({"llm.input_messages.0.message.role": "user"}, "llm.input_messages")
    [{'message': {'role': 'user'}}]
    """
    if (value := attributes.get(prefix)) is not None:
        return _unfolded(json_path.parse_json_string(value), 0)
    start = f"{prefix}."
    inner = {name[len(start) :]: value for name, value in attributes.items() if name.startswith(start)}
    return _unfolded(inner, 0) if inner else None


def _unfolded(value: Any, depth: int) -> Any:
    if depth > DEEPEST:
        return None
    if isinstance(value, list):
        return [_unfolded(each, depth + 1) for each in value]
    if not isinstance(value, Mapping):
        return value
    tree: dict[str, Any] = {}
    for name, each in value.items():
        if each is None:
            continue
        head, _, rest = str(name).partition(".")
        if not rest:
            tree[head] = each
        elif isinstance(tree.setdefault(head, {}), dict):
            tree[head][rest] = each
    tree = {name: _unfolded(each, depth + 1) for name, each in tree.items()}
    # A list has all numbers from 0. Otherwise attributes were dropped, or the numbers are names, such as token ids.
    return [tree[str(index)] for index in range(len(tree))] if tree and tree.keys() == _numbers(len(tree)) else tree


def _numbers(count: int) -> set[str]:
    return set(map(str, range(count)))


def _events_of(span: Mapping[str, Any]) -> list[Any]:
    """Return the events of a span as its container has them."""
    names, attributes = span.get("Events.Name"), span.get("Events.Attributes")
    if isinstance(names, list) and isinstance(attributes, list):
        return [{"name": name, "attributes": fields} for name, fields in zip(names, attributes, strict=True)]
    events = json_path.parse_json_string(span.get("events") or span.get("logs") or span.get("Events"))
    return events if isinstance(events, list) else []


def _event(event: Any) -> dict[str, Any]:
    """Return an event as {"name", "attributes"}. Jaeger keeps the name among the fields."""
    fields = chat.as_mapping(event)
    own = json_path.parse_json_string(fields.get("attributes") or fields.get("fields") or fields.get("Attributes"))
    attributes = flat(_pairs(own if isinstance(own, (Mapping, list)) else {}))
    name = fields.get("name") or fields.get("Name") or attributes.pop("event", None)
    return {"name": name if isinstance(name, str) else "", "attributes": attributes}


def _hex(name: Any) -> str | None:
    """Return an id in lower-case hex without `0x`. The JSON encoding of protobuf writes 8 or 16 bytes as base64."""
    if name is None or name == "":
        return None
    text = str(name)
    if len(text) in (12, 24) and text.endswith("="):
        try:
            return base64.b64decode(text, validate=True).hex()
        except ValueError:
            return text
    return text.removeprefix("0x").lower()


def _start(span: Mapping[str, Any]) -> float:
    """Return the start of a span, or the time of a log record, in seconds since 1970; 0 if it is not recorded."""
    for key in (*_STARTS, *_LOG_TIMES):
        value = span.get(key)
        number = None if isinstance(value, bool) else json_path.number(value)
        if number is None:
            number = json_path.parse_time(value) if isinstance(value, str) else None
        if number and math.isfinite(number):
            while number > 1e11:  # Milliseconds, microseconds or nanoseconds.
                number /= 1000
            return number
    return 0.0


def _status(span: Mapping[str, Any]) -> dict[str, Any]:
    """Return {"error": message} if a span failed, else {}."""
    status = chat.as_mapping(span.get("status"))
    code = next(
        (
            each
            for each in (status.get("status_code"), status.get("code"), span.get("status_code"), span.get("StatusCode"))
            if each
        ),
        None,
    )
    if str(code).rpartition(".")[2].removeprefix("STATUS_CODE_").upper() not in ("ERROR", "2"):
        return {}
    texts = (status.get("message"), status.get("description"), span.get("status_message"), span.get("StatusMessage"))
    return {"error": next((text for text in texts if isinstance(text, str) and text), "the span's status is an error")}


def _scores(name: str, attributes: Mapping[str, Any], events: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the scores of a span by name: results of evaluations as events, and OpenInference's annotations.

    A result without a number has its label as its value.
    """
    scores: dict[str, Any] = {}
    results = [each["attributes"] for each in events if each["name"] == _RESULT]
    for result in (*results, *([attributes] if name == _RESULT else [])):
        values = (result.get("gen_ai.evaluation.score.value"), result.get("gen_ai.evaluation.score.label"))
        scores[str(result.get("gen_ai.evaluation.name"))] = next((each for each in values if each is not None), None)
    for key, value in attributes.items():
        if _SCORED.search(key):
            start = key[: -len("name")]
            values = (attributes.get(f"{start}score"), attributes.get(f"{start}label"))
            scores[str(value)] = next((each for each in values if each is not None), None)
    return {key: value for key, value in scores.items() if value is not None}
