"""What the learner measures itself: the rows of its own names, and `Tally`, sums with their denominators.

These rows have no formula over sums: `learner.row.tally` and `row_of` compute them from the arrays of a step,
`learner.run.update` adds step, rate and time, `learner.off_policy_value` all that begins with off_policy_value,
`learner.loop` epoch and held-out logprobs, `learner.reward_kl` what begins with reward_kl.
Ratios, rewards and gradients are measured by `offpolicy` and `rewards`. Called by the learner, usable by any training
loop.
"""

import math
from dataclasses import dataclass, field

from tracegrad.errors import ArgumentError
from tracegrad.metrics.sums import AllReduce, Sums
from tracegrad.metrics.table import Metric

TRAINING: tuple[Metric, ...] = (
    Metric("step", "optimizer steps", "", "", "Optimizer steps taken, this one included; 0 is before the first."),
    Metric("epoch", "epochs", "", "", "Epoch of the step, from 0."),
    Metric("loss", "1", "", "the objective's own denominator", "What was minimised: surrogate plus penalties."),
    Metric("lr", "1", "", "", "Learning rate of the step."),
    Metric("grad_norm", "1", "", "", "Euclidean norm of the whole gradient before clipping."),
    Metric("terms", "terms", "", "", "Trained sampling events of the step."),
    Metric("traces", "traces", "", "", "Traces of the step with at least one term."),
    Metric("tokens", "tokens", "", "", "Tokens of the step that went through the model, padding excluded."),
    Metric("seconds", "s", "", "", "Wall time of the step, its share of the `old` pass excluded."),
    Metric("tokens_per_s", "tokens/s", "", "", "tokens / seconds."),
    Metric("device_idle", "share", "", "", "Of the device's time since the last step, without work queued; CUDA only."),
    Metric("imbalance", "1", "", "", "Work of the busiest rank over the mean of all, by plan; several ranks only."),
    Metric("frac_zero_advantage", "share", "", "traces", "Traces whose advantage is 0: they pull on nothing."),
    Metric(
        "staleness_mean",
        "versions",
        "",
        "terms whose version is known",
        "Versions between the policy that is trained and the one that sampled a term; where the trainer's is told.",
    ),
    Metric(
        "staleness_max",
        "versions",
        "",
        "",
        "The largest such number; `online.steps_ahead` does not bound it: a slow group is trained when it ends.",
    ),
    Metric("entropy", "nats", "", "terms", "Mean entropy of the policy's next-token distribution at the terms."),
    Metric("entropy_coef", "1", "", "", "Coefficient of an adapting entropy bonus; it applies below its target only."),
    Metric(
        "reward_kl", "nats", "", "terms, then traces", "With `reward_kl.coef`: KL(old, ref) of the batch, as charged."
    ),
    Metric("reward_kl_coef", "1", "", "", "Likewise: the reward that each nat of it cost."),
    Metric(
        "frac_old_logprobs_valid",
        "share",
        "",
        "terms",
        "Terms with a recorded rollout logprob. `old` is ART's word for the recorded logprobs.",
    ),
    Metric(
        "frac_old_logprobs_valid_all",
        "share",
        "",
        "tokens",
        "The same over tokens of all kinds, prompts included, of each branch up to its last term: ART's denominator "
        "without padding. A prefix that branches share counts in each of them.",
    ),
    Metric(
        "ratio_mean",
        "1",
        "theta / old, or theta / rollout in objectives without old",
        "kept terms",
        "Mean of the ratio inside the surrogate, at the surrogate's level; absent where it takes none.",
    ),
    Metric("ratio_max", "1", "as ratio_mean", "", "Largest ratio inside the surrogate over the step's kept terms."),
    Metric(
        "clip_fraction",
        "share",
        "as ratio_mean",
        "terms",
        "Terms whose gradient the clip removed: ratio above 1 + high (A > 0), below 1 - low or above dual (A < 0).",
    ),
    Metric(
        "clip_fraction_any",
        "share",
        "as ratio_mean",
        "terms",
        "Terms with a ratio outside the clip range, whatever the sign of the advantage: ART's clip_fraction.",
    ),
    Metric(
        "off_policy_value",
        "reward",
        "theta / rollout, product over the trace",
        "weights of held-out traces",
        "Self-normalised importance-weighted reward on the held-out groups: sum w r / sum w.",
    ),
    Metric(
        "off_policy_value_low",
        "reward",
        "as off_policy_value",
        "",
        "Lower end of its 95 % interval (delta method over groups), within the rewards of the held-out traces.",
    ),
    Metric("off_policy_value_high", "reward", "as off_policy_value", "", "Upper end of its 95 % interval."),
    Metric(
        "off_policy_value_recorded",
        "reward",
        "",
        "held-out traces",
        "Mean recorded reward of the same held-out traces.",
    ),
    Metric(
        "off_policy_value_ess",
        "traces",
        "as off_policy_value",
        "",
        "Kish effective sample size of the held-out traces: (sum w)^2 / sum w^2.",
    ),
    Metric(
        "off_policy_value_ess_fraction",
        "share",
        "as off_policy_value",
        "held-out traces",
        "off_policy_value_ess / held-out traces with known ratios.",
    ),
    Metric(
        "off_policy_value_known",
        "0 or 1",
        "as off_policy_value",
        "",
        "1 if no weight was clamped, at least 10 effective traces and 0.3 of all are left, and there is an interval.",
    ),
    Metric("off_policy_value_traces", "traces", "", "", "Held-out traces all of whose terms have a rollout logprob."),
    Metric(
        "off_policy_value_clamped",
        "traces",
        "as off_policy_value",
        "",
        "Held-out traces whose summed log-ratio was clamped.",
    ),
    Metric(
        "logprob_good", "nats", "", "terms", "Mean logprob of held-out traces with a reward above their group's mean."
    ),
    Metric("logprob_bad", "nats", "", "terms", "The same for traces with a reward below their group's mean."),
)
"""What the learner itself puts into a row."""

