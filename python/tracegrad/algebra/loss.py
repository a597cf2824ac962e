"""What carries the gradient and how it becomes one number: surrogate, penalties, reduction, and the whole Objective.

Values only; `tracegrad.objective` evaluates them on torch tensors.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from typing import Any, Literal, Protocol

from tracegrad.algebra.detached import HOLDS, TOKEN, Gate, Level, Ratio, Weight
from tracegrad.algebra.refuse import no_effect, one_of
from tracegrad.errors import ArgumentError

Missing = Literal["mask", "neutral", "refuse"]


@dataclass(frozen=True)
class PolicyGradient:
    """-A * logp: the plain policy gradient; takes no ratio."""


@dataclass(frozen=True)
class Clip:
    """max(-A r, -A clip(r, 1 - low, 1 + high)), and for A < 0 at most -A dual.

    Args:
        low, high: distances from 1, as in verl, slime and TRL's GRPO; not absolute bounds.
        dual: upper bound of r for negative advantages (dual clip), an absolute ratio above 1; None is without.
        level: the level of r.

    Source: Schulman et al. 2017, arXiv 1707.06347, eq. 7; dual: Ye et al. 2019, arXiv 1912.09729, eq. 5.
    """

    low: float = 0.2
    high: float = 0.2
    dual: float | None = None
    level: Level = TOKEN

    def __post_init__(self) -> None:
        for name, value in (("low", self.low), ("high", self.high)):
            if not value >= 0:
                raise ArgumentError(f"Clip.{name} is {value}. It is a distance from 1 and must not be negative.")
        if self.low > 1:
            raise ArgumentError(
                f"Clip.low is {self.low}: no ratio is below 1 - {self.low}. It is a distance from 1, at most 1."
            )
        if self.dual is not None and not self.dual > 1:
            raise ArgumentError(f"Clip.dual is {self.dual}. It is a ratio and must be above 1.")


Surrogate = PolicyGradient | Clip


@dataclass(frozen=True)
class Penalty:
    """coef * an estimate of KL(num || den) at each term, with l = log num - log den.

    k1 = l, k2 = l^2 / 2, k3 = exp(-l) - 1 + l: unbiased for tokens drawn by num, the last two never negative.

    Args:
        ratio: theta/ref or another with theta above.
        kind: "k1", "k2" or "k3".
        coef: its factor in the loss.
        gated: whether terms that the gates dropped are left out.
        weighted: whether the detached weights multiply it.

    Source: Schulman 2020, "Approximating KL divergence".
    """

    ratio: Ratio
    kind: Literal["k1", "k2", "k3"]
    coef: float
    gated: bool
    weighted: bool

    def __post_init__(self) -> None:
        one_of("Penalty.kind", self.kind, ("k1", "k2", "k3"))
        if self.ratio.num != "theta":
            raise ArgumentError(f"the penalty ratio {self.ratio} must have theta above. Write Ratio('theta', ...).")
        if not 0 < self.coef < float("inf"):
            raise ArgumentError(f"Penalty.coef is {self.coef}. It must be positive; leave the penalty out for none.")


@dataclass(frozen=True)
class Reduce:
    """How terms become one number: gives the `scale` of each term.

    per "token": 1 / terms. per "trace" (or "group"): inner "mean" gives 1 / (traces * terms of the trace), inner
    "sum" gives 1 / (traces * norm).

    Args:
        per: "token", "trace" or "group".
        inner: "mean" or "sum" within a trace or group; None where `per` is "token".
        norm: constant that divides an inner sum; None is 1.
        denominator: "all" counts every term of the step, "kept" those left by the detached gates and by
            `missing="mask"`.
    """

    per: Literal["token", "trace", "group"] = "token"
    inner: Literal["mean", "sum"] | None = None
    norm: float | None = None
    denominator: Literal["all", "kept"] = "all"

    def __post_init__(self) -> None:
        one_of("Reduce.per", self.per, ("token", "trace", "group"))
        one_of("Reduce.denominator", self.denominator, ("all", "kept"))
        if self.per == "token":
            no_effect(self.inner is not None, "Reduce.inner", "per='token' has one mean over the step")
        else:
            one_of("Reduce.inner", self.inner, ("mean", "sum"))
        no_effect(self.norm is not None and self.inner != "sum", "Reduce.norm", "it divides an inner sum")
        if self.norm is not None and not 0 < self.norm < float("inf"):
            raise ArgumentError(f"Reduce.norm is {self.norm}. It must be positive.")


_PER_TOKEN = Reduce()


@dataclass(frozen=True)
class Needs:
    """Which logprobs an objective takes, and whether it takes a trace's current-policy ratio.

    With `trace_ratio` all branches of a trace must stand in one batch.
    """

    old: bool
    rollout: bool
    ref: bool
    trace_ratio: bool


class Evaluable(Protocol):
    """The arrays of terms, which bring their own evaluator: `tracegrad.objective.Terms`."""

    def evaluate(self, objective: Any, logprobs: Any, entropy: Any) -> Any:
        """The loss of `objective` on these terms."""
        ...


@dataclass(frozen=True)
class Objective:
    """loss = sum of scale * keep * weight * surrogate(ratio, A) + sum over penalties of coef * scale * penalty.

    An objective is called with the logprobs being trained and the other arrays of the terms, which carry the evaluator:
    `objective(logprobs, entropy, terms)`, see `tracegrad.objective`.

    Args:
        surrogate: PolicyGradient or Clip.
        ratio: the ratio of a Clip; None with PolicyGradient.
        weights: detached factors; their ratios times the surrogate's must telescope.
        gates: detached, applied in order.
        penalties: added, each with its own coefficient.
        reduce: the scale of each term.

    Raises:
        ArgumentError: if multiplied ratios do not telescope to theta/rollout, theta/old or 1, or an option has no
            effect.

    >>> from tracegrad.algebra import Clamp, Weight
    >>> tis = Weight(Ratio("old", "rollout"), shape=Clamp(0.0, 2.0))
    >>> Objective(Clip(), Ratio("theta", "old"), weights=(tis,)).needs
    Needs(old=True, rollout=True, ref=False, trace_ratio=False)
    >>> Objective(Clip(), Ratio("theta", "rollout"), weights=(tis,))  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    ...
    tracegrad.ArgumentError: theta/rollout * old/rollout does not telescope ...
    """

    surrogate: Surrogate
    ratio: Ratio | None = None
    weights: tuple[Weight, ...] = ()
    gates: tuple[Gate, ...] = ()
    penalties: tuple[Penalty, ...] = ()
    reduce: Reduce = _PER_TOKEN

    def __post_init__(self) -> None:
        if isinstance(self.surrogate, PolicyGradient):
            no_effect(self.ratio is not None, "Objective.ratio", "PolicyGradient takes no ratio")
        elif self.ratio is None or self.ratio.num != "theta" or "ref" in self.ratio:
            raise ArgumentError(
                f"Clip needs theta/old or theta/rollout, not {self.ratio}. Without theta nothing is trained."
            )
        for sign in "+0-":
            self._check_product([w.ratio for w in self.weights if sign in HOLDS[w.when]])
        no_effect(
            not self.weights and any(p.weighted for p in self.penalties), "Penalty.weighted", "there are no weights"
        )
        if self.reduce.denominator == "kept" and any(not p.gated for p in self.penalties):
            raise ArgumentError(
                "a penalty with gated=False runs over terms that denominator='kept' does not count. "
                "Use gated=True or denominator='all'."
            )

    def _check_product(self, ratios: list[Ratio]) -> None:
        if self.ratio is not None:
            ratios = [self.ratio, *ratios]
        powers: Counter[str] = Counter()
        for ratio in ratios:
            powers[ratio.num] += 1
            powers[ratio.den] -= 1
        left = {policy: power for policy, power in powers.items() if power}
        allowed = [{}, {"theta": 1, "rollout": -1}, {"theta": 1, "old": -1}]
        if isinstance(self.surrogate, PolicyGradient):
            allowed.append({"old": 1, "rollout": -1})  # the score function, at one update per batch
        if left not in allowed:
            raise ArgumentError(
                f"{' * '.join(map(str, ratios))} does not telescope to theta/rollout, theta/old or 1. "
                "The same mismatch would be corrected twice, or one that is not there. "
                "Weigh theta/old by old/rollout, or take theta/rollout without a weight."
            )

    @property
    def needs(self) -> Needs:
        """Which logprobs it takes, and whether a whole trace must stand in one batch."""
        ratios = [part.ratio for part in (*self.weights, *self.gates, *self.penalties)]
        ratios += [self.ratio] if self.ratio is not None else []
        level = self.surrogate.level.over if isinstance(self.surrogate, Clip) else "token"
        return Needs(
            old=any("old" in ratio for ratio in ratios),
            rollout=any("rollout" in ratio for ratio in ratios),
            ref=any("ref" in ratio for ratio in ratios),
            trace_ratio=level != "token",
        )

    def check_missing(self, missing: Missing) -> None:
        """Refuses a policy for missing rollout logprobs that would be a ratio of 1 in disguise.

        Raises:
            ArgumentError: if `missing` is "neutral" and rollout stands in the surrogate or in a penalty.
        """
        one_of("missing", missing, ("mask", "neutral", "refuse"))
        trained = [self.ratio, *(penalty.ratio for penalty in self.penalties)]
        if missing == "neutral" and any(ratio is not None and "rollout" in ratio for ratio in trained):
            raise ArgumentError(
                "missing='neutral' with rollout in the surrogate would assume a ratio of 1 where none is known. "
                "Use missing='mask', or an objective on theta/old, or one without a ratio (WEIGHTED_SFT)."
            )

    def __call__(self, logprobs: Any, entropy: Any, terms: Evaluable) -> Any:
        """The loss on `terms`, which bring the evaluator of their kind of array (see `tracegrad.objective.Terms`)."""
        return terms.evaluate(self, logprobs, entropy)


def with_kl(objective: Objective, coef: float) -> Objective:
    """The objective with a k3 penalty against the reference model, or without one where `coef` is 0.

    The penalty is neither gated nor weighted, as in TRL.

    >>> with_kl(Objective(PolicyGradient()), 0.04).needs.ref
    True
    """
    others = tuple(penalty for penalty in objective.penalties if penalty.ratio != Ratio("theta", "ref"))
    if coef == 0:
        return replace(objective, penalties=others)
    gated = objective.reduce.denominator == "kept"
    kl = Penalty(Ratio("theta", "ref"), "k3", coef, gated=gated, weighted=False)
    return replace(objective, penalties=(*others, kl))
