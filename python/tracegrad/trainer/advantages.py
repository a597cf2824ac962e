"""Compute advantages from rewards with the options of the config, including the KL penalty in the reward."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from tracegrad import advantage
from tracegrad.advantage import AdaptiveKl, kl_in_reward
from tracegrad.alignment.sequences import Sequences
from tracegrad.config import Config, join_list, nearest
from tracegrad.errors import ArgumentError
from tracegrad.objective import Objective
from tracegrad.objective.objective import Requirements
from tracegrad.trainer.dataset import Dataset, TraceTable

TOTAL = "reward"
"""Name of a trace's total reward."""
_A_STAR = 0.5
"""Temperature of V* for advantage.baseline a_star, as in A*-PO and TRL."""


def reward_column(
    traces: Sequences | TraceTable, selected: Sequence[str] = (), weights: Sequence[float] = ()
) -> NDArray[np.float32]:
    """Return [R] float32 the trained reward of each trace.

    Args:
        traces: sequences or table with the rewards.
        selected: names of the reward. Of several names, each trace uses the first one that it has. Without a name, it
            is the total reward, or the only reward with values if there is no total.
        weights: weights; then the result is the weighted sum of the named rewards that a trace has.

    Raises:
        ArgumentError: if there is no such reward, or the choice is ambiguous.
    """
    if weights:
        return advantage.weighted_sum(*reward_table(traces, selected, weights)).astype(np.float32)
    names = traces.reward_names
    present = [name for name in selected if name in names]
    if selected and not present:
        raise ArgumentError(
            f"TG-TRAIN-001: data.reward is {join_list(selected)!r}, but no trace has a reward of this name. "
            f"{nearest(selected[0], names)}"
        )
    if not names or not np.isfinite(traces.rewards).any():
        raise ArgumentError(
            "TG-TRAIN-002: no trace has a reward, so traces cannot be compared. Pass map.reward PATH with the field "
            "that contains the reward. tracegrad doctor lists likely fields."
        )
    has_values = np.asarray(np.isfinite(traces.rewards).any(axis=0))
    columns = [names.index(candidate) for candidate in present] or [int(np.argmax(has_values))]
    if not selected and not has_values[0] and has_values.sum() > 1:
        named_rewards = [candidate for candidate, is_known in zip(names, has_values, strict=True) if is_known]
        raise ArgumentError(
            f"TG-TRAIN-003: no trace has a total reward, but {len(named_rewards)} rewards have names: "
            f"{', '.join(named_rewards[:8])}. Choose the reward to train on, for example data.reward "
            f"{named_rewards[0]}."
        )
    values = traces.rewards[:, columns]
    return np.ascontiguousarray(values[np.arange(len(values)), np.isfinite(values).argmax(axis=1)])


def reward_table(
    traces: Sequences | TraceTable, selected: Iterable[str], weights: Iterable[float]
) -> tuple[NDArray[np.floating], list[float]]:
    """Return [R, K] the selected rewards (all but the total if none is selected), and the weight of each.

    Raises:
        ArgumentError: for a name that no trace has, or unless there is one finite weight per name.
    """
    available = traces.reward_names
    names = list(selected) or [reward_name for reward_name in available if reward_name != TOTAL]
    for reward_name in names:
        if reward_name not in available:
            raise ArgumentError(
                f"TG-TRAIN-004: data.reward lists {reward_name!r}, but no trace has a reward of this name. "
                f"{nearest(reward_name, available)}"
            )
    numbers = list(weights)
    if len(numbers) != len(names) or not names or not np.isfinite(numbers).all():
        raise ArgumentError(
            f"TG-TRAIN-005: data.reward_weights is {numbers!s:.80}, and the rewards are "
            f"{', '.join(names[:8]) or 'unnamed'}. "
            "Pass one finite number for each reward."
        )
    return traces.rewards[:, [available.index(reward_name) for reward_name in names]], numbers


