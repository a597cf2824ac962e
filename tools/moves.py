"""Files that move, as a table (`tools/moves.csv`), and two checks of it:

    python tools/moves.py left               # where tracked files still name an old path or module
    python tools/moves.py bodies COMMIT      # definitions of moved files that differ from COMMIT

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
CORE = "rust/core/src/"


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

        >>> Move("python/tracegrad/trainer/trainer.py", "python/tracegrad/trainer/run.py").module
        'tracegrad.trainer.trainer'
        """
        if not self.old_path.startswith(PACKAGE) or not self.old_path.endswith(".py"):
            return ""
        return self.old_path.removeprefix(PACKAGE).removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def read_moves(root: Path) -> list[Move]:
    """Return the lines of the table of a tree."""
    with (root / TABLE).open(newline="") as file:
        return [Move(**row) for row in csv.DictReader(file)]


def git(root: Path, *arguments: str) -> str:
    """Return the output of a git command in a tree."""
    return subprocess.run(["git", *arguments], cwd=root, capture_output=True, text=True, check=True).stdout


def _end(path: str) -> str:
    """How patterns such as `*/a/b.py` name a file of the package: by its folder and name.

    >>> _end("python/tracegrad/a/b.py"), _end("python/tracegrad/b.py")
    ('a/b.py', '')
    """
    end = path.removeprefix(f"{PACKAGE}tracegrad/")
    return end if path.startswith(PACKAGE) and "/" in end and not end.endswith("__init__.py") else ""


def _of_core(path: str) -> str:
    """The name that code of the core has for a file of it, empty for other files.

    A file at the root has none here: functions may have the same name.

    >>> _of_core("rust/core/src/a/b.rs"), _of_core("rust/core/src/a/mod.rs"), _of_core("rust/core/src/a.rs")
    ('crate::a::b', '', '')
    """
    if not path.startswith(CORE) or not path.endswith(".rs"):
        return ""
    name = path.removeprefix(CORE).removesuffix(".rs").removesuffix("/mod").replace("/", "::")
    return f"crate::{name}" if "::" in name else ""


def _is_core(root: Path, name: str) -> bool:
    path = root / CORE / name.removeprefix("crate::").replace("::", "/")
    return path.with_suffix(".rs").is_file() or (path / "mod.rs").is_file()


def _is_there(root: Path, name: str) -> bool:
    """Return whether a path or a dotted name belongs to a current file or package."""
    path = root / PACKAGE / (name if name.endswith(".py") else name.replace(".", "/"))
    return path.is_file() or path.with_suffix(".py").is_file() or (path / "__init__.py").is_file()


def left(root: Path) -> Iterator[str]:
    """Yield the places in tracked text files at which an old path or module is named."""
    moved = {move.old_path: move for move in read_moves(root) if move.old_path != move.new_path}
    names = [name for move in moved.values() for name in (move.old_path.removeprefix(PACKAGE), move.module) if name]
    names = [name for name in names if not _is_there(root, name)]
    names += [name for old in moved if (name := _of_core(old)) and not _is_core(root, name)]
    if not names:
        return
    today = [f"/{path}" for path in git(root, "ls-files").splitlines()]
    ends = [end for old in moved if (end := _end(old)) and not any(path.endswith(f"/{end}") for path in today)]
    longest_first = "|".join(map(re.escape, sorted(names, key=len, reverse=True)))
    words = {"tracegrad", "crate::", *(Path(old).suffix for old in moved)} - {""}
    pattern = re.compile(rf"(?<![\w./])(?:python/)?({longest_first})\b(?!\.py)")
    within = re.compile(rf"(?<!\w)({'|'.join(map(re.escape, ends)) or '(?!)'})\b")
    for path in git(root, "ls-files").splitlines():
        if Path(path) == TABLE or not (root / path).is_file():
            continue
        try:
            text = (root / path).read_text()
        except UnicodeDecodeError:
            continue
        for number, line in enumerate(text.splitlines(), 1):
            if not any(word in line for word in words):  # most lines, and the expressions are long
                continue
            for found in (*pattern.finditer(line), *within.finditer(line)):
                yield f"{path}:{number}: names {found.group(1)}"


