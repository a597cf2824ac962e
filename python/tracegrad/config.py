"""What a run can be told: frozen dataclasses, then a TOML file, then `--a.b value`.

Here are the options with their defaults and reasons, the reading of a TOML file and of overrides, and the refusal of
what is unknown or would have no effect. No torch, no files but the TOML. Called by the command line and by `train`.
"""

from __future__ import annotations

import ast
import difflib
import inspect
import json
import typing
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Literal

from tracegrad.errors import ArgumentError

Scalar = bool | int | float | str


@dataclass(frozen=True)
class Data:
    """Which traces are read and what is made of them."""

    on_error: Literal["raise", "skip", "quarantine"] = "raise"
    """A record that cannot be read or aligned: stop, leave it out and count it, or write it aside with the reason."""
    logprob_kind: Literal["recorded", "raw", "processed", "unknown"] = "recorded"
    """What the logprobs are of: as each record says, or this. vLLM's default is raw, before temperature and top-p."""
    text_only: bool = False
    """Take the traces as text of another model: no ratio is formed, only objectives that need none can train on them."""
    lenient: bool = False
    """After an id that cannot be known go on with the canonical tokens of the text, untrained and counted."""
    reward: str = ""
    """Name of the reward column to train on; empty: the first."""
    holdout: float = 0.05
    """Share of the groups kept out of training to measure value; 0 measures none."""

    def __post_init__(self) -> None:
        _require(0 <= self.holdout < 1, "data.holdout", self.holdout, "it must be at least 0 and below 1")


@dataclass(frozen=True)
class Pack:
    """How traces become steps and rows."""

    token_budget: int = 8192
    """Tokens of one packed row, one forward pass. Lower it where memory runs out; the gradient stays the same."""
    step_groups: int = 16
    """Groups in one optimizer step."""
    too_long: Literal["refuse", "drop", "truncate"] = "refuse"
    """A branch longer than token_budget: stop, leave its trace out, or cut its end. Both are counted."""

    def __post_init__(self) -> None:
        _require(self.token_budget > 1, "pack.token_budget", self.token_budget, "it must be at least 2")
        _require(self.step_groups > 0, "pack.step_groups", self.step_groups, "it must be at least 1")


@dataclass(frozen=True)
class Advantage:
    """From rewards to advantages."""

    baseline: Literal["group_mean", "batch_mean", "none"] = "group_mean"
    """What is subtracted: the mean of the trace's group, of all traces (for logs with one sample a prompt), or nothing."""
    scale: Literal["none", "std"] = "none"
    """What it is divided by. std is GRPO as published, none is Dr. GRPO (arXiv 2503.20783)."""
    ddof: int = 1
    """With scale std: 1 divides by n - 1 (TRL, verl, SkyRL), 0 by n (ART)."""
    singleton: Literal["refuse", "zero", "keep"] = "refuse"
    """A group of one trace has no baseline: stop, give it advantage 0, or let it keep its reward."""

    def __post_init__(self) -> None:
        _require(self.ddof in (0, 1), "advantage.ddof", self.ddof, "it must be 0 or 1")


@dataclass(frozen=True)
class Optimizer:
    """AdamW and its schedule: linear warm-up, then constant."""

    lr: float = 1e-6
    """Learning rate. 1e-6 suits models of a billion parameters and more; the quickstart's 0.7 M take 2e-4."""
    beta1: float = 0.9
    """Decay of the first moment."""
    beta2: float = 0.999
    """Decay of the second moment."""
    eps: float = 1e-8
    """Added to the root of the second moment."""
    weight_decay: float = 0.0
    """Decoupled weight decay."""
    warmup_steps: int = 0
    """Optimizer steps over which lr rises from 0 (exclusive) to its value."""
    grad_clip: float = 1.0
    """The gradient is scaled down to this norm; 0 leaves it as it is."""

    def __post_init__(self) -> None:
        _require(self.lr > 0, "optimizer.lr", self.lr, "it must be above 0")
        for name in ("beta1", "beta2"):
            _require(0 <= getattr(self, name) < 1, f"optimizer.{name}", getattr(self, name), "it must be in [0, 1)")
        for name in ("eps", "weight_decay", "warmup_steps", "grad_clip"):
            _require(getattr(self, name) >= 0, f"optimizer.{name}", getattr(self, name), "it must not be negative")


