"""The loss of an objective on its terms: gates, weights, surrogate, penalties and bonus, summed with their scales.

No formula is here but the sum; no metrics and no logging.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tracegrad.algebra import Objective, Reduce
from tracegrad.errors import ArgumentError
from tracegrad.objective.gates import gated
from tracegrad.objective.penalties import penalty_at, shifted
from tracegrad.objective.surrogates import surrogate
from tracegrad.objective.terms import View, check_detached, check_shapes
from tracegrad.objective.weights import weighed

_POLICIES = ("old", "rollout", "ref", "alpha", "advantages", "trace", "turn", "group")


@dataclass(frozen=True, kw_only=True)
class Terms:
    """What an objective needs of each term beside its logprob. All [m], or all [B, S]; tensors on any device, or numpy.

    Args:
        old, rollout, ref: float logprobs, nats; None where the objective does not need them.
        advantages: float.
        scale: float, 1 over the reduction's denominators (`Corrected.scale`); 0 marks padding.
        weight: float, detached factor; None is 1, and refused where the objective has weights that `correct` evaluates.
        keep: bool; None keeps all, and is refused where the objective has gates that `correct` evaluates. Where it is
            False nothing is read, so NaN may stand there.
        trace, turn, group: integer ids, needed for levels above the token.
        alpha: float in [0, 1], where the proximal lies between rollout (0) and theta (1): `correction.proximal_alpha`.
        scales: `Corrected.scales`, for penalties and bonuses with their own reduction.

    >>> from tracegrad import presets
    >>> logprobs = torch.tensor([-1.0, -2.0], requires_grad=True)
    >>> terms = Terms(old=logprobs.detach(), advantages=torch.tensor([1.0, -1.0]), scale=torch.tensor([0.5, 0.5]))
    >>> presets.VERL_DEFAULT(logprobs, None, terms).loss.backward()
    >>> logprobs.grad.tolist()  # the gradient of -A * ratio, over two terms
    [-0.5, 0.5]
    """

    advantages: Any
    scale: Any
    old: Any = None
    rollout: Any = None
    ref: Any = None
    weight: Any = None
    keep: Any = None
    trace: Any = None
    turn: Any = None
    group: Any = None
    alpha: Any = None
    scales: Mapping[Reduce, Any] | None = None

    def __post_init__(self) -> None:
        for each in fields(self):
            value = getattr(self, each.name)
            if each.name == "scales":
                value = {key: _tensor(array) for key, array in (value or {}).items()}
            elif value is not None:
                value = _tensor(value)
            object.__setattr__(self, each.name, value)

    def select(self, where: Any) -> Terms:
        """The terms at `where`, a slice or an index: what a part of the loss that looks no further is evaluated on."""
        given = {each.name: getattr(self, each.name) for each in fields(self) if each.name != "scales"}
        chosen = {name: None if value is None else value[where] for name, value in given.items()}
        return Terms(**chosen, scales={key: value[where] for key, value in (self.scales or {}).items()})

    def evaluate(self, objective: Objective, logprobs: Tensor, entropy: Tensor | None) -> Loss:
        """The loss of `objective` on these terms: what `objective(logprobs, entropy, terms)` calls."""
        return evaluate(objective, logprobs, entropy, self)

    def coefficients(self, objective: Objective, logprobs: Any) -> NDArray[Any]:
        """c with d loss / d logprob = -c: what `objective.coefficients(logprobs, terms)` calls."""
        return coefficients(objective, logprobs, self)


@dataclass(frozen=True)
class PerTerm:
    """Detached values of each term, for metrics and the report.

    Surrogate and penalty are 0 and the weight is 1 where keep is False. Ratio and clipped are of all terms that
    `Terms.keep` left, whatever the gates on the trained policy do: 1 and False elsewhere.

    Args:
        surrogate: before weight and scale.
        ratio: of the surrogate at its level, clamped; 1 where it takes none.
        clipped: bool, where the clip leaves no gradient: A > 0 above the bounds or above `delta`, A < 0 below them, or
            above `dual` or above both `delta` and the bounds.
        penalty: sum of coef * penalty, before scale.
        weight: the product of all weights.
        keep: bool, what all gates have left.
    """

    surrogate: Tensor
    ratio: Tensor
    clipped: Tensor
    penalty: Tensor
    weight: Tensor
    keep: Tensor


@dataclass(frozen=True)
class Loss:
    """A scalar to call backward on, and the detached values it is made of."""

    loss: Tensor
    per_term: PerTerm


def evaluate(objective: Objective, logprobs: Tensor, entropy: Tensor | None, terms: Terms) -> Loss:
    """sum of scale * weight * surrogate over kept terms, plus the penalties, minus the entropy bonus.

    The sum over the batches of a step is the loss of the step, however it was cut.

    Args:
        logprobs: [m] float32 or float64 of the policy being trained, nats, with gradient.
        entropy: [m], read by objectives with an entropy bonus or gate only; None is fine without.
        terms: the other arrays.

    Raises:
        ArgumentError: if the terms lack what the objective needs, or shapes differ.
    """
    view = _view(objective, logprobs, entropy, terms)
    keep = view.counted if terms.keep is None else terms.keep.bool()
    weight = torch.ones_like(view.logprobs) if terms.weight is None else terms.weight.to(view.logprobs.dtype)
    advantages = shifted(objective.shifts, view, view.advantages(keep), keep)
    value, ratio, clipped = surrogate(objective, view, advantages, keep)
    kept = gated(objective.gates, view, keep, clipped)
    weight = weighed(objective.weights, view, weight, kept)
    scale = view.scale(None, objective.reduce)
    loss = (scale * torch.where(kept, weight * value, 0)).sum()
    loss, penalty = _add_penalties(objective, view, kept, weight, loss)
    if objective.entropy is not None and view.entropy is not None:
        here = kept if objective.entropy.gated else view.counted
        bonus = view.scale(objective.entropy.reduce, objective.reduce) * torch.where(here, view.entropy, 0)
        loss = loss - objective.entropy.coef * bonus.sum()
    held = ((value, 0, kept), (ratio, 1, keep), (weight, 1, kept))
    of_surrogate, of_ratio, of_weight = (torch.where(here, each.detach(), other) for each, other, here in held)
    return Loss(loss, PerTerm(of_surrogate, of_ratio, clipped & keep, penalty.detach(), of_weight, kept))


def coefficients(objective: Objective, logprobs: Any, terms: Terms) -> NDArray[Any]:
    """c with d loss / d logprob = -c, by autograd of `evaluate` over a detached array.

    Raises:
        ArgumentError: where the objective takes the entropy, whose gradient needs the whole distribution.
    """
    if objective.needs.entropy:
        raise ArgumentError(
            "the objective takes the entropy of the next-token distribution, whose gradient does not go through the "
            "sampled token's logprob. Take the entropy bonus or gate out, or train through objective(...)."
        )
    value = torch.as_tensor(np.asarray(logprobs) if not isinstance(logprobs, Tensor) else logprobs)
    leaf = value.detach().to(torch.float64 if value.dtype == torch.float64 else torch.float32).clone().requires_grad_()
    (gradient,) = torch.autograd.grad(evaluate(objective, leaf, None, terms).loss, leaf)
    return -gradient.cpu().numpy()


def _tensor(value: Any) -> Tensor:
    """A tensor as it is; an array as one, copied where it is read-only (as a scale that is one number may be)."""
    return torch.as_tensor(value.copy() if isinstance(value, np.ndarray) and not value.flags.writeable else value)


def _view(objective: Objective, logprobs: Tensor, entropy: Tensor | None, terms: Terms) -> View:
    given = {field.name: getattr(terms, field.name) for field in fields(terms) if field.name != "scales"}
    check_shapes(objective, logprobs, entropy, given)
    check_detached(objective, given)
    logprobs = logprobs if logprobs.dtype == torch.float64 else logprobs.float()
    scales = {**(terms.scales or {}), objective.reduce: terms.scale}
    arrays = {name: given[name] for name in _POLICIES}
    return View(arrays, logprobs, entropy, terms.scale != 0, scales)


def _add_penalties(
    objective: Objective, view: View, keep: Tensor, weight: Tensor, loss: Tensor
) -> tuple[Tensor, Tensor]:
    """The loss with its penalties, and their sum at each term before scale."""
    total = torch.zeros_like(view.logprobs)
    for penalty in objective.penalties:
        value = penalty.coef * penalty_at(penalty, view, keep if penalty.gated else view.counted)
        value = weight * value if penalty.weighted else value
        loss = loss + (view.scale(penalty.reduce, objective.reduce) * value).sum()
        total = total + value
    return loss, total
