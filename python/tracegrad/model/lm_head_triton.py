"""Compute one chunk of logit rows on CUDA, with cuBLAS for the product and two Triton kernels.

`_statistics` reads each row once. `_gradient` turns a row into its gradient in place. The module needs Triton;
`TRITON_INTERPRET=1` runs the kernels on CPU tensors. The reference implementation is `lm_head_chunked.Chunk`.
"""

# Triton's decorators hide the signatures from the type checker.
# pyright: reportCallIssue=false, reportGeneralTypeIssues=false

import os

import torch
import triton
import triton.language as tl
from torch import Tensor

from tracegrad.model.lm_head_chunked import Chunk, Head, Rows, Statistics, project

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
_BLOCK = 4096  # vocabulary entries per loop step of `_statistics`, which runs one program per row
_PIECE = 2048  # vocabulary entries per program of `_gradient`


@triton.jit
def _scores(raw, inverse, logit_scale, softcap, CAPPED: tl.constexpr):
    """Return inverse * cap(logit_scale * raw), and the capped logits divided by the cap."""
    logits = raw * logit_scale
    share = logits
    if CAPPED:
        # tanh(x) = sign(x) * (1 - e) / (1 + e), e = exp(-2 |x|): never overflows, exact for large x
        x = logits / softcap
        e = tl.exp(-2.0 * tl.abs(x))
        share = tl.where(x < 0, -1.0, 1.0) * (1.0 - e) / (1.0 + e)
        logits = share * softcap
    return logits * inverse, share


@triton.jit
def _statistics(
    raw,
    stride,
    target,
    inverse,
    lse,
    logp,
    entropy,
    vocabulary,
    logit_scale,
    softcap,
    CAPPED: tl.constexpr,
    SCALED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Compute one row: running maximum, sum of exponentials, sum of exponentials times distance from the maximum."""
    row = tl.program_id(0).to(tl.int64)
    inv = tl.load(inverse + row) if SCALED else 1.0
    top = -1e30  # finite, because the distance from it is multiplied by a sum of 0
    total = 0.0
    spread = 0.0
    for start in range(0, vocabulary, BLOCK):
        place = start + tl.arange(0, BLOCK)
        inside = place < vocabulary
        value = tl.load(raw + row * stride + place, mask=inside, other=0.0).to(tl.float32)
        z, _ = _scores(value, inv, logit_scale, softcap, CAPPED)
        z = tl.where(inside, z, -1e30)
        higher = tl.maximum(top, tl.max(z, axis=0))
        e = tl.exp(z - higher)
        shrink = tl.exp(top - higher)
        spread = shrink * (spread + (top - higher) * total) + tl.sum(tl.where(e > 0, e * (z - higher), 0.0), axis=0)
        total = shrink * total + tl.sum(e, axis=0)
        top = higher
    chosen = tl.load(raw + row * stride + tl.load(target + row)).to(tl.float32)
    z, _ = _scores(chosen, inv, logit_scale, softcap, CAPPED)
    log_total = tl.log(total)
    tl.store(lse + row, top + log_total)
    tl.store(logp + row, (z - top) - log_total)
    tl.store(entropy + row, log_total - spread / total)


@triton.jit
def _gradient(
    raw,
    out,
    stride,
    target,
    inverse,
    lse,
    entropy,
    d_logp,
    d_entropy,
    vocabulary,
    logit_scale,
    softcap,
    CAPPED: tl.constexpr,
    SCALED: tl.constexpr,
    BY_ENTROPY: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Compute the gradient of one piece of a row: d z, then temperature, scale and cap; `out` may be `raw`."""
    row = tl.program_id(0).to(tl.int64)
    place = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = place < vocabulary
    inv = tl.load(inverse + row) if SCALED else 1.0
    value = tl.load(raw + row * stride + place, mask=inside, other=0.0).to(tl.float32)
    z, share = _scores(value, inv, logit_scale, softcap, CAPPED)
    log_p = z - tl.load(lse + row)
    p = tl.exp(log_p)
    g = tl.load(d_logp + row)
    d = g * (tl.where(place == tl.load(target + row), 1.0, 0.0) - p)
    if BY_ENTROPY:
        d -= tl.load(d_entropy + row) * tl.where(p > 0, p * (log_p + tl.load(entropy + row)), 0.0)
    d = d * inv * logit_scale
    if CAPPED:
        d = d * (1.0 - share * share)
    tl.store(out + row * stride + place, d.to(out.dtype.element_ty), mask=inside)


class TritonChunk(Chunk):
    """A chunk of rows whose table keeps the dtype of the logits; sums are float32."""

    tables = 1
    narrow = True

    def __init__(self, hidden: Tensor, head: Head, rows: Rows, dtype: torch.dtype | None) -> None:
        self.head, self.rows = head, rows
        self._item = hidden.dtype
        self._raw = project(hidden, head, dtype)
        self._common = {"CAPPED": head.softcap is not None, "SCALED": rows.inverse is not None}

    def statistics(self) -> Statistics:
        """Compute the statistics in one read of the table."""
        raw = self._raw
        lse, logp, entropy = (raw.new_empty(len(raw), dtype=torch.float32) for _ in range(3))
        if len(raw):
            block = min(_BLOCK, triton.next_power_of_2(raw.shape[1]))
            _statistics[(len(raw),)](
                *self._row_arguments(), lse, logp, entropy, *self._numbers(), BLOCK=block, **self._common
            )
        return Statistics(lse, logp, entropy)

    def gradient(self, statistics: Statistics, d_logp: Tensor, d_entropy: Tensor | None) -> Tensor:
        """Return the gradient [C, V] in the dtype of the hidden states; in place if the logits have this dtype."""
        raw = self._raw
        out = raw if raw.dtype == self._item else torch.empty_like(raw, dtype=self._item)
        if not len(raw):
            return out
        block = min(_PIECE, triton.next_power_of_2(raw.shape[1]))
        source, *row_arguments = self._row_arguments()
        entropy_gradient = statistics.entropy if d_entropy is None else d_entropy.float().contiguous()
        _gradient[(len(raw), triton.cdiv(raw.shape[1], block))](
            source,
            out,
            *row_arguments,
            statistics.lse.contiguous(),
            statistics.entropy.contiguous(),
            d_logp.float().contiguous(),
            entropy_gradient,
            *self._numbers(),
            BY_ENTROPY=d_entropy is not None,
            BLOCK=block,
            **self._common,
        )
        return out

    def _row_arguments(self) -> tuple:
        raw, inverse = self._raw, self.rows.inverse
        inverse = raw if inverse is None else inverse.float().contiguous()
        return raw, raw.stride(0), self.rows.target.contiguous(), inverse

    def _numbers(self) -> tuple[int, float, float]:
        return self._raw.shape[1], self.head.logit_scale, self.head.softcap or 1.0
