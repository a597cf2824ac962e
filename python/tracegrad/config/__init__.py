"""What a run can be told: frozen dataclasses, then a TOML file, then `--a.b value`."""

from tracegrad.config.options import (
    SECTIONS,
    Advantage,
    Checkpoint,
    Choice,
    Config,
    Data,
    Optimizer,
    Pack,
    Parallel,
    Train,
)
from tracegrad.config.reading import as_dict, describe, load, nearest, options, read_toml, to_toml, update

__all__ = [
    "SECTIONS",
    "Advantage",
    "Checkpoint",
    "Choice",
    "Config",
    "Data",
    "Optimizer",
    "Pack",
    "Parallel",
    "Train",
    "as_dict",
    "describe",
    "load",
    "nearest",
    "options",
    "read_toml",
    "to_toml",
    "update",
]
