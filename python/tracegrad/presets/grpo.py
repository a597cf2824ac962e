"""GRPO and its relatives: a clipped surrogate on group-relative advantages, told apart by their reduction.

Each comes decoupled, theta/old clipped and weighted by the truncated old/rollout (token TIS), and _DIRECT,
theta/rollout clipped, which needs no pass for old logprobs. Advantages are the caller's: `tracegrad.advantage`.
"""

from dataclasses import replace

from tracegrad.algebra import Clamp, Clip, Objective, Ratio, Reduce, Weight

_TIS = Weight(Ratio("old", "rollout"), shape=Clamp(0.0, 2.0))
_OLD = Ratio("theta", "old")
_ROLLOUT = Ratio("theta", "rollout")

GRPO = Objective(Clip(0.2, 0.2), _OLD, weights=(_TIS,), reduce=Reduce("trace", "mean"))
"""min(old/rollout, 2) * clip(theta/old), mean over each trace's terms, then over traces.

Use with group_mean(scale="std", ddof=1). Shao et al. 2024, arXiv 2402.03300; the weight: Yao et al. 2025 (TIS). TRL's
loss_type="grpo" with vllm_importance_sampling_mode="token_truncate" and clip_max 2 (its default is sequence_mask, 3.0);
verl's seq-mean-token-mean with rollout_is="token". `with_kl` adds the paper's k3 penalty (0.04).
"""

GRPO_DIRECT = replace(GRPO, ratio=_ROLLOUT, weights=())
"""clip(theta/rollout), reduced as GRPO: verl's bypass mode with ppo_clip, TRL's AsyncGRPO ratio."""

DAPO = Objective(Clip(0.2, 0.28), _OLD, weights=(_TIS,), reduce=Reduce("token"))
"""Clip-higher and one mean over all terms of the step, so that long traces count in full.

Use with group_mean(scale="std", ddof=1). Yu et al. 2025, arXiv 2503.14476. TRL's loss_type="dapo" with epsilon_high
0.28, verl's token-mean. Dynamic sampling and the overlong penalty belong to data and rewards and are not in here.
"""

DAPO_DIRECT = replace(DAPO, ratio=_ROLLOUT, weights=())
"""clip(theta/rollout), reduced as DAPO."""

DR_GRPO = Objective(Clip(0.2, 0.2), _OLD, weights=(_TIS,), reduce=Reduce("trace", "sum", norm=1024.0))
"""The sum over a trace's terms over a constant, then the mean over traces: no length bias.

Use with group_mean(scale="none"). Liu et al. 2025, arXiv 2503.20783. `reduce.norm` is the generation budget in the
paper, TRL's max_completion_length, verl's loss_scale_factor; it only scales the loss.
"""

DR_GRPO_DIRECT = replace(DR_GRPO, ratio=_ROLLOUT, weights=())
"""clip(theta/rollout), reduced as DR_GRPO."""
