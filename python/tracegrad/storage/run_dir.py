"""Manage the local folder of a run, and copy its files to object storage (s3://...): `RunDirectory`.

`trainer.checkpoint` decides when a checkpoint is complete. For a local run nothing is copied.
"""

import atexit
import contextlib
import os
import platform
import re
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Literal, NamedTuple

from tracegrad.errors import ArgumentError, ReadError, TracegradError, escape_terminal, redact
from tracegrad.storage import manifest, remote, safetensors_file

CHECKPOINTS_PREFIX = "checkpoints/"
"""Prefix of files that `push` skips. A checkpoint is sent as a unit."""
_TRANSFERS = 8
_MARK = b"tracegrad run\n"
"""Content of the lock file in a run's folder."""
_MOST_STATUS = 1000
_PRELIMINARY = re.compile(r"\.quarantine\.(raw|jsonl)$|\.tmp$|^unaligned-.*\.jsonl$")
"""Matches files that are written before a run starts."""


class RunDirectory:
    """The local folder of a run, and its address in object storage, if it has one.

    Args:
        out: a path, or an fsspec address.

    Attributes:
        address: address of the run without a trailing slash, None for a local run.

    >>> RunDirectory("runs/first").path
    PosixPath('runs/first')
    >>> str(RunDirectory("s3://bucket/runs/first/"))
    's3://bucket/runs/first'
    """

    def __init__(self, out: str | os.PathLike[str]) -> None:
        self._transferred: dict[str, tuple[int, int]] = {}
        self._is_locked = self._has_begun = False
        self._end_reason = ""
        self.address = str(out).rstrip("/") if remote.is_address(out) else None
        self._path = None if self.address else remote.path_of(out)

    @classmethod
    def of(cls, out: "str | os.PathLike[str] | RunDirectory") -> "RunDirectory":
        """Return `out` if it is a run directory, or else a run directory at that path or address."""
        return out if isinstance(out, RunDirectory) else cls(out)

    def __str__(self) -> str:
        return redact(self.address) if self.address else str(self.path)

    @property
    def path(self) -> Path:
        """Return the local folder. For an address, a temporary folder is created on first use and removed at exit.

        Raises:
            TracegradError: if the temporary folder cannot be created.
        """
        if self._path is None:
            try:
                self._path = Path(tempfile.mkdtemp(prefix="tracegrad-run-"))
            except OSError as error:
                raise TracegradError(
                    f"TG-STORE-022: {tempfile.gettempdir()}: {error.strerror}. A run at {self.address} needs a local "
                    "temporary folder. Free disk space, or set TMPDIR to another folder."
                ) from error
            atexit.register(_remove, os.getpid(), self._path)
        return self._path

    def check_own(self) -> None:
        """Raise if the folder has files but does not belong to a run. Files of the same names would be lost.

        Raises:
            ArgumentError: if so, with the name of one of its files.
            ReadError: if an address cannot be listed.
        """
        if self.address:
            names = set(self.remote_files())
            is_run = manifest.LOCK in names or any(name.startswith(f"{CHECKPOINTS_PREFIX}step-") for name in names)
        else:
            names = {path.name for path in self.path.iterdir()} if self.path.is_dir() else set()
            is_run = _is_run(self.path)
        foreign = sorted(name for name in names if name != manifest.LOCK and not _PRELIMINARY.search(name))
        if foreign and not is_run:
            raise ArgumentError(
                f"TG-STORE-023: {self} contains {escape_terminal(foreign[0])[:80]!r} and is not the folder of a "
                "run. Its files could be replaced. Give another out."
            )

    @contextmanager
    def lock(self) -> Iterator[None]:
        """Lock the local folder against other runs until the block ends, and mark it as the folder of a run.

        The context can be entered again while it is active. A folder that is created here and stays empty is removed at
        the end.

        Raises:
            ArgumentError: if the folder belongs to something else, or another process writes there.
            ReadError: if it cannot be created or locked.
        """
        if self._is_locked:
            yield
            return
        self.check_own()
        is_new = not self.path.exists()
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ReadError(
                f"TG-STORE-024: {self.path}: {error.strerror}. A run cannot write there. Give another out."
            ) from error
        with manifest.lock(self.path, _MARK):
            self._is_locked = True
            end = "stopped"  # by KeyboardInterrupt
            try:
                yield
                end = f"ended {self._end_reason}"
            except KeyboardInterrupt:
                raise
            except BaseException as error:  # also a panic of the core, and SystemExit of user code
                code = error.code if isinstance(error, TracegradError) else None
                end = f"failed {code or type(error).__name__}"
                raise
            finally:
                if self._has_begun:
                    _write_status(self.path, end)
                self._is_locked = self._has_begun = False
                if is_new and [path.name for path in self.path.iterdir()] == [manifest.LOCK]:
                    shutil.rmtree(self.path, ignore_errors=True)

    def begin(self) -> None:
        """Record that the run is in progress. `lock` records how it ends. Without the lock, nothing is recorded."""
        if self._is_locked:
            self._has_begun, self._end_reason = True, ""
            _write_status(self.path, f"running {platform.node()}")

    def end(self, reason: str) -> None:
        """Set the reason that `lock` records if it ends without an error, such as "done" or "signal"."""
        self._end_reason = reason

    def share(self, path: Path) -> None:
        """Use a folder that another local process created and will remove."""
        if self._path is not None and self._path != path:
            shutil.rmtree(self._path, ignore_errors=True)
        self._path = path

    def address_of(self, path: Path) -> str | None:
        """Return the address of a file in the folder, None for a local run."""
        return redact(self._address_of(path.relative_to(self.path).as_posix())) if self.address else None

    def remote_files(self) -> dict[str, int]:
        """Return the files at the address with their sizes in bytes. Names are relative to the address.

        Raises:
            ReadError: if the address cannot be listed.
        """
        assert self.address is not None, "a local run has no remote files"
        return remote.sizes(self.address)

    def download(self, names: Iterable[str]) -> None:
        """Download files from the address. `push` then sends them only if they change.

        Raises:
            ReadError: if one does not exist or does not fit on the local disk.
        """
        names = list(names)
        try:
            for name in names:
                (self.path / name).parent.mkdir(parents=True, exist_ok=True)
            _for_all(lambda name: remote.download(self._address_of(name), self.path / name), names)
        except OSError as error:
            raise ReadError(
                f"TG-STORE-025: {self.path}: {error.strerror}. The files of {self.address} cannot be stored here. "
                "Free disk space, "
                "or set TMPDIR to another folder."
            ) from error
        self._transferred.update({name: _state(self.path / name) for name in names})

    def upload(self, names: Iterable[str]) -> None:
        """Upload files of the folder to the address.

        Raises:
            ReadError: if one cannot be written.
        """
        self.upload_as({name: self.path / name for name in names})

    def upload_as(self, files: Mapping[str, Path]) -> None:
        """Upload local files to the address under other names.

        Args:
            files: paths by names relative to the address.

        Raises:
            ReadError: if one cannot be written.
        """
        _for_all(lambda name: remote.upload(files[name], self._address_of(name)), files)

    def sync(self) -> None:
        """Upload files that changed since the last transfer, and remove remote files that no longer exist locally.

        Checkpoints are skipped. For a local run this does nothing.

        Raises:
            ReadError: if one cannot be written or removed.
        """
        if not self.address:
            return
        current = {
            name: _state(self.path / name)
            for name in _complete_files(self.path)
            if not name.startswith(CHECKPOINTS_PREFIX)
        }
        self.upload(name for name, state in current.items() if self._transferred.get(name) != state)
        self.remove(
            name for name in self._transferred.keys() - current.keys() if not name.startswith(CHECKPOINTS_PREFIX)
        )
        self._transferred = current

    def remove(self, names: Iterable[str]) -> None:
        """Remove files at the address.

        Raises:
            ReadError: if one cannot be removed.
        """
        _for_all(lambda name: remote.remove(self._address_of(name)), names)

    def _address_of(self, name: str) -> str:
        assert self.address is not None, "a local run has no address"
        return remote.join_address(self.address, *name.split("/"))


