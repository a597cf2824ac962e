"""Read the traces of an MLflow experiment with MLflow's own client.

Source: mlflow 3.17 `MlflowClient.search_traces`, `to_dict` of its traces and spans, `to_dictionary` of its assessments.
"""

import base64
import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from datetime import datetime
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

PAGE = 100
_REPEATED = ("mlflow.traceInputs", "mlflow.traceOutputs", "mlflow.trace.sizeStats")
"""Metadata of a trace that repeat its root span, or are of no use without the server."""
_UNREADABLE = ("BAD_REQUEST", "NOT_FOUND", "RESOURCE_DOES_NOT_EXIST")
"""Codes of errors for one trace: the server has no spans of it, has damaged ones, or it was deleted meanwhile."""
_STATUS = {"STATUS_CODE_OK": 1, "STATUS_CODE_ERROR": 2}


class MlflowTraces:
    """The traces of an experiment; a `pull.TraceStore`.

    Args:
        url: address of the tracking server.
        project: name of the experiment.
        key: token that the server requires, if it does.

    Raises:
        ArgumentError: if there is no such experiment.
    """

    def __init__(self, url: str, project: str, key: str | None = None) -> None:
        # MLflow otherwise reports its use over the network, and repeats requests for minutes.
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "2")
        if key is not None:
            os.environ["MLFLOW_TRACKING_TOKEN"] = key
        from mlflow import MlflowClient
        from mlflow.exceptions import MlflowException

        self._error = MlflowException
        self.name = f"mlflow {redact(url)} {project}"
        self._client = MlflowClient(tracking_uri=url)
        experiment = self._client.get_experiment_by_name(project)
        if experiment is None:
            raise unknown_project(self.name, [each.name for each in self._client.search_experiments(max_results=20)])
        self._experiment = experiment.experiment_id

    def changed(self, is_known: Callable[[str, str], bool], counts: Counter[str]) -> Iterator[PulledTrace]:
        """Yield new and changed traces, oldest first. A trace that has not ended is counted as unfinished."""
        token = None
        while True:
            page = self._client.search_traces(
                locations=[self._experiment],
                max_results=PAGE,
                order_by=["timestamp_ms ASC"],
                page_token=token,
                include_spans=False,
            )
            for trace in page:
                info = trace.info.to_dict()
                fingerprint = fingerprint_of(info)
                if info["state"] == "IN_PROGRESS":
                    counts["unfinished"] += 1
                elif is_known(info["trace_id"].removeprefix("tr-"), fingerprint):
                    counts["unchanged"] += 1
                else:
                    try:
                        spans = self._client.get_trace(info["trace_id"]).to_dict()["data"]["spans"]
                    except self._error as error:
                        if error.error_code not in _UNREADABLE:
                            raise
                        counts["unreadable"] += 1
                        continue
                    if spans:
                        yield _pulled(info, spans, fingerprint)
                    else:
                        counts["unfinished"] += 1
            if not (token := page.token):
                return


def _pulled(info: Mapping[str, Any], spans: list[dict[str, Any]], fingerprint: str) -> PulledTrace:
    converted = [_span(span) for span in spans]
    root = root_of(converted)
    by_id = {span["spanId"]: span for span in converted}
    metadata = {**info.get("trace_metadata", {}), **info.get("tags", {})}
    values = {name: value for name, value in metadata.items() if name not in _REPEATED}
    values["session.id"] = metadata.get("mlflow.trace.session")
    for assessment in sorted(info.get("assessments", ()), key=lambda each: each["create_time"]):
        name = assessment["assessment_name"]
        if "expectation" in assessment:
            values[f"expectation.{name}"] = assessment["expectation"].get("value")
        elif assessment.get("valid", True) and (event := _event(assessment)) is not None:
            by_id.get(assessment.get("span_id") or "", root).setdefault("events", []).append(event)
    present = {attribute["key"] for attribute in root["attributes"]}
    root["attributes"] += attribute_list({name: value for name, value in values.items() if name not in present})
    scope = {"scope": {"name": "mlflow"}}
    return PulledTrace(root["traceId"], fingerprint, join([({"resource": {}}, scope, span) for span in converted]))


def _event(assessment: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the event of a feedback; None if it has neither a number nor a text."""
    value = assessment.get("feedback", {}).get("value")
    is_number = isinstance(value, (bool, int, float))
    if not is_number and not isinstance(value, str):
        return None
    source = assessment.get("source", {})
    time = datetime.fromisoformat(assessment["create_time"].replace("Z", "+00:00"))
    return evaluation_event(
        assessment["assessment_name"],
        int(time.timestamp() * 1000) * 1_000_000,
        score=float(value) if is_number else None,
        label=None if is_number else value,
        explanation=assessment.get("rationale"),
        source=source.get("source_type"),
    )


def _span(span: Mapping[str, Any]) -> dict[str, Any]:
    events = [
        {
            "name": event["name"],
            "timeUnixNano": str(event["time_unix_nano"]),
            "attributes": attribute_list(event.get("attributes") or {}),
        }
        for event in span.get("events") or ()
    ]
    status = span.get("status") or {}
    code = _STATUS.get(status.get("code", ""))
    return {
        "traceId": _hex(span["trace_id"]),
        "spanId": _hex(span["span_id"]),
        "parentSpanId": _hex(span["parent_span_id"]) if span.get("parent_span_id") else "",
        "name": span["name"],
        "startTimeUnixNano": str(span["start_time_unix_nano"]),
        "endTimeUnixNano": str(span["end_time_unix_nano"] or 0),
        "attributes": attribute_list(span.get("attributes") or {}),
        **({"events": events} if events else {}),
        "status": {
            **({"code": code} if code else {}),
            **({"message": status["message"]} if status.get("message") else {}),
        },
    }


def _hex(value: str) -> str:
    """Convert an id in base64 to hexadecimal digits."""
    return base64.b64decode(value).hex()
