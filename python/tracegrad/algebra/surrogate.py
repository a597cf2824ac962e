"""What is minimised at each term: the surrogates, whose gradient is that of the policy.

Values only; `tracegrad.objective` evaluates them on torch tensors. r is the ratio of the objective at the surrogate's
level, A the advantage.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import get_args

from tracegrad.algebra.ratio import HOLDS, TOKEN, Level, When
from tracegrad.algebra.refuse import one_of, positive
from tracegrad.errors import ArgumentError

_TRACE_SUM = Level("trace", "sum")
_TRACE_MEAN = Level("trace", "mean")


@dataclass(frozen=True)
class PolicyGradient:
    """-A * logp: the plain policy gradient; takes no ratio (weights may).

    Args:
        when: on which sign of the advantage; elsewhere the surrogate is 0, and denominators still count the term.
    """

    when: When = "always"

    def __post_init__(self) -> None:
        one_of("PolicyGradient.when", self.when, tuple(HOLDS))

    def __str__(self) -> str:
        return "-A log theta" if self.when == "always" else f"-A log theta where {self.when}, else 0"


@dataclass(frozen=True)
class CrossEntropy:
    """-logp: imitation, whatever the advantage says; takes no ratio."""

    def __str__(self) -> str:
        return "-log theta"


@dataclass(frozen=True)
class Importance:
    """-A r: the ratio itself, without a clip.

    Args:
        level: the level of r.

    Source: Tinker's and SkyRL's importance_sampling; prime-rl's default, where gates bound it.
    """

    level: Level = TOKEN

    def __str__(self) -> str:
        return "-A r"


@dataclass(frozen=True)
class Clip:
    """max(-A r, -A clip(r, 1 - low, 1 + high)), bounded for ratios far above 1 by `dual` or `delta`.

    Args:
        low, high: distances from 1, as in verl, slime and TRL's GRPO; not absolute bounds.
        dual: for A < 0 the loss is at most -A dual (dual clip), an absolute ratio above 1; None is without.
        delta: r of the unclipped branch is at most delta, an absolute ratio above 1 (TRL); None is without.
        level: the level of r.

    Source: Schulman et al. 2017, arXiv 1707.06347, eq. 7; dual: Ye et al. 2019, arXiv 1912.09729, eq. 5; delta: TRL,
    INTELLECT-2, arXiv 2505.07291, which it equals for delta above 1 + high.
    """

    low: float = 0.2
    high: float = 0.2
    dual: float | None = None
    delta: float | None = None
    level: Level = TOKEN

    def __post_init__(self) -> None:
        for name, value in (("low", self.low), ("high", self.high)):
            if not value >= 0:
                raise ArgumentError(f"Clip.{name} is {value}. It is a distance from 1 and must not be negative.")
        if self.low > 1:
            raise ArgumentError(
                f"Clip.low is {self.low}: no ratio is below 1 - {self.low}. It is a distance from 1, at most 1."
            )
        if 0.5 <= self.low < 1 < self.high <= 1.5:
            raise ArgumentError(
                f"Clip({self.low}, {self.high}) reads like bounds of the ratio. As distances from 1 they would let it "
                f"run from {1 - self.low:g} to {1 + self.high:g}. Write Clip({1 - self.low:g}, {self.high - 1:g})."
            )
        for name, value in (("dual", self.dual), ("delta", self.delta)):
            if value is not None and not value > 1:
                raise ArgumentError(f"Clip.{name} is {value}. It is a ratio and must be above 1.")
        if self.dual is not None and self.delta is not None:
            raise ArgumentError("Clip.dual and Clip.delta bound the same branch. Give one of them.")

    def __str__(self) -> str:
        r = f"min(r, {self.delta:g})" if self.delta is not None else "r"
        text = f"max(-A {r}, -A clip(r, {1 - self.low:g}, {1 + self.high:g}))"
        return text if self.dual is None else f"{text}, at most -A * {self.dual:g} where A < 0"


@dataclass(frozen=True)
class Sigmoid:
    """-A (4 / tau) sigmoid(tau (r - 1)): a soft clip, with slope 1 at r = 1.

    Args:
        tau_pos, tau_neg: tau where A > 0 and elsewhere.
        level: the level of r.

    Source: SAPO, arXiv 2511.20347, eq. 5.
    """

    tau_pos: float = 1.0
    tau_neg: float = 1.05
    level: Level = TOKEN

    def __post_init__(self) -> None:
        positive("Sigmoid.tau_pos", self.tau_pos)
        positive("Sigmoid.tau_neg", self.tau_neg)

    def __str__(self) -> str:
        return f"-A (4 / tau) sigmoid(tau (r - 1)), tau = {self.tau_pos:g} where A > 0, else {self.tau_neg:g}"


@dataclass(frozen=True)
class GeoClip:
    """-A exp(mean over the trace of clipped log-ratios), each log-ratio clipped on the side that A would push it to.

    Args:
        low, high: bounds of the log-ratio, nats, as distances from 0.

    Source: GMPO, arXiv 2507.20673, eq. 4; bounds of 0.4.
    """

    low: float = 0.4
    high: float = 0.4

    def __post_init__(self) -> None:
        positive("GeoClip.low", self.low)
        positive("GeoClip.high", self.high)

    @property
    def level(self) -> Level:
        """The mean over the trace, with gradient through it."""
        return _TRACE_MEAN

    def __str__(self) -> str:
        held = f"held above -{self.low:g} where A < 0 and below {self.high:g} where A > 0"
        return f"-A r, each l {held}"


@dataclass(frozen=True)
class Regress:
    """(beta * sum over the trace of log-ratios - A)^2: the trace's log-ratio regressed on its advantage.

    Use with `advantage.a_star` and Reduce("trace", "mean"), which counts each trace once.

    Args:
        beta: factor of the log-ratio, in units of the reward.

    Source: A*-PO, arXiv 2505.20686, eq. 5; OAPL, arXiv 2602.19362.
    """

    beta: float = 1e-3

    def __post_init__(self) -> None:
        positive("Regress.beta", self.beta)

    @property
    def level(self) -> Level:
        """The sum over the trace, with gradient through it."""
        return _TRACE_SUM

    def __str__(self) -> str:
        return f"({self.beta:g} log r - A)^2"


Surrogate = PolicyGradient | CrossEntropy | Importance | Clip | Sigmoid | GeoClip | Regress
SURROGATES = get_args(Surrogate)
Ratioed = get_args(Importance | Clip | Sigmoid | GeoClip | Regress)
"""The surrogates that take a ratio."""
