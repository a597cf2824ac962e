"""The surrogates: functions of the ratio (or the logprob) and the advantage, each as its formula reads.

Each returns the value, the ratio and whether the clip took the term's gradient away.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tracegrad.algebra import Clip, CrossEntropy, GeoClip, Importance, Objective, PolicyGradient, Regress, Sigmoid
from tracegrad.algebra.refuse import kind_of
from tracegrad.objective.gates import holds
from tracegrad.objective.level import at, bounded, ratio_at
from tracegrad.objective.terms import View

Values = tuple[Tensor, Tensor, Tensor]
"""Surrogate, ratio and clipped flag of each term."""


def surrogate(objective: Objective, view: View, advantages: Tensor, keep: Tensor) -> Values:
    """Surrogate, ratio and clipped flag of each term; where `keep` is False they mean nothing but are finite."""
    kind = objective.surrogate
    ones = torch.ones_like(advantages)
    if isinstance(kind, CrossEntropy):
        return _unclipped(-view.log("theta", keep), ones)
    if isinstance(kind, PolicyGradient):
        pulled = torch.where(holds(kind.when, advantages), advantages, 0)
        return _unclipped(-pulled * view.log("theta", keep), ones)
    assert objective.ratio is not None
    inside = keep if kind.level.terms == "kept" or kind.level.over == "token" else _known(view, keep)
    log_ratio = view.log_ratio(objective.ratio, inside)
    if isinstance(kind, GeoClip):
        return _geo_clip(kind, log_ratio, advantages, view, inside)
    if isinstance(kind, Regress):
        whole = torch.where(keep, at(kind.level, log_ratio, view, inside), 0)
        return _unclipped((kind.beta * whole - advantages).square(), bounded(whole.detach()).exp())
    level = at(kind.level, log_ratio, view, inside)
    ratio = bounded(torch.where(keep, level, 0)).exp()
    if isinstance(kind, Importance):
        return _unclipped(-advantages * ratio, ratio)
    if isinstance(kind, Sigmoid):
        return _sigmoid(kind, ratio, advantages)
    kind_of("Objective.surrogate", kind, (Clip,))
    return _clip(kind, ratio, advantages)


def _clip(clip: Clip, ratio: Tensor, advantages: Tensor) -> Values:
    """max(-A r, -A clip(r, 1 - low, 1 + high)), and for A < 0 at most -A dual, or with r at most delta."""
    low, high = 1 - clip.low, 1 + clip.high
    free = ratio if clip.delta is None else ratio.clamp(max=clip.delta)
    value = torch.maximum(-advantages * free, -advantages * ratio.clamp(low, high))
    bound = high if clip.delta is None else min(clip.delta, high)
    clipped = ((advantages > 0) & (ratio > bound)) | ((advantages < 0) & (ratio < low))
    if clip.dual is not None:
        value = torch.where(advantages < 0, torch.minimum(value, -advantages * clip.dual), value)
        clipped = clipped | ((advantages < 0) & (ratio > clip.dual))
    if clip.delta is not None:
        clipped = clipped | ((advantages < 0) & (ratio > max(clip.delta, high)))
    return value, ratio, clipped


def _sigmoid(sigmoid: Sigmoid, ratio: Tensor, advantages: Tensor) -> Values:
    """-A (4 / tau) sigmoid(tau (r - 1))."""
    tau = torch.full_like(ratio, sigmoid.tau_neg).masked_fill(advantages > 0, sigmoid.tau_pos)
    return _unclipped(-advantages * torch.sigmoid(tau * (ratio - 1)) * 4 / tau, ratio)


def _geo_clip(clip: GeoClip, log_ratio: Tensor, advantages: Tensor, view: View, inside: Tensor) -> Values:
    """-A exp(mean of the log-ratios, each held on the side that A would push it to)."""
    held = torch.where(advantages > 0, log_ratio.clamp(max=clip.high), log_ratio.clamp(min=-clip.low))
    held = torch.where(advantages == 0, 0, held)
    ratio = ratio_at(clip.level, held, view, inside).nan_to_num(1.0)
    clipped = ((advantages > 0) & (log_ratio > clip.high)) | ((advantages < 0) & (log_ratio < -clip.low))
    return -advantages * ratio, ratio, clipped


def _unclipped(value: Tensor, ratio: Tensor) -> Values:
    return value, ratio, torch.zeros_like(value, dtype=torch.bool)


def _known(view: View, keep: Tensor) -> Tensor:
    """Terms that a level counts: all but padding and those dropped because their rollout logprob is missing."""
    rollout = view.arrays["rollout"]
    return view.counted if rollout is None else view.counted & (keep | ~rollout.isnan())
