"""Corrections of the mismatch between the recorded policy and the recomputed one, on PPO's clip of theta/old."""

from dataclasses import replace

from tracegrad.algebra import Budget, Clamp, Clip, Gate, Identity, Level, Objective, Ratio, Reduce, Weight, Window

__all__ = ["A3PO", "DECOUPLED_PPO", "GEO_RS", "ICEPOP", "M2PO", "MIS", "SEQ_MASK_TIS", "TIS"]

_OLD, _MISMATCH, _GEOMETRIC = Ratio("theta", "old"), Ratio("old", "rollout"), Level("trace", "mean")

TIS = Objective(Clip(0.2, 0.2), _OLD, weights=(Weight(_MISMATCH, shape=Clamp(0.0, 2.0)),), reduce=Reduce("token"))
"""min(old/rollout, 2) at each token: truncated importance sampling.

Paper: Yao et al. 2025, "Your Efficient RL Framework Secretly Brings You Off-Policy RL Training". Peers: all: verl
rollout_is="token", TRL token_truncate, SkyRL tis_ratio_type="token", slime --use-tis. OpenRLHF and NeMo-RL truncate
below, too: Clamp(0.5, 5).
"""

MIS = replace(TIS, weights=(Weight(_MISMATCH, shape=Window(0.0, 2.0)),))
"""old/rollout where it is at most 2, and 0 elsewhere: masked importance sampling.

Paper: Liu, Li et al. 2025, "When Speed Kills Stability". Peers: TRL token_mask, slime's mis mode="mask".
"""

ICEPOP = replace(TIS, weights=(Weight(_MISMATCH, shape=Window(0.5, 5.0)),))
"""old/rollout where it lies in [0.5, 5], and 0 elsewhere: mismatched tokens do not train.

Paper: Ring-1T, arXiv 2510.18855. Peers: verl "0.5_5.0", slime, NeMo-RL, OpenRLHF. Denominators stay those of all terms;
SkyRL's token_mask with the same bounds keeps the weight apart from the mask.
"""

GEO_RS = replace(TIS, weights=(), gates=(Gate(_MISMATCH, level=_GEOMETRIC, low=0.999, high=1.001),))
"""Traces are rejected unless the geometric mean of old/rollout lies in [0.999, 1.001]; no weight.

Paper: Liu, Li et al. 2025, "When Speed Kills Stability". Peers: verl's decoupled_geo_rs (its k1 is -log, so its bounds
are the inverse of these; at 0.1 % they agree to 1e-6), SkyRL's geometric mask (0.99, 1.01).
"""

SEQ_MASK_TIS = replace(
    TIS,
    weights=(Weight(_MISMATCH, shape=Clamp(0.0, 5.0)),),
    gates=(Gate(_MISMATCH, level=_GEOMETRIC, low=0.999, high=1.002),),
)
"""Traces are rejected by the geometric mean of old/rollout; kept tokens carry their own ratio, at most 5.

Paper: as NeMo-RL and OpenRLHF name it. Peers: NeMo-RL's seq-mask-tis with [0.999, 1.002], OpenRLHF's. Both leave the
kept tokens' ratios as they are; the mean of a trace may be 1 with a ratio of any size in it, and one such token would
be the whole step (OpenRLHF#1295, whose fix truncates them at the bound of its tis, 5). Theirs is `Identity()` in place
of the clamp.
"""

M2PO = replace(
    TIS,
    weights=(Weight(_MISMATCH, shape=Identity()),),
    gates=(Budget(_MISMATCH, "square", 0.04, quadrants="active"),),
)
"""Of the terms that an update moves further away, drops the largest (log old/rollout)^2 until their mean is 0.04.

An update moves a term further away if A > 0 and its ratio is above 1, or A < 0 and its ratio is below 1. The mean is
over the kept ones of these in the step; all other terms stay. Ties stay or fall together; the smallest always stays.

Paper: arXiv 2510.01161, final version (ICLR 2026), Algorithm 1. Peers: Trinity-RFT#616; the authors' code finds its
threshold over the same terms. AReaL's m2_threshold is the first version, over all terms, and drops more:
`Budget(old/rollout, "square", 0.04)`.
"""

DECOUPLED_PPO = replace(TIS, weights=(Weight(_MISMATCH, shape=Identity()),))
"""old/rollout, untruncated, times PPO's clip of theta/old.

Paper: Hilton et al. 2021, arXiv 2110.00641, eq. 5. Peers: AReaL (which drops terms with a ratio above 5:
`Gate(old/rollout, high=5)`).
"""

A3PO = replace(
    DECOUPLED_PPO, ratio=Ratio("theta", "proximal"), weights=(Weight(Ratio("proximal", "rollout"), shape=Identity()),)
)
"""DECOUPLED_PPO with old interpolated between the recorded and the trained policy: no forward pass for old.

Use with `correction.proximal_alpha`, from the policy version of each token. Paper: A-3PO, arXiv 2512.06547. Peers:
AReaL's prox_logp_method="loglinear".
"""
