"""Define importance ratios, the levels they are aggregated at, and the normalisation of the loss."""

import math
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Literal

from tracegrad import _core
from tracegrad._validation import check_choice, check_positive, refuse_without_effect
from tracegrad.errors import ArgumentError
from tracegrad.objective.core_forms import CoreAggregation, CoreRatio, CoreReduction

LOG_RATIO_LIMIT: float = _core.LOG_RATIO_LIMIT
"""Log-ratios are clamped to plus or minus this many nats before they are exponentiated."""

INFINITY = float("inf")

Policy = Literal["theta", "old", "rollout", "ref", "proximal"]
When = Literal["always", "A>0", "A>=0", "A<0", "A<=0"]
Over = Literal["token", "turn", "trace", "group", "batch"]

POLICIES = ("theta", "old", "rollout", "ref", "proximal")
OVER = ("token", "turn", "trace", "group", "batch")
CONDITION_SIGNS = {"always": "+0-", "A>0": "+", "A>=0": "+0", "A<0": "-", "A<=0": "0-"}
"""Signs of the advantage that meet each condition."""
KINDS: dict[str, Callable[[Any], Any]] = {
    "k1": lambda x: x,
    "k2": lambda x: x.square() * 0.5,
    "k3": lambda x: clamp_log_ratio(x).expm1() - clamp_log_ratio(x),
    "abs": lambda x: x.abs(),
    "square": lambda x: x.square(),
}
"""Statistics of a log-ratio x: k3(x) is exp(x) - 1 - x."""


def clamp_log_ratio(log_ratio: Any) -> Any:
    """Return the log-ratio clamped to +-LOG_RATIO_LIMIT, as before every `exp`."""
    return log_ratio.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)


def condition_mask(when: When, advantages: Any) -> Any:
    """Return at which tokens a condition on the sign of the advantage is met."""
    comparisons = {"A>0": advantages.gt, "A>=0": advantages.ge, "A<0": advantages.lt, "A<=0": advantages.le}
    return comparisons[when](0) if when in comparisons else advantages == advantages


@dataclass(frozen=True)
class Ratio:
    """The probability ratio num / den of one sampled token under two policies.

    Args:
        num: "theta" (being trained), "old" (recomputed before the step), "rollout" (recorded), "ref" or "proximal". The
            proximal policy is log-linear between the recorded and the trained one: log rollout + alpha (log theta - log
            rollout), held constant. It replaces old without a forward pass (`Terms.alpha`).
        den: the same.

    Source: proximal: A-3PO, arXiv 2512.06547; AReaL's prox_logp_method="loglinear".

    >>> str(Ratio("old", "rollout"))
    'old/rollout'
    """

    num: Policy
    den: Policy

    def __post_init__(self) -> None:
        check_choice("Ratio.num", self.num, POLICIES)
        check_choice("Ratio.den", self.den, POLICIES)
        if self.num == self.den:
            raise ArgumentError(f"TG-OBJ-028: the ratio {self} is always 1. Name two different policies.")

    def __str__(self) -> str:
        return f"{self.num}/{self.den}"

    def __contains__(self, policy: object) -> bool:
        return policy in (self.num, self.den)

    @property
    def detached(self) -> bool:
        """Whether it is independent of the policy being trained, so that its value is fixed before the step."""
        return "theta" not in self and "proximal" not in self

    @property
    def recorded(self) -> bool:
        """Whether it names rollout, so that it has no value at tokens with a missing recorded logprob."""
        return "rollout" in self or "proximal" in self

    def to_core(self) -> CoreRatio:
        """Return its plain form."""
        return CoreRatio(self.num, self.den)


