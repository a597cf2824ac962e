"""Run attention on packed rows: dense masks, block masks of flex_attention, and padded batches of branches."""

import functools
import inspect
import threading
from collections.abc import Callable, Container
from contextlib import AbstractContextManager
from typing import Any, Literal

import torch
from torch import Tensor, nn

from tracegrad.errors import ArgumentError, TracegradError
from tracegrad.model.structure import (
    BLOCK_ATTENTION,
    attention_of,
    body_of,
    config_of,
    dense_attention,
    unwrap_adapters,
)
from tracegrad.packing import Batch

STACK_TOKENS = 8192  # at most, padding included, unless one branch is longer
MIN_SHARED_PREFIX = 16  # a shorter common prefix is not worth a separate pass

Bounds = tuple[int, int]


def run_stacked(
    body: nn.Module, ids: Tensor, positions: Tensor, read: Tensor, *, share_prefix: bool, padded: bool = True
) -> Tensor:
    """Compute the hidden states of a plain pack.

    Args:
        body: decoder of a transformers causal LM, without its head.
        ids: [T], the branches one after the other, on the body's device.
        positions: [T], 0 at the first token of each branch.
        read: [U], positions in the pack whose hidden states are needed.
        share_prefix: compute a common prefix once. It is correct if keys and values are the whole state of the prefix.
        padded: put branches of similar length into one batch, padded at the end; else run each branch in its own pass.

    Returns:
        [T, H] in the order of `ids`; zeros in branches without a position in `read`.
    """
    starts = (positions == 0).nonzero().squeeze(1)
    bounds = [*starts.tolist(), len(ids)]
    used = torch.unique(torch.searchsorted(starts, read, right=True) - 1).tolist() or [0]
    branches = sorted(((bounds[n], bounds[n + 1]) for n in used), key=lambda bound: bound[1] - bound[0])
    shared = _common_prefix(ids, branches) if share_prefix else 0
    cache, name = None, ""
    order: list[Tensor] = []
    hidden: list[Tensor] = []
    if shared >= MIN_SHARED_PREFIX:
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
    order_index = torch.cat(order).to(ids.device)
    return hidden[0].new_zeros(len(ids), hidden[0].shape[-1]).index_copy(0, order_index, torch.cat(hidden))


def _run(
    body: nn.Module, ids: Tensor, stack: list[Bounds], prefix: list[tuple[Tensor, Tensor]] | None, name: str
) -> Tensor:
    """Return [B, S, H] of one padded batch, after the keys and values of a prefix (the body's argument `name`)."""
    padded = nn.utils.rnn.pad_sequence([ids[start:end] for start, end in stack], batch_first=True)
    if prefix is None:
        return body(input_ids=padded, use_cache=False).last_hidden_state
    from transformers import DynamicCache

    cache = DynamicCache()
    for layer, (keys, values) in enumerate(prefix):
        cache.update(keys.expand(len(stack), -1, -1, -1), values.expand(len(stack), -1, -1, -1), layer)
    return body(input_ids=padded, use_cache=True, **{name: cache}).last_hidden_state


def _cache_name(names: Container[str]) -> str:
    """Return the name of the keys and values among `names`: transformers has renamed them; 5.40 drops the old name."""
    return "cache" if "cache" in names else "past_key_values"


def _common_prefix(ids: Tensor, branches: list[Bounds]) -> int:
    """Return the length of the common prefix, in tokens: at most the shortest branch minus one; 0 for one branch."""
    if len(branches) < 2:
        return 0
    limit = min(end - start for start, end in branches) - 1
    heads = torch.stack([ids[start : start + limit] for start, _ in branches])
    return int((heads == heads[0]).all(0).long().cumprod(0).sum())


def _stacks(branches: list[Bounds]) -> list[list[Bounds]]:
    """Split branches, sorted by length, into stacks of at most `STACK_TOKENS` with at most a quarter of padding."""
    stacks: list[list[Bounds]] = []
    for start, end in branches:
        shortest = stacks[-1][0][1] - stacks[-1][0][0] if stacks else 0
        fits = bool(stacks) and 4 * (end - start) <= 5 * shortest
        if fits and (len(stacks[-1]) + 1) * (end - start) <= STACK_TOKENS:
            stacks[-1].append((start, end))
        else:
            stacks.append([(start, end)])
    return stacks


MAX_COMPILED_GRAPHS = 64
"""Compiled graphs that one function may have in a process. Gemma3 needs 8 attention graphs for checks and one step."""


