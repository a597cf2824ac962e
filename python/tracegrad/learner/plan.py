"""Which groups stand in which optimizer step, and what else happens at it: a function of the seed and the counts alone.

Nothing here is state, so a run that resumes at step n does what the uninterrupted one does from step n. No torch, no
arrays of tokens. Called by the loop and by `--dry-run`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tracegrad.config import Config
from tracegrad.errors import ArgumentError


@dataclass(frozen=True)
class Plan:
    """Optimizer steps 0 to total - 1.

    Args:
        groups: [G] ids of the groups trained on.
        epochs, seed, step_groups, updates_per_old, value_per_epoch, checkpoint_every: as in the config.

    >>> plan = Plan(np.arange(10), epochs=2, seed=0, step_groups=4)
    >>> plan.total, [len(plan.groups_of(step)) for step in range(3)]
    (6, [4, 4, 2])
    """

    groups: NDArray[np.int32]
    epochs: int
    seed: int
    step_groups: int
    updates_per_old: int = 0
    value_per_epoch: int = 4
    checkpoint_every: int = 0

    def __post_init__(self) -> None:
        if len(self.groups) == 0:
            raise ArgumentError(
                "no group is left to train on. Without one there is no step. "
                "Give more than one group, or set data.holdout to 0."
            )

    @classmethod
    def of(cls, config: Config, groups: NDArray[np.int32]) -> Plan:
        """The plan a config makes for these groups."""
        return cls(
            groups,
            config.train.epochs,
            config.train.seed,
            config.pack.step_groups,
            config.train.updates_per_old,
            config.train.value_per_epoch,
            config.checkpoint.every,
        )

    @property
    def steps_per_epoch(self) -> int:
        """Optimizer steps in an epoch; the last may hold fewer groups."""
        return math.ceil(len(self.groups) / self.step_groups)

    @property
    def total(self) -> int:
        """Optimizer steps of the run."""
        return self.epochs * self.steps_per_epoch

    def epoch_of(self, step: int) -> int:
        """The epoch that holds `step`."""
        return step // self.steps_per_epoch

    def groups_of(self, step: int) -> NDArray[np.int32]:
        """Ids of the groups of `step`, in the order of its epoch."""
        epoch, place = divmod(step, self.steps_per_epoch)
        order = np.random.default_rng([self.seed, epoch]).permutation(len(self.groups))
        return self.groups[order[place * self.step_groups : (place + 1) * self.step_groups]]

    def refreshes_old(self, step: int) -> bool:
        """Whether `old` is measured anew before `step`."""
        return step % self._old_every == 0

    def window(self, step: int) -> range:
        """The steps from `step` to the next refresh of `old`."""
        end = (step // self._old_every + 1) * self._old_every
        return range(step, min(end, self.total))

    def measures_value(self, taken: int) -> bool:
        """Whether value is measured after `taken` steps: before the first, and evenly within each epoch."""
        per_epoch, parts = self.steps_per_epoch, min(self.value_per_epoch, self.steps_per_epoch)
        place = taken % per_epoch
        return place == 0 or (place * parts) // per_epoch > ((place - 1) * parts) // per_epoch

    def saves(self, taken: int) -> bool:
        """Whether a checkpoint is written after `taken` steps."""
        every = self.checkpoint_every or self.steps_per_epoch
        return taken == self.total or taken % every == 0

    @property
    def _old_every(self) -> int:
        return self.updates_per_old or self.steps_per_epoch
