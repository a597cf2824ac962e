"""Logprobs of a model's own tokens: the packed forward of unmodified causal LMs, and the head without logits.

Here are `logprobs`, `logprobs_and_entropy` and `token_logprobs`. torch rooms alone import this; no loss, no advantages.
`learner` calls it for old, reference and trained logprobs alike, any trainer may call `token_logprobs`.
"""

from __future__ import annotations

from typing import Any, Literal
from weakref import WeakSet

import torch
from torch import Tensor, nn

from tracegrad.batch import Batch
from tracegrad.errors import ArgumentError
from tracegrad.kernels.head import Head, logits_of, token_logprobs
from tracegrad.kernels.stack import stacked

__all__ = [
    "Plan",
    "block_mask",
    "dense_mask",
    "forward_plan",
    "head_of",
    "hidden_states",
    "logprobs",
    "logprobs_and_entropy",
    "token_logprobs",
]

Plan = Literal["stack", "mask", "flex"]

_BLOCK = 128  # flex_attention's sparse block
_checked: WeakSet[nn.Module] = WeakSet()  # models whose head was found to be what `head_of` says


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
    model: nn.Module, batch: Batch, *, logits_dtype: torch.dtype | None = None
) -> tuple[Tensor, Tensor]:
    """Log-probability of each term, and the entropy of the distribution it was drawn from.

    Args and Raises: as in `logprobs`.

    Returns:
        two of [m] float32, nats; both differentiable. An empty batch runs the model on one token, so that their sum, 0,
        is connected to every trained parameter.
    """
    batch = batch.to(next(model.parameters()).device)
    head = head_of(model)
    logp, entropy = token_logprobs(
        hidden_states(model, batch)[batch.read],
        head.weight,
        batch.target,
        inv_temperature=batch.inv_temperature,
        bias=head.bias,
        softcap=head.softcap,
        logit_scale=head.logit_scale,
        logits_dtype=logits_dtype,
    )
    return logp[batch.row], entropy[batch.row]


# --- the packed forward ---


def forward_plan(model: nn.Module, batch: Batch) -> Plan:
    """How `hidden_states` runs this batch through this model.

    "flex": one row, flex_attention with a block mask built from `tree_end`; for models loaded with
    `attn_implementation="flex_attention"`.
    "stack": the branches of a plain pack, sorted by length, as padded [B, S] batches under causal attention, a prefix
    that all of them share computed once. Exact, as padding stands after what is read; the fastest on CPU, where a
    dense mask costs T * T.
    "mask": one row under an explicit [1, 1, T, T] mask; for trees.
    """
    if _attention(model) == "flex_attention":
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
        shared = _keeps_all_keys(model) and not _recomputes(model)
        return stacked(_body(model), batch.ids, batch.positions, batch.read, share_prefix=shared)

    def build(window: int | None) -> Any:
        return block_mask(batch, window=window) if plan == "flex" else dense_mask(batch, window=window, dtype=additive)

    additive = None if _attention(model) == "sdpa" else next(model.parameters()).dtype
    masks = _masks_by_kind(model, build)
    out = _body(model)(
        input_ids=batch.ids[None], attention_mask=masks, position_ids=batch.positions[None], use_cache=False
    )
    return out.last_hidden_state[0]


def dense_mask(batch: Batch, *, window: int | None = None, dtype: torch.dtype | None = None) -> Tensor:
    """[1, 1, T, T]: where query q sees key k, k <= q < tree_end[k], and no further back than `window`.

    Args:
        batch: on the device of the mask.
        window: of sliding attention: positions[q] - positions[k] < window.
        dtype: None gives bool, a floating type the additive mask of eager attention.
    """
    index = torch.arange(len(batch.ids), device=batch.ids.device)
    query, key = index[:, None], index[None, :]
    seen = (key <= query) & (query < batch.tree_end[None, :])
    if window is not None:
        seen &= batch.positions[:, None] - batch.positions[None, :] < window
    if dtype is not None:
        seen = torch.zeros_like(seen, dtype=dtype).masked_fill(~seen, torch.finfo(dtype).min)
    return seen[None, None]


