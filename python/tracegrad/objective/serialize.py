"""Write an objective as source text and read it back, and change its fields by dotted names."""

import ast
from collections.abc import Mapping
from dataclasses import MISSING, fields, is_dataclass
from typing import Any

from tracegrad.config import dotted_keys
from tracegrad.errors import ArgumentError
from tracegrad.objective.objective import Objective, with_beta, with_entropy, with_kl


def override(objective: Objective, name: str, value: object) -> Objective:
    """The objective with one field changed by its dotted name, as `--objective.surrogate.high 0.28` does.

    >>> from tracegrad.objective import Clip, Ratio
    >>> override(Objective(Clip(), Ratio("theta", "old")), "surrogate.high", "0.28").surrogate.high
    0.28
    >>> override(Objective(Clip(), Ratio("theta", "old")), "surrogate.hihg", "0.28")  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    ...
    tracegrad.ArgumentError: objective.surrogate.hihg is no option. ... Did you mean objective.surrogate.high?
    """
    return override_all(objective, {name: value})


def override_all(objective: Objective, changes: Mapping[str, object]) -> Objective:
    """The objective with several fields changed at once, checked when all are in place.

    Args:
        changes: dotted names to values; a text is read as its field's type ("none" for None). Entries of a tuple go by
            their index (`weights.0.shape.high`), "none" empties it; `kl` is the coefficient of `with_kl`, `beta`
            that of `with_beta`, `entropy` that of `with_entropy`.

    Raises:
        ArgumentError: for an unknown name, with the nearest valid one; for a value of the wrong type; for a
            combination that the algebra refuses.
    """
    added = {"kl": with_kl, "beta": with_beta, "entropy": with_entropy}
    changed = dotted_keys.changed(
        objective, ((name, value) for name, value in changes.items() if name not in added), at="objective", finite=False
    )
    for name, add in added.items():
        if name in changes:
            changed = add(changed, dotted_keys.changed({name: 0.0}, [(name, changes[name])], at="objective")[name])
    return changed


_LONGEST = 10_000


def spell(value: Any) -> str:
    """The expression: `eval` of it under the names of `tracegrad.objective` is equal to the value.

    >>> from tracegrad.objective import Clip, Objective, Ratio, Reduce
    >>> spell(Objective(Clip(0.2, 0.28), Ratio("theta", "old"), reduce=Reduce("trace", "mean")))
    'Objective(Clip(0.2, 0.28), Ratio("theta", "old"), reduce=Reduce("trace", "mean"))'
    """
    if isinstance(value, tuple):
        inner = ", ".join(map(spell, value))
        return f"({inner},)" if len(value) == 1 else f"({inner})"
    if not is_dataclass(value):
        return f'"{value}"' if isinstance(value, str) else repr(value).replace("inf", "1e999")
    arguments, skipped = [], False
    for field in fields(value):
        given = getattr(value, field.name)
        if field.default is not MISSING and given == field.default and not isinstance(given, float):
            skipped = True
            continue
        arguments.append(f"{field.name}={spell(given)}" if skipped else spell(given))
    return f"{type(value).__name__}({', '.join(arguments)})"


def unspell(text: str, classes: Mapping[str, Any]) -> Any:
    """The value that `spell` wrote: calls of `classes` by their names, on numbers, texts and tuples, and nothing else.

    Raises:
        ArgumentError: if the text is no such expression, or a class refuses what it is called with.

    >>> from tracegrad import objective
    >>> unspell("Reduce('trace', 'sum', norm=2.0)", vars(objective)).norm
    2.0
    """
    try:
        if len(text) > _LONGEST:
            raise ValueError(f"it has {len(text):,} characters")
        return _value(ast.parse(text.strip(), mode="eval").body, classes)
    except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError) as error:
        if isinstance(error, ArgumentError):
            raise
        raise ArgumentError(
            f"{text[:80]!r} is no objective: {str(error)[:200]}. No loss is known. Write it as docs/losses.md does."
        ) from error


def _value(node: ast.expr, classes: Mapping[str, Any]) -> Any:
    if isinstance(node, ast.Tuple):
        return tuple(_value(each, classes) for each in node.elts)
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
        made = classes.get(node.func.id)
        if not is_dataclass(made) or not isinstance(made, type):
            raise ValueError(f"{node.func.id} is no part of an objective")
        named = {each.arg: _value(each.value, classes) for each in node.keywords if each.arg}
        if len(named) < len(node.keywords):
            raise ValueError("** is not taken")
        return made(*(_value(each, classes) for each in node.args), **named)
    return ast.literal_eval(node)
