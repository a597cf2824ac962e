"""The field's methods as values of `tracegrad.algebra.Objective`, one file per family.

In comes nothing; out go values. A preset is taken as it is, or with fields changed by name: `override(DAPO,
"surrogate.high", "0.3")`. On a command line its name is an attribute here, or `file.py:NAME` or `module:NAME` for a
value of your own, or its code as text. There is no registry. Its files, each using those before it alone: `grpo`,
`mismatch`, `trace_level`, `weighted_gradient`, `offline`, `peers`, `trust_region`.
"""

import difflib
import importlib
from typing import TypeVar

from tracegrad import algebra
from tracegrad.algebra import Objective, with_beta, with_entropy, with_kl
from tracegrad.algebra.spell import unspell
from tracegrad.errors import ArgumentError
from tracegrad.presets import grpo, mismatch, offline, peers, trace_level, trust_region, weighted_gradient
from tracegrad.presets.grpo import *  # noqa: F403
from tracegrad.presets.mismatch import *  # noqa: F403
from tracegrad.presets.offline import *  # noqa: F403
from tracegrad.presets.peers import *  # noqa: F403
from tracegrad.presets.trace_level import *  # noqa: F403
from tracegrad.presets.trust_region import *  # noqa: F403
from tracegrad.presets.weighted_gradient import *  # noqa: F403
from tracegrad.user_code import module_of

__all__ = ["find", "with_beta", "with_entropy", "with_kl"]
__all__ += grpo.__all__
__all__ += mismatch.__all__
__all__ += offline.__all__
__all__ += peers.__all__
__all__ += trace_level.__all__
__all__ += trust_region.__all__
__all__ += weighted_gradient.__all__


_T = TypeVar("_T")


def find(name: str) -> Objective:
    """The objective called `name` here, the value NAME of `module:NAME` or `file.py:NAME`, or what a text spells.

    Raises:
        ArgumentError: if there is none, with the nearest name; if it is not an Objective.

    >>> find("DAPO").surrogate.high
    0.28
    >>> find('Objective(Clip(0.2, 0.3), Ratio("theta", "old"))').surrogate.high
    0.3
    """
    if name.lstrip().startswith("Objective("):
        return unspell(name, vars(algebra))
    return named(name, Objective, __name__, "objective")


def named(name: str, kind: type[_T], room: str, what: str) -> _T:
    """The value of a kind called `name` in a room, or NAME of `module:NAME` or `file.py:NAME`."""
    module, _, attribute = name.rpartition(":")
    try:
        home = vars(module_of(module) if module.endswith(".py") else importlib.import_module(module or room))
    except Exception as error:
        raise ArgumentError(
            f"{what} {name!r}: {module!r} cannot be imported ({type(error).__name__}: {error}). Nothing is known of "
            "the loss. Write module:NAME, or file.py:NAME."
        ) from error
    value = home.get(attribute)
    if isinstance(value, kind):
        return value
    names = [key for key, each in home.items() if isinstance(each, kind) and not key.startswith("_")]
    by_letters = {key.lower(): key for key in names}
    told = attribute.lower().replace("-", "_")
    near = [by_letters[each] for each in difflib.get_close_matches(told, by_letters, 2, 0.6)]
    near = [by_letters[told]] if told in by_letters else near
    hint = f" Did you mean {' or '.join(near)}?" if near else ""
    raise ArgumentError(f"no {what} is called {name!r}.{hint} There are {', '.join(sorted(names)) or 'none'}.")
