"""The differentiated half of a loss, in plain torch: what depends on the policy being trained.

Here are `Terms`, the arrays an objective is called with, and the evaluator of `tracegrad.algebra.Objective`. Weights,
gates and denominators arrive as arrays from `correction`. No metrics and no logging; called by policy, learner and
any trainer.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch
from torch import Tensor

from tracegrad.algebra import LOG_RATIO_LIMIT, Clip, Level, Objective, Penalty, Ratio
from tracegrad.errors import ArgumentError

__all__ = ["Loss", "Objective", "PerTerm", "Terms", "evaluate"]


@dataclass(frozen=True, kw_only=True)
class Terms:
    """What an objective needs of each term beside its logprob. All [m], or all [B, S]; any device.

    Args:
        old, rollout, ref: float logprobs, nats; None where the objective does not need them.
        advantages: float.
        scale: float, 1 over the reduction's denominators (`Corrected.scale`); 0 marks padding.
        weight: float, detached factor; None is 1.
        keep: bool; None keeps all. Where it is False nothing is read, so NaN may stand there.
        trace, turn, group: integer ids, needed for levels above the token.

    >>> from tracegrad import presets
    >>> logprobs = torch.tensor([-1.0, -2.0], requires_grad=True)
    >>> terms = Terms(old=logprobs.detach(), advantages=torch.tensor([1.0, -1.0]), scale=torch.tensor([0.5, 0.5]))
    >>> presets.GRPO(logprobs, None, terms).loss.backward()
    >>> logprobs.grad.tolist()  # the gradient of -A * ratio, over two terms
    [-0.5, 0.5]
    """

    advantages: Tensor
    scale: Tensor
    old: Tensor | None = None
    rollout: Tensor | None = None
    ref: Tensor | None = None
    weight: Tensor | None = None
    keep: Tensor | None = None
    trace: Tensor | None = None
    turn: Tensor | None = None
    group: Tensor | None = None

    def evaluate(self, objective: Objective, logprobs: Tensor, entropy: Tensor | None) -> Loss:
        """The loss of `objective` on these terms: what `objective(logprobs, entropy, terms)` calls."""
        return evaluate(objective, logprobs, entropy, self)


@dataclass(frozen=True)
class PerTerm:
    """Detached values of each term, for metrics and the report; 0 (ratio 1) where keep is False.

    Args:
        surrogate: before weight and scale.
        ratio: of the surrogate at its level, clamped; 1 with PolicyGradient.
        clipped: bool, the clip took this term's gradient away: A > 0 above the bounds, A < 0 below them or above
            `dual`.
        penalty: sum of coef * penalty, before scale.
    """

    surrogate: Tensor
    ratio: Tensor
    clipped: Tensor
    penalty: Tensor


@dataclass(frozen=True)
class Loss:
    """A scalar to call backward on, and the detached values it is made of."""

    loss: Tensor
    per_term: PerTerm


def evaluate(objective: Objective, logprobs: Tensor, entropy: Tensor | None, terms: Terms) -> Loss:
    """sum of scale * weight * surrogate over kept terms, plus the penalties.

    The sum over the batches of a step is the loss of the step, however it was cut.

    Args:
        logprobs: [m] float32 or float64 of the policy being trained, nats, with gradient.
        entropy: [m], read by objectives with an entropy bonus only; None is fine without.
        terms: the other arrays.

    Raises:
        ArgumentError: if the terms lack what the objective needs, or shapes differ.
    """
    _check(objective, logprobs, terms)
    logprobs = logprobs if logprobs.dtype == torch.float64 else logprobs.float()
    counted = terms.scale != 0
    keep = counted if terms.keep is None else terms.keep.bool()
    weight = torch.ones_like(terms.scale) if terms.weight is None else terms.weight
    surrogate, ratio, clipped = _surrogate(objective, logprobs, terms, keep)
    loss = (terms.scale * torch.where(keep, weight * surrogate, 0)).sum()
    penalty = torch.zeros_like(surrogate)
    for each in objective.penalties:
        here = keep if each.gated else counted
        value = each.coef * _penalty(each, logprobs, terms, here)
        value = torch.where(here, weight * value, 0) if each.weighted else value
        penalty = penalty + value
    if objective.penalties:
        loss = loss + (terms.scale * penalty).sum()
    return Loss(loss, PerTerm(surrogate.detach(), ratio.detach(), clipped, penalty.detach()))


def _surrogate(objective: Objective, logprobs: Tensor, terms: Terms, keep: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Surrogate, ratio and clipped flag of each term, 0, 1 and False where keep is False."""
    advantages = torch.where(keep, terms.advantages, 0).to(logprobs.dtype)
    if objective.ratio is None:
        surrogate = -advantages * torch.where(keep, logprobs, 0)
        return surrogate, torch.ones_like(surrogate), torch.zeros_like(keep, dtype=torch.bool)
    assert isinstance(objective.surrogate, Clip)
    level = objective.surrogate.level
    inside = keep if level.terms == "kept" or level.over == "token" else _known(terms, keep)
    log_ratio = _log_ratio(objective.ratio, logprobs, terms, inside)
    if level.over != "token":
        log_ratio = torch.where(keep, _aggregate(level, log_ratio, terms, inside), 0)
    return _clip(objective.surrogate, log_ratio, advantages)


