"""Define recipes: an objective with everything else that its paper or another trainer's config sets.

`find` returns one by name; `from_trl`, `from_verl`, `from_skyrl` and `from_art` import configs; `for_data` recommends
one from measurements. `tracegrad train --recipe DAPO` starts from one.
"""

from dataclasses import replace

from tracegrad.errors import ArgumentError
from tracegrad.objective import Objective, presets
from tracegrad.recipes import recipe, verl
from tracegrad.recipes.art import from_art
from tracegrad.recipes.config_file import like
from tracegrad.recipes.recipe import *  # noqa: F403
from tracegrad.recipes.recipe import Recipe
from tracegrad.recipes.recommendation import Advice, for_data
from tracegrad.recipes.skyrl import from_skyrl
from tracegrad.recipes.trl import from_trl
from tracegrad.recipes.verl import from_verl

__all__ = ["Advice", "Recipe", "find", "for_data", "from_art", "from_skyrl", "from_trl", "from_verl", "like"]
__all__ += recipe.__all__


def find(name: str) -> Recipe:
    """Return a recipe by name: one of this package, one of verl's corrections, `module:NAME` or `file.py:NAME`.

    Raises:
        ArgumentError: if there is no such recipe, with the nearest name.

    >>> find("DAPO").advantage.scale
    'std'
    """
    if name in verl.NAMES:
        return replace(verl.named(name), source=name)
    if isinstance(getattr(presets, name, None), Objective) and name not in __all__:
        raise ArgumentError(
            f"TG-RECIPE-001: {name} is an objective without a recipe: its source does not define the advantages. Set "
            f"objective {name}, and choose advantage.scale."
        )
    return replace(presets.load_named(name, Recipe, __name__, "recipe"), source=name)