def remaining_powers(ratios: Iterable[Ratio]) -> dict[str, int]:
    """Return the powers of the policies that remain when ratios are multiplied; the proximal counts as old.

    >>> remaining_powers([Ratio("theta", "old"), Ratio("old", "rollout")])
    {'theta': 1, 'rollout': -1}
    """
    powers: Counter[str] = Counter()
    for ratio in ratios:
        powers["old" if ratio.num == "proximal" else ratio.num] += 1
        powers["old" if ratio.den == "proximal" else ratio.den] -= 1
    return {policy: power for policy, power in powers.items() if power}


@dataclass(frozen=True)
class Aggregation:
    """Tokens over which a log-ratio is aggregated before it is exponentiated and returned to each of them.

    A trace is what papers call a sequence, all its branches together; a turn is one generation of it. The product of
    the token ratios is `Aggregation("trace", "sum")`, their geometric mean `Aggregation("trace", "mean")`: papers
    call either the "sequence ratio".

    Args:
        over: "token", "turn", "trace", "group" or "batch", which is all tokens of the step.
        reduce: "sum", "mean" or "max"; within a turn or trace also "prefix_sum" and "prefix_min", the sum and the
            minimum over the tokens up to and including each one; None if `over` is "token".
        grad: "through" the aggregate, or only through the token's own "token" (GSPO-token); read in a surrogate only.
        terms: "all" tokens with known logprobs, or those still "kept" by the rejections.
        blend: mixes in the token's own ratio: "arithmetic" (r_token + r_level) / 2, "geometric" its geometric form
            (ART's average and geometric_average).
        scope: the range of "batch" and "group": the full "step", or the "microbatch" that is evaluated together. A
            ratio of the trained policy can only see a micro-batch.

    >>> import torch
    >>> from tracegrad.objective import Importance, Objective, padded_loss
    >>> step = {"mask": torch.tensor([[True, True]]), "advantages": torch.tensor([1.0])}
    >>> # Token ratios of 4.5 and 0.5.
    >>> logprobs, old = torch.tensor([[0.9, 0.1]]).log(), torch.tensor([[0.2, 0.2]]).log()
    >>> for level in (Aggregation("token"), Aggregation("trace", "sum"), Aggregation("trace", "mean")):
    ...     objective = Objective(Importance(level), Ratio("theta", "old"))
    ...     print(padded_loss(objective, logprobs, old=old, **step).per_term.ratio)
    tensor([[4.5000, 0.5000]])
    tensor([[2.2500, 2.2500]])
    tensor([[1.5000, 1.5000]])
    """

    over: Over = "token"
    reduce: Literal["sum", "mean", "max", "prefix_sum", "prefix_min"] | None = None
    grad: Literal["through", "token"] = "through"
    terms: Literal["all", "kept"] = "all"
    blend: Literal["arithmetic", "geometric"] | None = None
    scope: Literal["step", "microbatch"] = "step"

    def __post_init__(self) -> None:
        check_choice("Aggregation.over", self.over, OVER)
        check_choice("Aggregation.grad", self.grad, ("through", "token"))
        check_choice("Aggregation.terms", self.terms, ("all", "kept"))
        check_choice("Aggregation.blend", self.blend, ("arithmetic", "geometric", None))
        check_choice("Aggregation.scope", self.scope, ("step", "microbatch"))
        refuse_without_effect(
            self.scope != "step" and not self.spans_traces,
            "Aggregation.scope",
            f"all tokens of a {self.over} are in one batch",
        )
        if self.over == "token":
            for name, default in (("reduce", None), ("grad", "through"), ("terms", "all"), ("blend", None)):
                refuse_without_effect(
                    getattr(self, name) != default, f"Aggregation.{name}", "a token is not aggregated"
                )
            return
        prefixes = () if self.spans_traces else ("prefix_sum", "prefix_min")
        check_choice("Aggregation.reduce", self.reduce, ("sum", "mean", "max", *prefixes))

    @property
    def spans_traces(self) -> bool:
        """Whether the level is the group or batch, which span several traces."""
        return self.over in ("group", "batch")

    def to_core(self, kept: bool) -> CoreAggregation:
        """Return its plain form; with `kept`, it runs over kept tokens only."""
        return CoreAggregation(self.over, self.reduce, kept, self.blend)

    def apply(self, values: Any, view: Any, inside: Any) -> Any:
        """Return log-ratios aggregated and broadcast back to each token.

        Sums are in float64. The result is NaN if a segment has no token inside.
        """
        if self.over == "token":
            return values
        flat, index, inside = values.reshape(-1).double(), view.segments(self.over), inside.reshape(-1)
        prefix = self.reduce in ("prefix_sum", "prefix_min")
        aggregate = (
            (_running_aggregate if prefix else _segment_aggregate)(self.reduce, flat, index, inside)
            .reshape(values.shape)
            .to(values.dtype)
        )
        if self.blend == "geometric":
            aggregate = (aggregate + values) / 2
        elif self.blend == "arithmetic":
            aggregate = clamp_log_ratio(aggregate).logaddexp(clamp_log_ratio(values)) - math.log(2)
        return aggregate.detach() + values - values.detach() if self.grad == "token" else aggregate

    def __str__(self) -> str:
        if self.over == "token":
            return "each token"
        words = {"sum": "sum", "mean": "mean", "max": "max", "prefix_sum": "running sum", "prefix_min": "running min"}
        within = " of the micro-batch" if self.scope == "microbatch" else ""
        kept = " over kept tokens" if self.terms == "kept" else ""
        blend = f", {self.blend} mean with the token's own" if self.blend else ""
        return f"{words[self.reduce or 'sum']} over the {self.over}{within}{kept}{blend}"


