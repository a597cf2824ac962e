"""What did not fit between recorded tokens and the trainer's, one row per finding."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tracegrad import _core, notebook


@dataclass(frozen=True, repr=False)
class Drift:
    """Where recorded tokens and the trainer's differ, one row per finding.

    Args:
        reason: [D] uint8, index into `REASONS`.
        trace: [D] int32, row of the trace in `Sequences`.
        turn: [D] int32, generation of the trace, -1 where the finding is not of one turn.
        token: [D] int32, first token of the turn it concerns, -1 unknown.
        count: [D] int32, tokens it concerns.
        detail: D strings, what was found.
        reasons: names of the closed list by code, `R01 noncanonical_bpe` and so on.
        recorded: tokens that the records say were sampled.
        exact: of those, how many are held with an exact id (tiers T0 to T3), a logprob, and a prompt that is known.
        errors: one line for each trace that could not be aligned and was left out.
        left_out: of each error, the row of its trace among those that `align` was given; not saved.
    """

    reason: NDArray[np.uint8]
    trace: NDArray[np.int32]
    turn: NDArray[np.int32]
    token: NDArray[np.int32]
    count: NDArray[np.int32]
    detail: tuple[str, ...]
    reasons: tuple[str, ...] = tuple(_core.DRIFT_REASONS)
    recorded: int = 0
    exact: int = 0
    errors: tuple[str, ...] = ()
    left_out: tuple[int, ...] = ()

    @property
    def rate(self) -> float:
        """1 - exact / recorded; 0 where nothing was recorded."""
        return 1.0 - self.exact / self.recorded if self.recorded else 0.0

    def __len__(self) -> int:
        return len(self.reason)

    def table(self) -> dict[str, dict[str, int]]:
        """Per reason: findings, traces with one, tokens concerned; the most frequent first."""
        rows: dict[str, dict[str, int]] = {}
        codes, totals = np.unique(self.reason, return_counts=True)
        for code in codes[np.argsort(-totals, kind="stable")]:
            here = self.reason == code
            rows[self.reasons[int(code)]] = {
                "findings": int(here.sum()),
                "traces": len(np.unique(self.trace[here])),
                "tokens": int(np.maximum(self.count[here], 0).sum()),
            }
        return rows

    def __repr__(self) -> str:
        return f"Drift({len(self)} findings, rate={self.rate:.3%}, {len(self.errors)} traces left out)"

    def _repr_html_(self) -> str:
        rows = [(name, *counts.values()) for name, counts in self.table().items()]
        return notebook.table(repr(self), ("reason", "findings", "traces", "tokens"), rows)


def no_drift() -> Drift:
    """A `Drift` without rows."""
    empty = np.zeros(0, np.int32)
    return Drift(np.zeros(0, np.uint8), empty, empty, empty, empty, ())
