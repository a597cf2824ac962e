"""What `[filter]` says, over arrays of traces: which rewards count as 0, which groups teach nothing, what is masked.

A trace that is left out counts nowhere; one that is masked counts with its reward and as a trace, and has no term. No
torch, no steps. Called by the feed of a run.
"""

import numpy as np
from numpy.typing import NDArray

from tracegrad.codes import CUT, ENDINGS
from tracegrad.config import Config, Filter
from tracegrad.errors import ArgumentError
from tracegrad.sequence import Sequences

Floats, Flags = NDArray[np.float32], NDArray[np.bool_]


def with_terms(sequences: Sequences) -> Flags:
    """[R] bool: traces with a trainable term."""
    has_terms = np.zeros(sequences.traces, bool)
    has_terms[np.repeat(sequences.trace, np.diff(sequences.cu_seqlens))[sequences.trainable]] = True
    return has_terms


def settled(rewards: Floats, sequences: Sequences, options: Filter) -> Floats:
    """[R] rewards as they are compared: 0 for what was cut off, where that is asked; what is not known stays NaN."""
    if not options.zero_truncated:
        return rewards
    known = np.isfinite(rewards)
    _refuse_unsaid(sequences, known & with_terms(sequences), "filter.zero_truncated", "would keep their reward")
    return np.where(known & (sequences.ending == CUT), np.float32(0), rewards)


def left_out(rewards: Floats, group: NDArray[np.int32], config: Config) -> Flags:
    """[R] bool: of groups in which no two known rewards differ, where `even_groups` says so.

    A trace that is alone in its group is not left out where `advantage.singleton` has it keep its reward.
    """
    if not config.filter.even_groups:
        return np.zeros(len(rewards), bool)
    spread, count = _spread(rewards, group, np.isfinite(rewards))
    lone = (count == 1) & (config.advantage.singleton == "keep")
    return ~(spread > config.filter.tolerance) & ~lone


def masked(rewards: Floats, sequences: Sequences, options: Filter) -> Flags:
    """[R] bool: what was cut off; and groups of several traces with terms left in which these have equal rewards."""
    cut = (sequences.ending == CUT) & options.truncated
    if not options.mask_even:
        return cut
    live = np.isfinite(rewards) & ~cut & with_terms(sequences)
    spread, count = _spread(rewards, sequences.group, live)
    return cut | ((count > 1) & ~(spread > options.tolerance))


def check_masked(rewards: Floats, sequences: Sequences, taken: Flags, options: Filter) -> tuple[list[str], str]:
    """What is masked of the traces that a run takes, in words; and why nothing is left to train, "" where some is."""
    if not (options.truncated or options.mask_even):
        return [], ""
    of = taken & with_terms(sequences)
    if options.truncated:
        _refuse_unsaid(sequences, of, "filter.truncated", "would be trained on")
    hidden = taken & masked(rewards, sequences, options)
    short = hidden & (sequences.ending == CUT) & options.truncated
    cut, even, said = int(short.sum()), int((hidden & ~short).sum()), []
    if cut:
        said.append(f"{cut} of {int(of.sum())} traces were cut off and are masked: filter.truncated.")
    if even:
        said.append(f"{even} traces of groups in which all rewards are equal are masked: filter.mask_even.")
    if (of & ~hidden).any():
        return said, ""
    if not even:
        return said, (
            f"all {cut} traces were cut off, and filter.truncated masks them. There is nothing to learn. "
            "Record with a higher limit of tokens, or leave filter.truncated out."
        )
    return said, (
        f"in no group do rewards differ, and filter.mask_even masks {even} traces. There is nothing to learn. Leave "
        "filter.mask_even out, or give traces whose rewards differ within a group."
    )


def _spread(rewards: Floats, group: NDArray[np.int32], known: Flags) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    """[R] each: between the highest and the lowest known reward of a trace's group (-inf without one); how many."""
    ids, at = np.unique(group, return_inverse=True)
    low, high = np.full(len(ids), np.inf), np.full(len(ids), -np.inf)
    np.minimum.at(low, at[known], rewards[known])
    np.maximum.at(high, at[known], rewards[known])
    return (high - low)[at], np.bincount(at[known], minlength=len(ids))[at]


def _refuse_unsaid(sequences: Sequences, of: Flags, option: str, else_: str) -> None:
    unsaid = np.flatnonzero(of & (sequences.ending == ENDINGS.index("unknown")))
    if len(unsaid):
        name = sequences.trace_name(int(unsaid[0]))
        raise ArgumentError(
            f"trace '{name}' and {len(unsaid) - 1} more do not say how they ended: the last generation has neither a "
            "finish_reason nor a stop token, or was prepared before endings were kept. Those that were cut off "
            f"{else_}. Record finish_reason, prepare again, or leave {option} out."
        )
