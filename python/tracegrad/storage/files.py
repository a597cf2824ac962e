"""Read and write local files safely.

What is read is a regular file of bounded size, so that no pipe or device is waited for. What is written never goes
through a symbolic link and never replaces a device or a pipe: an archive from somewhere else can bring a link under a
name that is written to. Two paths are the same file if device and inode are.
"""

import errno
import json
import os
import shutil
import stat
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

from tracegrad.errors import ArgumentError, ReadError

LIMIT = 64 << 20
_KINDS = {stat.S_IFLNK: "a symbolic link", stat.S_IFDIR: "a folder", stat.S_IFIFO: "a pipe", stat.S_IFSOCK: "a socket"}
_KINDS |= {stat.S_IFCHR: "a device", stat.S_IFBLK: "a device"}


def refuse_special(path: str | os.PathLike[str]) -> None:
    """Refuse what is there and is neither a file nor a folder.

    Raises:
        OSError: for a pipe, a socket or a device; `strerror` says which.
    """
    try:
        mode = os.stat(path).st_mode
    except OSError:
        return  # who opens it says what is wrong with it
    if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
        raise OSError(errno.EINVAL, f"it is {kind_of(mode)}, and would be waited for", str(path))


def kind_of(mode: int) -> str:
    """Name what is no regular file, by its mode.

    >>> kind_of(stat.S_IFIFO), kind_of(stat.S_IFCHR), kind_of(stat.S_IFLNK | 0o777)
    ('a pipe', 'a device', 'a symbolic link')
    """
    return _KINDS.get(stat.S_IFMT(mode), "not a regular file")


def read_json(path: Path, limit: int = LIMIT) -> Any:
    """Read JSON, whatever it holds.

    Raises:
        OSError: if it cannot be read, is no regular file, or is larger than `limit` bytes.
        ValueError: if it is no JSON, nested too deep, or has an integer of more digits than Python reads.
    """
    refuse_special(path)
    with open(path, "rb") as file:
        data = file.read(limit + 1)
    if len(data) > limit:
        raise OSError(errno.EFBIG, f"it has more than {limit:,} bytes", str(path))
    try:
        return json.loads(data.decode("utf-8"))
    except RecursionError as error:
        raise ValueError("nested too deep") from error


_SAFE = getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_NONBLOCK", 0)
_BINARY = getattr(os, "O_BINARY", 0)


def check(path: Path) -> None:
    """Refuse a name that something other than a regular file has.

    Raises:
        ReadError: if it is a link, a folder, a pipe, a socket or a device.
    """
    with suppress(FileNotFoundError, NotADirectoryError):
        mode = os.lstat(path).st_mode
        if not stat.S_ISREG(mode):
            raise ReadError(
                f"{path}: cannot be written, it is {kind_of(mode)}. tracegrad neither follows nor replaces it. "
                "Remove it, or give another path."
            )


def descriptor(path: Path, flags: int, mode: int = 0o666) -> int:
    """Open a regular file to write, by the flags of `os.open`; made if O_CREAT asks for it, never through a link.

    Raises:
        ReadError: if it is a link, a folder, a pipe, a socket or a device.
        OSError: if the system refuses.
    """
    check(path)
    handle = os.open(path, flags | _SAFE | _BINARY, mode)
    if not stat.S_ISREG(os.fstat(handle).st_mode):  # it has become one since
        os.close(handle)
        check(path)
        raise ReadError(f"{path}: cannot be written, it is not a regular file. Give another path.")
    return handle


def create(path: Path, mode: int = 0o666) -> BinaryIO:
    """Open a new, empty file in place of a regular file of this name; other names of that one keep what it holds.

    Raises:
        As `descriptor`.
    """
    check(path)
    path.unlink(missing_ok=True)
    return os.fdopen(descriptor(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, mode), "w+b")


def append(path: Path, mode: int = 0o666) -> BinaryIO:
    """Open a file to write behind what it holds; made if it is not there.

    Raises:
        As `descriptor`.
    """
    return os.fdopen(descriptor(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, mode), "a+b")


def write(path: Path, data: bytes | str) -> None:
    """Write a file, in place of a regular one; text as UTF-8.

    Raises:
        As `descriptor`.
    """
    with create(path) as file:
        file.write(data.encode() if isinstance(data, str) else data)


@contextmanager
def whole(path: Path, *, flush: bool = False) -> Iterator[BinaryIO]:
    """Open a file that takes its name when the block ends, and is gone after an error.

    Args:
        flush: put it on the disk before it takes its name.

    Raises:
        As `descriptor`.
    """
    check(path)
    draft = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        with create(draft) as file:
            yield file
            file.flush()
            if flush:
                os.fsync(file.fileno())
        replace(draft, path)
    except BaseException:
        with suppress(OSError):
            draft.unlink(missing_ok=True)
        raise


def make_folder(path: Path) -> None:
    """Make an empty folder in place of one of this name, its files included; a link of this name goes, not its target.

    Raises:
        OSError: if the system refuses.
    """
    if path.is_symlink():
        path.unlink()
    shutil.rmtree(path, ignore_errors=True)
    path.mkdir(parents=True)


def replace(draft: Path, path: Path) -> None:
    """Give a draft its name, which a regular file may have.

    Raises:
        As `descriptor`.
    """
    check(path)
    os.replace(draft, path)


def copy(source: Path, path: Path) -> None:
    """Copy the bytes of a file to a new one.

    Raises:
        As `descriptor`.
    """
    with source.open("rb") as data, create(path) as file:
        while part := data.read(1 << 20):
            file.write(part)


def check_not_read(
    paths: Iterable[str | os.PathLike[str]], inputs: Iterable[str | os.PathLike[str]], what: str
) -> None:
    """Refuse to write what is read: an input by any of its names, or a file in a folder that is one.

    Args:
        paths: of the outputs.
        inputs: files and folders of this machine; "-" is what standard input is turned to.
        what: the outputs are, or the flag that names them.

    Raises:
        ArgumentError: with the output and the input that it is.
    """
    known = {found: name for name in inputs if (found := _identity(name)) is not None}
    for path in paths if known else ():
        own = Path(os.path.abspath(path))
        for place in (own, *(above for above in own.parents)):
            if (name := known.get(_identity(place) or (-1, -1))) is not None:
                shown = "standard input" if name == "-" else os.fspath(name)
                raise ArgumentError(
                    f"{what} {os.fspath(path)} is read, as {shown}. What it holds would be lost. Give another path."
                )


def _identity(path: str | os.PathLike[str]) -> tuple[int, int] | None:
    """Device and inode of the file or folder that a name leads to; None where there is none."""
    try:
        found = os.fstat(0) if path == "-" else os.stat(path)
    except (OSError, ValueError):
        return None
    return (found.st_dev, found.st_ino) if stat.S_ISREG(found.st_mode) or stat.S_ISDIR(found.st_mode) else None
