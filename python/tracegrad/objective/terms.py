"""The arrays of terms and the log-ratios between their policies, safe where a logprob is missing or padding.

No formula of a loss is here. `evaluate` reads them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from tracegrad.algebra import Objective, Ratio, Reduce
from tracegrad.errors import ArgumentError


@dataclass(frozen=True)
class View:
    """One evaluation's arrays: the terms with the logprobs being trained.

    Args:
        arrays: [m] or [B, S] by name: old, rollout, ref, alpha, advantages, trace, turn, group.
        logprobs: of the policy being trained; detached where a gate or weight looks.
        entropy: the same shape, or None.
        counted: bool, False at padding.
        scales: by reduction.
    """

    arrays: Mapping[str, Tensor | None]
    logprobs: Tensor
    entropy: Tensor | None
    counted: Tensor
    scales: Mapping[Reduce, Tensor]
    _segments: dict[str, Tensor] = field(default_factory=dict)

    def array(self, name: str) -> Tensor:
        """An array that the objective needs.

        Raises:
            ArgumentError: if the terms have none.
        """
        found = self.arrays[name]
        if found is None:
            raise ArgumentError(
                f"the objective needs {name} of every term, and the terms have none. Pass Terms({name}=...)."
            )
        return found

    def scale(self, reduce: Reduce | None, default: Reduce) -> Tensor:
        """The scale of a reduction, the objective's where None.

        Raises:
            ArgumentError: if the terms lack it.
        """
        wanted = reduce or default
        if wanted not in self.scales:
            raise ArgumentError(
                f"a penalty or bonus has its own denominators, {wanted}, and the terms have no scale for them. "
                "Pass correct(reductions=objective.reductions) and Terms(scales=corrected.scales)."
            )
        return self.scales[wanted].to(self.logprobs.dtype)

    def detached(self) -> View:
        """The same with logprobs and entropy that carry no gradient."""
        entropy = None if self.entropy is None else self.entropy.detach()
        return View(self.arrays, self.logprobs.detach(), entropy, self.counted, self.scales, self._segments)

    def known(self, ratio: Ratio) -> Tensor:
        """Terms with a logprob under both policies of the ratio; padding has none."""
        found = self.counted
        if "rollout" in ratio or "proximal" in ratio:
            found = found & ~self.array("rollout").isnan()
        return found

    def log(self, policy: str, here: Tensor) -> Tensor:
        """The logprob under a policy, 0 without a gradient where `here` is False."""
        if policy == "theta":
            return torch.where(here, self.logprobs, 0)
        if policy != "proximal":
            return torch.where(here, self.array(policy), 0).to(self.logprobs.dtype)
        rollout, theta = self.log("rollout", here), self.log("theta", here).detach()
        return rollout + torch.where(here, self.array("alpha"), 0).to(theta.dtype) * (theta - rollout)

    def log_ratio(self, ratio: Ratio, here: Tensor) -> Tensor:
        """log num - log den, 0 without a gradient where `here` is False."""
        return self.log(ratio.num, here) - self.log(ratio.den, here)

    def advantages(self, here: Tensor) -> Tensor:
        """The advantages in the dtype of the logprobs, 0 where `here` is False."""
        return torch.where(here, self.array("advantages"), 0).to(self.logprobs.dtype)

    def segments(self, over: str) -> Tensor:
        """[terms] dense index of the turn, trace, group or batch of each term, flat."""
        if over not in self._segments:
            self._segments[over] = self._index(over)
        return self._segments[over]

    def _index(self, over: str) -> Tensor:
        if over == "batch":
            return torch.zeros(self.logprobs.numel(), dtype=torch.long, device=self.logprobs.device)
        if over != "turn":
            return _dense(self.array(over))
        return _dense(self.segments("trace") * self.logprobs.numel() + _dense(self.array("turn")))


def _dense(ids: Tensor) -> Tensor:
    """[terms] the rank of each id among those present; unlike torch.unique without a wait for the device."""
    ordered, order = torch.sort(ids.reshape(-1).long())
    first = torch.zeros_like(ordered)
    first[1:] = ordered[1:] != ordered[:-1]
    return torch.empty_like(ordered).scatter(0, order, first.cumsum(0))


def check_detached(objective: Objective, given: Mapping[str, Any]) -> None:
    """Refuses terms without what `correct` makes of the parts that are known before the step.

    Raises:
        ArgumentError: with the part that would be passed over.
    """
    for name, parts in (("weight", objective.weights), ("keep", objective.gates)):
        known = [part for part in parts if part.detached]
        if known and given[name] is None:
            does = "weighs its terms by" if name == "weight" else "has the gate"
            raise ArgumentError(
                f"the objective {does} '{known[0]}', which is known before the step, and the terms have no {name}. "
                f"It would be passed over without a word. Pass Terms({name}=corrected.{name}) of correct(...), or an "
                f"objective without it: replace(objective, {'weights' if name == 'weight' else 'gates'}=())."
            )


def check_shapes(objective: Objective, logprobs: Tensor, entropy: Tensor | None, given: Mapping[str, Any]) -> None:
    """Refuses arrays that are not one entry per term, and an entropy that is needed and absent.

    Raises:
        ArgumentError: with the array's name.
    """
    for name, value in given.items():
        if value is not None and value.shape != logprobs.shape:
            raise ArgumentError(
                f"terms.{name} is {tuple(value.shape)} but logprobs are {tuple(logprobs.shape)}. "
                "Pass one entry per term in every tensor."
            )
    if objective.needs.entropy and entropy is None:
        raise ArgumentError(
            "the objective takes the entropy of the next-token distribution, and entropy is None. "
            "Pass it, as policy.logprobs_and_entropy returns it."
        )
    if entropy is not None and entropy.shape != logprobs.shape:
        raise ArgumentError(
            f"entropy is {tuple(entropy.shape)} but logprobs are {tuple(logprobs.shape)}. Pass one entry per term."
        )
