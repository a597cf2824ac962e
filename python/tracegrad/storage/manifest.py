"""Write and check `manifest.json` of a prepared folder, and lock a folder.

The manifest is written last, with counts, sizes and checksums: a folder without one is not complete.
docs/trace-format.md states the format.
"""

import fcntl
import json
import os
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tracegrad.errors import ArgumentError, FormatError, ReadError
from tracegrad.storage import files as outputs
from tracegrad.storage import remote
from tracegrad.storage.safetensors_file import Written, flush, measure, open_file, read_text, write_bytes

NAME = "manifest.json"
LOCK = ".lock"
COUNTS = ("traces", "branches", "tokens", "terms")

_FORMAT = "tracegrad-folder/1"
_LIMIT = 64 << 20
_DRAFT = re.compile(r"\.\d+\.tmp$")
_SHARD = re.compile(r"shard-(?:(\d{5,})-)?(\d{5,})")


@dataclass(frozen=True)
class Folder:
    """A folder that is whole.

    Args:
        counts: traces, branches, tokens and terms in it.
        files: its files by name; none in a folder of shards.
        shards: its shards by name, in order; none where it is one itself.
    """

    counts: Mapping[str, int]
    files: Mapping[str, Written]
    shards: "Mapping[str, Folder]"


def shard_name(index: int, part: int | None = None) -> str:
    """What the shard with this number is called; that of one of several parts, which number their own.

    >>> shard_name(3), shard_name(3, 12)
    ('shard-00003', 'shard-00012-00003')
    """
    return f"shard-{index:05d}" if part is None else f"shard-{part:05d}-{index:05d}"


def write(folder: Path, counts: Mapping[str, int], files: Mapping[str, Written]) -> None:
    """Says that a folder is whole: the last file to be written into it.

    Raises:
        ReadError: if it cannot be written.
    """
    put(folder, Folder(counts, files, {}))


def seal(folder: Path) -> Folder:
    """Says that a folder of shards is whole. Whoever wrote the shards, each has its own manifest."""
    found = sorted((path.name for path in folder.glob("shard-*")), key=_place)
    _check_links(folder, found)
    shards = {name: read(folder / name) for name in found}
    _check_names(folder, shards, found)
    whole = of_shards(shards)
    put(folder, whole)
    return whole


def of_shards(shards: "Mapping[str, Folder]") -> Folder:
    """The folder that holds these, by name and in order."""
    return Folder({name: sum(shard.counts[name] for shard in shards.values()) for name in COUNTS}, {}, shards)


def read(folder: Path | str) -> Folder:
    """What a folder holds, by its manifest; every file is there and as long as the manifest says.

    Args:
        folder: its path, or its address (s3://bucket/path).

    Raises:
        ReadError: if there is no manifest, or a file is missing.
        FormatError: if the manifest is none, or a file has another length.
    """
    if isinstance(folder, str) and remote.is_address(folder):
        return _at(folder)
    folder = remote.path_of(folder)
    path = folder / NAME
    if not path.exists():
        shards = sum(1 for _ in folder.glob("shard-*"))
        raise ReadError(_unsealed(folder, shards, any(folder.glob("sequences.*"))))
    found = parsed(str(path), read_text(path, _LIMIT))

    def size(name: str) -> int:
        with open_file(folder / name) as file:
            return os.fstat(file.fileno()).st_size

    there = {path.name for path in folder.glob("shard-*")}
    _check_links(folder, there)  # of what is there: a name in the manifest may be none that a file can have
    return _checked(folder, found, there, size)


def parsed(name: str, told: bytes) -> Folder:
    """What a manifest says; `name` stands for it in errors.

    Raises:
        FormatError: if it is none.
    """
    try:
        return _folder(json.loads(told))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise FormatError(f"{name}: no manifest ({str(error)[:80]!r}). {_CHANGED}") from error


