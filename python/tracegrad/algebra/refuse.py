"""Checks of fields that the types of the algebra share: valid names, effective options, bounds in the right convention.

Each raises ArgumentError, which names the field. No type is defined here.
"""

from tracegrad.errors import ArgumentError


def one_of(name: str, value: object, valid: tuple[object, ...]) -> None:
    if value not in valid:
        raise ArgumentError(f"{name} is {value!r}. It must be one of {', '.join(map(repr, valid))}.")


def kind_of(name: str, value: object, kind: type) -> None:
    """Refuses a value of another type: no evaluator knows its formula."""
    if not isinstance(value, kind):
        raise ArgumentError(
            f"{name} is a {type(value).__name__}, and no evaluator knows its formula. Another would be computed in its "
            f"place, or none. Take a {kind.__name__}, or a frozen dataclass of your own below it (docs/extending.md)."
        )


def no_effect(idle: bool, name: str, why: str) -> None:
    if idle:
        raise ArgumentError(f"{name} has no effect here: {why}. Leave it out.")


def rising(name: str, low: float, high: float) -> None:
    if not low <= high:
        raise ArgumentError(f"{name} has low {low} above high {high}. Nothing lies between.")


def around(name: str, low: float, high: float, centre: float, cure: str) -> None:
    """Bounds of a quantity that is `centre` where two policies agree."""
    rising(name, low, high)
    if not low <= centre <= high:
        raise ArgumentError(
            f"{name} has bounds [{low:g}, {high:g}], and terms on which the policies agree lie at {centre:g}, outside. "
            f"{cure}"
        )


def around_one(name: str, low: float, high: float) -> None:
    """Bounds of a ratio: not negative, and 1 lies between them."""
    if low < 0:
        raise ArgumentError(
            f"{name}.low is {low:g}, and no ratio is negative. Bounds are ratios, not distances from 1: write 1 - 0.2."
        )
    around(name, low, high, 1.0, "Bounds are ratios, not distances from 1: write 0.8 and 1.28 for 0.2 and 0.28.")


def positive(name: str, value: float, cure: str = "") -> None:
    if not 0 < value < float("inf"):
        raise ArgumentError(f"{name} is {value}. It must be positive{'; ' + cure if cure else ''}.")
