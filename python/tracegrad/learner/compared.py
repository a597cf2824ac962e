"""Advantages of a run's traces: rewards of a group compared by the estimator that `[advantage]` names.

No torch, no steps. Called by the feed, and by what takes a divergence out of the rewards first.
"""

import numpy as np
from numpy.typing import NDArray

from tracegrad import advantage
from tracegrad.catalog import Catalog, Source
from tracegrad.config import Config, nearest, split_names
from tracegrad.errors import ArgumentError
from tracegrad.sequence import Sequences

_A_STAR = 0.5
"""The temperature of V* under advantage.baseline a_star: A*-PO's and TRL's."""


def reward_column(traces: Sequences | Catalog, name: str) -> NDArray[np.float32]:
    """[R] float32: the rewards called `name`, of several names with commas the first that a trace has; for "" the first
    column, or the one that is known where that is not.
    """
    names = traces.reward_names
    wanted = [each for each in ([name] if name in names else split_names(name)) if each in names]
    if name and not wanted:
        raise ArgumentError(f"data.reward is {name!r}, and no trace has such a reward. {nearest(name, names)}")
    if not names or not np.isfinite(traces.rewards).any():
        raise ArgumentError(
            "no trace has a reward. Without one no trace is better than another. Say where the records hold it: "
            "--map.reward PATH; tracegrad doctor names what may be meant."
        )
    known = np.asarray(np.isfinite(traces.rewards).any(axis=0))
    columns = [names.index(each) for each in wanted] or [int(np.argmax(known))]
    if not name and not known[0] and known.sum() > 1:
        several = [each for each, is_known in zip(names, known, strict=True) if is_known]
        raise ArgumentError(
            f"no trace has a total reward, and {len(several)} have names: {', '.join(several[:8])}. Which of them is "
            f"trained on is not told. Say it: --data.reward {several[0]}."
        )
    told = traces.rewards[:, columns]
    return np.ascontiguousarray(told[np.arange(len(told)), np.isfinite(told).argmax(axis=1)])


def compared(
    rewards: NDArray[np.floating], source: Source, used: NDArray[np.bool_], config: Config
) -> NDArray[np.float32]:
    """[used] float32: the advantages of the traces that are used, compared with one another."""
    options, reward, group = config.advantage, rewards[used], source.catalog.group[used]
    if options.baseline == "none":
        return np.nan_to_num(reward, nan=0.0)
    if options.singleton == "refuse" and options.baseline != "batch_mean":
        _refuse_lone(reward, group, source, used)
    if options.baseline == "rloo":
        return advantage.rloo(reward, group, singleton=options.singleton)
    if options.baseline == "max_rl":
        return advantage.max_rl(reward, group, singleton=options.singleton)
    if options.baseline == "a_star":
        return advantage.a_star(reward, group, beta=_A_STAR, singleton=options.singleton)
    if options.baseline == "opo":
        return advantage.opo(reward, source.catalog.terms[used].astype(np.int64), group, singleton=options.singleton)
    groups = np.zeros_like(group) if options.baseline == "batch_mean" else group
    ddof = None if options.scale == "none" else options.ddof
    return advantage.group_mean(reward, groups, scale=options.scale, ddof=ddof, singleton=options.singleton)


def _refuse_lone(
    reward: NDArray[np.floating], group: NDArray[np.int32], source: Source, used: NDArray[np.bool_]
) -> None:
    """Refuses groups of one trace with a reward, which have no baseline."""
    counts = advantage.group_counts(reward, group)
    if not counts.singletons:
        return
    alone = np.flatnonzero(np.isin(group, counts.singleton_ids) & np.isfinite(reward))
    first = source.trace_name(int(np.flatnonzero(used)[alone[0]]))
    all_alone = counts.singletons == counts.groups
    cure = (
        "Say what they share: --map.group PATH, or --map.group prompt."
        if all_alone
        else "Pass --advantage.singleton zero."
    )
    raise ArgumentError(
        f"trace '{first}' is alone in its group, as in {counts.singletons:,} of {counts.groups:,} groups. A baseline "
        f"needs two traces. {cure}"
    )
