"""Fields of an objective by their dotted names, as a command line and a TOML file write them.

No field is listed here: names and types are those of the dataclasses.
"""

from __future__ import annotations

import contextlib
import difflib
from collections.abc import Mapping
from dataclasses import fields, is_dataclass, replace
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from tracegrad.algebra.loss import Objective, with_beta, with_entropy, with_kl
from tracegrad.errors import ArgumentError


def override(objective: Objective, name: str, value: object) -> Objective:
    """The objective with one field changed by its dotted name, as `--objective.surrogate.high 0.28` does.

    >>> from tracegrad.algebra import Clip, Ratio
    >>> override(Objective(Clip(), Ratio("theta", "old")), "surrogate.high", "0.28").surrogate.high
    0.28
    >>> override(Objective(Clip(), Ratio("theta", "old")), "surrogate.hihg", "0.28")  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    ...
    tracegrad.ArgumentError: objective.surrogate has no field 'hihg'. Did you mean 'high'? ...
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
    tree: dict[str, Any] = {}
    for name, value in changes.items():
        *path, last = name.split(".")
        branch = tree
        for part in path:
            branch = branch.setdefault(part, {})
            if not isinstance(branch, dict):
                raise ArgumentError(f"objective.{name}: objective.{part} is set as one value already. Leave one out.")
        branch[last] = value
    added = {"kl": with_kl, "beta": with_beta, "entropy": with_entropy}
    coefs = {name: tree.pop(name) for name in added if name in tree and not isinstance(tree[name], Mapping)}
    changed = _rebuild(objective, tree, "objective")
    for name, coef in coefs.items():
        changed = added[name](changed, _read(coef, float, f"objective.{name}"))
    return changed


def _rebuild(node: Any, tree: Mapping[str, Any], where: str) -> Any:
    """`node` with the changes of `tree` below it: a dataclass by field, a tuple by index."""
    if not tree:
        return node
    if isinstance(node, tuple):
        entries = {str(index): entry for index, entry in enumerate(node)}
        _check_names(tree, entries, where)
        return tuple(_rebuild(entry, tree.get(index, {}), f"{where}.{index}") for index, entry in entries.items())
    here = {field.name: getattr(node, field.name) for field in fields(node)}
    _check_names(tree, here, where)
    types = get_type_hints(type(node))
    changes = {}
    for name, change in tree.items():
        inner = f"{where}.{name}"
        if isinstance(here[name], tuple) and change in ("none", ()):
            changes[name] = ()
        elif isinstance(here[name], tuple) or is_dataclass(here[name]):
            if not isinstance(change, Mapping):
                raise ArgumentError(
                    f"{inner} is a {type(here[name]).__name__}, not one value. Set its fields, {inner}.x."
                )
            changes[name] = _rebuild(here[name], change, inner)
        elif isinstance(change, Mapping):
            raise ArgumentError(f"{inner} is {here[name]!r} and has no fields. Set it as one value.")
        else:
            changes[name] = _read(change, types[name], inner)
    return replace(node, **changes)


def _check_names(tree: Mapping[str, Any], valid: Mapping[str, Any], where: str) -> None:
    for name in tree:
        if name not in valid:
            near = difflib.get_close_matches(name, valid, 1, 0.5)
            hint = f" Did you mean {near[0]!r}?" if near else ""
            names = ", ".join(valid) or "nothing"
            raise ArgumentError(f"{where} has no field {name!r}.{hint} It has {names}.")


def _read(value: object, expected: Any, where: str) -> Any:
    """`value`, or the text of it, as one of the types a field may have."""
    kinds = get_args(expected) if get_origin(expected) in (Union, UnionType) else (expected,)
    if isinstance(value, str):
        text = value.strip()
        if type(None) in kinds and text.lower() == "none":
            return None
        if any(get_origin(kind) is Literal for kind in kinds):
            return text  # the field's own check names the valid ones
        if bool in kinds and text.lower() in ("true", "false"):
            return text.lower() == "true"
        if float in kinds:
            with contextlib.suppress(ValueError):
                return float(text)
    elif any(get_origin(kind) is Literal for kind in kinds) or type(value) in kinds:
        return value
    elif float in kinds and type(value) is int:
        return float(value)
    names = " or ".join(getattr(kind, "__name__", str(kind)) for kind in kinds).replace("NoneType", "none")
    raise ArgumentError(f"{where} is {value!r}. It must be {names}.")
