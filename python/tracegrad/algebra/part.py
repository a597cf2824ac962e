"""`Part`, the common base of gates, weights, penalties and shifts.

An objective asks its parts what they read and need; its code has no list of their types. The defaults are those of a
part that reads its own term alone. `core` gives the plain values from which the Rust core evaluates a detached part.
"""

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
        """True where a field, or a field of a field, is "microbatch": a statistic of the terms evaluated together."""
        return any("microbatch" in (value, getattr(value, "scope", None)) for value in vars(self).values())

    @property
    def reach(self) -> str:
        """Why its value depends on other traces, by more than integers known before the step; "" where it does not."""
        return ""

    def ratios(self) -> Sequence[tuple[Ratio, Level]]:
        """The ratios that it reads, each with its level: by default its field `ratio` at its field `level`."""
        ratio = getattr(self, "ratio", None)
        return [] if ratio is None else [(ratio, getattr(self, "level", TOKEN))]

    def check(self, objective: Whole) -> None:
        """Raises for an objective in which it would have no effect, or another effect than its fields say."""

    def core(self) -> tuple[Any, ...]:
        """Its fields as plain numbers, strings and tuples, from which the Rust core evaluates it."""
        raise NotImplementedError


def core_of(name: str, part: Any) -> Any:
    """`part.core()` of a detached part; raises for a class of your own, whose formula the core does not know."""
    if "core" not in vars(type(part)):
        raise ArgumentError(
            f"{name} is a {type(part).__name__}, and no evaluator knows its formula: what is known before the step the "
            "core evaluates, and it would compute another in its place. Put theta in its ratio, so that its own "
            "formula runs, or teach the core (docs/extending.md)."
        )
    return part.core()
