"""Prepares the next step in a background thread while the device works on the current one. Called by the loop."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Generic, TypeVar

Made = TypeVar("Made")


class Ahead(Generic[Made]):
    """Builds item n when it is asked for, or before that in a background thread if it was announced.

    What `make` raises is raised by `take`. Nothing runs in the thread between a `take` and the next `announce`.

    Args:
        make: builds an item from (its number, whether it runs in the thread).

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
        """Starts building item `number` in the thread."""
        self._coming = number, self._thread.submit(self._make, number, True)

    def take(self, number: int) -> Made:
        """Item `number`: waits for the thread if it was announced, else builds it now."""
        coming, self._coming = self._coming, None
        if coming is None:
            return self._make(number, False)
        made = coming[1].result()
        return made if coming[0] == number else self._make(number, False)

    def close(self) -> None:
        """Waits for what is being made and lets the thread go."""
        self._thread.shutdown(wait=True)
