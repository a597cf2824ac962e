"""Read, write and list files at fsspec addresses (s3://, gs://, az://, hf://, https://).

fsspec is imported on first use (extra `cloud`). Its errors are converted to errors that name the address.
"""

import posixpath
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tracegrad.errors import ArgumentError, FormatError, ReadError, escape_terminal
from tracegrad.storage import files as outputs

ADDRESS = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*(::[A-Za-z][A-Za-z0-9+.-]*)*://")
_FILE = "file://"


def is_address(name: Any) -> bool:
    """Return whether a name is a remote address. `file://` names a local path.

    >>> is_address("s3://bucket/path"), is_address("file:///data"), is_address("data/runs")
    (True, False, False)
    """
    return isinstance(name, str) and bool(ADDRESS.match(name)) and not name.startswith(_FILE)


def path_of(name: Any) -> Path:
    """Return a name as a local path, without a leading `file://`.

    >>> path_of("file:///data/runs")
    PosixPath('/data/runs')
    """
    return Path(name.removeprefix(_FILE) if isinstance(name, str) else name)


def join_address(address: str, *names: str) -> str:
    """Return an address with names appended.

    >>> join_address("s3://bucket/out/", "shard-00000", "manifest.json")
    's3://bucket/out/shard-00000/manifest.json'
    """
    return "/".join([address.rstrip("/"), *names])


def require_local_path(name: Any) -> Path:
    """Return the local path of an output that is read or appended to while it is written. Buckets cannot do that.

    Raises:
        ArgumentError: for an address.

    >>> require_local_path("out/run")
    PosixPath('out/run')
    """
    if is_address(name):
        raise ArgumentError(
            f"TG-STORE-017: out is {name}, an address. The run reads and appends to this output, which buckets do not "
            "support. Give a path on a disk that all processes share, and copy it to the bucket afterwards."
        )
    return path_of(name)


@contextmanager
def system(address: str, action: str = "read") -> Iterator[tuple[Any, str]]:
    """Yield the file system of an address and the path in it.

    Errors inside the block are converted to errors that name the address.

    Args:
        action: verb for error messages: "read", "written" or "removed".

    Raises:
        ReadError: for any failure in the block.
        ArgumentError: if fsspec, or a package that it needs for this kind of address, is not installed.
    """
    try:
        import fsspec
    except ImportError as error:
        raise ArgumentError(
            f"TG-STORE-018: {error}. Addresses such as {address[:60]} require it. Run pip install 'tracegrad[cloud]'"
        ) from error
    try:
        yield fsspec.core.url_to_fs(address)
    except ImportError as error:
        raise ArgumentError(
            f"TG-STORE-019: {address}: {error}. Without this package it cannot be {action}. Install the named package "
            "with pip."
        ) from error
    except (ArgumentError, ReadError, FormatError):
        raise
    except Exception as error:
        raise as_read_error(address, error, action) from error


def as_read_error(address: str, error: Exception, action: str = "read") -> ReadError:
    """Convert an error of fsspec to a ReadError that names the address."""
    reason = f"{type(error).__name__}: {escape_terminal(str(error))[:200]}".rstrip(": ")
    return ReadError(
        f"TG-STORE-020: {address}: {reason}. It cannot be {action}. Check the address, and the credentials of "
        f"fsspec for it."
    )


def sizes(address: str) -> dict[str, int]:
    """Return the current files below an address with their sizes in bytes. Names are relative to the address.

    If nothing exists there, the result is empty.

    Raises:
        ReadError: if the address cannot be listed.
    """
    with system(address) as (files, path):
        files.invalidate_cache()
        try:
            entries = files.find(path, detail=True)
        except FileNotFoundError:
            return {}
        return {posixpath.relpath(name, path): int(entry.get("size") or 0) for name, entry in sorted(entries.items())}


def exists(address: str) -> bool:
    """Return whether a file exists. False for a pattern, or if the address cannot be read."""
    if any(wildcard in address for wildcard in "*?["):
        return False
    try:
        with system(address) as (files, path):
            return bool(files.isfile(path))
    except (ReadError, ArgumentError):
        return False


def read(address: str, limit: int) -> bytes:
    """Return all bytes of a file of at most `limit` bytes.

    Raises:
        ReadError: if it does not exist or cannot be read.
        FormatError: if it is larger.
    """
    with system(address) as (files, path), files.open(path, "rb") as file:
        text = bytes(file.read(limit + 1))
    if len(text) > limit:
        raise FormatError(
            f"TG-STORE-021: {address}: longer than {limit:,} bytes, the maximum for this file. Write it again."
        )
    return text


def write(address: str, text: bytes) -> None:
    """Write a small file.

    Raises:
        ReadError: if it cannot be written.
    """
    with system(address, "written") as (files, path):
        files.makedirs(posixpath.dirname(path), exist_ok=True)
        files.pipe_file(path, text)


def upload(path: Path, address: str) -> None:
    """Copy a local file to an address.

    Raises:
        ReadError: if it cannot be written.
    """
    with system(address, "written") as (files, target):
        files.makedirs(posixpath.dirname(target), exist_ok=True)
        files.put_file(str(path), target)


def download(address: str, path: Path) -> None:
    """Copy a file from an address to a local path.

    Raises:
        ReadError: if it does not exist or cannot be read.
    """
    with system(address) as (files, source):
        outputs.create(path).close()
        files.get_file(source, str(path))


def remove(address: str) -> None:
    """Remove a file if it exists.

    Raises:
        ReadError: if it cannot be removed.
    """
    with system(address, "removed") as (files, path):
        files.invalidate_cache()
        if files.exists(path):
            files.rm_file(path)
