"""Compute token logprobs and entropies from the logits of a model's own forward pass, as other trainers do."""

from math import prod
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike
from torch import Tensor

from tracegrad.alignment.sequences import Sequences
from tracegrad.errors import ArgumentError
from tracegrad.model.lm_head import MIN_CHUNK_BYTES, inverse_of
from tracegrad.model.lm_head_chunked import Chunk, Head, Rows, Statistics, SupportChunk, slices, wide_dtype
from tracegrad.packing.support import RecordedSampling, Support

_CPU_CHUNK = 4 << 20


def support_of_tokens(sequences: Sequences, tokens: ArrayLike) -> Support | None:
    """Return the support of tokens in any order, such as those of a padded batch.

    Args:
        sequences: the aligned traces.
        tokens: integers of any shape: indices into `sequences.ids`, and -1 for padding and tokens that are not scored.

    Returns:
        One row for each entry of `tokens`, flattened; None if all were sampled from the whole vocabulary, without
        penalties.

    >>> from tracegrad.alignment.ragged import Ragged
    >>> support = Ragged(np.array([0, 0, 2]), np.array([7, 9]))
    >>> sequences = Sequences.from_arrays([5, 7], [0, 2], [np.nan, -0.5], [False, True], support=support)
    >>> support_of_tokens(sequences, [[-1, 1], [0, 1]]), support_of_tokens(sequences, [0])
    (Support(4 ids for 2 of 4 rows), None)
    """
    index = np.asarray(tokens, np.int64).reshape(-1)
    scored = np.flatnonzero(index >= 0)
    sampling = RecordedSampling.of(sequences)
    if sampling is None or not len(scored):
        return None
    support = sampling.support_of(index[scored])
    return support.spread(scored, len(index)) if len(support.ids) else None


def logprobs_from_logits(
    logits: Tensor,
    labels: Tensor,
    *,
    inv_temperature: Tensor | float = 1.0,
    support: Support | None = None,
    entropy_over_support: bool = False,
) -> tuple[Tensor, Tensor]:
    """Compute the log-probability of each label and the entropy of its distribution from logits.

        z = inv_temperature * logits,    logp = z[label] - logsumexp(z),    entropy = logsumexp(z) - sum softmax(z) * z

    A row with `support` was sampled from a part of the vocabulary (top-p, top-k or min-p), or with penalties. Its
    logprob is z[label] - logsumexp(z[support]) of the changed scores, and its gradient is that of this logprob. Use
    this in place of TRL's `selective_log_softmax` and of the `logprobs_from_logits` of verl and SkyRL. Sums are
    float32, or float64 for float64 logits, and are computed for a few rows at a time.

    Args:
        logits: [..., V]. They are not changed.
        labels: [...] int64.
        inv_temperature: [...] or one number: the factor of the logits. It has no gradient.
        support: one row for each label, from `support_of_tokens`; None for the whole vocabulary.
        entropy_over_support: whether the entropy of a row with support is that over its support.

    Returns:
        logp [...] and entropy [...], float32 or float64, nats; both differentiable once.

    Raises:
        ArgumentError: if the shapes do not match.

    >>> logp, entropy = logprobs_from_logits(torch.zeros(1, 2, 4), torch.tensor([[0, 3]]),
    ...                                      support=Support(np.array([3, 1], np.int32), np.array([0, 0, 2])))
    >>> [round(x, 4) for x in (*logp.exp().flatten().tolist(), entropy.exp()[0, 1].item())]
    [0.25, 0.5, 4.0]
    """
    shape = labels.shape
    rows = prod(shape)
    if logits.shape[:-1] != shape or (support is not None and len(support.offsets) != rows + 1):
        raise ArgumentError(
            f"TG-MODEL-027: logits have the shape {list(logits.shape)}, labels {list(shape)}, and support "
            f"{None if support is None else len(support.offsets) - 1} rows. They must be [..., V], [...] and one row "
            "for each label. Select the logits that predict the labels before the call."
        )
    flat = logits.reshape(rows, logits.shape[-1])
    if isinstance(inv_temperature, Tensor):
        inv_temperature = inv_temperature.expand(shape).reshape(-1)
    logp, entropy = _LogitLogprobs.apply(
        flat,
        labels.reshape(-1),
        inverse_of(inv_temperature, flat),
        support and support.to(logits.device),
        entropy_over_support,
    )
    return logp.view(shape), entropy.view(shape)


_HEAD = Head(torch.empty(0))  # without softcap and scale: the logits are complete


class _LogitLogprobs(torch.autograd.Function):
    """Logprobs and entropies of logits. Only the logits and three numbers a row are kept for the backward pass."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, *inputs: Any) -> tuple[Tensor, Tensor]:
        rows = Rows(*inputs)
        wide = wide_dtype(logits.dtype)
        statistics = Statistics(*(logits.new_empty(len(logits), dtype=wide) for _ in range(3)))
        with torch.autocast(logits.device.type, enabled=False):
            for here in _chunks(logits):
                statistics.set(here, _chunk(logits, rows, here).statistics())
        ctx.save_for_backward(logits, rows.target, rows.inverse, *statistics[:3])
        ctx.restriction = rows[2:]
        ctx.set_materialize_grads(False)
        return statistics.logp, statistics.entropy

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grad_outputs: Tensor | None) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        d_logp, d_entropy = grad_outputs
        logits, target, inverse, *saved = ctx.saved_tensors
        if d_logp is None and d_entropy is None:
            return (None,) * 5
        rows, statistics = Rows(target, inverse, *ctx.restriction), Statistics(*saved)
        d_logp = torch.zeros_like(statistics.logp) if d_logp is None else d_logp
        d_logits = torch.empty_like(logits)
        with torch.autocast(logits.device.type, enabled=False):
            for here in _chunks(logits):
                by_entropy = None if d_entropy is None else d_entropy[here]
                chunk = _chunk(logits, rows, here)
                d_logits[here] = chunk.gradient(statistics.at(here), d_logp[here], by_entropy).to(logits.dtype)
        return d_logits, *(None,) * 4


def _chunks(logits: Tensor) -> list[slice]:
    """Split the rows so that the tables of a chunk take 4 MiB on CPU and 256 MiB elsewhere."""
    row_bytes = Chunk.tables * wide_dtype(logits.dtype).itemsize * logits.shape[1]
    budget = _CPU_CHUNK if logits.device.type == "cpu" else MIN_CHUNK_BYTES
    return slices(len(logits), max(1, budget // max(1, row_bytes)))


def _chunk(logits: Tensor, rows: Rows, here: slice) -> Chunk | SupportChunk:
    rows = rows.at(here)
    chunk = Chunk.of_raw(logits[here], _HEAD, rows._replace(support=None))
    return chunk if rows.support is None else SupportChunk(chunk, rows)
