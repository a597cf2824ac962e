"""Decide whether training helped, from measured success, evaluations, the off-policy estimate, or rewards online.

Each function returns an `Outcome`: a verdict, the sentences that explain it, and the values to draw.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from tracegrad._html import number
from tracegrad.metrics import MIN_ESS, off_policy_estimate, unreliable_reason
from tracegrad.report.charts import Bar, Rows, as_number, is_online_step, step_of

Verdict = Literal["helped", "worse", "unclear"]

HEADLINES: Mapping[Verdict, str] = {
    "helped": "Training helped",
    "worse": "Training made the policy worse",
    "unclear": "It cannot be told whether training helped",
}
WINDOW = 10
"""Number of steps at the start, and at the end, of an online run whose mean rewards are compared."""
_STUDENT_95 = 2.262157
"""Half width of a 95 % interval of Student's t with `WINDOW` - 1 degrees of freedom, in standard errors."""


_SUCCESS = "Success on fresh prompts", "measured on fresh prompts"
_OFF_POLICY = "Off-policy estimate", "according to the off-policy estimate"
_EVALUATION = "Evaluation", "measured on the evaluation tasks"
_REWARD = "Reward of the rollouts", "according to the reward of the rollouts"


class Estimate(NamedTuple):
    """A number with the ends of its 95 % interval."""

    value: float
    low: float
    high: float


@dataclass(frozen=True)
class Outcome:
    """What one measurement shows.

    Args:
        name: name of the measurement, as a heading.
        evidence: the measurement as the end of a sentence that starts with the verdict.
        verdict: whether the policy is better or worse than before, as far as the 95 % interval tells.
        sentences: the explanation, as plain text.
        bars: values to draw; empty if they are unknown.
        unit: "%" for shares.
    """

    name: str
    evidence: str
    verdict: Verdict
    sentences: str
    bars: tuple[Bar, ...] = ()
    unit: str = ""

    @property
    def headline(self) -> str:
        """Return the verdict in words."""
        return HEADLINES[self.verdict] + (f", {self.evidence}" if self.verdict != "unclear" else "")

    @property
    def is_unknown(self) -> bool:
        """Return whether there is no measurement, so that the sentences give the reason."""
        return not self.bars


def difference_interval(before: Estimate, after: Estimate) -> Estimate:
    """Return after - before with a 95 % interval from the intervals of both, which may be asymmetric.

    The interval assumes independent estimates. If both used the same tasks, it is too wide.

    Source: Newcombe 1998, Statistics in Medicine 17, method 10 (for two proportions); Zou and Donner 2008, Statistics
    in Medicine 27 (for other estimates).

    >>> change = difference_interval(Estimate(0.5, 0.42, 0.54), Estimate(0.7, 0.67, 0.76))
    >>> [round(end, 12) for end in change]
    [0.2, 0.15, 0.3]
    """
    change = after.value - before.value
    down = math.hypot(after.value - after.low, before.high - before.value)
    up = math.hypot(after.high - after.value, before.value - before.low)
    return Estimate(change, change - down, change + up)


def success_outcome(before: Mapping[str, Any], after: Mapping[str, Any]) -> Outcome:
    """Compare success rates before and after training.

    Args:
        before, after: {"success", "ci95": [lo, hi], "n"}, as in summary.json.
    """
    rates = [Estimate(float(rate["success"]), *(float(end) for end in rate["ci95"])) for rate in (before, after)]
    change = difference_interval(*rates)
    bars = [
        Bar(name, *rate, f"{_percents(rate)}, n = {int(source['n']):,}")
        for name, rate, source in zip(("before", "after"), rates, (before, after), strict=True)
    ]
    low, high = (f"{100 * end:+.1f}" for end in change[1:])
    sentences = (
        f"The success rate is {100 * rates[1].value:.1f} % after training and {100 * rates[0].value:.1f} % before. "
        f"The difference is {100 * change.value:+.1f} percentage points, with a 95 % interval of {low} to {high}."
    )
    return Outcome(*_SUCCESS, *_verdict(change, sentences), tuple(bars), "%")


def measured_outcomes(rows: Rows, groups: int) -> list[Outcome]:
    """Return what the rows of metrics.jsonl show, the strongest measurement first.

    Args:
        rows: rows of metrics.jsonl.
        groups: number of groups of the data.
    """
    outcomes = [evaluation_outcome(rows)] if any("eval_reward" in row for row in rows) else []
    if any(map(is_online_step, rows)):
        return [*outcomes, online_reward_outcome(rows)]
    return [*outcomes, off_policy_outcome(rows, groups)]


