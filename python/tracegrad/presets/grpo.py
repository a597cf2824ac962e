"""GRPO and its relatives: a clipped surrogate on group-relative advantages, told apart by their reduction.

Each comes decoupled, theta/old clipped and weighted by the truncated old/rollout (token TIS), and _DIRECT,
theta/rollout clipped, which needs no pass for old logprobs. Advantages are the caller's: `tracegrad.advantage`.
"""

from dataclasses import replace

from tracegrad.algebra import Clamp, Clip, Level, Objective, Ratio, Reduce, Weight

__all__ = ["DAPO", "DAPO_DIRECT", "DR_GRPO", "DR_GRPO_DIRECT", "DUAL_CLIP", "GRPO", "GRPO_DIRECT", "LUSPO"]

_TIS = Weight(Ratio("old", "rollout"), shape=Clamp(0.0, 2.0))
_OLD, _ROLLOUT = Ratio("theta", "old"), Ratio("theta", "rollout")

GRPO = Objective(Clip(0.2, 0.2), _OLD, weights=(_TIS,), reduce=Reduce("trace", "mean"))
"""min(old/rollout, 2) * clip(theta/old), mean over each trace's terms, then over traces.

Use with group_mean(scale="std", ddof=1). Paper: Shao et al. 2024, arXiv 2402.03300; the weight: Yao et al. 2025 (TIS).
Peers: TRL's loss_type="grpo" with vllm_importance_sampling_mode="token_truncate" and clip_max 2 (its default is
sequence_mask, 3.0); verl's seq-mean-token-mean with rollout_is="token". `with_kl` adds the paper's k3 penalty (0.04),
`with_beta` TRL's.
"""

GRPO_DIRECT = replace(GRPO, ratio=_ROLLOUT, weights=())
"""clip(theta/rollout), reduced as GRPO.

Paper: Shao et al. 2024, arXiv 2402.03300. Peers: verl's bypass mode with ppo_clip, TRL's AsyncGRPO ratio, ART's PPO.
"""

DAPO = Objective(Clip(0.2, 0.28), _OLD, weights=(_TIS,), reduce=Reduce("token"))
"""Clip-higher and one mean over all terms of the step, so that long traces count in full.

Use with group_mean(scale="std", ddof=1). Paper: Yu et al. 2025, arXiv 2503.14476. Peers: TRL's loss_type="dapo" with
epsilon_high 0.28, verl's token-mean. TRL's loss_type="bnpo" takes the mean within each micro-batch, so that its
gradient depends on how the step was cut. Dynamic sampling and the overlong penalty belong to data and rewards.
"""

DAPO_DIRECT = replace(DAPO, ratio=_ROLLOUT, weights=())
"""clip(theta/rollout), reduced as DAPO.

Paper: Yu et al. 2025, arXiv 2503.14476. Peers: slime without recomputed logprobs.
"""

DR_GRPO = Objective(Clip(0.2, 0.2), _OLD, weights=(_TIS,), reduce=Reduce("trace", "sum", norm=1024.0))
"""The sum over a trace's terms over a constant, then the mean over traces: no length bias.

Use with group_mean(scale="none"). Paper: Liu et al. 2025, arXiv 2503.20783. Peers: `reduce.norm` is the generation
budget in the paper, TRL's max_completion_length, verl's loss_scale_factor (seq-mean-token-sum-norm); it only scales the
loss.
"""

DR_GRPO_DIRECT = replace(DR_GRPO, ratio=_ROLLOUT, weights=())
"""clip(theta/rollout), reduced as DR_GRPO.

Paper: Liu et al. 2025, arXiv 2503.20783.
"""

LUSPO = Objective(
    Clip(3e-4, 4e-4, level=Level("trace", "mean")), _OLD, weights=(_TIS,), reduce=Reduce("trace", "sum", norm=1.0)
)
"""GSPO's trace ratio, each trace counted by its length: the sum over its terms, then the mean over traces.

Use with group_mean(scale="std", ddof=1). Paper: arXiv 2602.05261. Peers: TRL's loss_type="luspo" with
importance_sampling_level="sequence".
"""

DUAL_CLIP = Objective(Clip(0.2, 0.2, dual=3.0), _OLD, weights=(_TIS,), reduce=Reduce("token"))
"""The clip with a floor for bad tokens: for A < 0 the loss is at most 3 |A|.

Paper: Ye et al. 2019, arXiv 1912.09729. Peers: verl's vanilla (clip_ratio_c 3), SkyRL's dual_clip, ROLL (1 + 2 * clip).
TRL's `delta` bounds the same branch and is `Clip(delta=...)`.
"""
