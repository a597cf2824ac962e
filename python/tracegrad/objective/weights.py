"""Weights on the policy being trained: the torch twin of the core's, and the product that multiplies the surrogate.

Nothing here carries a gradient.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tracegrad.algebra import Clamp, Gamma, Gaussian, Identity, Shape, Weight, Window
from tracegrad.objective.gates import holds
from tracegrad.objective.level import at, bounded
from tracegrad.objective.terms import View

_SMALLEST = 1e-8  # below it an absorbed weight has no logarithm worth the name (TRL's)


def weighed(weights: tuple[Weight, ...], view: View, detached: Tensor, keep: Tensor) -> Tensor:
    """The product of the detached weights and those on the policy being trained, at each term."""
    view = view.detached()
    absorbed = torch.ones_like(detached)
    if any(weight.absorbs for weight in weights):
        detached, absorbed = absorbed, detached
    for weight in weights:
        if not weight.detached:
            detached = detached * _factor(weight, view, absorbed, keep)
    return detached


def _factor(weight: Weight, view: View, absorbed: Tensor, keep: Tensor) -> Tensor:
    known = view.known(weight.ratio)
    inside = known & keep if weight.level.terms == "kept" else known
    log_ratio = view.log_ratio(weight.ratio, known)
    if weight.absorbs:
        log_ratio = torch.where(known, log_ratio + absorbed.clamp(min=_SMALLEST).log(), 0)
    level = bounded(at(weight.level, log_ratio, view, inside))
    applies = known & ~level.isnan() & holds(weight.when, view.advantages(view.counted))
    return torch.where(applies, shaped(weight.shape, torch.where(applies, level, 0)), 1)


def shaped(shape: Shape, log_ratio: Tensor) -> Tensor:
    """What becomes of the ratio."""
    if isinstance(shape, Gamma):
        return (shape.rate + shape.power * log_ratio - shape.rate * log_ratio.exp()).exp()
    if isinstance(shape, Gaussian):
        return (-log_ratio.square() / (2 * shape.sigma**2)).exp()
    ratio = log_ratio.exp()
    if isinstance(shape, Identity):
        return ratio
    if isinstance(shape, Clamp):
        return ratio.clamp(shape.low, shape.high)
    assert isinstance(shape, Window)
    inside = (ratio > shape.low) & (ratio < shape.high)
    if not shape.strict:
        inside = (ratio >= shape.low) & (ratio <= shape.high)
    return torch.where(inside, ratio, 0)
