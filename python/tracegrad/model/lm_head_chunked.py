"""Compute token logprobs and entropies from hidden states in chunks, without all logits at once."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn


class Head(NamedTuple):
    """A head: its logits are logit_scale * (hidden @ weight.T + bias), then softcap * tanh(. / softcap)."""

    weight: Tensor
    bias: Tensor | None = None
    softcap: float | None = None
    logit_scale: float = 1.0


class Rows(NamedTuple):
    """The inputs of rows in addition to hidden states: target [C] int64, inverse temperature [C] or None for 1."""

    target: Tensor
    inverse: Tensor | None

    def at(self, rows: slice) -> "Rows":
        """Return the rows of a chunk."""
        return Rows(self.target[rows], None if self.inverse is None else self.inverse[rows])


class Statistics(NamedTuple):
    """Statistics of each row: log-sum-exp of the scores, logprob of the target, entropy; float32 or float64, nats."""

    lse: Tensor
    logp: Tensor
    entropy: Tensor

    def at(self, here: slice) -> "Statistics":
        """Return the statistics of a chunk."""
        return Statistics(self.lse[here], self.logp[here], self.entropy[here])


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of sums: float32, or float64 for float64."""
    return torch.promote_types(dtype, torch.float32)


def project(hidden: Tensor, head: Head, dtype: torch.dtype | None = None) -> Tensor:
    """Return [C, V]: hidden @ weight.T + bias, rounded to `dtype`; None is the dtype of `hidden`."""
    if dtype is None or dtype == hidden.dtype:
        return nn.functional.linear(hidden, head.weight, head.bias)
    if hidden.is_cuda and dtype == torch.float32 and hidden.ndim == 2:
        logits = torch.mm(hidden, head.weight.T, out_dtype=dtype)
        return logits if head.bias is None else logits.add_(head.bias)
    wide = wide_dtype(hidden.dtype)
    bias = None if head.bias is None else head.bias.to(wide)
    return nn.functional.linear(hidden.to(wide), head.weight.to(wide), bias).to(dtype)


def logits_of(hidden: Tensor, head: Head, dtype: torch.dtype | None = None) -> Tensor:
    """Return the logits [..., V], float32, or float64 for float64 input.

    The product with the weight is rounded to `dtype` before scale and cap.
    """
    return _scale_and_cap(project(hidden, head, dtype).to(wide_dtype(hidden.dtype)), head)


def _scale_and_cap(logits: Tensor, head: Head) -> Tensor:
    """Apply the scale and the cap of the head to its product, in place."""
    if head.logit_scale != 1.0:
        logits = logits.mul_(head.logit_scale)
    return logits if head.softcap is None else logits.div_(head.softcap).tanh_().mul_(head.softcap)


class Chunk:
    """The scores z = inverse * logits of C rows [C, V], their statistics and gradient; at most three tables at once.

    Args:
        hidden: [C, H].
        head: its weight and bias in the dtype of `hidden`.
        rows: of these C rows.
        dtype: the dtype to which the product with the weight is rounded.
    """

    tables = 2  # [C, V] tensors in memory at once, in the dtype of the sums
    narrow = False  # whether tables have the dtype of the logits instead of the dtype of the sums

    def __init__(self, hidden: Tensor, head: Head, rows: Rows, dtype: torch.dtype | None) -> None:
        self._start(project(hidden, head, dtype).to(wide_dtype(hidden.dtype)), head, rows)

    @classmethod
    def of_raw(cls, raw: Tensor, head: Head, rows: Rows) -> "Chunk":
        """Create a chunk from a product, which is copied and not changed. Only cap and scale of `head` are read."""
        chunk = cls.__new__(cls)
        chunk._start(raw.to(wide_dtype(raw.dtype), copy=True), head, rows)
        return chunk

    def _start(self, raw: Tensor, head: Head, rows: Rows) -> None:
        self.head, self.rows = head, rows
        z = _scale_and_cap(raw, head)
        self._z = z if rows.inverse is None else z.mul_(rows.inverse[:, None])
        self._p: Tensor | None = None

    def statistics(self) -> Statistics:
        """Compute sums over the vocabulary, and keep the probabilities for `gradient`."""
        z = self._z
        maximum = z.amax(-1, keepdim=True)
        shifted = z - maximum
        at_target = shifted.gather(1, self.rows.target[:, None]).squeeze(1)
        p = shifted.exp()
        total = p.sum(-1)
        log_total = total.log()
        entropy = log_total - _row_dot(p, shifted) / total
        self._p = p.div_(total[:, None])
        return Statistics(log_total + maximum.squeeze(1), at_target - log_total, entropy)

    def gradient(self, statistics: Statistics, d_logp: Tensor, d_entropy: Tensor | None) -> Tensor:
        """Return the gradient [C, V] of the loss by hidden @ weight.T + bias. It overwrites the chunk's tables.

            d z_j = d_logp * (1[j = target] - p_j) - d_entropy * p_j * (log p_j + entropy)
            d raw_j = d z_j * inverse * logit_scale * (1 - (logits_j / softcap)^2)

        Args:
            statistics: statistics of these rows.
            d_logp, d_entropy: [C], the gradient of the loss; None if it does not depend on the entropy.
        """
        z, p = self._z, self._p
        softcap, inverse, target = self.head.softcap, self.rows.inverse, self.rows.target[:, None]
        slope = None if softcap is None else _slope(z, softcap, inverse)
        factor = self.head.logit_scale if inverse is None else inverse * self.head.logit_scale
        d_logp = (d_logp * factor).to(z.dtype)[:, None]
        if d_entropy is None:
            p = z.sub_(statistics.lse[:, None]).exp_() if p is None else p
            d_raw = p.mul_(-d_logp)
        else:
            d_entropy = (d_entropy * factor).to(z.dtype)[:, None]
            log_p = z.sub_(statistics.lse[:, None])
            p = log_p.exp() if p is None else p
            d_raw = log_p.add_(statistics.entropy[:, None]).mul_(-d_entropy).sub_(d_logp).mul_(p)
        d_raw.scatter_add_(1, target, d_logp)
        return d_raw if slope is None else d_raw.mul_(slope)


