"""Find the user's cache folder: the folder in TRACEGRAD_CACHE, or the default of the operating system."""

import contextlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path


def cache_folder() -> Path:
    """Return the path of the cache folder, which need not exist."""
    if override := os.environ.get("TRACEGRAD_CACHE"):
        return Path(override).absolute()
    system = "~/Library/Caches" if sys.platform == "darwin" else os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(os.path.expanduser(system)) / "tracegrad"


def tokenizers() -> Path | None:
    """Return the folder of cached tokenizer data. None if TRACEGRAD_CACHE is empty or there is no home folder."""
    path = cache_folder() / "tokenizers"
    return path if os.environ.get("TRACEGRAD_CACHE") != "" and path.is_absolute() else None


@contextlib.contextmanager
def cache_disabled() -> Iterator[None]:
    """Disable the cache until the block ends, for this process and the processes that it starts."""
    previous = os.environ.get("TRACEGRAD_CACHE")
    os.environ["TRACEGRAD_CACHE"] = ""
    try:
        yield
    finally:
        del os.environ["TRACEGRAD_CACHE"]
        if previous is not None:
            os.environ["TRACEGRAD_CACHE"] = previous
