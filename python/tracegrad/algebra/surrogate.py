"""What is minimised at each term: the surrogates, whose gradient is that of the policy.

Each is its formula, in words and in tensor methods: r is the ratio of the objective at the surrogate's level, A the
advantage. A loss of your own is a `Surrogate` in your file, or a function (docs/extending.md).
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from tracegrad.algebra.ratio import HOLDS, TOKEN, Level, When, holds
from tracegrad.algebra.refuse import no_effect, one_of, positive
from tracegrad.algebra.view import View
from tracegrad.algebra.whole import Whole
from tracegrad.errors import ArgumentError

Locality = Literal["term", "turn", "trace", "batch"]


def _check_promises(name: str, locality: Locality, reads: tuple[str, ...]) -> None:
    one_of(f"{name}.locality", locality, ("term", "turn", "trace", "batch"))
    for each in reads:
        one_of(f"{name}.reads", each, ("old", "rollout", "ref", "entropy"))


class Surrogate:
    """A loss at each term. One of your own is a frozen dataclass below this, with `loss`.

    What it promises stands behind its name, `class Mine(Surrogate, locality="term")`; a promise that is not made is the
    safe one, in a class below `Clip` too.

    Promises:
        locality: what it reads beside a term's own arrays and its ratio: nothing ("term"), the other terms of its
            "turn" or "trace", or all that are evaluated together ("batch": how a step is cut changes its gradient).
        times_advantage: it is A times something, so that a term with A = 0 pulls on nothing.
        reads: further arrays: "old", "rollout", "ref" or "entropy".
        ratio: False for one that takes no ratio, True for one that must have one, None for either.
    """

    level: Level = TOKEN
    """The level of its ratio."""
    locality: Locality = "batch"
    times_advantage: bool = False
    reads: tuple[str, ...] = ()
    takes_ratio: bool | None = None
    takes_entropy: bool = False
    """Whether it reads the entropy without a gradient; with one it is in `reads`."""
    clips: bool = False
    """Whether it has a bound beyond which a term has no gradient, as it says which (`clipped`)."""
    holds_tokens: bool = False
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
        cls.clips, cls.holds_tokens = cls.clipped is not Surrogate.clipped, cls.log_ratio is not Surrogate.log_ratio

    @property
    def bounds(self) -> tuple[float, float] | None:
        """The ratios that its clip leaves alone, for metrics; None without a clip of the ratio."""
        return None

    def loss(self, view: View) -> Any:
        """The loss at each term, minimised; where `view.keep` is False it is not read."""
        raise NotImplementedError(f"{type(self).__name__} has no loss(view)")

    def log_ratio(self, view: View) -> Any:
        """log r at its level, with gradient."""
        inside = view.inside(self.level)
        return self.level.of(view.between(view.pair, inside), view, inside)

    def clipped(self, view: View) -> Any:
        """bool: terms whose gradient the clip took away."""
        return view.keep & False

    def check(self, objective: Whole) -> None:
        """Refuses an objective that it cannot be in."""


@dataclass(frozen=True, repr=False)
class Function(Surrogate):
    """A function of yours as it is, `loss(view) -> per_term`: what `Objective(function, ratio)` makes of it.

    Args:
        function: one that its module gives by its name, so that a resumed run and other processes find the same.
        locality, times_advantage, reads: as in `Surrogate`.

    >>> def squared(view):
    ...     return (view.log_ratio - view.advantages).square()
    >>> print(Function(squared, "term"))
    squared(view)
    """

    function: Callable[[View], Any]
    locality: Locality = "batch"
    times_advantage: bool = False
    reads: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        _check_promises("Function", self.locality, self.reads)

    def loss(self, view: View) -> Any:
        return self.function(view)

    def __repr__(self) -> str:
        promised = ", ".join(map(repr, (self.locality, self.times_advantage, self.reads)))
        return f"Function({getattr(self.function, '__module__', '')}.{self._name}, {promised})"

    def __str__(self) -> str:
        return f"{self._name}(view)"

    @property
    def _name(self) -> str:
        return getattr(self.function, "__qualname__", type(self.function).__name__)


@dataclass(frozen=True)
class PolicyGradient(Surrogate, locality="term", times_advantage=True, ratio=False):
    """-A * logp: the plain policy gradient; takes no ratio (weights may).

    Args:
        when: on which sign of the advantage; elsewhere the surrogate is 0, and denominators still count the term.
    """

    when: When = "always"

    def __post_init__(self) -> None:
        one_of("PolicyGradient.when", self.when, tuple(HOLDS))

    def loss(self, view: View) -> Any:
        return -view.advantages.where(holds(self.when, view.advantages), 0) * view.logprobs

    def __str__(self) -> str:
        return "-A log theta" if self.when == "always" else f"-A log theta where {self.when}, else 0"


@dataclass(frozen=True)
class CrossEntropy(Surrogate, locality="term", ratio=False):
    """-logp: imitation, whatever the advantage says; takes no ratio."""

    def check(self, objective: Whole) -> None:
        no_effect(bool(objective.shifts), "Objective.shifts", "A is not read")

    def loss(self, view: View) -> Any:
        return -view.logprobs

    def __str__(self) -> str:
        return "-log theta"


@dataclass(frozen=True)
class Importance(Surrogate, locality="term", times_advantage=True, ratio=True):
    """-A r: the ratio itself, without a clip.

    Args:
        level: the level of r.

    Source: Tinker's and SkyRL's importance_sampling; prime-rl's default, where gates bound it.
    """

    level: Level = TOKEN

    def loss(self, view: View) -> Any:
        return -view.advantages * view.ratio

    def __str__(self) -> str:
        return "-A r"


@dataclass(frozen=True)
class Clip(Surrogate, locality="term", times_advantage=True, ratio=True):
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

    @property
    def bounds(self) -> tuple[float, float]:
        """1 - low and 1 + high."""
        return 1 - self.low, 1 + self.high

    def loss(self, view: View) -> Any:
        a, r, (low, high) = view.advantages, view.ratio, self.bounds
        free = r if self.delta is None else r.clamp(max=self.delta)
        value = (-a * free).maximum(-a * r.clamp(low, high))
        return value if self.dual is None else value.minimum(-a * self.dual).where(a < 0, value)

    def clipped(self, view: View) -> Any:
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

    def loss(self, view: View) -> Any:
        a, r = view.advantages, view.ratio
        tau = r.new_full(r.shape, self.tau_neg).masked_fill(a > 0, self.tau_pos)
        return -a * (tau * (r - 1)).sigmoid() * 4 / tau

    def __str__(self) -> str:
        return f"-A (4 / tau) sigmoid(tau (r - 1)), tau = {self.tau_pos:g} where A > 0, else {self.tau_neg:g}"


@dataclass(frozen=True)
class Regress(Surrogate, locality="term", ratio=True):
    """(beta * sum over the trace of log-ratios - A)^2: the trace's log-ratio regressed on its advantage.

    Use with `advantage.a_star` and Reduce("trace", "mean"), which counts each trace once.

    Args:
        beta: factor of the log-ratio, in units of the reward.

    Source: A*-PO, arXiv 2505.20686, eq. 5; OAPL, arXiv 2602.19362.
    """

    beta: float = 1e-3

    level = Level("trace", "sum")

    def __post_init__(self) -> None:
        positive("Regress.beta", self.beta)

    def check(self, objective: Whole) -> None:
        if objective.weights:
            raise ArgumentError("Regress fits a residual, which no weight corrects. Leave the weights out.")

    def loss(self, view: View) -> Any:
        return (self.beta * view.log_ratio - view.advantages).square()

    def __str__(self) -> str:
        return f"({self.beta:g} log r - A)^2"
