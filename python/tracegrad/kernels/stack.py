"""The forward of a plain pack as padded batches of branches: what `policy` runs where no sparse attention kernel is.

Branches of similar length stand together, and the tokens they all begin with (a system prompt, tool schemas) are
computed once: later tokens see them only through their keys and values. No head, no loss.
"""

import inspect
from collections.abc import Container

import torch
from torch import Tensor, nn

STACK_TOKENS = 8192  # at most, padding included, unless one branch is longer
SHARED_FROM = 16  # a shorter common prefix is not worth a pass of its own

Bounds = tuple[int, int]


def stacked(
    body: nn.Module, ids: Tensor, positions: Tensor, read: Tensor, *, share_prefix: bool, padded: bool = True
) -> Tensor:
    """Hidden states of a plain pack.

    Args:
        body: decoder of a transformers causal LM, without its head.
        ids: [T], branches side by side, on the body's device.
        positions: [T], 0 where a branch begins.
        read: [U], positions in the pack whose hidden states are needed.
        share_prefix: compute a common prefix once; for models whose keys and values say all of it.
        padded: branches of similar length stand in one batch, padded behind; else each is run by itself.

    Returns:
        [T, H] in the order of `ids`; zeros in branches where nothing is read.
    """
    starts = (positions == 0).nonzero().squeeze(1)
    bounds = [*starts.tolist(), len(ids)]
    used = torch.unique(torch.searchsorted(starts, read, right=True) - 1).tolist() or [0]
    branches = sorted(((bounds[n], bounds[n + 1]) for n in used), key=lambda bound: bound[1] - bound[0])
    shared = _common_prefix(ids, branches) if share_prefix else 0
    cache, name = None, ""
    order: list[Tensor] = []
    hidden: list[Tensor] = []
    if shared >= SHARED_FROM:
        start = branches[0][0]
        out = body(input_ids=ids[start : start + shared][None], use_cache=True)
        cache = [(layer.keys, layer.values) for layer in out[_cache_name(out.keys())].layers]
        name = _cache_name(inspect.signature(body.forward).parameters)
        for start, _ in branches:
            order.append(torch.arange(start, start + shared))
            hidden.append(out.last_hidden_state[0])
        branches = [(start + shared, end) for start, end in branches]
    for stack in _stacks(branches) if padded else [[branch] for branch in branches]:
        rows = _run(body, ids, stack, cache, name)
        hidden += [row[: end - start] for row, (start, end) in zip(rows, stack, strict=True)]
        order += [torch.arange(start, end) for start, end in stack]
    place = torch.cat(order).to(ids.device)
    return hidden[0].new_zeros(len(ids), hidden[0].shape[-1]).index_copy(0, place, torch.cat(hidden))


def _run(
    body: nn.Module, ids: Tensor, stack: list[Bounds], prefix: list[tuple[Tensor, Tensor]] | None, name: str
) -> Tensor:
    """[B, S, H] of one padded batch, after the keys and values of a prefix, which the body takes under `name`."""
    padded = nn.utils.rnn.pad_sequence([ids[start:end] for start, end in stack], batch_first=True)
    if prefix is None:
        return body(input_ids=padded, use_cache=False).last_hidden_state
    from transformers import DynamicCache

    cache = DynamicCache()
    for layer, (keys, values) in enumerate(prefix):
        cache.update(keys.expand(len(stack), -1, -1, -1), values.expand(len(stack), -1, -1, -1), layer)
    return body(input_ids=padded, use_cache=True, **{name: cache}).last_hidden_state


def _cache_name(names: Container[str]) -> str:
    """What a body calls its keys and values: newer versions of transformers have renamed them, and 5.40 drops the old
    name.
    """
    return "cache" if "cache" in names else "past_key_values"


def _common_prefix(ids: Tensor, branches: list[Bounds]) -> int:
    """How many tokens all branches begin with, each keeping at least one of its own; 0 for a single branch."""
    if len(branches) < 2:
        return 0
    limit = min(end - start for start, end in branches) - 1
    heads = torch.stack([ids[start : start + limit] for start, _ in branches])
    return int((heads == heads[0]).all(0).long().cumprod(0).sum())


def _stacks(branches: list[Bounds]) -> list[list[Bounds]]:
    """Cuts branches, shortest first, where padding would pass a quarter or a stack `STACK_TOKENS`."""
    stacks: list[list[Bounds]] = []
    for start, end in branches:
        shortest = stacks[-1][0][1] - stacks[-1][0][0] if stacks else 0
        fits = bool(stacks) and 4 * (end - start) <= 5 * shortest
        if fits and (len(stacks[-1]) + 1) * (end - start) <= STACK_TOKENS:
            stacks[-1].append((start, end))
        else:
            stacks.append([(start, end)])
    return stacks
