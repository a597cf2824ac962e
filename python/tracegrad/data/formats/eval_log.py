"""Read inspect-ai's `.eval` logs: a zip with one JSON file per sample. One sample is unpacked at a time."""

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
"""Most bytes of a zip directory, which is read into memory. Enough for 100,000 samples with inspect-ai's names."""
ZSTD = 93
_LOCAL_HEADER = 30
_STARTED = ("header.json", "_journal/start.json")
"""Files that inspect-ai writes before the samples."""


def samples(path: str) -> Iterator[bytes]:
    """Yield the samples of a log as JSON.

    Raises:
        ReadError: if the file is not such a log, or a sample cannot be unpacked.
    """
    try:
        with _File(path) as file, zipfile.ZipFile(file) as log:
            file.is_open = True
            for each in _members(log, path):
                yield _unpack(log, each, path)
    except (OSError, zipfile.BadZipFile, ValueError) as error:
        if isinstance(error, ReadError):
            raise
        raise ReadError(f"TG-DATA-014: {path}: {error}. It cannot be read as a zip. Copy it again.") from None


class _File(io.BufferedReader):
    """A file that refuses to read more than `MOST_DIRECTORY` bytes at once until `is_open` is set.

    `zipfile` reads the complete directory at once when it opens a file.
    """

    def __init__(self, path: str) -> None:
        super().__init__(io.FileIO(path))
        self.is_open = False

    def read(self, size: int | None = -1) -> bytes:
        if not self.is_open:
            position = self.tell()
            available = self.seek(0, io.SEEK_END) - position
            self.seek(position)
            if min(available if size is None or size < 0 else size, available) > MOST_DIRECTORY:
                raise ReadError(
                    f"TG-DATA-015: {self.name}: its list of members has more than {MOST_DIRECTORY:,} bytes. It would "
                    "be in memory completely. Write the samples as JSONL, or as several logs."
                )
        return super().read(size)


def _members(log: zipfile.ZipFile, path: str) -> list[zipfile.ZipInfo]:
    """Return the samples of a log, sorted by name. If several have the same name, the last one counts."""
    by_name = {member.filename: member for member in log.infolist()}
    sample_names = [name for name in by_name if name.startswith("samples/")]
    if not sample_names and any(name in by_name for name in _STARTED):
        raise ReadError(
            f"TG-DATA-016: {path}: there is no record in it. It is a log of inspect-ai whose run ended before "
            "its first sample was written. Run it again, or name the other logs."
        )
    if not sample_names:
        raise ReadError(
            f"TG-DATA-017: {path}: it is a zip without samples/. Only logs of inspect-ai are read so. Unpack it, and "
            "name the files in it."
        )
    members = [by_name[name] for name in sorted(sample_names) if name.endswith(".json")]
    for left, right in pairwise(sorted(members, key=lambda member: member.header_offset)):
        if left.header_offset + _LOCAL_HEADER + left.compress_size > right.header_offset:
            raise ReadError(
                f"TG-DATA-018: {path}: {left.filename[:200]} and {right.filename[:200]} are the same bytes of the "
                "file. One sample could be read any number of times. Copy the log again."
            )
    return members


def _unpack(log: zipfile.ZipFile, member: zipfile.ZipInfo, path: str) -> bytes:
    if member.file_size > MOST_BYTES:
        raise ReadError(
            f"TG-DATA-019: {path}: {member.filename} has {member.file_size:,} bytes. A sample would be in memory. "
            "Convert the log with inspect log dump, and split it."
        )
    try:
        with log.open(member) as file:
            content = file.read(MOST_BYTES + 1)
    except NotImplementedError:
        if member.compress_type == ZSTD:
            return _unpack_zstd(log, member)
        raise ReadError(
            f"TG-DATA-020: {path}: {member.filename} is compressed by method {member.compress_type}, which this Python "
            "does not unpack. inspect log convert --to json writes it otherwise."
        ) from None
    if len(content) > MOST_BYTES:
        raise ReadError(f"TG-DATA-021: {path}: {member.filename} is longer than its header states. Copy the log again.")
    return content


def _unpack_zstd(log: zipfile.ZipFile, member: zipfile.ZipInfo) -> bytes:
    """Unpack a member that is a zstd frame, with the core."""
    with open(str(log.filename), "rb") as file, tempfile.NamedTemporaryFile(prefix="tracegrad-") as frame:
        file.seek(member.header_offset)
        head = file.read(_LOCAL_HEADER)
        name, extra = (int.from_bytes(head[offset : offset + 2], "little") for offset in (26, 28))
        file.seek(member.header_offset + _LOCAL_HEADER + name + extra)
        remaining = member.compress_size
        while block := file.read(min(remaining, 1 << 20)):
            frame.write(block)
            remaining -= len(block)
        frame.flush()
        reader = _core.TraceReader(frame.name, "raise", None, None, MOST_BYTES, CHUNK_BYTES, "auto", member.filename)
        records = reader.cut(2, MOST_BYTES)
    return records[0][1] if len(records) == 1 else b"null"
