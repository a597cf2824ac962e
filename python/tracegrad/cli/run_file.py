"""A run.toml of `tracegrad online`: what is played with what, [online], [play], [engine], sections of training.

Paths in it are relative to its own folder. Read, checked and printed here; the run is `online`'s.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from tracegrad import config
from tracegrad.cli.args import read_key
from tracegrad.config.dotted_keys import changed
from tracegrad.errors import ArgumentError
from tracegrad.online import Online, Play, run_info
from tracegrad.online.options import IN_PROCESS
from tracegrad.online.run_info import Brief
from tracegrad.recipes import Recipe
from tracegrad.storage.remote import path_of, place_here

TEXTS = ("model", "out", "tasks", "evaluation", "environment", "agent", "python", "key_file")
LISTS = ("rewards", "tools", "servers", "weights")
KEYS = (*TEXTS, *LISTS)
PLAYING: Mapping[str, Any] = {"online": Online(), "play": Play()}
"""The sections of playing, where nothing is told."""
OF_FILES = (
    *(f"map.{each.name}" for each in fields(config.Map)),
    *("data.on_error", "data.logprob_kind", "data.text_only", "data.lenient", "data.holdout", "train.epochs"),
    "data.server_profile",
    *("train.max_steps", "filter.even_groups", "train.off_policy_value_per_epoch", "stop.below_ess", "stop.worse"),
)


@dataclass(frozen=True)
class RunFile:
    """What a run was told.

    Args:
        path: of the file, in whose folder its paths lie.
        named: its first lines, `KEYS`.
        config, online, play: what the sections give.
        engine: vLLM's engine arguments.
        otherwise: where file or command line told otherwise than the recipe, which wins.
    """

    path: Path
    named: Mapping[str, Any]
    config: config.Config
    online: Online
    play: Play
    engine: Mapping[str, Any] = field(default_factory=dict)
    otherwise: tuple[str, ...] = ()

    @property
    def base(self) -> Path:
        """The folder that paths are relative to."""
        return self.path.parent

    def place(self, key: str) -> Path:
        """A path that the file must name."""
        if key not in self.named:
            raise ArgumentError(
                f'{self.path}: {key} is missing. The run cannot begin without it. Write {key} = "..." above the '
                f"first [section], or --{key}."
            )
        return self.base / path_of(self.named[key])

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
        tables = [("online", asdict(self.online)), ("play", asdict(self.play)), ("engine", self.engine)]
        parts = [_table("", self.named), *(_table(name, values) for name, values in tables if values)]
        return "\n\n".join([*parts, config.to_toml(self.config, without=OF_FILES)])


def read(
    path: Path,
    flags: Mapping[str, Any],
    overrides: Sequence[tuple[str, Any]],
    resume: bool,
    recipe: Recipe | None = None,
) -> RunFile:
    """The file, and what the command line changes.

    Args:
        flags: `KEYS` of the command line; their paths are relative to the working directory.
        overrides: (dotted name, value) pairs.
        resume: what neither says is as the run was told that goes on.
        recipe: what the file and the overrides go over.

    Raises:
        ArgumentError: for what is unknown, of another kind, or of no effect here.
    """
    told = config.read_toml(path)
    named = {key: _checked(key, value, path) for key, value in told.items() if not isinstance(value, Mapping)}
    here = Path.cwd()
    place_here(flags.get("out", named.get("out", "")))
    for key, value in flags.items():
        near = key not in ("servers", "python") or (isinstance(value, str) and "/" in value)
        named[key] = str(here / path_of(value)) if near else value
    tables = {key: value for key, value in told.items() if isinstance(value, Mapping)}
    engine = tables.pop("engine", {})
    if "servers" in flags:  # running servers, over the one that the file would start
        engine = {}
        if "python" not in flags:
            named.pop("python", None)
    elif "python" in flags:
        named.pop("servers", None)
    engine = {**engine, **_section(overrides, "engine", config.scalar)}
    _check_servers(named, engine, path)
    playing = {name: tables.pop(name, {}) for name in PLAYING}
    values = config.flatten(tables)
    rest = [(name, value) for name, value in overrides if name.partition(".")[0] not in ("engine", *PLAYING)]
    for name, _ in [*values, *rest]:
        if name in OF_FILES:
            raise ArgumentError(f"{name} has no effect on an online run: it is of training from a file. Leave it out.")
    begun, before = _before(path.parent / named["out"]) if resume and "out" in named else (config.Config(), PLAYING)
    chosen = config.update(begun, values, where=str(path))
    played = changed(before, config.flatten({name: table for name, table in playing.items() if table}), where=str(path))
    played = changed(played, [pair for pair in overrides if pair[0].partition(".")[0] in PLAYING])
    chosen, otherwise = config.update(chosen, rest), ()
    if recipe is not None:
        played_alone = replace(recipe, config=tuple(each for each in recipe.config if each[0] not in OF_FILES))
        chosen, otherwise = played_alone.settle(overrides=[*values, *rest], start=begun)
    return RunFile(path, named, chosen, **played, engine=engine, otherwise=otherwise)


def _check_servers(named: Mapping[str, Any], engine: Mapping[str, Any], path: Path) -> None:
    servers = named.get("servers", [])
    if servers and servers != [IN_PROCESS] and (idle := [*(f"engine.{key}" for key in engine), *{"python"} & {*named}]):
        raise ArgumentError(
            f"{path}: servers are named, so that none is started, and {idle[0]} has no effect. Leave out one of them; "
            "--server goes over both [engine] and python of a file, --python over its servers."
        )


def _checked(key: str, value: Any, path: Path) -> Any:
    if key not in KEYS:
        raise ArgumentError(
            f"{path}: {key} is no key here. It would have no effect. "
            f"{config.nearest(key, [*KEYS, *PLAYING, 'engine', *config.SECTIONS])}"
        )
    listed = isinstance(value, list) and value and key in LISTS
    number = (int, float) if key == "weights" else str
    if (listed and all(type(one) is not bool and isinstance(one, number) for one in value)) or (
        key != "weights" and key != "servers" and isinstance(value, str) and value
    ):
        return value
    kind = "a list of numbers" if key == "weights" else "a list of URLs" if key == "servers" else "a text"
    raise ArgumentError(f"{path}: {key} is {value!r:.80}. It must be {kind}. Correct it or leave it out.")


def _before(out: Path) -> tuple[config.Config, Mapping[str, Any]]:
    """What the run that goes on was told."""
    if not (out / "config.toml").is_file():
        return config.Config(), PLAYING
    begun, told = config.load(out / "config.toml"), Brief.read(out) if (out / run_info.NAME).exists() else None
    return begun, PLAYING if told is None else {"online": told.online, "play": told.play}


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