def off_policy_outcome(rows: Rows, groups: int) -> Outcome:
    """Compare the off-policy estimates before the first step and after training.

    Without a reliable estimate before, it cannot be told: the recorder need not be the policy that is trained.
    """
    measured = [(step_of(row, index), row) for index, row in enumerate(rows) if "ope" in row]
    last_step = max((step_of(row, index) for index, row in enumerate(rows)), default=0)
    if last_step <= 0:
        return Outcome(*_OFF_POLICY, "unclear", "It is unknown, because no optimizer step has been taken.")
    if not measured:
        return Outcome(*_OFF_POLICY, "unclear", f"It is unknown, because {_missing_reason(rows, groups)}.")
    (step, row), (first_step, first_row) = measured[-1], measured[0]
    if step <= 0:
        return Outcome(
            *_OFF_POLICY, "unclear", "It is unknown, because the held-out groups were not evaluated after a step."
        )
    estimate, recorded = _estimate(row), as_number(row.get("ope_recorded_reward"))
    if estimate is None or recorded is None:
        return Outcome(*_OFF_POLICY, "unclear", f"It is unknown, because {_reason(row)}.{_last_reliable(measured)}")
    start = _estimate(first_row) if first_step == 0 else None
    at = "" if start is None else f"The estimate before training is {_short(start.value)}. "
    traces, ess = (round(as_number(row.get(key)) or 0) for key in ("ope_traces", "ope_ess"))
    sentences = (
        f"The trained policy's mean reward on held-out groups is estimated at {_short(estimate.value)} after step "
        f"{step:,.0f}, with a 95 % interval of {_short(estimate.low)} to {_short(estimate.high)}. {at}"
        f"The recorded reward of these traces is {_short(recorded)}. "
        f"The effective sample size is {ess:,} of {traces:,} held-out traces."
    )
    bars = (
        Bar("as recorded", recorded, math.nan, math.nan, _short(recorded))
        if start is None
        else Bar("before training", *start, _numbers(start)),
        Bar(f"after step {step:,.0f}", *estimate, _numbers(estimate)),
    )
    if start is None:
        return Outcome(*_OFF_POLICY, "unclear", f"{sentences} There is no reliable estimate before training.", bars)
    # Both estimates are of the same traces. The wider half of the two intervals holds for their difference.
    change, down, up = (
        estimate.value - start.value,
        max(estimate.value - estimate.low, start.high - start.value),
        max(estimate.high - estimate.value, start.value - start.low),
    )
    return _changed(_OFF_POLICY, sentences, Estimate(change, change - down, change + up), bars)


def evaluation_outcome(rows: Rows) -> Outcome:
    """Compare the first and the last evaluation of an online run."""
    measured = [
        (step_of(row, index), row) for index, row in enumerate(rows) if as_number(row.get("eval_reward")) is not None
    ]
    if len(measured) < 2:
        return Outcome(*_EVALUATION, "unclear", "The change is unknown, because there is no second evaluation.")
    (first_step, first_row), (last_step, last_row) = measured[0], measured[-1]
    before, after = _evaluation(first_row), _evaluation(last_row)
    if before is None or after is None:
        reason = f"an evaluation has fewer than {MIN_ESS:g} tasks, or equal rewards"
        return Outcome(*_EVALUATION, "unclear", f"The change is unknown, because {reason}.")
    at_first = "before training" if first_step == 0 else f"after step {first_step:,.0f}"
    bars = (
        Bar(at_first, *before, _numbers(before) + _tasks(first_row)),
        Bar(f"after step {last_step:,.0f}", *after, _numbers(after) + _tasks(last_row)),
    )
    values = (
        f"The mean reward of the evaluation tasks is {_short(after.value)} after step {last_step:,.0f}, and "
        f"{_short(before.value)} {at_first}."
    )
    return _compared(_EVALUATION, values, before, after, bars)


def online_reward_outcome(rows: Rows) -> Outcome:
    """Compare the mean rewards of the first and the last `WINDOW` steps of an online run.

    A step counts as one sample, since its tasks differ from those of other steps.
    """
    steps = [(step_of(row, index), row) for index, row in enumerate(rows) if is_online_step(row)]
    rewards = [(step, reward, row) for step, row in steps if (reward := as_number(row.get("reward"))) is not None]
    advice = " Tasks in eval_tasks measure it."
    if len(rewards) < 2 * WINDOW:
        reason = f"{len(rewards)} steps have a reward, and {2 * WINDOW} are needed"
        return Outcome(*_REWARD, "unclear", f"The change is unknown, because {reason}.{advice}")
    windows = rewards[:WINDOW], rewards[-WINDOW:]
    has_gap = any(window[-1][0] - window[0][0] != WINDOW - 1 for window in windows)  # steps without an update
    if has_gap or any(as_number(row.get("groups_zero_std")) for window in windows for _, _, row in window):
        reason = "steps leave out groups with equal rewards, so the reward of a step is not that of all rollouts"
        return Outcome(*_REWARD, "unclear", f"The change is unknown, because {reason}.{advice}")
    before, after = (_mean([reward for _, reward, _ in window]) for window in windows)
    bars = tuple(
        Bar(f"steps {window[0][0]:,.0f} to {window[-1][0]:,.0f}", *estimate, _numbers(estimate))
        for window, estimate in zip(windows, (before, after), strict=True)
    )
    values = (
        f"The mean reward is {_short(after.value)} in the last {WINDOW} steps, and {_short(before.value)} in the first "
        f"{WINDOW}."
    )
    return _compared(_REWARD, values, before, after, bars)


