"""Work in a local folder of a run, and mirror its files to object storage (s3://...) if the run is there: `Mirror`.

`trainer.checkpoint` decides when a checkpoint is complete. For a local run nothing is copied.
"""

import atexit
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

from tracegrad.errors import ArgumentError, ReadError, TracegradError, redacted, shown
from tracegrad.storage import manifest, remote, safetensors_file

APART = "checkpoints/"
"""Below this nothing is sent by `push`: a checkpoint is sent as a whole."""
_TOGETHER = 8
_MARK = b"tracegrad run\n"
"""What the lock of a run's folder says."""
_ASIDE = re.compile(r"\.quarantine\.(raw|jsonl)$|\.tmp$|^unaligned-.*\.jsonl$")
"""Files that are written before a run begins."""


class Mirror:
    """A folder of this machine, and the address that it is kept at, where it is kept at one.

    Args:
        out: a path, or an address of fsspec.

    Attributes:
        address: where it is kept, without a slash at the end; "" for a folder of this machine.

    >>> Mirror("runs/first").path
    PosixPath('runs/first')
    >>> str(Mirror("s3://bucket/runs/first/"))
    's3://bucket/runs/first'
    """

    def __init__(self, out: str | os.PathLike[str]) -> None:
        self._known: dict[str, tuple[int, int]] = {}
        self._held = False
        self.address = str(out).rstrip("/") if remote.is_address(out) else ""
        self._path = None if self.address else remote.path_of(out)

    @classmethod
    def of(cls, out: "str | os.PathLike[str] | Mirror") -> "Mirror":
        """A mirror as it is, or one of what is named."""
        return out if isinstance(out, Mirror) else cls(out)

    def __str__(self) -> str:
        return redacted(self.address) or str(self.path)

    @property
    def path(self) -> Path:
        """The folder of this machine; for an address one that is made when it is asked for, and removed at the end."""
        if self._path is None:
            try:
                self._path = Path(tempfile.mkdtemp(prefix="tracegrad-run-"))
            except OSError as error:
                raise TracegradError(
                    f"{tempfile.gettempdir()}: {error.strerror}. A run at {self.address} needs a folder here to work "
                    "in. Make room, or name another one with TMPDIR."
                ) from error
            atexit.register(_remove, os.getpid(), self._path)
        return self._path

    def check_own(self) -> None:
        """Refuse a folder that holds something and is no run's: files of the same names would be lost.

        Raises:
            ArgumentError: if it is somebody else's, with a name that it holds.
            ReadError: if an address cannot be asked.
        """
        if self.address:
            names = set(self.names())
            own = manifest.LOCK in names or any(name.startswith(f"{APART}step-") for name in names)
        else:
            names = {path.name for path in self.path.iterdir()} if self.path.is_dir() else set()
            own = _is_run(self.path)
        others = sorted(name for name in names if name != manifest.LOCK and not _ASIDE.search(name))
        if others and not own:
            raise ArgumentError(
                f"{self} holds {shown(others[0])[:80]!r} and is not the folder of a run. Its files could be replaced. "
                "Give another out."
            )

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Keep other runs out of the folder of this machine while entered; it is known as a run's from then on.

        Whoever has entered it may enter it again. A folder that is made here and stays empty is removed at the end.

        Raises:
            ArgumentError: if it is somebody else's, or another process writes there.
            ReadError: if it cannot be made or locked.
        """
        if self._held:
            yield
            return
        self.check_own()
        made = not self.path.exists()
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ReadError(f"{self.path}: {error.strerror}. A run has no place there. Give another out.") from error
        with manifest.lock(self.path, _MARK):
            self._held = True
            try:
                yield
            finally:
                self._held = False
                if made and [path.name for path in self.path.iterdir()] == [manifest.LOCK]:
                    shutil.rmtree(self.path, ignore_errors=True)

    def share(self, path: Path) -> None:
        """Works in a folder that another process of this machine has made, and removes."""
        if self._path is not None and self._path != path:
            shutil.rmtree(self._path, ignore_errors=True)
        self._path = path

    def named(self, path: Path) -> str:
        """The address of what is at a path in the folder; "" where the folder is at none."""
        return redacted(self._at(path.relative_to(self.path).as_posix())) if self.address else ""

    def names(self) -> dict[str, int]:
        """The files at the address by their names below it, with their bytes.

        Raises:
            ReadError: if it cannot be asked.
        """
        return remote.sizes(self.address)

    def bring(self, names: Iterable[str]) -> None:
        """Brings files of the address; they are then known as they are there.

        Raises:
            ReadError: if one is not there or has no place here.
        """
        names = list(names)
        try:
            for name in names:
                (self.path / name).parent.mkdir(parents=True, exist_ok=True)
            _each(lambda name: remote.download(self._at(name), self.path / name), names)
        except OSError as error:
            raise ReadError(
                f"{self.path}: {error.strerror}. What {self.address} holds has no place here. Make room, or name "
                "another folder with TMPDIR."
            ) from error
        self._known.update({name: _state(self.path / name) for name in names})

    def send(self, names: Iterable[str]) -> None:
        """Writes files of the folder to the address.

        Raises:
            ReadError: if one cannot be written.
        """
        self.send_as({name: self.path / name for name in names})

    def send_as(self, files: Mapping[str, Path]) -> None:
        """Writes files of this machine to the address under other names.

        Args:
            files: paths by names below the address.

        Raises:
            ReadError: if one cannot be written.
        """
        _each(lambda name: remote.upload(files[name], self._at(name)), files)

    def push(self) -> None:
        """Sends what has changed since it was brought or sent, but for checkpoints; removes there what is gone here.

        Raises:
            ReadError: if one cannot be written or removed.
        """
        if not self.address:
            return
        now = {name: _state(self.path / name) for name in _files(self.path) if not name.startswith(APART)}
        self.send(name for name, state in now.items() if self._known.get(name) != state)
        self.remove(name for name in self._known.keys() - now.keys() if not name.startswith(APART))
        self._known = now

    def remove(self, names: Iterable[str]) -> None:
        """Removes files at the address.

        Raises:
            ReadError: if one cannot be removed.
        """
        _each(lambda name: remote.remove(self._at(name)), names)

    def _at(self, name: str) -> str:
        return remote.joined(self.address, *name.split("/"))


def _each(work: Callable[[str], None], names: Iterable[str]) -> None:
    with ThreadPoolExecutor(_TOGETHER) as pool:
        list(pool.map(work, list(names)))


def _files(folder: Path) -> list[str]:
    """Whole files: what is being written ends in .tmp, and links are names of other files."""
    paths = (path for path in folder.rglob("*") if path.is_file() and not path.is_symlink())
    return sorted(path.relative_to(folder).as_posix() for path in paths if path.suffix != ".tmp")


def _state(path: Path) -> tuple[int, int]:
    told = path.stat()
    return told.st_size, told.st_mtime_ns


def _is_run(folder: Path) -> bool:
    """Whether a run has written there: its lock says so, or a checkpoint."""
    try:
        with safetensors_file.open_file(folder / manifest.LOCK) as file:
            if file.read(len(_MARK)) == _MARK:
                return True
    except ReadError:
        pass
    return any((folder / APART).glob("step-*/resume"))


def _remove(process: int, folder: Path) -> None:
    """At the end of the process that made it, and of none that was forked from it."""
    if os.getpid() == process:
        shutil.rmtree(folder, ignore_errors=True)