def block_mask(batch: Batch, *, window: int | None = None, block: int = _BLOCK) -> Any:
    """The same mask as a `BlockMask` of flex_attention, from the intervals alone: [T / block]^2 comparisons.

    A block of keys concerns a block of queries if the largest tree_end in it lies beyond the first query, and is seen
    whole if the smallest lies beyond the last. Nothing is read back from the device.
    """
    from torch.nn.attention.flex_attention import BlockMask

    tree_end, positions = batch.tree_end, batch.positions
    total = len(tree_end)
    blocks = -(-total // block)
    beyond = nn.functional.pad(tree_end, (0, blocks * block - total)).view(blocks, block)
    least = nn.functional.pad(tree_end, (0, blocks * block - total), value=total).view(blocks, block).amin(1)
    first = torch.arange(blocks, device=tree_end.device) * block
    below = first[:, None] > first[None, :]
    some = (below & (beyond.amax(1)[None, :] > first[:, None])) | (first[:, None] == first[None, :])
    whole = below & (least[None, :] >= (first[:, None] + block).clamp(max=total))
    if window is not None:  # blocks within the window are found by distance in the row: a depth is never larger
        whole &= first[:, None] + block - 1 - first[None, :] < window

    def seen(_b: Tensor, _h: Tensor, query: Tensor, key: Tensor) -> Tensor:
        inside = (key <= query) & (query < tree_end[key])
        return inside if window is None else inside & (positions[query] - positions[key] < window)

    partial = _as_indices(some & ~whole)
    return BlockMask.from_kv_blocks(
        *partial, *_as_indices(whole), BLOCK_SIZE=block, mask_mod=seen, seq_lengths=(total, total)
    )


def _as_indices(table: Tensor) -> tuple[Tensor, Tensor]:
    """Per row of a [Q, K] table, how many are true and, first, which: [1, 1, Q] and [1, 1, Q, K] int32."""
    counts = table.sum(-1, dtype=torch.int32)
    order = torch.argsort(table.to(torch.int8), dim=-1, descending=True, stable=True).to(torch.int32)
    return counts[None, None], order[None, None].contiguous()


def _is_plain(positions: Tensor, tree_end: Tensor) -> bool:
    """Whether the row is branches side by side: every token's subtree ends where its branch does."""
    starts = (positions == 0).nonzero().squeeze(1)
    ends = torch.cat([starts[1:], starts.new_tensor([len(positions)])])
    lengths = ends - starts
    depth = torch.arange(len(positions), device=positions.device) - starts.repeat_interleave(lengths)
    return bool((tree_end == ends.repeat_interleave(lengths)).all() & (positions == depth).all())


# --- what a transformers model is made of ---


def head_of(model: nn.Module) -> Head:
    """The head of a causal LM, as its configuration says; compared once with the model's own logits.

    Raises:
        ArgumentError: if the head is not a plain linear layer, or does something to the logits that is not known here.
    """
    linear = model.get_output_embeddings()  # type: ignore[operator]
    if not isinstance(linear, nn.Linear) or hasattr(linear, "base_layer"):
        raise ArgumentError(
            f"the head of {type(model).__name__} is {type(linear).__name__}, not a linear layer. "
            "Its logits cannot be computed a chunk at a time. Take adapters and wrappers off the head."
        )
    config = _config(model)
    head = Head(
        weight=linear.weight,
        bias=linear.bias,
        softcap=getattr(config, "final_logit_softcapping", None),
        logit_scale=float(getattr(config, "logit_scale", None) or 1.0)
        / (getattr(config, "logits_scaling", None) or 1.0),
    )
    if model not in _checked:
        _check_head(model, head)
        _checked.add(model)
    return head


@torch.no_grad()
def _check_head(model: nn.Module, head: Head) -> None:
    training = model.training
    model.eval()
    try:
        ids = torch.tensor([[0, 1]], device=head.weight.device)
        theirs = model(input_ids=ids, use_cache=False).logits.float()
        ours = logits_of(_body(model)(input_ids=ids, use_cache=False).last_hidden_state, head, None).float()
    finally:
        model.train(training)
    gap = (theirs - ours).abs().max().item()
    if not gap <= 0.02 * theirs.abs().max().clamp(min=1.0).item():
        raise ArgumentError(
            f"{type(model).__name__} does something to its logits that is not known here: they differ by {gap:.3g}. "
            "Logprobs computed without it would be wrong. Pass its hidden states and head to token_logprobs."
        )


def _config(model: nn.Module) -> Any:
    return model.config.get_text_config()  # type: ignore[union-attr,operator]


def _body(model: nn.Module) -> nn.Module:
    body = model.get_decoder()  # type: ignore[operator]
    if body is None or body is model:
        raise ArgumentError(f"{type(model).__name__} has no decoder below its head. Pass a causal LM of transformers.")
    return body


def _attention(model: nn.Module) -> str:
    return getattr(_config(model), "_attn_implementation", None) or "eager"


def _keeps_all_keys(model: nn.Module) -> bool:
    """Whether every layer attends to all earlier tokens, so that a prefix's keys and values say all of it."""
    config = _config(model)
    kinds = set(getattr(config, "layer_types", None) or ())
    windowed = not kinds and getattr(config, "sliding_window", None) is not None
    return kinds <= {"full_attention"} and not windowed and getattr(model, "_supports_sdpa", False)


def _recomputes(model: nn.Module) -> bool:
    """Whether activations are checkpointed: transformers then returns no keys and values."""
    newer = hasattr(type(model), "is_activation_checkpointing")
    return bool(getattr(model, "is_activation_checkpointing" if newer else "is_gradient_checkpointing", False))


def _masks_by_kind(model: nn.Module, build: Any) -> Any:
    """One mask, or one for each kind of layer, as the model's forward takes it."""
    config = _config(model)
    kinds, window = set(getattr(config, "layer_types", None) or ()), getattr(config, "sliding_window", None)
    if unknown := kinds - {"full_attention", "sliding_attention"}:
        raise ArgumentError(
            f"{type(model).__name__} has layers of {', '.join(sorted(unknown))}, which no mask keeps apart in one row. "
            "Use the plan 'stack' (attn_implementation='sdpa' and a pack without shared prefixes)."
        )
    if not kinds:
        return build(window)
    if kinds == {"full_attention"}:
        return build(None)
    return {"full_attention": build(None), "sliding_attention": build(window)}
