"""Write rollouts to disk group by group, follow them from the trainer, and log which groups each step consumed.

`GroupWriter` (one per rollout process) appends zstd frames. `GroupReader` reads new frames from the files of all
writers. `UnscoredGroups` keeps a group until it is scored. `steps.jsonl` makes a run resumable and replayable bit for
bit.
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

ROLLOUT_FOLDER = "played"
ENDING = ".jsonl.zst"
MOST_BYTES = 1 << 30
"""Maximum size of the records of one group, in bytes."""


@dataclass(frozen=True, order=True)
class GroupLocation:
    """Position of a group in the rollout folder.

    Args:
        file: file name in the folder.
        offset, length: position and size of its frame, in bytes.
    """

    file: str
    offset: int
    length: int


class GroupWriter:
    """Append groups to a new file that only this writer uses; threads may share the writer.

    Args:
        folder: rollout folder; created if it does not exist.
    """

    def __init__(self, folder: Path) -> None:
        self._compressor = _compressor()
        self.folder = folder
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self.name, self._file = _create_file(folder)
            flush(folder)
        except OSError as error:
            raise _write_error(folder, error) from error
        self._end = 0
        self._lock = threading.Lock()

    def write(self, records: Sequence[dict[str, Any]]) -> GroupLocation:
        """Append one group. When this returns, the complete group is on disk; if it raises, none of it is.

        Raises:
            ArgumentError: for a record that JSON cannot represent, or a group larger than `MOST_BYTES`.
            TracegradError: if the file cannot be written.
        """
        text = _lines(records)
        with self._lock:
            return self._append(text)

    def _append(self, text: bytes) -> GroupLocation:
        frame = self._compressor.compress(text)
        try:
            remaining = memoryview(frame)
            while remaining:
                remaining = remaining[os.write(self._file, remaining) :]
            os.fsync(self._file)
        except OSError as error:
            os.ftruncate(self._file, self._end)
            os.lseek(self._file, self._end, os.SEEK_SET)
            raise _write_error(self.folder / self.name, error) from error
        place = GroupLocation(self.name, self._end, len(frame))
        self._end += len(frame)
        return place

    def close(self) -> None:
        """Close the file."""
        os.close(self._file)

    def __enter__(self) -> "GroupWriter":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()


class UnscoredGroups:
    """Groups without scores: one file per group, deleted once the group is written with its rewards.

    The files are in a folder of their own, so that readers of the rollout folder find each group only once.

    Args:
        out: folder of the run.
    """

    def __init__(self, out: Path) -> None:
        self.folder = out / "unscored"

    @property
    def groups(self) -> set[int]:
        """The numbers of the stored groups."""
        names = (path.name.removesuffix(ENDING) for path in self.folder.glob(f"*{ENDING}"))
        return {int(name) for name in names if name.isascii() and name.isdecimal()}

    def write(self, number: int, records: Sequence[dict[str, Any]]) -> None:
        """Write a group; it is on disk when this returns.

        Raises:
            ArgumentError: as for `GroupWriter.write`.
            TracegradError: if the file cannot be written.
        """
        text = _lines(records)
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise _write_error(self.folder, error) from error
        write_bytes(self.path(number), [_compressor().compress(text)])

    def read(self, number: int) -> list[dict[str, Any]] | None:
        """Return the records of a group; None if it is not stored.

        Raises:
            ReadError: if the file is not one that `write` wrote.
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
            if not records or not all(isinstance(record, dict) for record in records):
                raise ValueError("it contains no records")
        except (OSError, ValueError, RecursionError, zstandard.ZstdError) as error:
            raise unscorable_error(path, error) from error
        return records

    def delete(self, numbers: Iterable[int]) -> None:
        """Delete groups that are now written with their rewards."""
        for number in numbers:
            self.path(number).unlink(missing_ok=True)

    def path(self, number: int) -> Path:
        """Return the file of a group."""
        return self.folder / f"{number}{ENDING}"


