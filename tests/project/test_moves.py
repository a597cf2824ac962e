"""tools/moves.py: no tracked file names a path that a file has left, and a moved body that changed is found."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "tools"))

from moves import Move, bodies, left, read_moves

HEAD = "old_path,new_path,old_name,new_name\n"
OLD = "import os\n\nLIMIT = 3\n\n\ndef length(x):\n    return min(len(x), LIMIT)\n\n\nclass Reader:\n    size = 1\n"


@pytest.fixture
def tree(tmp_path):
    """A tree whose file `python/tracegrad/a.py` is committed; the table has no line yet."""
    for command in ("init -q", "config user.email a@example.com", "config user.name a"):
        subprocess.run(["git", *command.split()], cwd=tmp_path, check=True)
    (tmp_path / "tools").mkdir()
    (tmp_path / "python" / "tracegrad").mkdir(parents=True)
    write(tmp_path, {"tools/moves.csv": HEAD, "python/tracegrad/a.py": OLD})
    subprocess.run(["git", "commit", "-qm", "before"], cwd=tmp_path, check=True)
    return tmp_path


def write(tree, files):
    for name, text in files.items():
        (tree / name).parent.mkdir(parents=True, exist_ok=True)
        (tree / name).write_text(text)
    subprocess.run(["git", "add", "-A"], cwd=tree, check=True)


def test_no_tracked_file_names_a_path_that_a_file_has_left():
    if not (ROOT / ".git").exists():
        pytest.skip("not a clone")
    assert list(left(ROOT)) == []


def test_an_old_name_is_found_in_code_text_and_paths(tree):
    table = HEAD + "python/tracegrad/a.py,python/tracegrad/data/read.py,,\n"
    lines = [
        "from tracegrad.a import length",
        'WORKER = "tracegrad.a.Reader"',
        "see python/tracegrad/a.py",
        "--ignore-glob tracegrad/a.py",
        "tracegrad.ab, my.tracegrad.a, tracegrad.b",
    ]
    (tree / "python" / "tracegrad" / "a.py").unlink()
    write(tree, {"tools/moves.csv": table, "notes.txt": "\n".join(lines)})
    named = ["tracegrad.a", "tracegrad.a", "tracegrad/a.py", "tracegrad/a.py"]
    assert list(left(tree)) == [f"notes.txt:{number}: names {name}" for number, name in enumerate(named, 1)]


def test_a_body_that_changed_or_is_gone_is_found(tree):
    table = HEAD + "python/tracegrad/a.py,python/tracegrad/data/read.py,,\n"
    table += "python/tracegrad/a.py,python/tracegrad/data/read.py,length,count\n"
    moved = OLD.replace("import os\n", "").replace("def length", "# moved\ndef count")
    write(tree, {"tools/moves.csv": table, "python/tracegrad/data/read.py": moved})
    assert list(bodies(tree, "HEAD")) == []
    write(tree, {"python/tracegrad/data/read.py": moved.replace("min(", "max(").replace("class Reader", "class Other")})
    assert list(bodies(tree, "HEAD")) == [
        "python/tracegrad/data/read.py: count is another one than in python/tracegrad/a.py",
        "python/tracegrad/data/read.py: Reader of python/tracegrad/a.py is gone",
    ]
    write(tree, {"tools/moves.csv": table + "python/tracegrad/a.py,python/tracegrad/data/read.py,Reader,\n"})
    assert [line.split(":")[1] for line in bodies(tree, "HEAD")] == [
        " count is another one than in python/tracegrad/a.py"
    ]


def test_the_end_of_an_old_path_is_found_in_a_pattern(tree):
    table = HEAD + "python/tracegrad/room/a.py,python/tracegrad/data/a.py,,\n"
    write(tree, {"tools/moves.csv": table, "Makefile": "--ignore-glob '*/room/a.py' '*/bedroom/a.py'"})
    assert list(left(tree)) == ["Makefile:1: names room/a.py"]


def test_an_old_name_of_the_core_is_found(tree):
    table = HEAD + "rust/core/src/a/b.rs,rust/core/src/a/c.rs,,\nrust/core/src/a/d.rs,rust/core/src/d.rs,,\n"
    lines = "use crate::a::b::B;\n// rust/core/src/a/b.rs\nuse crate::a::c; use crate::a::bc;"
    write(tree, {"tools/moves.csv": table, "rust/core/src/a/d.rs": "", "rust/core/src/a/e.rs": lines})
    assert list(left(tree)) == [
        "rust/core/src/a/e.rs:1: names crate::a::b",
        "rust/core/src/a/e.rs:2: names rust/core/src/a/b.rs",
    ]


def test_the_table_is_read(tree):
    write(tree, {"tools/moves.csv": HEAD + "a.py,b.py,f,g\n"})
    assert read_moves(tree) == [Move("a.py", "b.py", "f", "g")]
