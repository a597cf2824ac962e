"""What `make site` does before and after the builder: which pages there are, what they say, where links lead."""

import doctest
import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SITE = str(ROOT / ".ci" / "site")
sys.path.insert(0, SITE)

import build
import tracegrad as tg
from links import wrong_links


def built(code, *arguments):
    """What code prints that parses sources, run in a process of its own.

    In one where finalizers of other tests run meanwhile, Python 3.11 may say "recursion depth mismatch".
    """
    told = f"import json, pathlib, sys; sys.path.insert(0, sys.argv[1]); import build; {code}"
    command = [sys.executable, "-c", told, SITE, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def test_every_public_name_has_a_place_on_a_page():
    pages = json.loads(built("print(json.dumps(build.api()))"))
    for name in dir(tg):
        assert f"tracegrad.{name}" in pages or f"::: tracegrad.{name}\n" in pages["tracegrad"] or name == "__version__"
    assert "::: tracegrad.advantage.group_mean\n" in pages["tracegrad.advantage"]


def test_pages_are_ours_with_what_they_link_to_beside_them(tmp_path):
    built("build.stage(pathlib.Path(sys.argv[2]))", tmp_path)
    pages = tmp_path / "pages"
    docs = {page.relative_to(ROOT / "docs") for page in (ROOT / "docs").rglob("*.md")}
    assert docs <= {page.relative_to(pages) for page in pages.rglob("*.md")}
    start = (pages / "index.md").read_text()
    assert "](how-to/your-logs.md)" in start
    assert "docs/" not in "".join(part.split(")")[0] for part in start.split("](")[1:])
    assert "](../files/examples/extending/gate.patch.txt)" in (pages / "how-to/extend.md").read_text()
    assert (pages / "files/examples/extending/gate.patch.txt").is_file()
    assert "](layout.svg)" in (pages / "DESIGN.md").read_text()
    assert "](view.png)" in start
    assert (pages / "layout.svg").is_file()
    assert (pages / "extra.css").is_file()
    told = (tmp_path / "zensical.toml").read_text()
    assert all(f'= "{page}"' in told for page in docs)
    assert '= "python/tracegrad.advantage.md"' in told


def test_lists_and_bars_are_written_as_the_builder_wants_them(tmp_path):
    said = "A word:\n- one\n  goes on\n- two\n\n```text\na\n- b\n```\n\n| `a \\| b` | c \\| d |\n"
    said += "\n1. one\n   - nested\n"
    build._write(tmp_path, Path("page.md"), said, tmp_path)
    wanted = "A word:\n\n- one\n  goes on\n- two\n\n```text\na\n- b\n```\n\n| `a | b` | c \\| d |\n"
    wanted += "\n1. one\n    - nested\n"
    assert (tmp_path / "page.md").read_text() == wanted


def test_a_link_that_leads_nowhere_and_a_file_from_elsewhere_are_told(tmp_path):
    (tmp_path / "b.html").write_text('<h1 id="there">b</h1>')
    (tmp_path / "style.css").write_text("")
    good = '<link rel="stylesheet" href="style.css"><a href="b.html#there"><a href="https://arxiv.org"><a href="#x">'
    (tmp_path / "a.html").write_text(f'{good}<p id="x">')
    assert wrong_links(tmp_path) == []
    bad = '<a href="c.html"><a href="b.html#gone"><script src="https://unpkg.com/x.js"></script><img src="//host/x">'
    (tmp_path / "a.html").write_text(f"{good}<p id=x>{bad}")
    assert [line.split(", ")[0] for line in wrong_links(tmp_path)] == [
        "a.html links to c.html",
        "a.html links to b.html#gone",
        "a.html loads https://unpkg.com/x.js",
        "a.html loads //host/x",
    ]


def test_docstrings_are_changed_as_their_examples_say():
    pytest.importorskip("griffe")
    import docstrings

    assert doctest.testmod(docstrings) == doctest.TestResults(failed=0, attempted=2)
