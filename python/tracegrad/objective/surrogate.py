"""Define the surrogate losses: PPO's clip, policy gradient, regression, cross entropy and others.

`FutureClip` (FIPO) and `GeoClip` (GMPO) read all tokens of a trace.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from tracegrad._validation import check_choice, check_kind, check_positive, check_ratio_bounds, refuse_without_effect
from tracegrad.errors import ArgumentError
from tracegrad.objective.component import LossInputs
from tracegrad.objective.ratio import (
    CONDITION_SIGNS,
    TOKEN,
    Aggregation,
    When,
    clamp_log_ratio,
    condition_mask,
    discounted_sum,
)
from tracegrad.objective.rejection import TopEntropy

if TYPE_CHECKING:
    from tracegrad.objective.objective import Objective


Locality = Literal["term", "turn", "trace", "batch"]


def _check_promises(name: str, locality: Locality, reads: tuple[str, ...]) -> None:
    check_choice(f"{name}.locality", locality, ("term", "turn", "trace", "batch"))
    for array in reads:
        check_choice(f"{name}.reads", array, ("old", "rollout", "ref", "entropy"))


class Surrogate:
    """Base class of losses at each token. For your own, write a frozen subclass with `loss`.

    You declare its properties in the class statement, `class Mine(Surrogate, locality="term")`. Each default is the
    safe choice, also for a subclass of `Clip`.

    Promises:
        locality: what it reads in addition to a token's own arrays and its ratio: nothing ("term"), the other tokens of
            its "turn" or "trace", or all tokens that are evaluated together ("batch": how a step is split changes its
            gradient).
        times_advantage: it is A times something, so that a token with A = 0 has no gradient.
        reads: further arrays: "old", "rollout", "ref" or "entropy".
        ratio: False if it does not use a ratio, True if it needs one, None for either.

    >>> import torch
    >>> from tracegrad.objective import Objective, Ratio, padded_loss
    >>> @dataclass(frozen=True)
    ... class Squared(Surrogate, locality="term", ratio=True):
    ...     def loss(self, view):
    ...         return (view.log_ratio - view.advantages).square()
    >>> step = {"mask": torch.tensor([[True, True]]), "advantages": torch.tensor([[1.0, -1.0]])}
    >>> # Log-ratios of 0.5.
    >>> logprobs, old = torch.tensor([[-1.0, -1.0]]), torch.tensor([[-1.5, -1.5]])
    >>> objective = Objective(Squared(), Ratio("theta", "old"))
    >>> # (0.5 - 1)^2 and (0.5 + 1)^2
    >>> padded_loss(objective, logprobs, old=old, **step).per_term.surrogate
    tensor([[0.2500, 2.2500]])
    """

    level: Aggregation = TOKEN
    """The level of its ratio."""
    locality: Locality = "batch"
    times_advantage: bool = False
    reads: tuple[str, ...] = ()
    takes_ratio: bool | None = None
    takes_entropy: bool = False
    """Whether it reads the entropy without a gradient. If it needs a gradient, the entropy is in `reads`."""
    clips: bool = False
    """Whether it has a bound beyond which a token has no gradient: it defines `clip_mask`."""
    transforms_token_log_ratios: bool = False
    """Whether its formula changes the log-ratios of tokens before its level aggregates them."""

    def __init_subclass__(
        cls,
        locality: Locality = "batch",
        times_advantage: bool = False,
        reads: tuple[str, ...] = (),
        ratio: bool | None = None,
        **more: Any,
    ) -> None:
        super().__init_subclass__(**more)
        _check_promises(cls.__name__, locality, reads)
        cls.locality, cls.times_advantage, cls.reads, cls.takes_ratio = locality, times_advantage, reads, ratio
        cls.clips, cls.transforms_token_log_ratios = (
            cls.clip_mask is not Surrogate.clip_mask,
            cls.log_ratio is not Surrogate.log_ratio,
        )

    @property
    def bounds(self) -> tuple[float, float] | None:
        """The range of ratios that its clip leaves unchanged, for metrics; None without a clip of the ratio."""
        return None

    def loss(self, view: LossInputs) -> Any:
        """Return the loss at each token, to be minimised. Values outside `view.keep` are not read."""
        raise NotImplementedError(f"{type(self).__name__} has no loss(view)")

    def log_ratio(self, view: LossInputs) -> Any:
        """Return log r at its level, with gradient."""
        inside = view.level_terms(self.level)
        return self.level.apply(view.log_difference(view.pair, inside), view, inside)

    def clip_mask(self, view: LossInputs) -> Any:
        """Return bool: tokens whose gradient the clip removed."""
        return view.keep & False

    def check(self, objective: "Objective") -> None:
        """Raise for an objective that it cannot be part of."""


@dataclass(frozen=True, repr=False)
class Function(Surrogate):
    """Wraps your own function `loss(view) -> per_term`: `Objective(function, ratio)` makes one.

    Args:
        function: must be importable from its module by name, so that a resumed run and other processes find the same
            one.
        locality, times_advantage, reads: as in `Surrogate`.

    >>> def squared(view):
    ...     return (view.log_ratio - view.advantages).square()
    >>> print(Function(squared, "term"))
    squared(view)
    """

    function: Callable[[LossInputs], Any]
    locality: Locality = "batch"
    times_advantage: bool = False
    reads: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        _check_promises("Function", self.locality, self.reads)

    def loss(self, view: LossInputs) -> Any:
        return self.function(view)

    def __repr__(self) -> str:
        promises = ", ".join(map(repr, (self.locality, self.times_advantage, self.reads)))
        return f"Function({getattr(self.function, '__module__', '')}.{self._name}, {promises})"

    def __str__(self) -> str:
        return f"{self._name}(view)"

    @property
    def _name(self) -> str:
        return getattr(self.function, "__qualname__", type(self.function).__name__)


@dataclass(frozen=True)
class PolicyGradient(Surrogate, locality="term", times_advantage=True, ratio=False):
    """-A * logp: the plain policy gradient, without a ratio (weights may have one).

    Args:
        when: sign of the advantage for which it applies. Otherwise the surrogate is 0, and denominators still count the
            token.

    >>> import torch
    >>> from tracegrad.objective import Objective, padded_loss
    >>> step = {"mask": torch.tensor([[True, True]]), "advantages": torch.tensor([[0.5, -1.0]])}
    >>> logprobs = torch.tensor([[-1.0, -2.0]])
    >>> # -0.5 * -1 and 1 * -2
    >>> padded_loss(Objective(PolicyGradient()), logprobs, **step).per_term.surrogate
    tensor([[ 0.5000, -2.0000]])
    """

    when: When = "always"

    def __post_init__(self) -> None:
        check_choice("PolicyGradient.when", self.when, tuple(CONDITION_SIGNS))

    def loss(self, view: LossInputs) -> Any:
        return -view.advantages.where(condition_mask(self.when, view.advantages), 0) * view.logprobs

    def __str__(self) -> str:
        return "-A log theta" if self.when == "always" else f"-A log theta where {self.when}, else 0"


@dataclass(frozen=True)
class CrossEntropy(Surrogate, locality="term", ratio=False):
    """-logp: imitation, whatever the advantage, without a ratio.

    >>> import torch
    >>> from tracegrad.objective import Objective, padded_loss
    >>> step = {"mask": torch.tensor([[True, True]]), "advantages": torch.tensor([-1.0])}
    >>> # (1 + 2) / 2 tokens
    >>> padded_loss(Objective(CrossEntropy()), torch.tensor([[-1.0, -2.0]]), **step).loss
    tensor(1.5000)
    """

    def check(self, objective: "Objective") -> None:
        refuse_without_effect(bool(objective.shifts), "Objective.shifts", "A is not read")

    def loss(self, view: LossInputs) -> Any:
        return -view.logprobs

    def __str__(self) -> str:
        return "-log theta"


@dataclass(frozen=True)
class Importance(Surrogate, locality="term", times_advantage=True, ratio=True):
    """-A r: the ratio itself, without a clip.

    Args:
        level: the level of r.

    Source: Tinker's and SkyRL's importance_sampling; prime-rl's default, where rejections bound it.

    >>> import torch
    >>> from tracegrad.objective import Objective, Ratio, padded_loss
    >>> step = {"mask": torch.tensor([[True, True]]), "advantages": torch.tensor([2.0])}
    >>> # Ratios of 1.5 and 0.75.
    >>> logprobs, old = torch.tensor([[0.6, 0.3]]).log(), torch.tensor([[0.4, 0.4]]).log()
    >>> padded_loss(Objective(Importance(), Ratio("theta", "old")), logprobs, old=old, **step).per_term.surrogate
    tensor([[-3.0000, -1.5000]])
    """

    level: Aggregation = TOKEN

    def loss(self, view: LossInputs) -> Any:
        return -view.advantages * view.ratio

    def __str__(self) -> str:
        return "-A r"


@dataclass(frozen=True)
class Clip(Surrogate, locality="term", times_advantage=True, ratio=True):
    """max(-A r, -A clip(r, 1 - low, 1 + high)), bounded for ratios far above 1 by `dual` or `delta`.

    Args:
        low, high: distances from 1, as in verl, slime and TRL's GRPO; not absolute bounds.
        dual: for A < 0 the loss is at most -A dual (dual clip), an absolute ratio above 1; None means no bound.
        delta: r of the unclipped branch is at most delta, an absolute ratio above 1 (TRL); None means no bound.
        level: the level of r.

    Source: Schulman et al. 2017, arXiv 1707.06347, eq. 7; dual: Ye et al. 2019, arXiv 1912.09729, eq. 5; delta: TRL,
    and INTELLECT-2, arXiv 2505.07291, which it equals for delta above 1 + high.

    >>> import torch
    >>> from tracegrad.objective import Objective, Ratio, padded_loss
    >>> step = {"mask": torch.tensor([[True, True]]), "advantages": torch.tensor([1.0])}
    >>> # Ratios of 1.5 and 0.75.
    >>> logprobs, old = torch.tensor([[0.6, 0.3]]).log(), torch.tensor([[0.4, 0.4]]).log()
    >>> tokens = padded_loss(Objective(Clip(), Ratio("theta", "old")), logprobs, old=old, **step).per_term
    >>> tokens.surrogate, tokens.clipped  # -min(1.5, 1.2) and -min(0.75, 0.8)
    (tensor([[-1.2000, -0.7500]]), tensor([[ True, False]]))
    """

    low: float = 0.2
    high: float = 0.2
    dual: float | None = None
    delta: float | None = None
    level: Aggregation = TOKEN

    def __post_init__(self) -> None:
        for name, value in (("low", self.low), ("high", self.high)):
            if not value >= 0:
                raise ArgumentError(
                    f"TG-OBJ-037: Clip.{name} is {value}. It is a distance from 1 and must not be negative."
                )
        if self.low > 1:
            raise ArgumentError(
                f"TG-OBJ-038: Clip.low is {self.low}: no ratio is below 1 - {self.low}. It is a distance from "
                f"1, at most 1."
            )
        if 0.5 <= self.low < 1 < self.high <= 1.5:
            raise ArgumentError(
                f"TG-OBJ-039: Clip({self.low}, {self.high}) reads like bounds of the ratio. As distances from 1 they "
                f"would let it run from {1 - self.low:g} to {1 + self.high:g}. Write Clip({1 - self.low:g}, "
                f"{self.high - 1:g})."
            )
        for name, value in (("dual", self.dual), ("delta", self.delta)):
            if value is not None and not value > 1:
                raise ArgumentError(f"TG-OBJ-040: Clip.{name} is {value}. It is a ratio and must be above 1.")
        if self.dual is not None and self.delta is not None:
            raise ArgumentError("TG-OBJ-041: Clip.dual and Clip.delta bound the same branch. Give one of them.")

    @property
    def bounds(self) -> tuple[float, float]:
        """1 - low and 1 + high."""
        return 1 - self.low, 1 + self.high

    def loss(self, view: LossInputs) -> Any:
        a, r, (low, high) = view.advantages, view.ratio, self.bounds
        unclipped = r if self.delta is None else r.clamp(max=self.delta)
        value = (-a * unclipped).maximum(-a * r.clamp(low, high))
        return value if self.dual is None else value.minimum(-a * self.dual).where(a < 0, value)

    def clip_mask(self, view: LossInputs) -> Any:
        a, r, (low, high) = view.advantages, view.ratio, self.bounds
        above = high if self.delta is None else min(self.delta, high)
        outside = ((a > 0) & (r > above)) | ((a < 0) & (r < low))
        for bound in (self.dual, None if self.delta is None else max(self.delta, high)):
            outside = outside if bound is None else outside | ((a < 0) & (r > bound))
        return outside

    def __str__(self) -> str:
        r = f"min(r, {self.delta:g})" if self.delta is not None else "r"
        text = f"max(-A {r}, -A clip(r, {1 - self.low:g}, {1 + self.high:g}))"
        return text if self.dual is None else f"{text}, at most -A * {self.dual:g} where A < 0"


@dataclass(frozen=True)
class Sigmoid(Surrogate, locality="term", times_advantage=True, ratio=True):
    """-A (4 / tau) sigmoid(tau (r - 1)): a soft clip, with slope 1 at r = 1.

    Args:
        tau_pos, tau_neg: tau for A > 0, and for other tokens.
        level: the level of r.

    Source: SAPO, arXiv 2511.20347, eq. 5.

    >>> import torch
    >>> from tracegrad.objective import Objective, Ratio, padded_loss
    >>> step = {"mask": torch.tensor([[True, True]]), "advantages": torch.tensor([1.0])}
    >>> # Ratios of 1 and 3.
    >>> logprobs, old = torch.tensor([[0.2, 0.6]]).log(), torch.tensor([[0.2, 0.2]]).log()
    >>> objective = Objective(Sigmoid(), Ratio("theta", "old"))
    >>> # -4 sigmoid(0) and -4 sigmoid(2)
    >>> padded_loss(objective, logprobs, old=old, **step).per_term.surrogate
    tensor([[-2.0000, -3.5232]])
    """

    tau_pos: float = 1.0
    tau_neg: float = 1.05
    level: Aggregation = TOKEN

    def __post_init__(self) -> None:
        check_positive("Sigmoid.tau_pos", self.tau_pos)
        check_positive("Sigmoid.tau_neg", self.tau_neg)

    def loss(self, view: LossInputs) -> Any:
        a, r = view.advantages, view.ratio
        tau = r.new_full(r.shape, self.tau_neg).masked_fill(a > 0, self.tau_pos)
        return -a * (tau * (r - 1)).sigmoid() * 4 / tau

    def __str__(self) -> str:
        return f"-A (4 / tau) sigmoid(tau (r - 1)), tau = {self.tau_pos:g} where A > 0, else {self.tau_neg:g}"


@dataclass(frozen=True)
class Regression(Surrogate, locality="term", ratio=True):
    """(beta * sum over the trace of log-ratios - A)^2: the trace's log-ratio regressed on its advantage.

    Use with `advantage.a_star` and Reduce("trace", "mean"), which counts each trace once.

    Args:
        beta: factor of the log-ratio, in units of the reward.

    Source: A*-PO, arXiv 2505.20686, eq. 5; OAPL, arXiv 2602.19362.

    >>> import torch
    >>> from tracegrad.objective import Objective, Ratio, Reduce, padded_loss
    >>> objective = Objective(Regression(beta=0.5), Ratio("theta", "old"), reduce=Reduce("trace", "mean"))
    >>> step = {"mask": torch.tensor([[True, True]]), "advantages": torch.tensor([1.0])}
    >>> logprobs, old = torch.tensor([[-0.5, -0.5]]), torch.tensor([[-1.0, -1.0]])
    >>> padded_loss(objective, logprobs, old=old, **step).loss  # (0.5 * (0.5 + 0.5) - 1)^2
    tensor(0.2500)
    """

    beta: float = 1e-3

    level = Aggregation("trace", "sum")

    def __post_init__(self) -> None:
        check_positive("Regression.beta", self.beta)

    def check(self, objective: "Objective") -> None:
        if objective.weights:
            raise ArgumentError("TG-OBJ-042: Regress fits a residual, which no weight corrects. Leave the weights out.")

    def loss(self, view: LossInputs) -> Any:
        return (self.beta * view.log_ratio - view.advantages).square()

    def __str__(self) -> str:
        return f"({self.beta:g} log r - A)^2"


@dataclass(frozen=True)
class FutureClip(Surrogate, locality="trace", times_advantage=True, ratio=True):
    """Clip(low, high, dual) times f (detached): how much likelier the rest of the trace has become, 1 to `most`.

    f = clamp(exp(sum over k >= t of 2^(-(k - t) / half_life) l_k), 1, most), over the trace's tokens in their order. l
    is the log-ratio of a token, or 0 if its ratio is above `dual`.

    Args:
        low, high, dual: as in `Clip`.
        half_life: distance in tokens at which a later token counts half.
        max_factor: upper bound of f.

    Source: FIPO, arXiv 2603.19835 (Future-KL), weights clipped only above.

    >>> import torch
    >>> from tracegrad.objective import Objective, Ratio, padded_loss
    >>> step = {"mask": torch.tensor([[True, True]]), "advantages": torch.tensor([1.0])}
    >>> # Ratios of 1 and 1.1.
    >>> logprobs, old = torch.tensor([[0.5, 0.55]]).log(), torch.tensor([[0.5, 0.5]]).log()
    >>> objective = Objective(FutureClip(half_life=1.0), Ratio("theta", "old"))
    >>> # -1 * 1.1^0.5 and -1.1 * 1.1
    >>> padded_loss(objective, logprobs, old=old, **step).per_term.surrogate
    tensor([[-1.0488, -1.2100]])
    """

    low: float = 0.2
    high: float = 0.28
    dual: float = 10.0
    half_life: float = 32.0
    max_factor: float = 1.2

    def __post_init__(self) -> None:
        check_positive("FutureClip.half_life", self.half_life)
        check_ratio_bounds("FutureClip", 1.0, self.max_factor)
        Clip(self.low, self.high, self.dual)  # raises for invalid bounds

    @property
    def clip(self) -> Clip:
        """The clip that f multiplies."""
        return Clip(self.low, self.high, self.dual)

    @property
    def bounds(self) -> tuple[float, float]:
        """1 - low and 1 + high."""
        return self.clip.bounds

    def loss(self, view: LossInputs) -> Any:
        return self.clip.loss(view) * self.influence(view)

    def influence(self, view: LossInputs) -> Any:
        """Return f at each token."""
        log_ratio = view.log_ratio.detach()
        inside = log_ratio.where(view.keep & (log_ratio <= math.log(self.dual)), 0)
        future = discounted_sum(inside, view.segments("trace"), view.counted, 2 ** (-1 / self.half_life))
        return clamp_log_ratio(future).exp().clamp(1, self.max_factor)

    def clip_mask(self, view: LossInputs) -> Any:
        return self.clip.clip_mask(view)

    def __str__(self) -> str:
        future = f"clamp(exp(sum of what follows of 2^(-places / {self.half_life:g}) log r), 1, {self.max_factor:g})"
        return f"f ({self.clip}), f = {future}"


@dataclass(frozen=True)
class GeoClip(Surrogate, locality="term", times_advantage=True, ratio=True):
    """-A exp(mean over the trace of clipped log-ratios), each log-ratio clipped on the side that A would push it to.

    Args:
        low, high: bounds of the log-ratio, nats, as distances from 0.
        where: tokens over which the mean runs; the denominators remain those of all tokens. A trace with none of them
            has the ratio 1. TRL's top_entropy_quantile with GMPO.

    Source: GMPO, arXiv 2507.20673, eq. 4; bounds of 0.4.

    >>> import torch
    >>> from tracegrad.objective import Objective, Ratio, padded_loss
    >>> step = {"mask": torch.tensor([[True, True]]), "advantages": torch.tensor([1.0])}
    >>> # Log-ratios of 1 and 0.
    >>> logprobs, old = torch.tensor([[-1.0, -1.0]]), torch.tensor([[-2.0, -1.0]])
    >>> objective = Objective(GeoClip(), Ratio("theta", "old"))
    >>> # -exp((0.4 + 0) / 2)
    >>> padded_loss(objective, logprobs, old=old, **step).per_term.surrogate
    tensor([[-1.2214, -1.2214]])
    """

    low: float = 0.4
    high: float = 0.4
    where: TopEntropy | None = None

    level = Aggregation("trace", "mean")

    def __post_init__(self) -> None:
        check_positive("GeoClip.low", self.low)
        check_positive("GeoClip.high", self.high)
        if self.where is not None:
            check_kind("GeoClip.where", self.where, TopEntropy)
            object.__setattr__(self, "locality", "batch")  # it reads all tokens of a micro-batch

    @property
    def takes_entropy(self) -> bool:  # type: ignore[override]
        return self.where is not None

    def log_ratio(self, view: LossInputs) -> Any:
        a, log_ratio, inside = view.advantages, self._token_log_ratio(view), view.level_terms(self.level)
        clipped = log_ratio.clamp(max=self.high).where(a > 0, log_ratio.clamp(min=-self.low)).where(a != 0, 0)
        if self.where is None:
            return self.level.apply(clipped, view, inside)
        mean = self.level.apply(clipped, view, inside & self.where.keeps(view.detach(), view.keep))
        return mean.where(~mean.isnan(), 0)

    def loss(self, view: LossInputs) -> Any:
        return -view.advantages * view.ratio

    def clip_mask(self, view: LossInputs) -> Any:
        a, log_ratio = view.advantages, self._token_log_ratio(view)
        return ((a > 0) & (log_ratio > self.high)) | ((a < 0) & (log_ratio < -self.low))

    def _token_log_ratio(self, view: LossInputs) -> Any:
        return view.log_difference(view.pair, view.level_terms(self.level))

    def __str__(self) -> str:
        held = f"held above -{self.low:g} where A < 0 and below {self.high:g} where A > 0"
        return f"-A r, each l {held}" + (f", of those left: {self.where}" if self.where else "")
