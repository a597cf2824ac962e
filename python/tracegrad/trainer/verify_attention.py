"""Before the first step, all ranks together try which ways of running a packed row give the model's own numbers.

The comparison itself is `policy.roads`. Called by the loop, and by the step where ranks share each layer.
"""

from collections.abc import Sequence

import torch

from tracegrad.errors import ArgumentError
from tracegrad.model.attention import must_be_fused
from tracegrad.model.structure import attention_of, dense_attention, unwrapped
from tracegrad.model.verify import ALWAYS, Road, reached, settle, whole_row, why_not
from tracegrad.packing import Batch
from tracegrad.trainer.distributed import Placed


def settle_rows(target: Placed, longest: int, *, trees: bool) -> str:
    """Compares every road that a run may take, for all of its branches at once.

    A model whose numbers flex_attention does not give goes back to its attention without blocks, except on CUDA.

    Args:
        target: a model in its place; every rank calls alike.
        longest: tokens of the longest branch.
        trees: whether rows may share prefixes.

    Returns:
        why prefixes cannot be shared; "" where they can or shall not be.

    Raises:
        ArgumentError: for a model that is not causal, or, under FSDP, one that no whole row can pass through; on CUDA
            for a model that flex_attention cannot run.
    """
    fsdp = target.mode == "fsdp"
    why = _asked(target, Road("flex"), longest, ALWAYS) if whole_row(target.model) == "flex" else ""
    if why and must_be_fused(target.device):
        raise ArgumentError(
            f"flex_attention cannot run packed rows of this model on {target.device.type}: {why}. Other attention is "
            "slower, and takes a table of [T, T] for rows that share prefixes. To accept that, set "
            "attention.implementation sdpa."
        )
    if why:
        unwrapped(target.model).set_attn_implementation(dense_attention(target.model))
    row = whole_row(target.model)
    if not fsdp and row == "mask":
        _asked(target, Road("stack"), longest, ALWAYS)
        _asked(target, Road("stack", tree=True), longest, ALWAYS)
    if fsdp and row == "mask" and (why := _asked(target, Road("mask"), longest, ALWAYS)):
        raise _unfit(why)
    return _asked(target, Road(row, tree=True), longest, ALWAYS) if fsdp or trees else ""


def describe_attention(target: Placed, *, trees: bool) -> str:
    """Return the attention that `settle_rows` has chosen, for the one who reads the run.

    Args:
        trees: whether rows share prefixes.
    """
    model = target.model
    if whole_row(model) == "flex":
        return "attention is flex_attention, compiled, under block masks."
    if target.mode == "fsdp":
        ways = ["rows under a dense [T, T] mask"]
    else:
        ways = ["branches one by one" if why_not(model, Road("stack")) else "branches in padded batches"]
        ways += ["rows that share prefixes under a dense [T, T] mask"] * trees
    return f"attention is {attention_of(model)}: {', '.join(ways)}."


def settle_batches(target: Placed, batches: Sequence[Batch]) -> None:
    """The same for the batches of one step under FSDP, whose ranks may hold branches of different lengths."""
    row = whole_row(target.model)
    plain, tree = Road(row), Road(row, tree=True)
    if target.mode != "fsdp" or min(reached(target.model, road) for road in (plain, tree)) >= ALWAYS:
        return
    longest = target.ranks.largest(max(batch.reach for batch in batches))
    if why := _asked(target, plain, longest, longest):
        raise _unfit(why)
    _asked(target, tree, longest, longest)


@torch.no_grad()
def _asked(target: Placed, road: Road, longest: int, settled: int) -> str:
    """`why_not` of this rank, or that another rank has a reason."""
    model = target.model
    why = target.policy(why_not, road, longest) if target.mode == "fsdp" else why_not(model, road, longest)
    target.rest()
    if target.ranks.largest(1 if why else 0):
        why = why or f"another rank found other hidden states of {type(model).__name__} than of each branch alone"
    settle(model, road, settled, why)
    return why


def _unfit(why: str) -> ArgumentError:
    return ArgumentError(
        f"no whole row can pass through this model: {why}. Under FSDP every rank runs each layer once a row, so "
        "branches cannot go one by one. Set parallel.mode ddp or none."
    )
