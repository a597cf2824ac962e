"""Every cause of an error has one code, which its message contains and the page of errors lists."""

import ast
from collections import Counter
from pathlib import Path

import pytest

import error_codes
import tracegrad as tg
from tracegrad import errors

ROOT = Path(__file__).parents[2]


def test_a_code_stands_for_one_cause():
    counts = Counter(cause.code for cause in error_codes.causes())
    assert [code for code, count in counts.items() if count > 1] == []
    assert {code.split("-")[1] for code in counts} <= set(error_codes.AREAS)
    assert len(counts) > 800


NAMES = {cause.name for cause in error_codes.causes() if cause.name[:1].isupper()}


def raised(path):
    """Return the line and the texts of each error that a file makes: its message is one of the first two arguments."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") in NAMES:
            texts = [error_codes.template(error_codes.first_operand(each)) for each in node.args[:2]]
            yield node.lineno, [text for text in texts if text]


def test_every_error_of_python_has_a_code():
    """One that only adds a place to another error's message, `f"{path}: {error}"`, leaves that error's code."""
    without = [
        f"{path}:{line}: {texts}"
        for path in sorted((ROOT / "python").rglob("*.py"))
        for line, texts in raised(path)
        if texts and not any(error_codes.CODE.match(text) or "{error}" in text for text in texts)
    ]
    assert without == []


def test_errors_of_python_and_of_the_core_tell_their_code(tmp_path):
    with pytest.raises(errors.ArgumentError) as ours:
        tg.presets.find("DAPPO")
    assert str(ours.value).startswith(f"{ours.value.code}: no objective is called")
    assert ours.value.code.startswith("TG-OBJ-")
    (tmp_path / "a.jsonl").write_text("{\n")
    with pytest.raises(errors.FormatError) as core:
        tg.read(tmp_path / "a.jsonl")
    assert str(core.value).startswith(f"{core.value.code}: {tmp_path}/a.jsonl:1: ")
    assert core.value.code.startswith("TG-FORMAT-")
    assert errors.TracegradError("a").code is None


def test_an_error_that_another_one_wraps_keeps_its_code():
    with pytest.raises(errors.ArgumentError) as inner:
        tg.presets.find("DAPPO")
    assert errors.ArgumentError(f"run.toml: {inner.value}").code == inner.value.code


def test_the_page_lists_them_all():
    page = (ROOT / "docs" / "reference" / "errors.md").read_text()
    assert page == error_codes.page(), "run: python tools/generate_docs.py"
    assert all(f"| {cause.code} |" in page for cause in error_codes.causes())
