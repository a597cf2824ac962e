"""By what a step is broken down: turn, tier and version lag, each into a fixed number of cells.

Fixed cells keep the sums of one shape on every rank, whatever turns it happened to get. Called by `offpolicy`.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

LAGS = (0, 1, 2, 3, 4, 8, 16)
"""First lag of each cell; the last cell is open."""
TURNS = 8
"""Turns with a cell of their own; later ones share one."""
_TIERS = 7


@dataclass(frozen=True)
class Breakdown:
    """Values to cells.

    Args:
        starts: first value of each cell but the last, which holds what is below the first or not in `values`.
        cells: their names.
        above: values from here on are unknown too; None where the last cell is open.
    """

    starts: tuple[int, ...]
    cells: tuple[str, ...]
    above: int | None = None

    def place(self, values: NDArray[np.integer]) -> NDArray[np.intp]:
        """[M] cell of each value.

        >>> BREAKDOWNS["lag"].place(np.array([0, 5, 99, -1])).tolist()
        [0, 4, 6, 7]
        >>> [BREAKDOWNS["lag"].cells[cell] for cell in (0, 4, 6, 7)]
        ['lag_0', 'lag_4-7', 'lag_16+', 'lag_unknown']
        """
        wide = values.astype(np.int64)
        found = np.searchsorted(self.starts, wide, side="right") - 1
        unknown = (wide < self.starts[0]) | (False if self.above is None else wide >= self.above)
        return np.where(unknown, len(self.cells) - 1, found)


def _names(name: str, starts: tuple[int, ...]) -> tuple[str, ...]:
    closed = [f"{a}" if b == a + 1 else f"{a}-{b - 1}" for a, b in pairwise(starts)]
    return tuple(f"{name}_{cell}" for cell in (*closed, f"{starts[-1]}+", "unknown"))


_FIRST_TURNS = tuple(range(TURNS + 1))
BREAKDOWNS = {
    "turn": Breakdown(_FIRST_TURNS, _names("turn", _FIRST_TURNS)),
    "tier": Breakdown(tuple(range(_TIERS)), (*(f"tier_T{i}" for i in range(_TIERS)), "tier_unknown"), above=_TIERS),
    "lag": Breakdown(LAGS, _names("lag", LAGS)),
}
"""Name of the array to its cells."""