def compile_lazily(function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    """Compile a function on its first call, and again for each input that none of its graphs fits.

    Settings of torch are changed only during a call.

    Args:
        options: of `torch.compile`.

    Raises:
        TracegradError: from a call that needs another graph when the limit of graphs is reached.
    """
    run = torch.compile(function, **options)
    local = threading.local()  # settings are slow to make, and cannot be entered twice at the same time

    @functools.wraps(function)
    def call(*arguments: Any, **keywords: Any) -> Any:
        from torch._dynamo import config
        from torch._dynamo.exc import FailOnRecompileLimitHit

        limit = max(MAX_COMPILED_GRAPHS, config.recompile_limit)
        if getattr(local, "limit", 0) != limit:
            local.limit, local.settings = limit, _settings(limit, options.get("fullgraph", False))
        try:
            with local.settings:
                return run(*arguments, **keywords)
        except FailOnRecompileLimitHit as error:
            name = getattr(function, "__qualname__", str(function))
            raise TracegradError(
                f"TG-MODEL-001: torch has compiled {name} {limit} times in this process, and a call needs another "
                "graph. torch would run it uncompiled from here on, with float32 tables of [heads, T, T] in "
                "attention. Call torch.compiler.reset() between models that one process trains; TORCH_LOGS=recompiles "
                "prints what differed, and torch._dynamo.config.recompile_limit raises the limit."
            ) from error

    return call


def _settings(limit: int, fullgraph: bool) -> AbstractContextManager[None]:
    """Return the torch settings for a call. With `fullgraph`, torch itself raises an error at the limit."""
    from torch._dynamo import config

    changes: dict[str, Any] = {"recompile_limit": limit}
    changes["specialize_float"] = True  # kernels of flex_attention need the value of a scale
    if not fullgraph:
        changes["fail_on_recompile_limit_hit"] = True
        changes["suppress_errors"] = False  # torch does not allow it together with the line above
    return config.patch(**changes)


BLOCK = 128
"""Tokens in one sparse block of flex_attention."""


def dense_mask(batch: Batch, *, window: int | None = None, dtype: torch.dtype | None = None) -> Tensor:
    """Return the attention mask [1, 1, T, T] of a row: query q sees key k if k <= q < tree_end[k], within `window`.

    Args:
        batch: on the device of the mask.
        window: of sliding attention: positions[q] - positions[k] < window.
        dtype: None returns bool; a floating dtype returns the additive mask of eager attention.

    >>> from tracegrad import Sequences, pack
    >>> sequences = Sequences.from_arrays([5, 6, 5, 8], [0, 2, 4], [float("nan"), -0.5] * 2, [False, True] * 2)
    >>> [step] = pack(sequences, advantages=[1.0, -1.0], tokens_per_row=16)
    >>> # Two branches in one row; neither sees the other.
    >>> dense_mask(step.batches[0].to("cpu")).int()
    tensor([[[[1, 0, 0, 0],
              [1, 1, 0, 0],
              [0, 0, 1, 0],
              [0, 0, 1, 1]]]], dtype=torch.int32)
    """
    index = torch.arange(len(batch.ids), device=batch.ids.device)
    query, key = index[:, None], index[None, :]
    seen = (key <= query) & (query < batch.tree_end[None, :])
    if window is not None:
        seen &= batch.positions[:, None] - batch.positions[None, :] < window
    if dtype is not None:
        seen = torch.zeros_like(seen, dtype=dtype).masked_fill(~seen, torch.finfo(dtype).min)
    return seen[None, None]


def block_mask(batch: Batch, *, window: int | None = None, block: int = BLOCK) -> Any:
    """Return the mask of `dense_mask` as a `BlockMask` of flex_attention, with [T / block]^2 comparisons.

    A query block needs a key block if the largest tree_end of the keys is greater than the first query.
    It sees all keys of the block if the smallest tree_end is greater than the last query. With a window, the deepest
    key must also be close enough to the shallowest query. The function copies nothing back from the device.

    >>> from tracegrad import Sequences, pack
    >>> sequences = Sequences.from_arrays([5, 6, 7], [0, 3], [float("nan"), -0.5, -0.1], [False, True, True])
    >>> [step] = pack(sequences, advantages=[1.0], tokens_per_row=16, pad_to_multiple_of=128)
    >>> block_mask(step.batches[0].to("cpu")).shape
    (1, 1, 128, 128)
    """
    from torch.nn.attention.flex_attention import BlockMask

    tree_end, positions = batch.tree_end, batch.positions
    total = len(tree_end)
    blocks = -(-total // block)
    beyond = nn.functional.pad(tree_end, (0, blocks * block - total)).view(blocks, block)
    least = nn.functional.pad(tree_end, (0, blocks * block - total), value=total).view(blocks, block).amin(1)
    first = torch.arange(blocks, device=tree_end.device) * block
    below = first[:, None] > first[None, :]
    needed = (below & (beyond.amax(1)[None, :] > first[:, None])) | (first[:, None] == first[None, :])
    full = below & (least[None, :] >= (first[:, None] + block).clamp(max=total))
    if window is not None:
        # Depths differ by at most the distance in the row, so blocks within the window are fully visible.
        full &= first[:, None] + block - 1 - first[None, :] < window
        deepest = nn.functional.pad(positions, (0, blocks * block - total)).view(blocks, block).amax(1)
        shallowest = nn.functional.pad(positions, (0, blocks * block - total), value=total).view(blocks, block).amin(1)
        needed &= shallowest[:, None] - deepest[None, :] < window
    before = None if window is None else positions - window  # the deepest position that a query no longer sees

    def seen(_b: Tensor, _h: Tensor, query: Tensor, key: Tensor) -> Tensor:
        # Use only tensors: a number would be an input of the compiled kernel, which one of its backends rejects.
        inside = (key <= query) & (query < tree_end[key])
        return inside if before is None else inside & (positions[key] > before[query])

    partial = needed & ~full
    counts, indices = _as_indices(torch.stack([partial, full, partial.T, full.T]))
    names = ("kv_num_blocks", "full_kv_num_blocks", "q_num_blocks", "full_q_num_blocks")
    # Each table is a separate tensor: compiled code has other graphs for inputs that share memory.
    tables: dict[str, Any] = {name: counts[n][None, None].clone() for n, name in enumerate(names)}
    tables |= {name.replace("num_blocks", "indices"): indices[n][None, None].clone() for n, name in enumerate(names)}
    return BlockMask(seq_lengths=(total, total), BLOCK_SIZE=(block, block), mask_mod=seen, **tables)


def _as_indices(tables: Tensor) -> tuple[Tensor, Tensor]:
    """Return, for each row of [..., N, N] bool, the count of true columns and the columns, true ones first; int32."""
    width = tables.shape[-1]
    columns = torch.arange(width, dtype=torch.int32, device=tables.device)
    # True column number n goes to index n. False columns follow, in reverse order.
    upto = tables.cumsum(-1, dtype=torch.int32)
    counts = upto[..., -1].clone()
    upto += tables.logical_not().to(torch.int32) * (width - columns)
    return counts, torch.empty_like(upto).scatter_(-1, upto.sub_(1).long(), columns.expand_as(upto))


BACKEND: Any = "inductor"
"""Backend of torch.compile. inductor has no gradient of flex_attention on CPU: rehearsals set another backend."""


def enable_flex_attention(model: Any) -> None:
    """Switch a model to our compiled flex_attention, if its architecture supports flex_attention.

    Packed rows then need no dense mask. Eager attention is kept if it was chosen for a model that supports sdpa.
    """
    inner, attention = unwrap_adapters(model), attention_of(model)
    replaceable = attention in (BLOCK_ATTENTION[0], "sdpa", dense_attention(model))
    if replaceable and getattr(inner, "_supports_flex_attn", False):
        from transformers import AttentionInterface, AttentionMaskInterface
        from transformers.masking_utils import flex_attention_mask

        AttentionInterface.register(BLOCK_ATTENTION[1], _attend)
        AttentionMaskInterface.register(
            BLOCK_ATTENTION[1], flex_attention_mask
        )  # without it a plain forward has no mask at all
        inner.set_attn_implementation(BLOCK_ATTENTION[1])


def use_own_flex_attention(model: Any) -> None:
    """Switch a model that was loaded with transformers' flex_attention to ours, which computes the same.

    transformers compiles one function for all models and settings of a process, under torch's own limit of graphs.
    """
    if attention_of(model) == BLOCK_ATTENTION[0]:
        enable_flex_attention(model)


def must_be_fused(device: torch.device) -> bool:
    """Return whether a model with block attention must not use a dense mask: on CUDA, because rows are long there."""
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
    """Run flex_attention with the interface of an attention implementation of transformers.

    Norms of queries and keys leave them in float32 under autocast. Autocast covers sdpa but not flex_attention, so
    they are cast here.

    Args:
        query: [B, heads, T, D]; keys and values have the same number of heads or fewer.
        attention_mask: a `BlockMask`, or a table [B, 1, T, T] that is added to the scores.
        s_aux: [heads], attention sinks.
    """
    if dropout or others.get("position_bias") is not None:
        raise ArgumentError(
            f"TG-MODEL-002: {type(module).__name__}: flex_attention has no dropout and no position bias here. The "
            "logprobs would be others. Set attention_dropout to 0 in the model's configuration, or load it with sdpa."
        )
    if torch.is_autocast_enabled(value.device.type):
        query, key = query.to(value.dtype), key.to(value.dtype)
    attend = _flex if torch.compiler.is_compiling() else _compiled(BACKEND)  # part of a compiled layer's graph
    return attend(query, key, value, attention_mask, scaling, softcap, s_aux).transpose(1, 2).contiguous(), None


@functools.cache
def _compiled(backend: Any) -> Callable[..., Tensor]:
    """Compile attention with dynamic shapes: otherwise every row length would need a separate graph."""
    return compile_lazily(_flex, backend=backend, dynamic=True, fullgraph=True)


def _flex(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Any,
    scale: float | None,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """Return the attention output of a row, [B, heads, T, D], in the dtype of the values."""
    from torch.nn.attention.flex_attention import AuxRequest, BlockMask, flex_attention

    if not torch.compiler.is_dynamo_compiling():
        raise TracegradError(
            "TG-MODEL-003: flex_attention would run uncompiled, with a float32 table of [heads, T, T] for each layer. "
            "torch does not compile within a TorchDispatchMode whose ignore_compile_internals is False, under "
            "torch.compiler.set_stance, or with TORCHDYNAMO_DISABLE=1. Leave that, or load the model with sdpa."
        )
    blocks = mask if isinstance(mask, BlockMask) else None
    table: Any = mask if blocks is None else None

    def score_mod(score: Tensor, batch: Tensor, _head: Tensor, query_index: Tensor, key_index: Tensor) -> Tensor:
        if softcap is not None:
            score = softcap * torch.tanh(score / softcap)
        return score if table is None else score + table[batch, 0, query_index, key_index]

    queries, heads = query.shape[1], key.shape[1]
    if (shared := queries // heads) & (shared - 1):  # flex_attention's kernels share keys among 1, 2, 4, ... queries
        key, value = (states.repeat_interleave(shared, dim=1) for states in (key, value))
    result: Any = flex_attention(
        query,
        key,
        value,
        score_mod=None if softcap is None and table is None else score_mod,
        block_mask=blocks,
        scale=scale,
        enable_gqa=queries != key.shape[1],
        kernel_options={"BACKEND": "TRITON"},  # the kernel for short rows refuses 64 to 127 tokens of grouped queries
        return_aux=None if sinks is None else AuxRequest(lse=True),
    )
    if sinks is None:
        return result
    out, aux = result
    # A sink is an additional score without a value. It scales the output by exp(lse) / (exp(lse) + exp(sink)).
    scale_by_sink = torch.sigmoid(aux.lse - sinks.to(aux.lse.dtype)[:, None])
    return out * scale_by_sink[..., None].to(out.dtype)


Plan = Literal["flex", "stack", "alone", "mask"]


def run(model: nn.Module, batch: Batch, plan: Plan, *, share_prefix: bool = False) -> Tensor:
    """Return the hidden states of a row, [T, H] in the order of `batch.ids`; zeros in branches that are not read."""
    if plan in ("stack", "alone"):
        return run_stacked(
            body_of(model), batch.ids, batch.positions, batch.read, share_prefix=share_prefix, padded=plan == "stack"
        )

    if plan == "flex":
        use_own_flex_attention(model)

    def build(window: int | None) -> Any:
        return block_mask(batch, window=window) if plan == "flex" else dense_mask(batch, window=window, dtype=additive)

    additive = None if attention_of(model) == "sdpa" else next(model.parameters()).dtype
    out = body_of(model)(
        input_ids=batch.ids[None],
        attention_mask=_masks_by_kind(model, build),
        position_ids=batch.positions[None],
        use_cache=False,
    )
    return out.last_hidden_state[0]


def _masks_by_kind(model: nn.Module, build: Any) -> Any:
    """Return one mask, or a mapping of layer kind to mask, as the forward pass of the model expects it."""
    config = config_of(model)
    kinds, window = set(getattr(config, "layer_types", None) or ()), getattr(config, "sliding_window", None)
    if not kinds:
        return build(window)
    if kinds == {"full_attention"}:
        return build(None)
    return _Masks(full_attention=build(None), sliding_attention=build(window))


class _Masks(dict[str, Any]):
    """A mask for each kind of attention layer, in the form that transformers reads."""

    def __missing__(self, kind: str) -> Any:
        raise LookupError(f"no mask keeps branches apart in layers of {kind}")
