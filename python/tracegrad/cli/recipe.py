"""`--recipe` and `--like`, which two verbs have: a recipe as the start of a run, and what is said of it."""

import argparse
from collections.abc import Sequence
from typing import Any

from tracegrad import recipes
from tracegrad.errors import ArgumentError


def add_to(parser: Any) -> None:
    """Adds the flags, and that of an objective alone."""
    parser.add_argument(
        "--objective", metavar="NAME", help="of tracegrad.presets, or file.py:NAME, module:NAME (default DAPO)"
    )
    parser.add_argument(
        "--recipe", metavar="NAME", help="what a paper fixes: of tracegrad.recipes, or file.py:NAME, module:NAME"
    )
    parser.add_argument(
        "--like", metavar="PEER:FILE", help="a config of trl, verl, skyrl or art, such as trl:config.yaml"
    )


def told_recipe(told: argparse.Namespace) -> recipes.Recipe | None:
    """The recipe that the flags name; None without them.

    Raises:
        ArgumentError: for both flags, and for what is no recipe.
    """
    if told.recipe and told.like:
        raise ArgumentError("--recipe and --like are both told. Each is the whole start of a run. Give one of them.")
    if told.recipe:
        return recipes.find(told.recipe)
    return recipes.like(str(told.like)) if told.like else None


def lines(
    told: argparse.Namespace, recipe: recipes.Recipe, otherwise: Sequence[str], idle: Sequence[str] = ()
) -> list[str]:
    """What the recipe sets, what each option of a config from elsewhere is here, where it differs, and what
    was told otherwise.

    Args:
        idle: options that have no effect here.
    """
    sets = ", ".join(f"{name} = {value}" for name, value in recipe.options if name not in idle)
    left = ", ".join(f"{name} = {value}" for name, value in recipe.options if name in idle)
    spelled = [f"         {name}: {here}" for name, here in recipe.told]
    spelled += [f"differs  on purpose, {name}: {words}" for name, words in recipe.differs]
    without = [f"         left out, as it is of training from a file: {left}"] if left else []
    wins = [f"told     otherwise, which wins: {', '.join(otherwise)}"] if otherwise else []
    return [f"recipe   {told.recipe or told.like}: {sets}", *spelled, *without, *wins]
