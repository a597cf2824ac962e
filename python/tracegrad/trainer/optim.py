"""Learning-rate schedules and the adaptive entropy coefficient.

Four common schedules are implemented here, so that planning a run needs no torch. All other schedules, and all with
`schedule.kwargs`, come from `transformers.get_scheduler`.
"""

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from tracegrad.config import Schedule
from tracegrad.errors import ArgumentError
from tracegrad.metrics.aggregate import AllReduce
from tracegrad.objective import Objective

_TRANSFORMERS_NAMES = {
    "constant": "constant_with_warmup",
    "linear": "linear",
    "cosine": "cosine",
    "wsd": "warmup_stable_decay",
}
"""The schedules implemented here, with their names in transformers."""


def lr_factor(schedule: Schedule, step: int, steps: int | None = None, lr: float = 1.0) -> float:
    """Return the share of the full learning rate at optimizer step `step`, which counts from 0.

    Let p be the position between the end of the warm-up and the last step, from 0 to 1, and f the floor. The share is
    f + (1 - f) * d. d is 1 - p for linear and (1 + cos(pi p)) / 2 for cosine. wsd uses the cosine formula within the
    last `decay` share of all steps. Other schedules, and all with `schedule.kwargs`, are computed by transformers.

    Args:
        schedule: section `schedule` of the config.
        step: optimizer step, from 0.
        steps: total number of optimizer steps; None only for schedules that do not need it.
        lr: the full rate, to which arguments such as lr_end are relative.

    Raises:
        ArgumentError: if the step is past the end, or the schedule is invalid.

    >>> [lr_factor(Schedule("linear", warmup_steps=2), step, 6) for step in range(6)]
    [0.0, 0.5, 1.0, 0.75, 0.5, 0.25]
    """
    floor, total = schedule.min_lr_ratio, total_schedule_steps(schedule, steps)
    warmup = warmup_of(schedule, total)
    if total is not None and step >= total:
        raise ArgumentError(
            f"TG-TRAIN-050: step {step + 1} is past the end of schedule '{schedule.name}', which has {total} steps. "
            "Raise the total number of steps of the run, or leave schedule.name out."
        )
    if schedule.name not in _TRANSFORMERS_NAMES or schedule.kwargs:
        return _transformers_schedule(
            _TRANSFORMERS_NAMES.get(schedule.name, schedule.name), warmup, total, schedule.kwargs, lr
        )(step)
    if step < warmup:
        progress = step / warmup
        return floor + (1 - floor) * progress if schedule.name == "wsd" else progress
    if total is None or schedule.name == "constant":
        return 1.0
    decay_steps = _decay_steps(schedule, total) if schedule.name == "wsd" else total - warmup
    position = (step - (total - decay_steps)) / max(decay_steps, 1)
    if position <= 0:
        return 1.0
    decay = 1 - position if schedule.name == "linear" else 0.5 * (1 + math.cos(math.pi * position))
    return floor + (1 - floor) * decay


def warmup_of(schedule: Schedule, total: int | None) -> int:
    """Return the number of optimizer steps during which the rate rises."""
    return (
        math.ceil(schedule.warmup_ratio * total)
        if total is not None and schedule.warmup_ratio
        else (schedule.warmup_steps)
    )


@lru_cache(8)
def _transformers_schedule(name: str, warmup: int, total: int | None, kwargs: str, lr: float) -> Callable[[int], float]:
    """Return transformers' schedule of this name, as a function from step to the share of the rate."""
    try:
        import torch
        from transformers import get_scheduler
    except ImportError as error:
        raise ArgumentError(
            f"TG-TRAIN-051: schedule.name {name} needs transformers, which is not installed. "
            "Run: pip install 'tracegrad[train]'."
        ) from error
    try:
        optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=lr)
        extra = {"scheduler_specific_kwargs": json.loads(kwargs)} if kwargs else {}
        scheduler = get_scheduler(name, optimizer, warmup, total, **extra)
        return scheduler.lr_lambdas[0]  # type: ignore[union-attr]
    except (TypeError, ValueError, AttributeError) as error:
        raise ArgumentError(
            f"TG-TRAIN-052: transformers rejects schedule.name {name!r} with schedule.kwargs {kwargs!r:.200}: "
            f"{error}. Write its arguments as a JSON object."
        ) from error


