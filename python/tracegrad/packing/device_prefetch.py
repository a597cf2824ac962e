"""Copies the next batch to the device while the current one is worked on. torch is imported on use."""

from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from typing import Any

from tracegrad.errors import ArgumentError
from tracegrad.images import RowImages
from tracegrad.packing.batch import Batch, columns_of


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

    >>> from tracegrad.packing import pack
    >>> from tracegrad.alignment.sequences import Sequences
    >>> s = Sequences.from_arrays([5, 6], [0, 2], [0, -1], [False, True])
    >>> [batch.ids.tolist() for batch in prefetch(pack(s, [1.0], token_budget=4)[0].batches, "cpu")]
    [[5, 6]]
    """
    if ahead < 0:
        raise ArgumentError(f"ahead is {ahead}. It is how many batches are moved before they are asked for.")
    return _prefetch(batches, device, ahead)


def _prefetch(batches: Iterable[Batch], device: Any, ahead: int) -> Iterator[Batch]:
    import torch

    batches = _with_pictures(batches, max(ahead, 1))
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


def _with_pictures(batches: Iterable[Batch], ahead: int) -> Iterator[Batch]:
    """The batches, their pictures decoded and made ready in a thread while the caller works on the one before."""
    waiting: deque[tuple[Batch, Future[RowImages] | None]] = deque()
    with ThreadPoolExecutor(1, "pictures") as thread:
        for batch in batches:
            made = thread.submit(batch.images.to, "cpu") if batch.images is not None else None
            waiting.append((batch, made))
            # Without pictures there is nothing to begin before it is asked for.
            if len(waiting) > ahead or (made is None and len(waiting) == 1):
                yield _ready(*waiting.popleft())
        while waiting:
            yield _ready(*waiting.popleft())


def _ready(batch: Batch, images: Future[RowImages] | None) -> Batch:
    return batch if images is None else replace(batch, images=images.result())


def _arrived(batch: Batch, event: Any, device: Any) -> Batch:
    """The batch, ordered after its copy; its memory is not given away before the caller's stream is done with it."""
    import torch

    current = torch.cuda.current_stream(device)
    current.wait_event(event)
    for name in columns_of(batch):
        getattr(batch, name).record_stream(current)
    return batch
