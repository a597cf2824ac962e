"""Record the inputs of a run: hashes of traces and model, the version, and the commit of the working directory."""

import hashlib
import itertools
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tracegrad import _core
from tracegrad.data.sources import expand
from tracegrad.errors import TracegradError, redact
from tracegrad.storage.safetensors_file import write_bytes

MAX_FULL_HASH_BYTES = 1 << 26
"""Model files of up to this size are hashed completely; of larger ones, half of it at the start and at the end."""


def provenance(traces: Sequence[str], model: Path) -> dict[str, Any]:
    """Return the paths, sizes and hashes of traces and model, the version, and the commit.

    Sizes and hashes are None for inputs that cannot be read again, such as standard input.
    """
    return {
        "traces": [_entry(path) for path in _files(traces)],
        "model": {
            "path": str(model.resolve()),
            "sha256": _folder_hash(sorted(model.rglob("*")) if model.is_dir() else []),
        },
        "version": _core.__version__,
        "commit": commit(Path.cwd()),
    }


def _files(traces: Sequence[str]) -> list[str]:
    paths: list[str] = []
    for trace in traces:
        if os.path.isfile(os.path.join(trace, "manifest.json")):
            paths.append(os.path.join(trace, "manifest.json"))
            continue
        try:
            paths += [place.path for place in expand([trace])]
        except TracegradError:
            paths.append(trace)
    return paths


def _entry(path: str) -> dict[str, Any]:
    try:
        return {"path": redact(path), "bytes": os.stat(path).st_size, "sha256": _hash(path, whole=True)}
    except OSError:
        return {"path": redact(path), "bytes": None, "sha256": None}


def _folder_hash(paths: Sequence[Path]) -> str:
    """Hash the names, sizes and contents of files, in order. Other paths are left out."""
    digest = hashlib.sha256()
    for path in paths:
        if path.is_file():
            digest.update(f"{path.name}:{path.stat().st_size}:{_hash(str(path), whole=False)}\n".encode())
    return digest.hexdigest()


def _hash(path: str, *, whole: bool) -> str:
    digest, size = hashlib.sha256(), os.stat(path).st_size
    with open(path, "rb") as file:
        if not whole and size > MAX_FULL_HASH_BYTES:
            digest.update(file.read(MAX_FULL_HASH_BYTES // 2))
            file.seek(size - MAX_FULL_HASH_BYTES // 2)
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def commit(folder: Path) -> str | None:
    """Return the commit that is checked out in the repository of a folder, None outside a repository."""
    for parent in (folder, *folder.parents):
        head = parent / ".git" / "HEAD"
        try:
            content = head.read_text(encoding="utf-8").strip()
            if not content.startswith("ref: "):
                return content or None
            name = content.removeprefix("ref: ")
            loose = parent / ".git" / name
            if loose.is_file():
                return loose.read_text(encoding="utf-8").strip()
            packed = (parent / ".git" / "packed-refs").read_text(encoding="utf-8")
            return next((line.split()[0] for line in packed.splitlines() if line.endswith(f" {name}")), None)
        except (OSError, UnicodeDecodeError, IndexError):
            continue
    return None


def lines(provenance: dict[str, Any]) -> list[str]:
    """Format a provenance as comment lines of a config."""
    traces = [f"# traces {each['path']} sha256 {each['sha256']}" for each in provenance["traces"]]
    model = f"# model {provenance['model']['path']} sha256 {provenance['model']['sha256']}"
    commit = f", commit {provenance['commit']}" if provenance["commit"] else ""
    return [*traces, model, f"# tracegrad {provenance['version']}{commit}"]


def write_header(path: Path, made_of: dict[str, Any], more: Sequence[str] = ()) -> None:
    """Insert the provenance at the top of a config file, unless a comment before the first option already has it.

    Args:
        path: the file.
        made_of: the provenance.
        more: further lines of the comment.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except OSError:
        return
    more_lines = (f"# {line}" for text in more for line in text.splitlines())
    head = "\n".join([*lines(made_of), *more_lines]) + "\n\n"
    comments = itertools.takewhile(lambda line: not line or line.startswith("#"), map(str.strip, text.splitlines()))
    if "# made of" not in comments:
        write_bytes(path, [("# made of\n" + head + text).encode("utf-8", "backslashreplace")])
