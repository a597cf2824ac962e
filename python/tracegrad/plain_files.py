"""Small files of strangers, read whole: regular ones of a bounded size, so that no pipe or device is waited for."""

import errno
import json
import os
import stat
from pathlib import Path
from typing import Any

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
