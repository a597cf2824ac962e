"""The heads that are measured side by side: each takes the same tensors and returns (logp, entropy) or a loss.

A peer that is not installed raises ImportError, which the table shows; nothing is left out in silence.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tracegrad.algebra import Clip, Objective, Ratio
from tracegrad.batch import Batch
from tracegrad.objective import Terms
from tracegrad.policy import policy_loss, token_logprobs

OBJECTIVE = Objective(Clip(), Ratio("theta", "old"))


@dataclass
class Problem:
    """N rows of a head, with the arrays of a clipped loss on them."""

    hidden: Tensor
    weight: Tensor
    target: Tensor
    old: Tensor
    advantages: Tensor

    @classmethod
    def of(cls, rows: int, width: int, vocabulary: int, device: str, peaked: bool) -> Problem:
        """Logits of standard deviation 3, or peaked on their targets with an entropy of about half a nat."""
        g = torch.Generator(device).manual_seed(0)
        draw = lambda *shape: torch.randn(*shape, generator=g, device=device)  # noqa: E731
        weight = draw(vocabulary, width)
        target = torch.randint(0, vocabulary, (rows,), generator=g, device=device)
        hidden = draw(rows, width) * 3 / width**0.5
        if peaked:
            chosen = weight[target]
            reach = float(np.log(vocabulary)) + 3
            hidden = hidden / 6 + reach * chosen / chosen.square().sum(-1, keepdim=True)
        dtype = torch.bfloat16
        old = -draw(rows).abs() - 1
        return cls(hidden.to(dtype).requires_grad_(), weight.to(dtype).requires_grad_(), target, old, draw(rows))

    def terms(self) -> Terms:
        """One trace, each row a term."""
        scale = torch.full_like(self.old, 1 / len(self.old))
        return Terms(old=self.old, advantages=self.advantages, scale=scale)

    def batch(self) -> Batch:
        """The row's head columns."""
        rows = torch.arange(len(self.old), device=self.old.device)
        nothing = rows[:0]
        warm = torch.ones_like(self.old)
        return Batch(nothing, nothing, nothing, rows, self.target, warm, rows, term=np.arange(len(self.old)))

    def loss(self, logp: Tensor, entropy: Tensor | None = None) -> Tensor:
        """The same clipped loss for every head."""
        return OBJECTIVE(logp.float(), entropy, self.terms()).loss


Arm = Callable[[Problem], Tensor]


def fused(problem: Problem, **how: Any) -> Tensor:
    """tracegrad, one pass."""
    return policy_loss(problem.hidden, problem.weight, problem.batch(), problem.terms(), OBJECTIVE, **how).loss


def generic(problem: Problem, **how: Any) -> Tensor:
    """tracegrad, recompute in backward; the loss is not known to the head."""
    return problem.loss(*token_logprobs(problem.hidden, problem.weight, problem.target, **how))


def full_logits(problem: Problem) -> Tensor:
    """All logits at once, in bfloat16, and float32 log_softmax."""
    log_p = (problem.hidden @ problem.weight.T).float().log_softmax(-1)
    entropy = -(log_p.exp() * log_p).sum(-1)
    return problem.loss(log_p.gather(1, problem.target[:, None]).squeeze(1), entropy)


def trl_chunked(problem: Problem) -> Tensor:
    """TRL 1.16: tiles of 4096 rows by 32768 of the vocabulary, recompute in backward."""
    from trl.kernels.chunked_logprob import ChunkedLogProbFunction

    size = min(32768, len(problem.weight))
    found = ChunkedLogProbFunction.apply(
        problem.hidden, problem.weight, None, problem.target, 1.0, size, None, 1.0, ("entropy",)
    )
    return problem.loss(found[0], found[1])


def liger(problem: Problem) -> Tensor:
    """LigerFusedLinearGRPOLoss on one long row, as it takes [B, T] alone."""
    from liger_kernel.chunked_loss import LigerFusedLinearGRPOLoss

    on_gpu = problem.hidden.is_cuda
    loss = LigerFusedLinearGRPOLoss(beta=0.0, use_ref_model=False, loss_type="dapo", compiled=on_gpu)
    rows = 8 if len(problem.old) % 8 == 0 else 1
    shaped = lambda value: value.reshape(rows, -1, *value.shape[1:])  # noqa: E731
    mask = torch.ones_like(shaped(problem.target))
    given = shaped(problem.hidden), problem.weight, shaped(problem.target), mask, shaped(problem.advantages)[:, 0]
    return loss(*given, old_per_token_logps=shaped(problem.old), num_items_in_batch=mask.sum())[0]


def verl(problem: Problem) -> Tensor:
    """verl's Triton linear_cross_entropy."""
    from verl.utils.kernel.linear_cross_entropy import linear_cross_entropy

    logp, entropy = linear_cross_entropy(problem.hidden, problem.weight, problem.target, 1.0, "none")
    return problem.loss(logp, entropy)


OURS: dict[str, tuple[Arm, int]] = {
    "one-pass": (fused, 3),
    "one-pass, fp32 logits": (lambda p: fused(p, logits_dtype=torch.float32), 3),
    "one-pass, 0.25 GiB": (lambda p: fused(p, chunk_bytes=1 << 28), 3),
    "one-pass, torch.compile": (lambda p: fused(p, epilogue="compile"), 3),
    "generic": (generic, 3),
    "generic, fp32 logits": (lambda p: generic(p, logits_dtype=torch.float32), 3),
}
PEERS: dict[str, tuple[Arm, int]] = {
    "TRL chunked": (trl_chunked, 3),
    "Liger GRPO": (liger, 3),
    "verl Triton": (verl, 3),
    "full logits": (full_logits, 3),
}
"""Each with the products of 2 N H V FLOPs that the result needs: useful work, so that recomputation shows as loss."""
