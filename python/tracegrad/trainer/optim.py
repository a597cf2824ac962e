"""Compute the learning rate and the entropy coefficient of each step; `setup` makes the optimizer.

The four common schedules are computed here so that planning a run needs no torch; the others, and all with arguments,
are those of `transformers.get_scheduler`.
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

_OWN = {"constant": "constant_with_warmup", "linear": "linear", "cosine": "cosine", "wsd": "warmup_stable_decay"}
"""The schedules that are computed here, and transformers' names of them."""


def share(schedule: Schedule, step: int, steps: int | None = None, lr: float = 1.0) -> float:
    """What share of the full learning rate optimizer step `step`, from 0, is taken with.

    With p the place of the step between the warm-up and the end, from 0 to 1, before the floor f: 1 - p for linear,
    (1 + cos(pi p)) / 2 for cosine, and the same of the place in the last `decay` of all steps for wsd; with it
    f + (1 - f) times that. The other schedules, and all with `schedule.kwargs`, are transformers' own.

    Args:
        lr: the full rate, which arguments such as lr_end are compared with.

    >>> [share(Schedule("linear", warmup_steps=2), step, 6) for step in range(6)]
    [0.0, 0.5, 1.0, 0.75, 0.5, 0.25]
    """
    floor, total = schedule.floor, in_all(schedule, steps)
    warm = warmup_of(schedule, total)
    if total is not None and step >= total:
        raise ArgumentError(
            f"step {step + 1} of a schedule of {total} steps: past the end of '{schedule.name}' there is no learning "
            "rate. Tell the run how many steps it takes, or leave schedule.name out."
        )
    if schedule.name not in _OWN or schedule.kwargs:
        return _theirs(_OWN.get(schedule.name, schedule.name), warm, total, schedule.kwargs, lr)(step)
    if step < warm:
        risen = step / warm
        return floor + (1 - floor) * risen if schedule.name == "wsd" else risen
    if total is None or schedule.name == "constant":
        return 1.0
    late = _decay_steps(schedule, total) if schedule.name == "wsd" else total - warm
    place = (step - (total - late)) / max(late, 1)
    if place <= 0:
        return 1.0
    down = 1 - place if schedule.name == "linear" else 0.5 * (1 + math.cos(math.pi * place))
    return floor + (1 - floor) * down


def warmup_of(schedule: Schedule, total: int | None) -> int:
    """Return the optimizer steps over which the rate rises."""
    return (
        math.ceil(schedule.warmup_ratio * total)
        if total is not None and schedule.warmup_ratio
        else (schedule.warmup_steps)
    )


@lru_cache(8)
def _theirs(name: str, warm: int, total: int | None, kwargs: str, lr: float) -> Callable[[int], float]:
    """Step to share of the rate, by transformers' scheduler of this name."""
    try:
        import torch
        from transformers import get_scheduler
    except ImportError as error:
        raise ArgumentError(
            f"schedule.name {name} is transformers', and that package is not installed. No rate is known. "
            "pip install 'tracegrad[train]'."
        ) from error
    try:
        optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=lr)
        more = {"scheduler_specific_kwargs": json.loads(kwargs)} if kwargs else {}
        found = get_scheduler(name, optimizer, warm, total, **more)
        return found.lr_lambdas[0]  # type: ignore[union-attr]
    except (TypeError, ValueError, AttributeError) as error:
        raise ArgumentError(
            f"schedule.name {name!r} with schedule.kwargs {kwargs!r:.200}: transformers refuses it: {error}. No rate "
            "is known. Write its arguments as a JSON object."
        ) from error


def in_all(schedule: Schedule, steps: int | None) -> int | None:
    """How many steps the schedule goes over; None for one that does not ask."""
    if schedule.name == "constant" and not schedule.warmup_ratio:
        return None
    if steps is None:
        raise ArgumentError(
            f"schedule.name is '{schedule.name}', and how many optimizer steps the run takes is not known. What the "
            "learning rate of a step is depends on it. Pass Run(..., steps=N), or leave schedule.name out."
        )
    late = _decay_steps(schedule, steps) if schedule.name == "wsd" else 1
    warm = warmup_of(schedule, steps)
    if warm + late > steps:
        ends = f", and schedule.decay {schedule.decay:g} is the last {late}" if schedule.name == "wsd" else ""
        told = "warmup_steps" if schedule.warmup_steps else "warmup_ratio"
        raise ArgumentError(
            f"schedule.{told} is {getattr(schedule, told)}{ends}, and the run takes {steps} optimizer steps. It "
            "would never train at optimizer.lr. Warm up for fewer, or take more steps."
        )
    return steps


def check_rates(path: Path, schedule: Schedule, steps: int | None, before: Any, taken: int) -> None:
    """Refuses to go on where the steps that were taken would have had other learning rates."""
    total = in_all(schedule, steps)
    if total is None or total == before:
        return
    known = min(total, before) if type(before) is int else 0
    for step in range(taken):
        if step >= known or share(schedule, step, total) != share(schedule, step, before):
            raise ArgumentError(
                f"{path}: its run was to take {before!r:.20} optimizer steps, and this one takes {total}. Under the "
                f"schedule '{schedule.name}' step {step + 1} of {taken} would have had another learning rate. Take "
                f"as many steps as before, or start anew with another --out and --model {path}."
            )


def _decay_steps(schedule: Schedule, steps: int) -> int:
    return max(1, round(schedule.decay * steps))


@dataclass
class Control:
    """What adapts from step to step.

    Args:
        objective: the one that was asked for; without an adapting bonus nothing here changes anything.
        coef: the coefficient now, as it is before the target decides whether it applies.
        last: mean entropy of the last optimizer step, nats; infinite before the first, which takes no bonus.

    >>> from tracegrad.objective import Adapt, Entropy
    >>> from tracegrad.objective import presets
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
