"""Run functions taken from verl's installed source, and give their rows."""

import ast
import textwrap
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

VERL = {"kl": ("k1", None), "abs": ("abs", None), "mse": ("k2", None), "low_var_kl": ("k3", 10.0)}


def taken(module: str, name: str, scope: dict[str, Any]) -> Any:
    """A function or method of a module that is not imported, nor are the packages around it."""
    top, *below = module.split(".")
    found = find_spec(top)
    assert found
    assert found.submodule_search_locations
    source = Path(found.submodule_search_locations[0], *below).with_suffix(".py").read_text(encoding="utf-8")
    nodes = [each for each in ast.walk(ast.parse(source)) if isinstance(each, ast.FunctionDef) and each.name == name]
    assert len(nodes) == 1
    text = textwrap.dedent(ast.get_source_segment(source, nodes[0], padded=True) or "")
    exec("from __future__ import annotations\n" + text, scope)
    return scope[name]


class Rows(dict[str, torch.Tensor]):
    """A batch as verl and SkyRL hold one."""

    @property
    def batch_size(self) -> tuple[int]:
        return (len(self["response_mask"]),)

    @property
    def metadata(self) -> dict[str, Any]:
        return self.setdefault("told", {})  # type: ignore[return-value]
