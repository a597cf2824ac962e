"""Packages import downwards, files import in no circle, and importing tracegrad changes nothing."""

import ast
import importlib
import re
import subprocess
import sys
from pathlib import Path

import pytest

import draw_layout
from file_imports import circles, package_order, python_imports, rust_imports, upward
from sources import nodes, package_files

ROOT = Path(__file__).parents[2]
HOUSE = ROOT / "python" / "tracegrad"
ARRAYS = {"advantage", "objective"}


def room(path: Path) -> str:
    return path.relative_to(HOUSE).parts[0].removesuffix(".py")


def imported_rooms(path: Path) -> set[str]:
    found = set()
    for node in nodes(path):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "tracegrad":
            rest = node.module.split(".")[1:]
            found |= {rest[0]} if rest else {alias.name for alias in node.names}
        elif isinstance(node, ast.Import):
            found |= {a.name.split(".")[1] for a in node.names if a.name.startswith("tracegrad.")}
    return found


SOURCES = [path for path in package_files() if path != HOUSE / "__init__.py"]


def test_packages_import_those_below_them_alone():
    named = [name for row in package_order() for name in row]
    assert sorted(named) == sorted({room(path) for path in SOURCES} | {"_core"})
    assert list(upward(python_imports(HOUSE))) == []


def test_an_import_that_goes_up_or_aside_is_found():
    down = {"data/read.py": {"storage/files.py", "data/trace.py"}, "__main__.py": {"cli/__init__.py"}}
    up = {"storage/files.py": {"data/read.py"}, "advantage/kl.py": {"objective/ratio.py"}}
    assert list(upward(down)) == []
    assert list(upward(up)) == ["advantage/kl.py imports objective/ratio.py", "storage/files.py imports data/read.py"]


def test_no_package_takes_a_private_name_of_another():
    for path in SOURCES:
        for node in nodes(path):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("tracegrad."):
                there, *inner = node.module.split(".")[1:]
                names = [*inner, *(alias.name for alias in node.names)]
                assert there == room(path) or not [
                    name for name in names if name.startswith("_") and name != "__version__"
                ], f"{path}: {ast.unparse(node)}"


def test_no_file_of_python_is_in_a_circle_of_imports():
    found = circles(python_imports(HOUSE))
    assert not found, "\n".join(found)


@pytest.mark.parametrize("crate", ["core", "py"])
def test_no_file_of_rust_is_in_a_circle_of_imports(crate):
    found = circles(rust_imports(ROOT / "rust" / crate / "src"))
    assert not found, "\n".join(found)


PACKAGES = [path.parent for path in sorted(HOUSE.rglob("__init__.py")) if path.parent != HOUSE]
CORE = [path.parent for path in sorted((ROOT / "rust" / "core" / "src").glob("*/mod.rs"))]


def test_the_picture_of_the_layout_is_what_make_layout_draws():
    """If this fails: make layout."""
    assert (ROOT / "docs" / "layout.svg").read_text() == draw_layout.drawn()


def test_the_picture_has_every_room_and_each_line_that_no_two_others_say():
    graph = {"a": {"b", "c", "d"}, "b": {"c", "d"}, "c": {"d"}, "d": set(), "e": {"d"}}
    assert draw_layout.lines(graph) == {"a": {"b"}, "b": {"c"}, "c": {"d"}, "d": set(), "e": {"d"}}
    assert [sorted(row) for row in draw_layout.floors(graph)] == [["a", "e"], ["b"], ["c"], ["d"]]
    through = {"a/x.py": {"file.py"}, "file.py": {"b/y.py"}, "b/y.py": set(), "b/z.py": {"b/y.py"}}
    assert draw_layout.uses(through, {"a", "b"}) == {"a": {"b"}, "b": set()}
    assert set(draw_layout.STEPS) <= {folder.name for folder in PACKAGES}
    texts = set(re.findall(r"<text [^>]*>(\w+)<", draw_layout.drawn()))
    assert {folder.name for folder in PACKAGES if folder.parent == HOUSE} | {folder.name for folder in CORE} <= texts


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
        "room/b.py": "if True:\n    from house.a import a",
        "room/c.py": "from house.room import b\nfrom house import a",
        "room/d.py": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from house.a import a",
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
        "room/d.py": set(),
    }
    assert circles(found) == ["a.py -> room/b.py -> a.py"]


def test_the_array_rooms_take_arrays_alone():
    for path in SOURCES:
        if room(path) in ARRAYS:
            assert not imported_rooms(path) & {"data", "alignment", "packing"}, path


def test_no_room_of_losses_asks_a_part_of_which_class_it_is():
    """A part answers for itself: what asks for its class is a second place that has to know it."""
    classes = {
        node.name
        for path in SOURCES
        if room(path) == "objective" and path.stem not in ("correction", "torch_loss", "presets")
        for node in nodes(path)
        if isinstance(node, ast.ClassDef)
    } - {"Objective"}
    assert {"Clip", "Rejection", "RejectionBudget", "Truncate", "Penalty", "Surrogate"} <= classes
    asking = [path for path in SOURCES if room(path) in {"objective", "trainer", "model", "metrics"}]
    for file, node in ((each, node) for each in asking for node in nodes(each)):
        asked = isinstance(node, ast.Call) and getattr(node.func, "id", "") in ("isinstance", "issubclass", "type")
        if isinstance(node, (ast.Compare, ast.match_case)):
            asked |= any(getattr(getattr(each, "func", None), "id", "") == "type" for each in ast.walk(node))
        named = {each.id for each in ast.walk(node) if isinstance(each, ast.Name)} if asked else set()
        assert not named & classes, f"{file.name}: {ast.unparse(node)}"


@pytest.mark.parametrize("name", ["", ".objective", ".online", ".trainer"])
def test_names_that_are_imported_on_use_are_there(name):
    pytest.importorskip("torch")
    package = importlib.import_module(f"tracegrad{name}")
    assert not [each for each in package.__all__ if not hasattr(package, each)]
    with pytest.raises(AttributeError, match="nothing"):
        package.nothing  # noqa: B018


def test_an_error_has_the_name_that_a_traceback_prints():
    package, errors = (importlib.import_module(name) for name in ("tracegrad", "tracegrad.errors"))
    classes = [each for each in vars(errors).values() if isinstance(each, type) and issubclass(each, ValueError)]
    named = [each for each in classes if each.__module__ == "tracegrad"]
    assert len(named) >= 7
    assert all(getattr(package, each.__name__) is each for each in named)


def test_importing_tracegrad_changes_nothing_and_needs_no_torch():
    code = (
        "import os, sys; before = dict(os.environ); import tracegrad, tracegrad.cli, tracegrad.packing;"
        "tracegrad.correct([-1.0], [-1.0], trace=[0]);"
        "assert dict(os.environ) == before;"
        "assert not {'torch', 'transformers', 'tqdm', 'numpy.ma'} & set(sys.modules), sorted(sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_importing_the_model_does_not_import_the_compiler():
    pytest.importorskip("torch")
    code = "import sys; import tracegrad.model, tracegrad.trainer.step; assert 'torch._dynamo' not in sys.modules"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
