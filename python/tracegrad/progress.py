"""Print how far a long operation is: a line every ten seconds, or one line that is overwritten on a terminal.

All verbs and `train()` use this module. Each class takes a clock, so that tests need not wait.
"""

import sys
import threading
import time
from collections.abc import Callable, Iterable
from types import TracebackType
from typing import TextIO

EVERY_S = 10.0
"""Seconds between two lines where the output is not a terminal."""
TERMINAL_EVERY_S = 0.2
_FIRST_ON_TERMINAL_S = 1.0


def time_left(seconds: float, done: float, total: float) -> str:
    """Return the remaining time at the pace so far; an empty string if nothing is done, or all of it.

    Args:
        seconds: time since the start.
        done, total: work in any unit: bytes, groups or steps.

    >>> time_left(30.0, 10, 40), time_left(30.0, 1, 10), time_left(30.0, 1, 400), time_left(30.0, 0, 40)
    ('90 s left', '4 min 30 s left', '3 h 19 min left', '')
    """
    if done <= 0 or total <= done:
        return ""
    left = round(seconds / done * (total - done))
    if left < 120:
        return f"{left} s left"
    minutes, rest = divmod(left, 60)
    return f"{minutes} min {rest} s left" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min left"


def progress_line(phase: str, details: Iterable[str] = (), *, seconds: float, done: float = 0, total: float = 0) -> str:
    """Return the line of a phase: its share, details, and the time left. Without a total, the time so far.

    >>> progress_line("reading", ["12,300 records", "2.1 GB"], seconds=26.4, done=41, total=100)
    'reading  41 %  12,300 records  2.1 GB  38 s left'
    >>> progress_line("saving a checkpoint", seconds=20.0)
    'saving a checkpoint  20 s so far'
    """
    share = f"{min(done / total, 1):.0%}".replace("%", " %") if total else ""
    end = time_left(seconds, done, total) if done and total else f"{seconds:.0f} s so far"
    return "  ".join(filter(None, [phase, share, *details, end]))


class ProgressPrinter:
    """Prints a line at most every ten seconds. The first one comes after ten seconds.

    On a terminal, the line is overwritten every 0.2 s, from the first second on.

    Args:
        log: receives the lines; default: they are written to `stream`.
        stream: default standard error.
        clock: returns seconds.
    """

    def __init__(
        self,
        log: Callable[[str], None] | None = None,
        *,
        stream: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._log, self._stream, self._clock = log, stream or sys.stderr, clock
        self._is_live = log is None and self._stream is not None and self._stream.isatty()
        self._started_at = clock()
        self._next = self._started_at + (_FIRST_ON_TERMINAL_S if self._is_live else EVERY_S)
        self._width = 0
        self._lock = threading.Lock()

    def tick(self, words: Callable[[float], str], *, at_once: bool = False) -> None:
        """Print `words(seconds since the start)` if it is time, or `at_once`."""
        with self._lock:
            now = self._clock()
            if now < self._next and not at_once:
                return
            self._next = now + (TERMINAL_EVERY_S if self._is_live else EVERY_S)
            line = words(now - self._started_at)
            if self._log is not None:
                self._log(line)
            elif self._is_live:
                self._write("\r" + line.ljust(self._width))
                self._width = max(self._width, len(line))
            else:
                self._write(line + "\n")

    def clear(self) -> None:
        """Erase the overwritten line of a terminal."""
        with self._lock:
            if self._width:
                self._write("\r" + " " * self._width + "\r")
                self._width = 0

    def _write(self, text: str) -> None:
        if self._stream is not None:
            self._stream.write(text)
            self._stream.flush()


class Heartbeat:
    """Calls a function about once a second in a thread, until the block ends.

    It reports phases that do not report their own progress, such as a long call of the core. The function must be
    quick and safe to call from a thread; `ProgressPrinter.tick` is. After an error it is not called again, and the
    error is raised when the block ends.
    """

    def __init__(self, beat: Callable[[], None], *, every_s: float = 1.0) -> None:
        self._beat, self._every_s = beat, every_s
        self._ended = threading.Event()
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._run, name="tracegrad-progress", daemon=True)

    def __enter__(self) -> "Heartbeat":
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ended.set()
        self._thread.join()
        if error is None and self._error is not None:
            raise self._error

    def _run(self) -> None:
        try:
            while not self._ended.wait(self._every_s):
                self._beat()
        except Exception as error:
            self._error = error
