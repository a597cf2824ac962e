"""Recipes: what a paper or a peer's config fixes of a run, the objective and what belongs to it, as values.

In comes a name, a config of TRL, verl, SkyRL or ART, or measured traces; out goes a `Recipe`. A preset is the loss
alone; a recipe is the preset with its advantages and whatever else its source says. `tracegrad train --recipe DAPO`
begins with one. There is no registry. Its files, each using those before it alone: `recipe`, `papers`; `for_data` (by
what is measured); `peer`, `rates`, `art`, `trl`, `skyrl`, `verl_options`, `verl`, `elsewhere` (configs of others);
`describe`, `coming` (the pages that list them).
"""

from tracegrad import presets
from tracegrad.algebra import Objective
from tracegrad.errors import ArgumentError
from tracegrad.recipes import papers, verl
from tracegrad.recipes.art import from_art
from tracegrad.recipes.elsewhere import like
from tracegrad.recipes.for_data import Advice, for_data
from tracegrad.recipes.papers import *  # noqa: F403
from tracegrad.recipes.recipe import Recipe
from tracegrad.recipes.skyrl import from_skyrl
from tracegrad.recipes.trl import from_trl
from tracegrad.recipes.verl import from_verl

__all__ = ["Advice", "Recipe", "find", "for_data", "from_art", "from_skyrl", "from_trl", "from_verl", "like"]
__all__ += papers.__all__


def find(name: str) -> Recipe:
    """The recipe called `name` here, one of verl's corrections, or the value NAME of `module:NAME` or `file.py:NAME`.

    Raises:
        ArgumentError: if there is none, with the nearest name.

    >>> find("DAPO").advantage.scale
    'std'
    """
    if name in verl.NAMES:
        return verl.named(name)
    if isinstance(getattr(presets, name, None), Objective) and name not in __all__:
        raise ArgumentError(
            f"{name} is an objective without a recipe: its source leaves open how rewards become advantages. Nothing "
            f"but the loss would be set. Say --objective {name}, and --advantage.scale as you need it."
        )
    return presets.named(name, Recipe, __name__, "recipe")
