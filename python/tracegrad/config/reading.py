"""Options from a TOML file and from `--a.b value`: unknown names and wrong types are refused, with the nearest name.

No torch, no files but the TOML. Called by the command line and by `train`.
"""

from __future__ import annotations

import ast
import contextlib
import difflib
import inspect
import json
import math
import re
import typing
from collections.abc import Iterable, Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, Literal

from tracegrad.config.options import SECTIONS, Choice, Config, Scalar
from tracegrad.errors import ArgumentError

_MOST_BYTES = 1 << 16
_MOST_MARKS = 1000
_DEEPEST = 12
_HIGHEST = 1 << 63


def load(path: Path | None = None, overrides: Iterable[tuple[str, Any]] = (), *, start: Config | None = None) -> Config:
    """Defaults, then the TOML file, then the overrides.

    Args:
        path: TOML file with a table for each section, or None.
        overrides: (dotted name, value) pairs; a string is read by the option's type.
        start: what the file and overrides go over, default `Config()`.

    Raises:
        ArgumentError: if the file is not TOML, a name is unknown, or a value has the wrong type or is out of range.

    >>> load(overrides=[("optimizer.lr", "2e-4"), ("objective", "GRPO")]).optimizer.lr
    0.0002
    """
    config = start or Config()
    if path is not None:
        config = update(config, flatten(read_toml(path)), where=str(path))
    return update(config, overrides, where="")


def update(config: Config, values: Iterable[tuple[str, Any]], *, where: str = "") -> Config:
    """A config with the named options changed; `where` opens the error message."""
    changes: dict[str, dict[str, Any]] = {}
    preset, objective = config.objective.preset, dict(config.objective.overrides)
    for name, value in values:
        section, _, key = name.partition(".")
        if name in ("objective", "objective.preset"):
            told = str(_typed("objective.preset", value, where))
            if told != preset:
                preset, objective = told, {}
        elif section == "objective":
            objective[key] = _override(name, value, where)
        else:
            changes.setdefault(section, {})[key] = _typed(name, value, where)
    parts = {section: replace(getattr(config, section), **values) for section, values in changes.items()}
    return replace(config, **parts, objective=Choice(preset, tuple(objective.items())))


def read_toml(path: Path) -> dict[str, Any]:
    """A TOML file as nested dicts.

    Raises:
        ArgumentError: if it cannot be read or is not TOML, or on Python 3.10 without tomli.
    """
    try:
        import tomllib
    except ImportError:
        try:
            import tomli as tomllib
        except ImportError:
            raise ArgumentError(
                f"{path}: this Python reads no TOML. No option of it is known. pip install tomli, or use Python 3.11."
            ) from None
    try:
        with open(path, "rb") as file:
            data = file.read(_MOST_BYTES + 1)
        dots = max(line.count(b".") for line in data.split(b"\n"))  # of a key: Python's parser is quadratic in them
        if len(data) > _MOST_BYTES or dots > _MOST_MARKS or data.count(b"[") + data.count(b"{") > _MOST_MARKS:
            raise ArgumentError(
                f"{path}: more than {_MOST_BYTES:,} bytes, {_MOST_MARKS:,} brackets or as many dots in a line. All "
                "options together take 2,000 bytes: it is no config. Nothing of it was used. Give --config another."
            )
        return tomllib.loads(data.decode("utf-8"))
    except ArgumentError:
        raise
    except OSError as error:
        raise ArgumentError(f"{path}: {error.strerror}. The run has no config. Give --config a TOML file.") from error
    except (ValueError, RecursionError) as error:  # an integer of 5,000 digits is a ValueError of Python's
        raise ArgumentError(
            f"{path}: not TOML: {_brief(str(error), 200)}. Nothing of it was used. Correct that place."
        ) from error


