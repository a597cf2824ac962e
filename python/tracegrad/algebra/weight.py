"""Detached factors of the surrogate: how much a term counts, by how likely another policy finds it.

A weight on old, rollout and ref the core evaluates once per step; one on the policy being trained is evaluated here, by
the same formula. Nothing here carries a gradient.
"""

from dataclasses import dataclass
from typing import Any

from tracegrad.algebra.part import Part, core_of
from tracegrad.algebra.ratio import HOLDS, TOKEN, Level, Ratio, When, check_reach, holds
from tracegrad.algebra.refuse import kind_of, no_effect, one_of
from tracegrad.algebra.shape import Identity, Shape
from tracegrad.algebra.view import View
from tracegrad.algebra.whole import Whole
from tracegrad.errors import ArgumentError

_IDENTITY = Identity()
_SMALLEST = 1e-8  # below it an absorbed weight has no logarithm worth the name (TRL's)


@dataclass(frozen=True)
class Weight(Part):
    """A factor without gradient: shape(exp(level of log ratio)).

    Args:
        ratio: any two policies.
        level: over which terms the log-ratio is aggregated.
        shape: Clamp, Window, Gamma, Gaussian or Identity; with theta in the ratio also a `Shape` of your own.
        when: on which sign of the advantage it applies; the factor is 1 elsewhere.
        normalize: divide by the mean over the step, counted once for each token, turn or trace of `level`.
        absorbs: the detached weights enter its level, token by token, and do not multiply the loss for themselves:
            TRL's VESPO takes theta/old times the truncated old/rollout as one ratio.

    >>> print(Weight(Ratio("old", "rollout"), Level("trace", "mean")))
    w, w = exp(mean over the trace of log old/rollout)
    """

    ratio: Ratio
    level: Level = TOKEN
    shape: Shape = _IDENTITY
    when: When = "always"
    normalize: bool = False
    absorbs: bool = False

    def __post_init__(self) -> None:
        kind_of("Weight.shape", self.shape, Shape)
        one_of("Weight.when", self.when, tuple(HOLDS))
        no_effect(self.level.grad != "through", "Weight.level.grad", "a weight is detached")
        check_reach("Weight", self.ratio, self.level)
        if self.detached:
            core_of("Weight.shape", self.shape)
        if self.normalize and self.when != "always":
            raise ArgumentError("Weight.normalize with when != 'always' has no defined mean. Use one of the two.")
        if self.normalize and not self.detached:
            raise ArgumentError(
                f"Weight.normalize on {self.ratio} needs a mean over the step, and the policy being trained sees one "
                "micro-batch at a time. The gradient would depend on how the step was cut. Take old in place of theta."
            )
        no_effect(self.absorbs and self.detached, "Weight.absorbs", "detached weights are one product already")
        if self.absorbs and not self.shape.absorbing:
            raise ArgumentError("Weight.absorbs belongs to a Gamma shape. Use weights that multiply for the others.")

    @property
    def reach(self) -> str:
        if self.normalize:
            return f"the weight '{self}' is divided by its mean over the step"
        return f"the weight '{self}' reaches over a {self.level.over}" if self.level.wide else ""

    def check(self, objective: Whole) -> None:
        nothing = self.absorbs and not any(weight.detached for weight in objective.weights)
        no_effect(nothing, "Weight.absorbs", "no weight is detached")

    def core(self) -> tuple[Any, ...]:
        """(ratio, level, (shape, first, second), when, normalize)."""
        level = self.level.core(self.level.terms == "kept")
        return (self.ratio.core(), level, core_of("Weight.shape", self.shape), self.when, self.normalize)

    def factor(self, view: View, keep: Any, absorbed: Any) -> Any:
        """shape(w) at each term, 1 where the ratio has no value or the condition does not hold."""
        level, applies = view.at(self.ratio, self.level, absorbed if self.absorbs else None, keep)
        if self.when != "always":
            applies = applies & holds(self.when, view.given("advantages", view.counted))
        return self.shape.of(level.where(applies, 0)).where(applies, 1)

    def __str__(self) -> str:
        log = f"log {self.ratio}{' * the weights above' if self.absorbs else ''}"
        inner = str(self.ratio) if self.level.over == "token" else f"exp({self.level} of {log})"
        normal = ", divided by its mean" if self.normalize else ""
        when = "" if self.when == "always" else f"; where {self.when}, else 1"
        return f"{self.shape}, w = {inner}{normal}{when}"


def weighed(weights: tuple[Weight, ...], view: View, detached: Any, keep: Any) -> Any:
    """The product of the detached weights and those on the policy being trained, at each term."""
    absorbed = None
    if any(weight.absorbs for weight in weights):
        detached, absorbed = detached.new_ones(detached.shape), detached.clamp(min=_SMALLEST)
    for weight in weights:
        if not weight.detached:
            detached = detached * weight.factor(view, keep, absorbed)
    return detached