TOKEN = Aggregation()
"""Each token by itself."""


def _segment_aggregate(agg: str | None, values: Any, index: Any, inside: Any) -> Any:
    """Return [tokens] the aggregate of each token's segment."""
    count = values.new_zeros(len(values)).index_add(0, index, inside.double())
    if agg == "max":
        lowest = values.new_full((len(values),), -INFINITY)
        total = lowest.scatter_reduce(0, index, values.masked_fill(~inside, -INFINITY), "amax")
    else:
        total = values.new_zeros(len(values)).index_add(0, index, values.where(inside, 0))
    if agg == "mean":
        total = total / count.clamp(min=1)
    return total.where(count > 0, math.nan)[index]


def _running_aggregate(agg: str | None, values: Any, index: Any, inside: Any) -> Any:
    """Return the running sum or minimum within each segment.

    Computed by doubling: after k rounds it covers the last 2^k tokens.
    """
    neutral = 0.0 if agg == "prefix_sum" else INFINITY
    order = index.argsort(stable=True)
    segment, running = index[order], values.where(inside, neutral)[order]
    step = 1
    while step < len(values):
        same = segment == segment.roll(step)
        same[:step] = False
        before = running.roll(step).where(same, neutral)
        running = running + before if agg == "prefix_sum" else running.minimum(before)
        step *= 2
    in_order = running.new_empty(len(running)).scatter(0, order, running)
    return in_order if agg == "prefix_sum" else in_order.masked_fill(in_order.isinf(), math.nan)


def discounted_sum(values: Any, index: Any, inside: Any, factor: float) -> Any:
    """Return the sum from each token to the end of its segment, discounted by `factor` per token.

    Computed by doubling, as the running sums: after k rounds it covers the next 2^k tokens. Tokens that are not inside
    do not count as a step.
    """
    index = index.masked_fill(~inside.reshape(-1), len(index))
    order = index.argsort(stable=True)
    segment, running = index[order], values.reshape(-1).double()[order]
    step = 1
    while step < len(running):
        same = segment == segment.roll(-step)
        same[-step:] = False
        running = running + factor**step * running.roll(-step).where(same, 0)
        step *= 2
    return running.new_empty(len(running)).scatter(0, order, running).reshape(values.shape).to(values.dtype)


