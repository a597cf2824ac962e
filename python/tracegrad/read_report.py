"""What was read, and what was wrong with it: counts of a reader, and their sum over several."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

FIRST_ERRORS = 5


@dataclass(frozen=True)
class ReadReport:
    """What was read, and what was wrong with it.

    Args:
        records: good and bad ones.
        traces: good ones.
        formats: good ones by the form they were read in: how many, and the sign by which it was known.
        bad: bad ones, left out or written aside.
        reasons: bad ones by reason, such as `not_json`, `wrong_type`, `stream`.
        errors: the first five errors in full.
        generations: sampling calls in the good ones.
        tokens: sampled tokens that they list.
        missing_logprobs: logprobs that were null, NaN or -inf; they are NaN.
        invalid_logprobs: logprobs that were positive or exactly -9999.0; they are NaN.
        unused_choices: choices of responses that name none, where the first was taken.
        bytes: of records, after decompression.
    """

    records: int = 0
    traces: int = 0
    formats: Mapping[str, tuple[int, str]] = field(default_factory=dict)
    bad: int = 0
    reasons: Mapping[str, int] = field(default_factory=dict)
    errors: Sequence[str] = ()
    generations: int = 0
    tokens: int = 0
    missing_logprobs: int = 0
    invalid_logprobs: int = 0
    unused_choices: int = 0
    bytes: int = 0


def summed(left: ReadReport, right: ReadReport) -> ReadReport:
    """The counts of two readers together."""

    def add(one: Any, other: Any) -> dict[str, Any]:
        return {key: _plus(one.get(key), other.get(key)) for key in [*one, *(key for key in other if key not in one)]}

    counts = {
        name: getattr(left, name) + getattr(right, name) for name, value in vars(left).items() if isinstance(value, int)
    }
    return replace(
        left,
        **counts,
        formats={name: found for name, found in add(left.formats, right.formats).items() if found[0]},
        reasons=add(left.reasons, right.reasons),
        errors=(*left.errors, *right.errors)[:FIRST_ERRORS],
    )


def _plus(one: Any, other: Any) -> Any:
    if one is None or other is None:
        return other if one is None else one
    return (one[0] + other[0], one[1]) if isinstance(one, tuple) else one + other
