"""Write rollouts to disk by whole groups, follow them from the trainer, and log which groups each step took.

`Writer` (one per process that rolls out) appends zstd frames; `Follower` reads what is new in the files of all writers;
`Unscored` keeps a group until it is scored. `steps.jsonl` makes a run resumable and replayable bit for bit.
"""

import fcntl
import json
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from tracegrad import _core
from tracegrad.data.trace import Traces
from tracegrad.errors import ArgumentError, FormatError, ReadError, TracegradError
from tracegrad.rollout.client import dumps, loads
from tracegrad.storage import files
from tracegrad.storage.manifest import count
from tracegrad.storage.safetensors_file import flush, write_bytes

FOLDER = "played"
ENDING = ".jsonl.zst"
MOST_BYTES = 1 << 30
"""Bytes of the records of one group."""


@dataclass(frozen=True, order=True)
class Place:
    """Where a group stands.

    Args:
        file: name within the folder.
        offset, length: bytes of its frame.
    """

    file: str
    offset: int
    length: int


class Writer:
    """Appends groups to a file of its own, which nobody else writes; threads may share it.

    Args:
        folder: made if it is not there.
    """

    def __init__(self, folder: Path) -> None:
        self._compressor = _compressor()
        self.folder = folder
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self.name, self._file = _new(folder)
            flush(folder)
        except OSError as error:
            raise _unwritten(folder, error) from error
        self._end = 0
        self._alone = threading.Lock()

    def write(self, records: Sequence[dict[str, Any]]) -> Place:
        """Appends one group; it is on the disk, whole, when this returns, or not there at all.

        Raises:
            ArgumentError: for a record that JSON cannot say, or a group beyond `MOST_BYTES`.
            TracegradError: if it cannot be written.
        """
        text = _lines(records)
        with self._alone:
            return self._append(text)

    def _append(self, text: bytes) -> Place:
        frame = self._compressor.compress(text)
        try:
            left = memoryview(frame)
            while left:
                left = left[os.write(self._file, left) :]
            os.fsync(self._file)
        except OSError as error:
            os.ftruncate(self._file, self._end)
            os.lseek(self._file, self._end, os.SEEK_SET)
            raise _unwritten(self.folder / self.name, error) from error
        place = Place(self.name, self._end, len(frame))
        self._end += len(frame)
        return place

    def close(self) -> None:
        """Lets go of the file."""
        os.close(self._file)

    def __enter__(self) -> "Writer":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()


class Unscored:
    """Groups that are played and not scored: a file for each, gone once its group is written with its rewards.

    They are outside of the folder that is read while it grows, so that a reader finds a group there once.

    Args:
        out: folder of the run.
    """

    def __init__(self, out: Path) -> None:
        self.folder = out / "unscored"

    @property
    def groups(self) -> set[int]:
        """The numbers of the groups that are kept."""
        names = (path.name.removesuffix(ENDING) for path in self.folder.glob(f"*{ENDING}"))
        return {int(name) for name in names if name.isascii() and name.isdecimal()}

    def keep(self, number: int, records: Sequence[dict[str, Any]]) -> None:
        """Writes a group; it is on the disk when this returns.

        Raises:
            ArgumentError: as for `Writer.write`.
            TracegradError: if it cannot be written.
        """
        text = _lines(records)
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise _unwritten(self.folder, error) from error
        write_bytes(self.path(number), [_compressor().compress(text)])

    def read(self, number: int) -> list[dict[str, Any]] | None:
        """The records of a group; None where it is not kept.

        Raises:
            ReadError: if the file is not what `keep` wrote.
        """
        path = self.path(number)
        if not path.exists():
            return None
        zstandard = _zstandard()
        try:
            data = path.read_bytes()
            if zstandard.get_frame_parameters(data).content_size > MOST_BYTES:
                raise ValueError(f"it claims more than {MOST_BYTES:,} bytes")
            records = [loads(line) for line in zstandard.ZstdDecompressor().decompress(data).splitlines()]
            if not records or not all(isinstance(each, dict) for each in records):
                raise ValueError("it holds no records")
        except (OSError, ValueError, RecursionError, zstandard.ZstdError) as error:
            raise unusable(path, error) from error
        return records

    def drop(self, numbers: Iterable[int]) -> None:
        """Takes groups away: they are written with their rewards."""
        for number in numbers:
            self.path(number).unlink(missing_ok=True)

    def path(self, number: int) -> Path:
        """The file of a group."""
        return self.folder / f"{number}{ENDING}"


