"""Attention by blocks for transformers models: flex_attention, compiled once for all of them, never its unfused form.

Here are `attend_in_blocks`, which the learner calls for models on CUDA, and the implementation that it puts in. No
masks: `masks` makes them.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from tracegrad.errors import ArgumentError, TracegradError
from tracegrad.policy.compilation import compiled
from tracegrad.policy.model import BLOCKS, attention_of, dense_attention, unwrapped

BACKEND: Any = "inductor"
"""What torch.compile makes kernels with. A CPU has no gradient under inductor: rehearsals name another backend."""


def attend_in_blocks(model: Any) -> None:
    """Switch a model to our compiled flex_attention, if its architecture has flex_attention.

    A model keeps eager attention that was chosen although it has sdpa. Packed rows then need no dense mask.
    """
    inner, attention = unwrapped(model), attention_of(model)
    ours = attention in (BLOCKS[0], "sdpa", dense_attention(model))
    if ours and getattr(inner, "_supports_flex_attn", False):
        from transformers import AttentionInterface, AttentionMaskInterface
        from transformers.masking_utils import flex_attention_mask

        AttentionInterface.register(BLOCKS[1], _attend)
        AttentionMaskInterface.register(BLOCKS[1], flex_attention_mask)  # without it a plain forward has no mask at all
        inner.set_attn_implementation(BLOCKS[1])


def own_blocks(model: Any) -> None:
    """Switch a model that was loaded with transformers' flex_attention to ours, which does the same.

    transformers compiles one function for all models and settings of a process, under torch's own limit of graphs.
    """
    if attention_of(model) == BLOCKS[0]:
        attend_in_blocks(model)


def must_be_fused(device: torch.device) -> bool:
    """Whether a model that attends by blocks may not fall back to a dense mask: on CUDA, where rows are long."""
    return device.type == "cuda"


def _attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    dropout: float = 0.0,
    **others: Any,
) -> tuple[Tensor, None]:
    """flex_attention as transformers calls an implementation of attention.

    Norms of queries and keys leave them in float32 under autocast, which knows sdpa but not flex_attention.

    Args:
        query: [B, heads, T, D]; keys and values have as many heads or fewer.
        attention_mask: a `BlockMask`, or a table that is added to the scores, [B, 1, T, T].
        s_aux: [heads], attention sinks.
    """
    if dropout or others.get("position_bias") is not None:
        raise ArgumentError(
            f"{type(module).__name__}: flex_attention has no dropout and no position bias here. The logprobs would be "
            "others. Set attention_dropout to 0 in the model's configuration, or load it with sdpa."
        )
    if torch.is_autocast_enabled(value.device.type):
        query, key = query.to(value.dtype), key.to(value.dtype)
    attend = _flex if torch.compiler.is_compiling() else _compiled(BACKEND)  # part of a compiled layer's graph
    return attend(query, key, value, attention_mask, scaling, softcap, s_aux).transpose(1, 2).contiguous(), None


@functools.cache
def _compiled(backend: Any) -> Callable[..., Tensor]:
    """Compile attention for any length of row. Every length of a row would else be a graph of its own."""
    return compiled(_flex, backend=backend, dynamic=True, fullgraph=True)


def _flex(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Any,
    scale: float | None,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """Attention of a row, [B, heads, T, D], in the dtype of the values."""
    from torch.nn.attention.flex_attention import AuxRequest, BlockMask, flex_attention

    if not torch.compiler.is_dynamo_compiling():
        raise TracegradError(
            "flex_attention would run uncompiled, with a float32 table of [heads, T, T] for each layer. torch does not "
            "compile within a TorchDispatchMode whose ignore_compile_internals is False, under "
            "torch.compiler.set_stance, or with TORCHDYNAMO_DISABLE=1. Leave that, or load the model with sdpa."
        )
    blocks = mask if isinstance(mask, BlockMask) else None
    table: Any = mask if blocks is None else None

    def changed(score: Tensor, batch: Tensor, _head: Tensor, place: Tensor, other: Tensor) -> Tensor:
        if softcap is not None:
            score = softcap * torch.tanh(score / softcap)
        return score if table is None else score + table[batch, 0, place, other]

    queries, heads = query.shape[1], key.shape[1]
    if (shared := queries // heads) & (shared - 1):  # flex_attention's kernels share keys among 1, 2, 4, ... queries
        key, value = (each.repeat_interleave(shared, dim=1) for each in (key, value))
    result: Any = flex_attention(
        query,
        key,
        value,
        score_mod=None if softcap is None and table is None else changed,
        block_mask=blocks,
        scale=scale,
        enable_gqa=queries != key.shape[1],
        kernel_options={"BACKEND": "TRITON"},  # the kernel for short rows refuses 64 to 127 tokens of grouped queries
        return_aux=None if sinks is None else AuxRequest(lse=True),
    )
    if sinks is None:
        return result
    out, aux = result
    # A sink is one more score without a value: exp(lse) / (exp(lse) + exp(sink)) of the attention is left.
    left = torch.sigmoid(aux.lse - sinks.to(aux.lse.dtype)[:, None])
    return out * left[..., None].to(out.dtype)