def _clip(clip: Clip, log_ratio: Tensor, advantages: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """max(-A r, -A clip(r, 1 - low, 1 + high)), with -A dual as its ceiling where A < 0."""
    ratio = log_ratio.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()
    low, high = 1 - clip.low, 1 + clip.high
    surrogate = torch.maximum(-advantages * ratio, -advantages * ratio.clamp(low, high))
    clipped = ((advantages > 0) & (ratio > high)) | ((advantages < 0) & (ratio < low))
    if clip.dual is not None:
        ceiling = torch.minimum(surrogate, -advantages * clip.dual)
        surrogate = torch.where(advantages < 0, ceiling, surrogate)
        clipped = clipped | ((advantages < 0) & (ratio > clip.dual))
    return surrogate, ratio, clipped


def _penalty(penalty: Penalty, logprobs: Tensor, terms: Terms, here: Tensor) -> Tensor:
    """The estimate of KL(num || den) at each term, 0 where `here` is False."""
    log_ratio = _log_ratio(penalty.ratio, logprobs, terms, here)
    if penalty.kind == "k1":
        return log_ratio
    if penalty.kind == "k2":
        return log_ratio.square() / 2
    inverse = -log_ratio.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    return torch.expm1(inverse) - inverse


def _log_ratio(ratio: Ratio, logprobs: Tensor, terms: Terms, here: Tensor) -> Tensor:
    """log num - log den, and 0 without a gradient where `here` is False."""
    below = getattr(terms, ratio.den)
    return torch.where(here, logprobs, 0) - torch.where(here, below, 0).to(logprobs.dtype)


def _aggregate(level: Level, log_ratio: Tensor, terms: Terms, inside: Tensor) -> Tensor:
    """The level's log-ratio handed to each term; sums in float64; terms outside count for nothing."""
    assert terms.trace is not None
    ids = (
        terms.trace.reshape(-1)
        if level.over == "trace"
        else torch.stack([terms.trace, _turn(terms)], -1).reshape(-1, 2)
    )
    _, index = torch.unique(ids, dim=0, return_inverse=True)
    values, counted = log_ratio.reshape(-1).double(), inside.reshape(-1)
    empty = values.new_zeros(len(values))
    if level.agg == "max":
        lowest = values.new_full((len(values),), -torch.inf)
        total = lowest.scatter_reduce(0, index, values.masked_fill(~counted, -torch.inf), "amax")
    else:
        total = empty.index_add(0, index, torch.where(counted, values, 0))
    if level.agg == "mean":
        total = total / empty.index_add(0, index, counted.double()).clamp(min=1)
    level_ratio = total[index].reshape(log_ratio.shape).to(log_ratio.dtype)
    if level.grad == "token":
        return level_ratio.detach() + log_ratio - log_ratio.detach()
    return level_ratio


def _turn(terms: Terms) -> Tensor:
    assert terms.turn is not None
    return terms.turn


def _known(terms: Terms, keep: Tensor) -> Tensor:
    """Terms that a level counts: all but padding and those whose rollout logprob is missing."""
    counted = keep | (terms.scale != 0)
    return counted if terms.rollout is None else counted & (keep | ~terms.rollout.isnan())


def _check(objective: Objective, logprobs: Tensor, terms: Terms) -> None:
    wanted: list[str] = [penalty.ratio.den for penalty in objective.penalties]
    if objective.ratio is not None and isinstance(objective.surrogate, Clip):
        above = {"token": [], "trace": ["trace"], "turn": ["trace", "turn"]}
        wanted += [objective.ratio.den, *above[objective.surrogate.level.over]]
    for name in wanted:
        if getattr(terms, name) is None:
            raise ArgumentError(
                f"the objective needs {name} of every term, and the terms have none. Pass Terms({name}=...)."
            )
    for field in fields(terms):
        value = getattr(terms, field.name)
        if value is not None and value.shape != logprobs.shape:
            raise ArgumentError(
                f"terms.{field.name} is {tuple(value.shape)} but logprobs are {tuple(logprobs.shape)}. "
                "Pass one entry per term in every tensor."
            )
