"""Every cause of an error has one code, which its message contains, the page of errors lists and tests match."""

import ast
import re
from collections import Counter
from pathlib import Path

import pytest

import error_codes
import sources
import tracegrad as tg
from tracegrad import errors

ROOT = Path(__file__).parents[2]


def test_a_code_stands_for_one_cause():
    counts = Counter(cause.code for cause in error_codes.causes())
    assert [code for code, count in counts.items() if count > 1] == []
    assert {code.split("-")[1] for code in counts} <= set(error_codes.AREAS)
    assert len(counts) > 800


def raised(path, names):
    """Return the line and the texts of each error that a file makes: its message is one of the first two arguments."""
    for node in sources.nodes(path):
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") in names:
            texts = [error_codes.template(error_codes.first_operand(each)) for each in node.args[:2]]
            yield node.lineno, [text for text in texts if text]


def test_every_error_of_python_has_a_code():
    """One that only adds a place to another error's message, `f"{path}: {error}"`, leaves that error's code."""
    names = {cause.name for cause in error_codes.causes() if cause.name[:1].isupper()}
    without = [
        f"{path}:{line}: {texts}"
        for path in sorted((ROOT / "python").rglob("*.py"))
        for line, texts in raised(path, names)
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


FOREIGN = ("read-only", "embed_tokens", "ran unfused", "at least one valid token", "Expecting value", "nothing")
"""Patterns of errors without a code, which other packages raise."""
FOREIGN += ("not yet", "pages", "one, two", "Qwen3-4B .*8 .*32 GiB", "did not run: host_waits", "0 places")
"""Patterns of errors of scripts and of tests, which the package does not raise."""


def parts(node):
    """Return the expressions that one can evaluate to: both branches of a condition, the items of a literal."""
    if isinstance(node, ast.IfExp):
        return [*parts(node.body), *parts(node.orelse)]
    if isinstance(node, (ast.Tuple, ast.List)):
        return [each for item in node.elts for each in parts(item)]
    return [node]


def rows(node, tree):
    """Return the items of a literal list or dict, which may be a constant of the file."""
    if isinstance(node, ast.Name):
        node = next((each.value for each in tree.body if ast.unparse(each).startswith(f"{node.id} = ")), node)
    if isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "items":
        node = node.func.value
    if isinstance(node, ast.Dict):
        return [ast.Tuple([key, value]) for key, value in zip(node.keys, node.values, strict=True)]
    return getattr(node, "elts", [])


def values_of(name, function, tree):
    """Return the expressions that a function gives to a name: by assignments, loops and `parametrize`."""
    pairs = []
    for node in ast.walk(function):
        if isinstance(node, ast.Assign):
            pairs += [(target, node.value) for target in node.targets]
        elif isinstance(node, (ast.For, ast.comprehension)):
            pairs += [(node.target, row) for row in rows(node.iter, tree)]
        elif isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "parametrize":
            pairs += [(node.args[0], row) for row in rows(node.args[1], tree)]
    for target, value in pairs:
        names = [getattr(each, "id", getattr(each, "value", "")) for each in getattr(target, "elts", [target])]
        items = [value] if len(names) == 1 else getattr(value, "elts", getattr(value, "args", []))
        if name in names and len(items) == len(names):
            yield from parts(items[names.index(name)])


def matched(path):
    """Return the line and the text of each pattern that a file of tests gives to `match=`."""
    text = path.read_text(encoding="utf-8")
    tree = ast.parse(text if "match=" in text else "")
    for function in ast.walk(tree):
        if isinstance(function, (ast.FunctionDef, ast.AsyncFunctionDef)):
            for call in ast.walk(function):
                if isinstance(call, ast.Call) and getattr(call.func, "attr", "") == "raises":
                    for value in (keyword.value for keyword in call.keywords if keyword.arg == "match"):
                        name = getattr(value, "id", "")
                        for each in values_of(name, function, tree) if name else parts(value):
                            if isinstance(getattr(each, "value", None), (int, float)):
                                continue  # not for `raises`: another case of the test
                            yield call.lineno, error_codes.template(each) or ast.unparse(each)


def test_tests_match_the_code_of_an_error_and_no_prose():
    wrong = {
        f"{path.relative_to(ROOT)}:{line}: {pattern}"
        for path in (ROOT / "tests").rglob("*.py")
        for line, pattern in matched(path)
        if pattern != "None" and not re.search(r"TG-|Errno \d", pattern) and pattern not in FOREIGN
    }
    assert sorted(wrong) == []
