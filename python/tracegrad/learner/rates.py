"""The learning rate of each optimizer step: a function of its number and of how many there are.

Nothing here is state, so a run that resumes at step n has the rates of the uninterrupted one. No torch. Called by the
run and its preparation.
"""

import math
from pathlib import Path
from typing import Any

from tracegrad.config import Schedule
from tracegrad.errors import ArgumentError


def share(schedule: Schedule, step: int, steps: int | None = None) -> float:
    """What share of the full learning rate optimizer step `step`, from 0, is taken with.

    With p the place of the step between the warm-up and the end, from 0 to 1, before the floor f: 1 - p for linear,
    (1 + cos(pi p)) / 2 for cosine, and the same of the place in the last `decay` of all steps for wsd; with it
    f + (1 - f) times that.

    >>> [share(Schedule("linear", warmup_steps=2), step, 6) for step in range(6)]
    [0.0, 0.5, 1.0, 0.75, 0.5, 0.25]
    """
    warm, floor = schedule.warmup_steps, schedule.floor
    total = in_all(schedule, steps)
    if total is not None and step >= total:
        raise ArgumentError(
            f"step {step + 1} of a schedule of {total} steps: past the end of '{schedule.name}' there is no learning "
            "rate. Tell the run how many steps it takes, or leave schedule.name out."
        )
    if step < warm:
        risen = step / warm
        return floor + (1 - floor) * risen if schedule.name == "wsd" else risen
    if total is None:
        return 1.0
    late = _decay_steps(schedule, total) if schedule.name == "wsd" else total - warm
    place = (step - (total - late)) / max(late, 1)
    if place <= 0:
        return 1.0
    down = 1 - place if schedule.name == "linear" else 0.5 * (1 + math.cos(math.pi * place))
    return floor + (1 - floor) * down


def in_all(schedule: Schedule, steps: int | None) -> int | None:
    """How many steps the schedule goes over; None for one that does not ask."""
    if schedule.name == "constant":
        return None
    if steps is None:
        raise ArgumentError(
            f"schedule.name is '{schedule.name}', and how many optimizer steps the run takes is not known. What the "
            "learning rate of a step is depends on it. Pass Run(..., steps=N), or leave schedule.name out."
        )
    late = _decay_steps(schedule, steps) if schedule.name == "wsd" else 1
    if schedule.warmup_steps + late > steps:
        ends = f", and schedule.decay {schedule.decay:g} is the last {late}" if schedule.name == "wsd" else ""
        raise ArgumentError(
            f"schedule.warmup_steps is {schedule.warmup_steps}{ends}, and the run takes {steps} optimizer steps. It "
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
