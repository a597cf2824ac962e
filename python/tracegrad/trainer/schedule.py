"""The schedule of a run: when it recomputes `old`, estimates off-policy reward and writes checkpoints.

All are functions of step counts, without state. A run resumed at step n therefore does what an uninterrupted one does.
"""

from dataclasses import dataclass

import numpy as np

from tracegrad.config import Config


@dataclass(frozen=True)
class Schedule:
    """The schedule of optimizer steps 0 to total - 1.

    Args:
        steps_per_epoch: optimizer steps per epoch; each packed step counts `iterations` times.
        epochs, seed, updates_per_old_logprobs, ope_per_epoch, checkpoint_every, ref_sync_steps: as in the config.
        max_steps: number of steps of the run; 0 if `epochs` determines it.
        iterations: number of consecutive passes over each batch of `updates_per_old_logprobs` packed steps.
    >>> plan = Schedule(steps_per_epoch=3, epochs=2)
    >>> plan.total, plan.epoch_of(4), plan.window(4)
    (6, 1, range(4, 6))
    """

    steps_per_epoch: int
    epochs: int = 1
    seed: int = 0
    updates_per_old_logprobs: int = 0
    ope_per_epoch: int = 4
    checkpoint_every: int = 0
    ref_sync_steps: int = 0
    max_steps: int = 0
    iterations: int = 1

    @classmethod
    def of(cls, config: Config, steps_per_epoch: int, *, each_update: bool = False) -> "Schedule":
        """Build the schedule from a config. If `updates_per_old_logprobs` is 0, `each_update` selects 1 instead of an
        epoch."""
        train = config.train
        intervals = (
            train.updates_per_old_logprobs or int(each_update),
            config.eval.ope_per_epoch,
            config.checkpoint.every_steps,
            train.ref_sync_steps,
        )
        per_epoch = steps_per_epoch * train.iterations
        epochs = -(-train.max_steps // per_epoch) or train.epochs
        return cls(per_epoch, epochs, train.seed, *intervals, train.max_steps, train.iterations)

    @property
    def total(self) -> int:
        """Number of optimizer steps of the run."""
        return self.max_steps or self.epochs * self.steps_per_epoch

    def packed_index(self, step: int) -> int:
        """Return the index in its epoch of the packed step that `step` trains on.

        >>> plan = Schedule(steps_per_epoch=6, updates_per_old_logprobs=2, iterations=2)  # of three packed steps
        >>> [plan.packed_index(step) for step in range(6)]
        [0, 1, 0, 1, 2, 2]
        """
        place = step % self.steps_per_epoch
        first, size = self._batch(place)
        return first + (place - first * self.iterations) % size

    def epoch_of(self, step: int) -> int:
        """Return the epoch of `step`."""
        return step // self.steps_per_epoch

    def shuffle_seed(self, epoch: int) -> int:
        """Return the shuffle seed of an epoch."""
        return int(np.random.SeedSequence([self.seed, epoch]).generate_state(1)[0])

    def refreshes_old(self, step: int) -> bool:
        """Return whether `old` is recomputed before `step`."""
        return step == self.last_refresh(step)

    def window(self, step: int) -> range:
        """Return the steps from `step` to the next refresh of `old`; with `iterations`, each packed step once."""
        if self.iterations == 1:
            return range(step, min(self.last_refresh(step) + self._old_every, self._end_of_epochs))
        first = self.last_refresh(step)  # Each packed step of the batch once.
        return range(first, first + self._batch(first % self.steps_per_epoch)[1])

    def last_refresh(self, step: int) -> int:
        """Return the step before which `old` was last recomputed; it may be `step` itself."""
        if self.iterations == 1:
            return step // self._old_every * self._old_every
        place = step % self.steps_per_epoch
        return step - place + self._batch(place)[0] * self.iterations

    def refreshes_ref(self, step: int) -> bool:
        """Return whether the reference logprobs are recomputed before `step`."""
        return step == 0 or (self.ref_sync_steps > 0 and step % self.ref_sync_steps == 0)

    def ref_window(self, step: int) -> range:
        """Return the steps from `step` to the next refresh of the reference."""
        return range(
            step, min(step + self.ref_sync_steps, self._end_of_epochs) if self.ref_sync_steps else self.steps_per_epoch
        )

    def evaluates(self, taken: int) -> bool:
        """Return whether the off-policy estimate is computed after `taken` steps: at 0, and evenly in each epoch."""
        per_epoch, parts = self.steps_per_epoch, min(self.ope_per_epoch, self.steps_per_epoch)
        place = taken % per_epoch
        return place == 0 or taken == self.total or (place * parts) // per_epoch > ((place - 1) * parts) // per_epoch

    def saves(self, taken: int) -> bool:
        """Return whether a checkpoint is written after `taken` steps."""
        every = self.checkpoint_every or self.steps_per_epoch
        return taken == self.total or taken % every == 0

    @property
    def _end_of_epochs(self) -> int:
        """The step after the last epoch. Unlike `total`, it does not depend on `max_steps`, which a resume may "
        "raise."""
        return self.epochs * self.steps_per_epoch

    @property
    def _old_every(self) -> int:
        return self.updates_per_old_logprobs or self.steps_per_epoch

    def _batch(self, place: int) -> tuple[int, int]:
        """Return the first packed step, and the number of packed steps, of the batch at a position in an epoch."""
        packed = self.steps_per_epoch // self.iterations
        size = min(self.updates_per_old_logprobs or packed, packed)
        first = place // (size * self.iterations) * size
        return first, min(size, packed - first)