@dataclass(frozen=True)
class Train:
    """The loop."""

    epochs: int = 1
    """Passes over the groups."""
    seed: int = 0
    """Of the held-out choice and of the order of the groups."""
    updates_per_old: int = 0
    """Optimizer steps between two refreshes of `old`; 0: one epoch. At 1, theta is old and nothing clips."""
    missing: Literal["mask", "neutral", "refuse"] = "mask"
    """A term without a rollout logprob: leave it out, give it weight 1 (only where rollout is not in the surrogate), stop."""
    device: str = "auto"
    """auto: cuda where there is one, else cpu; or any torch device."""
    dtype: Literal["auto", "fp32", "bf16"] = "auto"
    """Of the forward pass. auto: bf16 autocast on cuda, fp32 on cpu. Parameters and optimizer stay fp32."""
    value_per_epoch: int = 4
    """Measurements of value in an epoch, the one at its end included; there is always one before the first step."""
    stop_below_ess: float = 0.0
    """Stop, and keep the checkpoint, when value's effective sample size falls below this share of the held-out traces."""
    tensorboard: bool = False
    """Write TensorBoard scalars beside metrics.jsonl."""

    def __post_init__(self) -> None:
        _require(self.epochs > 0, "train.epochs", self.epochs, "it must be at least 1")
        for name in ("seed", "updates_per_old"):
            _require(getattr(self, name) >= 0, f"train.{name}", getattr(self, name), "it must not be negative")
        _require(self.value_per_epoch > 0, "train.value_per_epoch", self.value_per_epoch, "it must be at least 1")
        _require(0 <= self.stop_below_ess < 1, "train.stop_below_ess", self.stop_below_ess, "it must be in [0, 1)")


@dataclass(frozen=True)
class Checkpoint:
    """When the run's state is written, and how much of it stays."""

    every: int = 0
    """Optimizer steps between checkpoints; 0: at the end of each epoch."""
    keep: int = 2
    """How many of the newest checkpoints stay."""

    def __post_init__(self) -> None:
        _require(self.every >= 0, "checkpoint.every", self.every, "it must not be negative")
        _require(self.keep > 0, "checkpoint.keep", self.keep, "it must be at least 1")


@dataclass(frozen=True)
class Choice:
    """Which objective: a preset's name and what is changed in it."""

    preset: str = "DAPO"
    """Attribute of tracegrad.presets, or module:NAME."""
    overrides: tuple[tuple[str, Scalar], ...] = ()
    """Fields of the preset by their own names: objective.surrogate.high = 0.28."""


@dataclass(frozen=True)
class Config:
    """A whole run.

    >>> Config().optimizer.lr
    1e-06
    """

    data: Data = field(default_factory=Data)
    pack: Pack = field(default_factory=Pack)
    advantage: Advantage = field(default_factory=Advantage)
    optimizer: Optimizer = field(default_factory=Optimizer)
    train: Train = field(default_factory=Train)
    checkpoint: Checkpoint = field(default_factory=Checkpoint)
    objective: Choice = field(default_factory=Choice)


SECTIONS = tuple(f.name for f in fields(Config))


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
        config = update(config, _flatten(read_toml(path)), where=str(path))
    return update(config, overrides, where="")


def update(config: Config, values: Iterable[tuple[str, Any]], *, where: str = "") -> Config:
    """A config with the named options changed; `where` opens the error message."""
    changes: dict[str, dict[str, Any]] = {}
    preset, objective = config.objective.preset, dict(config.objective.overrides)
    for name, value in values:
        section, _, key = name.partition(".")
        if name in ("objective", "objective.preset"):
            if str(value) != preset:
                preset, objective = str(value), {}
        elif section == "objective":
            objective[key] = _scalar(value)
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
                f"{path}: this Python has no TOML reader. The file cannot be read. pip install tomli, or use Python 3.11 or newer."
            ) from None
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ArgumentError(f"{path}: {error.strerror}. The run has no config. Give --config a TOML file.") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ArgumentError(f"{path}: not TOML: {error}. Nothing of it was used. Correct that place.") from error