def check_scope(name: str, ratio: Ratio, level: Aggregation) -> None:
    """Refuse a statistic of the trained policy over more than one micro-batch, unless its scope allows that."""
    if level.spans_traces and not ratio.detached and level.scope == "step":
        raise ArgumentError(
            f"TG-OBJ-029: {name}: {ratio} depends on the policy being trained, which is evaluated one micro-batch at a "
            f"time, but the level is the full {level.over}. The gradient would depend on how the step is split. To "
            "accept "
            "that, pass Aggregation(..., scope='microbatch'), or use old instead of theta."
        )
    refuse_without_effect(
        level.scope != "step" and ratio.detached, f"{name}.level.scope", f"{ratio} is available for the full step"
    )


@dataclass(frozen=True)
class Reduce:
    """How tokens are reduced to one number: it defines the `scale` of each token.

    | per | inner "mean" | inner "sum" |
    |---|---|---|
    | token | 1 / tokens (inner is None) | |
    | trace | 1 / (traces * tokens of the trace) | 1 / (traces * norm) |
    | group | 1 / (groups * traces of the group * tokens of the trace) | 1 / (groups * traces of the group * norm) |
    | prompt | 1 / (groups * tokens of the group) | 1 / (groups * norm) |
    | constant | | 1 / norm (inner is None) |

    Args:
        per: "token", "trace", "group" (its traces count equally), "prompt" (its tokens count equally) or "constant".
        inner: "mean" or "sum" within a trace, or within a prompt; None if `per` is "token" or "constant".
        norm: constant that divides an inner sum, 1 if None; required if `per` is "constant".
        denominator: "all" counts every token of the step, "kept" those left by the detached rejections and by
            `missing_logprobs="mask"`.

    >>> print(Reduce("trace", "mean"))
    1 / (traces * tokens of the trace)
    """

    per: Literal["token", "trace", "group", "prompt", "constant"] = "token"
    inner: Literal["mean", "sum"] | None = None
    norm: float | None = None
    denominator: Literal["all", "kept"] = "all"

    def __post_init__(self) -> None:
        check_choice("Reduce.per", self.per, ("token", "trace", "group", "prompt", "constant"))
        check_choice("Reduce.denominator", self.denominator, ("all", "kept"))
        if self.per in ("token", "constant"):
            refuse_without_effect(self.inner is not None, "Reduce.inner", f"per='{self.per}' has one sum over the step")
        else:
            check_choice("Reduce.inner", self.inner, ("mean", "sum"))
        if self.per == "constant":
            refuse_without_effect(self.denominator == "kept", "Reduce.denominator", "a constant counts nothing")
            if self.norm is None:
                raise ArgumentError(
                    "TG-OBJ-030: Reduce(per='constant') without norm. Say the constant; 1.0 is a plain sum."
                )
        else:
            refuse_without_effect(
                self.norm is not None and self.inner != "sum", "Reduce.norm", "it divides an inner sum"
            )
        if self.norm is not None:
            check_positive("Reduce.norm", self.norm)

    def to_core(self) -> CoreReduction:
        """Return its plain form."""
        norm = 1.0 if self.norm is None else self.norm
        return CoreReduction(self.per, self.inner == "mean", norm, self.denominator == "kept")

    def __str__(self) -> str:
        kept = "kept " if self.denominator == "kept" else ""
        inner = f"{kept}tokens of the {'prompt' if self.per == 'prompt' else 'trace'}"
        if self.inner == "sum":
            inner = f"{self.norm or 1:g}"
        return {
            "token": f"1 / {kept}tokens",
            "trace": f"1 / (traces * {inner})",
            "group": f"1 / (groups * traces of the group * {inner})",
            "prompt": f"1 / (prompts * {inner})",
            "constant": f"1 / {self.norm or 1:g}",
        }[self.per]


PER_TOKEN = Reduce()
"""The mean over all tokens."""
