"""The token of a server, which command lines and files of a run name by the file that holds it."""

from pathlib import Path

from tracegrad.errors import ArgumentError


def read_key(path: Path) -> str:
    """The token in a file: its first line."""
    try:
        key = path.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is no text"
        raise ArgumentError(
            f"{path}: {why}. The servers would refuse every request. Write their token there."
        ) from error
    if not key or "\n" in key or not key.isprintable():
        raise ArgumentError(f"{path}: one line with a token is wanted. The servers would refuse what it holds.")
    return key
