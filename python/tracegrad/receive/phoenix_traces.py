"""Read the traces of a Phoenix project with Phoenix's own client.

Source: arize-phoenix-client 3.5 `traces.get_traces`, `spans.get_spans`, `spans.get_span_annotations`, and the route
`trace_annotations` of arize-phoenix 20.26, for which the client has no method.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import datetime, timedelta, timezone
from typing import Any

from tracegrad.errors import redact
from tracegrad.receive.folder import join
from tracegrad.receive.pull import (
    PulledTrace,
    attribute_list,
    evaluation_event,
    fingerprint_of,
    root_of,
    unknown_project,
)

PAGE, TIMEOUT_S = 200, 60
_IDS_PER_REQUEST, _MOST_SPANS = 50, 1_000_000
_EPOCH = datetime(1970, 1, 1, tzinfo=timezone.utc)
_STATUS = {"OK": 1, "ERROR": 2}


class PhoenixTraces:
    """The traces of a project; a `pull.TraceStore`.

    Args:
        url: address of the server.
        project: name of the project.
        key: API key that the server requires, if it does.

    Raises:
        ArgumentError: if there is no such project.
    """

    def __init__(self, url: str, project: str, key: str | None = None) -> None:
        import httpx
        from phoenix.client import Client

        self.name = f"phoenix {redact(url)} {project}"
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        self._http = httpx.Client(base_url=url, headers=headers, timeout=TIMEOUT_S)
        self._client = Client(http_client=self._http)
        ids = {str(each["name"]): each["id"] for each in self._client.projects.list()}
        if project not in ids:
            raise unknown_project(self.name, list(ids))
        self._project = ids[project]  # A name in the path of a request cannot have a slash.

    def changed(self, is_known: Callable[[str, str], bool], counts: Counter[str]) -> Iterator[PulledTrace]:
        """Yield new and changed traces, oldest first."""
        start, limit, seen = None, PAGE, set[str]()
        while True:
            page = self._client.traces.get_traces(
                project_identifier=self._project,
                start_time=start,
                sort="start_time",
                order="asc",
                include_spans=True,
                limit=limit,
                timeout=TIMEOUT_S,
            )
            new = [trace for trace in page if trace["trace_id"] not in seen]
            if not new:
                if len(page) < limit:
                    return
                limit *= 2  # more traces than a page start at the same time
                continue
            yield from self._changed_of(new, is_known, counts)
            start = datetime.fromisoformat(page[-1]["start_time"].replace("Z", "+00:00"))
            seen, limit = {trace["trace_id"] for trace in page}, PAGE

    def _changed_of(
        self, traces: Sequence[Any], is_known: Callable[[str, str], bool], counts: Counter[str]
    ) -> Iterator[PulledTrace]:
        spans = [span["span_id"] for trace in traces for span in trace.get("spans", ())]
        scores: dict[str, list[Any]] = defaultdict(list)
        for annotation in self._client.spans.get_span_annotations(
            span_ids=spans, project_identifier=self._project, timeout=TIMEOUT_S
        ):
            scores[annotation["span_id"]].append(annotation)
        for annotation in self._trace_annotations([trace["trace_id"] for trace in traces]):
            scores[annotation["trace_id"]].append(annotation)
        fingerprints = {}
        for trace in traces:
            own = [scores[name] for name in (trace["trace_id"], *(span["span_id"] for span in trace.get("spans", ())))]
            fingerprint = fingerprint_of([trace, own])
            if is_known(trace["trace_id"], fingerprint):
                counts["unchanged"] += 1
            else:
                fingerprints[trace["trace_id"]] = fingerprint
        names = list(fingerprints)
        for first in range(0, len(names), _IDS_PER_REQUEST):
            by_trace = defaultdict(list)
            chunk = names[first : first + _IDS_PER_REQUEST]
            for span in self._client.spans.get_spans(
                project_identifier=self._project, trace_ids=chunk, limit=_MOST_SPANS, timeout=TIMEOUT_S
            ):
                by_trace[span["context"]["trace_id"]].append(span)
            for trace in chunk:
                if found := by_trace[trace]:
                    yield _pulled(trace, found, scores, fingerprints[trace])

    def _trace_annotations(self, traces: Sequence[str]) -> Iterator[Any]:
        path = f"v1/projects/{self._project}/trace_annotations"
        for first in range(0, len(traces), _IDS_PER_REQUEST):
            cursor = None
            while True:
                ids = list(traces[first : first + _IDS_PER_REQUEST])
                parameters = {"trace_ids": ids, "limit": 1000, **({"cursor": cursor} if cursor else {})}
                response = self._http.get(path, params=parameters)
                response.raise_for_status()
                body = response.json()
                yield from body["data"]
                if not (cursor := body.get("next_cursor")):
                    break


def _pulled(
    trace: str, spans: Sequence[Mapping[str, Any]], scores: Mapping[str, Sequence[Any]], fingerprint: str
) -> PulledTrace:
    converted = [_span(span) for span in sorted(spans, key=lambda span: span["start_time"])]
    root = root_of(converted)
    for name, target in [(trace, root), *((span["spanId"], span) for span in converted)]:
        for annotation in sorted(scores.get(name, ()), key=lambda each: each["updated_at"]):
            result = annotation.get("result") or {}
            if result.get("score") is None and result.get("label") is None:
                continue
            event = evaluation_event(
                annotation["name"],
                _nanoseconds(annotation["updated_at"]),
                score=result.get("score"),
                label=result.get("label"),
                explanation=result.get("explanation"),
                source=annotation.get("annotator_kind"),
            )
            target.setdefault("events", []).append(event)
    scope = {"scope": {"name": "phoenix"}}
    return PulledTrace(trace, fingerprint, join([({"resource": {}}, scope, span) for span in converted]))


def _span(span: Mapping[str, Any]) -> dict[str, Any]:
    attributes = {"openinference.span.kind": span["span_kind"], **(span.get("attributes") or {})}
    events = [
        {
            "name": event["name"],
            "timeUnixNano": str(_nanoseconds(event["timestamp"])),
            "attributes": attribute_list(event.get("attributes") or {}),
        }
        for event in span.get("events") or ()
    ]
    code = _STATUS.get(span["status_code"])
    return {
        "traceId": span["context"]["trace_id"],
        "spanId": span["context"]["span_id"],
        "parentSpanId": span.get("parent_id") or "",
        "name": span["name"],
        "startTimeUnixNano": str(_nanoseconds(span["start_time"])),
        "endTimeUnixNano": str(_nanoseconds(span["end_time"])),
        "attributes": attribute_list(attributes),
        **({"events": events} if events else {}),
        "status": {
            **({"code": code} if code else {}),
            **({"message": span["status_message"]} if span.get("status_message") else {}),
        },
    }


def _nanoseconds(time: str) -> int:
    """Return a time in nanoseconds since 1970. The store has microseconds."""
    since = datetime.fromisoformat(time.replace("Z", "+00:00")) - _EPOCH
    return since // timedelta(microseconds=1) * 1000
