"""Download shards of prepared folders on object storage into the cache folder, and check them: `local`.

The manifest says which files there are, with their sizes and checksums.
"""

import hashlib
import os
import shutil
from pathlib import Path

from tracegrad.errors import FormatError, ReadError
from tracegrad.storage import cache, files, manifest, remote, safetensors_file

_TAKEN = "It was changed or cut on its way, or there. Read it again, or copy the folder there again."


def local(address: str, shard: str | None = None, *, into: Path | None = None) -> Path:
    """The folder at an address, or one shard of it, on this machine.

    What was brought before is not brought again: a file stays where its size and checksum are those of the manifest.

    Args:
        address: of a folder that `prepare` or `save` wrote.
        shard: which of its shards, by name; the others are not asked for. Default: all of the folder.
        into: a folder for what is brought; by default one of the cache, for this address and manifest.

    Returns:
        The path of the folder, or of the shard.

    Raises:
        ReadError: if nothing whole is there, it cannot be read, or there is no room for it here.
        FormatError: if what comes is not what its manifest says.
    """
    whole = manifest.read(address)
    folder = into or _cached(address, whole)
    if shard is not None:
        if shard not in whole.shards:
            raise ReadError(f"{address}: no {shard} is in its manifest. Ask for one of those that it names.")
        return _shard(remote.joined(address, shard), whole.shards[shard], folder / shard)
    if whole.files:
        return _shard(address, whole, folder)
    for name, told in whole.shards.items():
        _shard(remote.joined(address, name), told, folder / name)
    manifest.put(folder, whole)
    return folder


def here(name: str | os.PathLike[str]) -> Path:
    """The path that a name is; of an address, where `local` brings it.

    Raises:
        As `local`.
    """
    return local(name) if isinstance(name, str) and remote.is_address(name) else remote.path_of(name)


def _cached(address: str, whole: manifest.Folder) -> Path:
    """A folder of the cache for this address as it is now."""
    told = hashlib.sha256(address.encode("utf-8", "surrogatepass") + manifest.encoded(whole)).hexdigest()[:24]
    return cache.folder() / "shards" / told


def _shard(address: str, told: manifest.Folder, folder: Path) -> Path:
    """Brings the files of one shard, its manifest last."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, written in told.files.items():
            _file(remote.joined(address, name), written, folder / name)
    except OSError as error:
        raise ReadError(
            f"{folder}: {error.strerror}. What {address} holds has no place here. Make room, or name another folder "
            "with TRACEGRAD_CACHE."
        ) from error
    manifest.put(folder, told)
    return folder


def _file(address: str, told: safetensors_file.Written, path: Path) -> None:
    if path.exists() and path.stat().st_size == told.bytes and safetensors_file.measure(path) == told:
        return
    draft = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        remote.download(address, draft)
        found = safetensors_file.measure(draft)
        if found != told:
            raise FormatError(
                f"{address}: {found.bytes:,} bytes with checksum {found.crc32:08x}, and the manifest says "
                f"{told.bytes:,} with {told.crc32:08x}. {_TAKEN}"
            )
        files.replace(draft, path)
    finally:
        draft.unlink(missing_ok=True)


def forget(path: Path) -> None:
    """Removes what `local` brought, so that a disk holds no more than is needed."""
    shutil.rmtree(path, ignore_errors=True)
