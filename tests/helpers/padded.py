"""Padded arrays of every policy, random and adversarial, and our loss on them: what the tests of losses share."""

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from tracegrad.objective import Objective
from tracegrad.objective.correction import Correction
from tracegrad.objective.torch_loss import PerTerm
from tracegrad.objective.torch_loss import build_terms as objective_terms

NAN = float("nan")
LOGPROBS = ("logprobs", "old", "rollout", "ref")


# How far the policies of a row lie apart, in nats: equal, a hair, a little, as after several epochs.
SPREAD = (0.3, 0.3, 0.0, 2e-4, 0.02, 0.3, 0.3, 0.3)


def hard(seed: int = 0, dtype: torch.dtype = torch.float64, width: int = 14) -> dict[str, Tensor]:
    """[B, S] of all policies: an empty row, a row of one term, tool holes, and outliers on both sides of both ratios.

    The policies of a row lie SPREAD apart. All logprobs are negative, and no log-ratio of a token or a row leaves
    [-20, 20], where TRL would not clamp.
    """
    generator = torch.Generator().manual_seed(1000 + seed)
    rows = len(SPREAD)

    def draw(scale):
        return scale * torch.randn(rows, width, generator=generator, dtype=torch.float64)

    spread = torch.tensor(SPREAD, dtype=torch.float64)[:, None]
    rollout = -draw(1.0).abs() - 0.05
    old = rollout + spread * draw(1.0)
    logprobs, ref = old + spread * draw(1.0), old + draw(0.3)
    mask = torch.rand(rows, width, generator=generator) > 0.3
    mask[0], mask[1], mask[5] = True, False, False
    mask[5, 6] = True
    logprobs[0, 3], old[0, 3] = -9.0, -0.3
    logprobs[4, 1], old[4, 1] = -0.3, -8.0
    rollout[4, 1] = -8.0
    old[6, 5], rollout[6, 5], logprobs[6, 5] = -12.0, -0.4, -11.8
    old[7, 2], rollout[7, 2], logprobs[7, 2] = -0.5, -11.0, -0.7
    for row, column in ((0, 3), (4, 1), (6, 5), (7, 2)):
        mask[row, column] = True
    advantages = torch.randn(rows, generator=generator, dtype=torch.float64)
    advantages[(seed + 3) % rows] = 0.0
    entropy = 2 * torch.rand(rows, width, generator=generator, dtype=torch.float64)
    alpha = torch.rand(rows, width, generator=generator, dtype=torch.float64)
    arrays = {"logprobs": logprobs, "old": old, "rollout": rollout, "ref": ref}
    arrays = {name: value.clamp(max=-1e-3) for name, value in arrays.items()}
    arrays |= {"entropy": entropy, "advantages": advantages, "alpha": alpha}
    turn = torch.arange(width)[None, :].expand(rows, -1) // 4
    return {name: value.to(dtype) for name, value in arrays.items()} | {"mask": mask, "turn": turn}


def spoilt(data: dict[str, Tensor], value: float = NAN) -> dict[str, Tensor]:
    """The same with `value` in every logprob off the mask."""
    return {k: v.masked_fill(~data["mask"], value) if k in LOGPROBS else v for k, v in data.items()}


@dataclass(frozen=True)
class Outcome:
    """What our evaluators gave: the loss, its gradients, and the per-term values."""

    loss: Tensor
    gradient: Tensor
    entropy_gradient: Tensor | None
    per_term: PerTerm
    corrected: Correction


def per_position(value: Tensor, like: Tensor) -> Tensor:
    """[B] as [B, S]; [B, S] as it is."""
    return value if value.shape == like.shape else value[:, None].expand_as(like)


def run(objective: Objective, data: dict[str, Tensor], **options: Any) -> Outcome:
    """Loss and gradient through correct() and the objective, as a trainer with padded tensors would call them.

    Args:
        options: of `objective.build_terms`. `rows=True` counts empty rows as traces, as TRL does.
    """
    terms, corrected = terms_of(objective, data, **options)
    logprobs = data["logprobs"].clone().requires_grad_()
    entropy = data["entropy"].clone().requires_grad_() if objective.requirements.entropy else None
    found = objective(logprobs, entropy, terms)
    found.loss.backward()
    gradient = torch.zeros_like(logprobs) if logprobs.grad is None else logprobs.grad
    return Outcome(found.loss.detach(), gradient, getattr(entropy, "grad", None), found.per_term, corrected)


def terms_of(objective: Objective, data: dict[str, Tensor], rows: bool = False, **options: Any):
    """(Terms, Corrected) of padded data."""
    mask, names = data["mask"], ("mask", "advantages", "old", "rollout", "ref", "turn", "alpha")
    if rows:
        options["totals"] = SimpleNamespace(terms=int(mask.sum()), traces=len(mask), groups=0)
    return objective_terms(objective, data["logprobs"], **{name: data.get(name) for name in names}, **options)
