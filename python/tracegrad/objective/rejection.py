"""Define which tokens are dropped: rejections on ratios, budgets, and selection by entropy or covariance."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, get_args

from tracegrad._validation import (
    check_bounds_around,
    check_choice,
    check_order,
    check_positive,
    check_ratio_bounds,
    refuse_without_effect,
)
from tracegrad.errors import ArgumentError
from tracegrad.objective.component import Component, LossInputs
from tracegrad.objective.core_forms import CoreRejection, CoreRejectionBudget
from tracegrad.objective.ratio import (
    CONDITION_SIGNS,
    INFINITY,
    KINDS,
    OVER,
    TOKEN,
    Aggregation,
    Ratio,
    When,
    check_scope,
    clamp_log_ratio,
    condition_mask,
)

if TYPE_CHECKING:
    from tracegrad.objective.objective import Objective


Stat = Literal["ratio", "k1", "k2", "k3", "abs", "square", "dprob", "binary_kl"]

STATS: tuple[str, ...] = get_args(Stat)
_NEVER_NEGATIVE = ("k2", "k3", "abs", "square")
_KL_EPSILON = 1e-8  # verl's value, for probabilities of 1


class AnyRejection(Component):
    """Base class of components that drop tokens. For your own, write a frozen subclass with `keeps`.

    Its ratio must contain the policy being trained. A detached one also needs `to_core()` and a form in the Rust core.

    >>> import torch
    >>> from tracegrad.objective import Objective, PolicyGradient, padded_loss
    >>> @dataclass(frozen=True)
    ... class DropUnlikely(AnyRejection):
    ...     least: float
    ...
    ...     def keeps(self, view, keep):
    ...         return keep & (view.logprobs >= self.least)
    >>> objective = Objective(PolicyGradient(), rejections=(DropUnlikely(-5.0),))
    >>> step = {"mask": torch.tensor([[True, True]]), "advantages": torch.tensor([1.0])}
    >>> padded_loss(objective, torch.tensor([[-1.0, -6.0]]), **step).per_term.keep
    tensor([[ True, False]])
    """

    def keeps(self, view: LossInputs, keep: Any) -> Any:
        """Return `keep` without the tokens that this rejection drops. It is not called for detached rejections.

        A token with a missing logprob must not be dropped: consider only the tokens in `view.has_value(ratio) &
        view.present`.
        """
        raise NotImplementedError(f"{type(self).__name__} has no keeps(view, keep)")


@dataclass(frozen=True)
class Rejection(AnyRejection):
    """Keeps a token iff low <= stat <= high, bounds included; a dropped token has no loss and no gradient.

    With l = log num - log den, p and q the two probabilities: ratio = exp(l), k1 = l, k2 = l^2 / 2, k3 = exp(l) - 1 -
    l, abs = |l|, square = l^2, dprob = p - q, binary_kl = the KL of (q, 1 - q) from (p, 1 - p) with the sign of p - q.
    A level aggregates l before the ratio is exponentiated; it aggregates the other statistics as they are. (verl's k1
    is -l, so its bounds are the inverse of these.)

    Args:
        ratio: any two policies.
        stat: one of the above.
        level: tokens over which the statistic is aggregated; `terms` restricts them.
        low, high: bounds in the unit of `stat`; None is unbounded.
        when: sign of the advantage for which it can drop a token: "always", "A>0", "A>=0", "A<0" or "A<=0".
        drops: what is dropped together with a token that fails: None is the level itself; "trace" with a token level is
            a veto.
        terms: the statistic is over "all" tokens with known logprobs, or over those "kept" by earlier rejections.

    >>> print(Rejection(Ratio("old", "rollout"), low=1e-4, drops="trace"))
    drop the trace unless 0.0001 <= ratio(old/rollout) of each token
    >>> print(Rejection(Ratio("old", "rollout"), "abs", high=2.0, when="A<0"))
    drop the token where A<0 unless abs(old/rollout) of each token <= 2
    """

    ratio: Ratio
    stat: Stat = "ratio"
    level: Aggregation = TOKEN
    low: float | None = None
    high: float | None = None
    when: When = "always"
    drops: Literal["turn", "trace", "group"] | None = None
    terms: Literal["all", "kept"] = "all"

    def __post_init__(self) -> None:
        check_choice("Rejection.stat", self.stat, STATS)
        check_choice("Rejection.when", self.when, tuple(CONDITION_SIGNS))
        check_choice("Rejection.drops", self.drops, ("turn", "trace", "group", None))
        check_choice("Rejection.terms", self.terms, ("all", "kept"))
        refuse_without_effect(self.level.grad != "through", "Rejection.level.grad", "a rejection is detached")
        refuse_without_effect(self.level.blend is not None, "Rejection.level.blend", "a rejection reads one level")
        refuse_without_effect(
            self.level.terms != "all", "Rejection.level.terms", "Rejection.terms selects the tokens that are counted"
        )
        refuse_without_effect(
            self.terms == "kept" and self.level.over == "token", "Rejection.terms", "a token is not aggregated"
        )
        wider = self.drops is None or OVER.index(self.drops) > OVER.index(self.level.over)
        refuse_without_effect(not wider, "Rejection.drops", f"the level is the {self.level.over} already")
        check_scope("Rejection", self.ratio, self.level)
        if self.drops == "group" and not self.detached:
            raise ArgumentError(
                "TG-OBJ-031: Rejection.drops is 'group' on a ratio of the policy being trained. The traces of a group "
                "are in several micro-batches. Use drops='trace', or old instead of theta."
            )
        self._check_bounds()

    def _check_bounds(self) -> None:
        if self.low is None and self.high is None:
            raise ArgumentError(
                "TG-OBJ-032: a Rejection without low and high keeps everything. Pass at least one bound."
            )
        low, high = self.bounds
        if self.stat == "ratio":
            check_ratio_bounds("Rejection", max(low, 0.0) if self.low is None else low, high)
        elif self.stat in _NEVER_NEGATIVE:
            check_order("Rejection", low, high)
            refuse_without_effect(self.low is not None, "Rejection.low", f"{self.stat} is never negative")
            check_positive("Rejection.high", high, f"{self.stat} is 0 if the policies agree") if high <= 0 else None
        else:
            check_bounds_around("Rejection", low, high, 0.0, f"{self.stat} is a difference: write -0.2 and 0.2.")

    @property
    def bounds(self) -> tuple[float, float]:
        """low and high, infinite if None."""
        return (-INFINITY if self.low is None else self.low, INFINITY if self.high is None else self.high)

    @property
    def cross_trace_reason(self) -> str:
        wide = self.level.over if self.level.spans_traces else "group" if self.drops == "group" else ""
        return wide and f"'{self}' reaches over a {wide}"

    def ratios(self) -> Sequence[tuple[Ratio, Aggregation]]:
        return [(self.ratio, Aggregation(self.drops, "max") if self.drops else self.level)]

    def to_core(self) -> CoreRejection:
        level = self.level.to_core(self.terms == "kept")
        low, high = self.bounds
        drops = self.drops or self.level.over
        return CoreRejection(self.ratio.to_core(), self.stat, level, low, high, self.when, drops)

    def keeps(self, view: LossInputs, keep: Any) -> Any:
        has = view.has_value(self.ratio)
        inside = has & view.present
        values = self._stat(view, has)
        values = self.level.apply(values, view, inside & keep if self.terms == "kept" else inside)
        if self.stat == "ratio":
            values = clamp_log_ratio(values).exp()
        low, high = self.bounds
        failed = ((values < low) | (values > high)) & (inside if self.level.over == "token" else view.counted)
        if self.when != "always":
            failed = failed & condition_mask(self.when, view.masked_array("advantages", view.counted))
        if self.drops is not None:
            failed = Aggregation(self.drops, "max").apply(failed.to(values.dtype), view, view.counted) > 0
        return keep & ~failed

    def _stat(self, view: LossInputs, has: Any) -> Any:
        """Return the statistic of each token; for "ratio" its logarithm, which is what levels aggregate."""
        log_ratio = view.log_difference(self.ratio, has)
        if self.stat not in ("dprob", "binary_kl"):
            return KINDS["k1" if self.stat == "ratio" else self.stat](log_ratio)
        p, q = (view.logprob(policy, has).clamp(max=0).exp() for policy in (self.ratio.num, self.ratio.den))
        if self.stat == "dprob":
            return p - q
        complement = (1 - q) * ((1 - q + _KL_EPSILON) / (1 - p + _KL_EPSILON)).log()
        return (p - q).sign() * (complement - q * log_ratio)

    def __str__(self) -> str:
        low = "" if self.low is None else f"{self.low:g} <= "
        high = "" if self.high is None else f" <= {self.high:g}"
        kept = " over kept tokens" if self.terms == "kept" else ""
        inner = f"{self.stat}({self.ratio}) of each token"
        if self.level.over != "token":
            inner = f"{self.level} of {self.stat}({self.ratio}){kept}"
            if self.stat == "ratio":
                inner = f"exp({self.level} of log {self.ratio}{kept})"
        when = "" if self.when == "always" else f" where {self.when}"
        return f"drop the {self.drops or self.level.over}{when} unless {low}{inner}{high}"


@dataclass(frozen=True)
class RejectionBudget(AnyRejection):
    """Keeps the tokens with the smallest stat, as many as leave its mean over the step at most `mean`; at least one.

    Tokens with an equal stat are kept or dropped together.

    Args:
        ratio: two policies, neither of them being trained.
        stat: "square" (M2PO), "abs", "k2" or "k3".
        mean: upper bound of the mean over the kept tokens.
        terms: "all" tokens with known logprobs, or those "kept" by earlier rejections.
        quadrants: "all", or the two "active" ones, which an update moves further away: A > 0 with a ratio above 1, and
            A < 0 with a ratio below 1. Tokens outside these are neither counted in the mean nor dropped.

    Source: M2PO, arXiv 2510.01161, mean (log ratio)^2 <= 0.04. Its final version (ICLR 2026, Algorithm 1) and the
    authors' code use the active quadrants, its first version and AReaL all.

    >>> print(RejectionBudget(Ratio("old", "rollout"), quadrants="active"))
    keep the tokens with the smallest square(old/rollout) in the active quadrants whose mean is at most 0.04
    """

    ratio: Ratio
    stat: Literal["square", "abs", "k2", "k3"] = "square"
    mean: float = 0.04
    terms: Literal["all", "kept"] = "all"
    quadrants: Literal["all", "active"] = "all"

    def __post_init__(self) -> None:
        check_choice("RejectionBudget.stat", self.stat, ("square", "abs", "k2", "k3"))
        check_choice("RejectionBudget.terms", self.terms, ("all", "kept"))
        check_choice("RejectionBudget.quadrants", self.quadrants, ("all", "active"))
        check_positive("RejectionBudget.mean", self.mean)
        if not self.ratio.detached:
            raise ArgumentError(
                f"TG-OBJ-033: Budget on {self.ratio}: the budget is for the full step, but the policy being "
                "trained is evaluated one micro-batch at a time. Use old instead of theta."
            )

    @property
    def cross_trace_reason(self) -> str:
        return f"'{self}' is a budget for the full step"

    def to_core(self) -> CoreRejectionBudget:
        return CoreRejectionBudget(
            self.ratio.to_core(), self.stat, self.mean, kept=self.terms == "kept", active=self.quadrants == "active"
        )

    def __str__(self) -> str:
        where = " in the active quadrants" if self.quadrants == "active" else ""
        return f"keep the tokens with the smallest {self.stat}({self.ratio}){where} whose mean is at most {self.mean:g}"


@dataclass(frozen=True)
class TopEntropy(AnyRejection):
    """Keeps the share of tokens with the highest entropy of the policy being trained, within each micro-batch.

    A token is kept if its entropy is at or above the quantile of the tokens (torch.quantile).

    Args:
        share: share of the tokens of a micro-batch, in [0, 1); 0 keeps only the tokens with the maximum entropy.
        scope: "microbatch". You must write it, because the gradient depends on how the step was split.

    Source: Wang et al. 2025, arXiv 2506.01939; TRL's top_entropy_quantile.

    >>> import torch
    >>> from tracegrad.objective import Objective, PolicyGradient, padded_loss
    >>> objective = Objective(PolicyGradient(), rejections=(TopEntropy(share=0.5, scope="microbatch"),))
    >>> step = {"mask": torch.ones(1, 4).bool(), "advantages": torch.tensor([1.0])}
    >>> entropy = torch.tensor([[0.1, 2.0, 1.0, 0.2]])  # the quantile 0.5 is 0.6
    >>> padded_loss(objective, torch.full((1, 4), -1.0), entropy=entropy, **step).per_term.keep
    tensor([[False,  True,  True, False]])
    """

    share: float
    scope: Literal["microbatch"]

    takes_entropy = True

    def __post_init__(self) -> None:
        _check_share(self, zero=True)

    def keeps(self, view: LossInputs, keep: Any) -> Any:
        counted = view.entropy.where(view.counted, math.nan).float().reshape(-1)
        return keep & (view.entropy >= counted.nanquantile(1 - self.share)) if len(counted) else keep

    def __str__(self) -> str:
        return f"keep the {self.share:g} of the micro-batch's tokens with the highest entropy"


@dataclass(frozen=True)
class DropCovariance(AnyRejection):
    """Drops a random share of the tokens whose covariance of advantage and logprob is between low and high.

    cov = (A - mean A)(logp - mean logp), with means over the tokens of the micro-batch that earlier rejections kept.
    Clipped tokens are not candidates. `max(int(share * tokens), 1)` of the candidates are dropped, drawn with torch's
    global generator.

    Args:
        share: share of the kept tokens of a micro-batch, in (0, 1).
        low, high: bounds of cov, excluded.
        scope: "microbatch". You must write it, because the gradient depends on how the step was split.
        scaled: uses A times the scale of its token, as SkyRL's clip_cov does. The bounds are then of the order of a
            mean.

    Source: Clip-Cov of Cui et al. 2025, arXiv 2505.22617; verl's clip_cov.

    >>> import torch
    >>> from tracegrad.objective import Clip, Objective, padded_loss
    >>> rejection = DropCovariance(share=0.5, low=1.5, high=10.0, scope="microbatch")
    >>> step = {"mask": torch.ones(1, 3).bool(), "advantages": torch.tensor([[2.0, -1.0, -1.0]])}
    >>> # The means are 0 and -2, so cov is 2 * 1, -1 * 0 and -1 * -1.
    >>> logprobs = torch.tensor([[-1.0, -2.0, -3.0]])
    >>> objective = Objective(Clip(), Ratio("theta", "old"), rejections=(rejection,))
    >>> # There is one candidate, and it is dropped.
    >>> padded_loss(objective, logprobs, old=logprobs, **step).per_term.keep
    tensor([[False,  True,  True]])
    """

    share: float
    low: float
    high: float
    scope: Literal["microbatch"]
    scaled: bool = False

    def __post_init__(self) -> None:
        _check_share(self)
        check_order("DropCovariance", self.low, self.high)

    def check(self, objective: "Objective") -> None:
        if not objective.surrogate.clips:
            raise ArgumentError(
                "TG-OBJ-034: DropCovariance skips clipped tokens and needs the surrogate Clip. Use Clip, or a "
                "Rejection."
            )

    def keeps(self, view: LossInputs, keep: Any) -> Any:
        counted = keep & view.counted
        covariance = _covariance(view, counted, self.scaled)
        between = (covariance > self.low) & (covariance < self.high) & ~view.clipped
        candidates = between.reshape(-1).nonzero().squeeze(-1)
        count = max(int(self.share * int(counted.sum())), 1)
        dropped = keep.reshape(-1) & False
        if len(candidates):
            dropped[candidates[view.permutation(len(candidates))[:count].to(candidates.device)]] = True
        return keep & ~dropped.reshape(keep.shape)

    def __str__(self) -> str:
        of = _covariance_name(self.scaled)
        return f"drop a random {self.share:g} of the tokens with {self.low:g} < {of} < {self.high:g}"


@dataclass(frozen=True)
class TopCovariance(Component):
    """Selects the share of tokens with the highest covariance of advantage and logprob, for a penalty on them.

    Args:
        share: share of the tokens of a micro-batch that the penalty applies to, in (0, 1); at least one token.
        scope: "microbatch"; you must write it.
        scaled: uses A times the scale of its token, as SkyRL's kl_cov does; it matters only if scales differ.

    Source: KL-Cov of Cui et al. 2025, arXiv 2505.22617; verl's kl_cov.

    >>> import torch
    >>> from tracegrad.objective import Objective, Penalty, PolicyGradient, padded_loss
    >>> where = TopCovariance(share=0.5, scope="microbatch")
    >>> penalty = Penalty(Ratio("theta", "ref"), "abs", coef=1.0, masked=True, weighted=False, where=where)
    >>> step = {"mask": torch.ones(1, 3).bool(), "advantages": torch.tensor([[2.0, -1.0, -1.0]])}
    >>> # The means are 0 and -2, so cov is 2 * 1, -1 * 0 and -1 * -1.
    >>> logprobs = torch.tensor([[-1.0, -2.0, -3.0]])
    >>> objective = Objective(PolicyGradient(), penalties=(penalty,))
    >>> # The penalty applies to one token of three.
    >>> padded_loss(objective, logprobs, ref=logprobs - 0.5, **step).per_term.penalty
    tensor([[0.5000, 0.0000, 0.0000]])
    """

    share: float
    scope: Literal["microbatch"]
    scaled: bool = False

    def __post_init__(self) -> None:
        _check_share(self)

    def of(self, view: LossInputs, mask: Any) -> Any:
        """Return the selected tokens in `mask`, at least one if there are any."""
        covariance = _covariance(view.detach(), mask, self.scaled).reshape(-1)
        count = mask.sum()
        selected_count = (self.share * count.double()).long().clamp(min=1).minimum(count)
        order = covariance.argsort(descending=True)
        rank = order.new_ones(len(order)).cumsum(0) - 1
        return (mask.reshape(-1) & False).scatter(0, order, rank < selected_count).reshape(mask.shape)

    def __str__(self) -> str:
        return f"on the {self.share:g} of the micro-batch's tokens with the highest {_covariance_name(self.scaled)}"


def _covariance_name(scaled: bool) -> str:
    return "cov(scale A, logp)" if scaled else "cov(A, logp)"


def _covariance(view: LossInputs, mask: Any, scaled: bool) -> Any:
    """Return (A - mean A)(logp - mean logp) of each token in `mask`, minus infinity elsewhere."""
    advantages, logprobs = view.masked_array("advantages", mask), view.logprob("theta", mask)
    advantages = advantages * view.scale(None) if scaled else advantages
    count = mask.sum().clamp(min=1)
    covariance = (advantages - advantages.sum() / count) * (logprobs - logprobs.sum() / count)
    return covariance.where(mask, -INFINITY)


def _check_share(part: TopEntropy | DropCovariance | TopCovariance, *, zero: bool = False) -> None:
    name = type(part).__name__
    check_choice(f"{name}.scope", part.scope, ("microbatch",))
    if not (0 < part.share < 1 or (zero and part.share == 0)):
        raise ArgumentError(
            f"TG-OBJ-035: {name}.share is {part.share}. It must be a share of the tokens, between 0 and 1."
        )
