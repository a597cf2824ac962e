"""What every gate, weight, penalty and shift says of itself, with the defaults of one that looks at its own term alone.

The objective asks its parts: no list of types stands anywhere. Which of them the core evaluates, `core` says.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tracegrad.algebra.ratio import TOKEN, Level, Ratio
from tracegrad.algebra.whole import Whole
from tracegrad.errors import ArgumentError


class Part:
    """A piece of an objective."""

    takes_entropy = False
    """Whether it reads the entropy of the policy being trained."""

    @property
    def detached(self) -> bool:
        """True where it is known before the step, so that `tracegrad.correction` evaluates it."""
        taken = self.ratios()
        return bool(taken) and all(ratio.detached for ratio, _ in taken)

    @property
    def microbatch(self) -> bool:
        """True for a statistic of the terms evaluated together, which a field of it, or of a field, says aloud."""
        return any("microbatch" in (value, getattr(value, "scope", None)) for value in vars(self).values())

    @property
    def reach(self) -> str:
        """Why other traces count in it, more than by an integer that is known before; "" where they do not."""
        return ""

    def ratios(self) -> Sequence[tuple[Ratio, Level]]:
        """What it takes, at which levels: its field `ratio` at its field `level`."""
        ratio = getattr(self, "ratio", None)
        return [] if ratio is None else [(ratio, getattr(self, "level", TOKEN))]

    def check(self, objective: Whole) -> None:
        """Refuses an objective in which it has no effect or another one than it says."""

    def core(self) -> tuple[Any, ...]:
        """Its plain form for the core."""
        raise NotImplementedError


def core_of(name: str, part: Any) -> Any:
    """The plain form of what is known before the step; a type derived from one that the core knows is refused.

    Raises:
        ArgumentError: for a type of your own.
    """
    if "core" not in vars(type(part)):
        raise ArgumentError(
            f"{name} is a {type(part).__name__}, and no evaluator knows its formula: what is known before the step the "
            "core evaluates, and it would compute another in its place. Put theta in its ratio, so that its own "
            "formula runs, or teach the core (docs/extending.md)."
        )
    return part.core()
