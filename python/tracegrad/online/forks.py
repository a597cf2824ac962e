"""Which terms follow a prompt that need not be the one the server saw: in forked branches, or behind a finding.

Of these a gap may say something about the trajectory instead of the weights. Called by `loop` for `check`.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tracegrad.batch import Step
from tracegrad.sequence import Sequences

OF_PROMPTS = (7, *range(10, 22), 29, 31, 32)
"""Reasons of drift, by number, that concern what stands before sampled tokens."""
NAMED = 3
"""Findings and traces that are named at most."""


@dataclass(frozen=True)
class Forks:
    """The terms of a step whose prompts are doubtful, and why.

    Args:
        terms: [M] bool, of this rank.
        told: what was found, in words.
    """

    terms: NDArray[np.bool_]
    told: str

    @classmethod
    def of(cls, step: Step, sequences: Sequences) -> Forks:
        """Those of a step that is made of these sequences."""
        drift = sequences.drift
        first = np.unique(sequences.trace, return_index=True)[1]
        number = np.array([int(name[1:3]) for name in drift.reasons], np.int64)[drift.reason]
        found = np.isin(number, OF_PROMPTS)
        since = np.full(sequences.traces, np.iinfo(np.int32).max, np.int64)
        np.minimum.at(since, drift.trace[found], drift.turn[found])
        # A trace may have no branch: then no term is of it.
        begins = np.full(sequences.traces, -1, np.int64)
        begins[sequences.trace[first]] = first
        terms = (step.branch != begins[step.trace]) | (step.turn >= since[step.trace])
        reasons = sorted({drift.reasons[code] for code in drift.reason[found]})
        forked = np.flatnonzero(np.bincount(sequences.trace, minlength=sequences.traces) > 1)
        traces = sorted({*forked.tolist(), *drift.trace[found].tolist()})
        names = ", ".join(sequences.trace_name(trace) for trace in traces[:NAMED])
        more = f" and {len(traces) - NAMED} more" if len(traces) > NAMED else ""
        why = f" ({', '.join(reasons[:NAMED])})" if reasons else ""
        return cls(terms, f"{names}{more}{why}")

    def words(self, count: int, off: int) -> str:
        """The cause of a gap that is in these terms alone.

        Args:
            count: of these terms, on all ranks, whose version is the trained one.
            off: of the others, which agree.
        """
        return (
            f"The {off} other tokens agree, and these {count} follow a fork or a finding of the alignment, in the "
            f"trajectories {self.told}: the prompt that the trainer has for them is not the one that the server saw. "
            "`tracegrad doctor` on the run's played/ says what differs. Let the agent send its history as it was "
            'answered, or play with play.ids "tokens", where nothing is put together anew.'
        )
