"""What a proxy knows of the sessions that clients opened, on the disk while they are open: a killed one loses no call.

One file for each session grows by a line for each call and is gone once the session is recorded. Called by `proxy`.
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
        name, group: as its client says them.
        token: of this session alone, as names come again. Its record has it, which tells a session that was recorded
            from one that was not, where both names are found.
        messages: of the last request that stands there.
        tools: likewise.
        calls, lost: how many stand there.
    """

    name: str
    group: str | None
    token: str
    messages: list[Any]
    tools: Any = None
    calls: int = 0
    lost: int = 0


class Journal:
    """The open sessions of a proxy.

    What a request has in common with the one before it is written once. Nothing is flushed to the disk itself: what is
    written survives the process, not the machine.

    Args:
        folder: made on entering, and one proxy's alone while it is entered.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __enter__(self) -> "Journal":
        """Takes the folder."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._lock = os.open(self.folder, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise TracegradError(
                f"{self.folder}: {error.strerror}. Sessions could not be kept. Make room, or give another folder."
            ) from error
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(self._lock)
            raise ArgumentError(
                f"{self.folder} is another proxy's, which runs. Its sessions would be taken for lost. Give another "
                "folder, or one proxy several servers."
            ) from error
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._lock)

    @property
    def files(self) -> list[Path]:
        """Those of the sessions that are open."""
        return sorted(self.folder.glob("*" + ENDING))

    def begin(self, name: str, group: str | None) -> Entry:
        """A session that a client opens."""
        entry = Entry(name, group, secrets.token_hex(8), [])
        self._path(name).unlink(missing_ok=True)
        self._append(entry, {"name": name, "group": group, "token": entry.token})
        return entry

    def keep(self, entry: Entry, session: Session) -> None:
        """Writes the calls that do not stand there yet.

        Raises:
            OSError: if they cannot be written; the next call of this writes them too.
        """
        for call in session.calls[entry.calls :]:
            self._append(entry, {"call": {**call, "request": None}, **_shortened(call["request"], entry)})
            entry.calls += 1
            _remember(call["request"], entry)
        for lost in session.lost[max(0, len(session.lost) - (session.losses - entry.lost)) :]:
            self._append(entry, {"lost": lost})
        entry.lost = session.losses

    def end(self, entry: Entry) -> None:
        """The session is recorded."""
        self._path(entry.name).unlink(missing_ok=True)

    def forget(self, tokens: Collection[str]) -> None:
        """Ends the sessions of these tokens: a proxy was killed after their records were written."""
        for entry, _, _ in self.found():
            if entry.token in tokens:
                self.end(entry)

    def found(self) -> Iterator[tuple[Entry, list[dict[str, Any]], list[dict[str, Any]]]]:
        """The sessions that a proxy before this one left open: calls, and calls that were lost."""
        for path in self.files:
            try:
                told = _read(path)
            except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
                raise FormatError(
                    f"{path}: not what a proxy writes ({str(error)[:80]!r}). The session that it was cannot go on. "
                    "Move it out of the folder, and start the proxy again."
                ) from error
            if told is None:
                path.unlink()  # killed before the first line was whole
            else:
                yield told

    def _path(self, name: str) -> Path:
        return self.folder / (name + ENDING)

    def _append(self, entry: Entry, line: dict[str, Any]) -> None:
        data = memoryview(dumps(line) + b"\n")
        file = outputs.descriptor(self._path(entry.name), os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        try:
            whole = os.fstat(file).st_size
            try:
                while data:
                    data = data[os.write(file, data) :]
            except OSError:
                os.ftruncate(file, whole)
                raise
        finally:
            os.close(file)


def _shortened(request: dict[str, Any], entry: Entry) -> dict[str, Any]:
    """A request without what it shares with the one before it."""
    messages = request.get("messages")
    if not isinstance(messages, list):
        return {"request": request}
    same = 0
    while same < min(len(messages), len(entry.messages)) and messages[same] is entry.messages[same]:
        same += 1
    short = {**request, "messages": messages[same:]}
    told: dict[str, Any] = {"request": short, "same": same}
    if "tools" in short and short["tools"] is entry.tools:
        short["tools"] = None
        told["tools"] = "same"
    return told


def _remember(request: dict[str, Any], entry: Entry) -> None:
    if isinstance(request.get("messages"), list):
        entry.messages = request["messages"]
        entry.tools = request.get("tools", entry.tools)


def _read(path: Path) -> tuple[Entry, list[dict[str, Any]], list[dict[str, Any]]] | None:
    """A session as its file says it; a last line that was cut is taken away. None without a whole line."""
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
            told = loads(line)
            if entry is None:
                if told["name"] != path.name.removesuffix(ENDING):
                    raise ValueError("it has the name of another session")
                entry = Entry(told["name"], told["group"], str(told["token"]), [])
            elif "lost" in told:
                lost.append(told["lost"])
            else:
                calls.append({**told["call"], "request": _whole(told, entry)})
    if entry is not None:
        entry.calls, entry.lost = len(calls), len(lost)
        return entry, calls, lost
    return None


def _whole(told: dict[str, Any], entry: Entry) -> dict[str, Any]:
    """A request with what it shares with the one before it."""
    request = dict(told["request"])
    if "same" in told:
        request["messages"] = [*entry.messages[: told["same"]], *request["messages"]]
    if told.get("tools") == "same":
        request["tools"] = entry.tools
    _remember(request, entry)
    return request
