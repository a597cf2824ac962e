"""Who sees whom in a packed row: the dense mask, and the block mask of flex_attention from the intervals alone.

Arrays of a `Batch` in, a mask out; no model. `forward` calls it.
"""

from typing import Any

import torch
from torch import Tensor, nn

from tracegrad.batch import Batch

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
