"""How far reading has come: one line that is written anew on a terminal, plain lines elsewhere."""

import sys
import time
from dataclasses import dataclass
from typing import TextIO

_UNITS = ("bytes", "kB", "MB", "GB", "TB")
EVERY_S, PLAIN_EVERY_S = 0.2, 30.0


@dataclass(frozen=True)
class Progress:
    """What was read so far.

    Args:
        taken, total: bytes of the inputs; a total of 0 is not known.
        records: read so far.
        seconds: since reading began.
        done: whether it is the last word.
    """

    taken: int
    total: int
    records: int
    seconds: float
    done: bool = False

    def line(self) -> str:
        """The same in words.

        >>> Progress(500_000_000, 1_000_000_000, 12_000, 10.0).line()
        'read     500.0 MB of 1.0 GB (50%), 12,000 records, 50.0 MB a second, 10 s left'
        """
        rate = self.taken / self.seconds if self.seconds > 0 else 0.0
        share = f" of {size(self.total)} ({min(self.taken / self.total, 1):.0%})" if self.total else ""
        left = ""
        if self.total and rate and not self.done:
            left = f", {max(self.total - self.taken, 0) / rate:.0f} s left"
        return f"read     {size(self.taken)}{share}, {self.records:,} records, {size(rate)} a second{left}"


class Bar:
    """Says progress on a stream, not more often than anybody can read; `close` says the last word."""

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = stream or sys.stderr
        self._terminal = self._stream.isatty()
        self._every = EVERY_S if self._terminal else PLAIN_EVERY_S
        self._next = time.monotonic() + (1.0 if self._terminal else self._every)
        self._width = 0

    def __call__(self, progress: Progress) -> None:
        """Says it, if it is time."""
        now = time.monotonic()
        if progress.done:
            if self._width:
                self._write("\r" + " " * self._width + "\r")
            return
        if now < self._next:
            return
        self._next = now + self._every
        line = progress.line()
        if self._terminal:
            self._write("\r" + line.ljust(self._width))
            self._width = max(self._width, len(line))
        else:
            self._write(line + "\n")

    def _write(self, text: str) -> None:
        self._stream.write(text)
        self._stream.flush()


def size(count: float) -> str:
    """Bytes in the unit that suits them.

    >>> size(999), size(1_500_000)
    ('999 bytes', '1.5 MB')
    """
    unit = 0
    while count >= 1000 and unit < len(_UNITS) - 1:
        count, unit = count / 1000, unit + 1
    return f"{count:.0f} {_UNITS[unit]}" if unit == 0 else f"{count:.1f} {_UNITS[unit]}"
