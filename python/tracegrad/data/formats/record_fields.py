"""Check untrusted records in adapters: types, list lengths, and the size of the results. Independent of any form.

A check that fails raises `BadValueError`; the reader then counts a bad record, with its file and line.
"""

from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from tracegrad.data import json_path
from tracegrad.data.arrow import to_json
from tracegrad.data.field_map import BadValueError
from tracegrad.data.read_options import MOST_BYTES
from tracegrad.errors import TracegradError

FAILED = "failed_call"
_WRONG = (TypeError, ValueError, LookupError, AttributeError, ArithmeticError, RecursionError)
_FIX = 'Correct the record, or leave such ones out: on_error="skip"'


class Converted(list[dict[str, Any]]):
    """Converted records. `left_out` counts the parts of the original that are in none of them, by reason."""

    def __init__(self) -> None:
        super().__init__()
        self.left_out: Counter[str] = Counter()


class FileGroup(str):
    """Name of a group that only records of the same file have. The reader adds the file's name."""


@dataclass
class Form:
    """The form of records that a block of code reads."""

    name: str


@contextmanager
def refuse_on_error(name: str) -> Iterator[Form]:
    """Refuse the record if the code in the `with` block fails because of a value in it.

    Args:
        name: name of the form, for the message. The block may change it.

    Raises:
        BadValueError: instead of the exceptions that Python raises for values of a wrong type.
    """
    form = Form(name)
    try:
        yield form
    except (BadValueError, TracegradError):
        raise
    except _WRONG as error:
        problem = f"it cannot be read as {form.name}: {type(error).__name__}: {str(error)[:120]}"
        raise BadValueError((problem, "A value in it is none that this form has there", _FIX)) from error


def require_list(value: Any, name: str) -> list[Any]:
    """Return a list, or an empty list for null.

    Raises:
        BadValueError: if the value is neither.
    """
    if value is None or isinstance(value, list):
        return value or []
    raise BadValueError(
        (f"`{name}` is {json_path.describe_type(value)}, not a list", "What it says would be lost", _FIX)
    )


def length_refusal(name: str, value: Any, count: int, things: str = "answers") -> BadValueError:
    """Return the refusal of a field that does not have one value for each of `count` answers (or other `things`)."""
    description = f"a list of {len(value):,}" if isinstance(value, list) else json_path.describe_type(value)
    problem = f"`{name}` is {description}, and there are {count:,} {things}, each of which needs its own"
    fix = f"Write one for each of the {things}. {_FIX}"
    return BadValueError((problem, "Which of it is whose would be guessed", fix))


def check_size(count: int, shared: Any) -> None:
    """Check that `count` copies of the shared fields fit in `MOST_BYTES`.

    Raises:
        BadValueError: if they do not.
    """
    if count > 1 and (size := len(to_json(shared))) * count > MOST_BYTES:
        raise size_refusal(f"{count:,} traces, each with the {size:,} bytes that they share")


def failed_call(record: Mapping[str, Any], why: str) -> dict[str, Any]:
    """Return a record that the core reads as a failed call, with the error message `why`."""
    name = {"id": record["id"]} if isinstance(record.get("id"), str) else {}
    why = why.partition("Traceback (most recent call last)")[0].rstrip(". \n")
    fields = {"call_type": FAILED, "model_parameters": {}, "status": "failure", "error_str": why}
    return {**name, **fields, "messages": [], "response": {}}


def unread_refusal(name: str, value: Any) -> BadValueError:
    """Return the refusal of a record whose response, the field `name`, cannot be read."""
    first = value[0] if isinstance(value, list) and value else value
    keys = f"keys {', '.join(map(str, [*first][:8]))}" if isinstance(first, Mapping) else json_path.describe_type(value)
    what = f"a list of {len(value):,}, {keys}" if isinstance(value, list) else keys
    problem = f"its {name} ({what}) is in no form that is read"
    why = "Its other messages are those of its request: they were not sampled by this call"
    return BadValueError((problem, why, "See docs/reference/trace-format.md for the responses that are read"))


def is_failed(record: Mapping[str, Any]) -> bool:
    """Return whether a record was made by `failed_call`."""
    return record.get("call_type") == FAILED


def size_refusal(what: str) -> BadValueError:
    """Return the refusal of a record whose results would exceed `MOST_BYTES`."""
    problem = f"it would become {what}, beyond {MOST_BYTES:,} bytes in all"
    return BadValueError((problem, "So much of one record is not held in memory", "Write a record for each answer"))
