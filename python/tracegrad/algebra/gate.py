"""What drops terms: bounds on a statistic of a ratio, and selectors that look at all terms together.

Values only. Gates that do not see the policy being trained are evaluated by `tracegrad.correction` once per step, the
others by `tracegrad.objective`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from tracegrad.algebra.ratio import HOLDS, OVER, TOKEN, Level, Ratio, When, check_reach
from tracegrad.algebra.refuse import around, around_one, no_effect, one_of, positive, rising
from tracegrad.errors import ArgumentError

Stat = Literal["ratio", "k1", "k2", "k3", "abs", "square", "dprob", "binary_kl"]

STATS = ("ratio", "k1", "k2", "k3", "abs", "square", "dprob", "binary_kl")
_NEVER_NEGATIVE = ("k2", "k3", "abs", "square")
_INFINITY = float("inf")


@dataclass(frozen=True)
class Gate:
    """Keeps a term iff low <= stat <= high, bounds included; a dropped term has no loss and no gradient.

    With l = log num - log den, p and q the two probabilities: ratio = exp(l), k1 = l, k2 = l^2 / 2,
    k3 = exp(l) - 1 - l, abs = |l|, square = l^2, dprob = p - q, binary_kl = the KL of (q, 1 - q) from (p, 1 - p) with
    the sign of p - q. A level aggregates l before the ratio is exponentiated, and the others as they are. (verl's k1 is
    -l, so its bounds are the inverse of these.)

    Args:
        ratio: any two policies.
        stat: one of the above.
        level: over which terms the statistic is taken; which of them, `over` says.
        low, high: bounds in the unit of `stat`; None is unbounded.
        when: on which sign of the advantage it can drop a term.
        scope: what falls with a term that fails: None is the level itself; "trace" with a token level is a veto.
        over: the statistic is of "all" terms whose logprobs are known, or of those "kept" by the gates before.

    >>> print(Gate(Ratio("old", "rollout"), low=1e-4, scope="trace"))
    drop the trace unless 0.0001 <= ratio(old/rollout) of each token
    """

    ratio: Ratio
    stat: Stat = "ratio"
    level: Level = TOKEN
    low: float | None = None
    high: float | None = None
    when: When = "always"
    scope: Literal["turn", "trace", "group"] | None = None
    over: Literal["all", "kept"] = "all"

    def __post_init__(self) -> None:
        one_of("Gate.stat", self.stat, STATS)
        one_of("Gate.when", self.when, tuple(HOLDS))
        one_of("Gate.scope", self.scope, ("turn", "trace", "group", None))
        one_of("Gate.over", self.over, ("all", "kept"))
        no_effect(self.level.grad != "through", "Gate.level.grad", "a gate is detached")
        no_effect(self.level.blend is not None, "Gate.level.blend", "a gate looks at one level")
        no_effect(self.level.terms != "all", "Gate.level.terms", "Gate.over says which terms are counted")
        no_effect(self.over == "kept" and self.level.over == "token", "Gate.over", "a token is not aggregated")
        wider = self.scope is None or OVER.index(self.scope) > OVER.index(self.level.over)
        no_effect(not wider, "Gate.scope", f"the level is the {self.level.over} already")
        check_reach("Gate", self.ratio, self.level)
        if self.scope == "group" and not self.detached:
            raise ArgumentError(
                "Gate.scope is 'group' on a ratio of the policy being trained. The traces of a group stand in several "
                "micro-batches. Take scope='trace', or old in place of theta."
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
        return (-_INFINITY if self.low is None else self.low, _INFINITY if self.high is None else self.high)

    @property
    def detached(self) -> bool:
        """True where it is known before the step."""
        return self.ratio.detached

    def __str__(self) -> str:
        low = "" if self.low is None else f"{self.low:g} <= "
        high = "" if self.high is None else f" <= {self.high:g}"
        kept = " over kept terms" if self.over == "kept" else ""
        inner = f"{self.stat}({self.ratio}) of each token"
        if self.level.over != "token":
            inner = f"{self.level} of {self.stat}({self.ratio}){kept}"
            if self.stat == "ratio":
                inner = f"exp({self.level} of log {self.ratio}{kept})"
        when = "" if self.when == "always" else f" where {self.when}"
        return f"drop the {self.scope or self.level.over}{when} unless {low}{inner}{high}"


@dataclass(frozen=True)
class Budget:
    """Keeps the terms with the smallest stat, as many as leave its mean over the step at most `mean`; at least one.

    Terms of equal stat stand or fall together.

    Args:
        ratio: two policies, neither of them being trained.
        stat: "square" (M2PO), "abs", "k2" or "k3".
        mean: what the mean over the kept terms may be.
        over: "all" terms whose logprobs are known, or those "kept" by the gates before.

    Source: M2PO, arXiv 2510.01161, eq. 8, mean (log ratio)^2 <= 0.04; AReaL.
    """

    ratio: Ratio
    stat: Literal["square", "abs", "k2", "k3"] = "square"
    mean: float = 0.04
    over: Literal["all", "kept"] = "all"

    def __post_init__(self) -> None:
        one_of("Budget.stat", self.stat, ("square", "abs", "k2", "k3"))
        one_of("Budget.over", self.over, ("all", "kept"))
        positive("Budget.mean", self.mean)
        if not self.ratio.detached:
            raise ArgumentError(
                f"Budget on {self.ratio}: the budget is of the whole step, and the policy being trained sees one "
                "micro-batch at a time. Take old in place of theta."
            )

    @property
    def detached(self) -> bool:
        """True: it is known before the step."""
        return True

    def __str__(self) -> str:
        return f"keep the terms with the smallest {self.stat}({self.ratio}) whose mean is at most {self.mean:g}"


@dataclass(frozen=True)
class TopEntropy:
    """Keeps the share of terms with the highest entropy of the policy being trained, within each micro-batch.

    Args:
        share: of the terms of a micro-batch, in (0, 1).
        scope: "microbatch", said aloud: the gradient depends on how the step was cut.

    Source: Wang et al. 2025, arXiv 2506.01939; TRL's top_entropy_quantile.
    """

    share: float
    scope: Literal["microbatch"]

    def __post_init__(self) -> None:
        one_of("TopEntropy.scope", self.scope, ("microbatch",))
        _share("TopEntropy", self.share)

    @property
    def detached(self) -> bool:
        """False: it sees the policy being trained."""
        return False

    def __str__(self) -> str:
        return f"keep the {self.share:g} of the micro-batch's terms with the highest entropy"


@dataclass(frozen=True)
class DropCovariance:
    """Drops a random share of the terms whose covariance of advantage and logprob lies between low and high.

    cov = (A - mean A)(logp - mean logp), means over the micro-batch's terms that the gates before have left; terms that
    the clip has taken are no candidates. `max(int(share * terms), 1)` of the candidates fall, drawn by torch's global
    generator.

    Args:
        share: of the terms that are left of a micro-batch, in (0, 1).
        low, high: bounds of cov, excluded.
        scope: "microbatch", said aloud: the gradient depends on how the step was cut.

    Source: Clip-Cov of Cui et al. 2025, arXiv 2505.22617; verl's clip_cov.
    """

    share: float
    low: float
    high: float
    scope: Literal["microbatch"]

    def __post_init__(self) -> None:
        one_of("DropCovariance.scope", self.scope, ("microbatch",))
        _share("DropCovariance", self.share)
        rising("DropCovariance", self.low, self.high)

    @property
    def detached(self) -> bool:
        """False: it sees the policy being trained."""
        return False

    def __str__(self) -> str:
        return f"drop a random {self.share:g} of the terms with {self.low:g} < cov(A, logp) < {self.high:g}"


@dataclass(frozen=True)
class TopCovariance:
    """Selects the share of terms with the highest covariance of advantage and logprob, for a penalty on them.

    Args:
        share: of the terms of a micro-batch that the penalty runs over, in (0, 1); at least one term.
        scope: "microbatch", said aloud.

    Source: KL-Cov of Cui et al. 2025, arXiv 2505.22617; verl's kl_cov.
    """

    share: float
    scope: Literal["microbatch"]

    def __post_init__(self) -> None:
        one_of("TopCovariance.scope", self.scope, ("microbatch",))
        _share("TopCovariance", self.share)

    def __str__(self) -> str:
        return f"on the {self.share:g} of the micro-batch's terms with the highest cov(A, logp)"


AnyGate = Gate | Budget | TopEntropy | DropCovariance
GATES = get_args(AnyGate)


def _share(name: str, share: float) -> None:
    if not 0 < share < 1:
        raise ArgumentError(f"{name}.share is {share}. It is a share of the terms and lies between 0 and 1.")
