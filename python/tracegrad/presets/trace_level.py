"""Surrogates on a whole trace's ratio: what papers call sequence-level policy optimisation.

Their ratios are geometric means (`Level("trace", "mean")`); a product is `Level("trace", "sum")`. Papers and peers call
either the "sequence ratio".
"""

from dataclasses import replace

from tracegrad.algebra import Clamp, Clip, GeoClip, Level, Objective, Ratio, Reduce, Weight

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

GMPO = Objective(GeoClip(0.4, 0.4), _OLD, weights=(_TIS,), reduce=Reduce("trace", "mean"))
"""-A times the geometric mean of ratios clipped token by token.

Paper: Zhao et al. 2025, arXiv 2507.20673, eq. 4. Peers: verl's geo_mean (clip_ratio as bounds of the log-ratio), TRL's
experimental GMPOTrainer. verl's mean counts rows without a token, and it averages truncated weights geometrically; here
empty traces do not count and each term has its own weight.
"""
