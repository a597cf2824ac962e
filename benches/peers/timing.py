"""The time of a function: the fastest of some rounds, by the wall and by this process's own CPU time."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass
class Took:
    """Seconds of the fastest round by the wall, and of the cheapest by the processor; the result of the last one."""

    seconds: float
    cpu_s: float
    result: Any


def fastest(run: Callable[..., Any], rounds: int, ready: Callable[[], Any] | None = None) -> Took:
    """Runs a thing `rounds` times; give one round more than you mean if a first one warms caches.

    Args:
        run: the timed function.
        rounds: how often.
        ready: called before each round, off the clock; its result is the argument of `run`.
    """
    found = Took(float("inf"), float("inf"), None)
    for _ in range(rounds):
        found.result = None
        given = [ready()] if ready else []
        cpu, wall = time.process_time(), time.perf_counter()
        result = run(*given)
        found.seconds = min(found.seconds, time.perf_counter() - wall)
        found.cpu_s = min(found.cpu_s, time.process_time() - cpu)
        found.result = result
    return found
