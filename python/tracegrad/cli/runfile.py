"""A run.toml of `tracegrad online`: what is played with what, [online], [engine], and the sections that training has.

Paths in it are relative to its own folder. Read, checked and printed here; the run is `online`'s.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from tracegrad import config
from tracegrad.errors import ArgumentError
from tracegrad.online import Online

TEXTS = ("model", "out", "tasks", "evaluation", "environment", "agent", "python", "key_file")
LISTS = ("rewards", "tools", "servers", "weights")
KEYS = (*TEXTS, *LISTS)
OF_FILES = (
    *("data.on_error", "data.logprob_kind", "data.text_only", "data.lenient", "data.holdout", "train.epochs"),
    *("train.value_per_epoch", "train.stop_below_ess", "train.tensorboard"),
)


@dataclass(frozen=True)
class RunFile:
    """What a run was told.

    Args:
        path: of the file, in whose folder its paths lie.
        named: its first lines, `KEYS`.
        config, online: what the sections give.
        engine: vLLM's engine arguments.
    """

    path: Path
    named: Mapping[str, Any]
    config: config.Config
    online: Online
    engine: Mapping[str, Any] = field(default_factory=dict)

    @property
    def base(self) -> Path:
        """The folder that paths are relative to."""
        return self.path.parent

    def place(self, key: str) -> Path:
        """A path that the file must name.

        Raises:
            ArgumentError: if it does not.
        """
        if key not in self.named:
            raise ArgumentError(
                f'{self.path}: {key} is missing. The run cannot begin without it. Write {key} = "..." above the '
                f"first [section], or --{key}."
            )
        return self.base / self.named[key]

    @property
    def python(self) -> str | None:
        """The interpreter of the server: a path, or a name that is looked up as a shell would."""
        told = self.named.get("python")
        return str(self.base / told) if told and "/" in told else told

    @property
    def key(self) -> str | None:
        """The token of the servers."""
        return read_key(self.place("key_file")) if "key_file" in self.named else None

    def to_toml(self) -> str:
        """The whole run as TOML."""
        tables = [("online", asdict(self.online)), ("engine", self.engine)]
        parts = [_table("", self.named), *(_table(name, values) for name, values in tables if values)]
        return "\n\n".join([*parts, config.to_toml(self.config, without=OF_FILES)])


def read(path: Path, flags: Mapping[str, Any], overrides: Sequence[tuple[str, Any]], resume: bool) -> RunFile:
    """The file, and what the command line changes.

    Args:
        flags: `KEYS` of the command line; their paths are relative to the working directory.
        overrides: (dotted name, value) pairs.
        resume: what neither says is as the run was told that goes on.

    Raises:
        ArgumentError: for what is unknown, of another kind, or of no effect here.
    """
    told = config.read_toml(path)
    named = {key: _checked(key, value, path) for key, value in told.items() if not isinstance(value, Mapping)}
    here = Path.cwd()
    for key, value in flags.items():
        near = key not in ("servers", "python") or (isinstance(value, str) and "/" in value)
        named[key] = str(here / value) if near else value
    tables = {key: value for key, value in told.items() if isinstance(value, Mapping)}
    engine = {**tables.pop("engine", {}), **_section(overrides, "engine", config.scalar)}
    playing = tables.pop("online", {})
    values = config.flatten(tables)
    rest = [(name, value) for name, value in overrides if name.partition(".")[0] not in ("engine", "online")]
    for name, _ in [*values, *rest]:
        if name in OF_FILES:
            raise ArgumentError(f"{name} has no effect on an online run: it is of training from a file. Leave it out.")
    begun, before = _before(path.parent / named["out"]) if resume and "out" in named else (config.Config(), Online())
    chosen = config.update(begun, values, where=str(path))
    given = [(f"online.{key}", value) for key, value in playing.items()]
    online = config.section("online", before, given, where=str(path))
    online = config.section("online", online, [pair for pair in overrides if pair[0].startswith("online.")])
    return RunFile(path, named, config.update(chosen, rest), online, engine)


def read_key(path: Path) -> str:
    """The token in a file: its first line.

    Raises:
        ArgumentError: if there is none.
    """
    try:
        key = path.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is no text"
        raise ArgumentError(
            f"{path}: {why}. The servers would refuse every request. Write their token there."
        ) from error
    if not key or "\n" in key or not key.isprintable():
        raise ArgumentError(f"{path}: one line with a token is wanted. The servers would refuse what it holds.")
    return key


def _checked(key: str, value: Any, path: Path) -> Any:
    if key not in KEYS:
        raise ArgumentError(
            f"{path}: {key} is no key here. It would have no effect. "
            f"{config.nearest(key, [*KEYS, 'online', 'engine', *config.SECTIONS])}"
        )
    listed = isinstance(value, list) and value and key in LISTS
    number = (int, float) if key == "weights" else str
    if (listed and all(type(one) is not bool and isinstance(one, number) for one in value)) or (
        key != "weights" and key != "servers" and isinstance(value, str) and value
    ):
        return value
    kind = "a list of numbers" if key == "weights" else "a list of URLs" if key == "servers" else "a text"
    raise ArgumentError(f"{path}: {key} is {value!r:.80}. It must be {kind}. Correct it or leave it out.")


def _before(out: Path) -> tuple[config.Config, Online]:
    """What the run that goes on was told."""
    if not (out / "config.toml").is_file():
        return config.Config(), Online()
    begun = config.load(out / "config.toml")
    try:
        told = json.loads((out / "run.json").read_text(encoding="utf-8"))["online"]
        return begun, Online(**{f.name: told[f.name] for f in fields(Online) if f.name in told})
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return begun, Online()


def _section(overrides: Sequence[tuple[str, Any]], section: str, read: Any) -> dict[str, Any]:
    return {name.partition(".")[2]: read(value) for name, value in overrides if name.startswith(f"{section}.")}


def _table(name: str, values: Mapping[str, Any]) -> str:
    lines = [f"{key} = {_toml(value)}" for key, value in values.items()]
    return "\n".join([f"[{name}]", *lines] if name else lines)


def _toml(value: Any) -> str:
    """A value as TOML says it; JSON is that but for tables."""
    if isinstance(value, Mapping):
        return "{ " + ", ".join(f"{json.dumps(key)} = {_toml(each)}" for key, each in value.items()) + " }"
    if isinstance(value, list):
        return "[" + ", ".join(map(_toml, value)) + "]"
    return json.dumps(value, ensure_ascii=False, default=str)
