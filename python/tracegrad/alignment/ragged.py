"""Arrays with rows of different lengths (`Ragged`), one row per token, such as sampling masks.

`Sequences.extras` uses them for values that a server lists per token.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from tracegrad.errors import ArgumentError


@dataclass(frozen=True)
class Ragged:
    """One row of values for each of T tokens; rows may be empty.

    Args:
        offsets: [T+1] int64, ascending from 0: row t is values[offsets[t]:offsets[t+1]].
        values: all rows, concatenated.

    Raises:
        ArgumentError: if the offsets do not ascend from 0 to the number of values.

    >>> rows = Ragged(np.array([0, 2, 2, 3]), np.array([5, 9, 6], np.int32))
    >>> len(rows), rows[0].tolist(), rows[1].tolist(), rows.take([2, 0]).values.tolist()
    (3, [5, 9], [], [6, 5, 9])
    """

    offsets: NDArray[np.int64]
    values: NDArray[Any]

    def __post_init__(self) -> None:
        offsets, values = self.offsets, self.values
        fits = offsets.ndim == 1 and values.ndim == 1 and len(offsets) > 0 and offsets[0] == 0
        if not fits or offsets[-1] != len(values) or np.any(np.diff(offsets) < 0):
            raise ArgumentError(
                f"TG-ALIGN-007: offsets {offsets[:8].tolist()}... do not rise from 0 to the {values.size} values. "
                "Rows would be cut elsewhere. Pass the ends of the rows behind a 0."
            )

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, token: int) -> NDArray[Any]:
        if not -len(self) <= token < len(self):
            raise IndexError(f"token {token} of {len(self)}")
        token %= len(self)
        return self.values[self.offsets[token] : self.offsets[token + 1]]

    def take(self, tokens: ArrayLike) -> "Ragged":
        """Return the rows of tokens, in the order of `tokens`: [M] integers, such as `Step.origin`."""
        index = np.asarray(tokens, np.int64)
        lengths = np.diff(self.offsets)[index]
        offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
        # Value k of row m has the index self.offsets[index[m]] + k.
        starts = np.repeat(self.offsets[index] - offsets[:-1], lengths)
        return Ragged(offsets, self.values[starts + np.arange(offsets[-1])])

    @classmethod
    def concatenate(cls, parts: "list[Ragged]") -> "Ragged":
        """Return the rows of all parts, in order."""
        lengths = np.concatenate([np.diff(part.offsets) for part in parts])
        offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
        return cls(offsets, np.concatenate([part.values for part in parts]))
