"""Write and check `manifest.json` of a prepared folder, and lock a folder.

The manifest has counts, sizes and checksums. It is written last, so a folder without one is incomplete.
docs/reference/trace-format.md specifies the format.
"""

import fcntl
import json
import os
import re
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tracegrad.errors import ArgumentError, FormatError, ReadError
from tracegrad.storage import files as outputs
from tracegrad.storage import remote
from tracegrad.storage.safetensors_file import FileChecksum, flush, measure, open_file, read_text, write_bytes

NAME = "manifest.json"
LOCK = ".lock"
COUNTS = ("traces", "branches", "tokens", "terms")

_FORMAT = "tracegrad-folder/2"
_LIMIT = 64 << 20
_DRAFT = re.compile(r"\.\d+\.tmp$")
_SHARD = re.compile(r"shard-(?:(\d{5,})-)?(\d{5,})")


@dataclass(frozen=True)
class FolderManifest:
    """The content of a complete folder, as its manifest lists it.

    Args:
        counts: number of traces, branches, tokens and terms.
        files: its files by name. Empty for a folder of shards.
        shards: its shards by name, in order. Empty for a single shard.
    """

    counts: Mapping[str, int]
    files: Mapping[str, FileChecksum]
    shards: "Mapping[str, FolderManifest]"


def shard_name(index: int, part: int | None = None) -> str:
    """Return the name of a shard. If the input has several parts, each part numbers its own shards.

    >>> shard_name(3), shard_name(3, 12)
    ('shard-00003', 'shard-00012-00003')
    """
    return f"shard-{index:05d}" if part is None else f"shard-{part:05d}-{index:05d}"


def write(folder: Path, counts: Mapping[str, int], files: Mapping[str, FileChecksum]) -> None:
    """Write the manifest of a single shard, which marks the folder as complete.

    Raises:
        ReadError: if it cannot be written.
    """
    write_manifest(folder, FolderManifest(counts, files, {}))


def seal(folder: Path) -> FolderManifest:
    """Write the manifest of a folder of shards, each of which must have its own manifest, and return it.

    Raises:
        ReadError: if a shard is a link, is incomplete or is missing, or if the manifest cannot be written.
        FormatError: if a shard does not match its manifest, or the numbering has a gap.
    """
    names = sorted((path.name for path in folder.glob("shard-*")), key=_sort_key)
    _check_links(folder, names)
    shards = {name: read(folder / name) for name in names}
    _check_names(folder, shards, names)
    folder_manifest = from_shards(shards)
    write_manifest(folder, folder_manifest)
    return folder_manifest


def from_shards(shards: "Mapping[str, FolderManifest]") -> FolderManifest:
    """Return the manifest of a folder with these shards."""
    return FolderManifest({name: sum(shard.counts[name] for shard in shards.values()) for name in COUNTS}, {}, shards)


def read(folder: Path | str) -> FolderManifest:
    """Return the manifest of a folder, after checking that every file exists and has the listed size.

    Args:
        folder: its path, or its address (s3://bucket/path).

    Raises:
        ReadError: if there is no manifest, or a file is missing.
        FormatError: if the manifest is invalid, or a file has another size.
    """
    if isinstance(folder, str) and remote.is_address(folder):
        return _read_remote(folder)
    folder = remote.path_of(folder)
    path = folder / NAME
    if not path.exists():
        shards = sum(1 for _ in folder.glob("shard-*"))
        raise ReadError(_unsealed(folder, shards, any(folder.glob("sequences.*"))))
    folder_manifest = parse(str(path), read_text(path, _LIMIT))

    def size(name: str) -> int:
        with open_file(folder / name) as file:
            return os.fstat(file.fileno()).st_size

    existing = {path.name for path in folder.glob("shard-*")}
    _check_links(folder, existing)  # Check existing names: a name in a forged manifest may be invalid as a file name.
    return _checked(folder, folder_manifest, existing, size)


def parse(name: str, data: bytes) -> FolderManifest:
    """Parse the bytes of a manifest. Error messages call it `name`.

    Raises:
        FormatError: if it is not a manifest.
    """
    try:
        return _parse_folder(json.loads(data))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise FormatError(f"TG-STORE-034: {name}: not a valid manifest ({str(error)[:80]!r}). {_CHANGED}") from error


def _read_remote(address: str) -> FolderManifest:
    """Return the manifest of a folder at an address. Otherwise like `read`."""
    file_sizes = remote.sizes(address)
    shards = {name.partition("/")[0] for name in file_sizes if name.startswith("shard-")}
    if NAME not in file_sizes:
        raise ReadError(_unsealed(address, len(shards), "sequences.json" in file_sizes))
    folder_manifest = parse(remote.join_address(address, NAME), remote.read(remote.join_address(address, NAME), _LIMIT))

    def size(name: str) -> int:
        if name not in file_sizes:
            raise ReadError(f"TG-STORE-007: {address}: {name} is missing, although the manifest lists it. {_CHANGED}")
        return file_sizes[name]

    return _checked(address, folder_manifest, shards, size)