def _compared(
    measurement: tuple[str, str], values: str, before: Estimate, after: Estimate, bars: tuple[Bar, ...]
) -> Outcome:
    return _changed(measurement, values, difference_interval(before, after), bars)


def _changed(measurement: tuple[str, str], values: str, change: Estimate, bars: tuple[Bar, ...]) -> Outcome:
    sentences = (
        f"{values} The difference is {_signed(change.value)}, with a 95 % interval of {_signed(change.low)} to "
        f"{_signed(change.high)}."
    )
    return Outcome(*measurement, *_verdict(change, sentences), bars)


def _verdict(change: Estimate, sentences: str, none: str = "zero") -> tuple[Verdict, str]:
    """Return the verdict for a change, and the sentences, which name `none` if the interval contains no change."""
    if change.low > 0:
        return "helped", sentences
    return ("worse", sentences) if change.high < 0 else ("unclear", f"{sentences} The interval contains {none}.")


def _mean(values: Sequence[float]) -> Estimate:
    """Return the mean of `WINDOW` values with a 95 % interval."""
    mean = sum(values) / len(values)
    variance = sum((value - mean) ** 2 for value in values) / (len(values) - 1)
    half = _STUDENT_95 * math.sqrt(variance / len(values))
    return Estimate(mean, mean - half, mean + half)


def _estimate(row: Mapping[str, Any]) -> Estimate | None:
    """Return the off-policy estimate of a row; None if it is not reliable or not a number."""
    numbers = {key: as_number(value) for key, value in row.items() if key.startswith("ope")}
    estimate = off_policy_estimate(numbers)
    return None if estimate is None else Estimate(*estimate)


def _evaluation(row: Mapping[str, Any]) -> Estimate | None:
    """Return the mean reward of an evaluation; None if it has no interval, or one of width 0, or of few tasks."""
    value, low, high = (as_number(row.get(f"eval_{end}")) for end in ("reward", "low", "high"))
    if value is None or low is None or high is None:
        return None
    is_reliable = low < high and (as_number(row.get("eval_tasks")) or 0) >= MIN_ESS
    return Estimate(value, low, high) if is_reliable else None


def _missing_reason(rows: Rows, groups: int) -> str:
    """Return why rows have no off-policy estimate."""
    if all(row.get("rollout_logprob_coverage") == 0 for row in rows if "loss" in row):
        return "no trained token has a recorded logprob"
    if groups < 2:
        return "the data has fewer than two groups, so that none can be held out"
    return "no group is held out (data.holdout), or the held-out groups have no trained tokens"


def _reason(row: Mapping[str, Any]) -> str:
    numbers = {key: as_number(value) for key, value in row.items() if key.startswith("ope")}
    return unreliable_reason(numbers) or "its row in metrics.jsonl is incomplete"


def _last_reliable(measured: Sequence[tuple[float, Mapping[str, Any]]]) -> str:
    """Return a sentence with the last reliable estimate after a step, or ""."""
    for step, row in reversed(measured):
        if step > 0 and (estimate := _estimate(row)) is not None:
            return f" The last reliable estimate is {_numbers(estimate)}, after step {step:,.0f}."
    return ""


def _numbers(estimate: Estimate) -> str:
    return f"{_short(estimate.value)} [{_short(estimate.low)}, {_short(estimate.high)}]"


def _percents(rate: Estimate) -> str:
    value, low, high = (f"{100 * share:.1f}" for share in rate)
    return f"{value} % [{low}, {high}]"


def _tasks(row: Mapping[str, Any]) -> str:
    count = as_number(row.get("eval_tasks"))
    return "" if count is None else f", {count:,.0f} tasks"


def _short(value: float) -> str:
    """Return a number with three significant digits."""
    return number(float(f"{value:.3g}"))


def _signed(value: float) -> str:
    return ("+" if value > 0 else "") + _short(value)
