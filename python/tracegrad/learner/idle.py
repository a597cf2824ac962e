"""How long a CUDA device waits for the host between its pieces of work, by events on its own clock.

Here is `Idle`. On a CPU host and device are one, and there is nothing to measure. Called by the step and the loop.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise

import torch


class Idle:
    """Share of the time between the first and the last piece of work in which the device had none queued.

    A piece is what is launched within one `busy()`. Waits inside a piece, between two kernels of it, are not seen:
    the share is a lower bound.

    Args:
        device: where the work runs.

    >>> idle = Idle(torch.device("cpu"))
    >>> with idle.busy():
    ...     pass
    >>> idle.share() is None
    True
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._pieces: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
        self._waited = self._total = 0.0

    @property
    def measures(self) -> bool:
        """Whether the device has a clock of its own."""
        return self.device.type == "cuda"

    @contextmanager
    def busy(self) -> Iterator[None]:
        """Around the launches of one piece of work."""
        if not self.measures:
            yield
            return
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record(torch.cuda.current_stream(self.device))
        yield
        end.record(torch.cuda.current_stream(self.device))
        self._pieces.append((begin, end))

    def share(self) -> float | None:
        """Waits over the whole time, of the pieces since the last call; None without a clock or with no piece.

        Waits for the device. The last piece stays as the beginning of the next share's first wait.
        """
        if not self._pieces:
            return None
        torch.cuda.synchronize(self.device)
        pieces = self._pieces
        waited = sum(before[1].elapsed_time(after[0]) for before, after in pairwise(pieces))
        total = pieces[0][0].elapsed_time(pieces[-1][1])
        self._pieces = pieces[-1:]
        self._waited, self._total = self._waited + waited, self._total + total
        return waited / total if total > 0 else 0.0

    def overall(self) -> float | None:
        """The share over everything that `share` was asked for; None where nothing was measured."""
        return self._waited / self._total if self._total > 0 else None
