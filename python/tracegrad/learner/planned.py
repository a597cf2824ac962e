"""Which traces are of which step of a pass, and one step with the tokens of its traces alone.

Here are `Cut`, `Planned`, and `pack_alone`: a step is packed when it is needed, of what its source gives for its rows,
and its numbers are those of all traces. No torch. Called by the feed.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tracegrad.batch import Step, measure, pack
from tracegrad.catalog import Catalog, Source

Rows = NDArray[np.int64]

TOKENS_AT_ONCE = 1 << 20
"""Traces that are only measured, or looked at before the first step, come in pieces of about so many tokens."""


@dataclass(frozen=True, eq=False)
class Cut:
    """The steps of a pass over the data.

    Args:
        rows: traces step by step, ascending in each.
        first: [steps + 1]: where each step's begin.
    """

    rows: Rows
    first: Rows

    def __len__(self) -> int:
        return len(self.first) - 1

    def of(self, step: int) -> Rows:
        """The traces of a step, ascending."""
        return self.rows[self.first[step] : self.first[step + 1]]

    @classmethod
    def by(cls, step: NDArray[np.int32], member: NDArray[np.bool_]) -> "Cut":
        """Of the step of each trace, for the traces that are members; there are as many steps as the highest says.

        Args:
            step: [R], -1 for traces of none.
            member: [R].
        """
        rows = np.flatnonzero(member & (step >= 0))
        of = step[rows]
        steps = int(step.max(initial=-1)) + 1
        first = np.concatenate([[0], np.cumsum(np.bincount(of, minlength=steps))]).astype(np.int64)
        return cls(rows[np.argsort(of, kind="stable")], first)


@dataclass(frozen=True, eq=False)
class Planned:
    """A step as one rank holds it, and where its terms stand among those of all traces.

    Args:
        step: numbers of traces, tokens, branches and groups are those of the whole data.
        terms: [L] int64: all terms of its traces, of every rank, by their number among those of all traces; ascending.
        here: [M] int64: of each term of `step`, its place in `terms`.
        trace: [L] int64: the trace of each of `terms`.
        rollout: [L] float32: their recorded logprobs.
    """

    step: Step
    terms: Rows
    here: Rows
    trace: Rows
    rollout: NDArray[np.float32]


def pack_alone(
    source: Source,
    rows: Rows,
    advantages: NDArray[np.float32],
    trained: NDArray[np.bool_],
    counted: NDArray[np.bool_] | None,
    **how: Any,
) -> Planned:
    """One step of some traces, which is that of packing all of them at once.

    Args:
        rows: ascending.
        advantages: [R], of all traces.
        trained: [R] bool: whose terms are laid out.
        counted: [R] bool: who counts without a term, as for `pack`; None where nobody does.
        how: what `pack` takes beside.
    """
    catalog, s = source.catalog, source.take(rows)
    recorded, rollout = s.trainable, np.asarray(s.rollout_logprobs)[s.trainable]
    if not trained[rows].all():
        s = replace(s, trainable=s.trainable & np.repeat(trained[rows], catalog.tokens[rows]))
    more = {} if counted is None else {"counted": counted[rows]}
    [step] = pack(s, advantages[rows], per="trace", **more, **how)
    here = np.cumsum(recorded, dtype=np.int64)[step.origin] - 1
    if len(rows) < catalog.traces:
        step = _of_all(step, rows, catalog)
    count = catalog.terms[rows].astype(np.int64)
    moved = catalog.first_term[rows] - (np.cumsum(count) - count)
    return Planned(step, np.arange(len(rollout)) + np.repeat(moved, count), here, np.repeat(rows, count), rollout)


def terms_laid_out(source: Source, rows: Rows, **how: Any) -> NDArray[np.int64]:
    """[rows]: terms of each trace that `pack` lays out, where some of them may be too long for a row.

    Args:
        rows: ascending.
        how: what `batch.measure` takes beside.

    Raises:
        ArgumentError: for a trace that is too long, where that is refused.
    """
    refuses = how["too_long"] == "refuse"
    told = {**how, "too_long": "drop"} if refuses else how
    left = np.concatenate([measure(source.take(part), **told) for part in pieces(rows, source.catalog)])
    lost = rows[left < source.catalog.terms[rows]]
    if refuses and len(lost):
        measure(source.take(lost), **how)  # which says of the longest what the others are told of as a number
    return left


def pieces(rows: Rows, catalog: Catalog) -> Iterator[Rows]:
    """Traces in order, in pieces of about `TOKENS_AT_ONCE`."""
    at = np.cumsum(catalog.tokens[rows], dtype=np.int64) // TOKENS_AT_ONCE
    yield from (part for part in np.split(rows, np.flatnonzero(np.diff(at)) + 1) if len(part))


def _of_all(step: Step, rows: Rows, catalog: Catalog) -> Step:
    """A step of some traces by the numbers of all."""
    tokens, branches = catalog.tokens[rows].astype(np.int64), catalog.branches[rows].astype(np.int64)
    origin = step.origin + (catalog.first_token[rows] - (np.cumsum(tokens) - tokens))[step.trace]
    branch = step.branch + (catalog.first_branch[rows] - (np.cumsum(branches) - branches))[step.trace]
    return replace(step, origin=origin, branch=branch.astype(np.int32), trace=rows[step.trace].astype(np.int32))
