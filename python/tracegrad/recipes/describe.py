"""docs/losses.md: every recipe, and every preset with its formula, its code and its paper, read from the values.

python -m tracegrad.recipes.describe docs/losses.md
"""

import ast
import itertools
import re
import sys
from pathlib import Path
from types import ModuleType
from typing import TypeVar

from tracegrad.algebra import Objective
from tracegrad.algebra.spell import spell
from tracegrad.presets import grpo, mismatch, offline, peers, trace_level, trust_region, weighted_gradient
from tracegrad.recipes import papers
from tracegrad.recipes.recipe import Recipe

FAMILIES: tuple[ModuleType, ...] = (grpo, trace_level, weighted_gradient, trust_region, mismatch, offline, peers)
_T = TypeVar("_T")

_HEAD = """# Losses

Every recipe of `tracegrad.recipes`, and every preset of `tracegrad.presets`: what it says, its formula as
`print(preset)` shows it, the value as code, its paper, and how peers' conventions differ. Which one to pick:
[choosing.md](choosing.md). Whose code gives the same numbers: [PARITY.md](../PARITY.md). Generated from the code:
`python -m tracegrad.recipes.describe docs/losses.md`.

In the formulas *theta* is being trained, *old* is recomputed before the step, *rollout* is recorded, *ref* is the
reference model; A is the advantage, a *trace* is what papers call a sequence, *scale* comes from integer counts over
the whole step. Weights and gates carry no gradient. A preset is changed by its fields' names:
`override(presets.DAPO, "surrogate.high", 0.3)`, or `--objective DAPO --objective.surrogate.high 0.3`.

Not here: BAPO (arXiv 2510.18927). Its bounds, from [0.6, 1.2] up to [0.9, 3], are searched at every step
until good tokens make up a given share of the loss of the whole batch, and the policy being trained sees a micro-batch
at a time ([DESIGN.md](../DESIGN.md));
`--objective.surrogate.low 0.4 --objective.surrogate.high 0.2` is where it begins.
"""


def describe() -> str:
    """The page as markdown."""
    parts = [_HEAD, _recipes(), _index()]
    for module in FAMILIES:
        title, _, rest = (module.__doc__ or "").partition("\n")
        parts.append(f"## {title.rstrip('.')}\n" + (f"\n{rest.strip()}\n" if rest.strip() else ""))
        parts += [_section(name, value, text) for name, value, text in documented(module, Objective)]
    return "\n".join(parts)


def documented(module: ModuleType, kind: type[_T]) -> list[tuple[str, _T, str]]:
    """Name, value and docstring of each value of a kind in a module, in the order of the source."""
    body = ast.parse(Path(str(module.__file__)).read_text(encoding="utf-8")).body
    found = []
    for here, after in itertools.pairwise([*body, ast.Pass()]):
        if not (isinstance(here, ast.Assign) and isinstance(here.targets[0], ast.Name)):
            continue
        name = here.targets[0].id
        value = getattr(module, name)
        if name.startswith("_") or not isinstance(value, kind):
            continue
        if not (isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant)):
            raise ValueError(f"{module.__name__}: {name} without a docstring")
        found.append((name, value, str(after.value.value)))
    return found


_RECIPES = """## Recipes

A preset is the loss alone. A recipe says what else its paper fixes, as options of a run, and nothing that it leaves
open: `tracegrad train --recipe DAPO`, or `tracegrad.recipes.DAPO`, whose `print` shows all of it. What is told by hand
or in a file wins over a recipe, and is said in a line.
"""


def _recipes() -> str:
    rows = [_RECIPES, "| recipe | what it is | what it sets |", "|---|---|---|"]
    for name, value, text in documented(papers, Recipe):
        sets = ", ".join(f"`{option} = {told}`" for option, told in value.options)
        first, *rest = _paragraphs(text)
        rows.append(f"| {name} | {first} {_linked(' '.join(rest))} | {sets} |")
    return "\n".join(rows) + "\n"


def _index() -> str:
    rows = ["## Presets\n"]
    rows += ["| preset | what it is | needs |", "|---|---|---|"]
    for module in FAMILIES:
        for name, value, text in documented(module, Objective):
            needs = value.needs
            wanted = [each for each in ("old", "rollout", "ref", "proximal") if getattr(needs, each)]
            whole = ["whole traces in a batch"] if needs.trace_ratio else []
            told = ", ".join([*wanted, *whole]) or "nothing"
            first = _paragraphs(text)[0].replace("|", "\\|")
            rows.append(f"| [{name}](#{name.lower()}) | {first} | {told} |")
    return "\n".join(rows) + "\n"


def _section(name: str, value: Objective, text: str) -> str:
    first, *rest = _paragraphs(text)
    parts = [f"### {name}", _linked(first), f"```text\n{value}\n```", f"```python\n{_wrapped(spell(value))}\n```"]
    return "\n\n".join([*parts, *map(_linked, rest)]) + "\n"


def _paragraphs(text: str) -> list[str]:
    return [" ".join(each.split()) for each in text.strip().split("\n\n")]


def _linked(text: str) -> str:
    return re.sub(r"arXiv (\d{4}\.\d{4,5})", r"[arXiv \1](https://arxiv.org/abs/\1)", text)


def _wrapped(code: str, indent: str = "") -> str:
    """One argument a line where a call or a tuple is long, as a formatter would."""
    if len(indent) + len(code) <= 100 or not code.endswith(")"):
        return indent + code
    opening = code.index("(") + 1
    parts = [_wrapped(part, indent + "    ") for part in _arguments(code[opening:-1])]
    return "\n".join([indent + code[:opening], *(f"{part}," for part in parts), f"{indent})"])


def _arguments(inner: str) -> list[str]:
    """The arguments of a call, split at its own commas."""
    depth, parts = 0, [""]
    for character in inner:
        depth += (character == "(") - (character == ")")
        if character == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += character
    return [part.strip() for part in parts if part.strip()]


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(describe(), encoding="utf-8")
