"""Define importance weights and the shapes that bound them: clamps, windows and smooth forms."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tracegrad._validation import check_choice, check_kind, check_ratio_bounds, refuse_without_effect
from tracegrad.errors import ArgumentError
from tracegrad.objective.component import Component, LossInputs, core_of
from tracegrad.objective.core_forms import CoreShape, CoreWeight
from tracegrad.objective.ratio import (
    CONDITION_SIGNS,
    INFINITY,
    TOKEN,
    Aggregation,
    Ratio,
    When,
    check_scope,
    condition_mask,
)

if TYPE_CHECKING:
    from tracegrad.objective.objective import Objective


class Shape:
    """Base class of functions of the ratio w.

    For your own, write a frozen subclass with `apply`; its weight needs a ratio with theta.

    >>> import torch
    >>> @dataclass(frozen=True)
    ... class SquareRoot(Shape):
    ...     def apply(self, log_ratio):
    ...         return (log_ratio / 2).exp()
    >>> weight = Weight(Ratio("theta", "old"), transform=SquareRoot())
    >>> weight.transform.apply(torch.tensor([1.0, 2.25]).log())
    tensor([1.0000, 1.5000])
    """

    can_absorb = False
    """Whether it can be used with `Weight.absorbs`."""

    def apply(self, log_ratio: Any) -> Any:
        """Return the weight of each token, given its log w, which is finite and clamped."""
        raise NotImplementedError(f"{type(self).__name__} has no apply(log_ratio)")

    def to_core(self) -> CoreShape:
        """Return its plain form for the Rust core."""
        raise NotImplementedError


@dataclass(frozen=True)
class Identity(Shape):
    """The weight is the ratio itself.

    >>> import torch
    >>> Identity().apply(torch.tensor([0.5, 1.0, 4.0]).log())
    tensor([0.5000, 1.0000, 4.0000])
    """

    def apply(self, log_ratio: Any) -> Any:
        return log_ratio.exp()

    def to_core(self) -> CoreShape:
        return CoreShape("identity")

    def __str__(self) -> str:
        return "w"


@dataclass(frozen=True)
class Truncate(Shape):
    """The weight is the ratio clamped to [low, high] (truncated importance sampling).

    Args:
        low, high: ratios.
        below_one: allows bounds below 1, so that no weight reaches 1: TRL's cispo with its default epsilon_high.

    Source: Ionides 2008, "Truncated Importance Sampling"; Yao et al. 2025 (TIS, high = 2).

    >>> import torch
    >>> Truncate(high=2.0).apply(torch.tensor([0.5, 1.0, 4.0]).log())
    tensor([0.5000, 1.0000, 2.0000])
    """

    low: float = 0.0
    high: float = 2.0
    below_one: bool = False

    def __post_init__(self) -> None:
        if not (self.below_one and 0 <= self.low <= self.high and 0 < self.high < 1):
            check_ratio_bounds("Clamp", self.low, self.high)
            if self.below_one:
                raise ArgumentError(
                    f"TG-OBJ-049: Truncate.below_one has no effect: high is {self.high:g}. Leave it out."
                )

    def apply(self, log_ratio: Any) -> Any:
        return log_ratio.exp().clamp(self.low, self.high)

    def to_core(self) -> CoreShape:
        return CoreShape("clamp", self.low, self.high)

    def __str__(self) -> str:
        return f"clamp(w, {self.low:g}, {self.high:g})"


@dataclass(frozen=True)
class MaskOutside(Shape):
    """The weight is the ratio if it is between `low` and `high`, else 0; denominators do not change.

    Args:
        low, high: ratios.
        strict: exclude the bounds themselves (SkyRL's rollout_is); by default they are included.

    Source: IcePop (Ring-1T, arXiv 2510.18855), [0.5, 5]; strict: GLM-5, arXiv 2602.15763.

    >>> import torch
    >>> MaskOutside(low=0.5, high=5.0).apply(torch.tensor([0.25, 1.0, 4.5, 8.0]).log())
    tensor([0.0000, 1.0000, 4.5000, 0.0000])
    """

    low: float = 0.5
    high: float = 5.0
    strict: bool = False

    def __post_init__(self) -> None:
        check_ratio_bounds("Window", self.low, self.high)

    def apply(self, log_ratio: Any) -> Any:
        w = log_ratio.exp()
        if self.strict:
            return w.where((w > self.low) & (w < self.high), 0)
        return w.where((w >= self.low) & (w <= self.high), 0)

    def to_core(self) -> CoreShape:
        return CoreShape("strict_window" if self.strict else "window", self.low, self.high)

    def __str__(self) -> str:
        sign = "<" if self.strict else "<="
        return f"w if {self.low:g} {sign} w {sign} {self.high:g} else 0"


@dataclass(frozen=True)
class Inverse(Shape):
    """The weight is one over the ratio, at most `high`: a token that has become likely counts less. It is not a
    correction.

    Only for a ratio with theta; the Rust core does not implement it.

    Source: ASPO, arXiv 2510.06062, for A > 0; high = 3 as its dual clip.

    >>> import torch
    >>> Inverse(high=3.0).apply(torch.tensor([0.25, 1.0, 2.0]).log())
    tensor([3.0000, 1.0000, 0.5000])
    """

    high: float = 3.0

    def __post_init__(self) -> None:
        check_ratio_bounds("Inverse", 0.0, self.high)

    def apply(self, log_ratio: Any) -> Any:
        return (-log_ratio).exp().clamp(max=self.high)

    def __str__(self) -> str:
        return f"min(1 / w, {self.high:g})"


@dataclass(frozen=True)
class Gamma(Shape):
    """exp(rate) w^power exp(-rate w): 1 at w = 1, and falls to 0 on both sides.

    Source: VESPO, arXiv 2602.10693: power 2, rate 3 where A >= 0 and power 3, rate 2 where A < 0.

    >>> import torch
    >>> # e^1.5 / 4, 1, 4 / e^3
    >>> Gamma(power=2.0, rate=3.0).apply(torch.tensor([0.5, 1.0, 2.0]).log())
    tensor([1.1204, 1.0000, 0.1991])
    """

    power: float
    rate: float

    can_absorb = True

    def __post_init__(self) -> None:
        for name, value in (("power", self.power), ("rate", self.rate)):
            if not 0 < value < INFINITY:
                raise ArgumentError(
                    f"TG-OBJ-050: Gamma.{name} is {value}. The weight would not be bounded. It must be positive."
                )

    def apply(self, log_ratio: Any) -> Any:
        return (self.rate + self.power * log_ratio - self.rate * log_ratio.exp()).exp()

    def to_core(self) -> CoreShape:
        return CoreShape("gamma", self.power, self.rate)

    def __str__(self) -> str:
        return f"e^{self.rate:g} w^{self.power:g} e^(-{self.rate:g} w)"


@dataclass(frozen=True)
class Gaussian(Shape):
    """exp(-(log w)^2 / (2 sigma^2)): a token counts less the further w is from 1, in either direction; at most 1.

    Args:
        sigma: nats.

    Source: GIPO's Gaussian weight of the log-ratio.

    >>> import torch
    >>> # The arguments are log-ratios: e^-0.5, 1, e^-0.5.
    >>> Gaussian(sigma=1.0).apply(torch.tensor([-1.0, 0.0, 1.0]))
    tensor([0.6065, 1.0000, 0.6065])
    """

    sigma: float

    def __post_init__(self) -> None:
        if not 0 < self.sigma < INFINITY:
            raise ArgumentError(
                f"TG-OBJ-051: Gaussian.sigma is {self.sigma} nats. No weight has it. It must be positive."
            )

    def apply(self, log_ratio: Any) -> Any:
        return (-log_ratio.square() / (2 * self.sigma**2)).exp()

    def to_core(self) -> CoreShape:
        return CoreShape("gaussian", self.sigma)

    def __str__(self) -> str:
        return f"exp(-(log w)^2 / (2 * {self.sigma:g}^2))"


_IDENTITY = Identity()
_SMALLEST = 1e-8  # absorbed weights are clamped to it, because their logarithm is used (TRL's value)


@dataclass(frozen=True)
class Weight(Component):
    """A factor without gradient: shape(exp(level of log ratio)).

    Args:
        ratio: any two policies.
        level: tokens over which the log-ratio is aggregated.
        transform: Truncate, MaskOutside, Gamma, Gaussian or Identity; with theta in the ratio also Inverse or your own
            `Shape`.
        when: sign of the advantage for which it applies; otherwise the factor is 1.
        normalize: divide by the mean over the step, counted once for each token, turn or trace of `level`.
        absorbs: the detached weights are part of its level, token by token, and do not multiply the loss themselves:
            TRL's VESPO treats theta/old times the truncated old/rollout as one ratio.

    >>> print(Weight(Ratio("old", "rollout"), Aggregation("trace", "mean")))
    w, w = exp(mean over the trace of log old/rollout)
    """

    ratio: Ratio
    level: Aggregation = TOKEN
    transform: Shape = _IDENTITY
    when: When = "always"
    normalize: bool = False
    absorbs: bool = False

    def __post_init__(self) -> None:
        check_kind("Weight.transform", self.transform, Shape)
        check_choice("Weight.when", self.when, tuple(CONDITION_SIGNS))
        refuse_without_effect(self.level.grad != "through", "Weight.level.grad", "a weight is detached")
        check_scope("Weight", self.ratio, self.level)
        if self.detached:
            core_of("Weight.transform", self.transform)
        if self.normalize and self.when != "always":
            raise ArgumentError(
                "TG-OBJ-052: Weight.normalize with when != 'always' has no defined mean. Use one of the two."
            )
        if self.normalize and not self.detached:
            raise ArgumentError(
                f"TG-OBJ-053: Weight.normalize on {self.ratio} needs a mean over the step, and the policy being "
                "trained is evaluated one micro-batch at a time. The gradient would depend on how the step is split. "
                "Use old instead of theta."
            )
        refuse_without_effect(
            self.absorbs and self.detached, "Weight.absorbs", "detached weights are one product already"
        )
        if self.absorbs and not self.transform.can_absorb:
            raise ArgumentError(
                "TG-OBJ-054: Weight.absorbs belongs to a Gamma shape. Use weights that multiply for the others."
            )

    @property
    def cross_trace_reason(self) -> str:
        if self.normalize:
            return f"the weight '{self}' is divided by its mean over the step"
        return f"the weight '{self}' reaches over a {self.level.over}" if self.level.spans_traces else ""

    def check(self, objective: "Objective") -> None:
        absorbs_nothing = self.absorbs and not any(weight.detached for weight in objective.weights)
        refuse_without_effect(absorbs_nothing, "Weight.absorbs", "no weight is detached")

    def to_core(self) -> CoreWeight:
        level = self.level.to_core(self.level.terms == "kept")
        shape = core_of("Weight.transform", self.transform)
        return CoreWeight(self.ratio.to_core(), level, shape, self.when, self.normalize)

    def factor(self, view: LossInputs, keep: Any, absorbed: Any) -> Any:
        """Return shape(w) at each token; 1 if the ratio has no value or the condition is not met."""
        level, applies = view.log_ratio_at(self.ratio, self.level, absorbed if self.absorbs else None, keep)
        if self.when != "always":
            applies = applies & condition_mask(self.when, view.masked_array("advantages", view.counted))
        return self.transform.apply(level.where(applies, 0)).where(applies, 1)

    def __str__(self) -> str:
        log = f"log {self.ratio}{' * the weights above' if self.absorbs else ''}"
        inner = str(self.ratio) if self.level.over == "token" else f"exp({self.level} of {log})"
        normal = ", divided by its mean" if self.normalize else ""
        when = "" if self.when == "always" else f"; where {self.when}, else 1"
        return f"{self.transform}, w = {inner}{normal}{when}"


def total_weight(weights: tuple[Weight, ...], view: LossInputs, detached: Any, keep: Any) -> Any:
    """Return the product of the detached weights and those on the policy being trained, at each token."""
    absorbed = None
    if any(weight.absorbs for weight in weights):
        detached, absorbed = detached.new_ones(detached.shape), detached.clamp(min=_SMALLEST)
    for weight in weights:
        if not weight.detached:
            detached = detached * weight.factor(view, keep, absorbed)
    return detached
