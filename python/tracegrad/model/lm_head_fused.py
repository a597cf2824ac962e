"""A loss over the head and its gradient together: what backward would need is known while the logits are in memory.

The loss itself comes from the caller, as a function of logprobs and entropies. Called by `tracegrad.model`.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from tracegrad.model.lm_head import HeadPlan, Problem, Wants
from tracegrad.model.lm_head_chunked import Sums

Evaluate = Callable[[slice, Tensor, Tensor], tuple[Tensor, Tensor | None, Tensor | None]]
"""(rows, logp, entropy) -> the loss of these rows, and its gradient by each of their logprobs and entropies."""


def head_loss(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    problem: Problem,
    plan: HeadPlan,
    cuts: Sequence[slice],
    evaluate: Evaluate,
) -> Tensor:
    """The loss of all rows, a scalar whose backward only scales gradients that are computed here.

    Args:
        hidden, weight, bias: [U, H], [V, H], [V]; they get the gradients.
        problem: the same three without a gradient, the parameters in the dtype of `hidden`.
        plan: how; see `lm_head.choose`.
        cuts: the chunks, in order; read by "one-pass", and each at most `lm_head.chunk_rows` long.
        evaluate: called with all rows at once, or by "one-pass" with each chunk.
    """
    with torch.autocast(hidden.device.type, enabled=False):
        return _HeadLoss.apply(hidden, weight, bias, (problem, plan, tuple(cuts), evaluate))


def _one_pass(problem: Problem, sums: Sums, cuts: Sequence[slice], evaluate: Evaluate) -> Tensor:
    total = problem.hidden.new_zeros((), dtype=problem.wide)
    for here in cuts:
        chunk = problem.chunk(here)
        known = chunk.statistics()
        loss, d_logp, d_entropy = evaluate(here, known.logp, known.entropy)
        total = total + loss
        sums.add(here, chunk.gradient(known, _or_zero(d_logp, known.logp), d_entropy))
        del chunk  # its table: the next one is made before the name is bound again
    return total


def _whole(problem: Problem, sums: Sums, plan: HeadPlan, evaluate: Evaluate) -> Tensor:
    everything = slice(0, len(problem.hidden))
    if plan.name == "frozen":
        known, slopes = problem.slopes(plan.chunk_rows)
        loss, d_logp, _ = evaluate(everything, known.logp, known.entropy)
        sums.hidden = slopes.mul_(_or_zero(d_logp, known.logp)[:, None])
        return loss
    known = problem.statistics(plan.chunk_rows)
    loss, d_logp, d_entropy = evaluate(everything, known.logp, known.entropy)
    if plan.name == "recompute":
        problem.gradient(known, _or_zero(d_logp, known.logp), d_entropy, sums, plan.chunk_rows)
    return loss


def _or_zero(gradient: Tensor | None, like: Tensor) -> Tensor:
    return torch.zeros_like(like) if gradient is None else gradient


def wants_of(hidden: Tensor, weight: Tensor, bias: Tensor | None, entropy: bool) -> Wants:
    """Which gradients a call of `head_loss` will be asked for."""
    on = torch.is_grad_enabled()
    by_bias = bias is not None and bias.requires_grad
    return Wants(on and hidden.requires_grad, on and weight.requires_grad, on and by_bias, entropy)


class _HeadLoss(torch.autograd.Function):
    """Forward computes the gradient of each input; backward scales it, on CUDA in place and therefore once."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, how: tuple) -> Tensor:
        problem, plan, cuts, evaluate = how
        frozen = plan.name == "frozen"
        wanted = (False, False, False) if frozen or plan.name == "no-grad" else ctx.needs_input_grad[:3]
        sums = Sums(problem.hidden, problem.head, wanted)
        one = plan.name == "one-pass"
        loss = _one_pass(problem, sums, cuts, evaluate) if one else _whole(problem, sums, plan, evaluate)
        ctx.save_for_backward(*sums.found(weight.dtype, None if bias is None else bias.dtype))
        return loss

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        [upstream] = grad_outputs
        return *(_scaled(value, upstream, in_place=upstream.is_cuda) for value in ctx.saved_tensors), None


def _scaled(value: Tensor | None, upstream: Tensor, *, in_place: bool = False) -> Tensor | None:
    """Return value * upstream, multiplied in the dtype of `upstream` and rounded once; [...] in the dtype of `value`.

    Args:
        value: [...] of any strides; None stays None.
        upstream: 0-dimensional. On CPU a factor of 1 returns `value`; on CUDA reading it would wait for the device.
        in_place: write into the memory of `value`, which may be the gradient of a whole head. On CUDA that is one
            kernel without a temporary (two for tensors over 2 GiB).
    """
    if value is None or (upstream.device.type == "cpu" and upstream.item() == 1.0):
        return value
    # torch takes a 0-dimensional tensor for a number and computes in the dtype of `value`; a CUDA kernel then rounds
    # the factor to bfloat16 before it multiplies. One dimension more, and both are promoted to the wider dtype.
    factor = upstream.reshape((1,) * value.ndim)
    if in_place:
        return torch.mul(value, factor, out=value)
    return (value * factor).to(value.dtype)
