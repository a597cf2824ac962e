"""What README promises on its first screen runs as it is written."""

import re
from pathlib import Path

import numpy as np

ROOT = Path(__file__).parent.parent


def test_the_ten_lines_run_and_correct_nothing_where_old_is_what_was_recorded(monkeypatch, capsys):
    (code,) = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert len(code.splitlines()) <= 12
    monkeypatch.chdir(ROOT)
    names: dict = {}
    exec(compile(code, "README.md", "exec"), names)
    assert "T0" in capsys.readouterr().out
    assert np.allclose(names["corrected"].weight, 1.0)


def test_every_page_that_a_page_links_to_is_there():
    for page in [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md"), *(ROOT / "examples").rglob("*.md")]:
        for target in re.findall(r"\]\((?!http)([^)#]+)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"
