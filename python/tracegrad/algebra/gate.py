"""What drops terms: bounds on a statistic of a ratio, and selectors that look at all terms together.

Gates that do not see the policy being trained the core evaluates once per step; the others are evaluated here, by the
same formulas. Nothing here carries a gradient, and nothing waits for the device but the draw of `DropCovariance`.

To add a statistic: its formula in `ratio.KINDS`, its name in `Stat` and its words in `Gate` here; the same in Rust in
`ratio/plan.rs`, `ratio/stat.rs` and, by name, `rust/py/src/ratio.rs`; bounds in tests/test_twins.py, which holds both
evaluators equal. examples/extending/gate.patch is one. A gate of another shape is a class below `AnyGate`: with theta
in its ratio `keeps` is all it needs. Without theta it also needs a `core`, which gives the values of a kind that the
core has: those of a `Gate` or a `Budget`. A new kind is a variant of `AnyGate` in `ratio/plan.rs`, its arm in
`ratio/block.rs`, and a variant of `PlainGate` in `rust/py/src/ratio.rs`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

from tracegrad.algebra.part import Part
from tracegrad.algebra.ratio import HOLDS, INFINITY, KINDS, OVER, TOKEN, Level, Ratio, When, bounded, check_reach, holds
from tracegrad.algebra.refuse import around, around_one, no_effect, one_of, positive, rising
from tracegrad.algebra.view import View
from tracegrad.errors import ArgumentError

Stat = Literal["ratio", "k1", "k2", "k3", "abs", "square", "dprob", "binary_kl"]

STATS: tuple[str, ...] = get_args(Stat)
_NEVER_NEGATIVE = ("k2", "k3", "abs", "square")
_KL_EPSILON = 1e-8  # verl's, where a probability is 1


class AnyGate(Part):
    """What drops terms. One of your own is a frozen dataclass below this, with `keeps`."""

    def keeps(self, view: View, keep: Any) -> Any:
        """`keep` without the terms that this gate drops; asked only of gates that are not detached.

        A term whose logprob is missing is not dropped: look at those in `view.has(ratio) & view.present` alone.
        """
        raise NotImplementedError(f"{type(self).__name__} has no keeps(view, keep)")


@dataclass(frozen=True)
class Gate(AnyGate):
    """Keeps a term iff low <= stat <= high, bounds included; a dropped term has no loss and no gradient.

    With l = log num - log den, p and q the two probabilities: ratio = exp(l), k1 = l, k2 = l^2 / 2,
    k3 = exp(l) - 1 - l, abs = |l|, square = l^2, dprob = p - q, binary_kl = the KL of (q, 1 - q) from (p, 1 - p) with
    the sign of p - q. A level aggregates l before the ratio is exponentiated, and the others as they are. (verl's k1 is
    -l, so its bounds are the inverse of these.)

    Args:
        ratio: any two policies.
        stat: one of the above.
        level: over which terms the statistic is taken; which of them, `terms` says.
        low, high: bounds in the unit of `stat`; None is unbounded.
        when: on which sign of the advantage it can drop a term: "always", "A>0", "A>=0", "A<0" or "A<=0".
        drops: what falls with a term that fails: None is the level itself; "trace" with a token level is a veto.
        terms: the statistic is of "all" terms whose logprobs are known, or of those "kept" by the gates before.

    >>> print(Gate(Ratio("old", "rollout"), low=1e-4, drops="trace"))
    drop the trace unless 0.0001 <= ratio(old/rollout) of each token
    >>> print(Gate(Ratio("old", "rollout"), "abs", high=2.0, when="A<0"))
    drop the token where A<0 unless abs(old/rollout) of each token <= 2
    """

    ratio: Ratio
    stat: Stat = "ratio"
    level: Level = TOKEN
    low: float | None = None
    high: float | None = None
    when: When = "always"
    drops: Literal["turn", "trace", "group"] | None = None
    terms: Literal["all", "kept"] = "all"

    def __post_init__(self) -> None:
        one_of("Gate.stat", self.stat, STATS)
        one_of("Gate.when", self.when, tuple(HOLDS))
        one_of("Gate.drops", self.drops, ("turn", "trace", "group", None))
        one_of("Gate.terms", self.terms, ("all", "kept"))
        no_effect(self.level.grad != "through", "Gate.level.grad", "a gate is detached")
        no_effect(self.level.blend is not None, "Gate.level.blend", "a gate looks at one level")
        no_effect(self.level.terms != "all", "Gate.level.terms", "Gate.terms says which terms are counted")
        no_effect(self.terms == "kept" and self.level.over == "token", "Gate.terms", "a token is not aggregated")
        wider = self.drops is None or OVER.index(self.drops) > OVER.index(self.level.over)
        no_effect(not wider, "Gate.drops", f"the level is the {self.level.over} already")
        check_reach("Gate", self.ratio, self.level)
        if self.drops == "group" and not self.detached:
            raise ArgumentError(
                "Gate.drops is 'group' on a ratio of the policy being trained. The traces of a group stand in several "
                "micro-batches. Take drops='trace', or old in place of theta."
            )
        self._check_bounds()

    def _check_bounds(self) -> None:
        if self.low is None and self.high is None:
            raise ArgumentError("a Gate without low and high keeps everything. Give at least one bound.")
        low, high = self.bounds
        if self.stat == "ratio":
            around_one("Gate", max(low, 0.0) if self.low is None else low, high)
        elif self.stat in _NEVER_NEGATIVE:
            rising("Gate", low, high)
            no_effect(self.low is not None, "Gate.low", f"{self.stat} is never negative")
            positive("Gate.high", high, f"{self.stat} is 0 where the policies agree") if high <= 0 else None
        else:
            around("Gate", low, high, 0.0, f"{self.stat} is a difference: write -0.2 and 0.2.")

    @property
    def bounds(self) -> tuple[float, float]:
        """low and high, infinite where None."""
        return (-INFINITY if self.low is None else self.low, INFINITY if self.high is None else self.high)

    @property
    def reach(self) -> str:
        wide = self.level.over if self.level.wide else "group" if self.drops == "group" else ""
        return wide and f"'{self}' reaches over a {wide}"

    def ratios(self) -> Sequence[tuple[Ratio, Level]]:
        return [(self.ratio, Level(self.drops, "max") if self.drops else self.level)]

    def core(self) -> tuple[Any, ...]:
        """(ratio, stat, level, low, high, when, drops)."""
        level = self.level.core(self.terms == "kept")
        return (self.ratio.core(), self.stat, level, *self.bounds, self.when, self.drops or self.level.over)

    def keeps(self, view: View, keep: Any) -> Any:
        has = view.has(self.ratio)
        inside = has & view.present
        values = self._stat(view, has)
        values = self.level.of(values, view, inside & keep if self.terms == "kept" else inside)
        if self.stat == "ratio":
            values = bounded(values).exp()
        low, high = self.bounds
        failed = ((values < low) | (values > high)) & (inside if self.level.over == "token" else view.counted)
        if self.when != "always":
            failed = failed & holds(self.when, view.given("advantages", view.counted))
        if self.drops is not None:
            failed = Level(self.drops, "max").of(failed.to(values.dtype), view, view.counted) > 0
        return keep & ~failed

    def _stat(self, view: View, has: Any) -> Any:
        """The statistic of each term; for "ratio" its logarithm, which is what levels aggregate."""
        log_ratio = view.between(self.ratio, has)
        if self.stat not in ("dprob", "binary_kl"):
            return KINDS["k1" if self.stat == "ratio" else self.stat](log_ratio)
        p, q = (view.log(policy, has).clamp(max=0).exp() for policy in (self.ratio.num, self.ratio.den))
        if self.stat == "dprob":
            return p - q
        rest = (1 - q) * ((1 - q + _KL_EPSILON) / (1 - p + _KL_EPSILON)).log()
        return (p - q).sign() * (rest - q * log_ratio)

    def __str__(self) -> str:
        low = "" if self.low is None else f"{self.low:g} <= "
        high = "" if self.high is None else f" <= {self.high:g}"
        kept = " over kept terms" if self.terms == "kept" else ""
        inner = f"{self.stat}({self.ratio}) of each token"
        if self.level.over != "token":
            inner = f"{self.level} of {self.stat}({self.ratio}){kept}"
            if self.stat == "ratio":
                inner = f"exp({self.level} of log {self.ratio}{kept})"
        when = "" if self.when == "always" else f" where {self.when}"
        return f"drop the {self.drops or self.level.over}{when} unless {low}{inner}{high}"


@dataclass(frozen=True)
class Budget(AnyGate):
    """Keeps the terms with the smallest stat, as many as leave its mean over the step at most `mean`; at least one.

    Terms of equal stat stand or fall together.

    Args:
        ratio: two policies, neither of them being trained.
        stat: "square" (M2PO), "abs", "k2" or "k3".
        mean: what the mean over the kept terms may be.
        terms: "all" terms whose logprobs are known, or those "kept" by the gates before.
        quadrants: "all", or the two "active" ones, which an update moves further away: A > 0 with a ratio above 1, and
            A < 0 with a ratio below 1. Terms outside these are neither counted in the mean nor dropped.

    Source: M2PO, arXiv 2510.01161, mean (log ratio)^2 <= 0.04: its final version (ICLR 2026, Algorithm 1) and the
    authors' code take the active quadrants, its first version and AReaL all.

    >>> print(Budget(Ratio("old", "rollout"), quadrants="active"))
    keep the terms with the smallest square(old/rollout) in the active quadrants whose mean is at most 0.04
    """

    ratio: Ratio
    stat: Literal["square", "abs", "k2", "k3"] = "square"
    mean: float = 0.04
    terms: Literal["all", "kept"] = "all"
    quadrants: Literal["all", "active"] = "all"

    def __post_init__(self) -> None:
        one_of("Budget.stat", self.stat, ("square", "abs", "k2", "k3"))
        one_of("Budget.terms", self.terms, ("all", "kept"))
        one_of("Budget.quadrants", self.quadrants, ("all", "active"))
        positive("Budget.mean", self.mean)
        if not self.ratio.detached:
            raise ArgumentError(
                f"Budget on {self.ratio}: the budget is of the whole step, and the policy being trained sees one "
                "micro-batch at a time. Take old in place of theta."
            )

    @property
    def reach(self) -> str:
        return f"'{self}' is a budget of the whole step"

    def core(self) -> tuple[Any, ...]:
        """(ratio, stat, mean, kept, active)."""
        return (self.ratio.core(), self.stat, self.mean, self.terms == "kept", self.quadrants == "active")

    def __str__(self) -> str:
        where = " in the active quadrants" if self.quadrants == "active" else ""
        return f"keep the terms with the smallest {self.stat}({self.ratio}){where} whose mean is at most {self.mean:g}"