class RunStatus(NamedTuple):
    """How far a run has come, as its lock file records it.

    Args:
        state: "running", "ended", "stopped" (by a signal), "failed" (with an error), "killed" (its process is gone and
            recorded no end), or "unknown" (nothing is recorded, or the run is on another machine).
        detail: code or type of the error of a failed run, reason of an ended one, "running elsewhere" for a run that
            was begun on another machine, or "".
    """

    state: Literal["running", "ended", "stopped", "failed", "killed", "unknown"]
    detail: str = ""


def read_status(folder: Path) -> RunStatus:
    """Return the status of the run in a folder, from its lock file and the lock itself. It never fails."""
    if (is_locked := manifest.is_locked(folder)) is True:
        return RunStatus("running")
    try:
        with safetensors_file.open_file(folder / manifest.LOCK) as file:
            content = file.read(_MOST_STATUS)
    except ReadError:
        return RunStatus("unknown")
    words = content.removeprefix(_MARK).decode("utf-8", "replace").split()
    if not content.startswith(_MARK) or not words:
        return RunStatus("unknown")
    state, detail = words[0], " ".join(words[1:])
    if state == "running":  # The lock of another machine may be invisible here.
        is_gone = is_locked is False and detail == platform.node()
        return RunStatus("killed") if is_gone else RunStatus("unknown", "running elsewhere")
    if state == "failed":
        return RunStatus("failed", detail[:80])
    if state == "ended":
        return RunStatus("ended", detail[:80])
    return RunStatus("stopped" if state == "stopped" else "unknown")


def _write_status(folder: Path, status: str) -> None:
    """Replace the line below the mark of the lock file. A full disk must not end a run here."""
    with contextlib.suppress(OSError), open(folder / manifest.LOCK, "r+b") as file:
        file.write(_MARK + status.encode("utf-8", "replace") + b"\n")
        file.truncate()


def _for_all(transfer: Callable[[str], None], names: Iterable[str]) -> None:
    with ThreadPoolExecutor(_TRANSFERS) as pool:
        list(pool.map(transfer, list(names)))


def _complete_files(folder: Path) -> list[str]:
    """Return the names of complete files. Drafts end in .tmp, and links do not count."""
    paths = (path for path in folder.rglob("*") if path.is_file() and not path.is_symlink())
    return sorted(path.relative_to(folder).as_posix() for path in paths if path.suffix != ".tmp")


def _state(path: Path) -> tuple[int, int]:
    status = path.stat()
    return status.st_size, status.st_mtime_ns


def _is_run(folder: Path) -> bool:
    """Return whether a run has written to the folder: its lock file has the mark, or there is a checkpoint."""
    try:
        with safetensors_file.open_file(folder / manifest.LOCK) as file:
            if file.read(len(_MARK)) == _MARK:
                return True
    except ReadError:
        pass
    return any((folder / CHECKPOINTS_PREFIX).glob("step-*/resume"))


def _remove(process: int, folder: Path) -> None:
    """Remove a folder at exit, but only in the process that created it, not in a fork of it."""
    if os.getpid() == process:
        shutil.rmtree(folder, ignore_errors=True)
