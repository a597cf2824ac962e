"""Selectors that look at all terms evaluated together: by entropy, by covariance of advantage and logprob.

The gradient depends on how a step was cut, and each says so by its `scope`. The first two are gates, the third says on
which terms a penalty runs.
"""

import math
from dataclasses import dataclass
from typing import Any, Literal

from tracegrad.algebra.gate import AnyGate
from tracegrad.algebra.part import Part
from tracegrad.algebra.ratio import INFINITY
from tracegrad.algebra.refuse import one_of, rising
from tracegrad.algebra.view import View
from tracegrad.algebra.whole import Whole
from tracegrad.errors import ArgumentError


@dataclass(frozen=True)
class TopEntropy(AnyGate):
    """Keeps the share of terms with the highest entropy of the policy being trained, within each micro-batch.

    Those at or above the quantile of the terms, which is torch.quantile's.

    Args:
        share: of the terms of a micro-batch, in [0, 1); 0 keeps those with the highest entropy of all.
        scope: "microbatch", said aloud: the gradient depends on how the step was cut.

    Source: Wang et al. 2025, arXiv 2506.01939; TRL's top_entropy_quantile.
    """

    share: float
    scope: Literal["microbatch"]

    takes_entropy = True

    def __post_init__(self) -> None:
        _check(self, zero=True)

    def keeps(self, view: View, keep: Any) -> Any:
        counted = view.entropy.where(view.counted, math.nan).float().reshape(-1)
        return keep & (view.entropy >= counted.nanquantile(1 - self.share)) if len(counted) else keep

    def __str__(self) -> str:
        return f"keep the {self.share:g} of the micro-batch's terms with the highest entropy"


@dataclass(frozen=True)
class DropCovariance(AnyGate):
    """Drops a random share of the terms whose covariance of advantage and logprob lies between low and high.

    cov = (A - mean A)(logp - mean logp), means over the micro-batch's terms that the gates before have left; terms that
    the clip has taken are no candidates. `max(int(share * terms), 1)` of the candidates fall, drawn by torch's global
    generator.

    Args:
        share: of the terms that are left of a micro-batch, in (0, 1).
        low, high: bounds of cov, excluded.
        scope: "microbatch", said aloud: the gradient depends on how the step was cut.
        scaled: takes A times the scale of its term, as SkyRL's clip_cov does: bounds are then of a mean's order.

    Source: Clip-Cov of Cui et al. 2025, arXiv 2505.22617; verl's clip_cov.
    """

    share: float
    low: float
    high: float
    scope: Literal["microbatch"]
    scaled: bool = False

    def __post_init__(self) -> None:
        _check(self)
        rising("DropCovariance", self.low, self.high)

    def check(self, objective: Whole) -> None:
        if not objective.surrogate.clips:
            raise ArgumentError("DropCovariance leaves clipped terms alone and needs a Clip. Take Clip, or a Gate.")

    def keeps(self, view: View, keep: Any) -> Any:
        counted = keep & view.counted
        covariance = _covariance(view, counted, self.scaled)
        between = (covariance > self.low) & (covariance < self.high) & ~view.clipped
        candidates = between.reshape(-1).nonzero().squeeze(-1)
        wanted = max(int(self.share * int(counted.sum())), 1)
        fallen = keep.reshape(-1) & False
        if len(candidates):
            fallen[candidates[view.permutation(len(candidates))[:wanted].to(candidates.device)]] = True
        return keep & ~fallen.reshape(keep.shape)

    def __str__(self) -> str:
        of = _named(self.scaled)
        return f"drop a random {self.share:g} of the terms with {self.low:g} < {of} < {self.high:g}"


@dataclass(frozen=True)
class TopCovariance(Part):
    """Selects the share of terms with the highest covariance of advantage and logprob, for a penalty on them.

    Args:
        share: of the terms of a micro-batch that the penalty runs over, in (0, 1); at least one term.
        scope: "microbatch", said aloud.
        scaled: takes A times the scale of its term, as SkyRL's kl_cov does, where scales may differ.

    Source: KL-Cov of Cui et al. 2025, arXiv 2505.22617; verl's kl_cov.
    """

    share: float
    scope: Literal["microbatch"]
    scaled: bool = False

    def __post_init__(self) -> None:
        _check(self)

    def of(self, view: View, mask: Any) -> Any:
        """The selected terms in `mask`, at least one where there are any."""
        covariance = _covariance(view.detached(), mask, self.scaled).reshape(-1)
        count = mask.sum()
        wanted = (self.share * count.double()).long().clamp(min=1).minimum(count)
        order = covariance.argsort(descending=True)
        rank = order.new_ones(len(order)).cumsum(0) - 1
        return (mask.reshape(-1) & False).scatter(0, order, rank < wanted).reshape(mask.shape)

    def __str__(self) -> str:
        return f"on the {self.share:g} of the micro-batch's terms with the highest {_named(self.scaled)}"


def _named(scaled: bool) -> str:
    return "cov(scale A, logp)" if scaled else "cov(A, logp)"


def _covariance(view: View, mask: Any, scaled: bool) -> Any:
    """(A - mean A)(logp - mean logp) of each term in `mask`, minus infinity elsewhere."""
    advantages, logprobs = view.given("advantages", mask), view.log("theta", mask)
    advantages = advantages * view.scale(None) if scaled else advantages
    count = mask.sum().clamp(min=1)
    covariance = (advantages - advantages.sum() / count) * (logprobs - logprobs.sum() / count)
    return covariance.where(mask, -INFINITY)


def _check(part: TopEntropy | DropCovariance | TopCovariance, *, zero: bool = False) -> None:
    name = type(part).__name__
    one_of(f"{name}.scope", part.scope, ("microbatch",))
    if not (0 < part.share < 1 or (zero and part.share == 0)):
        raise ArgumentError(f"{name}.share is {part.share}. It is a share of the terms and lies between 0 and 1.")
