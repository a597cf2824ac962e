"""Which task is which group's: the same for a run that goes on as for one that was never cut.

Group n is the n-th task of the source. A list is shuffled anew each time it has been through; what is iterated keeps
its order and is not held.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from tracegrad.errors import ArgumentError


class Tasks:
    """Tasks by the number of their group.

    >>> [task for _, task in zip(range(3), Tasks(["a", "b"], seed=0).after(set()))][2][0]
    2

    Args:
        source: a list, whose tasks come again in another order, or what can be iterated once.
        seed: of the orders.
    """

    def __init__(self, source: Iterable[Any], seed: int = 0) -> None:
        if isinstance(source, (str, bytes)) or not isinstance(source, Iterable):
            raise ArgumentError(f"tasks is a {type(source).__name__}. Each of its entries is played. Pass a list.")
        if isinstance(source, Sequence) and not len(source):
            raise ArgumentError("tasks is empty. There is nothing to play. Pass at least one.")
        self.source, self.seed = source, seed

    def after(self, done: set[int]) -> Iterator[tuple[int, Any]]:
        """(group, task) of all groups but those that are done, from the first."""
        for number, task in enumerate(self._all()):
            if number not in done:
                yield number, task

    def _all(self) -> Iterator[Any]:
        if not isinstance(self.source, Sequence):
            yield from self.source
            return
        time = 0
        while True:
            order = np.random.default_rng([self.seed, time]).permutation(len(self.source))
            yield from (self.source[int(index)] for index in order)
            time += 1
