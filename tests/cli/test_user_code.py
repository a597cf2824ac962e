"""`file.py:NAME`: one loader for objectives, recipes, rewards, agents and tasks."""

import os
import pickle
import sys

import pytest

from tracegrad import recipes
from tracegrad.cli import user_functions
from tracegrad.objective import presets
from tracegrad.user_code import load_module

OBJECTIVE = """
from bounds import HIGH
from tracegrad import recipes
from tracegrad.objective import presets
from tracegrad.objective import override
MINE = override(presets.DAPO, "surrogate.high", str(HIGH))
RECIPE = recipes.DAPO
def reward(): return HIGH
"""


@pytest.fixture(autouse=True)
def unchanged(monkeypatch):
    """Paths and modules as they were before the test."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    before = dict(sys.modules)
    yield
    for name in set(sys.modules) - set(before):
        del sys.modules[name]


def folder(path, high, name="losses.py"):
    path.mkdir()
    (path / "bounds.py").write_text(f"HIGH = {high}\n")
    (path / name).write_text(OBJECTIVE)
    return path / name


def test_objectives_recipes_and_rewards_import_the_files_next_to_theirs(tmp_path):
    file = folder(tmp_path / "a", 0.3)
    assert presets.find(f"{file}:MINE").surrogate.high == 0.3
    assert recipes.find(f"{file}:RECIPE").advantage.scale == "std"
    assert user_functions.find("losses.py:reward", file.parent)() == 0.3
    assert presets.find(f"{file}:MINE") is user_functions.find("losses.py:MINE", file.parent)  # the file was run once


def test_two_folders_may_have_files_of_one_name(tmp_path):
    first, second = folder(tmp_path / "a", 0.3), folder(tmp_path / "b", 0.4)
    assert presets.find(f"{first}:MINE").surrogate.high == 0.3
    assert presets.find(f"{second}:MINE").surrogate.high == 0.4
    assert user_functions.find("losses.py:reward", second.parent)() == 0.4
    assert user_functions.find("losses.py:reward", first.parent)() == 0.3


def test_a_file_that_was_changed_is_run_again(tmp_path):
    file = tmp_path / "changed.py"
    file.write_text("VALUE = 1\n")
    assert load_module(file).VALUE == 1
    file.write_text("VALUE = 2\n")
    os.utime(file, ns=(1, 1))
    assert load_module(file).VALUE == 2
    assert sys.modules["changed"] is load_module(file)


def test_classes_of_a_file_can_be_pickled_and_no_other_module_is_replaced(tmp_path):
    file = tmp_path / "json.py"
    file.write_text("class Own:\n    pass\n")
    theirs = sys.modules["json"]
    own = load_module(file).Own
    assert pickle.loads(pickle.dumps(own)) is own
    assert sys.modules["json"] is theirs


def test_a_file_that_fails_leaves_no_module(tmp_path):
    file = tmp_path / "half_done.py"
    file.write_text("raise ValueError('not yet')\n")
    with pytest.raises(ValueError, match="not yet"):
        load_module(file)
    assert "half_done" not in sys.modules
    file.write_text("VALUE = 7\n")
    assert load_module(file).VALUE == 7
