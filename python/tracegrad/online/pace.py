"""How many groups may be begun ahead of the trainer. What is begun is never dropped, however late it finishes.

A function of counts alone. Called by the collector before each group.
"""

from dataclasses import dataclass
from typing import Protocol

from tracegrad.errors import ArgumentError


class Bound(Protocol):
    """What says how many groups may be begun."""

    @property
    def groups(self) -> int:
        """That are wanted at once."""
        ...

    @property
    def most(self) -> int:
        """That are taken at once."""
        ...

    def allowed(self, taken: int, dull: int) -> int:
        """That may have been begun, when so many steps are done and so many groups teach nothing."""
        ...


@dataclass(frozen=True)
class Pace:
    """The bound on groups.

    >>> pace = Pace(groups=16, steps_ahead=1, refill=3)
    >>> pace.allowed(taken=0, dull=0), pace.allowed(taken=2, dull=0), pace.allowed(taken=0, dull=5)
    (32, 64, 37)

    Args:
        groups: whose rewards differ, in one optimizer step.
        steps_ahead: steps whose groups may be begun before they are needed; 0 plays and trains in turns.
        refill: a step is given up to `refill` times as many groups, where the rewards of some are equal.
        steps: of the run; for none after them is played.
    """

    groups: int
    steps_ahead: int = 1
    refill: int = 3
    steps: int = 1 << 31

    def __post_init__(self) -> None:
        for name, least in (("groups", 1), ("steps_ahead", 0), ("refill", 1)):
            if getattr(self, name) < least:
                raise ArgumentError(
                    f"online.{name} is {getattr(self, name)}. Nothing could be played. It must be at least {least}."
                )

    @property
    def most(self) -> int:
        """Groups of one step, those with equal rewards among them."""
        return self.groups * self.refill

    def allowed(self, taken: int, dull: int) -> int:
        """Groups that may have been begun since the run began.

        Args:
            taken: steps that are done, their weights pushed.
            dull: finished groups whose rewards are equal or unknown.
        """
        steps = min(self.steps_ahead + taken + 1, self.steps)
        return steps * self.groups + min(dull, steps * (self.most - self.groups))
