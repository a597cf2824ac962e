"""Download shards of prepared folders from object storage into the cache folder, and verify them: `fetch_folder`.

The manifest lists the files with their sizes and checksums.
"""

import hashlib
import os
import shutil
from pathlib import Path

from tracegrad.errors import FormatError, ReadError
from tracegrad.storage import cache, files, manifest, remote, safetensors_file

_REMEDY = (
    "It was changed or truncated, in storage or during the transfer. Read it again, or copy the folder there again."
)


def fetch_folder(address: str, shard: str | None = None, *, into: Path | None = None) -> Path:
    """Download the folder at an address, or one of its shards, and return the local path.

    A file is not downloaded again if its size and checksum match the manifest.

    Args:
        address: address of a folder that `prepare` or `save` wrote.
        shard: name of the shard to download. Default: the complete folder.
        into: target folder. Default: a folder in the cache for this address and manifest.

    Returns:
        The path of the folder, or of the shard.

    Raises:
        ReadError: if the folder is incomplete, cannot be read, or does not fit on the local disk.
        FormatError: if a downloaded file does not match the manifest.
    """
    folder_manifest = manifest.read(address)
    folder = into or _cache_folder(address, folder_manifest)
    if shard is not None:
        if shard not in folder_manifest.shards:
            raise ReadError(
                f"TG-STORE-001: {address}: the manifest has no {shard}. Pass the name of a shard that it lists."
            )
        return _download_shard(remote.join_address(address, shard), folder_manifest.shards[shard], folder / shard)
    if folder_manifest.files:
        return _download_shard(address, folder_manifest, folder)
    for name, shard_manifest in folder_manifest.shards.items():
        _download_shard(remote.join_address(address, name), shard_manifest, folder / name)
    manifest.write_manifest(folder, folder_manifest)
    return folder


def local_path(name: str | os.PathLike[str]) -> Path:
    """Return a local path as it is, or download an address and return the path of the download.

    Raises:
        As `fetch_folder`.
    """
    return fetch_folder(name) if isinstance(name, str) and remote.is_address(name) else remote.path_of(name)


def _cache_folder(address: str, folder_manifest: manifest.FolderManifest) -> Path:
    """Return the cache folder for an address and its current manifest."""
    digest = hashlib.sha256(address.encode("utf-8", "surrogatepass") + manifest.encode(folder_manifest)).hexdigest()[
        :24
    ]
    return cache.cache_folder() / "shards" / digest


def _download_shard(address: str, shard_manifest: manifest.FolderManifest, folder: Path) -> Path:
    """Download the files of one shard, its manifest last."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, expected in shard_manifest.files.items():
            _download_file(remote.join_address(address, name), expected, folder / name)
    except OSError as error:
        raise ReadError(
            f"TG-STORE-002: {folder}: {error.strerror}. The files of {address} cannot be stored here. Free disk "
            "space, or "
            "set TRACEGRAD_CACHE to another folder."
        ) from error
    manifest.write_manifest(folder, shard_manifest)
    return folder


def _download_file(address: str, expected: safetensors_file.FileChecksum, path: Path) -> None:
    if path.exists() and path.stat().st_size == expected.bytes and safetensors_file.measure(path) == expected:
        return
    draft = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        remote.download(address, draft)
        actual = safetensors_file.measure(draft)
        if actual != expected:
            raise FormatError(
                f"TG-STORE-003: {address}: {actual.bytes:,} bytes with checksum {actual.crc32:08x}, but the manifest "
                f"lists {expected.bytes:,} with {expected.crc32:08x}. {_REMEDY}"
            )
        files.replace(draft, path)
    finally:
        draft.unlink(missing_ok=True)


def remove_download(path: Path) -> None:
    """Remove a folder that `fetch_folder` downloaded, to free disk space."""
    shutil.rmtree(path, ignore_errors=True)
