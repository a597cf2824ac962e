"""Refusals that the types of the algebra share: a name that is not on the list, an option without effect, empty bounds.

No type is defined here; each raises ArgumentError with the field by its name.
"""

from __future__ import annotations

from tracegrad.errors import ArgumentError


def one_of(name: str, value: object, valid: tuple[object, ...]) -> None:
    if value not in valid:
        raise ArgumentError(f"{name} is {value!r}. It must be one of {', '.join(map(repr, valid))}.")


def no_effect(found: bool, name: str, why: str) -> None:
    if found:
        raise ArgumentError(f"{name} has no effect here: {why}. Leave it out.")


def rising(name: str, low: float, high: float) -> None:
    if not low <= high:
        raise ArgumentError(f"{name} has low {low} above high {high}. Nothing lies between.")
