"""Define the metrics of training, rewards, completions and tools, and accumulate them over a step.

`trainer.step_metrics` computes the training metrics from a step's `StepResult`. `MetricAccumulator` rejects names
without a definition.
"""

import math
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import ArrayLike, NDArray

from tracegrad import _validation
from tracegrad.errors import ArgumentError
from tracegrad.metrics.aggregate import (
    AllReduce,
    Groups,
    Moments,
    Sums,
    divide,
    largest_of,
    mean_of,
    moments,
    smallest_of,
)
from tracegrad.metrics.definition import Metric, MetricSet, MetricSums


@dataclass(frozen=True)
class Rewards:
    """Reward sums over the traces of one part of a step.

    Parts must be split between groups, because a group has one baseline.

    >>> found = Rewards.of([1.0, 1.0, 0.0, float("nan")], [0, 0, 1, 1]).values()
    >>> round(found["reward"], 3), found["frac_reward_zero_std"], found["frac_no_reward"]
    (0.667, 0.5, 0.25)
    """

    sums: Sums

    @classmethod
    def of(cls, rewards: ArrayLike, group: ArrayLike) -> "Rewards":
        """Measure traces.

        Args:
            rewards: [R], NaN if a trace could not be scored.
            group: [R] ids.

        Raises:
            ArgumentError: if their lengths differ.
        """
        reward, ids = _validation.real(rewards, "rewards"), _validation.labels(group, "group")
        if reward.ndim != 1 or reward.shape != ids.shape:
            raise ArgumentError(
                f"TG-METRIC-011: rewards are {reward.shape} and groups {ids.shape}. They must have "
                "one entry per trace. Pass flat arrays of one length."
            )
        known = ~np.isnan(reward)
        counts = {"traces": len(reward), "flat": np.count_nonzero(zero_std_mask(reward, ids))}
        return cls(moments("reward", reward[known]) | Sums.of(counts=counts))

    def __add__(self, other: "Rewards") -> "Rewards":
        """Return both parts together."""
        return Rewards(self.sums + other.sums)

    def all_reduce(self, all_reduce: AllReduce) -> "Rewards":
        """Return the same over all ranks."""
        return Rewards(self.sums.all_reduce(all_reduce))

    def values(self) -> dict[str, float]:
        """Return the names in docs/reference/metrics.md to values."""
        return {row.name: float(row.value(self.sums)) for row in REWARDS if row.value is not None}


def zero_std_mask(reward: NDArray[np.float64], group: NDArray) -> NDArray[np.bool_]:
    """Return [R] bool: traces of a group with two or more known rewards that are all equal."""
    groups, known = Groups.of(group), ~np.isnan(reward)
    high = groups.largest(np.where(known, reward, -np.inf))
    low = -groups.largest(np.where(known, -reward, -np.inf))
    return groups.broadcast((groups.total(known) > 1) & (high == low))


def _reward_moments(sums: Sums) -> Moments:
    return Moments(sums, "reward")


REWARDS: tuple[Metric, ...] = (
    Metric("reward", "reward", None, "scored traces", "Mean recorded reward.", lambda s: _reward_moments(s).mean()),
    Metric(
        "reward_std",
        "reward",
        None,
        "scored traces, less one",
        "Its deviation over all traces: TRL's.",
        lambda s: _reward_moments(s).deviation(1),
    ),
    Metric(
        "frac_reward_zero_std",
        "share",
        None,
        "traces",
        "Traces of groups of two or more whose known rewards are all equal, so that their advantage is 0. TRL's.",
        lambda s: divide(s["flat"], s["traces"]),
    ),
    Metric(
        "frac_no_reward",
        "share",
        None,
        "traces",
        "Traces without a reward.",
        lambda s: divide(s["traces"] - s["reward.n"], s["traces"]),
    ),
)


