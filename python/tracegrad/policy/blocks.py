"""Attention by blocks for transformers models: flex_attention, in one dtype under autocast.

Here is `attend_in_blocks`, which the learner calls for models on CUDA. No masks: `masks` makes them.
"""

from typing import Any

import torch
from torch import Tensor, nn

from tracegrad.policy.model import attention_of
from tracegrad.policy.roads import BLOCKS
from tracegrad.policy.run import unwrapped


def attend_in_blocks(model: Any) -> None:
    """Has a model that was loaded with sdpa attend by flex_attention, where it can: packed rows need no dense mask."""
    inner = unwrapped(model)
    if attention_of(model) == "sdpa" and getattr(inner, "_supports_flex_attn", False):
        from transformers import AttentionInterface, AttentionMaskInterface
        from transformers.masking_utils import flex_attention_mask

        AttentionInterface.register(BLOCKS[1], _attend)
        AttentionMaskInterface.register(BLOCKS[1], flex_attention_mask)  # without it a plain forward has no mask at all
        inner.set_attn_implementation(BLOCKS[1])


def _attend(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **how: Any
) -> tuple[Tensor, Tensor | None]:
    """transformers' flex_attention, with queries and keys in the dtype of the values.

    Norms of queries and keys leave them in float32 under autocast, which knows sdpa but not flex_attention.
    """
    from transformers.integrations.flex_attention import flex_attention_forward

    if torch.is_autocast_enabled(value.device.type):
        query, key = query.to(value.dtype), key.to(value.dtype)
    return flex_attention_forward(module, query, key, value, attention_mask, **how)
