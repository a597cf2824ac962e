"""Rows with pictures: through the model's own forward, features at recorded places, positions from the tree.

A model says itself what it does with pictures: its own body takes ids, pixels and positions. Here it is told where
pictures stand, as a pad id that was sampled or written is text, and where tokens stand in the tree. Which ways give the
model's own numbers is tried once for each model. Called by `forward`.
"""

import inspect
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from itertools import pairwise
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor, nn

from tracegrad.errors import ArgumentError
from tracegrad.images import RowImages
from tracegrad.model.attention import dense_mask
from tracegrad.model.structure import attention_of, unwrapped
from tracegrad.model.verify import apart, at_rest, cannot, ordinary_ids, rounding
from tracegrad.packing import Batch

_known: WeakKeyDictionary[nn.Module, dict[bool, str]] = WeakKeyDictionary()
_TYPES = ("mm_token_type_ids", "token_type_ids")


def states(model: nn.Module, batch: Batch) -> Tensor:
    """[T, H]: hidden states of a row with pictures; zeros in branches where nothing is read.

    The row runs as a whole under a mask where that gives the model's own numbers, else branch by branch.

    Raises:
        ArgumentError: if the model gives other numbers than its own forward either way, or shares no prefix.
    """
    branches = list(_branches(batch))
    plain = all(_is_alone(batch, *each) for each in branches)
    why = _why_not(model, batch)
    if not why[True]:
        return _row(model, batch)
    if why[False]:
        raise ArgumentError(
            f"{type(unwrapped(model)).__name__} gives other numbers on pictures than its own forward: {why[False]}. "
            "What it would learn from is not what was sampled. Leave traces with pictures out."
        )
    if not plain:
        raise ArgumentError(
            f"prefixes with pictures cannot be shared: {why[True]}. A branch would read what is its sibling's. Pack "
            "with share_prefixes=False; in a run, leave out pack.share_prefixes."
        )
    return _alone(model, batch, branches)


def _branches(batch: Batch) -> Iterator[tuple[int, int]]:
    """First and last of the trees of a row; of a plain row those are its branches."""
    starts = [*np.flatnonzero(_host(batch.positions) == 0).tolist(), len(batch.ids)]
    yield from pairwise(starts)


def _is_alone(batch: Batch, start: int, end: int) -> bool:
    return bool((batch.tree_end[start:end] == end).all())


def _host(values: Any) -> Any:
    return values.cpu().numpy() if isinstance(values, Tensor) else np.asarray(values)


def _alone(model: nn.Module, batch: Batch, branches: list[tuple[int, int]]) -> Tensor:
    ends = [end for _, end in branches]
    read = np.unique(np.searchsorted(ends, _host(batch.read), side="right")).tolist() or [0]
    found = {number: _row(model, cut(batch, *branches[number]), masked=False) for number in read}
    first = found[read[0]]
    lengths = [end - start for start, end in branches]
    unread = (first.new_zeros(length, first.shape[-1]) for length in lengths)
    return torch.cat([found.get(number, zeros) for number, zeros in enumerate(unread)])


def cut(batch: Batch, start: int, end: int) -> Batch:
    """The tokens `start` to `end` of a row as a row of their own, without head rows and terms; pictures whole."""
    images = batch.images
    if images is not None:
        first = images.at[images.cu_features[:-1]] if len(images) else images.at
        here = np.flatnonzero((first >= start) & (first < end))
        images = images.take(here, start) if len(here) else None
    none = np.zeros(0, np.int64)
    return replace(
        batch,
        ids=batch.ids[start:end],
        positions=batch.positions[start:end],
        tree_end=batch.tree_end[start:end] - start,
        read=batch.read[:0],
        target=batch.target[:0],
        inv_temperature=batch.inv_temperature[:0],
        row=batch.row[:0],
        term=none,
        longest=None,
        images=images,
    )


def _row(model: nn.Module, batch: Batch, *, masked: bool = True) -> Tensor:
    """A row in one pass of the body."""
    body, seen = _body(model), _inputs(batch.images)
    how: dict[str, Any] = {"position_ids": _positions(body, batch, seen), "use_cache": False}
    if masked:
        additive = None if attention_of(model) == "sdpa" else next(model.parameters()).dtype
        how["attention_mask"] = dense_mask(batch, dtype=additive)
    with _placing(body, batch):
        return body(input_ids=batch.ids[None], **seen, **how).last_hidden_state[0]


