"""Whether each public name of the API reference has an example, and whether the examples that are not run fit the code.

Doctests run in `make test` with `--doctest-modules`. A block of Python is for what needs a server, a GPU or minutes:
here it is compiled, its names are looked up, and its calls are compared with the signatures.
"""

import ast
import builtins
import dis
import doctest
import importlib
import inspect
import re
import sys
import textwrap
from importlib.util import find_spec
from pathlib import Path
from types import CodeType, ModuleType

import pytest

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / ".ci" / "site"))

import build

pytestmark = pytest.mark.skipif(find_spec("transformers") is None, reason="some pages are of modules that need it")

PAGES = {
    page: [name.removeprefix(f"{page}.") for name in re.findall(r"(?m)^::: (.+)$", text)]
    for page, text in build.api().items()
}
BLOCK = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)


def core_docstring(name):
    """Return the docstring of a class of the compiled core, which the reference reads from its stub."""
    body = ast.parse((build.PACKAGE / "_core.pyi").read_text(encoding="utf-8")).body
    return next(ast.get_docstring(node) for node in body if getattr(node, "name", None) == name)


def docstring(page, name):
    """Return the text with the example of a name: that of a constant or an alias of types is on its page."""
    module = importlib.import_module(page)
    thing = getattr(module, name)
    if name == "TracegradError":
        return core_docstring(name)
    documented = inspect.isclass(thing) or inspect.isfunction(thing) or isinstance(thing, ModuleType)
    return inspect.getdoc(thing if documented else module) or ""


def blocks(text):
    return BLOCK.findall(text)


def global_names(code, *, top=True):
    """Yield the names that code, or only the functions in it, looks up outside of themselves."""
    for step in dis.get_instructions(code):
        if step.opname in ("LOAD_NAME", "LOAD_GLOBAL") and top:
            yield step.argval
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from global_names(constant)


def stored_names(code):
    """Yield the names that the first level of code assigns."""
    return (step.argval for step in dis.get_instructions(code) if step.opname in ("STORE_NAME", "STORE_GLOBAL"))


def wrong_calls(tree, names):
    """Yield the calls of known functions that their signatures refuse, and the attributes that do not exist."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call) or not re.fullmatch(r"[\w.]+", ast.unparse(node.func)):
            continue
        first, *attributes = ast.unparse(node.func).split(".")
        function = names.get(first)
        if not isinstance(function, ModuleType) and (attributes or function is None):
            continue
        try:
            for attribute in attributes:
                function = getattr(function, attribute)
            inspect.signature(function).bind(*node.args, **{keyword.arg: None for keyword in node.keywords})
        except (AttributeError, TypeError) as error:
            yield f"{ast.unparse(node.func)}: {error}"


def problems(code):
    """Return the problems of a block of Python."""
    tree, compiled = ast.parse(code), compile(code, "block", "exec")
    names = {}
    for node in ast.walk(tree):
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            exec(ast.unparse(node), names)
    known = {*vars(builtins), *names, *stored_names(compiled)}
    unknown = [f"{name} is not defined" for name in global_names(compiled) if name not in known]
    return [*unknown, *wrong_calls(tree, names)]


@pytest.mark.parametrize("page", PAGES)
def test_every_public_name_has_an_example(page):
    without = [name for name in PAGES[page] if ">>> " not in (text := docstring(page, name)) and not blocks(text)]
    assert without == []


@pytest.mark.parametrize("page", PAGES)
def test_blocks_that_are_not_run_name_what_exists(page):
    found = {name: [problems(code) for code in blocks(docstring(page, name))] for name in PAGES[page]}
    assert {name: lists for name, lists in found.items() if any(lists)} == {}


@pytest.mark.parametrize("page", PAGES)
def test_functions_of_doctests_name_what_exists(page):
    """A doctest may define a function for a server and not call it."""
    module = importlib.import_module(page)
    unknown = set()
    for name in PAGES[page]:
        examples = doctest.DocTestParser().get_examples(docstring(page, name))
        code = compile("".join(example.source for example in examples), name, "exec")
        home = vars(importlib.import_module(getattr(getattr(module, name), "__module__", None) or page))
        known = {*vars(builtins), *home, *stored_names(code)}
        unknown |= {(name, each) for each in global_names(code, top=False) if each not in known}
    assert unknown == set()


def test_the_example_of_the_base_error_runs():
    test = doctest.DocTestParser().get_doctest(core_docstring("TracegradError"), {}, "TracegradError", None, 0)
    assert doctest.DocTestRunner().run(test) == doctest.TestResults(failed=0, attempted=2)


def test_problems_of_a_block_are_found():
    code = """
        import tracegrad as tg

        tg.online.record(["2+2?"], agent=agent, servers=[], out="a")
        tg.online.record(["2+2?"], rewards=[], server="b", servers=[], out="a")
        tg.recrod("a")


        async def send(sync):
            await sync.push(weights, 1)
    """
    assert [line.split(": ")[0] for line in problems(textwrap.dedent(code))] == [
        "agent is not defined",
        "weights is not defined",
        "tg.online.record",
        "tg.recrod",
    ]


def test_examples_of_a_page_are_sessions():
    assert build._code("    >>> 1 + 1\n    2\n") == "```pycon\n>>> 1 + 1\n2\n```"
    page = build._page("a", ROOT / "python" / "tracegrad" / "advantage" / "__init__.py", [])
    assert page.index("```text\n") < page.index("```\n", page.index("```text\n") + 1) < page.index("```pycon\n>>> from")
    assert build._code("    1 + 1\n") == "```python\n1 + 1\n```"
    assert build._code("    GRPO    group_mean(\n") == "```text\nGRPO    group_mean(\n```"
