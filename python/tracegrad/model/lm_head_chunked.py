"""Compute token logprobs and entropies from hidden states in chunks, without all logits at once."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from tracegrad.packing.support import LogitChanges, Support


class Head(NamedTuple):
    """A head: its logits are logit_scale * (hidden @ weight.T + bias), then softcap * tanh(. / softcap)."""

    weight: Tensor
    bias: Tensor | None = None
    softcap: float | None = None
    logit_scale: float = 1.0


class Rows(NamedTuple):
    """The inputs of rows in addition to hidden states.

    Args:
        target: [C] int64.
        inverse: [C] inverse temperature; None for 1.
        support: the ids from which the targets were drawn; None for the whole vocabulary.
        entropy_over_support: whether the entropy of a row with support is that of the distribution over its support.
        needs_vocabulary_logp: whether a row with support also has the logprob over the whole vocabulary, without
            penalties.
    """

    target: Tensor
    inverse: Tensor | None
    support: Support | None = None
    entropy_over_support: bool = False
    needs_vocabulary_logp: bool = False

    def at(self, rows: slice) -> "Rows":
        """Return the rows of a chunk."""
        inverse = None if self.inverse is None else self.inverse[rows]
        return self._replace(target=self.target[rows], inverse=inverse, support=self.support and self.support.at(rows))


class Statistics(NamedTuple):
    """Statistics of each row: log-sum-exp of the scores, logprob of the target, entropy; float32 or float64, nats.

    `vocabulary_logp` is the logprob of the target over the whole vocabulary, without penalties. It is None if it is not
    needed, or if it is `logp` in all rows.
    """

    lse: Tensor
    logp: Tensor
    entropy: Tensor
    vocabulary_logp: Tensor | None = None

    def at(self, here: slice) -> "Statistics":
        """Return the statistics of a chunk."""
        of_vocabulary = None if self.vocabulary_logp is None else self.vocabulary_logp[here]
        return Statistics(self.lse[here], self.logp[here], self.entropy[here], of_vocabulary)

    def set(self, here: slice, values: "Statistics") -> None:
        """Write the statistics of a chunk."""
        self.lse[here], self.logp[here], self.entropy[here] = values[:3]
        if self.vocabulary_logp is not None:
            self.vocabulary_logp[here] = values.logp if values.vocabulary_logp is None else values.vocabulary_logp


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

    rows: Rows
    head: Head
    _raw: Tensor  # the product, if `narrow`
    _z: Tensor  # the scores, otherwise
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

    def copy_rows(self, row: Tensor) -> "Chunk":
        """Return a chunk of some rows [R] of a table that is not `narrow`, with a copy of their scores."""
        chunk = Chunk.__new__(Chunk)
        inverse = None if self.rows.inverse is None else self.rows.inverse[row]
        chunk.head, chunk.rows = self.head, Rows(self.rows.target[row], inverse)
        chunk._z, chunk._p = self._z[row], None
        return chunk

    def scores_at(self, row: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Return [K]: the scores of some ids, and the derivative of each by its projection. Call it before `gradient`.

        Args:
            row, ids: [K] int64, the row in this chunk and the vocabulary entry of each score.
        """
        inverse = None if self.rows.inverse is None else self.rows.inverse[row]
        if self.narrow:
            z = _scale_and_cap(self._raw[row, ids].to(wide_dtype(self._raw.dtype), copy=True), self.head)
            z = z if inverse is None else z.mul_(inverse)
        else:
            z = self._z[row, ids]
        slope = torch.full_like(z, self.head.logit_scale) if inverse is None else inverse * self.head.logit_scale
        if self.head.softcap is not None:
            slope = slope * _slope(z, self.head.softcap, inverse)
        return z, slope

    def replace_scores(self, row: Tensor, ids: Tensor, scores: Tensor) -> None:
        """Replace some scores [K] of a table that is not `narrow`, before `statistics`.

        `gradient` is then wrong at these ids.
        """
        self._z[row, ids] = scores

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
        slope = None if softcap is None else _slope(z, softcap, None if inverse is None else inverse[:, None])
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
    """Return the derivative of the softcap at the scores z, with `inverse` in the shape of z or broadcast to it."""
    capped = z / softcap if inverse is None else z / (softcap * inverse)
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


