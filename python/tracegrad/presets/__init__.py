"""The field's methods as values of `tracegrad.algebra.Objective`, one file per family.

A preset is taken as it is, or with fields changed by name: `override(DAPO, "surrogate.high", "0.3")`. On a command
line its name is an attribute here, or `module:NAME` for a value of your own. There is no registry.
"""

from __future__ import annotations

import difflib
import importlib

from tracegrad.algebra import Objective, with_kl
from tracegrad.errors import ArgumentError
from tracegrad.presets.grpo import DAPO, DAPO_DIRECT, DR_GRPO, DR_GRPO_DIRECT, GRPO, GRPO_DIRECT
from tracegrad.presets.supervised import WEIGHTED_SFT

__all__ = [
    "DAPO",
    "DAPO_DIRECT",
    "DR_GRPO",
    "DR_GRPO_DIRECT",
    "GRPO",
    "GRPO_DIRECT",
    "WEIGHTED_SFT",
    "find",
    "with_kl",
]


def find(name: str) -> Objective:
    """The objective called `name` here, or the value NAME of `module:NAME`.

    Raises:
        ArgumentError: if there is none, with the nearest name; if it is not an Objective.

    >>> find("DAPO").surrogate.high
    0.28
    """
    module, _, attribute = name.rpartition(":")
    try:
        home = importlib.import_module(module) if module else importlib.import_module(__name__)
    except ImportError as error:
        raise ArgumentError(f"objective {name!r}: no module {module!r} ({error}). Write module:NAME.") from error
    value = getattr(home, attribute, None)
    if isinstance(value, Objective):
        return value
    names = [key for key, each in vars(home).items() if isinstance(each, Objective)]
    near = difflib.get_close_matches(attribute, names, 1, 0.4)
    hint = f" Did you mean {near[0]}?" if near else ""
    raise ArgumentError(f"no objective is called {name!r}.{hint} There are {', '.join(sorted(names)) or 'none'}.")
