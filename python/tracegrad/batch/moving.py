"""Batches on their way to a device, ahead of the work that needs them.

Here are `prefetch` and the one way an array moves. torch is imported on use. Called by `Batch.to` and the learner.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import fields
from typing import TYPE_CHECKING, Any

import numpy as np

from tracegrad.errors import ArgumentError

if TYPE_CHECKING:
    from tracegrad.batch.step import Batch


def columns_of(batch: Batch) -> list[str]:
    """The names of the arrays that move with a batch."""
    return [field.name for field in fields(batch) if field.name not in ("term", "longest")]


def moved(values: Any, device: Any) -> Any:
    """An array or tensor as a torch tensor on `device`, integers as int64; to CUDA by page-locked memory, no wait."""
    import torch

    tensor = sent(values if isinstance(values, torch.Tensor) else torch.from_numpy(np.asarray(values)), device)
    return tensor if tensor.is_floating_point() else tensor.long()


def sent(tensor: Any, device: Any) -> Any:
    """A tensor on `device`, in its dtype; to CUDA by page-locked memory, no wait."""
    import torch

    if tensor.device.type == "cpu" and torch.device(device).type == "cuda":
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)


def prefetch(batches: Iterable[Batch], device: Any, ahead: int = 1) -> Iterator[Batch]:
    """Yields `batch.to(device)` for each batch, the next ones on their way while the caller works on one.

    On CUDA a stream of its own carries the copies, and a batch is handed out in the order of the caller's stream: no
    wait on the host. On a CPU there is nothing to overlap and batches come as `to` makes them.

    Args:
        batches: of a step.
        device: anything `torch.Tensor.to` takes.
        ahead: batches moved before they are asked for; each holds its memory.

    Raises:
        ArgumentError: if `ahead` is negative.

    >>> from tracegrad.batch import pack
    >>> from tracegrad.sequence import Sequences
    >>> s = Sequences.from_arrays([5, 6], [0, 2], [0, -1], [False, True])
    >>> [batch.ids.tolist() for batch in prefetch(pack(s, [1.0], token_budget=4)[0].batches, "cpu")]
    [[5, 6]]
    """
    if ahead < 0:
        raise ArgumentError(f"ahead is {ahead}. It is how many batches are moved before they are asked for.")
    return _prefetch(batches, device, ahead)


def _prefetch(batches: Iterable[Batch], device: Any, ahead: int) -> Iterator[Batch]:
    import torch

    if torch.device(device).type != "cuda":
        for batch in batches:
            yield batch.to(device)
        return
    stream = torch.cuda.Stream(device)
    waiting: deque[tuple[Batch, Any]] = deque()
    for batch in batches:
        with torch.cuda.stream(stream):
            waiting.append((batch.to(device), stream.record_event()))
        if len(waiting) > ahead:
            yield _arrived(*waiting.popleft(), device)
    while waiting:
        yield _arrived(*waiting.popleft(), device)


def _arrived(batch: Batch, event: Any, device: Any) -> Batch:
    """The batch, ordered after its copy; its memory is not given away before the caller's stream is done with it."""
    import torch

    current = torch.cuda.current_stream(device)
    current.wait_event(event)
    for name in columns_of(batch):
        getattr(batch, name).record_stream(current)
    return batch
