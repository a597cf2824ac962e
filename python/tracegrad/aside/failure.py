"""What became of a function that gave no value: what went wrong, in which line of whose function, and the traceback.

Frames are told apart by their files: ours, Python's and installed packages' are not the caller's own.
"""

import contextlib
import os
import sysconfig
import traceback
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, Literal

from tracegrad.errors import TracegradError, shown

HELD_CHARACTERS = 8192
_HERE = str(Path(__file__).parent.parent) + os.sep
_OTHERS = tuple({sysconfig.get_paths()[name] for name in ("stdlib", "platstdlib", "purelib", "platlib")})


@dataclass(frozen=True)
class Failure:
    """What became of a function that gave no value.

    Args:
        kind: "raised"; "late", past its time limit; "died", its process ended; "wrong", a value of another kind.
        words: one line.
        where: file, line and function of the caller's own code, "" where that is not known.
        traceback: as Python prints it, at most 8192 characters, the end kept.
    """

    kind: Literal["raised", "late", "died", "wrong"]
    words: str
    where: str = ""
    traceback: str = ""

    def __str__(self) -> str:
        return shown(f"{self.words} ({self.where})" if self.where else self.words)

    def as_dict(self) -> dict[str, str]:
        """For a record."""
        return {"kind": self.kind, "words": self.words, "where": self.where, "traceback": self.traceback}


class Failed(TracegradError):
    """A function gave no value; `failure` says why."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(str(failure))
        self.failure = failure

    def __reduce__(self) -> tuple[Any, ...]:
        return Failed, (self.failure,)


def located(error: BaseException) -> Failure:
    """The failure that an exception is, with its last line in the caller's own code.

    >>> try:
    ...     {}["lamp"]
    ... except KeyError as error:
    ...     print(located(error).words)
    KeyError: 'lamp'
    """
    if isinstance(error, Failed):
        return error.failure
    frames = traceback.extract_tb(error.__traceback__)
    own = [each for each in frames if is_own(each.filename)] or frames[-1:]
    where = f"{own[-1].filename}:{own[-1].lineno} in {own[-1].name}" if own else ""
    return Failure("raised", one_line(error), where, cut("".join(traceback.format_exception(error))))


def one_line(error: BaseException) -> str:
    """Type and text of an exception, at most 1000 characters."""
    # The text of a stranger's exception is a stranger's function too.
    with contextlib.suppress(Exception):
        return " ".join(f"{type(error).__name__}: {error}".split())[:1000].removesuffix(": ")
    return type(error).__name__


def cut(text: str) -> str:
    """The end of a text, as much as a record holds."""
    return text if len(text) <= HELD_CHARACTERS else "…" + text[1 - HELD_CHARACTERS :]


def is_own(file: str) -> bool:
    """Whether a file is neither ours, nor Python's, nor an installed package's."""
    return not file.startswith((_HERE, *_OTHERS))


def place(frame: FrameType) -> str:
    """File, line and function of a frame."""
    return f"{frame.f_code.co_filename}:{frame.f_lineno} in {frame.f_code.co_name}"