def _at(address: str) -> Folder:
    """As `read`, of an address."""
    there = remote.sizes(address)
    shards = {name.partition("/")[0] for name in there if name.startswith("shard-")}
    if NAME not in there:
        raise ReadError(_unsealed(address, len(shards), "sequences.json" in there))
    found = parsed(remote.joined(address, NAME), remote.read(remote.joined(address, NAME), _LIMIT))

    def size(name: str) -> int:
        if name not in there:
            raise ReadError(f"{address}: {name} is missing, and the manifest names it. {_CHANGED}")
        return there[name]

    return _checked(address, found, shards, size)


def _checked(folder: Path | str, found: Folder, there: Collection[str], size: Callable[[str], int]) -> Folder:
    """A manifest, where its shards are those that are there, and its files have their lengths."""
    _check_names(folder, found.shards, there)
    for name, told in _files(found):
        if (has := size(name)) != told.bytes:
            where = remote.joined(str(folder), name)
            raise FormatError(f"{where}: {has:,} bytes, and the manifest says {told.bytes:,}. {_CHANGED}")
    return found


def verify(folder: Path, found: Folder) -> None:
    """Compares the checksum of every file with the manifest's; reads all of them once."""
    for name, told in _files(found):
        if measure(folder / name) != told:
            raise FormatError(f"{folder / name}: not the bytes that were written, by their checksum. {_CHANGED}")


@contextmanager
def lock(folder: Path, mark: bytes = b"") -> Iterator[int]:
    """Keeps other writers out of a folder; gives the handle that holds the lock.

    The system lets go of it when the process ends, however that is, and the last of those to which it gave the handle.

    Args:
        mark: what the file of the lock says from then on: whose the folder is.
    """
    try:
        handle = outputs.descriptor(folder / LOCK, os.O_RDWR | os.O_CREAT, 0o644)
    except OSError as error:
        raise ReadError(f"{folder}: cannot be written ({error.strerror}). Choose another folder.") from error
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(handle)
        raise ArgumentError(
            f"{folder}: another process is writing there. Files of both would be read as one set. Wait until it is "
            "done, or give another folder."
        ) from None
    except OSError as error:
        os.close(handle)
        raise ReadError(
            f"{folder}: cannot be locked ({error.strerror}). Two writers could not be kept apart. "
            "Choose a folder on another file system."
        ) from error
    try:
        if mark and not os.fstat(handle).st_size:
            os.pwrite(handle, mark, 0)
        yield handle
    finally:
        os.close(handle)


def clear_drafts(folder: Path, *names: str) -> None:
    """Removes what a process that was killed while writing these files has left. For who holds the lock."""
    for name in names:
        for path in folder.glob(f"{name}.*.tmp"):
            if _DRAFT.search(path.name):
                path.unlink(missing_ok=True)


_CHANGED = "It was changed or cut after it was written. Copy it again, go on with `prepare --resume`, or write it anew."


def _unsealed(folder: Path | str, shards: int, is_one: bool) -> str:
    if shards:
        return (
            f"{folder}: holds {shards} shards and no {NAME}. `prepare` was stopped before it was done, or still runs, "
            "and what is there is a part of the traces. Go on with `tracegrad prepare` and --resume."
        )
    if is_one:
        return (
            f"{folder}: no {NAME} there. It was not written to its end, or by a version that wrote none. "
            "Save it again, or prepare the traces again."
        )
    return f"{folder}: holds no {NAME} and no shards. Give a folder that `prepare` or `save` wrote."


def put(folder: Path, whole: Folder) -> None:
    """Writes a manifest.

    Raises:
        ReadError: if it cannot be written.
    """
    write_bytes(folder / NAME, [encoded(whole)])
    with suppress(OSError):
        flush(folder.parent)


def encoded(whole: Folder) -> bytes:
    """A manifest as it is written."""
    return json.dumps({"format": _FORMAT, **plain(whole)}, indent=1).encode() + b"\n"