class _Normal(ast.NodeTransformer):
    """Old names become new ones, and what names a module is left out, as moving changes it."""

    def __init__(self, names: dict[str, str], modules: set[str], dotted: dict[str, str]) -> None:
        self.names, self.modules, self.dotted = names, modules, dotted

    def visit_Attribute(self, node: ast.Attribute) -> ast.AST:
        """Take `f` for `module.f`."""
        if isinstance(node.value, ast.Name) and node.value.id in self.modules:
            return ast.Name(self.names.get(node.attr, node.attr))
        return self.generic_visit(node)

    def visit_Import(self, node: ast.Import) -> None:
        """Leave imports out."""

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        """Leave imports out."""

    def visit_Constant(self, node: ast.Constant) -> ast.AST:
        """Replace dotted names in texts, and leave out how the lines of a docstring are broken."""
        if isinstance(node.value, str):
            longest_first = sorted(self.dotted, key=len, reverse=True)
            text = re.sub(
                r"\b(?:tracegrad|tg)\.[\w.]+", lambda found: _replaced(found[0], longest_first, self.dotted), node.value
            )
            return ast.Constant(" ".join(text.split()))
        return node

    def generic_visit(self, node: ast.AST) -> ast.AST:
        """Replace names, and take annotations in quotes as they are without."""
        for field in ("annotation", "returns"):
            value = getattr(node, field, None)
            if isinstance(value, ast.Constant) and isinstance(value.value, str):
                setattr(node, field, ast.parse(value.value, mode="eval").body)
        for field in ("id", "attr", "arg", "name"):
            value = getattr(node, field, None)
            if isinstance(value, str):
                setattr(node, field, self.names.get(value, value))
        return super().generic_visit(node)


def _replaced(text: str, longest_first: list[str], dotted: dict[str, str]) -> str:
    whole = re.sub(r"^tg\.", "tracegrad.", text)
    for name in longest_first:
        if whole == name or whole.startswith(f"{name}."):
            return dotted[name] + whole[len(name) :]
    return whole


def _imported(tree: ast.AST, renamed: dict[str, dict[str, str]]) -> dict[str, str]:
    """Return the new names of the imports of a file from renamed modules."""
    found: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                names = renamed.get(node.module, {})
                if alias.name in names:
                    found[alias.asname or alias.name] = names[alias.name]
                found |= renamed.get(f"{node.module}.{alias.name}", {})
    return found


def _modules(tree: ast.AST) -> set[str]:
    """The names that imports of this package bind in a file, and that it uses as modules."""
    bound = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("tracegrad"):
            bound |= {alias.asname or alias.name for alias in node.names if (alias.asname or alias.name).islower()}
    return bound


def definitions(source: str, names: dict[str, str], dotted: dict[str, str] | None = None) -> dict[str, str]:
    """Return the functions, classes and values of a module by name, as trees without places, imports and modules.

    >>> definitions("import os\\ndef f(x): return x", {"f": "g"}) == definitions("def g(x):\\n    return x", {})
    True
    """
    found = {}
    tree = ast.parse(source)
    for node in _Normal(names, _modules(tree), dotted or {}).visit(tree).body:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            found[node.name] = ast.dump(node)
        elif isinstance(node, (ast.Assign, ast.AnnAssign)):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            for target in targets:
                if isinstance(target, ast.Name) and target.id != "__all__":
                    found[target.id] = ast.dump(node)
    return found


def bodies(root: Path, commit: str) -> Iterator[str]:
    """Yield the definitions of moved Python files that are gone, or differ from a commit."""
    moves = read_moves(root)
    deleted = {(move.old_path, move.old_name) for move in moves if move.old_name and not move.new_name}
    dotted = {move.module: Move(move.new_path, "").module for move in moves if move.module and move.new_path}
    renamed: dict[str, dict[str, str]] = {}
    for move in moves:
        if move.old_name and move.new_name:
            renamed.setdefault(move.old_path, {})[move.old_name] = move.new_name
    of_module = {Move(path, "").module: names for path, names in renamed.items()}
    for old, new in sorted({(m.old_path, m.new_path) for m in moves if m.new_path and m.old_path.endswith(".py")}):
        source = git(root, "show", f"{commit}:{old}")
        names = _imported(ast.parse(source), of_module) | renamed.get(old, {})
        before = definitions(source, names, dotted)
        after = definitions((root / new).read_text(), {}, {})
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
