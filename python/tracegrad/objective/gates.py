"""Gates on the policy being trained: the torch twin of the core's, and the selectors that only exist here.

Nothing here carries a gradient, and nothing waits for the device but the draw of `DropCovariance`. A gate that does not
see the policy being trained was applied by `correction`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tracegrad.algebra import AnyGate, DropCovariance, Gate, Level, TopCovariance, TopEntropy
from tracegrad.objective.level import at, bounded
from tracegrad.objective.terms import View

_KL_EPSILON = 1e-8  # verl's, where a probability is 1


def gated(gates: tuple[AnyGate, ...], view: View, keep: Tensor, clipped: Tensor) -> Tensor:
    """`keep` after the gates that see the policy being trained, in order."""
    view = view.detached()
    for gate in gates:
        if isinstance(gate, Gate) and not gate.detached:
            keep = keep & ~_failed(gate, view, keep)
        elif isinstance(gate, TopEntropy):
            keep = keep & _top_entropy(gate, view)
        elif isinstance(gate, DropCovariance):
            keep = keep & ~_drawn(gate, view, keep, clipped)
    return keep


def holds(when: str, advantages: Tensor) -> Tensor:
    """Where a condition on the sign of the advantage is met."""
    return {
        "always": torch.ones_like(advantages, dtype=torch.bool),
        "A>0": advantages > 0,
        "A>=0": advantages >= 0,
        "A<0": advantages < 0,
        "A<=0": advantages <= 0,
    }[when]


def _failed(gate: Gate, view: View, keep: Tensor) -> Tensor:
    """Terms that lie outside the bounds, or fall with one that does."""
    known = view.known(gate.ratio)
    inside = known & keep if gate.over == "kept" else known
    values = _stat(gate, view, known)
    if gate.level.over != "token":
        values = at(gate.level, values, view, inside)
    if gate.stat == "ratio":
        values = bounded(values).exp()
    low, high = gate.bounds
    failed = (values < low) | (values > high)
    if gate.level.over == "token":
        failed = failed & known
    failed = failed & holds(gate.when, view.advantages(view.counted)) & view.counted
    if gate.scope is not None:
        flags = torch.where(failed, 1.0, 0.0).to(values.dtype)
        failed = at(Level(gate.scope, "max"), flags, view, view.counted) > 0
    return failed


def _stat(gate: Gate, view: View, known: Tensor) -> Tensor:
    """The statistic of each term; for "ratio" its logarithm, which is what levels aggregate."""
    log_ratio = view.log_ratio(gate.ratio, known)
    if gate.stat in ("ratio", "k1"):
        return log_ratio
    if gate.stat == "abs":
        return log_ratio.abs()
    if gate.stat in ("k2", "square"):
        return log_ratio.square() * (0.5 if gate.stat == "k2" else 1.0)
    if gate.stat == "k3":
        return torch.expm1(bounded(log_ratio)) - bounded(log_ratio)
    p, q = (view.log(policy, known).clamp(max=0).exp() for policy in (gate.ratio.num, gate.ratio.den))
    if gate.stat == "dprob":
        return p - q
    rest = (1 - q) * torch.log((1 - q + _KL_EPSILON) / (1 - p + _KL_EPSILON))
    return torch.sign(p - q) * (rest - q * log_ratio)


def _top_entropy(gate: TopEntropy, view: View) -> Tensor:
    """The terms at or above the quantile of the counted ones, linearly interpolated as torch.quantile does."""
    entropy = view.entropy
    assert entropy is not None  # checked with the shapes
    ordered = torch.where(view.counted, entropy, torch.inf).float().reshape(-1).sort().values
    rank = (1 - gate.share) * (view.counted.sum() - 1).clamp(min=0).float()
    ends = ordered.gather(0, torch.stack([rank.floor(), rank.ceil()]).long()) if len(ordered) else rank.expand(2)
    return entropy >= torch.lerp(ends[0], ends[1], rank - rank.floor())


def _covariance(view: View, here: Tensor) -> Tensor:
    """(A - mean A)(logp - mean logp) of each term that is left, minus infinity elsewhere."""
    advantages, logprobs = view.advantages(here), view.log("theta", here)
    count = here.sum().clamp(min=1)
    found = (advantages - advantages.sum() / count) * (logprobs - logprobs.sum() / count)
    return torch.where(here, found, -torch.inf)


def _drawn(gate: DropCovariance, view: View, here: Tensor, clipped: Tensor) -> Tensor:
    """The random share of candidates that falls."""
    here = here & view.counted
    found = _covariance(view, here)
    candidates = ((found > gate.low) & (found < gate.high) & ~clipped).reshape(-1).nonzero().squeeze(-1)
    wanted = max(int(gate.share * int(here.sum())), 1)
    drawn = torch.zeros(found.numel(), dtype=torch.bool, device=found.device)
    if len(candidates):
        drawn[candidates[torch.randperm(len(candidates))[:wanted].to(candidates.device)]] = True
    return drawn.reshape(found.shape)


def top_covariance(where: TopCovariance, view: View, here: Tensor) -> Tensor:
    """The terms of `here` with the highest covariance of advantage and logprob, at least one where there are any."""
    found = _covariance(view.detached(), here).reshape(-1)
    count = here.sum()
    wanted = torch.minimum((where.share * count.double()).long().clamp(min=1), count)
    rank = torch.arange(len(found), device=found.device)
    chosen = torch.zeros(len(found), dtype=torch.bool, device=found.device)
    chosen = chosen.scatter(0, torch.argsort(found, descending=True), rank < wanted)
    return chosen.reshape(here.shape)
