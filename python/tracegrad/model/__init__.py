"""Compute logprobs of a model's own tokens on packed rows, and the loss over them without all logits in memory.

Takes a `Batch` and returns logprobs, or a loss with its gradient. Models are unmodified causal LMs of transformers.

    >>> from typing import get_args
    >>> from tracegrad.model import Plan
    >>> get_args(Plan)  # the values of `forward`, from `forward_plan`
    ('flex', 'stack', 'alone', 'mask')
"""

from tracegrad.model.attention import block_mask, dense_mask
from tracegrad.model.forward import Plan, forward_plan, hidden_states, logprobs, logprobs_and_entropy
from tracegrad.model.lm_head import HeadPlan, token_logprobs
from tracegrad.model.logits import logprobs_from_logits, support_of_tokens
from tracegrad.model.loss import PolicyLoss, batch_loss, policy_loss
from tracegrad.model.structure import head_of

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
    "logprobs_from_logits",
    "policy_loss",
    "support_of_tokens",
    "token_logprobs",
]
