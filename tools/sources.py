"""Read the Python files of the package, each parsed once in a process."""

import ast
from functools import cache
from pathlib import Path

PACKAGE = Path(__file__).parent.parent / "python" / "tracegrad"


@cache
def package_files() -> tuple[Path, ...]:
    """Return the files of the package, sorted."""
    return tuple(sorted(PACKAGE.rglob("*.py")))


@cache
def parsed(path: Path) -> ast.Module:
    """Return the tree of a file."""
    return ast.parse(path.read_text(encoding="utf-8"))


@cache
def nodes(path: Path) -> tuple[ast.AST, ...]:
    """Return every node of a file, in the order of `ast.walk`."""
    return tuple(ast.walk(parsed(path)))