def to_toml(config: Config, without: Iterable[str] = ()) -> str:
    """The whole config as TOML that `load` reads back to an equal one, but for the options that are left out.

    >>> "lr = 1e-06" in to_toml(Config())
    True
    """
    blocks = []
    for section in SECTIONS[:-1]:
        part = getattr(config, section)
        told = [f.name for f in fields(part) if f"{section}.{f.name}" not in without]
        lines = [f"{name} = {_toml(getattr(part, name))}" for name in told]
        blocks.append("\n".join([f"[{section}]", *lines]))
    chosen = config.objective
    lines = [
        f"preset = {_toml(chosen.preset)}",
        *(f"{_key(name)} = {_toml(value)}" for name, value in chosen.overrides),
    ]
    return "\n\n".join([*blocks, "\n".join(["[objective]", *lines])]) + "\n"


def as_dict(config: Config) -> dict[str, Scalar]:
    """Dotted name to value, the objective's overrides included."""
    flat: dict[str, Scalar] = {}
    for section in SECTIONS[:-1]:
        part = getattr(config, section)
        flat.update({f"{section}.{f.name}": getattr(part, f.name) for f in fields(part)})
    flat["objective.preset"] = config.objective.preset
    flat.update({f"objective.{name}": value for name, value in config.objective.overrides})
    return flat


def describe() -> str:
    """Every option as a markdown table, as docs/configuration.md shows it."""
    rows = ["| option | default | meaning |", "|---|---|---|"]
    for name, (kind, default) in options().items():
        section, _, key = name.partition(".")
        text = field_docs(type(getattr(Config(), section)))[key]
        rows.append(f"| `{name}` | `{_toml(default)}`{_choices(kind)} | {text} |")
    return "\n".join(rows)


def options() -> dict[str, tuple[Any, Scalar]]:
    """Dotted name to (type, default), the objective's own fields left out."""
    found: dict[str, tuple[Any, Scalar]] = {}
    for section in SECTIONS[:-1]:
        cls = type(getattr(Config(), section))
        hints = typing.get_type_hints(cls)
        found.update({f"{section}.{f.name}": (hints[f.name], typing.cast(Scalar, f.default)) for f in fields(cls)})
    found["objective.preset"] = (str, Choice.preset)
    return found


def field_docs(cls: type) -> dict[str, str]:
    """The string below each field of a dataclass."""
    body = ast.parse(inspect.getsource(cls)).body[0]
    assert isinstance(body, ast.ClassDef)
    docs: dict[str, str] = {}
    for here, after in zip(body.body, body.body[1:], strict=False):
        if isinstance(here, ast.AnnAssign) and isinstance(here.target, ast.Name) and isinstance(after, ast.Expr):
            docs[here.target.id] = ast.literal_eval(after.value)
    return docs


def _choices(kind: Any) -> str:
    return " of " + ", ".join(f"`{c}`" for c in typing.get_args(kind)) if typing.get_origin(kind) is Literal else ""


def flatten(nested: Mapping[str, Any], prefix: str = "", depth: int = 0) -> list[tuple[str, Any]]:
    """Dotted names to values. A table that no option is in, or too deep for one, is a value of its own: refused."""
    flat: list[tuple[str, Any]] = []
    for key, value in nested.items():
        if isinstance(value, Mapping) and depth < _DEEPEST and (value or (not prefix and key in SECTIONS)):
            flat.extend(flatten(value, f"{prefix}{key}.", depth + 1))
        else:
            flat.append((prefix + key, value))
    return sorted(flat, key=lambda pair: pair[0] != "objective.preset")


def section(name: str, told: Any, values: Iterable[tuple[str, Any]], *, where: str = "") -> Any:
    """A frozen dataclass of options beside those of `Config`, with the named ones changed.

    Args:
        name: of the section, such as "online".
        told: what is changed.
        values: (dotted name, value) pairs; a string is read by the option's type.
        where: opens the error message.

    Raises:
        ArgumentError: as `load`.
    """
    hints = typing.get_type_hints(type(told))
    known = {f"{name}.{f.name}": (hints[f.name], getattr(told, f.name)) for f in fields(told)}
    return replace(told, **{each.partition(".")[2]: _typed(each, value, where, known) for each, value in values})


