"""What `[filter]` says, over arrays of traces: which rewards count as 0, which groups teach nothing, what is masked.

A trace that is left out counts nowhere; one that is masked counts with its reward and as a trace, and has no term. No
torch, no steps. Called by the feed of a run.
"""

import numpy as np
from numpy.typing import NDArray

from tracegrad.catalog import Catalog, Source
from tracegrad.codes import CUT, ENDINGS, NO_TIER, TIERS
from tracegrad.config import Config, Filter
from tracegrad.errors import ArgumentError

Floats, Flags = NDArray[np.float32], NDArray[np.bool_]


def settled(rewards: Floats, source: Source, options: Filter) -> Floats:
    """[R] rewards as they are compared: 0 for what was cut off, where that is asked; what is not known stays NaN."""
    if not options.zero_truncated:
        return rewards
    known = np.isfinite(rewards)
    catalog = source.catalog
    _refuse_unsaid(source, known & (catalog.terms > 0), "filter.zero_truncated", "would keep their reward")
    return np.where(known & (catalog.ending == CUT), np.float32(0), rewards)


def kept(rewards: Floats, catalog: Catalog, of: Flags, options: Filter) -> tuple[Flags, list[str]]:
    """[R] bool: the traces of some that no filter of a trace alone leaves out; and in words what each does.

    A trace without a reward is within any bounds of rewards; one with a term of an unknown version is within no lag.

    Raises:
        ArgumentError: for a lag where no term says its version.
    """
    newest = int(catalog.version_max.max(initial=-1))
    if options.max_lag >= 0 and newest < 0:
        raise ArgumentError(
            "filter.max_lag has no effect: no trace says which version of the policy sampled it. An option that does "
            "nothing hides a mistake. Leave it out, or say where the records hold it: --map.version PATH."
        )
    worst = TIERS.index(options.worst_tier)
    out = {
        "min_reward": rewards < options.min_reward,
        "max_reward": rewards > options.max_reward,
        "min_turns": catalog.turns < options.min_turns,
        "max_turns": (catalog.turns > options.max_turns) & (options.max_turns > 0),
        "worst_tier": (catalog.tier > worst) & (catalog.tier != NO_TIER),
        "max_lag": ((catalog.version_min < 0) | (catalog.version_min < newest - options.max_lag))
        & (options.max_lag >= 0),
    }
    left, said, default = of.copy(), [], Filter()
    for name, gone in out.items():
        if getattr(options, name) != getattr(default, name):
            said.append(f"{int((left & gone).sum())} of {int(left.sum())} traces are left out: filter.{name}.")
            left &= ~gone
    return left, said


def left_out(rewards: Floats, group: NDArray[np.int32], used: Flags, config: Config) -> Flags:
    """[R] bool: of groups in which no two known rewards of used traces differ, where `even_groups` says so.

    A trace that is alone in its group is not left out where `advantage.singleton` has it keep its reward.
    """
    if not config.filter.even_groups:
        return np.zeros(len(rewards), bool)
    spread, count = _spread(rewards, group, np.isfinite(rewards) & used)
    lone = (count == 1) & (config.advantage.singleton == "keep")
    return ~(spread > config.filter.tolerance) & ~lone


def masked(rewards: Floats, catalog: Catalog, of: Flags, options: Filter) -> Flags:
    """[R] bool, of some traces: what was cut off; and groups of several with terms left whose rewards are equal."""
    cut = of & (catalog.ending == CUT) & options.truncated
    if not options.mask_even:
        return cut
    live = of & np.isfinite(rewards) & ~cut & (catalog.terms > 0)
    spread, count = _spread(rewards, catalog.group, live)
    return cut | (of & (count > 1) & ~(spread > options.tolerance))


def check_masked(rewards: Floats, source: Source, taken: Flags, options: Filter) -> tuple[list[str], str]:
    """What is masked of the traces that a run takes, in words; and why nothing is left to train, "" where some is."""
    if not (options.truncated or options.mask_even):
        return [], ""
    catalog = source.catalog
    of = taken & (catalog.terms > 0)
    if options.truncated:
        _refuse_unsaid(source, of, "filter.truncated", "would be trained on")
    hidden = masked(rewards, catalog, taken, options)
    short = hidden & (catalog.ending == CUT) & options.truncated
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


def _refuse_unsaid(source: Source, of: Flags, option: str, else_: str) -> None:
    unsaid = np.flatnonzero(of & (source.catalog.ending == ENDINGS.index("unknown")))
    if len(unsaid):
        name = source.trace_name(int(unsaid[0]))
        raise ArgumentError(
            f"trace '{name}' and {len(unsaid) - 1} more do not say how they ended: the last generation has neither a "
            "finish_reason nor a stop token, or was prepared before endings were kept. Those that were cut off "
            f"{else_}. Record finish_reason, prepare again, or leave {option} out."
        )
