"""Set values in nested dataclasses by dotted names, as in command lines and TOML files.

Names, types and choices are those of the dataclasses.
"""

import contextlib
import difflib
import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import fields, is_dataclass, replace
from types import NoneType, UnionType
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from tracegrad.errors import ArgumentError

Scalar = bool | int | float | str
Value = Scalar | list[Any]
"""Value of an option in TOML and JSON."""
Node = TypeVar("Node")
_HIGHEST = 1 << 63
_KINDS = {bool: "true or false", int: "a whole number", float: "a number", str: "a string", NoneType: "none"}


class _Unknown(Exception):
    """A dotted name that does not exist."""


def set_values(
    root: Node,
    values: Iterable[tuple[str, Any]],
    *,
    at: str = "",
    where: str = "",
    moved: Mapping[str, str] | None = None,
    finite: bool = True,
) -> Node:
    """Return a copy of `root` with the named values changed. Each part is validated after all its values are set.

    Args:
        root: a dataclass, whose names are its fields; a tuple, whose names are its indices; or a mapping.
        values: (dotted name, value) pairs; the last one of a name counts. A string is converted to the field's type.
            "none" is None if the field allows it, and empties a tuple.
        at: prefix of the names in errors.
        where: start of an error, such as the path of a file.
        moved: hints for renamed options, by old name.
        finite: whether infinity and NaN are refused.

    Raises:
        ArgumentError: if a name is unknown (the message has the nearest valid one), a value has the wrong type, or a
            dataclass refuses its values.

    >>> from tracegrad.config import Optimizer
    >>> set_values({"optimizer": Optimizer()}, [("optimizer.lr", "2e-4")])["optimizer"].lr
    0.0002
    """
    opening = f"{where}: " if where else ""
    try:
        return _rebuilt(root, dict(values), at, opening, finite)
    except _Unknown as error:
        name = str(error)
        hint = (moved or {}).get(name) or nearest(name, leaves(root, at))
        raise ArgumentError(f"TG-CONFIG-001: {opening}{shorten(name)} is not an option. {hint}") from None


def leaves(root: Any, at: str = "") -> dict[str, tuple[Any, Any]]:
    """Return {dotted name: (type, value)} of everything that can be set as one value."""
    result: dict[str, tuple[Any, Any]] = {}
    for key, (kind, entry) in _entries(root).items():
        name = f"{at}.{key}" if at else key
        result.update(leaves(entry, name) if _has_fields(kind, entry) else {name: (kind, entry)})
    return result


def read(value: Any, kind: Any, *, finite: bool = False) -> Any:
    """Convert a value, or its string, to one of the types of a field.

    Args:
        value: the value.
        kind: type annotation of the field: a type, a union or a Literal.
        finite: whether infinity and NaN are refused.

    Raises:
        ValueError: if the value has another type; the message states the accepted ones.

    >>> read("0.28", float | None), read("none", float | None), read("mean", Literal["mean", "sum"])
    (0.28, None, 'mean')
    >>> read("3, 1", tuple[float, ...]), read(["wandb"], tuple[str, ...])
    ((3.0, 1.0), ('wandb',))
    """
    if item := list_item(kind):
        return _read_list(value, item, finite)
    kinds = get_args(kind) if get_origin(kind) in (Union, UnionType) else (kind,)
    choices = [choice for each in kinds if get_origin(each) is Literal for choice in get_args(each)]
    if NoneType in kinds and value in (None, "none"):
        return None
    if isinstance(value, str) and value in choices:
        return value
    value = value if str in kinds else scalar(value)
    if type(value) is int and abs(value) >= _HIGHEST:
        raise ValueError("less than 2 to the 63")
    if float in kinds and type(value) is int and int not in kinds:
        value = float(value)
    if type(value) is float and finite and float in kinds and not math.isfinite(value):
        raise ValueError("a finite number")
    if type(value) is str and value != value.encode("utf-8", "replace").decode():
        raise ValueError("valid UTF-8 text, because TOML requires it")
    if type(value) not in kinds and Any not in kinds:
        kind_names = [_KINDS.get(each, getattr(each, "__name__", str(each))) for each in kinds if not get_args(each)]
        accepted = [*(["one of " + ", ".join(map(str, choices))] if choices else []), *kind_names]
        # A tuple of components, which has neither choices nor a plain type.
        raise ValueError(" or ".join(accepted or ["none, to remove its entries, or changed in Python by replace()"]))
    return value