class SupportChunk:
    """A chunk some of whose rows were sampled from a part of the vocabulary (their support), or with penalties.

    The statistics over the vocabulary are those of another chunk. The logprobs of restricted rows are computed from the
    K scores of their ids: log p = z[target] - logsumexp(z[ids]). So the cost beyond the other chunk is that of K
    numbers, not of a table. In the table of a row that was sampled from the whole vocabulary with penalties, the scores
    of the changed ids are replaced. If its logprob without penalties is needed too, these rows are copied before.

    Args:
        chunk: the same rows over the whole vocabulary; a `Chunk` itself if `support.has_changed_vocabulary`.
        rows: of the chunk, with their support.
    """

    def __init__(self, chunk: Chunk, rows: Rows) -> None:
        assert rows.support is not None
        self._chunk, self._rows, self._support = chunk, rows, rows.support
        if rows.support.has_changed_vocabulary:
            self._is_restricted = torch.from_numpy(rows.support.restricted).to(rows.target.device)
        else:  # the rows that have ids; no copy to the device
            self._is_restricted = torch.zeros_like(rows.target, dtype=torch.bool).index_fill_(0, rows.support.row, True)
        self._scores, self._slope = chunk.scores_at(rows.support.row, rows.support.ids)
        self._in_table: Tensor | None = None  # [K] bool, the ids of rows that are not restricted
        self._unpenalized: tuple[Tensor, Chunk, Statistics] | None = None  # rows [R], and the chunk of these rows
        if rows.support.changes is not None:
            self._change(rows.support.changes)
        self._log_p, self._at_target = self._over_ids()

    def _change(self, changes: LogitChanges) -> None:
        """Apply penalties and biases to the scores, and write those of unrestricted rows to the table."""
        row, inverse = self._support.row, self._rows.inverse
        inverse = 1.0 if inverse is None else inverse[row]
        before, factor, after = (column.to(self._scores.dtype) for column in changes)
        logits = self._scores / inverse + before
        factor = torch.where(logits > 0, 1 / factor, factor)
        self._scores = (logits * factor + after) * inverse
        self._slope = self._slope * factor
        if self._support.has_changed_vocabulary:
            if self._rows.needs_vocabulary_logp:
                changed = torch.from_numpy(self._support.unrestricted_rows).to(row.device)
                rows = self._chunk.copy_rows(changed)
                self._unpenalized = changed, rows, rows.statistics()
            self._in_table = ~self._is_restricted[row]
            self._chunk.replace_scores(*self._changed_places(), self._scores[self._in_table])

    def _changed_places(self) -> tuple[Tensor, Tensor]:
        return self._support.row[self._in_table], self._support.ids[self._in_table]

    def statistics(self) -> Statistics:
        """Compute the statistics; the logprobs, and if asked for the entropies, of restricted rows over their support.

        The log-sum-exp is that of the vocabulary, which the gradient by the entropy over the vocabulary needs.
        """
        lse, logp, entropy, _ = self._chunk.statistics()
        of_vocabulary = logp if self._rows.needs_vocabulary_logp else None
        if of_vocabulary is not None and self._unpenalized is not None:
            row, _, statistics = self._unpenalized
            of_vocabulary = of_vocabulary.index_copy(0, row, statistics.logp)
        logp = torch.where(self._is_restricted, self._at_target, logp)
        if self._rows.entropy_over_support:
            entropy = torch.where(self._is_restricted, self._entropy(), entropy)
        return Statistics(lse, logp, entropy, of_vocabulary)

    def gradient(
        self,
        statistics: Statistics,
        d_logp: Tensor,
        d_entropy: Tensor | None,
        d_vocabulary_logp: Tensor | None = None,
    ) -> Tensor:
        """Return the gradient [C, V] as `Chunk.gradient`. An id outside of a row's support has none by its logprob.

        Args:
            statistics, d_logp, d_entropy: as for `Chunk.gradient`.
            d_vocabulary_logp: [C], the gradient by `Statistics.vocabulary_logp`; None if it is not needed.
        """
        row, ids, over_support = self._support.row, self._support.ids, self._rows.entropy_over_support
        p = self._log_p.exp()
        is_target = (ids == self._rows.target[row]).to(p.dtype)
        d_scores = d_logp.to(p.dtype)[row] * (is_target - p)
        of_vocabulary = None if d_entropy is None else d_entropy.to(p.dtype)
        if of_vocabulary is not None and over_support:
            d_scores = d_scores - of_vocabulary[row] * p * (self._log_p + self._entropy()[row])
            of_vocabulary = of_vocabulary.masked_fill(self._is_restricted, 0)
        by_table = d_logp.masked_fill(self._is_restricted, 0)
        if d_vocabulary_logp is not None:
            changed = self._unpenalized and self._unpenalized[0]
            by_table = by_table + (
                d_vocabulary_logp if changed is None else d_vocabulary_logp.index_fill(0, changed, 0)
            )
        d_raw = self._chunk.gradient(statistics, by_table, of_vocabulary)
        d_by_ids = (d_scores * self._slope).to(d_raw.dtype)
        if self._in_table is not None:
            others = ~self._in_table
            row, ids, d_by_ids = row[others], ids[others], d_by_ids[others]
            d_changed = self._of_table(statistics, d_logp, d_entropy, is_target)
            d_raw.index_put_(self._changed_places(), d_changed.to(d_raw.dtype))
        if d_vocabulary_logp is not None and self._unpenalized is not None:
            changed, chunk, own = self._unpenalized
            d_raw.index_add_(0, changed, chunk.gradient(own, d_vocabulary_logp[changed], None).to(d_raw.dtype))
        return d_raw.index_put_((row, ids), d_by_ids, accumulate=True)

    def _of_table(self, statistics: Statistics, d_logp: Tensor, d_entropy: Tensor | None, is_target: Tensor) -> Tensor:
        """Return the gradient by the projection of the changed ids of unrestricted rows."""
        row = self._support.row[self._in_table]
        log_p = self._scores[self._in_table] - statistics.lse[row]
        p = log_p.exp()
        d_scores = d_logp.to(p.dtype)[row] * (is_target[self._in_table] - p)
        if d_entropy is not None:
            d_scores = d_scores - d_entropy.to(p.dtype)[row] * p * (log_p + statistics.entropy[row])
        return d_scores * self._slope[self._in_table]

    def _over_ids(self) -> tuple[Tensor, Tensor]:
        """Return the log-probability of each id over its row's ids [K], and that of each row's target [C]."""
        row, count, scores = self._support.row, len(self._rows.target), self._scores
        top = scores.new_full((count,), -torch.inf).scatter_reduce_(0, row, scores, "amax")
        shifted = scores - top[row]
        log_total = scores.new_zeros(count).index_add_(0, row, shifted.exp()).log()
        log_p = shifted - log_total[row]
        is_target = self._support.ids == self._rows.target[row]
        at_target = scores.new_zeros(count).index_add_(0, row, torch.where(is_target, log_p, 0))
        return log_p, at_target

    def _entropy(self) -> Tensor:
        """Return [C], the entropy over the ids of each row; 0 for rows without."""
        log_p = self._log_p
        return log_p.new_zeros(len(self._rows.target)).index_add_(0, self._support.row, -log_p.exp() * log_p)


class RowGradients(NamedTuple):
    """The gradient of a loss by the statistics of each row.

    Args:
        logp: [C].
        entropy: [C]; None if the loss does not depend on it.
        vocabulary_logp: [C]; None if the loss does not depend on it, or if it is part of `logp`.
    """

    logp: Tensor
    entropy: Tensor | None = None
    vocabulary_logp: Tensor | None = None

    def at(self, here: slice) -> "RowGradients":
        """Return the gradients of a chunk."""
        return RowGradients(*(None if each is None else each[here] for each in self))  # pyright: ignore[reportArgumentType]

    def through(self, chunk: Chunk | SupportChunk, statistics: Statistics) -> Tensor:
        """Return the gradient [C, V] by the product of a chunk. It overwrites the chunk's tables."""
        if isinstance(chunk, SupportChunk):
            return chunk.gradient(statistics, self.logp, self.entropy, self.vocabulary_logp)
        d_logp = self.logp if self.vocabulary_logp is None else self.logp + self.vocabulary_logp
        return chunk.gradient(statistics, d_logp, self.entropy)


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
