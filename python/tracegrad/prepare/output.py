"""Where shards go: a folder of this machine, or one at an address. Both are whole by what is written last."""

import json
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from tracegrad.alignment import store
from tracegrad.alignment.sequences import Sequences
from tracegrad.errors import ReadError, TracegradError, redacted
from tracegrad.storage import files, manifest, remote
from tracegrad.storage.safetensors_file import flush, read_text, write_bytes

PLAN = "prepare.json"
"""The file that says what shards are made of."""


def place_of(out: str) -> "Folder | Bucket":
    """What an `--out` names."""
    return Bucket(out) if remote.is_address(out) else Folder(remote.path_of(out))


class Folder:
    """A folder of this machine."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __str__(self) -> str:
        return str(self.path)

    def make(self) -> None:
        """Makes it, if it is not there."""
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise TracegradError(
                f"{self.path}: {error.strerror}. Nothing can be written there. Give another --out."
            ) from error

    @contextmanager
    def lock(self) -> Iterator[int | None]:
        """Keeps other writers out; gives the handle that holds the lock, for processes that work for this one."""
        with manifest.lock(self.path) as handle:
            yield handle

    def names(self) -> set[str]:
        """What stands in it."""
        return {path.name for path in self.path.iterdir()} if self.path.is_dir() else set()

    def clear(self) -> None:
        """Removes what writers that were killed have left. For who holds the lock."""
        for path in self.path.glob(".tmp-shard-*"):
            shutil.rmtree(path, ignore_errors=True)
        for path in self.path.glob("*.tmp"):
            manifest.clear_drafts(self.path, path.name.rsplit(".", 2)[0])

    def read(self, name: str, limit: int) -> bytes:
        """A small file."""
        return read_text(self.path / name, limit)

    def write(self, name: str, text: bytes) -> None:
        """Writes a small file, whole or not at all."""
        write_bytes(self.path / name, [text])

    def remove(self, name: str) -> None:
        """Removes a file that may be there."""
        (self.path / name).unlink(missing_ok=True)

    def put(self, name: str, sequences: Sequences) -> manifest.Folder:
        """Writes a shard beside its place and moves it there when it is whole and on the disk."""
        shard = self.path / name
        staged = shard.with_name(f".tmp-{name}")
        try:
            if shard.exists():
                shard.rename(staged)
            files.make_folder(staged)
            store.write(staged, sequences.stored())
            staged.rename(shard)
            flush(self.path)
        except OSError as error:
            raise TracegradError(
                f"{shard}: {error.strerror}. It is not written. Make room and go on with --resume."
            ) from error
        return manifest.read(shard)

    def kept(self, name: str, traces: int) -> Sequences | None:
        """A shard that is there to its last byte and was made of so many traces."""
        shard = self.path / name
        if not shard.exists():
            return None
        try:
            manifest.verify(shard, manifest.read(shard))
            found = Sequences.load(shard)
        except TracegradError:
            return None
        return found if found.traces + len(found.drift.errors) == traces else None

    def told(self, name: str) -> manifest.Folder:
        """The manifest of a shard."""
        return manifest.read(self.path / name)

    def holds(self, shards: dict[str, manifest.Folder]) -> bool:
        """Whether these shards are there to their last bytes."""
        try:
            for name, told in shards.items():
                if manifest.read(self.path / name) != told:
                    return False
                manifest.verify(self.path / name, told)
        except TracegradError:
            return False
        return True

    @contextmanager
    def aside(self) -> Iterator[Path]:
        """Where files go that are written as they come, such as bad records."""
        yield self.path

    def seal(self, shards: dict[str, manifest.Folder]) -> None:
        """Says that these shards are all and whole."""
        manifest.put(self.path, manifest.of_shards(shards))
        manifest.read(self.path)


class Bucket:
    """A folder at an address. Nothing keeps two writers apart there."""

    def __init__(self, address: str) -> None:
        self.address = address.rstrip("/")

    def __str__(self) -> str:
        return redacted(self.address)

    def _at(self, *names: str) -> str:
        return remote.joined(self.address, *names)

    def make(self) -> None:
        """Nothing: folders are made by what is put into them."""

    @contextmanager
    def lock(self) -> Iterator[int | None]:
        """Nothing is locked."""
        yield None

    def names(self) -> set[str]:
        """What stands in it."""
        return {name.partition("/")[0] for name in remote.sizes(self.address)}

    def clear(self) -> None:
        """Nothing is left by writers that were killed but what is written again."""

    def read(self, name: str, limit: int) -> bytes:
        """A small file."""
        return remote.read(self._at(name), limit)

    def write(self, name: str, text: bytes) -> None:
        """Writes a small file."""
        remote.write(self._at(name), text)

    def remove(self, name: str) -> None:
        """Removes a file that may be there."""
        remote.remove(self._at(name))

    def put(self, name: str, sequences: Sequences) -> manifest.Folder:
        """Writes a shard, its manifest last."""
        with tempfile.TemporaryDirectory(prefix="tracegrad-") as made:
            store.write(Path(made), sequences.stored())
            told = manifest.read(Path(made))
            self.remove(f"{name}/{manifest.NAME}")
            for file in (*told.files, manifest.NAME):
                remote.upload(Path(made) / file, self._at(name, file))
        return told

    def kept(self, name: str, traces: int) -> Sequences | None:
        """None: a part there is kept as a whole, or done again."""
        return None

    def told(self, name: str) -> manifest.Folder:
        """The manifest of a shard."""
        return manifest.read(self._at(name))

    def holds(self, shards: dict[str, manifest.Folder]) -> bool:
        """Whether these shards are there, as long as their manifests say; no byte of them is read."""
        with suppress(ReadError):
            there = remote.sizes(self.address)
            wanted = {f"{name}/{file}": by for name, told in shards.items() for file, by in told.files.items()}
            is_long = all(there.get(name) == told.bytes for name, told in wanted.items())
            return is_long and all(f"{name}/{manifest.NAME}" in there for name in shards)
        return False

    @contextmanager
    def aside(self) -> Iterator[Path]:
        """A folder of this machine whose files are put there in the end, also after an error."""
        with tempfile.TemporaryDirectory(prefix="tracegrad-") as made:
            try:
                yield Path(made)
            finally:
                for path in sorted(Path(made).iterdir()):
                    remote.upload(path, self._at(path.name))

    def seal(self, shards: dict[str, manifest.Folder]) -> None:
        """Says that these shards are all and whole."""
        self.write(manifest.NAME, manifest.encoded(manifest.of_shards(shards)))
        manifest.read(self.address)


def encoded(value: Any) -> bytes:
    """JSON as it is written to a file."""
    return (redacted(json.dumps(value, indent=1, ensure_ascii=False)) + "\n").encode("utf-8", "backslashreplace")


def write_json(path: Path, value: Any) -> None:
    """Writes JSON to a file, whole or not at all."""
    write_bytes(path, [encoded(value)])
