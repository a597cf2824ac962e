"""Define importance weights and the shapes that bound them: clamps, windows and smooth forms."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tracegrad._validation import around_one, check_choice, kind_of, no_effect
from tracegrad.errors import ArgumentError
from tracegrad.objective.component import Part, View, core_of
from tracegrad.objective.ratio import HOLDS, INFINITY, TOKEN, Level, Ratio, When, check_reach, holds

if TYPE_CHECKING:
    from tracegrad.objective.objective import Objective


class Shape:
    """What becomes of w. One of your own is a frozen dataclass below this, with `of`, on a ratio with theta."""

    absorbing = False
    """Whether `Weight.absorbs` may hand it the other weights."""

    def of(self, log_ratio: Any) -> Any:
        """The weight of each term by its log w, which is finite and clamped."""
        raise NotImplementedError(f"{type(self).__name__} has no of(log_ratio)")

    def core(self) -> tuple[str, float, float]:
        """(name, first, second) for the core."""
        raise NotImplementedError


@dataclass(frozen=True)
class Identity(Shape):
    """The weight is the ratio itself."""

    def of(self, log_ratio: Any) -> Any:
        return log_ratio.exp()

    def core(self) -> tuple[str, float, float]:
        return ("identity", 0.0, 0.0)

    def __str__(self) -> str:
        return "w"


@dataclass(frozen=True)
class Clamp(Shape):
    """The weight is the ratio, held between `low` and `high` (truncated importance sampling).

    Args:
        low, high: ratios.
        below_one: bounds below 1 are meant, so that no weight reaches 1: TRL's cispo with its default epsilon_high.

    Source: Ionides 2008, "Truncated Importance Sampling"; Yao et al. 2025 (TIS, high = 2).
    """

    low: float = 0.0
    high: float = 2.0
    below_one: bool = False

    def __post_init__(self) -> None:
        if not (self.below_one and 0 <= self.low <= self.high and 0 < self.high < 1):
            around_one("Clamp", self.low, self.high)
            if self.below_one:
                raise ArgumentError(f"Clamp.below_one has no effect: high is {self.high:g}. Leave it out.")

    def of(self, log_ratio: Any) -> Any:
        return log_ratio.exp().clamp(self.low, self.high)

    def core(self) -> tuple[str, float, float]:
        return ("clamp", self.low, self.high)

    def __str__(self) -> str:
        return f"clamp(w, {self.low:g}, {self.high:g})"


@dataclass(frozen=True)
class Window(Shape):
    """The weight is the ratio where it lies between `low` and `high` and 0 elsewhere; denominators do not change.

    Args:
        low, high: ratios.
        strict: the bounds themselves are outside (SkyRL's rollout_is); inside by default.

    Source: IcePop (Ring-1T, arXiv 2510.18855), [0.5, 5]; strict: GLM-5, arXiv 2602.15763.
    """

    low: float = 0.5
    high: float = 5.0
    strict: bool = False

    def __post_init__(self) -> None:
        around_one("Window", self.low, self.high)

    def of(self, log_ratio: Any) -> Any:
        w = log_ratio.exp()
        if self.strict:
            return w.where((w > self.low) & (w < self.high), 0)
        return w.where((w >= self.low) & (w <= self.high), 0)

    def core(self) -> tuple[str, float, float]:
        return ("strict_window" if self.strict else "window", self.low, self.high)

    def __str__(self) -> str:
        sign = "<" if self.strict else "<="
        return f"w if {self.low:g} {sign} w {sign} {self.high:g} else 0"


@dataclass(frozen=True)
class Inverse(Shape):
    """The weight is one over the ratio, at most `high`: what has become likely counts less, which corrects nothing.

    On a ratio with theta; the core does not know it.

    Source: ASPO, arXiv 2510.06062, for A > 0; high = 3 as its dual clip.
    """

    high: float = 3.0

    def __post_init__(self) -> None:
        around_one("Inverse", 0.0, self.high)

    def of(self, log_ratio: Any) -> Any:
        return (-log_ratio).exp().clamp(max=self.high)

    def __str__(self) -> str:
        return f"min(1 / w, {self.high:g})"


@dataclass(frozen=True)
class Gamma(Shape):
    """exp(rate) w^power exp(-rate w): 1 at w = 1, and falls to 0 on both sides.

    Source: VESPO, arXiv 2602.10693: power 2, rate 3 where A >= 0 and power 3, rate 2 where A < 0.
    """

    power: float
    rate: float

    absorbing = True

    def __post_init__(self) -> None:
        for name, value in (("power", self.power), ("rate", self.rate)):
            if not 0 < value < INFINITY:
                raise ArgumentError(f"Gamma.{name} is {value}. The weight would not be bounded. It must be positive.")

    def of(self, log_ratio: Any) -> Any:
        return (self.rate + self.power * log_ratio - self.rate * log_ratio.exp()).exp()

    def core(self) -> tuple[str, float, float]:
        return ("gamma", self.power, self.rate)

    def __str__(self) -> str:
        return f"e^{self.rate:g} w^{self.power:g} e^(-{self.rate:g} w)"


@dataclass(frozen=True)
class Gaussian(Shape):
    """exp(-(log w)^2 / (2 sigma^2)): trust in a term by its distance, whatever the sign of it; at most 1.

    Args:
        sigma: nats.

    Source: GIPO's Gaussian weight of the log-ratio.
    """

    sigma: float

    def __post_init__(self) -> None:
        if not 0 < self.sigma < INFINITY:
            raise ArgumentError(f"Gaussian.sigma is {self.sigma} nats. No weight has it. It must be positive.")

    def of(self, log_ratio: Any) -> Any:
        return (-log_ratio.square() / (2 * self.sigma**2)).exp()

    def core(self) -> tuple[str, float, float]:
        return ("gaussian", self.sigma, 0.0)

    def __str__(self) -> str:
        return f"exp(-(log w)^2 / (2 * {self.sigma:g}^2))"


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
        check_choice("Weight.when", self.when, tuple(HOLDS))
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

    def check(self, objective: "Objective") -> None:
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
