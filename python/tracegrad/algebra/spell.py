"""An objective as the Python expression that makes it, numbers told and other defaults left out.

For documents and for copying. Called by `tracegrad.presets.describe`.
"""

from __future__ import annotations

from dataclasses import MISSING, Field, fields, is_dataclass
from typing import Any


def spell(value: Any) -> str:
    """The expression: `eval` of it under the names of `tracegrad.algebra` is equal to the value.

    >>> from tracegrad.algebra import Clip, Objective, Ratio, Reduce
    >>> spell(Objective(Clip(0.2, 0.28), Ratio("theta", "old"), reduce=Reduce("trace", "mean")))
    'Objective(Clip(0.2, 0.28), Ratio("theta", "old"), reduce=Reduce("trace", "mean"))'
    """
    if isinstance(value, tuple):
        inner = ", ".join(map(spell, value))
        return f"({inner},)" if len(value) == 1 else f"({inner})"
    if not is_dataclass(value):
        return f'"{value}"' if isinstance(value, str) else repr(value)
    told, skipped = [], False
    for field in fields(value):
        given = getattr(value, field.name)
        if _is_default(field, given):
            skipped = True
            continue
        told.append(f"{field.name}={spell(given)}" if skipped else spell(given))
    return f"{type(value).__name__}({', '.join(told)})"


def _is_default(field: Field[Any], given: Any) -> bool:
    return field.default is not MISSING and given == field.default and not isinstance(given, float)
