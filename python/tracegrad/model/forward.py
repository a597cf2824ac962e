"""The packed forward of unmodified causal LMs, and the logprobs of a batch's terms.

No loss, no advantages. Called by any trainer, and by `loss` for the hidden states.
"""

import torch
from torch import Tensor, nn

from tracegrad.errors import ArgumentError
from tracegrad.model import vision
from tracegrad.model.attention import Plan, must_be_fused, own_blocks, run
from tracegrad.model.lm_head import token_logprobs
from tracegrad.model.structure import BLOCKS, attention_of, config_of, head_of, media_ids, recomputes
from tracegrad.model.verify import Road, reached, why_not
from tracegrad.packing import Batch


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
    """How `hidden_states` runs this batch through this model: the first of these that gives the model's own numbers.

    "flex": one row, flex_attention with a block mask built from `tree_end`; for models loaded with
    `attn_implementation="flex_attention"`, which this switches to a compiled function of its own, or changed by
    `attention.attend_in_blocks`. On CUDA such a model takes no other plan.
    "stack": the branches of a plain pack, sorted by length, as padded [B, S] batches under causal attention, a prefix
    that all of them share computed once. Exact, as padding stands after what is read; the fastest on CPU, where a
    dense mask costs T * T.
    "alone": each branch of a plain pack by itself.
    "mask": one row under an explicit [1, 1, T, T] mask; for trees.

    Each is compared with the branches alone before it is taken, once for a model: see `verify`.

    Raises:
        ArgumentError: for a shared prefix in a model that no mask lets share it, or one that is not causal; on CUDA for
            a model with flex_attention that does not give the model's own numbers.
    """
    own_blocks(model)
    blocks = attention_of(model) in BLOCKS
    if blocks and not _why_not(model, Road("flex", tree=True), batch):
        return "flex"
    if _is_plain(batch.positions, batch.tree_end):
        why = _why_not(model, Road("flex"), batch) if blocks else ""
        if blocks and not why:
            return "flex"
        if why and must_be_fused(batch.ids.device):
            raise ArgumentError(
                f"flex_attention cannot run a packed row: {why}. Other attention is slower and takes tables of [T, T]. "
                "To accept that, load the model with attn_implementation='sdpa'; in a run, set "
                "attention.implementation sdpa."
            )
        return "alone" if _why_not(model, Road("stack"), batch) else "stack"
    _check(model, "flex" if blocks else "mask", batch, tree=True)
    return "mask"


def _check(model: nn.Module, plan: Plan, batch: Batch, *, tree: bool) -> None:
    if why := _why_not(model, Road(plan, tree), batch):
        harm = "A branch would read what is its sibling's, or stand at another position."
        if tree:
            raise ArgumentError(
                f"prefixes cannot be shared: {why}. {harm} Pack with share_prefixes=False; in a run, leave out "
                "pack.share_prefixes."
            )
        raise ArgumentError(
            f"a row cannot run as the plan {plan!r}: {why}. {harm} Leave plan out, so that another way is taken."
        )


def _check_media(model: nn.Module, batch: Batch) -> None:
    if (media := media_ids(model)) and bool(torch.isin(batch.ids, batch.ids.new_tensor(media)).any()):
        raise ArgumentError(
            f"the batch holds ids that stand for a picture, video or sound ({', '.join(map(str, media))} of "
            f"{type(model).__name__}). The decoder would run without what was seen: logprobs would be nats off. "
            "Leave such traces out; align holds what was sampled behind media."
        )


def _why_not(model: nn.Module, road: Road, batch: Batch) -> str:
    """As `verify.why_not`, for the branches of a batch; how long they are is only asked where it could matter."""
    done = reached(model, road)
    total = len(batch.ids)
    if done >= total:
        return why_not(model, road)
    reach = batch.reach
    if done < reach:  # longer ones come: the next power of two that the row, and the model's positions, allow
        most = min(total, getattr(config_of(model), "max_position_embeddings", None) or total)
        reach = max(reach, min(1 << (reach - 1).bit_length(), most))
    return why_not(model, road, reach)


def hidden_states(model: nn.Module, batch: Batch, plan: Plan | None = None) -> Tensor:
    """The hidden states that the head reads.

    Args:
        model: a transformers causal LM.
        batch: on the model's device.
        plan: default `forward_plan(model, batch)`.

    Returns:
        [T, H], in the order of `batch.ids`; zeros in branches where nothing is read.

    Raises:
        ArgumentError: for a plan that does not give the model's own numbers, or ids that stand for a picture.
    """
    if batch.images is not None:
        if plan is not None:
            raise ArgumentError("plan is given for a row with pictures, which has no choice of plans. Leave it out.")
        return vision.states(model, batch)
    _check_media(model, batch)
    if plan in ("flex", "mask") and _why_not(model, Road(plan, tree=True), batch):
        _check(model, plan, batch, tree=not _is_plain(batch.positions, batch.tree_end))
    plan = plan or forward_plan(model, batch)
    shared = plan == "stack" and not recomputes(model) and not _why_not(model, Road("stack", tree=True), batch)
    return run(model, batch, plan, share_prefix=shared)


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
