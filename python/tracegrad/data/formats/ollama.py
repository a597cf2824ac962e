"""Refuse what Ollama's server logs: it has no answers.

Source: ollama at fb307609 `server/inference_request_log.go` (OLLAMA_DEBUG_LOG_REQUESTS writes the bodies of requests
alone) and `envconfig` (the log has lines of text). Calls of `/api/chat` and `/api/generate` are read by the core.
"""

import re
from collections.abc import Mapping
from typing import Any

from tracegrad.data import chat
from tracegrad.data.formats import record_fields

_LINE = re.compile(rb"\s*time=\S+ level=[A-Z]+ source=\S+\.go:\d+ ")
KEYS = ("stream", "options", "keep_alive")
FIX = "Record the request and the response of each call at the client or in a proxy: {request: ..., response: ...}"


def is_server_log(line: bytes) -> bool:
    """Return whether a line is one of the log of Ollama's server.

    >>> is_server_log(b'time=2026-11-01T00:00:00.000Z level=INFO source=routes.go:1528 msg="Listening"')
    True
    """
    return bool(_LINE.match(line[:400]))


def of_request(record: Any) -> list[dict[str, Any]] | None:
    """Return a failed call for the body of a request without its response; None for other records."""
    fields = chat.as_mapping(record)
    talk, has_option = fields.get("messages"), not set(KEYS).isdisjoint(fields)
    if not (isinstance(fields.get("model"), str) and has_option and isinstance(talk, list) and talk):
        return None
    if chat.role(talk[-1]) in (None, "assistant") or _has_response(fields):
        return None
    why = f"it is the body of a request without its response, as OLLAMA_DEBUG_LOG_REQUESTS writes it. {FIX}"
    return [record_fields.failed_call(fields, why)]


def _has_response(fields: Mapping[str, Any]) -> bool:
    others = fields.keys() - {"messages", "model", "tools", "format", "think", "template", "system", *KEYS}
    return any(isinstance(fields[key], (Mapping, list)) for key in others)
