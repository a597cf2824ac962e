"""What becomes of a ratio on its way to a weight: truncation, a window, or a smooth function of it.

Values only; bounds are ratios, so they lie around 1, and each shape refuses bounds that do not. Weights take them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import get_args

from tracegrad.algebra.refuse import around_one
from tracegrad.errors import ArgumentError

INFINITY = float("inf")


@dataclass(frozen=True)
class Identity:
    """The weight is the ratio itself."""

    def __str__(self) -> str:
        return "w"


@dataclass(frozen=True)
class Clamp:
    """The weight is the ratio, held between `low` and `high` (truncated importance sampling).

    Source: Ionides 2008, "Truncated Importance Sampling"; Yao et al. 2025 (TIS, high = 2).
    """

    low: float = 0.0
    high: float = 2.0

    def __post_init__(self) -> None:
        around_one("Clamp", self.low, self.high)

    def __str__(self) -> str:
        return f"clamp(w, {self.low:g}, {self.high:g})"


@dataclass(frozen=True)
class Window:
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

    def __str__(self) -> str:
        sign = "<" if self.strict else "<="
        return f"w if {self.low:g} {sign} w {sign} {self.high:g} else 0"


@dataclass(frozen=True)
class Gamma:
    """exp(rate) w^power exp(-rate w): 1 at w = 1, and falls to 0 on both sides.

    Source: VESPO, arXiv 2602.10693: power 2, rate 3 where A >= 0 and power 3, rate 2 where A < 0.
    """

    power: float
    rate: float

    def __post_init__(self) -> None:
        for name, value in (("power", self.power), ("rate", self.rate)):
            if not 0 < value < INFINITY:
                raise ArgumentError(f"Gamma.{name} is {value}. The weight would not be bounded. It must be positive.")

    def __str__(self) -> str:
        return f"e^{self.rate:g} w^{self.power:g} e^(-{self.rate:g} w)"


@dataclass(frozen=True)
class Gaussian:
    """exp(-(log w)^2 / (2 sigma^2)): trust in a term by its distance, whatever the sign of it; at most 1.

    Args:
        sigma: nats.

    Source: GIPO's Gaussian weight of the log-ratio.
    """

    sigma: float

    def __post_init__(self) -> None:
        if not 0 < self.sigma < INFINITY:
            raise ArgumentError(f"Gaussian.sigma is {self.sigma} nats. No weight has it. It must be positive.")

    def __str__(self) -> str:
        return f"exp(-(log w)^2 / (2 * {self.sigma:g}^2))"


Shape = Identity | Clamp | Window | Gamma | Gaussian
SHAPES = get_args(Shape)