def list_item(kind: Any) -> type | None:
    """Return the type of the entries of a list option, such as `tuple[str, ...]`; None for any other type.

    >>> list_item(tuple[float, ...]), list_item(str)
    (<class 'float'>, None)
    """
    arguments: tuple[Any, ...] = get_args(kind) if get_origin(kind) is tuple else ()
    return arguments[0] if arguments[1:] == (...,) and arguments[0] in (str, float) else None


def _read_list(value: Any, item: type, finite: bool) -> tuple[Any, ...]:
    """Convert a list, or its entries in a string with commas."""
    try:
        entries = split_list(value) if isinstance(value, str) else value
        if not isinstance(entries, (list, tuple)):
            raise ValueError
        return tuple(read(entry, item, finite=finite) for entry in entries)
    except ValueError:
        raise ValueError("a list of strings" if item is str else "a list of finite numbers") from None


def scalar(value: Any) -> Scalar:
    """Convert a command-line string to a TOML scalar: a boolean, an integer, a float, or else a string.

    >>> scalar("true"), scalar("3"), scalar("1e-5"), scalar("GRPO")
    (True, 3, 1e-05, 'GRPO')
    """
    if not isinstance(value, str):
        return value
    if value in ("true", "false"):
        return value == "true"
    for kind in (int, float):
        with contextlib.suppress(ValueError):
            return kind(value)
    return value


def plain(name: str, value: Any, *, where: str = "") -> Scalar:
    """Convert a value for a field whose type is unknown.

    Raises:
        ArgumentError: if the value is not a scalar, or an integer beyond 64 bits.
    """
    converted = scalar(value)
    if type(converted) not in (bool, int, float, str) or (type(converted) is int and abs(converted) >= _HIGHEST):
        raise _wrong(name, value, "a number, a string, true or false", f"{where}: " if where else "")
    return converted


def split_list(text: str) -> list[Any]:
    """Split the value of a list option on the command line: entries with commas between them, or a JSON list.

    Raises:
        ValueError: if the text begins with a bracket and is not JSON.

    >>> split_list("wandb, trackio"), split_list(""), split_list('["a, b"]')
    (['wandb', 'trackio'], [], ['a, b'])
    """
    if text.startswith("["):
        return json.loads(text)
    return [entry.strip() for entry in text.split(",") if entry.strip()]


def join_list(entries: Iterable[str]) -> str:
    """Return the entries as `split_list` reads them.

    >>> join_list(["a", "b"]), join_list(["a, b"])
    ('a,b', '["a, b"]')
    """
    entries, text = list(entries), ",".join(entries)
    is_plain = not text.startswith("[") and split_list(text) == entries
    return text if is_plain else json.dumps(entries, ensure_ascii=False)


def nearest(name: str, valid_names: Iterable[str]) -> str:
    """Return a hint for an unknown name: the nearest valid one, or all of them if none is near.

    Names are compared by their letters: `dr-grpo` is near `DR_GRPO`. If valid names have the same last part, they
    are the candidates.

    >>> nearest("trian.seed", ["train.seed", "train.epochs"]), nearest("dapo", ["GRPO", "DAPO"])
    ('Did you mean train.seed?', 'Did you mean DAPO?')
    """
    valid_names = list(valid_names)
    close = _closest(name, valid_names)
    return f"Did you mean {close}?" if close else f"Valid names: {', '.join(valid_names)}."


def did_you_mean(value: Any, choices: Iterable[Any]) -> str:
    """Return " Did you mean X?" for a string that is near one of the choices, otherwise an empty string.

    It follows a sentence that lists the choices.

    >>> did_you_mean("cosin", ["linear", "cosine"]), did_you_mean("x", ["linear", "cosine"]), did_you_mean(3, [])
    (' Did you mean cosine?', '', '')
    """
    close = _closest(value, [choice for choice in choices if isinstance(choice, str)]) if type(value) is str else None
    return f" Did you mean {close}?" if close else ""


