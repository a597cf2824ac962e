"""inspect-ai's `.eval` logs: a zip with one JSON file for each sample, unpacked one at a time."""

import io
import tempfile
import zipfile
from collections.abc import Iterator
from itertools import pairwise

from tracegrad import _core
from tracegrad.data.read_options import CHUNK_BYTES
from tracegrad.errors import ReadError

MOST_BYTES = 1 << 30
MOST_DIRECTORY = 1 << 24
"""Bytes of a log's list of members, which is held whole: enough for 100,000 samples with names as inspect-ai writes."""
ZSTD = 93
_LOCAL_HEADER = 30
_BEGUN = ("header.json", "_journal/start.json")
"""What inspect-ai writes beside the samples."""


def samples(path: str) -> Iterator[bytes]:
    """The samples of a log, as JSON.

    Raises:
        ReadError: if it is no such log, or a sample cannot be unpacked.
    """
    try:
        with _File(path) as file, zipfile.ZipFile(file) as log:
            file.is_open = True
            for each in _members(log, path):
                yield _unpacked(log, each, path)
    except (OSError, zipfile.BadZipFile, ValueError) as error:
        if isinstance(error, ReadError):
            raise
        raise ReadError(f"{path}: {error}. It cannot be read as a zip. Copy it again.") from None


class _File(io.BufferedReader):
    """A file that refuses to hand out a list of members larger than `MOST_DIRECTORY`, which `zipfile` reads at once."""

    def __init__(self, path: str) -> None:
        super().__init__(io.FileIO(path))
        self.is_open = False

    def read(self, size: int | None = -1) -> bytes:
        if not self.is_open:
            at = self.tell()
            left = self.seek(0, io.SEEK_END) - at
            self.seek(at)
            if min(left if size is None or size < 0 else size, left) > MOST_DIRECTORY:
                raise ReadError(
                    f"{self.name}: its list of members has more than {MOST_DIRECTORY:,} bytes. It would be held "
                    "whole. Write the samples as JSONL, or as several logs."
                )
        return super().read(size)


def _members(log: zipfile.ZipFile, path: str) -> list[zipfile.ZipInfo]:
    """The samples of a log by name, of a name the one that was written last."""
    named = {each.filename: each for each in log.infolist()}
    inside = [name for name in named if name.startswith("samples/")]
    if not inside and any(name in named for name in _BEGUN):
        raise ReadError(
            f"{path}: there is no record in it: it is a log of inspect-ai whose run was cut off before its "
            "first sample was written. There are no traces to read. Run it again, or name the other logs."
        )
    if not inside:
        raise ReadError(
            f"{path}: it is a zip without samples/. Only logs of inspect-ai are read so. Unpack it, and name "
            "the files in it."
        )
    found = [named[name] for name in sorted(inside) if name.endswith(".json")]
    for one, two in pairwise(sorted(found, key=lambda each: each.header_offset)):
        if one.header_offset + _LOCAL_HEADER + one.compress_size > two.header_offset:
            raise ReadError(
                f"{path}: {one.filename[:200]} and {two.filename[:200]} are the same bytes of the file. One sample "
                "could be read any number of times. Copy the log again."
            )
    return found


def _unpacked(log: zipfile.ZipFile, member: zipfile.ZipInfo, path: str) -> bytes:
    if member.file_size > MOST_BYTES:
        raise ReadError(
            f"{path}: {member.filename} has {member.file_size:,} bytes. A sample would be held whole. Convert the "
            "log with inspect log dump, and split it."
        )
    try:
        with log.open(member) as file:
            found = file.read(MOST_BYTES + 1)
    except NotImplementedError:
        if member.compress_type == ZSTD:
            return _of_zstd(log, member)
        raise ReadError(
            f"{path}: {member.filename} is compressed by method {member.compress_type}, which this Python does not "
            "unpack. inspect log convert --to json writes it otherwise."
        ) from None
    if len(found) > MOST_BYTES:
        raise ReadError(f"{path}: {member.filename} is longer than it says. It cannot be trusted. Copy the log again.")
    return found


def _of_zstd(log: zipfile.ZipFile, member: zipfile.ZipInfo) -> bytes:
    """A member that is a zstd frame, which the core unpacks."""
    with open(str(log.filename), "rb") as file, tempfile.NamedTemporaryFile(prefix="tracegrad-") as frame:
        file.seek(member.header_offset)
        head = file.read(_LOCAL_HEADER)
        name, extra = (int.from_bytes(head[at : at + 2], "little") for at in (26, 28))
        file.seek(member.header_offset + _LOCAL_HEADER + name + extra)
        left = member.compress_size
        while block := file.read(min(left, 1 << 20)):
            frame.write(block)
            left -= len(block)
        frame.flush()
        reader = _core.TraceReader(frame.name, "raise", None, None, MOST_BYTES, CHUNK_BYTES, "auto", member.filename)
        records = reader.cut(2, MOST_BYTES)
    return records[0][1] if len(records) == 1 else b"null"
