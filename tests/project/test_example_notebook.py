"""examples/notebook runs from its first cell to its last, and what it trains is better than what it began with."""

import ast
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

ROOT = Path(__file__).parents[2]
NOTEBOOK = ROOT / "examples" / "notebook" / "from_logs_to_a_model.ipynb"


def test_the_notebook_is_kept_without_what_it_printed():
    read = nbformat.read(NOTEBOOK, as_version=4)
    nbformat.validate(read)
    assert not [cell.id for cell in read.cells if cell.get("outputs") or cell.get("execution_count")]


@pytest.mark.nightly
def test_the_notebook_makes_a_better_model_and_the_recorded_logprobs_are_worth_something(tmp_path):
    results = _played(tmp_path)
    _is_better(results)
    assert results["DAPO"]["success"] > results["WEIGHTED_SFT"]["success"]


def _is_better(results):
    before, dapo = results["before"]["success"], results["DAPO"]
    assert 0.3 < before < 0.6
    assert dapo["success"] > 0.7
    assert dapo["from"] > before
    # A short run on few held-out traces ends further from the recorded policy than their weights can tell of.
    assert dapo["value"] == "not known" or 0.5 < dapo["value"] < 1.2


def _played(tmp_path, *changes):
    """What the notebook says at its end, run with these changes of its words; what it shows and leaves on the way."""
    here = tmp_path / "examples" / "notebook"
    here.mkdir(parents=True)
    (tmp_path / "examples" / "quickstart").symlink_to(ROOT / "examples" / "quickstart")
    source = NOTEBOOK.read_text("utf-8")
    for old, new in changes:
        assert source.count(old) == 1
        source = source.replace(old, new)
    played = nbformat.reads(source, as_version=4)
    NotebookClient(played, timeout=1200, resources={"metadata": {"path": str(here)}}).execute()
    for shown in ("traces", "sequences", "sequences.alignment_report"):
        assert "<table>" in _output(played, shown)["text/html"]
    assert (tmp_path / "out" / "notebook" / "DAPO" / "report.html").is_file()
    return _shown(played, "results")


def _output(notebook, last):
    """What the cell that ends with an expression showed of it."""
    (cell,) = (cell for cell in notebook.cells if cell.cell_type == "code" and cell.source.split("\n")[-1] == last)
    return cell.outputs[-1]["data"]


def _shown(notebook, last):
    return ast.literal_eval(_output(notebook, last)["text/plain"])