def completions(prompts: ArrayLike, sampled: ArrayLike, cut: ArrayLike) -> MetricSums:
    """Measure `num_tokens` and `completions/*` of R traces.

    Args:
        prompts: [R] integers: tokens before the first sampled one.
        sampled: [R] integers: tokens that the policy sampled, without tool results and template tokens.
        cut: [R] bool: whether a limit truncated the trace, so that it did not end by itself.

    Raises:
        ArgumentError: if an array is not flat, of another type or of another length.

    >>> found = completions([10, 10, 12], [4, 8, 6], [False, True, False]).values()
    >>> found["num_tokens"], found["completions/mean_length"], found["completions/max_terminated_length"]
    (50.0, 6.0, 6.0)
    """
    before = _validation.integers(prompts, "prompts")
    lengths = _validation.integers(sampled, "sampled", length=len(before))
    truncated = _validation.flags(cut, "cut", length=len(before))
    counts = {"tokens": before.sum() + lengths.sum(), "cut": np.count_nonzero(truncated)}
    sums = moments("length", lengths) | moments("ended", lengths[~truncated]) | Sums.of(counts=counts)
    return MetricSums(sums.with_prefix("completions/"), (MetricSet(COMPLETIONS, "completions/"),))


def tools(calls: ArrayLike, failed: ArrayLike) -> MetricSums:
    """Measure `tools/*` of R traces.

    Args:
        calls: [R] integers: tool calls of each trace.
        failed: [R] integers: tool calls that were answered with an error.

    >>> tools([2, 0, 2], [1, 0, 0]).values()
    {'tools/call_frequency': 1.3333333333333333, 'tools/failure_frequency': 0.25}
    """
    call_counts = _validation.integers(calls, "calls")
    failures = _validation.integers(failed, "failed", length=len(call_counts))
    counts = {"traces": len(call_counts), "calls": call_counts.sum(), "failed": failures.sum()}
    return MetricSums(Sums.of(counts=counts).with_prefix("tools/"), (MetricSet(TOOLS, "tools/"),))


def _terminated_metric(how: str) -> Metric:
    """Return a length metric over the traces that ended by themselves; 0 if there is none, as in TRL."""
    word, row = {"mean": ("Mean", mean_of), "min": ("Smallest", smallest_of), "max": ("Largest", largest_of)}[how]
    return Metric(
        f"completions/{how}_terminated_length",
        "tokens",
        None,
        "traces that ended by themselves" if how == "mean" else None,
        f"{word} length of the traces that no limit truncated; 0 if all were truncated.",
        lambda s: row("ended")(s) if Moments(s, "ended").n else 0.0,
    )


COMPLETIONS: tuple[Metric, ...] = (
    Metric(
        "num_tokens",
        "tokens",
        None,
        None,
        "Tokens of prompts and sampled tokens, tool results left out, of all steps so far: a trace counts in each step "
        "that trains on it.",
        lambda s: s["tokens"],
    ),
    Metric(
        "completions/mean_length",
        "tokens",
        None,
        "traces",
        "Mean number of sampled tokens of a trace; tool results are not counted.",
        mean_of("length"),
    ),
    Metric("completions/min_length", "tokens", None, None, "Smallest such number.", smallest_of("length")),
    Metric("completions/max_length", "tokens", None, None, "Largest such number.", largest_of("length")),
    Metric(
        "completions/clipped_ratio",
        "share",
        None,
        "traces",
        "Traces whose last turn was truncated by a limit.",
        lambda s: divide(s["cut"], s["length.n"]),
    ),
    *map(_terminated_metric, ("mean", "min", "max")),
)
TOOLS: tuple[Metric, ...] = (
    Metric(
        "tools/call_frequency",
        "calls",
        None,
        "traces",
        "Tool calls of a trace.",
        lambda s: divide(s["calls"], s["traces"]),
    ),
    Metric(
        "tools/failure_frequency",
        "share",
        None,
        "tool calls",
        "Tool calls that were answered by an error; 0 if nothing was called.",
        lambda s: s["failed"] / max(s["calls"], 1),
    ),
)