def to_toml(config: Config) -> str:
    """The whole config as TOML that `load` reads back to an equal one.

    >>> "lr = 1e-06" in to_toml(Config())
    True
    """
    blocks = []
    for section in SECTIONS[:-1]:
        part = getattr(config, section)
        lines = [f"{f.name} = {_toml(getattr(part, f.name))}" for f in fields(part)]
        blocks.append("\n".join([f"[{section}]", *lines]))
    chosen = config.objective
    lines = [f"preset = {_toml(chosen.preset)}", *(f"{name} = {_toml(value)}" for name, value in chosen.overrides)]
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
        text = _field_docs(type(getattr(Config(), section)))[key]
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


def _field_docs(cls: type) -> dict[str, str]:
    body = ast.parse(inspect.getsource(cls)).body[0]
    assert isinstance(body, ast.ClassDef)
    docs: dict[str, str] = {}
    for here, after in zip(body.body, body.body[1:], strict=False):
        if isinstance(here, ast.AnnAssign) and isinstance(here.target, ast.Name) and isinstance(after, ast.Expr):
            docs[here.target.id] = ast.literal_eval(after.value)
    return docs


def _choices(kind: Any) -> str:
    return " of " + ", ".join(f"`{c}`" for c in typing.get_args(kind)) if typing.get_origin(kind) is Literal else ""


def _flatten(nested: Mapping[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    flat: list[tuple[str, Any]] = []
    for key, value in nested.items():
        if isinstance(value, Mapping):
            flat.extend(_flatten(value, f"{prefix}{key}."))
        else:
            flat.append((prefix + key, value))
    return sorted(flat, key=lambda pair: pair[0] != "objective.preset")


def _typed(name: str, value: Any, where: str) -> Scalar:
    known = options()
    opening = f"{where}: " if where else ""
    if name not in known:
        raise ArgumentError(f"{opening}{name} is no option. It would have no effect. {nearest(name, known)}")
    kind = known[name][0]
    try:
        return _convert(kind, value)
    except ValueError as error:
        raise ArgumentError(f"{opening}{name} is {value!r}. It must be {error}. Correct it or leave it out.") from None


def _convert(kind: Any, value: Any) -> Scalar:
    if typing.get_origin(kind) is Literal:
        if value not in typing.get_args(kind):
            raise ValueError("one of " + ", ".join(typing.get_args(kind)))
        return value
    if isinstance(value, str) and kind is not str:
        value = _scalar(value)
    if kind is float and type(value) is int:
        return float(value)
    if type(value) is not kind:
        raise ValueError({bool: "true or false", int: "a whole number", float: "a number", str: "a string"}[kind])
    return value


def _scalar(value: Any) -> Scalar:
    """A string from the command line as TOML would read it; what is no TOML scalar stays a string."""
    if not isinstance(value, str):
        return value
    if value in ("true", "false"):
        return value == "true"
    for kind in (int, float):
        try:
            return kind(value)
        except ValueError:
            continue
    return value


def _toml(value: Any) -> str:
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(_toml(v) for v in value) + "]"
    return json.dumps(value, ensure_ascii=False) if isinstance(value, (str, bool)) else repr(value)


def nearest(name: str, known: Iterable[str]) -> str:
    """The cure for an unknown name: the nearest valid one, or all of them where none is near."""
    known = list(known)
    close = difflib.get_close_matches(name, known, 1, 0.5) or [k for k in known if k.split(".")[-1] == name.split(".")[-1]]
    return f"Did you mean {close[0]}?" if close else f"Known: {', '.join(known)}."


def _require(holds: bool, name: str, value: Any, rule: str) -> None:
    if not holds:
        raise ArgumentError(f"{name} is {value!r}: {rule}. A run with it would be meaningless. Correct it or leave it out.")

