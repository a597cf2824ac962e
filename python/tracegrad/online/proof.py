"""Whether the servers sample from the policy that is trained: their logprobs beside the trainer's, before each update.

Terms that were sampled by the version that is trained must have theta = rollout. One comparison finds a cache of the
old weights, a head that was not taken along, an adapter of the step before, another precision, a temperature that
nobody told. Here are the comparison and the search for the cause; called by the loop with what a step saw.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tracegrad.errors import TracegradError

Floats = NDArray[np.float32]

FP32_NATS = 1e-4
"""What separates two clean float32 passes at most, per token."""
TIMES_CLEAN = 10.0
"""In bf16: how many times the 99.9th percentile of a clean sync is an alarm."""
FEWEST = 16
"""Terms below which a percentile says nothing."""


class SyncFault(TracegradError):
    """The servers do not sample from the policy that is trained: how far off, since when, and why as far as known."""


@dataclass(frozen=True)
class Gap:
    """|theta - rollout| of the terms that the trained version sampled, in nats.

    Args:
        terms: how many there were.
        p50, p99, p999, max: percentiles and the largest; NaN where there were none.
    """

    terms: int
    p50: float = float("nan")
    p99: float = float("nan")
    p999: float = float("nan")
    max: float = float("nan")

    @classmethod
    def of(cls, logprobs: Floats, rollout: Floats, here: NDArray[np.bool_]) -> "Gap":
        """From [M] logprobs of both, and which terms count; terms that either does not know do not.

        >>> Gap.of(np.float32([-1, -2, -3]), np.float32([-1, -2.5, np.nan]), np.array([True, True, True])).max
        0.5
        """
        apart = np.abs(np.asarray(logprobs, np.float64) - np.asarray(rollout, np.float64))[here]
        apart = apart[~np.isnan(apart)]
        if not len(apart):
            return cls(0)
        p50, p99, p999 = (float(each) for each in np.percentile(apart, [50, 99, 99.9]))
        return cls(len(apart), p50, p99, p999, float(apart.max()))

    def row(self) -> dict[str, float]:
        """By the names of the metrics."""
        if not self.terms:
            return {"sync_terms": 0}
        return {"sync_terms": self.terms, "sync_p50": self.p50, "sync_p99": self.p99, "sync_max": self.max}


@dataclass
class Proof:
    """What a clean sync looks like, and whether this one is.

    Args:
        bf16: the forward passes of trainer or servers are bf16: what is clean is then learnt from the first steps.
        learns: how many steps that takes.
    """

    bf16: bool = False
    learns: int = 2
    _clean: list[float] = field(default_factory=list)

    @property
    def bound(self) -> float:
        """Nats beyond which a gap is a fault; infinite while it is being learnt."""
        if not self.bf16:
            return FP32_NATS
        return TIMES_CLEAN * max(self._clean) if len(self._clean) >= self.learns else float("inf")

    def holds(self, gap: Gap) -> bool:
        """Whether a step's gap is that of a clean sync; in bf16 the first ones teach what that is."""
        if not gap.terms:
            return True
        if self.bf16 and len(self._clean) < self.learns:
            if gap.terms >= FEWEST:
                self._clean.append(gap.p999)
            return True
        return self.within(gap)

    def within(self, gap: Gap) -> bool:
        """Whether a gap is at most the bound."""
        return (gap.p999 if self.bf16 else gap.max) <= self.bound


@dataclass(frozen=True)
class Suspect:
    """A mistake that would explain a gap, and how to see whether it does.

    Args:
        cause: what it is and how to cure it, in words.
        logprobs: [M] logprobs that the servers would then have given; asked only where a proof has failed.
    """

    cause: str
    logprobs: Callable[[], Floats]


STALE = (
    "On a prompt that they have never seen they agree with the trainer: keys and values of older weights are left in "
    "their caches. Pause with clear_cache, which is the default, or give each version its own cache_salt."
)


def explain(
    gap: Gap,
    rollout: Floats,
    here: NDArray[np.bool_],
    suspects: Sequence[Suspect],
    bound: float,
    fresh: Gap | None = None,
) -> str:
    """The suspect whose logprobs are the servers', or what is left when none is.

    Args:
        gap: of the terms that are `here` among the [M] of a step.
        rollout: [M], what the servers said.
        suspects: tried in their order.
        bound: nats that are clean.
        fresh: what they say behind a prompt that nobody has asked before, under the weights of now.
    """
    if fresh is not None and fresh.terms and fresh.max <= bound:
        return STALE
    best: tuple[float, str] | None = None
    for suspect in suspects:
        found = Gap.of(suspect.logprobs(), rollout, here)
        if found.terms and found.p99 <= bound:
            return suspect.cause
        if found.terms and (best is None or found.p50 < best[0]):
            best = (found.p50, suspect.cause)
    near = f" Nearest: {best[1]}" if best is not None and best[0] < gap.p50 / 4 else ""
    return (
        "None of the known mistakes gives these numbers: the servers run other weights, another model, another "
        f"precision or another sampling than they were told.{near}"
    )


def fault(step: int, version: int, gap: Gap, bound: float, why: str) -> SyncFault:
    """The error that ends a run."""
    return SyncFault(
        f"step {step}: the servers do not sample from version {version}, which is trained. Of {gap.terms} tokens "
        f"that they say are its own, the logprobs are off by up to {gap.max:.3g} nats (median {gap.p50:.2g}; "
        f"at most {bound:.2g} is clean). Ratios would be wrong. {why}"
    )


def own_terms(step: Any, version: int) -> NDArray[np.bool_]:
    """[M] bool: the terms of a step that this version sampled."""
    return np.asarray(step.version) == version
