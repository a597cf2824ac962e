"""Keep the open sessions of a proxy on disk, so that a killed proxy loses no call.

Each session has one file. It grows by a line per call and is deleted once the session is recorded.
"""

import fcntl
import os
import secrets
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tracegrad.errors import ArgumentError, FormatError, TracegradError
from tracegrad.rollout.client import dumps, loads
from tracegrad.rollout.session import Session
from tracegrad.storage import files as outputs

ENDING = ".jsonl"


@dataclass
class Entry:
    """One open session.

    Args:
        name, group: set by its client.
        token: unique id of this session, since names can be used again. The record of the session contains it, so a
            recorded session can be distinguished from an open one of the same name.
        messages: messages of the last request in the file.
        tools: tools of the last request in the file.
        calls, lost: number of calls and of lost calls in the file.
    """

    name: str
    group: str | None
    token: str
    messages: list[Any]
    tools: Any = None
    calls: int = 0
    lost: int = 0


class Journal:
    """Open sessions of a proxy.

    The part that a request shares with the previous one is written once. Writes are not flushed to disk: they survive a
    killed process, but not a crash of the machine.

    Args:
        folder: created on entering; only one proxy may use it at a time.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __enter__(self) -> "Journal":
        """Create and lock the folder."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._lock = os.open(self.folder, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise TracegradError(
                f"TG-ROLLOUT-031: {self.folder}: {error.strerror}. Sessions cannot be stored there. Free disk space, "
                f"or choose another folder."
            ) from error
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(self._lock)
            raise ArgumentError(
                f"TG-ROLLOUT-032: {self.folder} is in use by another running proxy. Choose another folder, or pass "
                "several servers to one proxy."
            ) from error
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._lock)

    @property
    def files(self) -> list[Path]:
        """Files of the open sessions."""
        return sorted(self.folder.glob("*" + ENDING))

    def start(self, name: str, group: str | None) -> Entry:
        """Create the file of a session that a client opens."""
        entry = Entry(name, group, secrets.token_hex(8), [])
        self._path(name).unlink(missing_ok=True)
        self._append(entry, {"name": name, "group": group, "token": entry.token})
        return entry

    def keep(self, entry: Entry, session: Session) -> None:
        """Write the calls that are not in the file yet.

        Raises:
            OSError: if they cannot be written; the next call of this method writes them too.
        """
        for call in session.calls[entry.calls :]:
            self._append(entry, {"call": {**call, "request": None}, **_shorten(call["request"], entry)})
            entry.calls += 1
            _remember(call["request"], entry)
        for lost in session.lost[max(0, len(session.lost) - (session.lost_count - entry.lost)) :]:
            self._append(entry, {"lost": lost})
        entry.lost = session.lost_count

    def end(self, entry: Entry) -> None:
        """Delete the file of a session that is recorded."""
        self._path(entry.name).unlink(missing_ok=True)

    def forget(self, tokens: Collection[str]) -> None:
        """End the sessions with these tokens, whose records were written before their proxy was killed."""
        for entry, _, _ in self.open_sessions():
            if entry.token in tokens:
                self.end(entry)

    def open_sessions(self) -> Iterator[tuple[Entry, list[dict[str, Any]], list[dict[str, Any]]]]:
        """Yield the sessions that an earlier proxy left open: entry, calls, and lost calls.

        Raises:
            FormatError: if a file is not valid.
        """
        for path in self.files:
            try:
                session = _read(path)
            except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
                raise FormatError(
                    f"TG-ROLLOUT-033: {path}: not the journal of a session ({str(error)[:80]!r}), so this session "
                    "cannot continue. Move the file out of the folder, and start the proxy again."
                ) from error
            if session is None:
                path.unlink()  # killed before the first line was complete
            else:
                yield session

    def _path(self, name: str) -> Path:
        return self.folder / (name + ENDING)

    def _append(self, entry: Entry, line: dict[str, Any]) -> None:
        data = memoryview(dumps(line) + b"\n")
        file = outputs.open_descriptor(self._path(entry.name), os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        try:
            size = os.fstat(file).st_size
            try:
                while data:
                    data = data[os.write(file, data) :]
            except OSError:
                os.ftruncate(file, size)
                raise
        finally:
            os.close(file)


def _shorten(request: dict[str, Any], entry: Entry) -> dict[str, Any]:
    """Return the line of a request without the part that it shares with the previous one."""
    messages = request.get("messages")
    if not isinstance(messages, list):
        return {"request": request}
    same = 0
    while same < min(len(messages), len(entry.messages)) and messages[same] is entry.messages[same]:
        same += 1
    short = {**request, "messages": messages[same:]}
    line: dict[str, Any] = {"request": short, "same": same}
    if "tools" in short and short["tools"] is entry.tools:
        short["tools"] = None
        line["tools"] = "same"
    return line


def _remember(request: dict[str, Any], entry: Entry) -> None:
    if isinstance(request.get("messages"), list):
        entry.messages = request["messages"]
        entry.tools = request.get("tools", entry.tools)


def _read(path: Path) -> tuple[Entry, list[dict[str, Any]], list[dict[str, Any]]] | None:
    """Read the file of a session and cut off an incomplete last line. Return None if no line is complete."""
    calls: list[dict[str, Any]] = []
    lost: list[dict[str, Any]] = []
    entry, end = None, 0
    outputs.check(path)
    with path.open("rb") as file:
        for line in file:
            if not line.endswith(b"\n"):
                os.truncate(path, end)
                break
            end += len(line)
            record = loads(line)
            if entry is None:
                if record["name"] != path.name.removesuffix(ENDING):
                    raise ValueError("it has the name of another session")
                entry = Entry(record["name"], record["group"], str(record["token"]), [])
            elif "lost" in record:
                lost.append(record["lost"])
            else:
                calls.append({**record["call"], "request": _restore_request(record, entry)})
    if entry is not None:
        entry.calls, entry.lost = len(calls), len(lost)
        return entry, calls, lost
    return None


def _restore_request(record: dict[str, Any], entry: Entry) -> dict[str, Any]:
    """Restore the part of a request that it shares with the previous one."""
    request = dict(record["request"])
    if "same" in record:
        request["messages"] = [*entry.messages[: record["same"]], *request["messages"]]
    if record.get("tools") == "same":
        request["tools"] = entry.tools
    _remember(request, entry)
    return request
