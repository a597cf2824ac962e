"""Print plain lines about long operations every few seconds, so that a log shows progress."""

import time
from collections.abc import Callable

EVERY_S = 10.0


class Progress:
    """Prints a line at most every `EVERY_S` seconds; the first one after `EVERY_S` seconds.

    Args:
        log: receives the lines.
    """

    def __init__(self, log: Callable[[str], None]) -> None:
        self._say = log
        self._started_at = self._last_at = time.monotonic()

    def tick(self, words: Callable[[float], str]) -> None:
        """Print `words(seconds since the start)` if it is time."""
        now = time.monotonic()
        if now - self._last_at >= EVERY_S:
            self._last_at = now
            self._say(words(now - self._started_at))


def format_time_left(seconds: float, done: int, total: int) -> str:
    """Return an estimate of the remaining time, from the pace so far.

    >>> format_time_left(30.0, 10, 40), format_time_left(30.0, 0, 40)
    ('about 90 s left', 'none is done yet')
    """
    return f"about {seconds / done * (total - done):.0f} s left" if done else "none is done yet"
