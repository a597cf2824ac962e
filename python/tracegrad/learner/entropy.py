"""The adaptive entropy coefficient: its value between steps, which a checkpoint keeps.

No torch. Called by the loop, or by any trainer that has an objective with `Entropy(adapt=...)`.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import ArrayLike

from tracegrad.algebra import Objective
from tracegrad.metrics.sums import AllReduce


@dataclass
class Control:
    """What adapts from step to step.

    Args:
        objective: the one that was asked for; without an adapting bonus nothing here changes anything.
        coef: the coefficient now, as it is before the target decides whether it applies.
        last: mean entropy of the last optimizer step, nats; infinite before the first, which takes no bonus.

    >>> from tracegrad.algebra import Adapt, Entropy
    >>> from tracegrad import presets
    >>> control = Control(replace(presets.DAPO, entropy=Entropy(0.01, gated=False, adapt=Adapt(target=0.5))))
    >>> control.update([0.3, 0.5])
    >>> round(control.applied().entropy.coef, 3)
    0.015
    """

    objective: Objective
    coef: float = 0.0
    last: float = float("inf")

    def __post_init__(self) -> None:
        if self.objective.entropy is not None:
            self.coef = self.objective.entropy.coef

    @property
    def adapts(self) -> bool:
        """Whether there is anything to remember."""
        return self.objective.entropy is not None and self.objective.entropy.adapt is not None

    def applied(self) -> Objective:
        """The objective of the next step."""
        bonus = self.objective.entropy
        if bonus is None or bonus.adapt is None:
            return self.objective
        if self.last > bonus.adapt.target:
            return replace(self.objective, entropy=None)
        return replace(self.objective, entropy=replace(bonus, coef=self.coef))

    def update(self, entropy: ArrayLike, keep: ArrayLike | None = None, all_reduce: AllReduce | None = None) -> None:
        """Takes the entropy of the terms of a whole optimizer step.

        Args:
            entropy: [M] nats.
            keep: [M] bool, what the gates have left; read where the bonus is gated. None is all.
            all_reduce: of the ranks that share the step.
        """
        bonus = self.objective.entropy
        if bonus is None or bonus.adapt is None:
            return
        counted = np.asarray(keep, bool) if bonus.gated and keep is not None else np.ones(np.shape(entropy), bool)
        sums = np.array([np.asarray(entropy, np.float64)[counted].sum(), np.count_nonzero(counted)])
        total, terms = sums if all_reduce is None else all_reduce(sums, "sum")
        self.last = float(total / max(terms, 1))
        adapt = bonus.adapt
        up = self.last <= adapt.target
        self.coef = min(self.coef + adapt.delta, adapt.high) if up else max(self.coef - adapt.delta, adapt.low)

    def state(self) -> dict[str, float]:
        """What a checkpoint keeps."""
        return {"coef": self.coef, "last": self.last} if self.adapts else {}

    def restore(self, state: Mapping[str, float]) -> None:
        """Takes up what `state` gave."""
        self.coef, self.last = state.get("coef", self.coef), state.get("last", self.last)
