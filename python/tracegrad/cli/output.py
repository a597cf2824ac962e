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


class OutputFailed(Exception):
    """Standard output takes nothing: `why`."""

    def __init__(self, why: OSError) -> None:
        super().__init__(str(why))
        self.why = why


def put(*lines: str, to: TextIO | None) -> None:
    """Write lines to a standard output, or to what stands for it.

    Raises:
        OutputFailed: it takes nothing, such as a pipe that nobody reads or a full disk.
    """
    try:
        print(*lines, sep="\n", file=to, flush=True)
    except OSError as error:
        nowhere(to)
        raise OutputFailed(error) from error


def nowhere(to: TextIO | None) -> None:
    """Lead a file to nowhere, so that what it still holds raises nothing when it is closed."""
    try:
        place = -1 if to is None else to.fileno()
    except (AttributeError, OSError, ValueError):
        return
    if to is not None and place >= 0:
        with contextlib.suppress(OSError), open(os.devnull, "w") as devnull:
            os.dup2(devnull.fileno(), place)
            to.flush()


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