def total_schedule_steps(schedule: Schedule, steps: int | None) -> int | None:
    """Return the number of steps that the schedule covers; None if the schedule does not depend on it.

    Raises:
        ArgumentError: if the schedule needs `steps` and it is None, or if warm-up and decay are longer than the run.
    """
    if schedule.name == "constant" and not schedule.warmup_ratio:
        return None
    if steps is None:
        raise ArgumentError(
            f"TG-TRAIN-053: schedule.name '{schedule.name}' needs the total number of optimizer steps. "
            "Pass Trainer(..., total_steps=N), or leave schedule.name out."
        )
    decay_steps = _decay_steps(schedule, steps) if schedule.name == "wsd" else 1
    warmup = warmup_of(schedule, steps)
    if warmup + decay_steps > steps:
        decay_note = (
            f", and schedule.decay_ratio {schedule.decay_ratio:g} is the last {decay_steps}"
            if schedule.name == "wsd"
            else ""
        )
        warmup_option = "warmup_steps" if schedule.warmup_steps else "warmup_ratio"
        raise ArgumentError(
            f"TG-TRAIN-054: schedule.{warmup_option} is {getattr(schedule, warmup_option)}{decay_note}, but the run "
            f"has only {steps} optimizer steps. It would never train at optimizer.lr. Shorten the warm-up, or train "
            "for more steps."
        )
    return steps


def check_rates(path: Path, schedule: Schedule, steps: int | None, before: Any, taken: int) -> None:
    """Reject a resume if the learning rates of the steps already done would have been different."""
    total = total_schedule_steps(schedule, steps)
    if total is None or total == before:
        return
    shared_steps = min(total, before) if type(before) is int else 0
    for step in range(taken):
        if step >= shared_steps or lr_factor(schedule, step, total) != lr_factor(schedule, step, before):
            raise ArgumentError(
                f"TG-TRAIN-055: {path}: the saved run was planned for {before!r:.20} optimizer steps, and this run for "
                f"{total}. Under the schedule '{schedule.name}', step {step + 1} of {taken} would have had another "
                f"learning rate. Use as many steps as before, or start again with another out and model {path}."
            )


def _decay_steps(schedule: Schedule, steps: int) -> int:
    return max(1, round(schedule.decay_ratio * steps))


@dataclass
class EntropyController:
    """The adaptive entropy coefficient.

    Args:
        objective: the objective of the run; if its entropy bonus does not adapt, nothing changes.
        coef: the current coefficient. It applies only if the last entropy is not above the target.
        last: mean entropy of the last optimizer step in nats; infinite before the first step, which gets no bonus.

    >>> from tracegrad.objective import AdaptiveEntropy, EntropyBonus
    >>> from tracegrad.objective import presets
    >>> bonus = EntropyBonus(0.01, masked=False, adapt=AdaptiveEntropy(target=0.5))
    >>> control = EntropyController(replace(presets.DAPO, entropy=bonus))
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
        """Whether the coefficient adapts."""
        return self.objective.entropy is not None and self.objective.entropy.adapt is not None

    def applied(self) -> Objective:
        """Return the objective of the next step."""
        entropy = self.objective.entropy
        if entropy is None or entropy.adapt is None:
            return self.objective
        if self.last > entropy.adapt.target:
            return replace(self.objective, entropy=None)
        return replace(self.objective, entropy=replace(entropy, coef=self.coef))

    def update(self, entropy: ArrayLike, keep: ArrayLike | None = None, all_reduce: AllReduce | None = None) -> None:
        """Update the coefficient with the token entropies of one optimizer step.

        Args:
            entropy: [M] entropies in nats.
            keep: [M] bool, tokens that the rejections keep; used if the bonus is masked. None means all.
            all_reduce: the reduction over the ranks that share the step.
        """
        entropy_bonus = self.objective.entropy
        if entropy_bonus is None or entropy_bonus.adapt is None:
            return
        included = (
            np.asarray(keep, bool) if entropy_bonus.masked and keep is not None else np.ones(np.shape(entropy), bool)
        )
        sums = np.array([np.asarray(entropy, np.float64)[included].sum(), np.count_nonzero(included)])
        total, terms = sums if all_reduce is None else all_reduce(sums, "sum")
        self.last = float(total / max(terms, 1))
        adapt = entropy_bonus.adapt
        increases = self.last <= adapt.target
        self.coef = min(self.coef + adapt.delta, adapt.high) if increases else max(self.coef - adapt.delta, adapt.low)

    def state(self) -> dict[str, float]:
        """Return the state that a checkpoint saves."""
        return {"coef": self.coef, "last": self.last} if self.adapts else {}

    def restore(self, state: Mapping[str, float]) -> None:
        """Restore the state that `state` returned."""
        self.coef, self.last = state.get("coef", self.coef), state.get("last", self.last)
