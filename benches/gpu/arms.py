"""The heads that are compared: each gets the same tensors and returns (logp, entropy) or a loss.

A peer that is not installed raises ImportError, which the table shows; nothing is left out in silence.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tracegrad.model import policy_loss, token_logprobs
from tracegrad.objective import Clip, Objective, Ratio
from tracegrad.objective.torch_loss import Terms
from tracegrad.packing import Batch

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
        """Logits of standard deviation 3, or peaked on their targets with an entropy of about half a nat.

        Advantages belong to eight traces of one length, because Liger's loss needs one for each.
        """
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
        advantages = draw(traces_of(rows)).repeat_interleave(rows // traces_of(rows))
        return cls(hidden.to(dtype).requires_grad_(), weight.to(dtype).requires_grad_(), target, old, advantages)

    def frozen(self) -> Problem:
        """The same for a head without a gradient, as with LoRA."""
        return replace(self, weight=self.weight.detach())

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


def traces_of(rows: int) -> int:
    """Of how many traces a problem's rows are: eight if possible."""
    return 8 if rows % 8 == 0 else 1


Arm = Callable[[Problem], Tensor]


def fused(problem: Problem, **how: Any) -> Tensor:
    """tracegrad, one pass."""
    return policy_loss(problem.hidden, problem.weight, problem.batch(), problem.terms(), OBJECTIVE, **how).loss


def generic(problem: Problem, **how: Any) -> Tensor:
    """tracegrad, recompute in backward; the head does not know the loss."""
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
    """LigerFusedLinearGRPOLoss, which needs [B, T] and an advantage for each of B traces."""
    from liger_kernel.chunked_loss import LigerFusedLinearGRPOLoss

    on_gpu = problem.hidden.is_cuda
    loss = LigerFusedLinearGRPOLoss(beta=0.0, use_ref_model=False, loss_type="dapo", compiled=on_gpu)
    traces = traces_of(len(problem.old))
    shaped = lambda value: value.reshape(traces, -1, *value.shape[1:])  # noqa: E731
    mask = torch.ones_like(shaped(problem.target))
    given = shaped(problem.hidden), problem.weight, shaped(problem.target), mask, shaped(problem.advantages)[:, 0]
    return loss(*given, old_per_token_logps=shaped(problem.old), num_items_in_batch=mask.sum())[0]


def liger_scaled(problem: Problem) -> Tensor:
    """LigerFusedLinearScaledCrossEntropyFunction: as ours, NLL and entropy of each row for any loss."""
    nll, entropy = _liger_nll_and_entropy(problem)
    return problem.loss(-nll, entropy)


def liger_implementation(problem: Problem) -> str:
    """Return the class in Liger that computes `liger_scaled` here, as autograd names it."""
    nll, _ = _liger_nll_and_entropy(problem)
    return nll.grad_fn.name().removesuffix("Backward")


def _liger_nll_and_entropy(problem: Problem) -> tuple[Tensor, Tensor]:
    """By Hopper kernels where nvidia-cutlass-dsl is installed, else by Liger's portable form in chunks of 512 rows."""
    from liger_kernel.ops import fused_linear_scaled_cross_entropy as liger_module

    tensors = problem.hidden, problem.weight, problem.target
    try:
        return liger_module.LigerFusedLinearScaledCrossEntropyFunction.apply(*tensors, return_entropy=True)
    except ImportError:  # on Hopper, without cutlass: Liger falls back on other devices only
        temperature, ignore_index, return_entropy = 1.0, -100, True
        return liger_module._FusedLinearPPOFallbackFunction.apply(*tensors, temperature, ignore_index, return_entropy)


def verl(problem: Problem) -> Tensor:
    """verl's Triton linear_cross_entropy."""
    from verl.utils.kernel.linear_cross_entropy import linear_cross_entropy

    logp, entropy = linear_cross_entropy(problem.hidden, problem.weight, problem.target, 1.0, "none")
    return problem.loss(logp, entropy)


def cut_cross_entropy(problem: Problem) -> Tensor:
    """Apple's CCE 25.1.1 without its gradient filter; only logprobs, because it has no entropy."""
    from cut_cross_entropy import linear_cross_entropy

    exact = {"impl": "cce", "filter_eps": None}
    nll = linear_cross_entropy(problem.hidden, problem.weight, problem.target, reduction="none", **exact)
    return problem.loss(-nll)


def prime_rl(problem: Problem) -> Tensor:
    """prime-rl's FusedOutputLinear, its default chunk."""
    from prime_rl.trainer.models.layers.lm_head import FusedOutputLinear

    with torch.device("meta"):
        head = FusedOutputLinear(problem.hidden.shape[1], len(problem.weight), chunk_size=8192)
    del head.weight
    head.weight = problem.weight
    warm = torch.ones_like(problem.old)[None]
    out = head(problem.hidden[None], problem.target[None], warm)
    return problem.loss(out["logprobs"][0], out["entropy"][0])


OURS: dict[str, Arm] = {
    "one-pass": fused,
    "one-pass, fp32 logits": lambda p: fused(p, logits_dtype=torch.float32),
    "one-pass, torch.compile": lambda p: fused(p, epilogue="compile"),
    "generic": generic,
    "generic, fp32 logits": lambda p: generic(p, logits_dtype=torch.float32),
}
PEERS: dict[str, Arm] = {
    "TRL chunked": trl_chunked,
    "Liger GRPO": liger,
    "Liger NLL and entropy": liger_scaled,
    "verl Triton": verl,
    "CCE": cut_cross_entropy,
    "prime-rl": prime_rl,
    "full logits": full_logits,
}
IMPLEMENTATIONS: dict[str, Callable[[Problem], str]] = {"Liger NLL and entropy": liger_implementation}
"""Of arms that choose between several: which one runs here."""
