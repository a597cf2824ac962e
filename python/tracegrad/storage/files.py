"""Read and write local files safely.

Only regular files of bounded size are read, so that no pipe or device blocks. Writing never follows a symbolic link and
never replaces a device or a pipe: an unpacked archive may contain a link with the name of an output. Two paths are the
same file if device and inode are equal.
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
    """Raise if the path exists and is neither a file nor a folder.

    Raises:
        OSError: for a pipe, a socket or a device. `strerror` names the kind.
    """
    try:
        mode = os.stat(path).st_mode
    except OSError:
        return  # Opening the path will raise the precise error.
    if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
        raise OSError(errno.EINVAL, f"it is {kind_of(mode)}, and reading it could block", str(path))


def kind_of(mode: int) -> str:
    """Return a name for the kind of a file that is not regular, by its mode.

    >>> kind_of(stat.S_IFIFO), kind_of(stat.S_IFCHR), kind_of(stat.S_IFLNK | 0o777)
    ('a pipe', 'a device', 'a symbolic link')
    """
    return _KINDS.get(stat.S_IFMT(mode), "not a regular file")


def read_json(path: Path, limit: int = LIMIT) -> Any:
    """Return the value of a JSON file.

    Raises:
        OSError: if it cannot be read, is not a regular file, or is larger than `limit` bytes.
        ValueError: if it is not JSON, is nested too deep, or has an integer with more digits than Python accepts.
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
    """Raise if a path exists and is not a regular file.

    Raises:
        ReadError: if it is a link, a folder, a pipe, a socket or a device.
    """
    with suppress(FileNotFoundError, NotADirectoryError):
        mode = os.lstat(path).st_mode
        if not stat.S_ISREG(mode):
            raise ReadError(
                f"TG-STORE-004: {path}: cannot be written, it is {kind_of(mode)}. tracegrad neither follows nor "
                "replaces it. Remove it, or give another path."
            )


def open_descriptor(path: Path, flags: int, mode: int = 0o666) -> int:
    """Open a regular file for writing with the flags of `os.open`, and return its descriptor. Links are not followed.

    Raises:
        ReadError: if it is a link, a folder, a pipe, a socket or a device.
        OSError: if the system refuses.
    """
    check(path)
    handle = os.open(path, flags | _SAFE | _BINARY, mode)
    if not stat.S_ISREG(os.fstat(handle).st_mode):  # It was replaced after `check`.
        os.close(handle)
        check(path)
        raise ReadError(f"TG-STORE-005: {path}: cannot be written, it is not a regular file. Give another path.")
    return handle


def create(path: Path, mode: int = 0o666) -> BinaryIO:
    """Open a new, empty file in place of a regular file. Hard links to the old file keep its content.

    Raises:
        As `open_descriptor`.
    """
    check(path)
    path.unlink(missing_ok=True)
    return os.fdopen(open_descriptor(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, mode), "w+b")


def append(path: Path, mode: int = 0o666) -> BinaryIO:
    """Open a file for appending. It is created if it does not exist.

    Raises:
        As `open_descriptor`.
    """
    return os.fdopen(open_descriptor(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, mode), "a+b")


def write(path: Path, data: bytes | str) -> None:
    """Write a file in place of a regular one. Text is encoded as UTF-8.

    Raises:
        As `open_descriptor`.
    """
    with create(path) as file:
        file.write(data.encode() if isinstance(data, str) else data)


@contextmanager
def write_atomically(path: Path, *, flush: bool = False) -> Iterator[BinaryIO]:
    """Open a file that gets its name when the block ends. If the block raises, the file is removed.

    Args:
        flush: sync the file to disk before it gets its name.

    Raises:
        As `open_descriptor`.
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
    """Create an empty folder. An existing folder of this name is removed with its files.

    If the name is a symbolic link, the link is removed and its target is kept.

    Raises:
        OSError: if the system refuses.
    """
    if path.is_symlink():
        path.unlink()
    shutil.rmtree(path, ignore_errors=True)
    path.mkdir(parents=True)


def replace(draft: Path, path: Path) -> None:
    """Rename a draft to a path that does not exist or is a regular file.

    Raises:
        As `open_descriptor`.
    """
    check(path)
    os.replace(draft, path)


def copy(source: Path, path: Path) -> None:
    """Copy the bytes of a file to a new file.

    Raises:
        As `open_descriptor`.
    """
    with source.open("rb") as data, create(path) as file:
        while part := data.read(1 << 20):
            file.write(part)


def check_not_read(
    paths: Iterable[str | os.PathLike[str]], inputs: Iterable[str | os.PathLike[str]], what: str
) -> None:
    """Raise if an output is also an input: under any of its names, or as a file inside an input folder.

    Args:
        paths: paths of the outputs.
        inputs: local files and folders. "-" is the file that standard input is redirected from.
        what: name of the outputs, or of their flag, for the error.

    Raises:
        ArgumentError: if so, with the output and the input.
    """
    names_by_identity = {identity: name for name in inputs if (identity := _identity(name)) is not None}
    for path in paths if names_by_identity else ():
        absolute = Path(os.path.abspath(path))
        for candidate in (absolute, *(parent for parent in absolute.parents)):
            if (name := names_by_identity.get(_identity(candidate) or (-1, -1))) is not None:
                shown = "standard input" if name == "-" else os.fspath(name)
                raise ArgumentError(
                    f"TG-STORE-006: {what} {os.fspath(path)} is also an input, as {shown}. Its content would be lost. "
                    f"Give another path."
                )


def _identity(path: str | os.PathLike[str]) -> tuple[int, int] | None:
    """Return device and inode of a file or folder, or None if there is none."""
    try:
        status = os.fstat(0) if path == "-" else os.stat(path)
    except (OSError, ValueError):
        return None
    return (status.st_dev, status.st_ino) if stat.S_ISREG(status.st_mode) or stat.S_ISDIR(status.st_mode) else None
