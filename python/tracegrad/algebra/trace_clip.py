"""Clips whose ratio at a term depends on other terms of its trace: `FutureClip`, `GeoClip`.

Each is its formula, in words and in tensor methods, as in `surrogate`.
"""

import math
from dataclasses import dataclass
from typing import Any

from tracegrad.algebra.ratio import Level, bounded, discounted
from tracegrad.algebra.refuse import around_one, kind_of, positive
from tracegrad.algebra.selector import TopEntropy
from tracegrad.algebra.surrogate import Clip, Surrogate
from tracegrad.algebra.view import View


@dataclass(frozen=True)
class FutureClip(Surrogate, locality="trace", times_advantage=True, ratio=True):
    """Clip(low, high, dual) times f, held constant: how much likelier the rest of the trace has become, 1 to `most`.

    f = clamp(exp(sum over k >= t of 2^(-(k - t) / half_life) l_k), 1, most), over the trace's terms in their order, l
    the log-ratio of a term, 0 where the ratio is above `dual`.

    Args:
        low, high, dual: as in `Clip`.
        half_life: terms after which one counts half.
        most: what f is at most.

    Source: FIPO, arXiv 2603.19835 (Future-KL), weights clipped above alone.
    """

    low: float = 0.2
    high: float = 0.28
    dual: float = 10.0
    half_life: float = 32.0
    most: float = 1.2

    def __post_init__(self) -> None:
        positive("FutureClip.half_life", self.half_life)
        around_one("FutureClip", 1.0, self.most)
        Clip(self.low, self.high, self.dual)  # which checks them

    @property
    def clip(self) -> Clip:
        """What f multiplies."""
        return Clip(self.low, self.high, self.dual)

    @property
    def bounds(self) -> tuple[float, float]:
        """1 - low and 1 + high."""
        return self.clip.bounds

    def loss(self, view: View) -> Any:
        return self.clip.loss(view) * self.influence(view)

    def influence(self, view: View) -> Any:
        """f at each term."""
        log_ratio = view.log_ratio.detach()
        inside = log_ratio.where(view.keep & (log_ratio <= math.log(self.dual)), 0)
        future = discounted(inside, view.segments("trace"), view.counted, 2 ** (-1 / self.half_life))
        return bounded(future).exp().clamp(1, self.most)

    def clipped(self, view: View) -> Any:
        return self.clip.clipped(view)

    def __str__(self) -> str:
        future = f"clamp(exp(sum of what follows of 2^(-places / {self.half_life:g}) log r), 1, {self.most:g})"
        return f"f ({self.clip}), f = {future}"


@dataclass(frozen=True)
class GeoClip(Surrogate, locality="term", times_advantage=True, ratio=True):
    """-A exp(mean over the trace of clipped log-ratios), each log-ratio clipped on the side that A would push it to.

    Args:
        low, high: bounds of the log-ratio, nats, as distances from 0.
        where: the terms over which the mean runs; the denominators stay those of all terms. A trace of which none is
            left has the ratio 1. TRL's top_entropy_quantile with GMPO.

    Source: GMPO, arXiv 2507.20673, eq. 4; bounds of 0.4.
    """

    low: float = 0.4
    high: float = 0.4
    where: TopEntropy | None = None

    level = Level("trace", "mean")

    def __post_init__(self) -> None:
        positive("GeoClip.low", self.low)
        positive("GeoClip.high", self.high)
        if self.where is not None:
            kind_of("GeoClip.where", self.where, TopEntropy)
            object.__setattr__(self, "locality", "batch")  # it looks at all terms of a micro-batch

    @property
    def takes_entropy(self) -> bool:  # type: ignore[override]
        return self.where is not None

    def log_ratio(self, view: View) -> Any:
        a, log_ratio, inside = view.advantages, self._of_tokens(view), view.inside(self.level)
        clipped = log_ratio.clamp(max=self.high).where(a > 0, log_ratio.clamp(min=-self.low)).where(a != 0, 0)
        if self.where is None:
            return self.level.of(clipped, view, inside)
        mean = self.level.of(clipped, view, inside & self.where.keeps(view.detached(), view.keep))
        return mean.where(~mean.isnan(), 0)

    def loss(self, view: View) -> Any:
        return -view.advantages * view.ratio

    def clipped(self, view: View) -> Any:
        a, log_ratio = view.advantages, self._of_tokens(view)
        return ((a > 0) & (log_ratio > self.high)) | ((a < 0) & (log_ratio < -self.low))

    def _of_tokens(self, view: View) -> Any:
        return view.between(view.pair, view.inside(self.level))

    def __str__(self) -> str:
        held = f"held above -{self.low:g} where A < 0 and below {self.high:g} where A > 0"
        return f"-A r, each l {held}" + (f", of those left: {self.where}" if self.where else "")
