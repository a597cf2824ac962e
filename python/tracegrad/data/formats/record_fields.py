"""What adapters hold records of strangers against: types, lengths, and how much is made of one. No form is known here.

What does not fit is refused by `Unfit`, which the reader makes a bad record with its file and line.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from tracegrad.data import json_path
from tracegrad.data.arrow import to_json
from tracegrad.data.field_map import MOST_BYTES, Unfit
from tracegrad.errors import TracegradError

FAILED = "failed_call"
_WRONG = (TypeError, ValueError, LookupError, AttributeError, ArithmeticError, RecursionError)
_CURE = "Correct the record, or leave such ones out: --on-error skip"


@contextmanager
def fitting(name: str) -> Iterator[None]:
    """Refuses the record where the code within stumbles over a value.

    Raises:
        Unfit: in place of what Python raises for values of other types.
    """
    try:
        yield
    except (Unfit, TracegradError):
        raise
    except _WRONG as error:
        found = f"it cannot be read as {name}: {type(error).__name__}: {str(error)[:120]}"
        raise Unfit((found, "A value in it is none that this form has there", _CURE)) from error


def listed(value: Any, name: str) -> list[Any]:
    """A list, empty for null.

    Raises:
        Unfit: for anything else.
    """
    if value is None or isinstance(value, list):
        return value or []
    raise Unfit((f"`{name}` is {json_path.kind(value)}, not a list", "What it says would be lost", _CURE))


def unequal(name: str, value: Any, count: int) -> Unfit:
    """The refusal of a value beside several answers that has not one for each."""
    has = f"a list of {len(value):,}" if isinstance(value, list) else json_path.kind(value)
    found = f"`{name}` is {has}, and there are {count:,} answers, each of which needs its own"
    return Unfit((found, "Which of it is whose would be guessed", f"Write one for each answer. {_CURE}"))


def bounded(count: int, shared: Any) -> None:
    """Holds the bytes of what each of so many traces has again within `MOST_BYTES`.

    Raises:
        Unfit: if they are more.
    """
    if count > 1 and (size := len(to_json(shared))) * count > MOST_BYTES:
        raise too_much(f"{count:,} traces, each with the {size:,} bytes that they share")


def failed_call(record: Mapping[str, Any], why: str) -> dict[str, Any]:
    """What the core reads as a failed call of a log, whose own words those of the error are."""
    name = {"id": record["id"]} if isinstance(record.get("id"), str) else {}
    why = why.partition("Traceback (most recent call last)")[0].rstrip(". \n")
    told = {"call_type": FAILED, "model_parameters": {}, "status": "failure", "error_str": why}
    return {**name, **told, "messages": [], "response": {}}


def is_failed(record: Mapping[str, Any]) -> bool:
    """Whether a record is what `failed_call` makes."""
    return record.get("call_type") == FAILED


def too_much(what: str) -> Unfit:
    """The refusal of a record of which more would be made than is held."""
    found = f"it would become {what}, beyond {MOST_BYTES:,} bytes in all"
    return Unfit((found, "So much of one record is not held in memory", "Write a record for each answer"))
