"""Surrogates on a whole trace's ratio: what papers call sequence-level policy optimisation.

Their ratios are geometric means (`Level("trace", "mean")`); a product is `Level("trace", "sum")`. Papers and peers call
either the "sequence ratio".
"""

from dataclasses import replace

from tracegrad.algebra import Clamp, Clip, FutureClip, GeoClip, Level, Objective, Ratio, Reduce, Weight

__all__ = ["FIPO", "GMPO", "GSPO", "GSPO_TOKEN"]

_OLD = Ratio("theta", "old")
_TIS = Weight(Ratio("old", "rollout"), shape=Clamp(0.0, 2.0))

GSPO = Objective(Clip(3e-4, 4e-4, level=Level("trace", "mean")), _OLD, weights=(_TIS,), reduce=Reduce("trace", "mean"))
"""clip of (product of theta/old)^(1 / length), with gradient through the mean.

Use with group_mean(scale="std", ddof=1). Paper: Zheng et al. 2025, arXiv 2507.18071, eq. 5, bounds of section 5.1.
Peers: TRL's importance_sampling_level="sequence" with loss_type="grpo"; verl and SkyRL pass the gradient through each
token's own logprob (GSPO_TOKEN), and leave eps at 0.2 unless told.
"""

GSPO_TOKEN = replace(GSPO, surrogate=Clip(3e-4, 4e-4, level=Level("trace", "mean", "token")))
"""GSPO's ratio with the gradient through each token's own logprob, which allows advantages per token.

Paper: Zheng et al. 2025, arXiv 2507.18071, eq. 13. Peers: verl's gspo (log-ratio held below 10), SkyRL's gspo. With one
advantage per trace its gradient equals GSPO's under Reduce("trace", "mean").
"""

FIPO = Objective(FutureClip(0.2, 0.28, 10.0, 32.0, 1.2), _OLD, weights=(_TIS,), reduce=Reduce("token"))
"""DAPO's clip times f: up to 1.2 where what follows a token has become likelier, with a half-life of 32 tokens.

Use with group_mean(scale="std", ddof=1). Paper: arXiv 2603.19835, weights clipped above alone, as for its 32B model
(its 7B model has both sides). Peers: ms-swift's loss_type="fipo" with delta 10; its own code, a fork of verl, which
also drops traces with more than one token beyond `dual`, and counts tool results as places.
"""

GMPO = Objective(GeoClip(0.4, 0.4), _OLD, weights=(_TIS,), reduce=Reduce("trace", "mean"))
"""-A times the geometric mean of ratios clipped token by token.

Paper: Zhao et al. 2025, arXiv 2507.20673, eq. 4. Peers: verl's geo_mean (clip_ratio as bounds of the log-ratio), TRL's
experimental GMPOTrainer. verl's mean counts rows without a token, and it averages truncated weights geometrically; here
empty traces do not count and each term has its own weight.
"""
