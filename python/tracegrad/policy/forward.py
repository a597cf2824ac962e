"""The packed forward of unmodified causal LMs, and the logprobs of a batch's terms.

No loss, no advantages. Called by any trainer, and by `loss` for the hidden states.
"""

from __future__ import annotations

from typing import Any, Literal, NoReturn

import torch
from torch import Tensor, nn

from tracegrad.batch import Batch
from tracegrad.errors import ArgumentError
from tracegrad.kernels.head import token_logprobs
from tracegrad.kernels.stack import stacked
from tracegrad.policy.blocks import NAMES as BLOCKS
from tracegrad.policy.masks import block_mask, dense_mask
from tracegrad.policy.model import (
    attention_of,
    body_of,
    config_of,
    head_of,
    keeps_all_keys,
    recomputes,
    states_along_the_row,
)

Plan = Literal["stack", "mask", "flex"]


def logprobs(model: nn.Module, batch: Batch, *, logits_dtype: torch.dtype | None = None) -> Tensor:
    """Log-probability of each term under the model.

    Args:
        model: a transformers causal LM, unmodified. Put it in eval mode, or give it no dropout.
        batch: a row of a `Step`; moved to the model's device if it is not there.
        logits_dtype: as in `token_logprobs`.

    Returns:
        [m] float32 (float64 for a float64 model), nats; differentiable where gradients are on.

    Raises:
        ArgumentError: for a model whose head or attention cannot be reproduced, with the reason.
    """
    return logprobs_and_entropy(model, batch, logits_dtype=logits_dtype)[0]


def logprobs_and_entropy(
    model: nn.Module,
    batch: Batch,
    *,
    logits_dtype: torch.dtype | None = None,
    plan: Plan | None = None,
    chunk_bytes: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Log-probability of each term, and the entropy of the distribution it was drawn from.

    Args and Raises: as in `logprobs`; `plan` as in `hidden_states`, `chunk_bytes` as in `token_logprobs`.

    Returns:
        two of [m] float32, nats; both differentiable. An empty batch runs the model on one token, so that their sum, 0,
        is connected to every trained parameter.
    """
    batch = batch.to(next(model.parameters()).device)
    head = head_of(model)
    logp, entropy = token_logprobs(
        read_states(model, batch, plan),
        head.weight,
        batch.target,
        inv_temperature=batch.inv_temperature,
        bias=head.bias,
        softcap=head.softcap,
        logit_scale=head.logit_scale,
        logits_dtype=logits_dtype,
        chunk_bytes=chunk_bytes,
    )
    return logp[batch.row], entropy[batch.row]


def forward_plan(model: nn.Module, batch: Batch) -> Plan:
    """How `hidden_states` runs this batch through this model.

    "flex": one row, flex_attention with a block mask built from `tree_end`; for models loaded with
    `attn_implementation="flex_attention"`, or changed by `blocks.attend_in_blocks`.
    "stack": the branches of a plain pack, sorted by length, as padded [B, S] batches under causal attention, a prefix
    that all of them share computed once. Exact, as padding stands after what is read; the fastest on CPU, where a
    dense mask costs T * T.
    "mask": one row under an explicit [1, 1, T, T] mask; for trees.

    Layers that carry a state from token to token (recurrent, convolutional, hybrid models) are kept apart by no mask:
    their plan is "stack", one branch in each row of a padded batch.

    Raises:
        ArgumentError: for a shared prefix under such layers.
    """
    if kinds := states_along_the_row(model):
        if _is_plain(batch.positions, batch.tree_end):
            return "stack"
        _refuse(model, kinds)
    if attention_of(model) in BLOCKS:
        return "flex"
    return "stack" if _is_plain(batch.positions, batch.tree_end) else "mask"


def hidden_states(model: nn.Module, batch: Batch, plan: Plan | None = None) -> Tensor:
    """The hidden states that the head reads.

    Args:
        model: a transformers causal LM.
        batch: on the model's device.
        plan: default `forward_plan(model, batch)`.

    Returns:
        [T, H], in the order of `batch.ids`; zeros in branches where nothing is read.
    """
    plan = plan or forward_plan(model, batch)
    if plan == "stack":
        shared = keeps_all_keys(model) and not recomputes(model)
        return stacked(body_of(model), batch.ids, batch.positions, batch.read, share_prefix=shared)

    def build(window: int | None) -> Any:
        return block_mask(batch, window=window) if plan == "flex" else dense_mask(batch, window=window, dtype=additive)

    additive = None if attention_of(model) == "sdpa" else next(model.parameters()).dtype
    masks = _masks_by_kind(model, build)
    out = body_of(model)(
        input_ids=batch.ids[None], attention_mask=masks, position_ids=batch.positions[None], use_cache=False
    )
    return out.last_hidden_state[0]


def read_states(model: nn.Module, batch: Batch, plan: Plan | None = None) -> Tensor:
    """[U, H] of `hidden_states` at the positions the head reads, in autocast's dtype where autocast is on.

    Residual streams are float32 under autocast; a head of `nn.Linear` would be computed in its dtype, and ours is too.
    """
    read = hidden_states(model, batch, plan)[batch.read]
    kind = read.device.type
    low = torch.is_autocast_enabled(kind) and read.dtype == torch.float32
    return read.to(torch.get_autocast_dtype(kind)) if low else read


def _is_plain(positions: Tensor, tree_end: Tensor) -> bool:
    """Whether the row is branches side by side: every token's subtree ends where its branch does."""
    starts = (positions == 0).nonzero().squeeze(1)
    ends = torch.cat([starts[1:], starts.new_tensor([len(positions)])])
    lengths = ends - starts
    depth = torch.arange(len(positions), device=positions.device) - starts.repeat_interleave(lengths)
    return bool((tree_end == ends.repeat_interleave(lengths)).all() & (positions == depth).all())


def _masks_by_kind(model: nn.Module, build: Any) -> Any:
    """One mask, or one for each kind of layer, as the model's forward takes it."""
    config = config_of(model)
    kinds, window = set(getattr(config, "layer_types", None) or ()), getattr(config, "sliding_window", None)
    if unknown := states_along_the_row(model):
        _refuse(model, unknown)
    if not kinds:
        return build(window)
    if kinds == {"full_attention"}:
        return build(None)
    return {"full_attention": build(None), "sliding_attention": build(window)}


def _refuse(model: nn.Module, kinds: set[str]) -> NoReturn:
    raise ArgumentError(
        f"{type(model).__name__} has layers of {', '.join(sorted(kinds))}, which no mask keeps apart in one row. "
        "A branch would read its sibling's state. Use the plan 'stack', which pack(share_prefixes=False) gives."
    )