def _typed(name: str, value: Any, where: str, known: Mapping[str, tuple[Any, Scalar]] | None = None) -> Scalar:
    known = options() if known is None else known
    opening = f"{where}: " if where else ""
    if name not in known:
        raise ArgumentError(f"{opening}{_brief(name)} is no option. It would have no effect. {nearest(name, known)}")
    kind = known[name][0]
    try:
        return _convert(kind, value)
    except ValueError as error:
        raise ArgumentError(
            f"{opening}{name} is {_said(value)}. It must be {error}. Correct it or leave it out."
        ) from None


def _override(name: str, value: Any, where: str) -> Scalar:
    """A field of the objective: which fields there are, the objective knows when it has them."""
    found = scalar(value)
    if type(found) not in (bool, int, float, str) or (type(found) is int and abs(found) >= _HIGHEST):
        opening = f"{where}: " if where else ""
        raise ArgumentError(
            f"{opening}{_brief(name)} is {_said(value)}. It must be a number, a string, true or false. Correct it or "
            "leave it out."
        )
    return found


def _said(value: Any) -> str:
    """A value for an error: its type where it is long, as Python refuses to print an integer of 5,000 digits."""
    if isinstance(value, int) and abs(value) >= _HIGHEST:
        return f"an integer of {value.bit_length():,} bits"
    if isinstance(value, (list, Mapping)):
        return f"{'a list' if isinstance(value, list) else 'a table'} of {len(value):,}"
    return _brief(repr(value))


def _brief(text: str, most: int = 80) -> str:
    """A stranger's text for a terminal: short, one line, nothing hidden."""
    shown = text if text.isprintable() else ascii(text)[1:-1]
    return shown if len(shown) <= most else f"{shown[:most]}..."


def _convert(kind: Any, value: Any) -> Scalar:
    if typing.get_origin(kind) is Literal:
        if value not in typing.get_args(kind):
            raise ValueError("one of " + ", ".join(typing.get_args(kind)))
        return value
    if isinstance(value, str) and kind is not str:
        value = scalar(value)
    if type(value) is int and abs(value) >= _HIGHEST:
        raise ValueError("less than 2 to the 63")
    if kind is float and type(value) is int:
        return float(value)
    if kind is float and type(value) is float and not math.isfinite(value):
        raise ValueError("a finite number")
    if kind is str and type(value) is str and not _is_text(value):
        raise ValueError("text, which TOML can hold: valid UTF-8")
    if type(value) is not kind:
        raise ValueError({bool: "true or false", int: "a whole number", float: "a number", str: "a string"}[kind])
    return value


def scalar(value: Any) -> Scalar:
    """A string from the command line as TOML would read it; what is no TOML scalar stays a string."""
    if not isinstance(value, str):
        return value
    if value in ("true", "false"):
        return value == "true"
    with contextlib.suppress(ValueError):
        return int(value)
    with contextlib.suppress(ValueError):
        return float(value)
    return value


def _toml(value: Any) -> str:
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(_toml(v) for v in value) + "]"
    if isinstance(value, (str, bool)):
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")  # JSON allows DEL, TOML does not
    return repr(value)


def _key(name: str) -> str:
    parts = name.split(".")
    return ".".join(part if re.fullmatch(r"[A-Za-z0-9_-]+", part) else _toml(part) for part in parts)


def _is_text(value: str) -> bool:
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def nearest(name: str, known: Iterable[str]) -> str:
    """The cure for an unknown name: the nearest valid one, or all of them where none is near."""
    known, name = list(known), name[:80]
    same_end = [k for k in known if k.split(".")[-1] == name.split(".")[-1]]
    close = difflib.get_close_matches(name, known, 1, 0.5) or same_end
    return f"Did you mean {close[0]}?" if close else f"Known: {', '.join(known)}."
