"""Addresses of fsspec (s3://, gs://, az://, hf://, https://): the file system of one, and small things done there.

fsspec is imported on use (extra `cloud`). Its errors name the address.
"""

import posixpath
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tracegrad.errors import ArgumentError, FormatError, ReadError, shown
from tracegrad.storage import files as outputs

ADDRESS = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*(::[A-Za-z][A-Za-z0-9+.-]*)*://")
_FILE = "file://"


def is_address(name: Any) -> bool:
    """Whether a name is an address; `file://` is a path of this machine.

    >>> is_address("s3://bucket/path"), is_address("file:///data"), is_address("data/runs")
    (True, False, False)
    """
    return isinstance(name, str) and bool(ADDRESS.match(name)) and not name.startswith(_FILE)


def path_of(name: Any) -> Path:
    """The path that a name is, also behind `file://`.

    >>> path_of("file:///data/runs")
    PosixPath('/data/runs')
    """
    return Path(name.removeprefix(_FILE) if isinstance(name, str) else name)


def joined(address: str, *names: str) -> str:
    """An address below another.

    >>> joined("s3://bucket/out/", "shard-00000", "manifest.json")
    's3://bucket/out/shard-00000/manifest.json'
    """
    return "/".join([address.rstrip("/"), *names])


def place_here(name: Any) -> Path:
    """The path of what is read again while it is written, or written piece by piece, and so cannot be at an address.

    Raises:
        ArgumentError: for an address.

    >>> place_here("out/run")
    PosixPath('out/run')
    """
    if is_address(name):
        raise ArgumentError(
            f"out is {name}, an address. What is written there is read and added to meanwhile, which buckets do not "
            "do. Give a path, on a disk that all processes see, and copy it to the bucket afterwards."
        )
    return path_of(name)


@contextmanager
def system(address: str, done: str = "read") -> Iterator[tuple[Any, str]]:
    """The file system of an address and the path there; what goes wrong with them within is told as of the address.

    Args:
        done: what cannot be done with it where something goes wrong: "read", "written" or "removed".

    Raises:
        ReadError: for whatever fails within.
        ArgumentError: if fsspec, or what it needs for this kind of address, is not installed.
    """
    try:
        import fsspec
    except ImportError as error:
        raise ArgumentError(
            f"{error}. Addresses such as {address[:60]} need it. pip install 'tracegrad[cloud]'"
        ) from error
    try:
        yield fsspec.core.url_to_fs(address)
    except ImportError as error:
        raise ArgumentError(
            f"{address}: {error}. It cannot be {done} without it. pip install what it names."
        ) from error
    except (ArgumentError, ReadError, FormatError):
        raise
    except Exception as error:
        raise unreadable(address, error, done) from error


def unreadable(address: str, error: Exception, done: str = "read") -> ReadError:
    """An error of fsspec, as one of the address."""
    why = f"{type(error).__name__}: {shown(str(error))[:200]}".rstrip(": ")
    return ReadError(f"{address}: {why}. It cannot be {done}. Check the address, and the credentials of fsspec for it.")


def sizes(address: str) -> dict[str, int]:
    """The files below an address by their names from there on, with their bytes, as they are now.

    Raises:
        ReadError: if it cannot be asked. Where nothing is, there is no file.
    """
    with system(address) as (files, path):
        files.invalidate_cache()
        try:
            found = files.find(path, detail=True)
        except FileNotFoundError:
            return {}
        return {posixpath.relpath(name, path): int(told.get("size") or 0) for name, told in sorted(found.items())}


def exists(address: str) -> bool:
    """Whether a file is there; of a pattern, or of what cannot be asked, no."""
    if any(mark in address for mark in "*?["):
        return False
    try:
        with system(address) as (files, path):
            return bool(files.isfile(path))
    except (ReadError, ArgumentError):
        return False


def read(address: str, limit: int) -> bytes:
    """All bytes of a file that has at most `limit`.

    Raises:
        ReadError: if it is not there or cannot be read.
        FormatError: if it has more.
    """
    with system(address) as (files, path), files.open(path, "rb") as file:
        text = bytes(file.read(limit + 1))
    if len(text) > limit:
        raise FormatError(f"{address}: longer than {limit:,} bytes. tracegrad writes none that long. Write it again.")
    return text


def write(address: str, text: bytes) -> None:
    """Writes a small file.

    Raises:
        ReadError: if it cannot be written.
    """
    with system(address, "written") as (files, path):
        files.makedirs(posixpath.dirname(path), exist_ok=True)
        files.pipe_file(path, text)


def upload(path: Path, address: str) -> None:
    """Writes a file of this machine to an address.

    Raises:
        ReadError: if it cannot be written.
    """
    with system(address, "written") as (files, target):
        files.makedirs(posixpath.dirname(target), exist_ok=True)
        files.put_file(str(path), target)


def download(address: str, path: Path) -> None:
    """Brings a file to a path of this machine.

    Raises:
        ReadError: if it is not there or cannot be read.
    """
    with system(address) as (files, source):
        outputs.create(path).close()
        files.get_file(source, str(path))


def remove(address: str) -> None:
    """Removes a file that may be there.

    Raises:
        ReadError: if it cannot be removed.
    """
    with system(address, "removed") as (files, path):
        files.invalidate_cache()
        if files.exists(path):
            files.rm_file(path)