def unscorable_error(path: Path, error: Exception) -> ReadError:
    """Build the error for a stored group that cannot be scored."""
    return ReadError(
        f"TG-ONLINE-001: {path}: this stored group cannot be scored ({str(error)[:200]}). A new rollout of its task "
        "would replace the file. Copy the file again, or move it out of the folder to roll out the task again."
    )


class GroupReader:
    """Reads the groups of a folder in the order in which they were completed."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.skipped_file = ""
        """File name to skip: the file of a writer that tracks its own groups."""
        self._ends: dict[str, int] = {}

    def read_new(self) -> list[tuple[GroupLocation, Traces]]:
        """Return the groups that were completed since the last call.

        Raises:
            ReadError: for a damaged frame.
        """
        return list(self.iter_new())

    def iter_new(self) -> Iterator[tuple[GroupLocation, Traces]]:
        """Yield the groups of `read_new` one at a time."""
        for path in sorted(self.folder.glob(f"*{ENDING}")):
            if path.name == self.skipped_file:
                continue
            start = self._ends.get(path.name, 0)
            frames = _core.Frames(os.fspath(path), start, MOST_BYTES)
            while (frame := frames.next()) is not None:
                place = GroupLocation(path.name, start, frame[1])
                start = self._ends[path.name] = start + frame[1]
                yield place, Traces(frame[0])

    def skip(self, places: Iterable[GroupLocation]) -> None:
        """Skip groups that were consumed before, and all groups in front of them in their files."""
        for place in places:
            self._ends[place.file] = max(self._ends.get(place.file, 0), place.offset + place.length)


def read(folder: Path, place: GroupLocation) -> Traces:
    """Read one group.

    Raises:
        ReadError: if the file no longer contains it.
    """
    path = folder / place.file
    frame = _core.Frames(os.fspath(path), place.offset, MOST_BYTES).next()
    if frame is None or frame[1] != place.length:
        raise ReadError(
            f"TG-ONLINE-002: {path}: the group at byte {place.offset} is incomplete, so the step that consumed it "
            "cannot be repeated. Copy the file again."
        )
    return Traces(frame[0])


def _lines(records: Sequence[dict[str, Any]]) -> bytes:
    """Encode the records of a group as JSON lines."""
    try:
        text = b"".join(dumps(record) + b"\n" for record in records)
    except (TypeError, ValueError, RecursionError) as error:
        raise ArgumentError(
            f"TG-ONLINE-003: a record of group {records[0].get('group')!r} cannot be written as JSON: {error}. Use "
            "only numbers, strings, lists and dicts in metadata and rewards."
        ) from error
    if len(text) > MOST_BYTES:
        raise ArgumentError(
            f"TG-ONLINE-004: group {records[0].get('group')!r} has {len(text):,} bytes of records; the maximum is "
            f"{MOST_BYTES:,}, since a group is read into memory. Limit its turns or tokens."
        )
    return text


def _compressor() -> Any:
    return _zstandard().ZstdCompressor(level=1, write_checksum=True, write_content_size=True)


def _create_file(folder: Path) -> tuple[str, int]:
    """Create a file that did not exist and lock it for this process."""
    number = len(list(folder.glob(f"*{ENDING}")))
    while True:
        name = f"{number:05d}{ENDING}"
        try:
            # O_EXCL does not follow symbolic links.
            file = os.open(folder / name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
        except FileExistsError:
            number += 1
            continue
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return name, file


def _write_error(path: Path, error: OSError) -> TracegradError:
    return TracegradError(
        f"TG-ONLINE-005: {path}: {error.strerror}. The finished group was not written. Free disk space and resume "
        f"the run."
    )


def _zstandard() -> Any:
    try:
        import zstandard
    except ImportError as error:
        raise ArgumentError(
            "TG-ONLINE-006: the package zstandard is not installed, so rollouts cannot be written. Run "
            "pip install 'tracegrad[online]'."
        ) from error
    return zstandard


NAME = "steps.jsonl"


@dataclass(frozen=True)
class StepGroups:
    """The groups that one step consumed, in order.

    Args:
        step: number of the step, from 0.
        version: policy version before the step.
        groups: positions of the groups.
        zero_std: indices into `groups` of those not trained on because their rewards are equal or unknown.
    """

    step: int
    version: int
    groups: tuple[GroupLocation, ...]
    zero_std: tuple[int, ...] = ()

    @property
    def trained(self) -> tuple[GroupLocation, ...]:
        """The groups that the step trains on."""
        left_out = set(self.zero_std)
        return tuple(place for index, place in enumerate(self.groups) if index not in left_out)


class ConsumedGroups:
    """Log of consumed groups: one line per step of a run, in `steps.jsonl`.

    Args:
        folder: folder of the run.
    """

    def __init__(self, folder: Path) -> None:
        self.path = folder / NAME
        self.steps: list[StepGroups] = []
        self._read = 0
        self.refresh()

    def refresh(self) -> None:
        """Read the lines that other processes have added; an incomplete last line is ignored."""
        if not self.path.exists():
            return
        with self.path.open("rb") as file:
            file.seek(self._read)
            data = file.read()
        complete = data[: data.rfind(b"\n") + 1]
        for line in complete.splitlines():
            self.steps.append(_parse_line(line, self.path, len(self.steps)))
        self._read += len(complete)

    def add(self, version: int, groups: Sequence[GroupLocation], zero_std: Sequence[int] = ()) -> StepGroups:
        """Write the line of the next step; it is on disk when this returns."""
        entry = StepGroups(len(self.steps), version, tuple(groups), tuple(zero_std))
        line = json.dumps(_to_json(entry), separators=(",", ":")) + "\n"
        try:
            file = files.open_descriptor(self.path, os.O_WRONLY | os.O_CREAT, 0o644)
            try:
                os.ftruncate(file, self._read)  # removes an incomplete line of a killed run
                os.pwrite(file, line.encode(), self._read)
                os.fsync(file)
            finally:
                os.close(file)
        except OSError as error:
            raise TracegradError(
                f"TG-ONLINE-007: {self.path}: {error.strerror}. Without this line the step cannot be repeated. Free "
                f"disk space and resume the run."
            ) from error
        self.steps.append(entry)
        self._read += len(line)
        return entry

    def wait(self, step: int, stopped: Callable[[], bool], poll_s: float = 0.05) -> StepGroups | None:
        """Wait for the line of a step, on ranks that do not write. Return None if the run was stopped."""
        while len(self.steps) <= step:
            over = stopped()
            self.refresh()  # a line may have been added just before the end
            if over and len(self.steps) <= step:
                return None
            time.sleep(poll_s if len(self.steps) <= step else 0.0)
        return self.steps[step]


def _to_json(entry: StepGroups) -> dict[str, Any]:
    groups = [[place.file, place.offset, place.length] for place in entry.groups]
    return {"step": entry.step, "version": entry.version, "groups": groups, "dull": list(entry.zero_std)}


def _parse_line(line: bytes, path: Path, number: int) -> StepGroups:
    try:
        record = json.loads(line)
        groups = tuple(_parse_place(*group) for group in record["groups"])
        entry = StepGroups(count(record["step"]), count(record["version"]), groups, tuple(map(count, record["dull"])))
        if entry.step != number or any(index >= len(groups) for index in entry.zero_std):
            raise ValueError(f"it is not the line of step {number}")
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise FormatError(
            f"TG-ONLINE-008: {path}:{number + 1}: not the line of a step ({str(error)[:80]!r}), so the groups of this "
            "step are unknown. Copy the run again."
        ) from error
    return entry


def _parse_place(file: Any, offset: Any, length: Any) -> GroupLocation:
    if not isinstance(file, str) or not file.endswith(".jsonl.zst") or "/" in file:
        raise ValueError("a file is outside of the folder")
    return GroupLocation(file, count(offset), count(length))
