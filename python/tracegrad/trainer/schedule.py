"""At which steps a run refreshes `old`, measures off-policy value and writes checkpoints: functions of step counts.

Nothing here is state, so a run that resumes at step n does what the uninterrupted one does from step n. No torch, no
arrays. Called by the loop.
"""

from dataclasses import dataclass

import numpy as np

from tracegrad.config import Config


@dataclass(frozen=True)
class Plan:
    """Optimizer steps 0 to total - 1.

    Args:
        steps_per_epoch: optimizer steps in an epoch, each of its packed steps counted `iterations` times.
        epochs, seed, updates_per_old, off_policy_value_per_epoch, checkpoint_every, ref_every: as in the config.
        max_steps: of the run, where epochs does not decide; 0 where it does.
        iterations: times that each batch of `updates_per_old` packed steps is trained on in a row.

    >>> plan = Plan(steps_per_epoch=3, epochs=2)
    >>> plan.total, plan.epoch_of(4), plan.window(4)
    (6, 1, range(4, 6))
    """

    steps_per_epoch: int
    epochs: int = 1
    seed: int = 0
    updates_per_old: int = 0
    off_policy_value_per_epoch: int = 4
    checkpoint_every: int = 0
    ref_every: int = 0
    max_steps: int = 0
    iterations: int = 1

    @classmethod
    def of(cls, config: Config, steps_per_epoch: int, *, each_update: bool = False) -> "Plan":
        """The plan that a config makes; `each_update`: what an `updates_per_old` of 0 is."""
        train = config.train
        cadence = (
            train.updates_per_old or int(each_update),
            train.off_policy_value_per_epoch,
            config.checkpoint.every,
            train.ref_every,
        )
        per_epoch = steps_per_epoch * train.iterations
        epochs = -(-train.max_steps // per_epoch) or train.epochs
        return cls(per_epoch, epochs, train.seed, *cadence, train.max_steps, train.iterations)

    @property
    def total(self) -> int:
        """Optimizer steps of the run."""
        return self.max_steps or self.epochs * self.steps_per_epoch

    def packed(self, step: int) -> int:
        """The place in its epoch of the packed step that `step` trains on.

        >>> plan = Plan(steps_per_epoch=6, updates_per_old=2, iterations=2)  # of three packed steps
        >>> [plan.packed(step) for step in range(6)]
        [0, 1, 0, 1, 2, 2]
        """
        place = step % self.steps_per_epoch
        first, size = self._batch(place)
        return first + (place - first * self.iterations) % size

    def epoch_of(self, step: int) -> int:
        """The epoch that holds `step`."""
        return step // self.steps_per_epoch

    def shuffle_seed(self, epoch: int) -> int:
        """What the groups of an epoch are shuffled by."""
        return int(np.random.SeedSequence([self.seed, epoch]).generate_state(1)[0])

    def refreshes_old(self, step: int) -> bool:
        """Whether `old` is measured anew before `step`."""
        return step == self.refreshed(step)

    def window(self, step: int) -> range:
        """The steps from `step` to the next refresh of `old`."""
        if self.iterations == 1:
            return range(step, min(self.refreshed(step) + self._old_every, self._end))
        first = self.refreshed(step)  # each packed step of the batch once
        return range(first, first + self._batch(first % self.steps_per_epoch)[1])

    def refreshed(self, step: int) -> int:
        """The step at which `old` was last measured, `step` included."""
        if self.iterations == 1:
            return step // self._old_every * self._old_every
        place = step % self.steps_per_epoch
        return step - place + self._batch(place)[0] * self.iterations

    def refreshes_ref(self, step: int) -> bool:
        """Whether the reference is measured anew before `step`."""
        return step == 0 or (self.ref_every > 0 and step % self.ref_every == 0)

    def ref_window(self, step: int) -> range:
        """The steps from `step` to the next reference."""
        return range(step, min(step + self.ref_every, self._end) if self.ref_every else self.steps_per_epoch)

    def measures_value(self, taken: int) -> bool:
        """Whether value is measured after `taken` steps: before the first, and evenly within each epoch."""
        per_epoch, parts = self.steps_per_epoch, min(self.off_policy_value_per_epoch, self.steps_per_epoch)
        place = taken % per_epoch
        return place == 0 or taken == self.total or (place * parts) // per_epoch > ((place - 1) * parts) // per_epoch

    def saves(self, taken: int) -> bool:
        """Whether a checkpoint is written after `taken` steps."""
        every = self.checkpoint_every or self.steps_per_epoch
        return taken == self.total or taken % every == 0

    @property
    def _end(self) -> int:
        """The step after the last epoch, which a run with more of `max_steps` may go on to."""
        return self.epochs * self.steps_per_epoch

    @property
    def _old_every(self) -> int:
        return self.updates_per_old or self.steps_per_epoch

    def _batch(self, place: int) -> tuple[int, int]:
        """The first packed step of the batch that a place of an epoch is in, and how many it has."""
        packed = self.steps_per_epoch // self.iterations
        size = min(self.updates_per_old or packed, packed)
        first = place // (size * self.iterations) * size
        return first, min(size, packed - first)
