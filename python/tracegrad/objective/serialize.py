"""Write an objective as source text, parse it again, and change its fields by dotted names."""

import ast
from collections.abc import Mapping
from dataclasses import MISSING, fields, is_dataclass, replace
from typing import Any

from tracegrad._validation import refuse_without_effect
from tracegrad.config import dotted_keys
from tracegrad.errors import ArgumentError
from tracegrad.objective.objective import Objective, with_beta, with_entropy, with_kl
from tracegrad.objective.ratio import Ratio


def override(objective: Objective, name: str, value: object) -> Objective:
    """Return the objective with one field changed by its dotted name, as `--objective.surrogate.high 0.28` does.

    >>> from tracegrad.objective import Clip, Ratio
    >>> override(Objective(Clip(), Ratio("theta", "old")), "surrogate.high", "0.28").surrogate.high
    0.28
    >>> override(Objective(Clip(), Ratio("theta", "old")), "ratio.dne", "old")  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    ...
    tracegrad.ArgumentError: TG-CONFIG-001: objective.ratio.dne is not an option. Did you mean objective.ratio.den?
    """
    return override_all(objective, {name: value})


def override_all(objective: Objective, changes: Mapping[str, object]) -> Objective:
    """Return the objective with several fields changed at once; it is checked after the last change.

    Args:
        changes: dotted names to values. Text is parsed as its field's type ("none" for None). Entries of a tuple are
            addressed by their index (`weights.0.transform.high`), and "none" empties the tuple. `kl`, `beta` and
            `entropy` are the coefficients of `with_kl`, `with_beta` and `with_entropy`. `kl_over` is the field `over`
            of the penalties on theta/ref.

    Raises:
        ArgumentError: for an unknown name, with the nearest valid one; for a value of the wrong type; for an invalid
            combination.

    >>> from tracegrad.objective import presets
    >>> changed = override_all(presets.DAPO, {"surrogate.high": "0.3", "weights": "none", "kl": 0.04})
    >>> changed.surrogate.high, changed.weights, changed.penalties[0].coef
    (0.3, (), 0.04)
    """
    added = {"kl": with_kl, "beta": with_beta, "entropy": with_entropy}
    result = dotted_keys.set_values(
        objective,
        ((name, value) for name, value in changes.items() if name not in (*added, "kl_over")),
        at="objective",
        finite=False,
    )
    for name, add in added.items():
        if name in changes:
            result = add(result, dotted_keys.set_values({name: 0.0}, [(name, changes[name])], at="objective")[name])
    if "kl_over" in changes:
        result = _with_kl_over(result, changes["kl_over"])
    return result


def _with_kl_over(objective: Objective, over: Any) -> Objective:
    pair = Ratio("theta", "ref")
    refuse_without_effect(
        all(penalty.ratio != pair for penalty in objective.penalties),
        "objective.kl_over",
        "the objective has no penalty on theta/ref",
    )
    penalties = [replace(part, over=over) if part.ratio == pair else part for part in objective.penalties]
    return replace(objective, penalties=tuple(penalties))


_LONGEST = 10_000


def to_source(value: Any) -> str:
    """Return source text of a value: `eval` of it under the names of `tracegrad.objective` equals the value.

    >>> from tracegrad.objective import Clip, Objective, Ratio, Reduce
    >>> to_source(Objective(Clip(0.2, 0.28), Ratio("theta", "old"), reduce=Reduce("trace", "mean")))
    'Objective(Clip(0.2, 0.28), Ratio("theta", "old"), reduce=Reduce("trace", "mean"))'
    """
    if isinstance(value, tuple):
        inner = ", ".join(map(to_source, value))
        return f"({inner},)" if len(value) == 1 else f"({inner})"
    if not is_dataclass(value):
        return f'"{value}"' if isinstance(value, str) else repr(value).replace("inf", "1e999")
    arguments, skipped = [], False
    for field in fields(value):
        argument = getattr(value, field.name)
        if field.default is not MISSING and argument == field.default and not isinstance(argument, float):
            skipped = True
            continue
        arguments.append(f"{field.name}={to_source(argument)}" if skipped else to_source(argument))
    return f"{type(value).__name__}({', '.join(arguments)})"


def from_source(text: str, classes: Mapping[str, Any]) -> Any:
    """Return the value that `to_source` wrote.

    Only calls of `classes` by their names, numbers, strings and tuples are allowed.

    Raises:
        ArgumentError: if the text is not such an expression, or a class rejects its arguments.

    >>> from tracegrad import objective
    >>> from_source("Reduce('trace', 'sum', norm=2.0)", vars(objective)).norm
    2.0
    """
    try:
        if len(text) > _LONGEST:
            raise ValueError(f"it has {len(text):,} characters")
        return _evaluate(ast.parse(text.strip(), mode="eval").body, classes)
    except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError) as error:
        if isinstance(error, ArgumentError):
            raise
        raise ArgumentError(
            f"TG-OBJ-036: {text[:80]!r} is not an objective: {str(error)[:200]}. See docs/reference/losses.md "
            f"for the notation."
        ) from error


def _evaluate(node: ast.expr, classes: Mapping[str, Any]) -> Any:
    if isinstance(node, ast.Tuple):
        return tuple(_evaluate(item, classes) for item in node.elts)
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
        constructor = classes.get(node.func.id)
        if not is_dataclass(constructor) or not isinstance(constructor, type):
            raise ValueError(f"{node.func.id} is not a component of an objective")
        keywords = {item.arg: _evaluate(item.value, classes) for item in node.keywords if item.arg}
        if len(keywords) < len(node.keywords):
            raise ValueError("** is not allowed")
        return constructor(*(_evaluate(item, classes) for item in node.args), **keywords)
    return ast.literal_eval(node)
