"""Files that move, as a table (`tools/moves.csv`), and two checks of it:

    python tools/moves.py left               # where tracked files still name an old path or module
    python tools/moves.py bodies COMMIT      # which definitions of moved files are not what they were at COMMIT

A line of the table has the old and the new path of a file, relative to the tree, and may have the old and the new name
of a definition in it. A new path may take several files. An empty new path says that the file is deleted, and an empty
new name that the definition is.
"""

from __future__ import annotations

import argparse
import ast
import csv
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parent.parent
TABLE = Path("tools/moves.csv")
PACKAGE = "python/"


@dataclass(frozen=True)
class Move:
    """A line of the table."""

    old_path: str
    new_path: str
    old_name: str = ""
    new_name: str = ""

    @property
    def module(self) -> str:
        """The dotted name that the old file had, empty if it was no module of the package.

        >>> Move("python/tracegrad/learner/run.py", "python/tracegrad/trainer/run.py").module
        'tracegrad.learner.run'
        """
        if not self.old_path.startswith(PACKAGE) or not self.old_path.endswith(".py"):
            return ""
        return self.old_path.removeprefix(PACKAGE).removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def read_moves(root: Path) -> list[Move]:
    """Return the lines of the table of a tree."""
    with (root / TABLE).open(newline="") as file:
        return [Move(**row) for row in csv.DictReader(file)]


def git(root: Path, *arguments: str) -> str:
    """Return what a git command of a tree prints."""
    return subprocess.run(["git", *arguments], cwd=root, capture_output=True, text=True, check=True).stdout


def left(root: Path) -> Iterator[str]:
    """Yield the places in tracked text files at which an old path or module is named."""
    moved = {move.old_path: move for move in read_moves(root) if move.old_path != move.new_path}
    names = [name for move in moved.values() for name in (move.old_path.removeprefix(PACKAGE), move.module) if name]
    if not names:
        return
    longest_first = "|".join(map(re.escape, sorted(names, key=len, reverse=True)))
    pattern = re.compile(rf"(?<![\w./])(?:python/)?({longest_first})\b(?!\.py)")
    for path in git(root, "ls-files").splitlines():
        if Path(path) == TABLE or not (root / path).is_file():
            continue
        try:
            text = (root / path).read_text()
        except UnicodeDecodeError:
            continue
        for number, line in enumerate(text.splitlines(), 1):
            for found in pattern.finditer(line):
                yield f"{path}:{number}: names {found.group(1)}"


class _Renamed(ast.NodeTransformer):
    """Old names become new ones wherever code uses them."""

    def __init__(self, names: dict[str, str]) -> None:
        self.names = names

    def generic_visit(self, node: ast.AST) -> ast.AST:
        for field in ("id", "attr", "arg", "name"):
            value = getattr(node, field, None)
            if isinstance(value, str):
                setattr(node, field, self.names.get(value, value))
        return super().generic_visit(node)


def definitions(source: str, names: dict[str, str]) -> dict[str, str]:
    """Return the functions, classes and values of a module by name, as trees without places and imports.

    >>> definitions("import os\\ndef f(x): return x", {"f": "g"}) == definitions("def g(x):\\n    return x", {})
    True
    """
    found = {}
    for node in _Renamed(names).visit(ast.parse(source)).body:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            found[node.name] = ast.dump(node)
        elif isinstance(node, (ast.Assign, ast.AnnAssign)):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            for target in targets:
                if isinstance(target, ast.Name) and target.id != "__all__":
                    found[target.id] = ast.dump(node)
    return found


def bodies(root: Path, commit: str) -> Iterator[str]:
    """Yield the definitions of moved Python files that are gone, or are not what they were at a commit."""
    moves = read_moves(root)
    names = {move.old_name: move.new_name for move in moves if move.old_name and move.new_name}
    deleted = {(move.old_path, move.old_name) for move in moves if move.old_name and not move.new_name}
    for old, new in sorted({(m.old_path, m.new_path) for m in moves if m.new_path and m.old_path.endswith(".py")}):
        before = definitions(git(root, "show", f"{commit}:{old}"), names)
        after = definitions((root / new).read_text(), {})
        gone = {names.get(name, name) for path, name in deleted if path == old}
        for name, tree in before.items():
            if name in gone:
                continue
            if name not in after:
                yield f"{new}: {name} of {old} is gone"
            elif after[name] != tree:
                yield f"{new}: {name} is another one than in {old}"


def main() -> None:
    """Run the command line."""
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("what", choices=["left", "bodies"])
    options.add_argument("commit", nargs="?", help="of bodies")
    given = options.parse_args()
    if (given.what == "bodies") != bool(given.commit):
        options.error("bodies takes a commit, and left none")
    found = list(left(ROOT) if given.what == "left" else bodies(ROOT, given.commit))
    print("\n".join(found) or "nothing")
    sys.exit(bool(found))


if __name__ == "__main__":
    main()
