"""The next step is made ready in a thread while the device works on the one before. Called by the loop."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Generic, TypeVar

Made = TypeVar("Made")


class Ahead(Generic[Made]):
    """One thing by number, made when it is asked for or, where that was announced, before.

    What `make` raises is raised by `take`. Nothing runs in the thread between a `take` and the next `announce`.

    Args:
        make: (number, in the thread or not) to the thing.

    >>> ahead = Ahead(lambda number, beside: (number, beside))
    >>> ahead.announce(3)
    >>> ahead.take(3), ahead.take(4)
    ((3, True), (4, False))
    >>> ahead.close()
    """

    def __init__(self, make: Callable[[int, bool], Made]) -> None:
        self._make = make
        self._thread = ThreadPoolExecutor(1, "tracegrad-next-step")
        self._coming: tuple[int, Future[Made]] | None = None

    def announce(self, number: int) -> None:
        """Begins to make it."""
        self._coming = number, self._thread.submit(self._make, number, True)

    def take(self, number: int) -> Made:
        """The thing, waited for or made now."""
        coming, self._coming = self._coming, None
        if coming is None:
            return self._make(number, False)
        found = coming[1].result()
        return found if coming[0] == number else self._make(number, False)

    def close(self) -> None:
        """Waits for what is being made and lets the thread go."""
        self._thread.shutdown(wait=True)
