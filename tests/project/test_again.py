"""What fails beside others is run once more, alone, and named."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

AGAIN = Path(__file__).parents[1] / "again.py"

# Plugins of other packages take seconds of every start.
BARE = {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTEST_PLUGINS": "xdist.plugin"}
RACES = """
import pathlib, pytest

@pytest.mark.parametrize("number", range({tests}))
def test_it(number):
    seen = pathlib.Path(__file__).with_name(f"seen{{number}}")
    first, _ = not seen.exists(), seen.touch()
    assert not first and {passes}

def test_other():
    with open(pathlib.Path(__file__).with_name("others"), "a") as file:
        file.write("x")
"""


@pytest.mark.parametrize(
    ("tests", "passes", "code", "said"),
    [(2, True, 0, 2), (2, False, 1, 0), (4, True, 1, 0)],
    ids=["they race", "they fail", "too many"],
)
@pytest.mark.first_cases(2)
def test_what_fails_is_run_once_more_and_named(tmp_path, tests, passes, code, said):
    (tmp_path / "test_races.py").write_text(RACES.format(tests=tests, passes=passes))
    done = subprocess.run(
        [sys.executable, str(AGAIN), *(("-n", "2") if code == 0 else ()), str(tmp_path)],
        env=BARE,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == code, done.stdout
    assert done.stdout.count("RACE ") == done.stdout.count("passed alone") == said
    assert (tmp_path / "others").read_text() == "x"


def test_nothing_is_run_again_where_all_pass_or_nothing_could_be_collected(tmp_path):
    told = {"env": BARE, "cwd": tmp_path, "capture_output": True, "text": True, "check": False}
    (tmp_path / "test_fine.py").write_text("def test_it(): pass")
    fine = subprocess.run([sys.executable, str(AGAIN), str(tmp_path)], **told)
    (tmp_path / "test_wrong.py").write_text("import gone")
    wrong = subprocess.run([sys.executable, str(AGAIN), str(tmp_path)], **told)
    assert (fine.returncode, wrong.returncode) == (0, 2)
    assert "once more" not in fine.stdout + wrong.stdout
