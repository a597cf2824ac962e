"""Trust regions by gates on the policy being trained: terms or traces that went too far are dropped, not clipped."""

from dataclasses import replace

from tracegrad.algebra import (
    Clamp,
    DropCovariance,
    Gate,
    Level,
    Objective,
    Penalty,
    Ratio,
    Reduce,
    TopCovariance,
    Weight,
)
from tracegrad.algebra.surrogate import Clip, Importance, PolicyGradient
from tracegrad.presets.grpo import GRPO

__all__ = ["CLIP_COV", "DPPO_KL", "DPPO_TV", "KL_COV", "OPSM"]

_OLD, _ROLLOUT = Ratio("theta", "old"), Ratio("theta", "rollout")

OPSM = replace(GRPO, gates=(Gate(Ratio("rollout", "theta"), "k1", Level("trace", "mean"), high=0.5, when="A<0"),))
"""GRPO without the bad traces whose mean of log rollout/theta exceeds 0.5.

Paper: DeepSeek-V3.2, arXiv 2512.02556, section 3.1 (off-policy sequence masking). Peers: TRL's
off_policy_mask_threshold, slime's --opsm-delta (theta/old, 1e-4), ms-swift. TRL counts an unknown rollout logprob as a
difference of 0, here it stands outside the mean.
"""

_DPPO_WEIGHT = Weight(_ROLLOUT, shape=Clamp(0.0, 20.0))

DPPO_TV = Objective(
    PolicyGradient(),
    weights=(_DPPO_WEIGHT,),
    gates=(Gate(_ROLLOUT, "dprob", high=0.2, when="A>0"), Gate(_ROLLOUT, "dprob", low=-0.2, when="A<=0")),
    reduce=Reduce("token"),
)
"""-min(theta/rollout, 20) A log theta, dropped where the probability has moved by more than 0.2 in A's direction.

Paper: arXiv 2602.04879 (binary total variation). Peers: verl's dppo_tv (clip_ratio_c 20 in its docstring, 3 by its
config), SkyRL's dppo binary_tv with -r A in place of the weight, prime-rl's default. A = 0 goes to the low branch.
"""

DPPO_KL = replace(
    DPPO_TV,
    gates=(Gate(_ROLLOUT, "binary_kl", high=0.05, when="A>0"), Gate(_ROLLOUT, "binary_kl", low=-0.05, when="A<=0")),
)
"""DPPO_TV with the binary KL of the recorded from the trained probability, bound 0.05, in A's direction.

Paper: arXiv 2602.04879 (binary KL). Peers: verl's dppo_kl, SkyRL's dppo binary_kl.
"""

CLIP_COV = Objective(
    Clip(0.2, 0.2), _OLD, gates=(DropCovariance(2e-4, 1.0, 5.0, "microbatch"),), reduce=Reduce("token")
)
"""PPO's clip, and a random 0.02 % of the terms with a high covariance of advantage and logprob dropped.

Paper: Cui et al. 2025, arXiv 2505.22617. Peers: verl's and SkyRL's clip_cov. Per micro-batch, as theirs.
"""

KL_COV = Objective(
    Importance(),
    _OLD,
    penalties=(Penalty(_OLD, "abs", 1.0, gated=True, weighted=False, where=TopCovariance(2e-4, "microbatch")),),
    reduce=Reduce("token"),
)
"""-A r, and |log theta/old| paid on the 0.02 % of terms with the highest covariance of advantage and logprob.

Paper: Cui et al. 2025, arXiv 2505.22617. Peers: verl's kl_cov (ppo_kl_coef 0.1 by its config, 1 in its docstring),
SkyRL's (kl_cov_frac 0.2). Per micro-batch, as theirs.
"""
