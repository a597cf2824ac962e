"""Copy the next batches to the device while the caller uses the current one. torch is imported on use."""

from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from typing import Any

from tracegrad.errors import ArgumentError
from tracegrad.images import RowImages
from tracegrad.packing.batch import Batch, columns_of


def prefetch(batches: Iterable[Batch], device: Any, ahead: int = 1) -> Iterator[Batch]:
    """Yield `batch.to(device)` for each batch, and copy the next ones while the caller uses the current one.

    On CUDA the copies run on a separate stream, and the caller's stream waits for them; the host does not wait. On a
    CPU there are no copies to overlap. Images are decoded in a thread on both.

    Args:
        batches: of a step.
        device: any argument of `torch.Tensor.to`.
        ahead: number of batches that are moved in advance. Each occupies device memory.

    Raises:
        ArgumentError: if `ahead` is negative.

    >>> from tracegrad.packing import pack
    >>> from tracegrad.alignment.sequences import Sequences
    >>> s = Sequences.from_arrays([5, 6], [0, 2], [0, -1], [False, True])
    >>> [batch.ids.tolist() for batch in prefetch(pack(s, [1.0], tokens_per_row=4)[0].batches, "cpu")]
    [[5, 6]]
    """
    if ahead < 0:
        raise ArgumentError(
            f"TG-PACK-007: ahead is {ahead}. It is the number of batches that are moved before they are needed."
        )
    return _prefetch(batches, device, ahead)


def _prefetch(batches: Iterable[Batch], device: Any, ahead: int) -> Iterator[Batch]:
    import torch

    batches = _with_images(batches, max(ahead, 1))
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
            yield _after_copy(*waiting.popleft(), device)
    while waiting:
        yield _after_copy(*waiting.popleft(), device)


def _with_images(batches: Iterable[Batch], ahead: int) -> Iterator[Batch]:
    """Yield the batches with their images decoded and processed in a thread, while the caller uses earlier ones."""
    waiting: deque[tuple[Batch, Future[RowImages] | None]] = deque()
    with ThreadPoolExecutor(1, "pictures") as thread:
        for batch in batches:
            processed = thread.submit(batch.images.to, "cpu") if batch.images is not None else None
            waiting.append((batch, processed))
            # A batch without images needs no work in advance.
            if len(waiting) > ahead or (processed is None and len(waiting) == 1):
                yield _ready(*waiting.popleft())
        while waiting:
            yield _ready(*waiting.popleft())


def _ready(batch: Batch, images: Future[RowImages] | None) -> Batch:
    return batch if images is None else replace(batch, images=images.result())


def _after_copy(batch: Batch, event: Any, device: Any) -> Batch:
    """Order the caller's stream after the copy of a batch, and keep its memory until that stream has used it."""
    import torch

    current = torch.cuda.current_stream(device)
    current.wait_event(event)
    tensors = [getattr(batch, name) for name in columns_of(batch)]
    for tensor in [*tensors, *(batch.support.tensors() if batch.support else ())]:
        tensor.record_stream(current)
    return batch
