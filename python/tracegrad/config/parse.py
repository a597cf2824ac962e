"""Options from a TOML file and from `--a.b value`: unknown names and wrong types are refused, with the nearest name.

No torch, no files but the TOML. Called by the command line and by `train`.
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

from tracegrad.config.dotted_keys import Scalar, brief, changed, leaves, plain
from tracegrad.config.schema import SECTIONS, Choice, Config
from tracegrad.errors import ArgumentError

_MOST_BYTES = 1 << 16
_MOST_MARKS = 1000
_DEEPEST = 12
_MAP = "data.map"
"""How files call the section `map`."""
_MOVED = {
    "train.stop_below_ess": "Its place is stop.below_ess.",
    "optimizer.warmup_steps": "Its place is schedule.warmup_steps.",
    "pack.leave_out": "It is two, each true or false: pack.share_prefixes (repeats) and pack.skip_zero_weight (idle).",
}
"""What a name of before is now."""


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
    told: dict[str, Any] = {}
    fields_of: dict[str, Scalar] = {}
    for name, value in values:
        if name.startswith("objective.") and name != "objective.preset":
            fields_of[name.partition(".")[2]] = plain(name, value, where=where)
        else:
            told["objective.preset" if name == "objective" else name] = value
    before = config.objective
    sections = {name: getattr(config, name) for name in SECTIONS} | {"objective": Choice(before.preset)}
    parts = changed(sections, told.items(), where=where, moved=_MOVED)
    kept = dict(before.overrides) if parts["objective"].preset == before.preset else {}
    parts["objective"] = replace(parts["objective"], overrides=tuple({**kept, **fields_of}.items()))
    return replace(config, **parts)


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
            f"{path}: not TOML: {brief(str(error), 200)}. Nothing of it was used. Correct that place."
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
        blocks.append("\n".join([f"[{_MAP if section == 'map' else section}]", *lines]))
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
    return leaves({name: getattr(Config(), name) for name in SECTIONS})


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
        if isinstance(value, Mapping) and depth < _DEEPEST and (value or prefix + key in (*SECTIONS, _MAP)):
            flat.extend(flatten(value, "map." if prefix + key == _MAP else f"{prefix}{key}.", depth + 1))
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
