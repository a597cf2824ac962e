"""Find files whose lines are one session of an agent, and read each as one record.

Such a file is recognized by its first lines: a transcript of Claude Code, a rollout of Codex, events of OpenHands (a
list, or a folder with one file for each event), or messages. The record is {"session_file": producer, "name": ...,
"lines": [...]}; `claude_code`, `codex`, `openhands` and `message_lines` convert it. Records of this form can be passed
from Python too.
"""

import json
import os
import re
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from tracegrad import _core
from tracegrad.data import chat
from tracegrad.data.read_options import CHUNK_BYTES, MOST_BYTES
from tracegrad.data.trace import parse_json
from tracegrad.errors import FormatError, ReadError

HEAD_BYTES = 4096
MESSAGES = "message_lines"
_NOT_MESSAGE = {"messages", "response", "choices", "request", "prompt", "completion", "calls", "stop_reason", "usage"}
_CONTENT = {"content", "text", "parts", "items", "blocks", "value", "tool_calls"}
"""Fields of a message, and fields of a record of a call or of an API's response."""
_SIGNS = re.compile(rb'"(parentUuid|leafUuid|messageId|session_meta|llm_response_id|observation)"')
_LINES = re.compile(rb'"(parentUuid|leafUuid)"|"type": ?"session_meta"')
_TOKENS = re.compile(rb'"((?:[^"\\]|\\.)*)"(\s*:)?|[\[\]{}]')
_EVENT_FILE = re.compile(r"event-(\d+)-.+\.json$")
_HEAD_LINES = 16


def is_event_folder(names: list[str]) -> bool:
    """Return whether a folder with files of these names is a conversation of OpenHands: one file for each event."""
    return any(map(_EVENT_FILE.match, names))


def may_be_lines_of_a_session(head: bytes) -> bool:
    """Return whether the first bytes of a file may be lines of a session of Claude Code or Codex."""
    return bool(_LINES.search(head)) or _may_be_message(head)


def _may_be_message(head: bytes) -> bool:
    """Return whether the first record of a file has a field `role`, given the first bytes."""
    if b'"role"' not in head:
        return False
    depth, depth_of_record = 0, 2 if head.lstrip().startswith(b"[") else 1
    for token in _TOKENS.finditer(head):
        depth += {b"{": 1, b"[": 1, b"}": -1, b"]": -1}.get(token[0], 0)
        if depth == depth_of_record and token[1] == b"role" and token[2]:
            return True
        if depth < depth_of_record and token[0] in (b"}", b"]"):
            return False
    return False


def producer_of_file(path: str, head: bytes) -> str | None:
    """Return the producer of a session file, given its first bytes; None for other files."""
    if head[:2] == b"\x1f\x8b":
        try:
            head = zlib.decompressobj(31).decompress(head, HEAD_BYTES)
        except zlib.error:
            return None
    is_zstd = head[:4] == b"\x28\xb5\x2f\xfd"
    if not is_zstd and not _SIGNS.search(head) and not _may_be_message(head):
        return None
    try:
        first = _reader(path).cut(_HEAD_LINES, 1 << 16)
    except (ReadError, FormatError, OSError):
        return None  # The reader of the file reports the error.
    return producer_of([_parse(raw) for _, raw in first])


def producer_of(lines: list[Any]) -> str | None:
    """Return the producer of the first lines of a session, None if they are something else."""
    fields = [chat.as_mapping(line) for line in lines]
    if fields and fields[0].get("type") == "session_meta" and isinstance(fields[0].get("payload"), Mapping):
        return "codex"
    if any("parentUuid" in each and "sessionId" in each and "uuid" in each for each in fields):
        return "claude_code"
    is_old = [isinstance(each.get("source"), str) and ("action" in each or "observation" in each) for each in fields]
    is_new = [isinstance(each.get("kind"), str) and isinstance(each.get("source"), str) for each in fields]
    are_events = all(is_old) or (all(is_new) and any(str(each["kind"]).endswith("Event") for each in fields))
    if fields and all("id" in each for each in fields) and are_events:
        return "openhands"
    return MESSAGES if _are_messages(lines) else None


def _are_messages(lines: list[Any]) -> bool:
    """Return whether the first records of a file are messages, some of them not of the assistant."""
    records = [line for line in lines if line is not None]
    roles = {chat.role(line) for line in records}
    return len(records) > 1 and all(map(is_message, records)) and bool(roles - {"assistant", "model"})


def is_message(line: Any) -> bool:
    """Return whether a record is one message of a conversation."""
    fields = chat.as_mapping(line)
    is_filled = not _CONTENT.isdisjoint(fields) and _NOT_MESSAGE.isdisjoint(fields)
    return is_filled and isinstance(fields.get("role"), str)


def records(path: str) -> Iterator[bytes]:
    """Yield the session of a file or folder as one record.

    Raises:
        ReadError: if it has more than `MOST_BYTES`.
    """
    is_folder = os.path.isdir(path)
    lines: list[bytes] = []
    broken: list[int] = []
    size = 0
    # The number of an event is its place. The rest of the name is a random id.
    matches = filter(None, map(_EVENT_FILE.match, os.listdir(path) if is_folder else []))
    parts = [os.path.join(path, name) for _, name in sorted((int(match[1]), match[0]) for match in matches)]
    for part in parts if is_folder else [path]:
        reader = _reader(part)
        while chunk := reader.cut(256, 8 << 20):
            for _, raw in chunk:
                size += len(raw)
                if size > MOST_BYTES:
                    raise ReadError(
                        f"TG-DATA-046: {path}: a session of more than {MOST_BYTES:,} bytes. It is one conversation, "
                        "which is converted in memory. Leave it out, or start new sessions more often."
                    )
                if _parse(raw) is None:
                    broken.append(len(lines) + len(broken) + 1)
                else:
                    lines.append(raw)
    first = [_parse(raw) for raw in lines[:_HEAD_LINES]]
    name = Path(path).name.split(".")[0] if not is_folder else Path(path).parent.name
    header = {"session_file": producer_of(first) or "openhands", "name": name, "broken": broken, "count": len(lines)}
    yield json.dumps(header).encode()[:-1] + b', "lines": [' + b",".join(lines) + b"]}"


def _reader(path: str) -> Any:
    return _core.TraceReader(path, "raise", None, None, MOST_BYTES, CHUNK_BYTES, "auto", None)


def _parse(raw: bytes) -> Any:
    """Parse a line; None if it is not JSON."""
    try:
        return parse_json(raw)
    except (ValueError, RecursionError):
        return None
