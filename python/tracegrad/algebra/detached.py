"""What carries no gradient: ratios, the levels they are aggregated at, gates and weights.

Values only; `tracegrad.correction` evaluates them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from tracegrad.algebra.refuse import no_effect, one_of, rising
from tracegrad.errors import ArgumentError

Policy = Literal["theta", "old", "rollout", "ref"]
When = Literal["always", "A>0", "A>=0", "A<0", "A<=0"]

POLICIES = ("theta", "old", "rollout", "ref")
HOLDS = {"always": "+0-", "A>0": "+", "A>=0": "+0", "A<0": "-", "A<=0": "0-"}
"""Signs of the advantage on which each condition holds."""


@dataclass(frozen=True)
class Ratio:
    """The probability ratio num / den of one sampled token under two policies.

    Args:
        num: "theta" (being trained), "old" (proximal), "rollout" (recorded) or "ref".
        den: the same.

    >>> str(Ratio("old", "rollout"))
    'old/rollout'
    """

    num: Policy
    den: Policy

    def __post_init__(self) -> None:
        one_of("Ratio.num", self.num, POLICIES)
        one_of("Ratio.den", self.den, POLICIES)
        if self.num == self.den:
            raise ArgumentError(f"the ratio {self} is always 1. Name two different policies.")

    def __str__(self) -> str:
        return f"{self.num}/{self.den}"

    def __contains__(self, policy: object) -> bool:
        return policy in (self.num, self.den)


@dataclass(frozen=True)
class Level:
    """Over which terms a log-ratio is aggregated before it is exponentiated and handed back to each of them.

    A trace is what papers call a sequence, all its branches together; a turn is one generation of it. The product of
    the token ratios is `Level("trace", "sum")`, their geometric mean `Level("trace", "mean")`.

    Args:
        over: "token", "turn" or "trace".
        agg: "sum", "mean" or "max"; None where `over` is "token".
        grad: "through" the aggregate, or only through the term's own "token" (GSPO-token); read in a surrogate only.
        terms: "all" terms whose logprobs are known, or those still "kept" by the gates.
    """

    over: Literal["token", "turn", "trace"] = "token"
    agg: Literal["sum", "mean", "max"] | None = None
    grad: Literal["through", "token"] = "through"
    terms: Literal["all", "kept"] = "all"

    def __post_init__(self) -> None:
        one_of("Level.over", self.over, ("token", "turn", "trace"))
        one_of("Level.grad", self.grad, ("through", "token"))
        one_of("Level.terms", self.terms, ("all", "kept"))
        if self.over == "token":
            no_effect(self.agg is not None, "Level.agg", "a token is not aggregated")
            no_effect(self.grad != "through", "Level.grad", "a token's gradient goes through itself")
            no_effect(self.terms != "all", "Level.terms", "a token is not aggregated")
        else:
            one_of("Level.agg", self.agg, ("sum", "mean", "max"))

    @property
    def detached(self) -> bool:
        """True where nothing is said about gradients, as a weight or a gate needs it."""
        return self.grad == "through"


TOKEN = Level()
"""Each term alone."""


@dataclass(frozen=True)
class Identity:
    """The weight is the ratio itself."""

    @property
    def bounds(self) -> tuple[str, float, float]:
        """Name and bounds, as the core takes them."""
        return ("identity", 0.0, float("inf"))


@dataclass(frozen=True)
class Clamp:
    """The weight is the ratio, held between `low` and `high` (truncated importance sampling).

    Source: Ionides 2008, "Truncated Importance Sampling"; Yao et al. 2025 (TIS, high = 2).
    """

    low: float = 0.0
    high: float = 2.0

    def __post_init__(self) -> None:
        rising("Clamp", self.low, self.high)

    @property
    def bounds(self) -> tuple[str, float, float]:
        """Name and bounds, as the core takes them."""
        return ("clamp", self.low, self.high)


@dataclass(frozen=True)
class Window:
    """The weight is the ratio where it lies in [low, high] and 0 elsewhere; denominators do not change.

    Source: IcePop (Ring-1T, arXiv 2510.18855), [0.5, 5].
    """

    low: float = 0.5
    high: float = 5.0

    def __post_init__(self) -> None:
        rising("Window", self.low, self.high)

    @property
    def bounds(self) -> tuple[str, float, float]:
        """Name and bounds, as the core takes them."""
        return ("window", self.low, self.high)


Shape = Identity | Clamp | Window
_IDENTITY = Identity()


@dataclass(frozen=True)
class Weight:
    """A detached factor of the surrogate: shape(exp(level of log ratio)).

    Args:
        ratio: old/rollout.
        level: over which terms the log-ratio is aggregated.
        shape: Clamp, Window or Identity.
        when: on which sign of the advantage it applies; the factor is 1 elsewhere.
        normalize: divide by the mean over the step, counted once for each token, turn or trace of `level`.
    """

    ratio: Ratio
    level: Level = TOKEN
    shape: Shape = _IDENTITY
    when: When = "always"
    normalize: bool = False

    def __post_init__(self) -> None:
        one_of("Weight.when", self.when, tuple(HOLDS))
        _detached("Weight", self.ratio)
        no_effect(not self.level.detached, "Weight.level.grad", "a weight is detached")
        if self.normalize and self.when != "always":
            raise ArgumentError("Weight.normalize with when != 'always' has no defined mean. Use one of the two.")


@dataclass(frozen=True)
class Gate:
    """Keeps a term iff low <= stat <= high, bounds included; a dropped term has no loss and no gradient.

    With l = log num - log den: ratio = exp(l), k1 = l, k2 = l^2 / 2, k3 = exp(l) - 1 - l. A level aggregates l before
    the ratio is exponentiated, and k1, k2, k3 as they are. (verl's k1 is -l, so its bounds are the inverse of these.)

    Args:
        ratio: old/rollout.
        stat: "ratio", "k1", "k2" or "k3".
        level: over which terms the statistic is taken; which of them, `over` says.
        low, high: bounds in the unit of `stat`; None is unbounded.
        when: on which sign of the advantage it can drop a term.
        scope: what falls with a term that fails: None is the level itself; "trace" with a token level is a veto.
        over: the statistic is of "all" terms whose logprobs are known, or of those "kept" by the gates before.
    """

    ratio: Ratio
    stat: Literal["ratio", "k1", "k2", "k3"] = "ratio"
    level: Level = TOKEN
    low: float | None = None
    high: float | None = None
    when: When = "always"
    scope: Literal["turn", "trace"] | None = None
    over: Literal["all", "kept"] = "all"

    def __post_init__(self) -> None:
        one_of("Gate.stat", self.stat, ("ratio", "k1", "k2", "k3"))
        one_of("Gate.when", self.when, tuple(HOLDS))
        one_of("Gate.scope", self.scope, ("turn", "trace", None))
        one_of("Gate.over", self.over, ("all", "kept"))
        _detached("Gate", self.ratio)
        no_effect(not self.level.detached, "Gate.level.grad", "a gate is detached")
        no_effect(self.level.terms != "all", "Gate.level.terms", "Gate.over says which terms are counted")
        no_effect(self.over == "kept" and self.level.over == "token", "Gate.over", "a token is not aggregated")
        wider = {None: True, "turn": self.level.over == "token", "trace": self.level.over in ("token", "turn")}
        no_effect(not wider[self.scope], "Gate.scope", f"the level is the {self.level.over} already")
        if self.low is None and self.high is None:
            raise ArgumentError("a Gate without low and high keeps everything. Give at least one bound.")
        rising(
            "Gate", -float("inf") if self.low is None else self.low, float("inf") if self.high is None else self.high
        )


def _detached(name: str, ratio: Ratio) -> None:
    if ratio != Ratio("old", "rollout"):
        raise ArgumentError(
            f"{name} has the ratio {ratio}. What is detached takes old/rollout; theta is for the surrogate."
        )
