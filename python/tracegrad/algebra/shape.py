"""What becomes of a ratio on its way to a weight: truncation, a window, or a smooth function of it.

Bounds are ratios, so they lie around 1, and each shape refuses bounds that do not. `of` evaluates tensors, `core` is
the plain form for the core, which evaluates the same formula before the step. Weights take them.
"""

from dataclasses import dataclass
from typing import Any

from tracegrad.algebra.ratio import INFINITY
from tracegrad.algebra.refuse import around_one
from tracegrad.errors import ArgumentError


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
