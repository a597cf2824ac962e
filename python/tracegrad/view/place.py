"""Lock the folder of an index. A second viewer of the same inputs gets a temporary folder.

The lock lasts as long as the viewer. The next viewer removes temporary folders of killed viewers.
"""

import contextlib
import fcntl
import os
import shutil
import sqlite3
import tempfile
from pathlib import Path

from tracegrad.errors import ReadError
from tracegrad.view import database

_LOCK = "lock"


class IndexFolder:
    """The folder `folder/key`, or a temporary folder next to it if another viewer uses that one.

    Attributes:
        path: path of the index. The file exists if it is complete.

    Raises:
        ReadError: if the folder cannot be written.
    """

    def __init__(self, folder: Path, key: str) -> None:
        place = folder / key
        try:
            place.mkdir(parents=True, exist_ok=True, mode=0o700)
            for leftover in folder.glob(f"{key}-*"):
                _remove_unused(leftover)
            lock = _try_lock(place)
            self._shared = lock is not None
            if lock is None:
                place = Path(tempfile.mkdtemp(prefix=f"{key}-", dir=folder))
                lock = _try_lock(place)
            self._lock, self.path = lock, place / "index.sqlite"
            if not _is_complete(self.path):
                _empty(place)
        except OSError as error:
            raise ReadError(
                f"TG-VIEW-010: {place}: {error.strerror or error}. The index has no place. Give another --index DIR."
            ) from error

    def close(self, *, keep: bool) -> None:
        """Release the folder. It is removed unless `keep` is True and it is not temporary."""
        if not (keep and self._shared):
            shutil.rmtree(self.path.parent, ignore_errors=True)
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None


def _try_lock(place: Path) -> int | None:
    """Return the lock of a folder. None if another viewer has it, or the file system has no locks."""
    for _ in range(8):
        place.mkdir(exist_ok=True, mode=0o700)
        try:
            lock = os.open(place / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except FileNotFoundError:  # The folder was removed concurrently.
            continue
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.fstat(lock).st_ino == (place / _LOCK).stat().st_ino:
                return lock
        except FileNotFoundError:  # The previous owner removed the folder.
            pass
        except OSError:
            os.close(lock)
            return None
        os.close(lock)
    return None


def _remove_unused(place: Path) -> None:
    """Remove a folder that no viewer has locked."""
    with contextlib.suppress(OSError):
        lock = os.open(place / _LOCK, os.O_RDWR | os.O_CLOEXEC)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(place, ignore_errors=True)
        finally:
            os.close(lock)


def _is_complete(path: Path) -> bool:
    """Return whether there is an index that was completely filled."""
    if not path.is_file():
        return False
    try:
        connection = database.connect(path)
        try:
            return database.get_property(connection, "done") == "1"
        finally:
            connection.close()
    except (sqlite3.Error, ReadError):  # The file is damaged or not an index.
        return False


def _empty(place: Path) -> None:
    for entry in place.iterdir():
        if entry.name != _LOCK:
            shutil.rmtree(entry) if entry.is_dir() and not entry.is_symlink() else entry.unlink()