_NAMES = {metric.name for metric in TRAINING}


@dataclass
class Tally:
    """Sums with integer denominators; a mean is taken once, at the end, over everything added.

    >>> tally = Tally()
    >>> tally.add("entropy", 3.0, 2)
    >>> tally.add("entropy", 1.0, 2)
    >>> tally.means()
    {'entropy': 1.0}
    """

    sums: dict[str, float] = field(default_factory=dict)
    counts: dict[str, int] = field(default_factory=dict)
    maxima: dict[str, float] = field(default_factory=dict)

    def add(self, name: str, total: float, count: int) -> None:
        """Adds a sum over `count` elements.

        Raises:
            ArgumentError: if the table does not know `name`.
        """
        _known(name)
        self.sums[name] = self.sums.get(name, 0.0) + float(total)
        self.counts[name] = self.counts.get(name, 0) + int(count)

    def maximum(self, name: str, value: float) -> None:
        """Keeps the largest value seen."""
        _known(name)
        self.maxima[name] = max(self.maxima.get(name, -math.inf), float(value))

    def all_reduce(self, all_reduce: AllReduce) -> "Tally":
        """The same over all ranks, each of which added the same names."""
        counts = {f"{name}.n": n for name, n in self.counts.items()}
        found = Sums.of(self.sums, counts, self.maxima).all_reduce(all_reduce)
        sums, maxima = ({name: float(v) for name, v in part.items()} for part in (found.totals, found.maxima))
        return Tally(sums, {name: int(found[f"{name}.n"]) for name in self.counts}, maxima)

    def means(self) -> dict[str, float]:
        """Each sum over its count; NaN where the count is 0."""
        means = {name: self.sums[name] / n if n else math.nan for name, n in self.counts.items()}
        return {**means, **self.maxima}


def _known(name: str) -> None:
    if name not in _NAMES:
        raise ArgumentError(
            f"metric {name!r} is not in the table. A number without a definition is not logged. Add it to METRICS."
        )
