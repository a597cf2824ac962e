"""What a run can be told: frozen dataclasses, then a TOML file, then `--a.b value`.

In come names and values as text or TOML; out goes an `Options`, or an error with the nearest valid name. Its files,
each using those before it alone: `mapping`, `options`, `reading`.
"""

from tracegrad.config.mapping import Map
from tracegrad.config.options import (
    FEATURES,
    SECTIONS,
    Advantage,
    Checkpoint,
    Choice,
    Config,
    Data,
    Filter,
    Mixture,
    Optimizer,
    Pack,
    Parallel,
    RewardKl,
    Schedule,
    Stop,
    Train,
)
from tracegrad.config.reading import as_dict, describe, field_docs, flatten, load, options, read_toml, to_toml, update
from tracegrad.dotted import nearest, scalar, split_names

__all__ = [
    "FEATURES",
    "SECTIONS",
    "Advantage",
    "Checkpoint",
    "Choice",
    "Config",
    "Data",
    "Filter",
    "Map",
    "Mixture",
    "Optimizer",
    "Pack",
    "Parallel",
    "RewardKl",
    "Schedule",
    "Stop",
    "Train",
    "as_dict",
    "describe",
    "field_docs",
    "flatten",
    "load",
    "nearest",
    "options",
    "read_toml",
    "scalar",
    "split_names",
    "to_toml",
    "update",
]
