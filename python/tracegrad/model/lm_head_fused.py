"""Compute a loss over the head together with its gradient, while the logits are in memory.

The caller passes the loss as a function of logprobs and entropies.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from tracegrad.model.lm_head import Gradients, HeadPlan, HeadProblem
from tracegrad.model.lm_head_chunked import GradientSums, RowGradients, Statistics

Evaluate = Callable[[slice, Statistics], tuple[Tensor, RowGradients]]
"""(rows, their statistics) -> the loss of these rows, and its gradients."""


def head_loss(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    problem: HeadProblem,
    plan: HeadPlan,
    cuts: Sequence[slice],
    evaluate: Evaluate,
) -> Tensor:
    """Return the loss of all rows, a scalar. Its gradients are computed here; its backward pass only scales them.

    Args:
        hidden, weight, bias: [U, H], [V, H], [V]; they receive the gradients.
        problem: the same three without a gradient, the parameters in the dtype of `hidden`.
        plan: from `lm_head.choose_plan`.
        cuts: the chunks, in order, each of at most `chunk_rows` rows; only "one-pass" reads them.
        evaluate: the loss function. "one-pass" calls it for each chunk, the other plans once for all rows.
    """
    with torch.autocast(hidden.device.type, enabled=False):
        return _HeadLoss.apply(hidden, weight, bias, (problem, plan, tuple(cuts), evaluate))


def _one_pass(problem: HeadProblem, sums: GradientSums, cuts: Sequence[slice], evaluate: Evaluate) -> Tensor:
    total = problem.hidden.new_zeros((), dtype=problem.wide)
    for rows in cuts:
        chunk = problem.chunk(rows)
        statistics = chunk.statistics()
        loss, by = evaluate(rows, statistics)
        total = total + loss
        sums.add(rows, by.through(chunk, statistics))
        del chunk  # free its table now: the next chunk is made before the name is bound again
    return total


def _all_rows(problem: HeadProblem, sums: GradientSums, plan: HeadPlan, evaluate: Evaluate) -> Tensor:
    rows = slice(0, len(problem.hidden))
    if plan.name == "frozen":
        statistics, slopes = problem.statistics_and_gradient(plan.chunk_rows)
        loss, by = evaluate(rows, statistics)
        sums.hidden = slopes.mul_(by.logp[:, None])
        return loss
    statistics = problem.statistics(plan.chunk_rows)
    loss, by = evaluate(rows, statistics)
    if plan.name == "recompute":
        problem.gradient(statistics, by, sums, plan.chunk_rows)
    return loss


def wants_of(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, *, entropy: bool, vocabulary_logp: bool = False
) -> Gradients:
    """Return the gradients that a call of `head_loss` must compute."""
    enabled = torch.is_grad_enabled()
    by_bias = bias is not None and bias.requires_grad
    return Gradients(
        enabled and hidden.requires_grad,
        enabled and weight.requires_grad,
        enabled and by_bias,
        entropy,
        vocabulary_logp,
    )


class _HeadLoss(torch.autograd.Function):
    """A loss whose forward pass computes the gradient of each input, and whose backward pass scales it.

    On CUDA the gradient is scaled in place, so the backward pass can run only once.
    """

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, how: tuple) -> Tensor:
        problem, plan, cuts, evaluate = how
        frozen = plan.name == "frozen"
        wanted = (False, False, False) if frozen or plan.name == "no-grad" else ctx.needs_input_grad[:3]
        sums = GradientSums(problem.hidden, problem.head, wanted)
        is_one_pass = plan.name == "one-pass"
        loss = _one_pass(problem, sums, cuts, evaluate) if is_one_pass else _all_rows(problem, sums, plan, evaluate)
        ctx.save_for_backward(*sums.gradients(weight.dtype, None if bias is None else bias.dtype))
        return loss

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        [upstream] = grad_outputs
        return *(_scaled(value, upstream, in_place=upstream.is_cuda) for value in ctx.saved_tensors), None


def _scaled(value: Tensor | None, upstream: Tensor, *, in_place: bool = False) -> Tensor | None:
    """Return value * upstream, multiplied in the dtype of `upstream` and rounded once; [...] in the dtype of `value`.

    Args:
        value: [...] of any strides; None returns None.
        upstream: 0-dimensional. On CPU a factor of 1 returns `value`; on CUDA reading it would wait for the device.
        in_place: write into the memory of `value`, which may be the gradient of a whole head. On CUDA that is one
            kernel without a temporary (two for tensors over 2 GiB).
    """
    if value is None or (upstream.device.type == "cpu" and upstream.item() == 1.0):
        return value
    # torch treats a 0-dimensional tensor as a number and computes in the dtype of `value`. A CUDA kernel then rounds
    # the factor to bfloat16 before it multiplies. With one more dimension, both are promoted to the wider dtype.
    factor = upstream.reshape((1,) * value.ndim)
    if in_place:
        return torch.mul(value, factor, out=value)
    return (value * factor).to(value.dtype)
