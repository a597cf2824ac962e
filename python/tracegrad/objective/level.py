"""Log-ratios aggregated over turns, traces, groups or the batch and handed back to each term.

The torch twin of the core's `ratio/level`; sums in float64.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from tracegrad.algebra import LOG_RATIO_LIMIT, Level
from tracegrad.objective.terms import View


def ratio_at(level: Level, log_ratio: Tensor, view: View, inside: Tensor) -> Tensor:
    """exp of the log-ratio at its level, clamped at LOG_RATIO_LIMIT; terms outside count for nothing."""
    return bounded(at(level, log_ratio, view, inside)).exp()


def bounded(log_ratio: Tensor) -> Tensor:
    """Held within the limit beyond which nothing is exponentiated."""
    return log_ratio.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)


def at(level: Level, values: Tensor, view: View, inside: Tensor) -> Tensor:
    """Values aggregated as the level says, of the shape of `values`; NaN where a segment has no term inside."""
    if level.over == "token":
        return values
    whole = _aggregate(level.agg or "sum", values.reshape(-1).double(), view.segments(level.over), inside.reshape(-1))
    whole = whole.reshape(values.shape).to(values.dtype)
    if level.blend == "geometric":
        whole = (whole + values) / 2
    elif level.blend == "arithmetic":
        whole = torch.logaddexp(bounded(whole), bounded(values)) - math.log(2)
    if level.grad == "token":
        return whole.detach() + values - values.detach()
    return whole


def _aggregate(agg: str, values: Tensor, index: Tensor, inside: Tensor) -> Tensor:
    """[terms] each term's aggregate; for the prefixes over the terms up to it."""
    if agg.startswith("prefix"):
        return _prefix(agg, values, index, inside)
    total = values.new_zeros(len(values))
    if agg == "max":
        lowest = values.new_full((len(values),), -torch.inf)
        total = lowest.scatter_reduce(0, index, values.masked_fill(~inside, -torch.inf), "amax")
    else:
        total = total.index_add(0, index, torch.where(inside, values, 0))
    count = values.new_zeros(len(values)).index_add(0, index, inside.double())
    if agg == "mean":
        total = total / count.clamp(min=1)
    return torch.where(count > 0, total, torch.nan)[index]


def _prefix(agg: str, values: Tensor, index: Tensor, inside: Tensor) -> Tensor:
    """The running sum or minimum within each segment, by doubling: after k rounds over the last 2^k terms."""
    combine: Callable[[Tensor, Tensor], Tensor] = torch.add if agg == "prefix_sum" else torch.minimum
    neutral = 0.0 if agg == "prefix_sum" else torch.inf
    order = torch.argsort(index, stable=True)
    segment, running = index[order], torch.where(inside, values, neutral)[order]
    step = 1
    while step < len(values):
        same = torch.zeros_like(segment, dtype=torch.bool)
        same[step:] = segment[step:] == segment[:-step]
        before = torch.cat([running.new_full((step,), neutral), running[:-step]])
        running = combine(running, torch.where(same, before, neutral))
        step *= 2
    found = torch.empty_like(running).scatter(0, order, running)
    return torch.where(found.isinf(), torch.nan, found) if agg == "prefix_min" else found
