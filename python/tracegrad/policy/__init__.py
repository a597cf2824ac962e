"""Logprobs of a model's own tokens and the loss over them: the packed forward, and the head without logits.

In comes a `Batch`; out go logprobs, or a loss with its gradient. Unmodified causal LMs of transformers; `learner`
calls this, any trainer may call `token_logprobs`. Its files, each using those before it alone: `masks` (who sees
whom), `model` (what a model is made of); `compilation`, `blocks` (compiled flex_attention); `run`, `roads` (ways
through a row, tried before trusted); `pictures` (rows that hold some), `forward`; `loss` (the fused road from hidden
states to a gradient).
"""

from tracegrad.kernels.head import token_logprobs
from tracegrad.kernels.plan import HeadPlan
from tracegrad.policy.forward import Plan, forward_plan, hidden_states, logprobs, logprobs_and_entropy
from tracegrad.policy.loss import PolicyLoss, batch_loss, policy_loss
from tracegrad.policy.masks import block_mask, dense_mask
from tracegrad.policy.model import head_of

__all__ = [
    "HeadPlan",
    "Plan",
    "PolicyLoss",
    "batch_loss",
    "block_mask",
    "dense_mask",
    "forward_plan",
    "head_of",
    "hidden_states",
    "logprobs",
    "logprobs_and_entropy",
    "policy_loss",
    "token_logprobs",
]