TRAINING: tuple[Metric, ...] = (
    Metric("step", "optimizer steps", None, None, "Optimizer steps so far, this one included; 0 is before the first."),
    Metric("epoch", "epochs", None, None, "Epoch of the step, from 0."),
    Metric("loss", "1", None, "the objective's own denominator", "What was minimised: surrogate plus penalties."),
    Metric("lr", "1", None, None, "Learning rate of the step."),
    Metric("grad_norm", "1", None, None, "Euclidean norm of the full gradient before clipping."),
    Metric("tokens_trained", "tokens", None, None, "Trained tokens of the step."),
    Metric("traces", "traces", None, None, "Traces of the step with at least one trained token."),
    Metric(
        "tokens_with_gradient", "tokens", None, None, "Trained tokens whose d loss / d logprob is not 0 in this step."
    ),
    Metric("traces_with_gradient", "traces", None, None, "Traces with such a token."),
    Metric("tokens", "tokens", None, None, "Tokens of the step that went through the model, padding excluded."),
    Metric("seconds", "s", None, None, "Wall time of the step, its share of the `old` pass excluded."),
    Metric("tokens_per_s", "tokens/s", None, None, "tokens / seconds."),
    Metric(
        "device_idle", "share", None, None, "Of the device's time since the last step, without work queued; CUDA only."
    ),
    Metric("imbalance", "1", None, None, "Work of the busiest rank over the mean of all, by plan; several ranks only."),
    Metric(
        "frac_zero_advantage", "share", None, "traces", "Traces whose advantage is 0: their surrogate has no gradient."
    ),
    Metric(
        "staleness_mean",
        "versions",
        None,
        "tokens with a recorded version",
        "Versions between the trained policy and the one that sampled the token, if the trainer's version is recorded.",
    ),
    Metric(
        "staleness_max",
        "versions",
        None,
        None,
        "The largest such number; `online.steps_ahead` does not bound it: a slow group is trained when it ends.",
    ),
    Metric("entropy", "nats", None, "tokens", "Mean entropy of the policy's next-token distribution at the tokens."),
    Metric(
        "entropy_coef", "1", None, None, "Coefficient of an adapting entropy bonus; it applies below its target only."
    ),
    Metric(
        "reward_kl",
        "nats",
        None,
        "tokens, then traces",
        "With `reward_kl.coef`: KL(old, ref) of the batch, as charged.",
    ),
    Metric("reward_kl_coef", "1", None, None, "With `reward_kl.coef`: the reward subtracted per nat of it."),
    Metric(
        "rollout_logprob_coverage",
        "share",
        None,
        "tokens",
        "Tokens with a rollout logprob, recorded or filled. `old` is ART's word for the recorded logprobs.",
    ),
    Metric(
        "rollout_logprob_coverage_all",
        "share",
        None,
        "tokens",
        "The same over tokens of all kinds, prompts included, of each branch up to its last trained token: ART's "
        "denominator without padding. A prefix that branches share counts in each of them.",
    ),
    Metric(
        "ratio_mean",
        "1",
        "theta / old, or theta / rollout in objectives without old",
        "kept tokens",
        "Mean of the ratio inside the surrogate, at the surrogate's level; absent if it has no ratio.",
    ),
    Metric("ratio_max", "1", "as ratio_mean", None, "Largest ratio inside the surrogate over the step's kept tokens."),
    Metric(
        "clip_fraction",
        "share",
        "as ratio_mean",
        "tokens",
        "Tokens whose gradient the clip removed: ratio above 1 + high (A > 0), below 1 - low or above dual or delta "
        "(A < 0). Dropped tokens count only in the denominator.",
    ),
    Metric(
        "clip_fraction_unsigned",
        "share",
        "as ratio_mean",
        "tokens",
        "Tokens with a ratio outside the clip range, whatever the sign of the advantage: ART's clip_fraction.",
    ),
    Metric(
        "ope",
        "reward",
        "theta / rollout, product over the trace",
        "weights of held-out traces",
        "Self-normalised importance-weighted reward on the held-out groups: sum w r / sum w.",
    ),
    Metric(
        "ope_low",
        "reward",
        "as ope",
        None,
        "Lower end of its 95 % interval (delta method over groups), within the rewards of the held-out traces.",
    ),
    Metric("ope_high", "reward", "as ope", None, "Upper end of its 95 % interval."),
    Metric(
        "ope_recorded_reward",
        "reward",
        None,
        "held-out traces",
        "Mean recorded reward of the same held-out traces.",
    ),
    Metric(
        "ope_ess",
        "traces",
        "as ope",
        None,
        "Kish effective sample size of the held-out traces: (sum w)^2 / sum w^2.",
    ),
    Metric(
        "ope_ess_fraction",
        "share",
        "as ope",
        "held-out traces",
        "ope_ess / held-out traces with known ratios.",
    ),
    Metric(
        "ope_reliable",
        "0 or 1",
        "as ope",
        None,
        "1 if no weight was clamped, at least 10 effective traces and 0.3 of all are left, and there is an interval.",
    ),
    Metric("ope_traces", "traces", None, None, "Held-out traces all of whose tokens have a rollout logprob."),
    Metric(
        "ope_clamped",
        "traces",
        "as ope",
        None,
        "Held-out traces whose summed log-ratio was clamped.",
    ),
    Metric(
        "logprob_good",
        "nats",
        None,
        "tokens",
        "Mean logprob of held-out traces with a reward above their group's mean.",
    ),
    Metric("logprob_bad", "nats", None, "tokens", "The same for traces with a reward below their group's mean."),
)
"""Metrics that the trainer itself writes into a row."""

