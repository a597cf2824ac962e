"""Read the run.toml of `tracegrad online`: named inputs, [online], [rollout], [engine], and sections of training.

Its paths are relative to its own folder. This module reads, checks and prints the file.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from tracegrad import config
from tracegrad.cli.args import read_key
from tracegrad.config.dotted_keys import set_values
from tracegrad.errors import ArgumentError
from tracegrad.online import OnlineConfig, RolloutConfig, run_info
from tracegrad.online.options import IN_PROCESS
from tracegrad.online.run_info import RunInfo
from tracegrad.recipes import Recipe
from tracegrad.storage.remote import path_of, require_local_path

TEXTS = ("model", "out", "tasks", "eval_tasks", "environment", "agent", "python", "key_file")
LISTS = ("rewards", "tools", "servers", "reward_weights")
KEYS = (*TEXTS, *LISTS)
PLAYING: Mapping[str, Any] = {"online": OnlineConfig(), "rollout": RolloutConfig()}
"""Sections about rollouts, with their defaults."""
OFFLINE_ONLY_OPTIONS = (
    *(f"map.{each.name}" for each in fields(config.FieldMap)),
    *("data.on_error", "data.logprob_kind", "data.text_only", "data.allow_unknown_ids", "data.holdout", "train.epochs"),
    "data.server_profile",
    *("train.max_steps", "filter.drop_zero_std_groups", "eval.ope_per_epoch", "stop.min_ope_ess", "stop.ope_falls"),
)


@dataclass(frozen=True)
class RunFile:
    """The settings of an online run.

    Args:
        path: the file. Its paths are relative to its folder.
        inputs: values of the keys above the first section (`KEYS`).
        config, online, rollout: values of the sections.
        engine: vLLM's engine arguments.
        overrides: options of the file or command line that override the recipe.
    """

    path: Path
    inputs: Mapping[str, Any]
    config: config.Config
    online: OnlineConfig
    rollout: RolloutConfig
    engine: Mapping[str, Any] = field(default_factory=dict)
    overrides: tuple[str, ...] = ()

    @property
    def base(self) -> Path:
        """Return the folder that paths are relative to."""
        return self.path.parent

    def place(self, key: str) -> Path:
        """Return a path that the file must specify.

        Raises:
            ArgumentError: if the key is missing.
        """
        if key not in self.inputs:
            raise ArgumentError(
                f'TG-CLI-024: {self.path}: {key} is missing. Write {key} = "..." above the first [section]'
                + (f", or give --{key}." if key in ("model", "out", "tasks") else ".")
            )
        return self.base / path_of(self.inputs[key])

    @property
    def python(self) -> str | None:
        """Return the interpreter for the server: a path, or a name to look up as a shell would."""
        value = self.inputs.get("python")
        return str(self.base / value) if value and "/" in value else value

    @property
    def key(self) -> str | None:
        """Return the access token of the servers, or None."""
        return read_key(self.place("key_file")) if "key_file" in self.inputs else None

    def to_toml(self) -> str:
        """Return all settings of the run as TOML."""
        tables = [("online", asdict(self.online)), ("rollout", asdict(self.rollout)), ("engine", self.engine)]
        parts = [_table("", self.inputs), *(_table(name, values) for name, values in tables if values)]
        return "\n\n".join([*parts, config.to_toml(self.config, without=OFFLINE_ONLY_OPTIONS)])


def read(
    path: Path,
    flags: Mapping[str, Any],
    overrides: Sequence[tuple[str, Any]],
    resume: bool,
    recipe: Recipe | None = None,
) -> RunFile:
    """Read a run.toml and apply the changes from the command line.

    Args:
        path: the file.
        flags: `KEYS` given on the command line. Their paths are relative to the working directory.
        overrides: (dotted name, value) pairs.
        resume: whether unspecified options are taken from the run in `out`.
        recipe: base that the file and the overrides change.

    Raises:
        ArgumentError: for an unknown option, a value of another type, or an option without effect here.
    """
    contents = config.read_toml(path)
    named = {key: _checked(key, value, path) for key, value in contents.items() if not isinstance(value, Mapping)}
    here = Path.cwd()
    require_local_path(flags.get("out", named.get("out", "")))
    for key, value in flags.items():
        is_path = key not in ("servers", "python") or (isinstance(value, str) and "/" in value)
        named[key] = str(here / path_of(value)) if is_path else value
    tables = {key: value for key, value in contents.items() if isinstance(value, Mapping)}
    engine = tables.pop("engine", {})
    if "servers" in flags:  # Running servers replace the server that the file would start.
        engine = {}
        if "python" not in flags:
            named.pop("python", None)
    elif "python" in flags:
        named.pop("servers", None)
    engine = {**engine, **_section(overrides, "engine", config.scalar)}
    _check_servers(named, engine, path)
    rollout_sections = {name: tables.pop(name, {}) for name in PLAYING}
    file_options = config.flatten(tables)
    training_overrides = [
        (name, value) for name, value in overrides if name.partition(".")[0] not in ("engine", *PLAYING)
    ]
    sections = (*PLAYING, "engine", *config.SECTIONS)
    for name, _ in [*file_options, *training_overrides]:
        if (section := name.partition(".")[0]) not in sections:
            hint = config.nearest(section, sections)
            raise ArgumentError(f"TG-CLI-012: {path}: {name}: the section {section} does not exist. {hint}")
        if name in OFFLINE_ONLY_OPTIONS:
            raise ArgumentError(
                f"TG-CLI-025: {name} has no effect on an online run. Only tracegrad train uses it. Remove it."
            )
    start, previous = (
        _previous_options(path.parent / named["out"]) if resume and "out" in named else (config.Config(), PLAYING)
    )
    run_config = config.update(start, file_options, where=str(path))
    if recipe is not None:
        previous = set_values(previous, recipe.rollout)
    rollout = set_values(
        previous, config.flatten({name: table for name, table in rollout_sections.items() if table}), where=str(path)
    )
    rollout = set_values(rollout, [pair for pair in overrides if pair[0].partition(".")[0] in PLAYING])
    run_config, overridden = config.update(run_config, training_overrides), ()
    if recipe is not None:
        online_recipe = replace(
            recipe, config=tuple(option for option in recipe.config if option[0] not in OFFLINE_ONLY_OPTIONS)
        )
        run_config, overridden = online_recipe.resolve(overrides=[*file_options, *training_overrides], start=start)
        chosen = {f"rollout.{name}": value for name, value in asdict(rollout["rollout"]).items()}
        changed = [(name, value) for name, value in recipe.rollout if chosen[name] != value]
        overridden += tuple(f"{name} = {chosen[name]} (not {value})" for name, value in changed)
    return RunFile(path, named, run_config, **rollout, engine=engine, overrides=overridden)


def _check_servers(named: Mapping[str, Any], engine: Mapping[str, Any], path: Path) -> None:
    servers = named.get("servers", [])
    if (
        servers
        and servers != [IN_PROCESS]
        and (unused := [*(f"engine.{key}" for key in engine), *{"python"} & {*named}])
    ):
        raise ArgumentError(
            f"TG-CLI-026: {path}: servers names running servers, so no server is started and {unused[0]} has no "
            "effect. Remove one of them. (--server overrides [engine] and python of the file; --python overrides its "
            "servers.)"
        )


def _checked(key: str, value: Any, path: Path) -> Any:
    if key not in KEYS:
        raise ArgumentError(
            f"TG-CLI-027: {path}: unknown key {key}. "
            f"{config.nearest(key, [*KEYS, *PLAYING, 'engine', *config.SECTIONS])}"
        )
    is_list = isinstance(value, list) and value and key in LISTS
    entry_type = (int, float) if key == "reward_weights" else str
    if (is_list and all(type(entry) is not bool and isinstance(entry, entry_type) for entry in value)) or (
        key != "reward_weights" and key != "servers" and isinstance(value, str) and value
    ):
        return value
    kind = "a list of numbers" if key == "reward_weights" else "a list of URLs" if key == "servers" else "a string"
    raise ArgumentError(f"TG-CLI-028: {path}: {key} is {value!r:.80}. It must be {kind}. Correct or remove it.")


def _previous_options(out: Path) -> tuple[config.Config, Mapping[str, Any]]:
    """Return the options of the run in `out`, or the defaults."""
    if not (out / "config.toml").is_file():
        return config.Config(), PLAYING
    run_config = config.load(out / "config.toml")
    info = RunInfo.read(out) if (out / run_info.NAME).exists() else None
    return run_config, PLAYING if info is None else {"online": info.online, "rollout": info.rollout}


def _section(overrides: Sequence[tuple[str, Any]], section: str, convert: Any) -> dict[str, Any]:
    return {name.partition(".")[2]: convert(value) for name, value in overrides if name.startswith(f"{section}.")}


def _table(name: str, values: Mapping[str, Any]) -> str:
    lines = [f"{key} = {_toml(value)}" for key, value in values.items()]
    return "\n".join([f"[{name}]", *lines] if name else lines)


def _toml(value: Any) -> str:
    """Return a value as TOML. Apart from tables, TOML values are written like JSON."""
    if isinstance(value, Mapping):
        return "{ " + ", ".join(f"{json.dumps(key)} = {_toml(entry)}" for key, entry in value.items()) + " }"
    if isinstance(value, list):
        return "[" + ", ".join(map(_toml, value)) + "]"
    return json.dumps(value, ensure_ascii=False, default=str)
