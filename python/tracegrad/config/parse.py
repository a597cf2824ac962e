"""Load options from a TOML file and from `--a.b value`. Unknown names and wrong types raise an error.

An error about an unknown name suggests the nearest valid one. This module does not import torch.
"""

import ast
import inspect
import json
import re
import typing
from collections.abc import Iterable, Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, Literal

from tracegrad.config.dotted_keys import Scalar, Value, leaves, plain, set_values, shorten
from tracegrad.config.schema import SECTIONS, Config, ObjectiveConfig
from tracegrad.errors import ArgumentError

_MOST_BYTES = 1 << 16
_MOST_MARKS = 1000
_DEEPEST = 12
_MOVED = {
    "optimizer.warmup_steps": "It is now schedule.warmup_steps.",
    "pack.leave_out": "It is now two booleans: pack.share_prefixes (repeats) and pack.skip_zero_weight (idle).",
}
"""Hints for renamed options, by old name."""


def load(path: Path | None = None, overrides: Iterable[tuple[str, Any]] = (), *, start: Config | None = None) -> Config:
    """Load a config: the defaults, then the TOML file, then the overrides.

    Args:
        path: TOML file with a table for each section, or None.
        overrides: (dotted name, value) pairs; a string is converted to the option's type.
        start: config that the file and overrides change, `Config()` by default.

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
    """Return a config with the named options changed.

    Args:
        config: the config.
        values: (dotted name, value) pairs.
        where: start of the error message, such as the path of a file.

    Raises:
        ArgumentError: if a name is unknown, or a value has the wrong type or is out of range.

    >>> changed = update(Config(), [("optimizer.lr", 1e-5), ("train.epochs", "2")])
    >>> changed.optimizer.lr, changed.train.epochs
    (1e-05, 2)
    >>> try:
    ...     update(changed, [("optimizer.learning_rate", 1e-5)])
    ... except ArgumentError as error:
    ...     print(error.code)
    TG-CONFIG-001
    """
    changes: dict[str, Any] = {}
    objective_fields: dict[str, Scalar] = {}
    for name, value in values:
        if name.startswith("objective.") and name != "objective.preset":
            objective_fields[name.partition(".")[2]] = plain(name, value, where=where)
        else:
            changes["objective.preset" if name == "objective" else name] = value
    previous = config.objective
    sections = {name: getattr(config, name) for name in SECTIONS} | {"objective": ObjectiveConfig(previous.preset)}
    parts = set_values(sections, changes.items(), where=where, moved=_MOVED)
    overrides = dict(previous.overrides) if parts["objective"].preset == previous.preset else {}
    parts["objective"] = replace(parts["objective"], overrides=tuple({**overrides, **objective_fields}.items()))
    return replace(config, **parts)


def read_toml(path: Path) -> dict[str, Any]:
    """Read a TOML file as nested dicts.

    Raises:
        ArgumentError: if it cannot be read or is not TOML, or on Python 3.10 without tomli.

    >>> from tempfile import TemporaryDirectory
    >>> with TemporaryDirectory() as folder:
    ...     path = Path(folder, "run.toml")
    ...     _ = path.write_text("[optimizer]\\nlr = 1e-5\\n")
    ...     read_toml(path)
    {'optimizer': {'lr': 1e-05}}
    """
    try:
        import tomllib
    except ImportError:
        try:
            import tomli as tomllib
        except ImportError:
            raise ArgumentError(
                f"TG-CONFIG-004: {path}: this Python version cannot read TOML. Run `pip install tomli`, "
                f"or use Python 3.11."
            ) from None
    try:
        with open(path, "rb") as file:
            data = file.read(_MOST_BYTES + 1)
        # Python's parser takes quadratic time in the dots of a key.
        dots = max(line.count(b".") for line in data.split(b"\n"))
        if len(data) > _MOST_BYTES or dots > _MOST_MARKS or data.count(b"[") + data.count(b"{") > _MOST_MARKS:
            raise ArgumentError(
                f"TG-CONFIG-005: {path}: more than {_MOST_BYTES:,} bytes, {_MOST_MARKS:,} brackets or as many dots in "
                "a line. A config with all options has about 2,000 bytes, so this is not a config. Give another file."
            )
        return tomllib.loads(data.decode("utf-8"))
    except ArgumentError:
        raise
    except OSError as error:
        raise ArgumentError(
            f"TG-CONFIG-006: {path}: cannot be read ({error.strerror}). Give the path of a TOML file."
        ) from error
    except (ValueError, RecursionError) as error:  # Python raises ValueError for an integer of 5,000 digits.
        raise ArgumentError(
            f"TG-CONFIG-007: {path}: not TOML: {shorten(str(error), 200)}. Correct the file."
        ) from error


def to_toml(config: Config, without: Iterable[str] = ()) -> str:
    """Format a config as TOML, which `load` reads back to an equal config except for the options in `without`.

    >>> "lr = 1e-06" in to_toml(Config())
    True
    """
    blocks = []
    for section in SECTIONS[:-1]:
        part = getattr(config, section)
        names = [f.name for f in fields(part) if f"{section}.{f.name}" not in without]
        lines = [f"{name} = {_toml(getattr(part, name))}" for name in names]
        blocks.append("\n".join([f"[{section}]", *lines]))
    choice = config.objective
    lines = [
        f"preset = {_toml(choice.preset)}",
        *(f"{_key(name)} = {_toml(value)}" for name, value in choice.overrides),
    ]
    return "\n\n".join([*blocks, "\n".join(["[objective]", *lines])]) + "\n"


def as_dict(config: Config) -> dict[str, Value]:
    """Return {dotted name: value}, as JSON has them, with the objective's overrides.

    >>> flat = as_dict(load(overrides=[("objective.surrogate.high", "0.3")]))
    >>> flat["optimizer.lr"], flat["objective.preset"], flat["objective.surrogate.high"]
    (1e-06, 'DAPO', 0.3)
    """
    flat: dict[str, Value] = {}
    for section in SECTIONS[:-1]:
        part = getattr(config, section)
        flat.update({f"{section}.{f.name}": _as_toml_value(getattr(part, f.name)) for f in fields(part)})
    flat["objective.preset"] = config.objective.preset
    flat.update({f"objective.{name}": value for name, value in config.objective.overrides})
    return flat


def describe() -> str:
    """Return the markdown table of all options for docs/reference/configuration.md.

    >>> for line in describe().splitlines():
    ...     if line.startswith("| `train.epochs`"):
    ...         print(line)
    | `train.epochs` | `1` | Number of passes over the groups. |
    """
    rows = ["| option | default | meaning |", "|---|---|---|"]
    for name, (kind, default) in options().items():
        section, _, key = name.partition(".")
        text = field_docs(type(getattr(Config(), section)))[key]
        rows.append(f"| `{name}` | `{_toml(default)}`{_choices(kind)} | {text} |")
    return "\n".join(rows)


def options() -> dict[str, tuple[Any, Value]]:
    """Return {dotted name: (type, default)}, without the objective's own fields.

    >>> options()["optimizer.lr"], options()["advantage.ddof"]
    ((<class 'float'>, 1e-06), (<class 'int'>, 1))
    """
    found = leaves({name: getattr(Config(), name) for name in SECTIONS})
    return {name: (kind, _as_toml_value(default)) for name, (kind, default) in found.items()}


def _as_toml_value(value: Any) -> Value:
    return list(value) if isinstance(value, tuple) else value


def field_docs(cls: type) -> dict[str, str]:
    """Return the string below each field of a dataclass, on one line.

    >>> from tracegrad.config import Filter
    >>> field_docs(Filter)["max_reward"]
    'Drop traces with a higher reward.'
    """
    body = ast.parse(inspect.getsource(cls)).body[0]
    assert isinstance(body, ast.ClassDef)
    docs: dict[str, str] = {}
    for statement, next_statement in zip(body.body, body.body[1:], strict=False):
        if (
            isinstance(statement, ast.AnnAssign)
            and isinstance(statement.target, ast.Name)
            and isinstance(next_statement, ast.Expr)
        ):
            docs[statement.target.id] = " ".join(ast.literal_eval(next_statement.value).split())
    return docs


def _choices(kind: Any) -> str:
    return " of " + ", ".join(f"`{c}`" for c in typing.get_args(kind)) if typing.get_origin(kind) is Literal else ""


def flatten(nested: Mapping[str, Any], prefix: str = "", depth: int = 0) -> list[tuple[str, Any]]:
    """Return (dotted name, value) pairs of nested tables.

    An empty table that is not a section, or a table nested too deeply, stays a value, which raises an error later.

    >>> flatten({"optimizer": {"lr": 1e-5}, "objective": {"surrogate": {"high": 0.3}, "preset": "GRPO"}})
    [('objective.preset', 'GRPO'), ('optimizer.lr', 1e-05), ('objective.surrogate.high', 0.3)]
    """
    flat: list[tuple[str, Any]] = []
    for key, value in nested.items():
        if isinstance(value, Mapping) and depth < _DEEPEST and (value or prefix + key in SECTIONS):
            flat.extend(flatten(value, f"{prefix}{key}.", depth + 1))
        else:
            flat.append((prefix + key, value))
    return sorted(flat, key=lambda pair: pair[0] != "objective.preset")


def _toml(value: Any) -> str:
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(_toml(v) for v in value) + "]"
    if isinstance(value, (str, bool)):
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")  # JSON allows DEL, TOML does not
    return repr(value)


def _key(name: str) -> str:
    return ".".join(part if re.fullmatch(r"[A-Za-z0-9_-]+", part) else _toml(part) for part in name.split("."))
