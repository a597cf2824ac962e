"""Names in docstrings exist: parameters of `Args`, and attributes of the package's classes and modules."""

import ast
import re
from collections import defaultdict
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import sources

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "python" / "tracegrad"
FOREIGN = {"vllm.LLM", "Message.fbs", "File.fbs", "ragged.NAME"}
"""Names of other packages, of files and of arrays that look like names of this package."""
Function = ast.FunctionDef | ast.AsyncFunctionDef


def documented(docstring: str) -> list[str]:
    """Return the names that the section `Args` lists."""
    section = re.search(r"(?:^|\n) *Args:\n((?:\n| {2,}.*\n?)*)", docstring + "\n")
    if section is None:
        return []
    lines = section[1].splitlines()
    indent = min((len(line) - len(line.lstrip()) for line in lines if line.strip()), default=0)
    entries = []
    for line in lines:
        head = re.match(rf" {{{indent}}}(\*{{0,2}}\w+(?:, \*{{0,2}}\w+)*):", line)
        if line.strip() and re.match(rf" {{{indent}}}\S", line) and head is None:
            break
        entries += head[1].replace("*", "").split(", ") if head else []
    return entries


def parameters(node: ast.AST) -> set[str]:
    """Return the parameters of a function, or of a class: fields, and parameters of `__init__` and `__new__`."""
    if isinstance(node, Function):
        args = node.args
        several = [each.arg for each in (args.vararg, args.kwarg) if each]
        return {each.arg for each in (*args.posonlyargs, *args.args, *args.kwonlyargs)} | {*several}
    assert isinstance(node, ast.ClassDef)
    names = {
        each.target.id for each in node.body if isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name)
    }
    for each in node.body:
        if isinstance(each, Function) and each.name in ("__init__", "__new__"):
            names |= parameters(each)
        elif isinstance(each, Function):
            names.add(each.name)
    return names | {name for each in node.bases for name in package().classes.get(ast.unparse(each).split(".")[-1], ())}


def attributes(node: ast.ClassDef) -> set[str]:
    names = {each.name for each in ast.walk(node) if isinstance(each, Function)} | {"__init__"}
    for each in ast.walk(node):
        if isinstance(each, ast.AnnAssign | ast.Assign):
            targets = each.targets if isinstance(each, ast.Assign) else [each.target]
            for target in [leaf for each_target in targets for leaf in ast.walk(each_target)]:
                names |= {target.id} if isinstance(target, ast.Name) else set()
                names |= {target.attr} if isinstance(target, ast.Attribute) else set()
    return names


@dataclass(frozen=True)
class Names:
    """What the package defines. Classes have attributes and bases, modules and packages have names."""

    trees: dict[Path, tuple[ast.AST, ...]]
    classes: dict[str, set[str]]
    bases: dict[str, set[str]]
    modules: dict[str, set[str]]


@cache
def package() -> Names:
    """Parse the package once for all tests, and not if tests are only collected."""
    trees = {path: sources.nodes(path) for path in sources.package_files()}
    classes, bases, modules = defaultdict(set), defaultdict(set), defaultdict(set)
    for path, nodes in trees.items():
        stem = path.parent.name if path.name == "__init__.py" else path.stem
        for node in nodes:
            if isinstance(node, ast.ClassDef):
                classes[node.name] |= attributes(node)
                bases[node.name] |= {ast.unparse(base).split(".")[-1].partition("[")[0] for base in node.bases}
            if isinstance(node, ast.ClassDef | Function):
                modules[stem].add(node.name)
            elif isinstance(node, ast.ImportFrom | ast.Import):
                modules[stem] |= {each.asname or each.name for each in node.names}
            elif isinstance(node, ast.Name):
                modules[stem].add(node.id)
        for folder in path.relative_to(PACKAGE).parts[:-1]:
            modules[folder].add(stem)
    for stub in ast.walk(ast.parse((PACKAGE / "_core.pyi").read_text())):
        if isinstance(stub, ast.ClassDef):
            classes[stub.name] |= attributes(stub)
    return Names(trees, classes, bases, modules)


def has(owner: str, name: str) -> bool:
    """Return whether a class, or a class it derives from, has an attribute. True if a base is not of this package."""
    bases = package().bases[owner] - {"Protocol", "Generic", "NamedTuple", "object"}
    return name in package().classes[owner] or any(base not in package().bases or has(base, name) for base in bases)


def docstrings():
    for path, nodes in package().trees.items():
        for node in nodes:
            if isinstance(node, ast.Module | ast.ClassDef | Function) and (text := ast.get_docstring(node)):
                yield f"{path.relative_to(ROOT)}:{getattr(node, 'lineno', 1)}", node, text


def test_args_list_parameters_and_fields():
    wrong = [
        f"{place}: {name}"
        for place, node, text in docstrings()
        if not isinstance(node, ast.Module)
        for name in documented(text)
        if name not in parameters(node)
    ]
    assert wrong == []


def test_attributes_of_classes_and_modules_exist():
    wrong = []
    for place, _, text in docstrings():
        for words in re.findall(r"`([A-Za-z_][\w.]*\.\w+)(?:\(\))?`", text):
            *_, owner, name = words.split(".")
            if words in FOREIGN:
                continue
            if owner in package().bases:
                wrong += [] if has(owner, name) else [f"{place}: {words}"]
            elif owner in package().modules and name[0].isupper():
                wrong += [] if name in package().modules[owner] else [f"{place}: {words}"]
    assert wrong == []


def test_a_missing_name_is_found():
    assert documented("Do it.\n\nArgs:\n    a, b: two\n        lines: of it\n    c: one\n\nReturns:\n    d: e") == [
        "a",
        "b",
        "c",
    ]
    assert has("Sequences", "alignment_report")
    assert not has("ImageSpans", "keyed")
    assert "Control" not in package().modules["optim"]