_NAMES = {metric.name for metric in TRAINING}


@dataclass
class MetricAccumulator:
    """Sums with integer denominators. Each mean is computed once, at the end, over everything added.

    >>> tally = MetricAccumulator()
    >>> tally.add("entropy", 3.0, 2)
    >>> tally.add("entropy", 1.0, 2)
    >>> tally.means()
    {'entropy': 1.0}
    """

    sums: dict[str, float] = field(default_factory=dict)
    counts: dict[str, int] = field(default_factory=dict)
    maxima: dict[str, float] = field(default_factory=dict)

    def add(self, name: str, total: float, count: int) -> None:
        """Add a sum over `count` elements.

        Raises:
            ArgumentError: if `name` has no definition.
        """
        _check_name(name)
        self.sums[name] = self.sums.get(name, 0.0) + float(total)
        self.counts[name] = self.counts.get(name, 0) + int(count)

    def maximum(self, name: str, value: float) -> None:
        """Keep the largest value so far."""
        _check_name(name)
        self.maxima[name] = max(self.maxima.get(name, -math.inf), float(value))

    def all_reduce(self, all_reduce: AllReduce) -> "MetricAccumulator":
        """Return the same over all ranks, each of which must have added the same names."""
        counts = {f"{name}.n": n for name, n in self.counts.items()}
        reduced = Sums.of(self.sums, counts, self.maxima).all_reduce(all_reduce)
        sums, maxima = ({name: float(v) for name, v in part.items()} for part in (reduced.totals, reduced.maxima))
        return MetricAccumulator(sums, {name: int(reduced[f"{name}.n"]) for name in self.counts}, maxima)

    def means(self) -> dict[str, float]:
        """Return each sum divided by its count; NaN if the count is 0."""
        means = {name: self.sums[name] / n if n else math.nan for name, n in self.counts.items()}
        return {**means, **self.maxima}


def _check_name(name: str) -> None:
    if name not in _NAMES:
        raise ArgumentError(
            f"TG-METRIC-012: metric {name!r} is not in the table. A number without a definition is not logged. "
            f"Add it to TRAINING."
        )
