"""Standard output under `--json`: it holds what is told to machines, whatever the code of a user prints meanwhile.

Called by `main`; `words.tell` writes to `stream()`.
"""

import contextlib
import ctypes
import os
import sys
from collections.abc import Iterator
from typing import TextIO

_kept: list[TextIO] = []


def stream() -> TextIO:
    """Where what is told to machines goes."""
    return _kept[-1] if _kept else sys.stdout


@contextlib.contextmanager
def kept() -> Iterator[None]:
    """Keeps standard output for `stream()` until its end: what else is printed there goes to standard error.

    Where `sys.stdout` is descriptor 1, so does what C and the processes that are started meanwhile write there.

    >>> with kept():
    ...     print("what a reward function prints")
    ...     print("what a verb tells", file=stream())
    what a verb tells
    """
    own = sys.stdout
    if own is None:  # the process was started with it closed
        yield
        return
    with contextlib.ExitStack() as stack:
        if _is_descriptor_1(own):
            own = stack.enter_context(_turned(own))
        stack.enter_context(contextlib.redirect_stdout(sys.stderr))
        _kept.append(own)
        stack.callback(_kept.pop)
        yield


def _is_descriptor_1(own: TextIO) -> bool:
    try:
        return own.fileno() == 1
    except (AttributeError, OSError, ValueError):
        return False


@contextlib.contextmanager
def _turned(own: TextIO) -> Iterator[TextIO]:
    """Descriptor 1 turned to standard error; gives what still writes where it was."""
    _flush(own)
    with open(os.dup(1), "w", encoding=own.encoding, errors=own.errors) as told:
        if sys.stderr is None:
            with open(os.devnull, "w") as nowhere:
                os.dup2(nowhere.fileno(), 1)
        else:
            os.dup2(2, 1)
        try:
            yield told
        finally:
            with contextlib.suppress(OSError):  # standard error may be gone
                _flush(own)
            os.dup2(told.fileno(), 1)


def _flush(own: TextIO) -> None:
    """Writes out what Python and C hold back for descriptor 1, before it becomes another."""
    own.flush()
    ctypes.CDLL(None).fflush(None)