def _row_dot(a: Tensor, b: Tensor) -> Tensor:
    """Return [C], the sum of a * b over each row, without a table of the products."""
    if torch.compiler.is_compiling():  # the compiler fuses the products with the computation of a and b
        return (a * b).sum(-1)
    return torch.bmm(a[:, None, :], b[:, :, None]).reshape(len(a))


def _slope(z: Tensor, softcap: float, inverse: Tensor | None) -> Tensor:
    """Return the derivative of the softcap at the scores z."""
    capped = z / softcap if inverse is None else z / (softcap * inverse)[:, None]
    return capped.square_().neg_().add_(1)


class GradientSums:
    """Gradients of hidden states, weight and bias, added up chunk by chunk.

    The gradients of weight and bias are float32 or wider while they are summed.

    Args:
        hidden: [U, H].
        head: its weight and bias in the dtype of `hidden`.
        needs_grad: whether to compute the gradients of hidden, weight and bias.
    """

    def __init__(self, hidden: Tensor, head: Head, needs_grad: tuple[bool, bool, bool]) -> None:
        wide = wide_dtype(hidden.dtype)
        self._inputs, self._head = hidden, head
        self.hidden = torch.empty_like(hidden) if needs_grad[0] else None
        self.weight = torch.zeros_like(head.weight, dtype=wide) if needs_grad[1] else None
        self.bias = hidden.new_zeros(len(head.weight), dtype=wide) if needs_grad[2] else None

    def add(self, here: slice, d_raw: Tensor) -> None:
        """Add [C, V], the gradient by the projection of the rows `here`."""
        if self.hidden is not None:
            torch.mm(d_raw.to(self.hidden.dtype), self._head.weight, out=self.hidden[here])
        if self.weight is not None:
            _add_product(self.weight, d_raw, self._inputs[here])
        if self.bias is not None:
            self.bias += d_raw.sum(0, dtype=self.bias.dtype)

    def gradients(
        self, weight: torch.dtype, bias: torch.dtype | None
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """Return the three gradients in the dtypes of the parameters, `weight` and `bias`; None if not computed."""
        d_weight = None if self.weight is None else self.weight.to(weight)
        d_bias = None if self.bias is None or bias is None else self.bias.to(bias)
        return self.hidden, d_weight, d_bias


def _add_product(total: Tensor, d_raw: Tensor, hidden: Tensor) -> None:
    """Add d_raw.T @ hidden to `total`, summed in its dtype, so that no chunk is rounded to bfloat16 in between."""
    if hidden.dtype == total.dtype:
        total.addmm_(d_raw.T, hidden)
    elif hidden.is_cuda:
        torch.addmm(total, d_raw.T.to(hidden.dtype), hidden, out_dtype=total.dtype, out=total)
    else:
        total.addmm_(d_raw.T.to(total.dtype), hidden.to(total.dtype))


def slices(total: int, size: int) -> list[slice]:
    """Split 0 to `total` into slices of at most `size`."""
    return [slice(start, min(start + size, total)) for start in range(0, total, size)]


class CompiledChunk(Chunk):
    """A chunk that keeps the product in its dtype. Each pass reads it once and writes sums or the gradient."""

    tables = 1
    narrow = True

    def __init__(self, hidden: Tensor, head: Head, rows: Rows, dtype: torch.dtype | None) -> None:
        self.head, self.rows = head, rows
        self._item = hidden.dtype
        self._raw = project(hidden, head, dtype)

    def statistics(self) -> Statistics:
        """Compute the statistics in one pass over the table."""
        return Statistics(*_compiled(_statistics)(self.rows, self._head_of_product()))

    def gradient(self, statistics: Statistics, d_logp: Tensor, d_entropy: Tensor | None) -> Tensor:
        """Return the gradient [C, V] in the dtype of the hidden states."""
        return _compiled(_gradient)(self._item, self.rows, self._head_of_product(), statistics, d_logp, d_entropy)

    def _head_of_product(self) -> Head:
        return Head(self._raw, None, self.head.softcap, self.head.logit_scale)


@functools.cache
def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compile a function on its first use, because `torch.compile` imports its compiler: seconds of CPU time."""
    return torch.compile(function, dynamic=True)


def _statistics(rows: Rows, head: Head) -> tuple[Tensor, Tensor, Tensor]:
    """Return the fields of `Statistics`. `head.weight` is the product, not the weight."""
    statistics = Chunk.of_raw(head.weight, head, rows).statistics()
    return statistics.lse, statistics.logp, statistics.entropy


def _gradient(
    item: torch.dtype, rows: Rows, head: Head, statistics: Statistics, d_logp: Tensor, d_entropy: Tensor | None
) -> Tensor:
    """Return the gradient [C, V] in the dtype `item`. `head.weight` is the product, not the weight."""
    return Chunk.of_raw(head.weight, head, rows).gradient(statistics, d_logp, d_entropy).to(item)
