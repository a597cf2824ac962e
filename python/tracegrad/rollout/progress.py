"""Lines about something that takes long: plain ones, a few seconds apart, so that a log shows that it goes on."""

import time
from collections.abc import Callable

EVERY_S = 10.0


class Progress:
    """Says a line at most every `EVERY_S` seconds, the first one after so long.

    Args:
        say: takes the lines.
    """

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        self._began = self._last = time.monotonic()

    def tick(self, words: Callable[[float], str]) -> None:
        """Say `words(seconds since the beginning)` if it is time."""
        now = time.monotonic()
        if now - self._last >= EVERY_S:
            self._last = now
            self._say(words(now - self._began))


def left(seconds: float, done: int, total: int) -> str:
    """Return how long the rest will take if it goes on as before.

    >>> left(30.0, 10, 40), left(30.0, 0, 40)
    ('about 90 s left', 'none is done yet')
    """
    return f"about {seconds / done * (total - done):.0f} s left" if done else "none is done yet"
