"""The floors of the house: nothing imports upward, nothing in a circle, and importing changes nothing."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

import picture
from file_imports import circles, python_imports, rust_imports

ROOT = Path(__file__).parent.parent
HOUSE = ROOT / "python" / "tracegrad"
PYTHON = python_imports(HOUSE)
RUST_CORE = rust_imports(ROOT / "rust" / "core" / "src")
FLOORS = [
    {"_alone", "_core", "errors", "plain_files"},
    {"addresses", "arrays", "cache", "codes", "dotted", "interrupt", "notebook", "outputs", "sampling", "user_code"},
    {"trace", "tokenizer", "algebra", "advantage", "metrics", "kernels", "probe", "ragged", "strip"}
    | {"aside", "columns", "drift", "flat", "footer", "given_arrays", "manifest", "read_report", "shards", "store"}
    | {"arrow_messages", "row_sizes"}
    | {"bucket", "mirror", "pictures", "trace_columns"},
    {"alignment", "sequence", "conversation", "recover", "arrow_files", "tables", "correction", "objective", "presets"},
    {"batch", "config", "terms"},
    {"catalog"},
    {"inputs"},
    {"account", "policy", "prepare", "provenance", "recipes"},
    {"learner", "report", "doctor", "rollout", "score", "sync"},
    {"online", "training", "view"},
    {"integrations"},
    {"cli"},
    {"__main__"},
]
ARRAYS = {"algebra", "advantage", "correction", "objective", "presets"}


def room(path: Path) -> str:
    return path.relative_to(HOUSE).parts[0].removesuffix(".py")


def imported_rooms(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "tracegrad":
            rest = node.module.split(".")[1:]
            found |= {rest[0]} if rest else {alias.name for alias in node.names}
        elif isinstance(node, ast.Import):
            found |= {a.name.split(".")[1] for a in node.names if a.name.startswith("tracegrad.")}
    return found


def order_of(path: Path) -> list[str]:
    """The names in backquotes that follow the words below in the first lines of a file, up to the full stop."""
    if path.suffix == ".py":
        first = ast.get_docstring(ast.parse(path.read_text())) or ""
    else:
        first = "\n".join(line[3:].strip() for line in path.read_text().splitlines() if line.startswith("//!"))
    told = " ".join(first.split()).partition("each using those before it alone:")[2]
    return re.findall(r"`([a-z]\w*)`", told.partition(".")[0])


def floor(name: str) -> int:
    return next(level for level, names in enumerate(FLOORS) if name in names)


SOURCES = [path for path in sorted(HOUSE.rglob("*.py")) if path != HOUSE / "__init__.py"]


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(HOUSE)))
def test_nothing_imports_upward(path):
    here = room(path)
    for other in imported_rooms(path) - {here}:
        assert floor(other) <= floor(here), f"{path.name} on floor {floor(here)} imports {other}"


def test_no_two_rooms_import_each_other():
    arrows = {(room(path), other) for path in SOURCES for other in imported_rooms(path) if other != room(path)}
    reach = {name: {b for a, b in arrows if a == name} for names in FLOORS for name in names}
    for _ in reach:
        for name, seen in reach.items():
            reach[name] = seen | {further for other in seen for further in reach.get(other, ())}
    assert not [name for name, seen in reach.items() if name in seen]


def test_no_file_of_python_is_in_a_circle_of_imports():
    found = circles(PYTHON)
    assert not found, "\n".join(found)


@pytest.mark.parametrize("crate", ["core", "py"])
def test_no_file_of_rust_is_in_a_circle_of_imports(crate):
    found = circles(rust_imports(ROOT / "rust" / crate / "src"))
    assert not found, "\n".join(found)


# A table in their mod.rs is the order of these.
TABLES = {"recorders", "servers", "kits"}
ROOMS_OF_RUST = [
    path.parent
    for path in sorted((ROOT / "rust" / "core" / "src").rglob("mod.rs"))
    if path.parent.name not in TABLES or order_of(path)
]
ROOMS_OF_PYTHON = [path.parent for path in sorted(HOUSE.rglob("__init__.py")) if path.parent != HOUSE]


@pytest.mark.parametrize("folder", ROOMS_OF_RUST + ROOMS_OF_PYTHON, ids=lambda path: str(path.relative_to(ROOT)))
def test_the_order_of_files_that_a_room_begins_with_is_one_of_their_imports(folder):
    first, *_ = [path for path in (folder / "mod.rs", folder / "__init__.py") if path.exists()]
    files = {path.stem for path in folder.glob(f"*{first.suffix}")} - {"mod", "tests", "__init__", "__main__"}
    order = order_of(first)
    assert sorted(order) == sorted(files | {path.parent.name for path in folder.glob(f"*/{first.name}")})
    imports = RUST_CORE if first.suffix == ".rs" else PYTHON
    top = ROOT / "rust" / "core" / "src" if first.suffix == ".rs" else HOUSE
    place = {name: at for at, name in enumerate(order)}
    inside = {file: place.get(entry(top / file, folder), -1) for file in imports}
    for file in (file for file, at in inside.items() if at >= 0):
        later = [other for other in imports[file] if inside[other] > inside[file]]
        assert not later, f"{file} uses {later}, which stands behind it in the first lines of {first.relative_to(ROOT)}"


def entry(path: Path, folder: Path) -> str:
    """The file or folder of a room that holds a path; "" for paths elsewhere."""
    return path.relative_to(folder).parts[0].partition(".")[0] if folder in path.parents else ""


def test_the_picture_of_the_house_is_what_make_house_draws():
    """Where this fails: make house."""
    assert (ROOT / "docs" / "house.svg").read_text() == picture.drawn()


def test_the_picture_has_every_room_and_each_line_that_no_two_others_say():
    graph = {"a": {"b", "c", "d"}, "b": {"c", "d"}, "c": {"d"}, "d": set(), "e": {"d"}}
    assert picture.lines(graph) == {"a": {"b"}, "b": {"c"}, "c": {"d"}, "d": set(), "e": {"d"}}
    assert [sorted(row) for row in picture.floors(graph)] == [["a", "e"], ["b"], ["c"], ["d"]]
    through = {"a/x.py": {"file.py"}, "file.py": {"b/y.py"}, "b/y.py": set(), "b/z.py": {"b/y.py"}}
    assert picture.uses(through, {"a", "b"}) == {"a": {"b"}, "b": set()}
    assert set(picture.STEPS) <= {folder.name for folder in ROOMS_OF_PYTHON} | {"sequence"}
    texts = set(re.findall(r"<text [^>]*>(\w+)<", picture.drawn()))
    assert {
        f.name for f in ROOMS_OF_PYTHON + ROOMS_OF_RUST if f.parent in (HOUSE, HOUSE.parents[1] / "rust/core/src")
    } <= texts


def test_a_circle_of_rust_files_is_found_and_named(tmp_path):
    files = {
        "lib.rs": "mod a; pub mod room; pub use a::Thing;",
        "a.rs": '// use crate::room::c;\nfn says() -> &\'static str { "crate::room::c::x" } pub struct Thing;',
        "room/mod.rs": "mod b; mod c; mod d; pub use b::{B, d as e};\n#[cfg(test)]\nmod tests {\n    use super::d;\n}",
        "room/b.rs": "use super::{\n    c::{self, C},\n};\nfn f() { c::x(); }",
        "room/c.rs": "fn f<'a>(it: &'a str) -> char { super::d::g(it); '\"' }\nmod inner {\n    use crate::a;\n}",
        "room/d.rs": "pub(in crate::room) fn g(it: &str) -> crate::Thing { super::B::new(it) }",
        "room/tests.rs": "use super::*;",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    found = rust_imports(tmp_path)
    assert found == {
        "lib.rs": {"a.rs"},
        "a.rs": set(),
        "room/mod.rs": {"room/b.rs"},
        "room/b.rs": {"room/c.rs"},
        "room/c.rs": {"room/d.rs", "a.rs"},
        "room/d.rs": {"lib.rs", "room/mod.rs"},
    }
    assert circles(found) == ["room/b.rs -> room/c.rs -> room/d.rs -> room/mod.rs -> room/b.rs"]


def test_a_circle_of_python_files_is_found_wherever_its_imports_stand(tmp_path):
    files = {
        "__init__.py": "from house.a import a",
        "a.py": "def a():\n    from house.room import b",
        "room/__init__.py": "import house.room.b",
        "room/b.py": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from house.a import a",
        "room/c.py": "from house.room import b\nfrom house import a",
    }
    for name, text in files.items():
        (tmp_path / "house" / name).parent.mkdir(exist_ok=True)
        (tmp_path / "house" / name).write_text(text)
    found = python_imports(tmp_path / "house")
    assert found == {
        "a.py": {"room/b.py"},
        "room/__init__.py": {"room/b.py"},
        "room/b.py": {"a.py"},
        "room/c.py": {"room/b.py", "a.py"},
    }
    assert circles(found) == ["a.py -> room/b.py -> a.py"]


def test_the_array_rooms_take_arrays_alone():
    for path in SOURCES:
        if room(path) in ARRAYS:
            assert not imported_rooms(path) & {"trace", "sequence", "batch"}, path


def test_no_room_of_losses_asks_a_part_of_which_class_it_is():
    """A part answers for itself: what asks for its class is a second place that has to know it."""
    trees = {path: ast.parse(path.read_text()) for path in SOURCES}
    classes = {
        node.name
        for path, tree in trees.items()
        if room(path) == "algebra"
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef)
    }
    assert {"Clip", "Gate", "Budget", "Clamp", "Penalty", "Surrogate"} <= classes
    for path, tree in trees.items():
        if room(path) not in {"algebra", "objective", "correction", "learner", "policy", "metrics"}:
            continue
        for node in ast.walk(tree):
            asked = isinstance(node, ast.Call) and getattr(node.func, "id", "") in ("isinstance", "issubclass", "type")
            asked |= isinstance(node, (ast.Compare, ast.match_case)) and "type(" in ast.unparse(node)
            named = {each.id for each in ast.walk(node) if isinstance(each, ast.Name)} if asked else set()
            assert not named & classes, f"{path.name}: {ast.unparse(node)}"


def test_importing_tracegrad_changes_nothing_and_needs_no_torch():
    code = (
        "import os, sys; before = dict(os.environ); import tracegrad, tracegrad.cli;"
        "assert dict(os.environ) == before;"
        "assert not {'torch', 'transformers', 'tqdm', 'numpy.ma'} & set(sys.modules), sorted(sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
