"""Find the user's cache folder: the system's, or the one that TRACEGRAD_CACHE names."""

import contextlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path


def folder() -> Path:
    """The folder, there or not."""
    if told := os.environ.get("TRACEGRAD_CACHE"):
        return Path(told).absolute()
    system = "~/Library/Caches" if sys.platform == "darwin" else os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(os.path.expanduser(system)) / "tracegrad"


def tokenizers() -> Path | None:
    """The folder of what was found out about tokenizers; None where TRACEGRAD_CACHE is empty, or nobody is at home."""
    told = folder() / "tokenizers"
    return told if os.environ.get("TRACEGRAD_CACHE") != "" and told.is_absolute() else None


@contextlib.contextmanager
def unused() -> Iterator[None]:
    """Nothing is kept by this process, nor by those that it starts, until the end."""
    before = os.environ.get("TRACEGRAD_CACHE")
    os.environ["TRACEGRAD_CACHE"] = ""
    try:
        yield
    finally:
        del os.environ["TRACEGRAD_CACHE"]
        if before is not None:
            os.environ["TRACEGRAD_CACHE"] = before
