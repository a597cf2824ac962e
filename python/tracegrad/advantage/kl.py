"""KL in the reward: subtract a KL penalty from the reward of a trace, before the baseline.

It uses logprobs of the policy before the step and of the reference, so both are computed before the advantages.
The recorded logprobs may replace the first. `AdaptiveKl` is a coefficient that follows a target.
"""

from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from tracegrad import _validation
from tracegrad.advantage.outcome import Floats, refuse_infinite
from tracegrad.advantage.token import check_rows, check_terms
from tracegrad.errors import ArgumentError

_LOG_RATIO_LIMIT = 20.0
_ERROR_BOUND = 0.2
"""Bound of the controller's error, as in Ziegler et al. and the code that follows them."""


class PenalisedRewards(NamedTuple):
    """Result of `kl_in_reward`.

    Args:
        rewards: [R] float64, each minus the penalties of the tokens of its trace.
        per_term: [M] float64, -coef times the estimate at each token; add it to rewards of tokens (`at_turn_ends`).
        kl: mean of the estimate over each trace, then over traces with a token; pass it to `AdaptiveKl.after`.

    >>> result = kl_in_reward([1.0, 0.0], [-1.0, -1.0], [-1.5, -1.0], [0, 1], coef=0.1)
    >>> # 1 - 0.1 * (-1.0 + 1.5), and 0 without a difference
    >>> result.rewards.round(3).tolist()
    [0.95, 0.0]
    >>> result.kl  # the mean of 0.5 and 0
    0.25
    """

    rewards: Floats
    per_term: Floats
    kl: float


def kl_in_reward(
    rewards: ArrayLike,
    old: ArrayLike,
    ref: ArrayLike,
    trace: ArrayLike,
    *,
    coef: float,
    kind: Literal["k1", "k2", "k3", "abs"] = "k1",
    cap: float | None = None,
) -> PenalisedRewards:
    """Subtract coef times an estimate of KL(old||ref) at each token from the reward of its trace.

    With l = log old - log ref: k1 is l, abs |l|, k2 l^2 / 2, k3 exp(-l) - 1 + l.

    Args:
        rewards: [R], NaN if a trace could not be scored; it stays NaN.
        old: [M] logprobs of the policy before the step (or of the one that sampled), nats.
        ref: [M] logprobs of the reference, nats.
        trace: [M] row of each token's trace in `rewards`.
        coef: 0 or more.
        kind: the estimate.
        cap: the estimate is clamped to [-cap, cap]; verl clamps k3 to 10.

    Raises:
        ArgumentError: for logprobs that are not finite, a coefficient or cap below 0, shapes that differ.

    Source: verl's `apply_kl_penalty` (use_kl_in_reward), SkyRL's `apply_reward_kl_penalty`; Ouyang et al. 2022,
    arXiv 2203.02155.

    >>> found = kl_in_reward([1.0, 0.0], [-1.0, -2.0, -1.0], [-1.5, -2.5, -1.0], [0, 0, 1], coef=0.1)
    >>> found.rewards.round(3).tolist(), found.per_term.round(3).tolist(), found.kl
    ([0.9, 0.0], [-0.05, -0.05, 0.0], 0.25)
    """
    _validation.one_of(kind, "kind", ("k1", "k2", "k3", "abs"))
    for name, value in (("coef", coef), ("cap", cap)):
        if value is not None and not value >= 0:
            raise ArgumentError(
                f"TG-ADV-001: {name} is {value}. A negative coefficient would reward distance from the reference. "
                "Pass 0 or more."
            )
    reward = _validation.real(rewards, "rewards")
    refuse_infinite(reward)
    owner = check_rows(trace, len(reward))
    old_logprob, _ = check_terms(owner, old=old)
    ref_logprob, _ = check_terms(owner, ref=ref)
    gap = old_logprob - ref_logprob
    unknown = np.flatnonzero(np.isnan(gap))
    if len(unknown):
        raise ArgumentError(
            f"TG-ADV-002: token {unknown[0]} of trace {owner[unknown[0]]}: old {old_logprob[unknown[0]]}, "
            f"ref {ref_logprob[unknown[0]]}. The penalty needs both. "
            "Measure both policies at every token, or leave the trace out."
        )
    bounded = gap.clip(-_LOG_RATIO_LIMIT, _LOG_RATIO_LIMIT)
    estimates = {"k1": gap, "abs": np.abs(gap), "k2": gap**2 / 2, "k3": np.expm1(-bounded) + bounded}
    estimate = estimates[kind] if cap is None else estimates[kind].clip(-cap, cap)
    count = np.bincount(owner, minlength=len(reward))
    total = np.bincount(owner, estimate, len(reward))
    nonempty = count > 0
    mean = float((total[nonempty] / count[nonempty]).mean()) if nonempty.any() else 0.0
    return PenalisedRewards(reward - coef * total, 0.0 - coef * estimate, mean)


@dataclass(frozen=True)
class AdaptiveKl:
    """Coefficient that rises if the divergence is above its target and falls if it is below.

    Args:
        coef: current value.
        target: target divergence, nats.
        horizon: number of traces over which an error of 1 would double the coefficient; the error is clamped to +-0.2.

    Source: Ziegler et al. 2019, arXiv 1909.08593; verl's and SkyRL's AdaptiveKLController.

    >>> AdaptiveKl(coef=0.1, target=0.1, horizon=100).after(kl=0.11, traces=10)  # 10 % above, a tenth of the horizon
    AdaptiveKl(coef=0.101, target=0.1, horizon=100)
    """

    coef: float
    target: float
    horizon: float

    def __post_init__(self) -> None:
        for name, value in (("target", self.target), ("horizon", self.horizon)):
            if not value > 0:
                raise ArgumentError(
                    f"TG-ADV-003: AdaptiveKl.{name} is {value}. It divides the error. Pass a number above 0."
                )

    def after(self, kl: float, traces: int) -> "AdaptiveKl":
        """Return the coefficient after a batch of `traces` traces with this divergence (`PenalisedRewards.kl`)."""
        error = min(max(kl / self.target - 1, -_ERROR_BOUND), _ERROR_BOUND)
        return replace(self, coef=self.coef * (1 + error * traces / self.horizon))
