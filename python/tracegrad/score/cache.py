"""What was scored before, by what it was made of: a file of JSON lines that is only ever added to."""

import hashlib
import inspect
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tracegrad import outputs
from tracegrad.errors import ArgumentError
from tracegrad.plain_files import refuse_special

MOST_LINE = 1 << 24


class Cache:
    """Answers by their content; a line that is not whole, as after a kill, is passed over.

    Memory holds the keys and where their answers stand, not the answers.

    Args:
        path: the file; None keeps the answers in this object.
    """

    def __init__(self, path: Path | None = None) -> None:
        self._path = path
        self._known: dict[str, Any] = {}
        if path is not None:
            outputs.check(path)
        if path is not None and path.exists():
            self._load(path)

    def _load(self, path: Path) -> None:
        try:
            refuse_special(path)
            with path.open("rb") as lines:
                at = 0
                for line in iter(lambda: lines.readline(MOST_LINE), b""):
                    if (told := _entry(line)) is not None:
                        self._known[told[0]] = at
                    at += len(line)
        except OSError as error:
            raise ArgumentError(
                f"{path}: {error.strerror}. What was scored before is not known. Give another --cache."
            ) from error

    def get(self, key: str) -> Any:
        """The answer, None where there is none."""
        found = self._known.get(key)
        if self._path is None or found is None:
            return found
        try:
            with self._path.open("rb") as file:
                file.seek(found)
                told = _entry(file.readline(MOST_LINE))
        except OSError:
            return None
        return told[1] if told is not None and told[0] == key else None

    def put(self, key: str, value: Any) -> None:
        """Keeps an answer, on the disk at once."""
        if self._path is None:
            self._known[key] = value
            return
        line = json.dumps({"key": key, "value": value}) + "\n"
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with outputs.append(self._path) as file:
                # Behind a line that a kill has cut.
                if file.tell() and not _ends_whole(self._path):
                    file.write(b"\n")
                self._known[key] = file.tell()
                file.write(line.encode())
        except OSError as error:
            raise ArgumentError(
                f"{self._path}: {error.strerror}. What was scored would be scored again. Give another --cache."
            ) from error


def _entry(line: bytes) -> tuple[str, Any] | None:
    try:
        told = json.loads(line)
        return str(told["key"]), told["value"]
    except (ValueError, KeyError, TypeError, RecursionError):
        return None


def _ends_whole(path: Path) -> bool:
    with path.open("rb") as file:
        file.seek(-1, 2)
        return file.read(1) == b"\n"


def key_of(*parts: Any) -> str:
    """A name for what an answer is made of.

    >>> key_of("a", [1]) == key_of("a", [1]), key_of("a", [1]) == key_of("a", [2])
    (True, False)
    """
    text = json.dumps(parts, sort_keys=True, ensure_ascii=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()


def source_of(function: Callable[..., Any]) -> list[str]:
    """What a function is: its name, and the text of the file that it stands in, as it may call what is beside it."""
    while hasattr(function, "func"):
        function = function.func  # type: ignore[attr-defined]
    name = f"{getattr(function, '__module__', '')}.{getattr(function, '__qualname__', type(function).__name__)}"
    try:
        return [name, Path(inspect.getsourcefile(inspect.unwrap(function)) or "").read_text(encoding="utf-8")]
    except (OSError, TypeError, UnicodeDecodeError):
        return [name]