def plain(folder: Folder) -> dict[str, Any]:
    """What a manifest says of a folder, as JSON has it."""
    files = {name: {"bytes": file.bytes, "crc32": f"{file.crc32:08x}"} for name, file in folder.files.items()}
    shards = {name: plain(shard) for name, shard in folder.shards.items()}
    return {"counts": dict(folder.counts), **({"files": files} if files else {"shards": shards})}


def _folder(told: Any, depth: int = 0) -> Folder:
    """A manifest that was parsed, as a `Folder`; ValueError, KeyError and the like where it is none."""
    if not depth and told["format"] != _FORMAT:
        raise ValueError(f"its format is {str(told['format'])[:40]!r} and not {_FORMAT!r}")
    counts = {name: count(told["counts"][name]) for name in COUNTS}
    files = {_file_name(name): _written(file) for name, file in told.get("files", {}).items()}
    if depth and "shards" in told:
        raise ValueError("a shard has no shards of its own")
    shards = {name: _folder(shard, 1) for name, shard in told.get("shards", {}).items()}
    if bool(files) == ("shards" in told):
        raise ValueError("it names either files or shards")
    return Folder(counts, files, shards)


def count(value: Any) -> int:
    """A whole number of things or bytes, as a file has it."""
    if type(value) is not int or not 0 <= value < 1 << 62:
        raise ValueError("a count is no whole number")
    return value


def text(value: Any) -> str:
    """A value that is one; TypeError for any other."""
    if not isinstance(value, str):
        raise TypeError(f"a text is wanted, not {value!r:.40}")
    return value


def _written(told: Any) -> Written:
    if not isinstance(told["crc32"], str) or not re.fullmatch("[0-9a-f]{8}", told["crc32"]):
        raise ValueError("a checksum is not eight hexadecimal digits")
    return Written(count(told["bytes"]), int(told["crc32"], 16))


def _file_name(name: str) -> str:
    if not re.fullmatch(r"[a-z]+\.[a-z]+", name):
        raise ValueError("a name leads out of the folder")
    return name


def of_plain(told: Any) -> Folder:
    """The folder of which `plain` says so.

    Raises:
        ValueError, KeyError, TypeError, AttributeError: if it is none.
    """
    return _folder(told, 1)


def _place(name: str) -> tuple[int, int, str]:
    """Where a shard stands among others."""
    found = _SHARD.fullmatch(name)
    return (int(found[1] or 0), int(found[2]), name) if found else (1 << 62, 0, name)


def _check_order(folder: Path | str, shards: Mapping[str, Folder]) -> None:
    """Shards are numbered from 0 without a gap, also those of each of several parts, which follow one another."""
    part, index = -1, 0
    for name in shards:
        found = _SHARD.fullmatch(name)
        of_part = int(found[1]) if found and found[1] else None
        if of_part is not None and of_part > part:
            part, index = of_part, 0
        wanted = shard_name(index, None if of_part is None else part)
        if name != wanted:
            raise FormatError(f"{folder}: {wanted} is missing before {name[:40]!r}. {_CHANGED}")
        index += 1


def _check_links(folder: Path, shards: Iterable[str]) -> None:
    """Shards are folders of their own."""
    for name in shards:
        if (folder / name).is_symlink():
            raise ReadError(f"{folder / name}: a link out of the folder. Copy the shard there (cp -rL).")


def _check_names(folder: Path | str, shards: Mapping[str, Folder], there: Collection[str]) -> None:
    """Shards are in order, and those that are there."""
    _check_order(folder, shards)
    if missing := next((name for name in shards if name not in there), None):
        raise ReadError(f"{folder}: {missing} is missing, and the manifest names it. {_CHANGED}")
    if shards and (more := set(there) - shards.keys()):
        raise FormatError(f"{folder}: holds {min(more)[:40]!r}, which the manifest does not name. {_CHANGED}")


def _files(found: Folder) -> Iterator[tuple[str, Written]]:
    """The files of a folder and of its shards, by their names from there on."""
    yield from found.files.items()
    for shard, inner in found.shards.items():
        yield from ((f"{shard}/{name}", told) for name, told in inner.files.items())
