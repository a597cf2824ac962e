"""The chunk of `chunk.Chunk` with its passes over the vocabulary fused by torch.compile: any device Inductor knows.

The portable fallback where the Triton kernels do not run. The formulas are those of `Chunk`, traced; the first call
compiles.
"""

import torch
from torch import Tensor

from tracegrad.kernels.chunk import Chunk, Head, Rows, Statistics, projected


class CompiledChunk(Chunk):
    """A chunk that holds the product in its own dtype; every pass reads it and writes sums or the gradient."""

    tables = 1
    narrow = True

    def __init__(self, hidden: Tensor, head: Head, rows: Rows, dtype: torch.dtype | None) -> None:
        self.head, self.rows = head, rows
        self._item = hidden.dtype
        self._raw = projected(hidden, head, dtype)

    def statistics(self) -> Statistics:
        """One pass over the table."""
        return Statistics(*_statistics(self.rows, self._scored()))

    def gradient(self, known: Statistics, d_logp: Tensor, d_entropy: Tensor | None) -> Tensor:
        """[C, V] in the dtype of the hidden states."""
        return _gradient(self._item, self.rows, self._scored(), known, d_logp, d_entropy)

    def _scored(self) -> Head:
        return Head(self._raw, None, self.head.softcap, self.head.logit_scale)


@torch.compile(dynamic=True)
def _statistics(rows: Rows, head: Head) -> tuple[Tensor, Tensor, Tensor]:
    """With the product in the place of the head's weight."""
    found = Chunk.of_raw(head.weight, head, rows).statistics()
    return found.lse, found.logp, found.entropy


@torch.compile(dynamic=True)
def _gradient(
    item: torch.dtype, rows: Rows, head: Head, known: Statistics, d_logp: Tensor, d_entropy: Tensor | None
) -> Tensor:
    """With the product in the place of the head's weight."""
    return Chunk.of_raw(head.weight, head, rows).gradient(known, d_logp, d_entropy).to(item)
