"""Penalties, the entropy bonus and shifts of the advantage, each as its formula reads."""

from __future__ import annotations

import torch
from torch import Tensor

from tracegrad.algebra import Penalty, Shift
from tracegrad.objective.gates import top_covariance
from tracegrad.objective.level import bounded, ratio_at
from tracegrad.objective.terms import View


def penalty_at(penalty: Penalty, view: View, here: Tensor) -> Tensor:
    """The estimate of KL(num || den) at each term with its ratio and cap, 0 where `here` is False."""
    here = here & view.known(penalty.ratio)
    if penalty.where is not None:
        here = top_covariance(penalty.where, view, here)
    log_ratio = view.log_ratio(penalty.ratio, here)
    value = _kind(penalty.kind, log_ratio)
    if penalty.cap is not None:
        value = value.clamp(-penalty.cap, penalty.cap)
    if penalty.straight_through:
        k2 = _kind("k2", log_ratio)
        value = k2 - k2.detach() + value.detach()
    if penalty.importance is not None:
        known = view.known(penalty.importance)
        ratio = ratio_at(penalty.importance_level, view.log_ratio(penalty.importance, known), view, known)
        value = value * torch.where(here & known, ratio, 1)
    return torch.where(here, value, 0)


def _kind(kind: str, log_ratio: Tensor) -> Tensor:
    if kind == "k1":
        return log_ratio
    if kind == "abs":
        return log_ratio.abs()
    if kind == "k3":
        inverse = -bounded(log_ratio)
        return torch.expm1(inverse) - inverse
    return log_ratio.square() * (0.5 if kind == "k2" else 1.0)


def shifted(shifts: tuple[Shift, ...], view: View, advantages: Tensor, keep: Tensor) -> Tensor:
    """A - coef * (l - mean l where centred), l held constant."""
    view = view.detached()
    for shift in shifts:
        here = keep & view.known(shift.ratio)
        log_ratio = view.log_ratio(shift.ratio, here)
        if shift.center is not None:
            mean = log_ratio.sum() / here.sum().clamp(min=1)
            log_ratio = torch.where(here, log_ratio - mean, 0)
        advantages = advantages - shift.coef * log_ratio
    return advantages