def _checked(
    folder: Path | str, folder_manifest: FolderManifest, existing: Collection[str], size: Callable[[str], int]
) -> FolderManifest:
    """Return the manifest if its shards are the existing ones and its files have the listed sizes."""
    _check_names(folder, folder_manifest.shards, existing)
    for name, expected in _all_files(folder_manifest):
        if (actual := size(name)) != expected.bytes:
            where = remote.join_address(str(folder), name)
            raise FormatError(
                f"TG-STORE-008: {where}: {actual:,} bytes, but the manifest lists {expected.bytes:,}. {_CHANGED}"
            )
    return folder_manifest


def verify(folder: Path, manifest: FolderManifest) -> None:
    """Compare the checksum of every file with the manifest. This reads all files once.

    Raises:
        ReadError: if a file cannot be read.
        FormatError: if a checksum differs.
    """
    for name, expected in _all_files(manifest):
        if measure(folder / name) != expected:
            raise FormatError(f"TG-STORE-009: {folder / name}: the checksum differs from the manifest. {_CHANGED}")


@contextmanager
def lock(folder: Path, mark: bytes = b"") -> Iterator[int]:
    """Lock a folder against other writers, and yield the handle that has the lock.

    The system releases the lock when this process and all processes that inherited the handle have ended.

    Args:
        mark: bytes written to the lock file if it is empty. They identify the owner of the folder.

    Raises:
        ArgumentError: if another process has the lock.
        ReadError: if the folder cannot be written or locked.
    """
    try:
        handle = outputs.open_descriptor(folder / LOCK, os.O_RDWR | os.O_CREAT, 0o644)
    except OSError as error:
        raise ReadError(
            f"TG-STORE-010: {folder}: cannot be written ({error.strerror}). Choose another folder."
        ) from error
    try:
        _lock_exclusively(handle)
    except BlockingIOError:
        os.close(handle)
        raise ArgumentError(
            f"TG-STORE-011: {folder}: another process is writing there. Wait until it has finished, "
            "or give another folder."
        ) from None
    except OSError as error:
        os.close(handle)
        raise ReadError(
            f"TG-STORE-012: {folder}: cannot be locked ({error.strerror}), so a second writer could not be detected. "
            "Choose a folder on another file system."
        ) from error
    try:
        if mark and not os.fstat(handle).st_size:
            os.pwrite(handle, mark, 0)
        yield handle
    finally:
        os.close(handle)


def is_locked(folder: Path) -> bool | None:
    """Return whether a process writes in a folder: it has the lock. None if that cannot be determined."""
    try:
        handle = os.open(folder / LOCK, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except FileNotFoundError:
        return False
    except OSError:
        return None
    try:
        fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
        return False
    except BlockingIOError:
        return True
    except OSError:
        return None
    finally:
        os.close(handle)


def _lock_exclusively(handle: int) -> None:
    """Lock a file. The lock of `is_locked` lasts for microseconds, so a held lock is tried again."""
    for pause_s in (0.01, 0.05):
        with suppress(BlockingIOError):
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        time.sleep(pause_s)
    fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)


def clear_drafts(folder: Path, *names: str) -> None:
    """Remove drafts of these files that a killed process left behind. The caller must have the lock."""
    for name in names:
        for path in folder.glob(f"{name}.*.tmp"):
            if _DRAFT.search(path.name):
                path.unlink(missing_ok=True)


_CHANGED = "It was changed or truncated after it was written. Copy it again, run `prepare --resume`, or write it again."


def _unsealed(folder: Path | str, shards: int, is_one: bool) -> str:
    if shards:
        return (
            f"TG-STORE-035: {folder}: contains {shards} shards and no {NAME}. `prepare` was interrupted or is still "
            "running, so the folder is incomplete. Continue with `tracegrad prepare` and --resume."
        )
    if is_one:
        return (
            f"TG-STORE-036: {folder}: contains no {NAME}. It is incomplete, or an old version wrote it. "
            "Save it again, or prepare the traces again."
        )
    return f"TG-STORE-037: {folder}: contains no {NAME} and no shards. Give a folder that `prepare` or `save` wrote."


def write_manifest(folder: Path, manifest: FolderManifest) -> None:
    """Write a manifest.

    Raises:
        ReadError: if it cannot be written.
    """
    write_bytes(folder / NAME, [encode(manifest)])
    with suppress(OSError):
        flush(folder.parent)


def encode(manifest: FolderManifest) -> bytes:
    """Return the bytes of a manifest file."""
    return json.dumps({"format": _FORMAT, **to_dict(manifest)}, indent=1).encode() + b"\n"


