"""Detached factors of the surrogate: how much a term counts, by how likely another policy finds it.

Values only; a weight on old, rollout and ref is evaluated by `tracegrad.correction` once per step, one on the policy
being trained by `tracegrad.objective`.
"""

from __future__ import annotations

from dataclasses import dataclass

from tracegrad.algebra.ratio import HOLDS, TOKEN, Level, Ratio, When, check_reach
from tracegrad.algebra.refuse import kind_of, no_effect, one_of
from tracegrad.algebra.shape import SHAPES, Gamma, Identity, Shape
from tracegrad.errors import ArgumentError

_IDENTITY = Identity()


@dataclass(frozen=True)
class Weight:
    """A factor without gradient: shape(exp(level of log ratio)).

    Args:
        ratio: any two policies.
        level: over which terms the log-ratio is aggregated.
        shape: Clamp, Window, Gamma, Gaussian or Identity.
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
        kind_of("Weight.shape", self.shape, SHAPES)
        one_of("Weight.when", self.when, tuple(HOLDS))
        no_effect(self.level.grad != "through", "Weight.level.grad", "a weight is detached")
        check_reach("Weight", self.ratio, self.level)
        if self.normalize and self.when != "always":
            raise ArgumentError("Weight.normalize with when != 'always' has no defined mean. Use one of the two.")
        if self.normalize and not self.detached:
            raise ArgumentError(
                f"Weight.normalize on {self.ratio} needs a mean over the step, and the policy being trained sees one "
                "micro-batch at a time. The gradient would depend on how the step was cut. Take old in place of theta."
            )
        no_effect(self.absorbs and self.detached, "Weight.absorbs", "detached weights are one product already")
        if self.absorbs and not isinstance(self.shape, Gamma):
            raise ArgumentError("Weight.absorbs belongs to a Gamma shape. Use weights that multiply for the others.")

    @property
    def detached(self) -> bool:
        """True where it is known before the step."""
        return self.ratio.detached

    def __str__(self) -> str:
        log = f"log {self.ratio}{' * the weights above' if self.absorbs else ''}"
        inner = str(self.ratio) if self.level.over == "token" else f"exp({self.level} of {log})"
        normal = ", divided by its mean" if self.normalize else ""
        when = "" if self.when == "always" else f"; where {self.when}, else 1"
        return f"{self.shape}, w = {inner}{normal}{when}"