def _closest(name: str, valid_names: Iterable[str]) -> str | None:
    letters, valid = _letters(name[:80]), {_letters(key): key for key in valid_names}
    same_end = [key for key in valid if key.split(".")[-1] == letters.split(".")[-1]]
    close = difflib.get_close_matches(letters, same_end or valid, 1, 0.5) or same_end
    return valid[close[0]] if close else None


def _letters(name: str) -> str:
    return name.lower().replace("-", "_")


def shorten(text: str, max_length: int = 80) -> str:
    """Return untrusted text for a terminal: at most `max_length` characters, one line, control characters escaped."""
    line = text if text.isprintable() else ascii(text)[1:-1]
    return line if len(line) <= max_length else f"{line[:max_length]}..."


def _rebuilt(node: Any, values: Mapping[str, Any], at: str, opening: str, finite: bool) -> Any:
    """Return a copy of `node` with the values below it changed."""
    entries, below = _entries(node), {}
    for name, value in values.items():
        head, dot, tail = name.partition(".")
        below.setdefault(head, {})[tail if dot else None] = value  # The key None is the value of `head` itself.
    changes: dict[str, Any] = {}
    for head, head_values in below.items():
        name, tail = (
            f"{at}.{head}" if at else head,
            next((subkey for subkey in head_values if subkey is not None), None),
        )
        kind, entry = entries.get(head, (None, None))
        has_fields = _has_fields(kind, entry)
        if head not in entries or (None not in head_values and not has_fields):
            raise _Unknown(name if tail is None else f"{name}.{tail}")
        if None not in head_values:
            changes[head] = _rebuilt(entry, head_values, name, opening, finite)
        elif len(head_values) > 1:
            raise ArgumentError(f"TG-CONFIG-002: {opening}{name} and {name}.{tail} are both set. Leave one out.")
        elif has_fields and isinstance(entry, tuple) and head_values[None] in ("none", ()):
            changes[head] = ()
        else:
            try:
                changes[head] = read(head_values[None], kind, finite=finite)
                if changes[head] is not None and has_fields:
                    raise ValueError(f"set by its fields: {', '.join(leaves(entry, name))}")
            except ValueError as error:
                hint = _nearest_choice(head_values[None], kind)
                raise _wrong(name, head_values[None], error, opening, hint) from None
    if isinstance(node, tuple):
        return tuple(changes.get(key, entry) for key, (_, entry) in entries.items())
    return {**node, **changes} if isinstance(node, Mapping) else replace(node, **changes)


def _entries(node: Any) -> dict[str, tuple[Any, Any]]:
    """Return {name: (type, value)} of the direct children of a node."""
    if isinstance(node, (tuple, Mapping)):
        pairs = enumerate(node) if isinstance(node, tuple) else node.items()
        return {str(key): (type(entry), entry) for key, entry in pairs}
    kinds = get_type_hints(type(node))
    return {field.name: (kinds[field.name], getattr(node, field.name)) for field in fields(node)}


def _has_fields(kind: Any, entry: Any) -> bool:
    """Return whether an entry is set by its fields or indices, and not as one value."""
    return is_dataclass(entry) or (isinstance(entry, tuple) and list_item(kind) is None)


def _nearest_choice(value: Any, kind: Any) -> str:
    """Return " Did you mean X?" for a string that is near one of the choices of a type, otherwise an empty string."""
    kinds = get_args(kind) if get_origin(kind) in (Union, UnionType) else (kind,)
    return did_you_mean(value, [choice for each in kinds if get_origin(each) is Literal for choice in get_args(each)])


def _wrong(name: str, value: Any, rule: object, opening: str, hint: str = "") -> ArgumentError:
    description = "huge" if isinstance(value, int) and abs(value) >= _HIGHEST else shorten(repr(value))
    if isinstance(value, (list, Mapping)):
        description = f"{'a list' if isinstance(value, list) else 'a table'} of {len(value):,}"
    return ArgumentError(
        f"TG-CONFIG-003: {opening}{shorten(name)} is {description}. It must be {rule}.{hint} Correct it or leave it "
        "out."
    )