def compute_advantages(
    rewards: NDArray[np.floating], source: Dataset, used: NDArray[np.bool_], config: Config
) -> NDArray[np.float32]:
    """Compute [used] float32 the advantages of the used traces, relative to each other."""
    options, reward, group = config.advantage, rewards[used], source.catalog.group[used]
    if options.baseline == "none":
        return np.nan_to_num(reward, nan=0.0)
    if options.single_sample_group == "error" and options.baseline != "batch_mean":
        _check_singletons(reward, group, source, used)
    if options.baseline == "rloo":
        return advantage.rloo(reward, group, single_sample_group=options.single_sample_group)
    if options.baseline == "max_rl":
        return advantage.max_rl(reward, group, single_sample_group=options.single_sample_group)
    if options.baseline == "a_star":
        return advantage.a_star(reward, group, beta=_A_STAR, single_sample_group=options.single_sample_group)
    if options.baseline == "opo":
        return advantage.opo(
            reward, source.catalog.terms[used].astype(np.int64), group, single_sample_group=options.single_sample_group
        )
    if options.multi_objective_aggregation == "normalize_then_sum":
        table, weights = reward_table(source.catalog, config.data.reward, config.data.reward_weights)
        summed = advantage.normalize_then_sum(
            table[used],
            group,
            weights=weights,
            scale="std",
            ddof=options.ddof,
            single_sample_group=options.single_sample_group,
        )
        return advantage.whiten(summed, ddof=options.ddof, eps=1e-4, eps_in="deviation")
    groups = np.zeros_like(group) if options.baseline == "batch_mean" else group
    ddof = None if options.scale == "none" else options.ddof
    return advantage.group_mean(
        reward, groups, scale=options.scale, ddof=ddof, single_sample_group=options.single_sample_group
    )


def _check_singletons(
    reward: NDArray[np.floating], group: NDArray[np.int32], source: Dataset, used: NDArray[np.bool_]
) -> None:
    """Reject groups with a single rewarded trace, which have no baseline."""
    counts = advantage.group_counts(reward, group)
    if not counts.singletons:
        return
    single = np.flatnonzero(np.isin(group, counts.singleton_ids) & np.isfinite(reward))
    first = source.trace_name(int(np.flatnonzero(used)[single[0]]))
    all_single = counts.singletons == counts.groups
    advice = (
        "Pass the field that the samples of one prompt share: map.group PATH, or map.group prompt."
        if all_single
        else "Pass advantage.single_sample_group zero."
    )
    raise ArgumentError(
        f"TG-TRAIN-006: trace '{first}' is the only trace of its group; {counts.singletons:,} of {counts.groups:,} "
        f"groups that have a reward and are not held out have a single trace. A baseline needs at least two. {advice}"
    )


Floats = NDArray[np.float32]


def needs_of(objective: Objective, config: Config) -> Requirements:
    """Return the requirements of a run: its objective's, and old and reference logprobs for a KL penalty."""
    return replace(objective.requirements, old=True, ref=True) if config.reward_kl.coef else objective.requirements


@dataclass
class RewardKl:
    """The KL penalty in the reward, for the batch that is being trained.

    Args:
        source, rewards, config: as in `TrainingData`.
        used: [R] bool, traces that advantages compare.
        coef: reward per nat of KL that this batch pays.
        kl: KL of the batch in nats, averaged over each trace and then over traces; NaN before the first batch.

    Attributes:
        following: coefficient for the next batch.
        advantages: [R], for the traces of this batch; 0 for others.
    """

    source: Dataset
    rewards: Floats
    used: NDArray[np.bool_]
    config: Config
    coef: float = 0.0
    kl: float = float("nan")
    following: float = field(init=False)
    advantages: Floats = field(init=False)

    def __post_init__(self) -> None:
        self.following = self.config.reward_kl.coef
        self.advantages = np.zeros(len(self.rewards), np.float32)

    def batch(self, traces: int, trace: NDArray[np.integer], old: Floats, ref: Floats) -> None:
        """Subtract the KL penalty from the rewards of a batch, which ranks share, and recompute its advantages.

        Args:
            traces: number of traces that count in its steps.
            trace, old, ref: [m] trace index and logprobs of its trained tokens on all ranks, ascending.
        """
        options, group = self.config.reward_kl, self.source.catalog.group
        self.coef = self.following
        penalized = kl_in_reward(
            self.rewards, old, ref, trace, coef=self.coef, kind=options.kind, cap=options.cap or None
        )
        batch_traces = self.used & np.isin(group, group[trace])
        self.advantages[:] = 0
        self.advantages[batch_traces] = compute_advantages(penalized.rewards, self.source, batch_traces, self.config)
        self.kl = penalized.kl * len(np.unique(trace)) / max(traces, 1)
        if options.target_kl:
            controller = AdaptiveKl(self.coef, options.target_kl, options.horizon).after(self.kl, traces)
            self.following = max(controller.coef, 0.0)

    def row(self) -> dict[str, float]:
        """Return the metrics by their names in docs/reference/metrics.md."""
        return {"reward_kl": self.kl, "reward_kl_coef": self.coef}

    def state(self) -> dict[str, float]:
        """Return the state that a checkpoint saves."""
        return {"reward_kl": self.coef}

    def restore(self, state: Mapping[str, float]) -> None:
        """Restore what `state` returned. The caller must then call `batch` for the saved batch again."""
        self.following = state.get("reward_kl", self.following)
