"""Run rows with images through the model's own body, with image features at the recorded positions.

The body of the model gets ids, pixels and positions. This module passes it two things in addition:
the recorded image positions, because a sampled or written pad id is text, and the position of each token in the tree.
For each model, a comparison decides once which forward modes reproduce the hidden states of the model itself.
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
from tracegrad.model.structure import attention_of, unwrap_adapters
from tracegrad.model.verify import failure_reason, inference_mode, ordinary_ids, relative_difference, rounding_tolerance
from tracegrad.packing import Batch

_results: WeakKeyDictionary[nn.Module, dict[bool, str | None]] = WeakKeyDictionary()
_TYPES = ("mm_token_type_ids", "token_type_ids")


def image_hidden_states(model: nn.Module, batch: Batch) -> Tensor:
    """Return the hidden states [T, H] of a row with images; zeros in branches that the head does not read.

    The row runs in one pass under a mask if that reproduces the model's own hidden states, else branch by branch.

    Raises:
        ArgumentError: if neither mode reproduces the model's own forward pass, or if the row shares prefixes and the
            masked mode does not reproduce it.
    """
    branches = list(_branches(batch))
    is_plain = all(_is_branch(batch, *tree) for tree in branches)
    reason = _reasons(model, batch)
    if not reason[True]:
        return _run_row(model, batch)
    if reason[False]:
        raise ArgumentError(
            f"TG-MODEL-019: {type(unwrap_adapters(model)).__name__} gives other numbers on pictures than its "
            f"own forward: "
            f"{reason[False]}. What it would learn from is not what was sampled. Leave traces with pictures out."
        )
    if not is_plain:
        raise ArgumentError(
            f"TG-MODEL-020: prefixes with pictures cannot be shared: {reason[True]}. A branch would read what is its "
            "sibling's. Pack with share_prefixes=False; in a run, leave out pack.share_prefixes."
        )
    return _run_branches(model, batch, branches)


def _branches(batch: Batch) -> Iterator[tuple[int, int]]:
    """Yield the start and end of each tree of a row. In a plain row, each branch is a tree."""
    starts = [*np.flatnonzero(_host(batch.positions) == 0).tolist(), len(batch.ids)]
    yield from pairwise(starts)


def _is_branch(batch: Batch, start: int, end: int) -> bool:
    return bool((batch.tree_end[start:end] == end).all())


def _host(values: Any) -> Any:
    return values.cpu().numpy() if isinstance(values, Tensor) else np.asarray(values)


def _run_branches(model: nn.Module, batch: Batch, branches: list[tuple[int, int]]) -> Tensor:
    ends = [end for _, end in branches]
    read = np.unique(np.searchsorted(ends, _host(batch.read), side="right")).tolist() or [0]
    hidden = {number: _run_row(model, slice_row(batch, *branches[number]), masked=False) for number in read}
    first = hidden[read[0]]
    lengths = [end - start for start, end in branches]
    unread = (first.new_zeros(length, first.shape[-1]) for length in lengths)
    return torch.cat([hidden.get(number, zeros) for number, zeros in enumerate(unread)])


def slice_row(batch: Batch, start: int, end: int) -> Batch:
    """Return the tokens `start` to `end` of a row as a new row, without logit rows and trained tokens.

    An image is included if its first token is in the range; images are never split.
    """
    images = batch.images
    if images is not None:
        first = images.position[images.cu_features[:-1]] if len(images) else images.position
        indices = np.flatnonzero((first >= start) & (first < end))
        images = images.take(indices, start) if len(indices) else None
    empty = np.zeros(0, np.int64)
    return replace(
        batch,
        ids=batch.ids[start:end],
        positions=batch.positions[start:end],
        tree_end=batch.tree_end[start:end] - start,
        read=batch.read[:0],
        target=batch.target[:0],
        inv_temperature=batch.inv_temperature[:0],
        logit_row=batch.logit_row[:0],
        term=empty,
        longest=None,
        images=images,
    )


def _run_row(model: nn.Module, batch: Batch, *, masked: bool = True) -> Tensor:
    """Return the hidden states [T, H] of a row, in one pass of the body."""
    body, inputs = _body(model), _inputs(batch.images)
    options: dict[str, Any] = {"position_ids": _positions(body, batch, inputs), "use_cache": False}
    if masked:
        additive = None if attention_of(model) == "sdpa" else next(model.parameters()).dtype
        options["attention_mask"] = dense_mask(batch, dtype=additive)
    with _with_image_positions(body, batch):
        return body(input_ids=batch.ids[None], **inputs, **options).last_hidden_state[0]


def _body(model: nn.Module) -> Any:
    """Return the module below the head that accepts ids and pixels."""
    inner = unwrap_adapters(model)
    body = inner.base_model
    if not hasattr(body, "get_image_features"):
        raise ArgumentError(
            f"TG-MODEL-021: {type(inner).__name__} takes no pictures: it has no get_image_features. Traces with "
            "pictures cannot be trained with it. Load an image-text model."
        )
    return body


def _inputs(images: RowImages | None) -> dict[str, Tensor]:
    """Return the inputs of the vision tower for all images of a row, in order; empty for a row of text."""
    if images is None:
        return {}
    if images.inputs is None:
        raise ArgumentError("TG-MODEL-022: the pictures of a batch are not processed. Move the batch with to() first.")
    indices = np.searchsorted(np.unique(images.image), images.image)
    per_image = [images.inputs[number] for number in indices.tolist()]
    # Model families that split an image have pixel values of shape (1, pieces, channels, height, width).
    split = per_image[0]["pixel_values"].ndim == 5

    def concatenate(name: str) -> Tensor:
        parts = [image_inputs[name] for image_inputs in per_image]
        return torch.cat(parts, 1 if split and parts[0].ndim > 1 and parts[0].shape[0] == 1 else 0)

    return {name: concatenate(name) for name in per_image[0]}


def _positions(body: Any, batch: Batch, inputs: Mapping[str, Tensor]) -> Tensor:
    """Return the position ids: [1, T], or [3, 1, T] of (time, row, column) if the model numbers image rows and columns.

    An image of h rows and w columns advances the position by max(h, w), not by h * w. The positions of the tokens after
    it in the tree are smaller by the difference.

    Args:
        inputs: the result of `_inputs` for the row.
    """
    depth = batch.positions
    if not hasattr(body, "get_rope_index"):
        return depth[None]
    offset = torch.zeros_like(depth)
    images = batch.images
    if images is None:
        return depth[None, None].expand(3, 1, -1)
    sizes = inputs["image_grid_thw"].tolist()
    merge = body.config.vision_config.spatial_merge_size
    image_positions: list[tuple[Any, Tensor]] = []
    for number, (_, height, width) in enumerate(sizes):
        tokens = images.position[images.cu_features[number] : images.cu_features[number + 1]]
        rows, columns = height // merge, width // merge
        if rows * columns != len(tokens) or tokens[-1] - tokens[0] != len(tokens) - 1:
            raise ArgumentError(
                f"TG-MODEL-023: a picture has {len(tokens)} ids and {rows} x {columns} features. Its place in the "
                "prompt is not that of this model. Align the traces with the model that is trained."
            )
        first, last = int(tokens[0]), int(tokens[-1])
        start = depth[first] - offset[first]
        step = torch.arange(len(tokens), device=depth.device)
        zero = torch.zeros_like(step)
        image_positions.append((slice(first, last + 1), start + torch.stack([zero, step // columns, step % columns])))
        offset[last + 1 : int(batch.tree_end[last])] += len(tokens) - max(rows, columns)
    positions = (depth - offset)[None].repeat(3, 1)
    for span, values in image_positions:
        positions[:, span] = values
    return positions[:, None]


def _image_tokens(batch: Batch) -> Tensor:
    """Return [T] bool: the image tokens of a row."""
    mask = torch.zeros(len(batch.ids), dtype=torch.bool, device=batch.ids.device)
    if batch.images is not None:
        mask[torch.from_numpy(batch.images.position).to(mask.device)] = True
    return mask


@contextmanager
def _with_image_positions(body: Any, batch: Batch) -> Iterator[None]:
    """Make the body insert image features at the recorded positions while entered; any other pad id is text."""
    if batch.images is None:
        yield
        return
    mask = _image_tokens(batch)
    pads = batch.ids == batch.images.rule.pad
    original = getattr(body, "get_placeholder_mask", None)
    if original is None:
        if bool((pads != mask).any()):
            raise ArgumentError(
                f"TG-MODEL-024: a prompt holds the id of a picture where none stands, and {type(body).__name__} would "
                "see one there. Leave such traces out."
            )
        yield
        return

    ids = batch.ids.masked_fill(~mask, int(ordinary_ids(body)[0]))[None]

    def get_placeholder_mask(input_ids: Any = None, *args: Any, **kwargs: Any) -> Any:
        return original(ids, *args, **kwargs)

    body.get_placeholder_mask = get_placeholder_mask
    try:
        yield
    finally:
        del body.get_placeholder_mask


def _reasons(model: nn.Module, batch: Batch) -> Mapping[bool, str | None]:
    """Return the reasons against running rows with images under a mask (key True) and branch by branch (key False).

    A reason is None if the mode is correct. The modes are compared once for each model, on the shortest tree of the row
    that has an image. The reference is the model's own forward pass, which makes positions and masks itself. It is
    compared with the branch in its own pass, with two copies in one row, and with a tree of two branches.
    """
    if model not in _results:
        with inference_mode(model), torch.no_grad():
            _results[model] = _compare(model, _probe(model, batch))
    return _results[model]


def _probe(model: nn.Module, batch: Batch) -> Batch:
    """Return the shortest tree of a row that has an image, as one branch, with ordinary ids for pads that are text.

    A tree can be used as one branch because any sequence of ids is a valid prompt.
    """
    trees = (slice_row(batch, start, end) for start, end in _branches(batch))
    shortest = min((tree for tree in trees if tree.images is not None), key=lambda tree: len(tree.ids))
    assert shortest.images is not None
    ordinary = ordinary_ids(model)
    text = torch.where(shortest.ids == shortest.images.rule.pad, int(ordinary[0]), shortest.ids)
    # Only tokens after an image show an error in its positions.
    tail = text.new_tensor([int(ordinary[n % len(ordinary)]) for n in (1, 3, 2, 4)])
    ids = torch.cat([torch.where(_image_tokens(shortest), shortest.ids, text), tail])
    positions = torch.arange(len(ids), device=ids.device)
    return replace(shortest, ids=ids, positions=positions, tree_end=torch.full_like(positions, len(ids)))


def _compare(model: nn.Module, probe: Batch) -> dict[bool, str | None]:
    try:
        expected = _reference(model, probe)
        allowed = rounding_tolerance(model)
        hidden = _run_row(model, probe, masked=False)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # the forward pass of a third-party model may raise anything
        reason = failure_reason(unwrap_adapters(model), error)
        return {False: reason, True: reason}
    reasons = {False: _difference(hidden, expected, allowed), True: None}
    try:
        copies = _two_copies(probe)
        hidden_copies = _run_row(model, copies)
        length = len(probe.ids)
        reasons[True] = _difference(hidden_copies[:length], expected, allowed) or _difference(
            hidden_copies[length:], expected, allowed
        )
        tree, fork, sibling = _tree(probe)
        hidden_tree = _run_row(model, tree)
        reasons[True] = reasons[True] or _difference(hidden_tree[:length], expected, allowed)
        branch = torch.cat([hidden_tree[:fork], hidden_tree[length:]])
        reasons[True] = reasons[True] or _difference(branch, _reference(model, sibling), allowed)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:
        reasons[True] = failure_reason(unwrap_adapters(model), error)
    return reasons


def _difference(hidden: Tensor, expected: Tensor, allowed: float) -> str | None:
    if (gap := relative_difference(hidden, expected)) <= allowed:
        return None
    return f"hidden states would differ by {gap:.2g}, of which rounding explains {allowed:.2g}"


def _reference(model: nn.Module, batch: Batch) -> Tensor:
    """Return the hidden states of one branch by the model's own forward pass, with its own positions and masks."""
    body = _body(model)
    parameters = inspect.signature(body.forward).parameters
    token_types = {name: _image_tokens(batch).long()[None] for name in _TYPES if name in parameters}
    # The body stores an offset of positions in rope_deltas, which would shift the positions of the next forward pass.
    has_deltas = hasattr(body, "rope_deltas")
    if has_deltas:
        body.rope_deltas = None
    out = body(input_ids=batch.ids[None], **_inputs(batch.images), **token_types, use_cache=False).last_hidden_state[0]
    if has_deltas:
        body.rope_deltas = None
    return out


def _two_copies(probe: Batch) -> Batch:
    length = len(probe.ids)
    assert probe.images is not None
    positions = probe.positions
    end = torch.cat([torch.full_like(positions, length), torch.full_like(positions, 2 * length)])
    images = probe.images.repeat(length)
    return replace(probe, ids=probe.ids.repeat(2), positions=positions.repeat(2), tree_end=end, images=images)


def _tree(probe: Batch) -> tuple[Batch, int, Batch]:
    """Return a tree of the probe and a sibling that differs after the image, the fork position, and the sibling."""
    assert probe.images is not None
    fork, length = int(probe.images.position[-1]) + 1, len(probe.ids)
    suffix = probe.ids[fork:].flip(0)
    total = length + len(suffix)
    place = torch.arange(length, device=suffix.device)
    positions = torch.cat([place, place[fork:]])
    end = torch.cat([torch.full_like(place[:fork], total), torch.full_like(place[fork:], length)])
    end = torch.cat([end, torch.full_like(suffix, total)])
    tree = replace(probe, ids=torch.cat([probe.ids, suffix]), positions=positions, tree_end=end)
    sibling = replace(probe, ids=torch.cat([probe.ids[:fork], suffix]))
    return tree, fork, sibling
