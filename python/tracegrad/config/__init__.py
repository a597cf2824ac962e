"""Read the options of a run from defaults, a TOML file and `--a.b value`.

Names and values become frozen dataclasses, or an error with the nearest valid name.

    >>> from tracegrad.config import FEATURES, SECTIONS, Config, load
    >>> config = load(overrides=[("objective", "GRPO"), ("optimizer.lr", "2e-4")])
    >>> [name for name in SECTIONS if getattr(config, name) != getattr(Config(), name)]
    ['optimizer', 'objective']
    >>> "filter" in FEATURES, "optimizer" in FEATURES
    (True, False)
"""

from tracegrad.config.dotted_keys import did_you_mean, join_list, nearest, scalar
from tracegrad.config.parse import as_dict, describe, field_docs, flatten, load, options, read_toml, to_toml, update
from tracegrad.config.schema import (
    FEATURES,
    SECTIONS,
    Advantage,
    Checkpoint,
    Config,
    Data,
    FieldMap,
    Filter,
    Mixture,
    ObjectiveConfig,
    Optimizer,
    Pack,
    Parallel,
    RewardKl,
    Schedule,
    Stop,
    Train,
)

__all__ = [
    "FEATURES",
    "SECTIONS",
    "Advantage",
    "Checkpoint",
    "Config",
    "Data",
    "FieldMap",
    "Filter",
    "Mixture",
    "ObjectiveConfig",
    "Optimizer",
    "Pack",
    "Parallel",
    "RewardKl",
    "Schedule",
    "Stop",
    "Train",
    "as_dict",
    "describe",
    "did_you_mean",
    "field_docs",
    "flatten",
    "join_list",
    "load",
    "nearest",
    "options",
    "read_toml",
    "scalar",
    "to_toml",
    "update",
]
