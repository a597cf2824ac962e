"""Choose and run attention on packed rows: masks of branches, flex_attention blocks, padded rows on CPU."""

import functools
import inspect
import threading
from collections.abc import Callable, Container
from contextlib import AbstractContextManager
from typing import Any, Literal

import torch
from torch import Tensor, nn

from tracegrad.errors import ArgumentError, TracegradError
from tracegrad.model.structure import BLOCKS, attention_of, body_of, config_of, dense_attention, unwrapped
from tracegrad.packing import Batch

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


GRAPHS = 64
"""Graphs that one function may have in a process. Gemma3 needs 8 of attention for its checks and the first step."""


def compiled(function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    """Compile a function on its first call, and once more for each input that its graphs do not fit.

    Settings of torch are changed during a call alone.

    Args:
        options: of `torch.compile`.

    Raises:
        TracegradError: from a call that needs another graph where there are as many as the limit allows.
    """
    run = torch.compile(function, **options)
    here = threading.local()  # settings are slow to make, and cannot be entered twice at a time

    @functools.wraps(function)
    def call(*arguments: Any, **named: Any) -> Any:
        from torch._dynamo import config
        from torch._dynamo.exc import FailOnRecompileLimitHit

        limit = max(GRAPHS, config.recompile_limit)
        if getattr(here, "limit", 0) != limit:
            here.limit, here.settings = limit, _settings(limit, options.get("fullgraph", False))
        try:
            with here.settings:
                return run(*arguments, **named)
        except FailOnRecompileLimitHit as error:
            name = getattr(function, "__qualname__", str(function))
            raise TracegradError(
                f"torch has compiled {name} {limit} times in this process, and a call needs another graph. torch would "
                "run it uncompiled from here on, with float32 tables of [heads, T, T] in attention. Call "
                "torch.compiler.reset() between models that one process trains; TORCH_LOGS=recompiles prints what "
                "differed, and torch._dynamo.config.recompile_limit raises the limit."
            ) from error

    return call


def _settings(limit: int, fullgraph: bool) -> AbstractContextManager[None]:
    """Settings of torch during a call. A function that must be one graph raises an error at the limit by itself."""
    from torch._dynamo import config

    changes: dict[str, Any] = {"recompile_limit": limit}
    changes["specialize_float"] = True  # kernels of flex_attention need the value of a scale
    if not fullgraph:
        changes["fail_on_recompile_limit_hit"] = True
        changes["suppress_errors"] = False  # torch does not take it together with the line above
    return config.patch(**changes)


BLOCK = 128
"""Tokens of flex_attention's sparse block."""


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


def block_mask(batch: Batch, *, window: int | None = None, block: int = BLOCK) -> Any:
    """The same mask as a `BlockMask` of flex_attention, from the intervals alone: [T / block]^2 comparisons.

    A block of keys concerns a block of queries if the largest tree_end in it lies beyond the first query, and is seen
    whole if the smallest lies beyond the last; with a window, if its deepest key is not too far above the shallowest
    query. Nothing is read back from the device.
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
    if window is not None:
        # A depth never differs by more than the distance in the row: within that, a block is seen whole.
        whole &= first[:, None] + block - 1 - first[None, :] < window
        deepest = nn.functional.pad(positions, (0, blocks * block - total)).view(blocks, block).amax(1)
        shallowest = nn.functional.pad(positions, (0, blocks * block - total), value=total).view(blocks, block).amin(1)
        some &= shallowest[:, None] - deepest[None, :] < window
    before = None if window is None else positions - window  # the deepest place that a query no longer sees

    def seen(_b: Tensor, _h: Tensor, query: Tensor, key: Tensor) -> Tensor:
        # Tensors alone: a number here would be an input of the compiled kernel, which one of its backends refuses.
        inside = (key <= query) & (query < tree_end[key])
        return inside if before is None else inside & (positions[key] > before[query])

    partial = some & ~whole
    counts, indices = _as_indices(torch.stack([partial, whole, partial.T, whole.T]))
    names = ("kv_num_blocks", "full_kv_num_blocks", "q_num_blocks", "full_q_num_blocks")
    # Each a tensor of its own: compiled code has other graphs for inputs that share memory.
    tables: dict[str, Any] = {name: counts[n][None, None].clone() for n, name in enumerate(names)}
    tables |= {name.replace("num_blocks", "indices"): indices[n][None, None].clone() for n, name in enumerate(names)}
    return BlockMask(seq_lengths=(total, total), BLOCK_SIZE=(block, block), mask_mod=seen, **tables)


def _as_indices(tables: Tensor) -> tuple[Tensor, Tensor]:
    """Per row of [..., N, N] bool, how many are true, and which: true columns in order, then the others; int32."""
    width = tables.shape[-1]
    place = torch.arange(width, dtype=torch.int32, device=tables.device)
    upto = tables.cumsum(-1, dtype=torch.int32)  # a true column goes to upto - 1, a false one behind, the first last
    counts = upto[..., -1].clone()
    upto += tables.logical_not().to(torch.int32) * (width - place)
    return counts, torch.empty_like(upto).scatter_(-1, upto.sub_(1).long(), place.expand_as(upto))


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


Plan = Literal["flex", "stack", "alone", "mask"]


def run(model: nn.Module, batch: Batch, plan: Plan, *, share_prefix: bool = False) -> Tensor:
    """Hidden states of a row, [T, H] in the order of `batch.ids`; zeros in branches where nothing is read."""
    if plan in ("stack", "alone"):
        how = {"share_prefix": share_prefix, "padded": plan == "stack"}
        return stacked(body_of(model), batch.ids, batch.positions, batch.read, **how)

    if plan == "flex":
        own_blocks(model)

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
    """One mask, or one for each kind of layer, as the model's forward takes it."""
    config = config_of(model)
    kinds, window = set(getattr(config, "layer_types", None) or ()), getattr(config, "sliding_window", None)
    if not kinds:
        return build(window)
    if kinds == {"full_attention"}:
        return build(None)
    return _Masks(full_attention=build(None), sliding_attention=build(window))


class _Masks(dict[str, Any]):
    """A mask for each kind of layer that attends, as transformers hands them to its layers."""

    def __missing__(self, kind: str) -> Any:
        raise LookupError(f"no mask keeps branches apart in layers of {kind}")