def to_dict(folder: FolderManifest) -> dict[str, Any]:
    """Return a manifest as JSON values."""
    files = {name: {"bytes": file.bytes, "crc32": f"{file.crc32:08x}"} for name, file in folder.files.items()}
    shards = {name: to_dict(shard) for name, shard in folder.shards.items()}
    return {"counts": dict(folder.counts), **({"files": files} if files else {"shards": shards})}


def _parse_folder(value: Any, depth: int = 0) -> FolderManifest:
    """Convert a parsed manifest to a `FolderManifest`.

    Raises:
        ValueError, KeyError, TypeError, AttributeError: if it is invalid.
    """
    if not depth and value["format"] != _FORMAT:
        raise ValueError(f"its format is {str(value['format'])[:40]!r} and not {_FORMAT!r}")
    counts = {name: count(value["counts"][name]) for name in COUNTS}
    files = {_file_name(name): _parse_file(file) for name, file in value.get("files", {}).items()}
    if depth and "shards" in value:
        raise ValueError("a shard has no shards of its own")
    shards = {name: _parse_folder(shard, 1) for name, shard in value.get("shards", {}).items()}
    if bool(files) == ("shards" in value):
        raise ValueError("it names either files or shards")
    return FolderManifest(counts, files, shards)


def count(value: Any) -> int:
    """Return a count of items or bytes from a file if it is valid.

    Raises:
        ValueError: if it is not an integer from 0 to 2^62 - 1.
    """
    if type(value) is not int or not 0 <= value < 1 << 62:
        raise ValueError("a count is not an integer")
    return value


def text(value: Any) -> str:
    """Return a value if it is a string.

    Raises:
        TypeError: if it is not a string.
    """
    if not isinstance(value, str):
        raise TypeError(f"expected a string, got {value!r:.40}")
    return value


def _parse_file(value: Any) -> FileChecksum:
    if not isinstance(value["crc32"], str) or not re.fullmatch("[0-9a-f]{8}", value["crc32"]):
        raise ValueError("a checksum is not eight hexadecimal digits")
    return FileChecksum(count(value["bytes"]), int(value["crc32"], 16))


def _file_name(name: str) -> str:
    if not re.fullmatch(r"[a-z]+\.[a-z]+", name):
        raise ValueError("a file name points outside the folder")
    return name


def from_dict(value: Any) -> FolderManifest:
    """Convert the output of `to_dict` back to a `FolderManifest`.

    Raises:
        ValueError, KeyError, TypeError, AttributeError: if it is invalid.
    """
    return _parse_folder(value, 1)


def _sort_key(name: str) -> tuple[int, int, str]:
    """Return the sort key of a shard's name. Other names sort last."""
    match = _SHARD.fullmatch(name)
    return (int(match[1] or 0), int(match[2]), name) if match else (1 << 62, 0, name)


def _check_order(folder: Path | str, shards: Mapping[str, FolderManifest]) -> None:
    """Raise if shards are not numbered from 0 without a gap. If there are parts, each part numbers its own shards."""
    part, index = -1, 0
    for name in shards:
        match = _SHARD.fullmatch(name)
        shard_part = int(match[1]) if match and match[1] else None
        if shard_part is not None and shard_part > part:
            part, index = shard_part, 0
        expected = shard_name(index, None if shard_part is None else part)
        if name != expected:
            raise FormatError(f"TG-STORE-013: {folder}: {expected} is missing before {name[:40]!r}. {_CHANGED}")
        index += 1


def _check_links(folder: Path, shards: Iterable[str]) -> None:
    """Raise if a shard is a symbolic link."""
    for name in shards:
        if (folder / name).is_symlink():
            raise ReadError(f"TG-STORE-014: {folder / name}: a symbolic link. Copy the shard itself there (cp -rL).")


def _check_names(folder: Path | str, shards: Mapping[str, FolderManifest], existing: Collection[str]) -> None:
    """Raise if shards are out of order, or are not the existing ones."""
    _check_order(folder, shards)
    if missing := next((name for name in shards if name not in existing), None):
        raise ReadError(f"TG-STORE-015: {folder}: {missing} is missing, although the manifest lists it. {_CHANGED}")
    if shards and (extra := set(existing) - shards.keys()):
        raise FormatError(
            f"TG-STORE-016: {folder}: contains {min(extra)[:40]!r}, which the manifest does not list. {_CHANGED}"
        )


def _all_files(folder_manifest: FolderManifest) -> Iterator[tuple[str, FileChecksum]]:
    """Yield the files of a folder and of its shards, with names relative to the folder."""
    yield from folder_manifest.files.items()
    for shard, shard_manifest in folder_manifest.shards.items():
        yield from ((f"{shard}/{name}", file) for name, file in shard_manifest.files.items())
