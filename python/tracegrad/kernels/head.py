"""The head without logits: log-probability and entropy of chosen tokens, a chunk of rows at a time.

Here are `token_logprobs` and the formula of a head in plain torch, for any device. No model is taken apart here;
`policy` does that, and any trainer may call `token_logprobs` with its own hidden states.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from tracegrad.errors import ArgumentError


class Head(NamedTuple):
    """From hidden states to logits: logit_scale * (hidden @ weight.T + bias), then softcap * tanh(. / softcap)."""

    weight: Tensor
    bias: Tensor | None = None
    softcap: float | None = None
    logit_scale: float = 1.0


def logits_of(hidden: Tensor, head: Head, dtype: torch.dtype | None = None) -> Tensor:
    """[..., V] float32, or float64 for float64 input; the product with the weight is rounded to `dtype`."""
    wide = torch.promote_types(hidden.dtype, torch.float32)
    if dtype is None or dtype == hidden.dtype:
        logits = nn.functional.linear(hidden, head.weight, head.bias).to(wide)
    elif hidden.is_cuda and dtype == torch.float32 and hidden.ndim == 2:
        logits = torch.mm(hidden, head.weight.T, out_dtype=dtype)
        logits = logits if head.bias is None else logits.add_(head.bias)
    else:
        bias = None if head.bias is None else head.bias.to(wide)
        logits = nn.functional.linear(hidden.to(wide), head.weight.to(wide), bias).to(dtype).to(wide)
    if head.logit_scale != 1.0:
        logits = logits.mul_(head.logit_scale)
    return logits if head.softcap is None else logits.div_(head.softcap).tanh_().mul_(head.softcap)


def token_logprobs(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    *,
    inv_temperature: Tensor | float = 1.0,
    bias: Tensor | None = None,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    logits_dtype: torch.dtype | None = None,
    chunk_bytes: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Log-probability of each target and the entropy of its distribution; never holds [U, V].

        z = inv_temperature * cap(logit_scale * (hidden @ weight.T + bias)),    cap(x) = softcap * tanh(x / softcap)
        logp = z[target] - logsumexp(z),    entropy = logsumexp(z) - sum softmax(z) * z

    Logits are computed a chunk of rows at a time, and again in backward; sums are float32, float64 for float64 input.

    Args:
        hidden: [U, H].
        weight: [V, H]; used in the dtype of `hidden`.
        target: [U] int64.
        inv_temperature: [U] or one number. Takes no gradient.
        bias: [V].
        softcap: of the logits, as in Gemma 2.
        logit_scale: as in Cohere.
        logits_dtype: what the logits are rounded to before the sums; None: the dtype of `hidden`. Use the sampler's.
        chunk_bytes: memory for one chunk of logits; default 4 MiB on CPU, 1 GiB elsewhere.

    Returns:
        logp [U] and entropy [U], float32 or float64, nats; both differentiable once.

    Raises:
        ArgumentError: if shapes contradict one another.

    >>> logp, entropy = token_logprobs(torch.zeros(2, 3), torch.ones(4, 3), torch.tensor([0, 3]))
    >>> [round(x, 4) for x in (logp.exp()[0].item(), entropy.exp()[1].item())]
    [0.25, 4.0]
    """
    _check_shapes(hidden, weight, target, bias)
    if chunk_bytes is None:
        chunk_bytes = 4 << 20 if hidden.device.type == "cpu" else 1 << 30
    rows = max(1, chunk_bytes // (4 * len(weight)))
    inverse = torch.as_tensor(inv_temperature, device=hidden.device).detach().expand(len(hidden))
    rest = (softcap, float(logit_scale), logits_dtype, rows)
    with torch.autocast(hidden.device.type, enabled=False):
        return _TokenLogprobs.apply(hidden, weight, bias, target, inverse, rest)


def _check_shapes(hidden: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None) -> None:
    fits = hidden.ndim == 2 and weight.ndim == 2 and hidden.shape[1] == weight.shape[1]
    if not fits or target.shape != hidden.shape[:1] or (bias is not None and bias.shape != weight.shape[:1]):
        shapes = ", ".join(str(list(x.shape)) for x in (hidden, weight, target))
        raise ArgumentError(
            f"hidden, weight and target have shapes {shapes}, bias {None if bias is None else list(bias.shape)}. "
            "They must be [U, H], [V, H], [U] and [V]. Select the rows to score before the call."
        )


class _TokenLogprobs(torch.autograd.Function):
    """Chunks of rows; backward computes the logits again.

    d logp / d z_j = 1[j = target] - p_j,    d entropy / d z_j = -p_j * (log p_j + entropy)
    """

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, inverse: Tensor, rest: tuple
    ) -> tuple[Tensor, Tensor]:
        softcap, logit_scale, dtype, rows = rest
        wide = torch.promote_types(hidden.dtype, torch.float32)
        head = Head(weight.to(hidden.dtype), None if bias is None else bias.to(hidden.dtype), softcap, logit_scale)
        inverse = inverse.to(wide)
        lse, logp, entropy = (hidden.new_empty(len(hidden), dtype=wide) for _ in range(3))
        for here in _slices(len(hidden), rows):
            z = logits_of(hidden[here], head, dtype).mul_(inverse[here, None])
            lse[here] = torch.logsumexp(z, -1)
            logp[here] = z.gather(1, target[here, None]).squeeze(1) - lse[here]
            entropy[here] = lse[here] - (z - lse[here, None]).exp_().mul_(z).sum(-1)
        ctx.save_for_backward(hidden, weight, bias, target, inverse, lse, entropy)
        ctx.rest = rest
        return logp, entropy

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        d_logp, d_entropy = grad_outputs
        hidden, weight, bias, target, inverse, lse, entropy = ctx.saved_tensors
        softcap, logit_scale, dtype, rows = ctx.rest
        head = Head(weight.to(hidden.dtype), None if bias is None else bias.to(hidden.dtype), softcap, logit_scale)
        wants_hidden, wants_weight, wants_bias = ctx.needs_input_grad[:3]
        d_hidden = torch.empty_like(hidden) if wants_hidden else None
        d_weight = torch.zeros_like(weight, dtype=lse.dtype) if wants_weight else None
        d_bias = lse.new_zeros(len(weight)) if wants_bias else None
        for here in _slices(len(hidden), rows):
            capped = logits_of(hidden[here], head, dtype)
            d_raw = _d_scores(
                capped, inverse[here], lse[here], entropy[here], target[here], d_logp[here], d_entropy[here]
            )
            d_raw *= (logit_scale * inverse[here])[:, None]
            if softcap is not None:
                d_raw *= 1 - (capped / softcap).square()
            if d_hidden is not None:
                d_hidden[here] = d_raw.to(hidden.dtype) @ head.weight
            if d_weight is not None:
                _add_product(d_weight, d_raw, hidden[here])
            if d_bias is not None:
                d_bias += d_raw.sum(0)
        d_weight = None if d_weight is None else d_weight.to(weight.dtype)
        d_bias = None if bias is None or d_bias is None else d_bias.to(bias.dtype)
        return d_hidden, d_weight, d_bias, None, None, None


def _d_scores(
    capped: Tensor, inverse: Tensor, lse: Tensor, entropy: Tensor, target: Tensor, d_logp: Tensor, d_entropy: Tensor
) -> Tensor:
    """[C, V]: gradient by the scores z = inverse * capped of one chunk."""
    logp = torch.addcmul(-lse[:, None], capped, inverse[:, None])
    d_z = logp.exp()
    d_z *= logp.add_(entropy[:, None]).mul_(-d_entropy[:, None]).sub_(d_logp[:, None])
    return d_z.scatter_add_(1, target[:, None], d_logp[:, None].to(d_z.dtype))


def _add_product(total: Tensor, d_raw: Tensor, hidden: Tensor) -> None:
    """total += d_raw.T @ hidden, summed in the dtype of `total`."""
    if hidden.dtype == total.dtype:
        total.addmm_(d_raw.T, hidden)
    elif hidden.is_cuda:
        total += torch.mm(d_raw.T.to(hidden.dtype), hidden, out_dtype=total.dtype)
    else:
        total.addmm_(d_raw.T, hidden.to(total.dtype))


def _slices(total: int, size: int) -> list[slice]:
    return [slice(start, start + size) for start in range(0, total, size)]