def _body(model: nn.Module) -> Any:
    """What takes ids and pixels below the head."""
    inner = unwrapped(model)
    body = inner.base_model
    if not hasattr(body, "get_image_features"):
        raise ArgumentError(
            f"{type(inner).__name__} takes no pictures: it has no get_image_features. Traces with pictures cannot be "
            "trained with it. Load an image-text model."
        )
    return body


def _inputs(images: RowImages | None) -> dict[str, Tensor]:
    """What the tower takes, for each place of the row, in order; nothing for a row of text alone."""
    if images is None:
        return {}
    if images.inputs is None:
        raise ArgumentError("the pictures of a batch are not processed. Move the batch with to() first.")
    place = np.searchsorted(np.unique(images.picture), images.picture)
    each = [images.inputs[number] for number in place.tolist()]
    # Families that cut a picture into several have (batch of one, pieces, channels, height, width).
    pieces = each[0]["pixel_values"].ndim == 5

    def joined(name: str) -> Tensor:
        parts = [one[name] for one in each]
        return torch.cat(parts, 1 if pieces and parts[0].ndim > 1 and parts[0].shape[0] == 1 else 0)

    return {name: joined(name) for name in each[0]}


def _positions(body: Any, batch: Batch, seen: Mapping[str, Tensor]) -> Tensor:
    """[1, T], or [3, 1, T] where the model gives pictures rows and columns: (time, row, column) of each token.

    A picture with h rows and w columns takes max(h, w) positions and not h * w, so what stands behind it in the tree is
    that much nearer.

    Args:
        seen: what `_inputs` gave for the row.
    """
    depth = batch.positions
    if not hasattr(body, "get_rope_index"):
        return depth[None]
    moved = torch.zeros_like(depth)
    images = batch.images
    if images is None:
        return depth[None, None].expand(3, 1, -1)
    sizes = seen["image_grid_thw"].tolist()
    merge = body.config.vision_config.spatial_merge_size
    inside: list[tuple[Any, Tensor]] = []
    for number, (_, high, wide) in enumerate(sizes):
        at = images.at[images.cu_features[number] : images.cu_features[number + 1]]
        rows, columns = high // merge, wide // merge
        if rows * columns != len(at) or at[-1] - at[0] != len(at) - 1:
            raise ArgumentError(
                f"a picture has {len(at)} ids and {rows} x {columns} features. Its place in the prompt is not that of "
                "this model. Align the traces with the model that is trained."
            )
        first, last = int(at[0]), int(at[-1])
        begin = depth[first] - moved[first]
        step = torch.arange(len(at), device=depth.device)
        zero = torch.zeros_like(step)
        inside.append((slice(first, last + 1), begin + torch.stack([zero, step // columns, step % columns])))
        moved[last + 1 : int(batch.tree_end[last])] += len(at) - max(rows, columns)
    positions = (depth - moved)[None].repeat(3, 1)
    for where, own in inside:
        positions[:, where] = own
    return positions[:, None]


def _shown(batch: Batch) -> Tensor:
    """[T] bool: the tokens that stand for a picture."""
    out = torch.zeros(len(batch.ids), dtype=torch.bool, device=batch.ids.device)
    if batch.images is not None:
        out[torch.from_numpy(batch.images.at).to(out.device)] = True
    return out


@contextmanager
def _placing(body: Any, batch: Batch) -> Iterator[None]:
    """The body puts features where pictures are recorded, while entered; elsewhere a pad is text."""
    if batch.images is None:
        yield
        return
    mask = _shown(batch)
    pads = batch.ids == batch.images.rule.pad
    own = getattr(body, "get_placeholder_mask", None)
    if own is None:
        if bool((pads != mask).any()):
            raise ArgumentError(
                f"a prompt holds the id of a picture where none stands, and {type(body).__name__} would see one there. "
                "Leave such traces out."
            )
        yield
        return

    shown = batch.ids.masked_fill(~mask, int(ordinary_ids(body)[0]))[None]

    def placed(input_ids: Any = None, *others: Any, **more: Any) -> Any:
        return own(shown, *others, **more)

    body.get_placeholder_mask = placed
    try:
        yield
    finally:
        del body.get_placeholder_mask


def _why_not(model: nn.Module, batch: Batch) -> Mapping[bool, str]:
    """Why a row with pictures is not run under a mask (True), or branch by branch (False); "" where it may.

    Tried once for each model, on the shortest tree of the row that has a picture: its first branch by the model's own
    forward, which makes positions and masks itself, then alone, then twice in one row, then as a tree.
    """
    if model not in _known:
        with at_rest(model), torch.no_grad():
            _known[model] = _compared(model, _probe(model, batch))
    return _known[model]


def _probe(model: nn.Module, batch: Batch) -> Batch:
    """The shortest branch of a row that has a picture, with ordinary ids where pads are text.

    A tree is taken as one branch: any ids in a row are a prompt to a model.
    """
    parts = (cut(batch, start, end) for start, end in _branches(batch))
    shortest = min((part for part in parts if part.images is not None), key=lambda part: len(part.ids))
    assert shortest.images is not None
    words = ordinary_ids(model)
    text = torch.where(shortest.ids == shortest.images.rule.pad, int(words[0]), shortest.ids)
    # What stands behind a picture shows its positions.
    tail = text.new_tensor([int(words[place % len(words)]) for place in (1, 3, 2, 4)])
    ids = torch.cat([torch.where(_shown(shortest), shortest.ids, text), tail])
    place = torch.arange(len(ids), device=ids.device)
    return replace(shortest, ids=ids, positions=place, tree_end=torch.full_like(place, len(ids)))


def _compared(model: nn.Module, probe: Batch) -> dict[bool, str]:
    try:
        wanted = _own(model, probe)
        allowed = rounding(model)
        found = _row(model, probe, masked=False)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # any forward of a stranger's may raise anything
        return dict.fromkeys((False, True), cannot(unwrapped(model), error))
    why = {False: _difference(found, wanted, allowed), True: ""}
    try:
        twice = _twice(probe)
        both = _row(model, twice)
        length = len(probe.ids)
        why[True] = _difference(both[:length], wanted, allowed) or _difference(both[length:], wanted, allowed)
        tree, fork, sibling = _tree(probe)
        whole = _row(model, tree)
        why[True] = why[True] or _difference(whole[:length], wanted, allowed)
        branch = torch.cat([whole[:fork], whole[length:]])
        why[True] = why[True] or _difference(branch, _own(model, sibling), allowed)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:
        why[True] = cannot(unwrapped(model), error)
    return why


def _difference(found: Tensor, wanted: Tensor, allowed: float) -> str:
    if (gap := apart(found, wanted)) <= allowed:
        return ""
    return f"hidden states would differ by {gap:.2g}, of which rounding explains {allowed:.2g}"


def _own(model: nn.Module, batch: Batch) -> Tensor:
    """One branch by the model's own forward: its own positions, masks and places."""
    body = _body(model)
    takes = inspect.signature(body.forward).parameters
    types = {name: _shown(batch).long()[None] for name in _TYPES if name in takes}
    # What an earlier forward left there would move the positions of this one, and this one's those of the next.
    keeps = hasattr(body, "rope_deltas")
    if keeps:
        body.rope_deltas = None
    out = body(input_ids=batch.ids[None], **_inputs(batch.images), **types, use_cache=False).last_hidden_state[0]
    if keeps:
        body.rope_deltas = None
    return out


def _twice(probe: Batch) -> Batch:
    length = len(probe.ids)
    assert probe.images is not None
    place = probe.positions
    end = torch.cat([torch.full_like(place, length), torch.full_like(place, 2 * length)])
    images = probe.images.twice(length)
    return replace(probe, ids=probe.ids.repeat(2), positions=place.repeat(2), tree_end=end, images=images)


def _tree(probe: Batch) -> tuple[Batch, int, Batch]:
    """The probe with a sibling from behind the picture on; where they part; and the sibling by itself."""
    assert probe.images is not None
    behind, length = int(probe.images.at[-1]) + 1, len(probe.ids)
    own = probe.ids[behind:].flip(0)
    total = length + len(own)
    place = torch.arange(length, device=own.device)
    positions = torch.cat([place, place[behind:]])
    end = torch.cat([torch.full_like(place[:behind], total), torch.full_like(place[behind:], length)])
    end = torch.cat([end, torch.full_like(own, total)])
    tree = replace(probe, ids=torch.cat([probe.ids, own]), positions=positions, tree_end=end)
    alone = replace(probe, ids=torch.cat([probe.ids[:behind], own]))
    return tree, behind, alone
