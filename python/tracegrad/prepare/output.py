"""Write shards to a local folder or to an address. The file written last marks either one as complete."""

import json
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from tracegrad.alignment import store
from tracegrad.alignment.sequences import Sequences
from tracegrad.errors import ReadError, TracegradError, redact
from tracegrad.storage import files, manifest, remote
from tracegrad.storage.safetensors_file import flush, read_text, write_bytes

PLAN = "prepare.json"
"""Name of the file that records how the shards were made."""


def open_output(out: str) -> "LocalOutput | RemoteOutput":
    """Return the output that an `--out` names."""
    return RemoteOutput(out) if remote.is_address(out) else LocalOutput(remote.path_of(out))


class LocalOutput:
    """A local output folder."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __str__(self) -> str:
        return str(self.path)

    def make(self) -> None:
        """Create the folder if it does not exist.

        Raises:
            TracegradError: if it cannot be created.
        """
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise TracegradError(
                f"TG-PREPARE-001: {self.path}: cannot be created ({error.strerror}). Give another out."
            ) from error

    @contextmanager
    def lock(self) -> Iterator[int | None]:
        """Lock out other writers, and yield the handle of the lock for worker processes to inherit."""
        with manifest.lock(self.path) as handle:
            yield handle

    def names(self) -> set[str]:
        """Return the names of all entries."""
        return {path.name for path in self.path.iterdir()} if self.path.is_dir() else set()

    def clear(self) -> None:
        """Remove drafts of killed writers. The caller must have the lock."""
        for path in self.path.glob(".tmp-shard-*"):
            shutil.rmtree(path, ignore_errors=True)
        for path in self.path.glob("*.tmp"):
            manifest.clear_drafts(self.path, path.name.rsplit(".", 2)[0])

    def read(self, name: str, limit: int) -> bytes:
        """Return the bytes of a small file."""
        return read_text(self.path / name, limit)

    def write(self, name: str, text: bytes) -> None:
        """Write a small file, completely or not at all."""
        write_bytes(self.path / name, [text])

    def remove(self, name: str) -> None:
        """Remove a file if it exists."""
        (self.path / name).unlink(missing_ok=True)

    def write_shard(self, name: str, sequences: Sequences) -> manifest.FolderManifest:
        """Write a shard to a temporary folder, and rename it when it is complete and synced to disk.

        Raises:
            TracegradError: if it cannot be written.
        """
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
                f"TG-PREPARE-002: {shard}: cannot be written ({error.strerror}). Free disk space and continue with "
                "resume=True."
            ) from error
        return manifest.read(shard)

    def load_shard(self, name: str, traces: int) -> Sequences | None:
        """Return an existing shard if its checksums match and it was made of `traces` traces. None otherwise."""
        shard = self.path / name
        if not shard.exists():
            return None
        try:
            manifest.verify(shard, manifest.read(shard))
            sequences = Sequences.load(shard)
        except TracegradError:
            return None
        return sequences if sequences.traces + len(sequences.alignment_report.errors) == traces else None

    def shard_manifest(self, name: str) -> manifest.FolderManifest:
        """Return the manifest of a shard."""
        return manifest.read(self.path / name)

    def has_shards(self, shards: dict[str, manifest.FolderManifest]) -> bool:
        """Return whether these shards exist and all their checksums match."""
        try:
            for name, expected in shards.items():
                if manifest.read(self.path / name) != expected:
                    return False
                manifest.verify(self.path / name, expected)
        except TracegradError:
            return False
        return True

    @contextmanager
    def scratch(self) -> Iterator[Path]:
        """Yield the folder for files that grow during the work, such as bad records."""
        yield self.path

    def seal(self, shards: dict[str, manifest.FolderManifest]) -> None:
        """Write the manifest of all shards, which marks the folder as complete."""
        manifest.write_manifest(self.path, manifest.from_shards(shards))
        manifest.read(self.path)


class RemoteOutput:
    """An output folder at an address. It has no lock against a second writer."""

    def __init__(self, address: str) -> None:
        self.address = address.rstrip("/")

    def __str__(self) -> str:
        return redact(self.address)

    def _at(self, *names: str) -> str:
        return remote.join_address(self.address, *names)

    def make(self) -> None:
        """Do nothing. Writing a file creates its folders."""

    @contextmanager
    def lock(self) -> Iterator[int | None]:
        """Yield None: nothing is locked."""
        yield None

    def names(self) -> set[str]:
        """Return the names of all entries."""
        return {name.partition("/")[0] for name in remote.sizes(self.address)}

    def clear(self) -> None:
        """Do nothing. Files of killed writers are overwritten."""

    def read(self, name: str, limit: int) -> bytes:
        """Return the bytes of a small file."""
        return remote.read(self._at(name), limit)

    def write(self, name: str, text: bytes) -> None:
        """Write a small file."""
        remote.write(self._at(name), text)

    def remove(self, name: str) -> None:
        """Remove a file if it exists."""
        remote.remove(self._at(name))

    def write_shard(self, name: str, sequences: Sequences) -> manifest.FolderManifest:
        """Write a shard, its manifest last."""
        with tempfile.TemporaryDirectory(prefix="tracegrad-") as folder:
            store.write(Path(folder), sequences.stored())
            shard_manifest = manifest.read(Path(folder))
            self.remove(f"{name}/{manifest.NAME}")
            for file in (*shard_manifest.files, manifest.NAME):
                remote.upload(Path(folder) / file, self._at(name, file))
        return shard_manifest

    def load_shard(self, name: str, traces: int) -> Sequences | None:
        """Return None: at an address, a part is kept completely or done again."""
        return None

    def shard_manifest(self, name: str) -> manifest.FolderManifest:
        """Return the manifest of a shard."""
        return manifest.read(self._at(name))

    def has_shards(self, shards: dict[str, manifest.FolderManifest]) -> bool:
        """Return whether these shards exist with the listed sizes. Their content is not read."""
        with suppress(ReadError):
            existing = remote.sizes(self.address)
            files = {
                f"{name}/{file}": size for name, expected in shards.items() for file, size in expected.files.items()
            }
            sizes_match = all(existing.get(name) == expected.bytes for name, expected in files.items())
            return sizes_match and all(f"{name}/{manifest.NAME}" in existing for name in shards)
        return False

    @contextmanager
    def scratch(self) -> Iterator[Path]:
        """Yield a temporary local folder. Its files are uploaded at the end, also after an error."""
        with tempfile.TemporaryDirectory(prefix="tracegrad-") as folder:
            try:
                yield Path(folder)
            finally:
                for path in sorted(Path(folder).iterdir()):
                    remote.upload(path, self._at(path.name))

    def seal(self, shards: dict[str, manifest.FolderManifest]) -> None:
        """Write the manifest of all shards, which marks the folder as complete."""
        self.write(manifest.NAME, manifest.encode(manifest.from_shards(shards)))
        manifest.read(self.address)


def encoded(value: Any) -> bytes:
    """Return a value as the bytes of a JSON file, with secrets of addresses redacted."""
    return (redact(json.dumps(value, indent=1, ensure_ascii=False)) + "\n").encode("utf-8", "backslashreplace")


def write_json(path: Path, value: Any) -> None:
    """Write a JSON file, completely or not at all."""
    write_bytes(path, [encoded(value)])
