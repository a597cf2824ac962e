"""Which file of the sources imports which, and the circles among them; test_layers.py asks.

Rust: a file imports the file in which one of its paths ends, in a `use` or in code: `crate::a::b::C` ends in a/b.rs,
`super::C` in the mod.rs above. A `mod b;` alone imports nothing. `pub use b::C` imports b.rs as any other `use`: a b.rs
that takes something from that mod.rs is in a circle. What stands under `#[cfg(test)]` is not read; a method that is
called on a value is no import. Python: every import statement, also within a function, but none for types alone
(`if TYPE_CHECKING:`).
"""

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from sources import parsed

Imports = dict[str, set[str]]
DESIGN = Path(__file__).parents[2] / "DESIGN.md"
NOT_CODE = re.compile(
    r"//[^\n]*|/\*.*?\*/"
    r"""|b?r(?P<marks>\#*)".*?"(?P=marks)|b?"(?:\\.|[^"\\])*"|b?'(?:\\.[^'\n]*|[^'\\\n])'""",
    re.DOTALL,
)
FOR_TESTS = re.compile(r"^( *)#\[cfg\(test\)\][^{;]*(;|\{.*?^\1\})", re.DOTALL | re.MULTILINE)
WITHIN = re.compile(r"^( *)(?:pub\S* )?mod (\w+) \{(.*?)^\1\}", re.DOTALL | re.MULTILINE)
USE = re.compile(r"\buse\s+([^;]+);")
PATH = re.compile(r"(?<![\w:])(?<!pub\(in )[a-z_]\w*(?:::\w+)+")


def package_order() -> list[list[str]]:
    """The packages of `tracegrad`, bottom up, from the table of DESIGN.md; those of a row do not import each other."""
    rows = re.findall(r"^\| \d+ \| ([^|]+) \|", DESIGN.read_text(), re.MULTILINE)
    return [re.findall(r"`(\w+)`", row) for row in rows]


def package_of(path: str) -> str:
    """The package, or the module at the top, that holds a path beneath `tracegrad`."""
    return Path(path).parts[0].removesuffix(".py")


def upward(imports: Imports) -> Iterator[str]:
    """The imports of a package that does not stand below the importing one."""
    place = {name: number for number, row in enumerate(package_order()) for name in row}
    for path, others in sorted(imports.items()):
        for other in sorted(others):
            here, there = package_of(path), package_of(other)
            if here != there and place[there] >= place[here]:
                yield f"{path} imports {other}"


def rust_imports(root: Path) -> Imports:
    """The imports of a crate whose lib.rs stands in `root`, by paths beneath it."""
    files = {_module(path.relative_to(root)): path for path in sorted(root.rglob("*.rs")) if path.name != "tests.rs"}
    imports: Imports = {}
    for module, path in files.items():
        code = FOR_TESTS.sub("", NOT_CODE.sub('""', path.read_text()))
        ends = set(_ends(module, WITHIN.sub("", code), files))
        for _, name, body in WITHIN.findall(code):
            ends.update(_ends((*module, name), body, files))
        imports[str(path.relative_to(root))] = {str(end.relative_to(root)) for end in ends - {path}}
    return imports


def _ends(module: tuple[str, ...], code: str, files: dict[tuple[str, ...], Path]) -> Iterator[Path]:
    """The files in which the paths end that stand in the code of a module."""
    trees = (re.sub(r"\s*([{},:*])\s*", r"\1", tree) for tree in USE.findall(code))
    used = [leaf for tree in trees for leaf in _leaves(tree)]
    scope = {name or path[-1]: path for path, name in used}
    for path in [*(path for path, _ in used), *(found.split("::") for found in PATH.findall(USE.sub("", code)))]:
        if path[0] in scope and path != scope[path[0]]:
            path = [*scope[path[0]], *path[1:]]
        if end := _file(path, module, files):
            yield end


def _module(path: Path) -> tuple[str, ...]:
    parts = (*path.parts[:-1], path.stem)
    return parts[:-1] if path.stem in ("mod", "lib") else parts


def _leaves(tree: str) -> Iterator[tuple[list[str], str | None]]:
    """The paths of a tree such as `a::{b, c::{self, D as E}}`, each with the name it is given, if any."""
    prefix, brace, rest = tree.partition("{")
    if not brace:
        path, _, name = tree.strip().partition(" as ")
        yield [part for part in path.split("::") if part], name.strip() or None
        return
    depth, start, rest = 0, 0, rest[: rest.rindex("}")] + ","
    for at, letter in enumerate(rest):
        depth += (letter == "{") - (letter == "}")
        if letter == "," and depth == 0:
            for path, name in _leaves(rest[start:at]) if rest[start:at].strip() else ():
                whole = [part for part in prefix.split("::") if part] + path
                yield (whole[:-1] if whole[-1] == "self" else whole), name
            start = at + 1


def _file(path: list[str], module: tuple[str, ...], files: dict[tuple[str, ...], Path]) -> Path | None:
    """The file in which a path ends that stands in a module; None for what is not of the crate."""
    here, rest = module, path
    if path[0] == "crate":
        here, rest = (), path[1:]
    elif path[0] in ("super", "self"):
        ups = next((at for at, part in enumerate(path) if part not in ("super", "self")), len(path))
        here, rest = module[: len(module) - path[:ups].count("super")], path[ups:]
    elif (*module, path[0]) not in files:
        return None
    while rest and (*here, rest[0]) in files:
        here, rest = (*here, rest[0]), rest[1:]
    return files.get(here)


@cache
def python_imports(package: Path) -> Imports:
    """The imports among the files of a package, by paths beneath it; its own `__init__.py` is left out."""
    files = {path.relative_to(package.parent).with_suffix("").parts: path for path in sorted(package.rglob("*.py"))}
    files = {parts[:-1] if parts[-1] == "__init__" else parts: path for parts, path in files.items()}
    del files[(package.name,)]
    imports: Imports = {}
    for path in files.values():
        named: set[tuple[str, ...]] = set()
        for node in _statements(parsed(path)):
            if isinstance(node, ast.Import):
                named |= {tuple(alias.name.split(".")) for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module:
                parts = tuple(node.module.split("."))
                named |= {(*parts, alias.name) if (*parts, alias.name) in files else parts for alias in node.names}
        ends = {files[parts] for parts in named if parts in files}
        imports[str(path.relative_to(package))] = {str(end.relative_to(package)) for end in ends - {path}}
    return imports


def _statements(node: ast.AST) -> Iterator[ast.AST]:
    """Yield the statements and clauses of a tree, without those under `if TYPE_CHECKING`."""
    for child in ast.iter_child_nodes(node):
        is_for_types = isinstance(child, ast.If) and getattr(child.test, "id", "") == "TYPE_CHECKING"
        if isinstance(child, ast.stmt | ast.excepthandler | ast.match_case) and not is_for_types:
            yield child
            yield from _statements(child)


def circles(imports: Imports) -> list[str]:
    """A shortest circle through each file that is in one, each circle once: `a -> b -> a`."""
    found = {}
    for start in sorted(imports):
        before: dict[str, str] = {}
        reached = [start]
        for file in reached:
            for other in sorted(imports[file] - before.keys()):
                before[other] = file
                reached.append(other)
        if start in before:
            road = [start, before[start]]
            while road[-1] != start:
                road.append(before[road[-1]])
            found.setdefault(frozenset(road), " -> ".join(reversed(road)))
    return list(found.values())
