"""What a run was made of: traces and model with their hashes, the version, and the commit of the working directory."""

import hashlib
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tracegrad import _core
from tracegrad.data.sources import expand
from tracegrad.errors import TracegradError, redacted
from tracegrad.storage.safetensors_file import write_bytes

WHOLE = 1 << 26
"""Files up to so many bytes are hashed whole; of a longer one, as weights are, the first and the last."""


def provenance(traces: Sequence[str], model: Path) -> dict[str, Any]:
    """Paths, sizes and hashes; None where something cannot be read again, as standard input."""
    return {
        "traces": [_of(path) for path in _files(traces)],
        "model": {
            "path": str(model.resolve()),
            "sha256": _together(sorted(model.rglob("*")) if model.is_dir() else []),
        },
        "version": _core.__version__,
        "commit": commit(Path.cwd()),
    }


def _files(traces: Sequence[str]) -> list[str]:
    found: list[str] = []
    for each in traces:
        if os.path.isfile(os.path.join(each, "manifest.json")):
            found.append(os.path.join(each, "manifest.json"))
            continue
        try:
            found += [place.path for place in expand([each])]
        except TracegradError:
            found.append(each)
    return found


def _of(path: str) -> dict[str, Any]:
    try:
        return {"path": redacted(path), "bytes": os.stat(path).st_size, "sha256": _hash(path, whole=True)}
    except OSError:
        return {"path": redacted(path), "bytes": None, "sha256": None}


def _together(paths: Sequence[Path]) -> str:
    """Of all files of a folder that are not links to folders, by name."""
    found = hashlib.sha256()
    for path in paths:
        if path.is_file():
            found.update(f"{path.name}:{path.stat().st_size}:{_hash(str(path), whole=False)}\n".encode())
    return found.hexdigest()


def _hash(path: str, *, whole: bool) -> str:
    found, size = hashlib.sha256(), os.stat(path).st_size
    with open(path, "rb") as file:
        if not whole and size > WHOLE:
            found.update(file.read(WHOLE // 2))
            file.seek(size - WHOLE // 2)
        while block := file.read(1 << 20):
            found.update(block)
    return found.hexdigest()


def commit(folder: Path) -> str | None:
    """The commit that is checked out where a folder lies; None where it is in no repository."""
    for above in (folder, *folder.parents):
        head = above / ".git" / "HEAD"
        try:
            said = head.read_text(encoding="utf-8").strip()
            if not said.startswith("ref: "):
                return said or None
            name = said.removeprefix("ref: ")
            loose = above / ".git" / name
            if loose.is_file():
                return loose.read_text(encoding="utf-8").strip()
            packed = (above / ".git" / "packed-refs").read_text(encoding="utf-8")
            return next((line.split()[0] for line in packed.splitlines() if line.endswith(f" {name}")), None)
        except (OSError, UnicodeDecodeError, IndexError):
            continue
    return None


def lines(found: dict[str, Any]) -> list[str]:
    """The same as comments of a config."""
    traces = [f"# traces {each['path']} sha256 {each['sha256']}" for each in found["traces"]]
    model = f"# model {found['model']['path']} sha256 {found['model']['sha256']}"
    return [*traces, model, f"# tracegrad {found['version']}, commit {found['commit']}"]


def sign(path: Path, made_of: dict[str, Any]) -> None:
    """Writes what the run was made of above its config, once."""
    try:
        told = path.read_text(encoding="utf-8")
    except OSError:
        return
    head = "\n".join(lines(made_of)) + "\n\n"
    if not told.startswith("# made of"):
        write_bytes(path, [("# made of\n" + head + told).encode("utf-8", "backslashreplace")])