def unusable(path: Path, error: Exception) -> ReadError:
    """What is said of a group that was kept and cannot be scored."""
    return ReadError(
        f"{path}: the group that was played before cannot be scored ({str(error)[:200]}). Its number would be played "
        "again and this file be replaced. Copy the file again, or move it out of the folder to have the task played."
    )


class Follower:
    """Finds the groups of a folder in the order in which they came to be whole."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.without = ""
        """The file that is not looked at: that of a writer who knows what it has written."""
        self._ends: dict[str, int] = {}

    def look(self) -> list[tuple[Place, Traces]]:
        """The groups that are whole and were not there the last time.

        Raises:
            ReadError: for a frame that was changed.
        """
        return list(self.each())

    def each(self) -> Iterator[tuple[Place, Traces]]:
        """As `look`, one at a time."""
        for path in sorted(self.folder.glob(f"*{ENDING}")):
            if path.name == self.without:
                continue
            start = self._ends.get(path.name, 0)
            frames = _core.Frames(os.fspath(path), start, MOST_BYTES)
            while (frame := frames.next()) is not None:
                place = Place(path.name, start, frame[1])
                start = self._ends[path.name] = start + frame[1]
                yield place, Traces(frame[0])

    def skip(self, places: Iterable[Place]) -> None:
        """Leaves out groups that were taken before, and all before them in their files."""
        for place in places:
            self._ends[place.file] = max(self._ends.get(place.file, 0), place.offset + place.length)


def read(folder: Path, place: Place) -> Traces:
    """One group.

    Raises:
        ReadError: if it is not there any more.
    """
    path = folder / place.file
    frame = _core.Frames(os.fspath(path), place.offset, MOST_BYTES).next()
    if frame is None or frame[1] != place.length:
        raise ReadError(
            f"{path}: the group at byte {place.offset} is not whole. The step that took it cannot be made again. "
            "Copy the file again."
        )
    return Traces(frame[0])


def _lines(records: Sequence[dict[str, Any]]) -> bytes:
    """The records of a group as lines."""
    try:
        text = b"".join(dumps(record) + b"\n" for record in records)
    except (TypeError, ValueError, RecursionError) as error:
        raise ArgumentError(
            f"a record of group {records[0].get('group')!r} is no JSON: {error}. It could not be read again. "
            "Keep numbers, strings, lists and dicts in metadata and rewards."
        ) from error
    if len(text) > MOST_BYTES:
        raise ArgumentError(
            f"group {records[0].get('group')!r} has {len(text):,} bytes of records. A group is read at once. "
            f"Limit its turns or tokens: at most {MOST_BYTES:,}."
        )
    return text


def _compressor() -> Any:
    return _zstandard().ZstdCompressor(level=1, write_checksum=True, write_content_size=True)


def _new(folder: Path) -> tuple[str, int]:
    """A file that was not there, and is this process's alone."""
    number = len(list(folder.glob(f"*{ENDING}")))
    while True:
        name = f"{number:05d}{ENDING}"
        try:
            # O_EXCL follows no link.
            file = os.open(folder / name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
        except FileExistsError:
            number += 1
            continue
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return name, file


def _unwritten(path: Path, error: OSError) -> TracegradError:
    return TracegradError(
        f"{path}: {error.strerror}. The group that was played is not kept. Make room and start the run again."
    )


def _zstandard() -> Any:
    try:
        import zstandard
    except ImportError as error:
        raise ArgumentError(
            "the package zstandard is not installed. What is played could not be written. "
            "pip install 'tracegrad[online]'."
        ) from error
    return zstandard


NAME = "steps.jsonl"


@dataclass(frozen=True)
class Taken:
    """The groups of one step, in their order.

    Args:
        step: from 0.
        version: of the policy before it.
        groups: where they stand.
        dull: those of `groups` that are left out, as their rewards are equal or unknown.
    """

    step: int
    version: int
    groups: tuple[Place, ...]
    dull: tuple[int, ...] = ()

    @property
    def trained(self) -> tuple[Place, ...]:
        """The groups that the step is made of."""
        left_out = set(self.dull)
        return tuple(place for index, place in enumerate(self.groups) if index not in left_out)


class Ledger:
    """The steps of a run.

    Args:
        folder: of the run.
    """

    def __init__(self, folder: Path) -> None:
        self.path = folder / NAME
        self.steps: list[Taken] = []
        self._read = 0
        self.refresh()

    def refresh(self) -> None:
        """Takes up the lines that others have added; a last line that was cut off is not there."""
        if not self.path.exists():
            return
        with self.path.open("rb") as file:
            file.seek(self._read)
            data = file.read()
        whole = data[: data.rfind(b"\n") + 1]
        for line in whole.splitlines():
            self.steps.append(_taken(line, self.path, len(self.steps)))
        self._read += len(whole)

    def add(self, version: int, groups: Sequence[Place], dull: Sequence[int] = ()) -> Taken:
        """Writes the line of the next step; it is on the disk when this returns."""
        taken = Taken(len(self.steps), version, tuple(groups), tuple(dull))
        line = json.dumps(_plain(taken), separators=(",", ":")) + "\n"
        try:
            file = files.descriptor(self.path, os.O_WRONLY | os.O_CREAT, 0o644)
            try:
                os.ftruncate(file, self._read)  # a line that a killed run has begun
                os.pwrite(file, line.encode(), self._read)
                os.fsync(file)
            finally:
                os.close(file)
        except OSError as error:
            raise TracegradError(
                f"{self.path}: {error.strerror}. The step could not be made again. Make room and go on from here."
            ) from error
        self.steps.append(taken)
        self._read += len(line)
        return taken

    def wait(self, step: int, stopped: Callable[[], bool], poll_s: float = 0.05) -> Taken | None:
        """The line of a step as soon as it is there: for ranks that do not write. None where the run was stopped."""
        while len(self.steps) <= step:
            over = stopped()
            self.refresh()  # a line may have come just before the end
            if over and len(self.steps) <= step:
                return None
            time.sleep(poll_s if len(self.steps) <= step else 0.0)
        return self.steps[step]


def _plain(taken: Taken) -> dict[str, Any]:
    groups = [[place.file, place.offset, place.length] for place in taken.groups]
    return {"step": taken.step, "version": taken.version, "groups": groups, "dull": list(taken.dull)}


def _taken(line: bytes, path: Path, number: int) -> Taken:
    try:
        told = json.loads(line)
        groups = tuple(_place(*each) for each in told["groups"])
        taken = Taken(count(told["step"]), count(told["version"]), groups, tuple(map(count, told["dull"])))
        if taken.step != number or any(index >= len(groups) for index in taken.dull):
            raise ValueError("it is not the line that stands here")
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise FormatError(
            f"{path}:{number + 1}: not the line of a step ({str(error)[:80]!r}). Which groups it took is not known. "
            "Copy the run again."
        ) from error
    return taken


def _place(file: Any, offset: Any, length: Any) -> Place:
    if not isinstance(file, str) or not file.endswith(".jsonl.zst") or "/" in file:
        raise ValueError("a file leads out of the folder")
    return Place(file, count(offset), count(length))
