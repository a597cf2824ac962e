"""Which step each trace is of, and what counts there: groups by a seed, totals, what was skipped or lost.

Here are `steps_of`, the rule by which steps are cut, and counts over traces. No ids, no rows: those are `packing`'s.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from tracegrad.batch.step import Counts, Floats, Ints, Skipped, TooLong, Totals
from tracegrad.errors import ArgumentError
from tracegrad.sequence import Sequences


class Groups(NamedTuple):
    """Steps and counts by trace [R], totals by step."""

    step: Ints
    terms: Counts
    group_terms: Counts
    group_traces: Counts
    totals: list[Totals]


def steps_of(
    group: NDArray[np.integer], there: NDArray[np.bool_], step_groups: int | None, seed: int | None
) -> NDArray[np.int32]:
    """[R] int32: the optimizer step of each trace's group, -1 for groups in none; what `pack` cuts steps by.

    Args:
        group: [R] of each trace.
        there: [R] traces that count in a step: a group without one is in none.
        step_groups: groups of a step; None: one step of all.
        seed: shuffles the groups; None keeps the order in which they first appear.

    >>> steps_of(np.array([4, 4, 2, 7]), np.array([True, False, True, False]), 1, None).tolist()
    [0, 0, 1, -1]
    """
    names, code = np.unique(group, return_inverse=True)
    alive, first = np.unique(code[there], return_index=True)
    order = alive[np.argsort(first)]
    if seed is not None:
        order = np.random.default_rng(seed).permutation(order)
    step_of_group = np.full(len(names), -1, np.int32)
    step_of_group[order] = np.arange(len(order)) // (step_groups or max(len(order), 1))
    return step_of_group[code]


def nothing_to_train() -> ArgumentError:
    """What is said where no trace has a term that is laid out."""
    return ArgumentError(
        "no token can be trained. Every trace is without a trainable token or longer than token_budget. "
        "Look at the tiers and the drift of the sequences, or raise token_budget."
    )


def group_into_steps(
    sequences: Sequences, terms: Ints, counted: NDArray[np.bool_], step_groups: int | None, seed: int | None
) -> Groups:
    """Steps and counts of traces.

    Args:
        terms: [N] laid out of each branch.
        counted: [R] bool: traces that count without a term.
        step_groups, seed: as for `steps_of`.

    Raises:
        ArgumentError: if no trace has a term and none counts.
    """
    trace_terms = np.bincount(sequences.trace, terms, minlength=sequences.traces).astype(np.int64)
    there = (trace_terms > 0) | counted
    if not there.any():
        raise nothing_to_train()
    codes, group = np.unique(sequences.group, return_inverse=True)
    of_group = steps_of(sequences.group, there, step_groups, seed)
    step = np.where(there, of_group, -1).astype(np.int32)
    steps = int(step.max()) + 1
    alive = np.full(len(codes), -1, np.int32)
    alive[group] = of_group
    by_step = [np.bincount(step[there], trace_terms[there], steps), np.bincount(step[there], minlength=steps)]
    by_step.append(np.bincount(alive[alive >= 0], minlength=steps))
    return Groups(
        step=step,
        terms=trace_terms,
        group_terms=np.bincount(group, trace_terms).astype(np.int64)[group],
        group_traces=np.bincount(group, there).astype(np.int64)[group],
        totals=[Totals(int(terms), int(traces), int(groups)) for terms, traces, groups in zip(*by_step, strict=True)],
    )


def losses(sequences: Sequences, groups: Groups, lost: Counts, over: Ints) -> list[TooLong]:
    """Per step, what `too_long` took of it."""
    out = [TooLong()] * len(groups.totals)
    if not len(over):
        return out
    step_of_group = {
        int(group): int(step) for group, step in zip(sequences.group, groups.step, strict=True) if step >= 0
    }
    for trace in over.tolist():
        step = step_of_group.get(int(sequences.group[trace]), 0)
        out[step] = TooLong((*out[step].traces, sequences.trace_name(trace)), out[step].terms + int(lost[trace]))
    return out


def without_advantage(sequences: Sequences, advantages: Floats, groups: Groups) -> NDArray[np.bool_]:
    """[R]: traces of a step whose every term has advantage 0."""
    owner = np.repeat(sequences.trace, np.diff(sequences.cu_seqlens))
    pulled = np.zeros(sequences.traces, bool)
    pulled[owner[advantages != 0]] = True
    return ~pulled & (groups.step >= 0)


def skipped(groups: Groups, idle: NDArray[np.bool_]) -> list[Skipped]:
    """Per step, what `skip_zero_advantage` took of it."""
    steps = len(groups.totals)
    traces = np.bincount(groups.step[idle], minlength=steps)
    terms = np.bincount(groups.step[idle], groups.terms[idle], steps)
    return [Skipped(int(count), int(lost)) for count, lost in zip(traces, terms, strict=True)]
