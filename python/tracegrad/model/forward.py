"""Run unmodified causal LMs on packed rows, and compute the logprobs of the trained tokens of a batch."""

import torch
from torch import Tensor, nn

from tracegrad.errors import ArgumentError
from tracegrad.model import vision
from tracegrad.model.attention import Plan, must_be_fused, run, use_own_flex_attention
from tracegrad.model.lm_head import token_logprobs
from tracegrad.model.structure import (
    BLOCK_ATTENTION,
    attention_of,
    config_of,
    has_activation_checkpointing,
    head_of,
    media_ids,
)
from tracegrad.model.verify import ForwardMode, check_forward_mode, checked_length
from tracegrad.packing import Batch


def logprobs(model: nn.Module, batch: Batch, *, logits_dtype: torch.dtype | None = None) -> Tensor:
    """Compute the log-probability of each trained token under the model.

    Args:
        model: a transformers causal LM, unmodified. Put it in eval mode, or set its dropout to 0.
        batch: a row of a `Step`. It is moved to the model's device if needed.
        logits_dtype: as in `token_logprobs`.

    Returns:
        [m] float32 (float64 for a float64 model), nats; differentiable if gradients are enabled.

    Raises:
        ArgumentError: if the head or the attention of the model cannot be reproduced, with the reason.

    >>> from transformers import LlamaConfig, LlamaForCausalLM
    >>> from tracegrad import Sequences, pack
    >>> size = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
    >>> model = LlamaForCausalLM(LlamaConfig(vocab_size=8, **size)).eval()
    >>> # Each of the 8 tokens gets probability 1 / 8.
    >>> _ = model.lm_head.weight.data.zero_()
    >>> sequences = Sequences.from_arrays([5, 6, 7], [0, 3], [float("nan"), -0.5, -0.1], [False, True, True])
    >>> [step] = pack(sequences, advantages=[1.0], tokens_per_row=16)
    >>> logprobs(model, step.batches[0]).detach().exp()
    tensor([0.1250, 0.1250])
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
    """Compute the log-probability of each trained token, and the entropy of the model's distribution there.

    Args and Raises: as in `logprobs`; `plan` as in `hidden_states`, `chunk_bytes` as in `token_logprobs`.

    Returns:
        logprobs [m] and entropies [m], float32 (float64 for a float64 model), nats; both differentiable. An empty batch
        runs the model on one token, so that their sum, 0, is connected to every trained parameter.

    >>> from transformers import LlamaConfig, LlamaForCausalLM
    >>> from tracegrad import Sequences, pack
    >>> size = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
    >>> model = LlamaForCausalLM(LlamaConfig(vocab_size=8, **size)).eval()
    >>> # Each of the 8 tokens gets probability 1 / 8.
    >>> _ = model.lm_head.weight.data.zero_()
    >>> sequences = Sequences.from_arrays([5, 6, 7], [0, 3], [float("nan"), -0.5, -0.1], [False, True, True])
    >>> [step] = pack(sequences, advantages=[1.0], tokens_per_row=16)
    >>> result, entropy = logprobs_and_entropy(model, step.batches[0])
    >>> result.detach(), entropy.detach()  # log(1 / 8) and log(8)
    (tensor([-2.0794, -2.0794]), tensor([2.0794, 2.0794]))
    """
    batch = batch.to(next(model.parameters()).device)
    head = head_of(model)
    logp, entropy = token_logprobs(
        read_states(model, batch, plan),
        head.weight,
        batch.target,
        inv_temperature=batch.inv_temperature,
        support=batch.support,
        bias=head.bias,
        softcap=head.softcap,
        logit_scale=head.logit_scale,
        logits_dtype=logits_dtype,
        chunk_bytes=chunk_bytes,
    )
    return logp[batch.logit_row], entropy[batch.logit_row]


def forward_plan(model: nn.Module, batch: Batch) -> Plan:
    """Return the plan by which `hidden_states` runs this batch: the first of these that is correct for the model.

    "flex": one row, flex_attention with a block mask built from `tree_end`. It is for models loaded with
    `attn_implementation="flex_attention"`, which this function switches to tracegrad's own compiled implementation, and
    for models changed by `attention.enable_flex_attention`. On CUDA, no other plan is used for such a model.
    "stack": the branches of a plain pack, sorted by length, as padded [B, S] batches under causal attention. A prefix
    that all branches share is computed once. It is exact because padding comes after all tokens that are read. It is
    the fastest plan on CPU, where a dense mask costs T * T.
    "alone": each branch of a plain pack in its own pass.
    "mask": one row under an explicit [1, 1, T, T] mask; for trees.

    Before its first use with a model, a plan is compared with separate passes of each branch: see `verify`.

    Raises:
        ArgumentError: if the batch shares prefixes and no mask is correct for the model, if the model is not causal, or
            if the model uses flex_attention on CUDA and flex_attention does not reproduce its hidden states. Also if
            the batch is not on a device.

    >>> from transformers import LlamaConfig, LlamaForCausalLM
    >>> from tracegrad import Sequences, pack
    >>> size = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
    >>> model = LlamaForCausalLM(LlamaConfig(vocab_size=8, **size))
    >>> sequences = Sequences.from_arrays([5, 6, 7], [0, 3], [float("nan"), -0.5, -0.1], [False, True, True])
    >>> [step] = pack(sequences, advantages=[1.0], tokens_per_row=16)
    >>> forward_plan(model, step.batches[0].to("cpu"))
    'stack'
    """
    _check_tensors(batch)
    use_own_flex_attention(model)
    has_blocks = attention_of(model) in BLOCK_ATTENTION
    if has_blocks and not _unfit_reason(model, ForwardMode("flex", tree=True), batch):
        return "flex"
    if _is_plain(batch.positions, batch.tree_end):
        reason = _unfit_reason(model, ForwardMode("flex"), batch) if has_blocks else ""
        if has_blocks and not reason:
            return "flex"
        if reason and must_be_fused(batch.ids.device):
            raise ArgumentError(
                f"TG-MODEL-004: flex_attention cannot run a packed row: {reason}. Other attention is slower and takes "
                "tables of [T, T]. To accept that, load the model with attn_implementation='sdpa'; in a run, set "
                "attention.implementation sdpa."
            )
        return "alone" if _unfit_reason(model, ForwardMode("stack"), batch) else "stack"
    _check(model, "flex" if has_blocks else "mask", batch, tree=True)
    return "mask"


def _check_tensors(batch: Batch) -> None:
    if not isinstance(batch.ids, torch.Tensor):
        raise ArgumentError(
            f"TG-MODEL-026: the batch has arrays of {type(batch.ids).__module__}, and the model needs tensors on its "
            "device. Pass batch.to(next(model.parameters()).device)."
        )


def _check(model: nn.Module, plan: Plan, batch: Batch, *, tree: bool) -> None:
    if reason := _unfit_reason(model, ForwardMode(plan, tree), batch):
        impact = "A branch would read what is its sibling's, or stand at another position."
        if tree:
            raise ArgumentError(
                f"TG-MODEL-005: prefixes cannot be shared: {reason}. {impact} Pack with share_prefixes=False; in a "
                "run, leave out pack.share_prefixes."
            )
        raise ArgumentError(
            f"TG-MODEL-006: a row cannot run as the plan {plan!r}: {reason}. {impact} Leave plan out, so that "
            f"another way is taken."
        )


def _check_media(model: nn.Module, batch: Batch) -> None:
    if (media := media_ids(model)) and bool(torch.isin(batch.ids, batch.ids.new_tensor(media)).any()):
        raise ArgumentError(
            f"TG-MODEL-007: the batch holds ids that stand for a picture, video or sound ({', '.join(map(str, media))} "
            f"of {type(model).__name__}). The decoder would run without what was seen: logprobs would be nats off. "
            "Leave such traces out; align holds what was sampled behind media."
        )


def _unfit_reason(model: nn.Module, mode: ForwardMode, batch: Batch) -> str | None:
    """Return the answer of `check_forward_mode` for the branches of a batch.

    The longest branch is measured only if the row is longer than the branches that were compared.
    """
    checked = checked_length(model, mode)
    total = len(batch.ids)
    if checked >= total:
        return check_forward_mode(model, mode)
    longest = batch.longest_branch
    if checked < longest:  # later branches may be longer: check up to a power of two, if row and positions allow it
        limit = min(total, getattr(config_of(model), "max_position_embeddings", None) or total)
        longest = max(longest, min(1 << (longest - 1).bit_length(), limit))
    return check_forward_mode(model, mode, longest)


def hidden_states(model: nn.Module, batch: Batch, plan: Plan | None = None) -> Tensor:
    """Compute the hidden states of a row, as the head reads them.

    Args:
        model: a transformers causal LM.
        batch: on the model's device.
        plan: default `forward_plan(model, batch)`.

    Returns:
        [T, H], in the order of `batch.ids`; zeros in branches that the head does not read.

    Raises:
        ArgumentError: if the plan does not reproduce the model's own hidden states, if the ids of a row without images
            include media placeholder ids, if a plan is set for a row with images, or if the batch is not on a device.

    >>> from transformers import LlamaConfig, LlamaForCausalLM
    >>> from tracegrad import Sequences, pack
    >>> size = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
    >>> model = LlamaForCausalLM(LlamaConfig(vocab_size=8, **size))
    >>> sequences = Sequences.from_arrays([5, 6, 7], [0, 3], [float("nan"), -0.5, -0.1], [False, True, True])
    >>> [step] = pack(sequences, advantages=[1.0], tokens_per_row=16)
    >>> # Three tokens, eight dimensions.
    >>> hidden_states(model, step.batches[0].to("cpu")).shape
    torch.Size([3, 8])
    """
    _check_tensors(batch)
    if batch.images is not None:
        if plan is not None:
            raise ArgumentError(
                "TG-MODEL-008: plan is given for a row with pictures, which has no choice of plans. Leave it out."
            )
        return vision.image_hidden_states(model, batch)
    _check_media(model, batch)
    if plan in ("flex", "mask") and _unfit_reason(model, ForwardMode(plan, tree=True), batch):
        _check(model, plan, batch, tree=not _is_plain(batch.positions, batch.tree_end))
    plan = plan or forward_plan(model, batch)
    shared = (
        plan == "stack"
        and not has_activation_checkpointing(model)
        and not _unfit_reason(model, ForwardMode("stack", tree=True), batch)
    )
    return run(model, batch, plan, share_prefix=shared)


def read_states(model: nn.Module, batch: Batch, plan: Plan | None = None) -> Tensor:
    """Return the hidden states [U, H] at the positions that the head reads, in the autocast dtype if autocast is on.

    Residual streams are float32 under autocast, but autocast would compute an `nn.Linear` head in its own dtype.
    """
    read = hidden_states(model, batch, plan)[batch.read]
    device_type = read.device.type
    is_autocast = torch.is_autocast_enabled(device_type) and read.dtype == torch.float32
    return read.to(torch.get_autocast_dtype(device_type)) if is_autocast else read


def _is_plain(positions: Tensor, tree_end: Tensor) -> bool:
    """Return whether a row shares no prefixes: the subtree of each token ends at the end of its branch."""
    starts = (positions == 0).nonzero().squeeze(1)
    ends = torch.cat([starts[1:], starts.new_tensor([len(positions)])])
    lengths = ends - starts
    depth = torch.arange(len(positions), device=positions.device) - starts.repeat_interleave(lengths)
    return bool((tree_end == ends.repeat_interleave(lengths)).all() & (positions == depth).all())
