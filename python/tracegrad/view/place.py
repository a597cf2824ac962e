"""The folder of an index: one viewer at a time builds there, and another one meanwhile in a folder of its own.

A folder is locked as long as a viewer uses it; what a viewer that was killed has left is removed by the next one.
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


class Place:
    """Takes the folder `folder/key`, or one beside it where another viewer has it.

    Attributes:
        path: of the index, which is there if it is whole.

    Raises:
        ReadError: if nothing can be written there.
    """

    def __init__(self, folder: Path, key: str) -> None:
        place = folder / key
        try:
            place.mkdir(parents=True, exist_ok=True, mode=0o700)
            for left in folder.glob(f"{key}-*"):
                _remove_unused(left)
            lock = _locked(place)
            self._shared = lock is not None
            if lock is None:
                place = Path(tempfile.mkdtemp(prefix=f"{key}-", dir=folder))
                lock = _locked(place)
            self._lock, self.path = lock, place / "index.sqlite"
            if not _whole(self.path):
                _empty(place)
        except OSError as error:
            raise ReadError(
                f"{place}: {error.strerror or error}. The index has no place. Give another --index DIR."
            ) from error

    def close(self, *, keep: bool) -> None:
        """Give the folder back; it is removed unless `keep` and others may use it."""
        if not (keep and self._shared):
            shutil.rmtree(self.path.parent, ignore_errors=True)
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None


def _locked(place: Path) -> int | None:
    """Return the lock of a folder; None where another viewer has it, or where no locks can be had."""
    for _ in range(8):
        place.mkdir(exist_ok=True, mode=0o700)
        try:
            lock = os.open(place / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except FileNotFoundError:  # the folder was removed just now
            continue
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.fstat(lock).st_ino == (place / _LOCK).stat().st_ino:
                return lock
        except FileNotFoundError:  # who had it removed it with the folder
            pass
        except OSError:
            os.close(lock)
            return None
        os.close(lock)
    return None


def _remove_unused(place: Path) -> None:
    """Remove a folder that no viewer has."""
    with contextlib.suppress(OSError):
        lock = os.open(place / _LOCK, os.O_RDWR | os.O_CLOEXEC)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(place, ignore_errors=True)
        finally:
            os.close(lock)


def _whole(path: Path) -> bool:
    """Whether there is an index, and all that was there when it was made is in it."""
    if not path.is_file():
        return False
    try:
        found = database.connect(path)
        try:
            return database.told(found, "done") == "1"
        finally:
            found.close()
    except (sqlite3.Error, ReadError):  # damaged, or no index at all
        return False


def _empty(place: Path) -> None:
    for left in place.iterdir():
        if left.name != _LOCK:
            shutil.rmtree(left) if left.is_dir() and not left.is_symlink() else left.unlink()
