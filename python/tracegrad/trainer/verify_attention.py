"""Verify, before the first step and on all ranks together, which forward modes reproduce the model's own outputs.

The comparison itself is in `tracegrad.model.verify`.
"""

from collections.abc import Sequence

import torch

from tracegrad.errors import ArgumentError
from tracegrad.model.attention import must_be_fused
from tracegrad.model.structure import attention_of, dense_attention, unwrap_adapters
from tracegrad.model.verify import (
    UNLIMITED_LENGTH,
    ForwardMode,
    check_forward_mode,
    checked_length,
    one_pass_plan,
    set_result,
)
from tracegrad.packing import Batch
from tracegrad.trainer.distributed import DistributedModel


def verify_rows(target: DistributedModel, longest: int, *, share_prefixes: bool) -> str | None:
    """Verify every forward mode that a run may use, once for all of its branches.

    If flex_attention does not reproduce the model's outputs, the model is switched back to dense attention. On CUDA
    this is an error instead.

    Args:
        target: the model on its device and ranks; every rank makes the same call.
        longest: number of tokens of the longest branch.
        share_prefixes: whether rows may share prefixes.

    Returns:
        The reason why prefixes cannot be shared; None if they can, or if `share_prefixes` is False.

    Raises:
        ArgumentError: if the model is not causal; with FSDP, if it cannot process packed rows; on CUDA, if it cannot
            run flex_attention.
    """
    fsdp = target.mode == "fsdp"
    reason = (
        _verify_on_ranks(target, ForwardMode("flex"), longest, UNLIMITED_LENGTH)
        if one_pass_plan(target.model) == "flex"
        else None
    )
    if reason and must_be_fused(target.device):
        raise ArgumentError(
            f"TG-TRAIN-093: flex_attention cannot run packed rows of this model on {target.device.type}: {reason}. "
            "Other implementations are slower, and need a [T, T] table for rows that share prefixes. To accept that, "
            "set attention.implementation sdpa."
        )
    if reason:
        unwrap_adapters(target.model).set_attn_implementation(dense_attention(target.model))
    row = one_pass_plan(target.model)
    if not fsdp and row == "mask":
        _verify_on_ranks(target, ForwardMode("stack"), longest, UNLIMITED_LENGTH)
        _verify_on_ranks(target, ForwardMode("stack", tree=True), longest, UNLIMITED_LENGTH)
    if fsdp and row == "mask" and (reason := _verify_on_ranks(target, ForwardMode("mask"), longest, UNLIMITED_LENGTH)):
        raise _whole_row_error(reason)
    return (
        _verify_on_ranks(target, ForwardMode(row, tree=True), longest, UNLIMITED_LENGTH)
        if fsdp or share_prefixes
        else None
    )


def describe_attention(target: DistributedModel, *, share_prefixes: bool) -> str:
    """Describe the attention that `verify_rows` selected, for the user.

    Args:
        share_prefixes: whether rows share prefixes.
    """
    model = target.model
    if one_pass_plan(model) == "flex":
        return "attention is flex_attention, compiled, under block masks."
    if target.mode == "fsdp":
        descriptions = ["rows under a dense [T, T] mask"]
    else:
        descriptions = [
            "one branch at a time" if check_forward_mode(model, ForwardMode("stack")) else "branches in padded batches"
        ]
        descriptions += ["rows that share prefixes under a dense [T, T] mask"] * share_prefixes
    return f"attention is {attention_of(model)}: {', '.join(descriptions)}."


def verify_batches(target: DistributedModel, batches: Sequence[Batch]) -> None:
    """Verify the forward modes for the batches of one step with FSDP, whose ranks may have branches of other
    lengths."""
    row = one_pass_plan(target.model)
    plain, tree = ForwardMode(row), ForwardMode(row, tree=True)
    if (
        target.mode != "fsdp"
        or min(checked_length(target.model, forward_mode) for forward_mode in (plain, tree)) >= UNLIMITED_LENGTH
    ):
        return
    longest = target.ranks.max(max(batch.longest_branch for batch in batches))
    if reason := _verify_on_ranks(target, plain, longest, longest):
        raise _whole_row_error(reason)
    _verify_on_ranks(target, tree, longest, longest)


@torch.no_grad()
def _verify_on_ranks(
    target: DistributedModel, forward_mode: ForwardMode, longest: int, verified_length: int
) -> str | None:
    """Return the reason why a forward mode is unusable on this or another rank; None if it is usable."""
    model = target.model
    reason = (
        target.policy(check_forward_mode, forward_mode, longest)
        if target.mode == "fsdp"
        else check_forward_mode(model, forward_mode, longest)
    )
    target.reshard()
    if target.ranks.max(1 if reason else 0):
        reason = (
            reason or f"on another rank, hidden states of {type(model).__name__} differ from a pass over each branch"
        )
    set_result(model, forward_mode, verified_length, reason)
    return reason


def _whole_row_error(reason: str) -> ArgumentError:
    return ArgumentError(
        f"TG-TRAIN-094: this model cannot run a packed row: {reason}. With FSDP, every rank runs each layer once "
        "per row, so branches cannot run one at a time. Set parallel.mode ddp or none."
    )
