"""Loops over operations on long operands: all that a template can call ends within a second and 256 MiB."""

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import jinja2.defaults
import pytest

from peak import PEAK
from template_work import LONG, MEASURED, METHODS, OPERANDS

# What was seen to run for minutes, and what is built like it.
SEEN = [
    "a.isdigit()",
    "a|length",
    "a.count('8')",
    "{a: 1}",
    "d[a]",
    "d[l]",
    "d[(l, l)]",
    "d|attr(l)",
    "d.get(l)",
    "(l, l) in d",
    "a[999999]",
    "a[-1]",
    "a.999999",
    "a is startingwith('8')",
    "a.startswith(a)",
    "a == a ~ ''",
    "a == '" + "9" * 999 + "'",
    "a < a ~ '1'",
    "a in [a ~ '']",
    "'8' in a",
    "a.strip(a)",
    "a|trim(a)",
    "a|int",
    "a|upper",
    "a is lower",
    "a is iterable",
    "a|map('upper')|list",
    "[1]|rejectattr(l)|list",
    "[1]|selectattr('k', l)|list",
    "[1]|select(l)|list",
    "[1]|groupby(attribute=l)",
    "l|sort",
    "l|unique|list",
    "l|groupby('k')",
    "m|sort(attribute='k')",
    "m|map(attribute='k.' * 99999)|list",
    "l == l + ['x']",
    "l|join",
    "l|tojson",
    "l|pprint",
    "l|string",
    "d.items()|string",
    "[d.items()] == [d.items()]",
    "l.count(a ~ '')",
    "l|min",
    "'%s' % l",
    "'{}'.format(l)",
    "dict(**d)",
    "dict(d)",
    "namespace(d)",
    "namespace(**d)",
    "dict(*l)",
    "range(99999)[99998]",
    "range(99999)|list",
    "loop.changed(a ~ i)",
    "loop.cycle(a)",
    "strftime_now(a)",
    "strftime_now('%255Y' * 9999)",
    "l|tojson(indent=a)",
    "l|tojson(separators=(a, a))",
    "[l] ~ [l] ~ [l] ~ [l]",
    "m|batch(1)|list",
    "a|list",
    "a|batch(2)|list",
    "a|reverse",
    "l|last",
    "raise_exception(l)",
]
MORE = ("", "(a)", "(2)", "(l)", "('k', l)", "(attribute=l)")
NESTED = [
    "{% set n = namespace(x=[1]) %}{% for a in range(99999) %}{% set n.x = n.x|batch(1) %}{% endfor %}",
    "{% set n = namespace(x=1) %}{% for a in range(99999) %}{% set n.x = namespace(x=n.x) %}{% endfor %}",
    "{% set n = namespace(x=1) %}{% for a in range(99999) %}{% set n.x = dict(x=n.x) %}{% endfor %}",
    "{% set n = namespace(h=1) %}{% set n.c = n %}{% for a in range(99999) %}{% set n.c.n = namespace() %}"
    "{% set n.c = n.c.n %}{% endfor %}",
    "{% set n = namespace() %}{% set n.x = [n] %}{{ n }}",
    "{% for a in [1] %}{% set n = namespace() %}{% set n.x = [loop] %}{{ loop.changed(n) }}{% endfor %}",
]


def looped(operation: str) -> str:
    """The operation again and again, behind the operands that it names."""
    named = re.findall(r"\b[lmdn]\b", operation)
    operands = "".join(source for name, source in OPERANDS.items() if name in named or (name == "l" and "d" in named))
    return f"{LONG}{operands}{{% for i in range(99999) %}}{{% set x = {operation} %}}{{% endfor %}}"


def measured(sources: list[str]) -> list[tuple[str, int, float, int]]:
    """Outcome, exit status, CPU seconds and MiB of each source."""
    return measured_with([(source, [{"role": "user", "content": "hi"}], None) for source in sources])


def measured_with(cases: list[tuple[str, Any, Any]]) -> list[tuple[str, int, float, int]]:
    """The same of sources with their messages and tools."""
    lines = "\n".join(map(json.dumps, cases))
    run = subprocess.run(
        [sys.executable, "-c", PEAK + MEASURED], input=lines, capture_output=True, text=True, check=True
    )
    rows = [("killed " + line).rsplit(" ", 3) for line in run.stdout.splitlines()]
    return [(says, int(status), float(seconds), int(mebibytes)) for says, status, seconds, mebibytes in rows]


def check(operations: list[str]) -> None:
    sources = [looped(operation) for operation in operations]
    for operation, (says, status, seconds, mebibytes) in zip(operations, measured(sources), strict=True):
        assert status == 0, operation
        assert seconds < 1, (operation, says, seconds)
        assert mebibytes < 256, (operation, says, mebibytes)


def test_an_operation_on_a_long_operand_is_not_repeated_without_end() -> None:
    check(SEEN[::9])


@pytest.mark.nightly
def test_no_operation_on_a_long_operand_is_repeated_without_end() -> None:
    check(SEEN)


@pytest.mark.nightly
@pytest.mark.parametrize("operand", OPERANDS)
def test_no_filter_test_or_method_is_repeated_on_a_long_operand_without_end(operand: str) -> None:
    filters = [f"{operand}|{name}{more}" for name in jinja2.defaults.DEFAULT_FILTERS for more in MORE]
    tests = [
        f"{operand} is {name}{more}"
        for name in jinja2.defaults.DEFAULT_TESTS
        if name.isidentifier()
        for more in ("", "(a)")
    ]
    methods = [f"{operand}.{name}({more})" for name in METHODS for more in ("", "a", "a, a", "l")]
    check(filters + tests + methods)


CALLS = [{"function": {"name": "f", "arguments": {"a": 1}}}]
TOOLS = [{"type": "function", "function": {"name": "f"}}]
# What comes after a render with marks: they are taken out, read, and what they do not tell is searched for.
PROVENANCE = [
    # a thousand strings that are not there
    (
        "{{ messages[0].content[0].text|length }}{% for i in range(5) %}{{ 'a' * 4000000 }}{% endfor %}",
        [{"role": "user", "content": [{"type": "text", "text": f"b{i}"} for i in range(1000)]}],
        None,
    ),
    # ends of a string whose start was cut off, each as long as all the text before it
    (
        "{% set t = messages[0].content.rsplit('X', 1)[1] %}{% for i in range(90000) %}X{{ t }}{% endfor %}",
        [{"role": "user", "content": "aaX" * 100_000 + "aa"}],
        None,
    ),
    # containers that are opened and not closed, and others that are closed and were not opened
    (
        "{% set a = (tools|tojson).split('t')[0] %}{% set b = (messages[0].tool_calls|tojson).split('1')[1] %}"
        "{% for i in range(90000) %}{{ a }}{% endfor %}{% for i in range(90000) %}{{ b }}{% endfor %}",
        [{"role": "assistant", "content": "", "tool_calls": CALLS}],
        TOOLS,
    ),
    # more marks than there is memory for
    ("{% for i in range(5) %}{{ messages[0].content * 300000 }}{% endfor %}", [{"role": "user", "content": "x"}], None),
]


def test_finding_out_what_is_content_ends_within_a_second_and_256_mib() -> None:
    for (source, *_), (says, status, seconds, mebibytes) in zip(PROVENANCE, measured_with(PROVENANCE), strict=True):
        assert status == 0, source
        assert seconds < 1, (source, says, seconds)
        assert mebibytes < 256, (source, says, mebibytes)


def test_values_do_not_come_to_lie_deeper_than_they_can_be_walked() -> None:
    for source, (says, status, *_) in zip(NESTED, measured(NESTED), strict=True):
        assert status == 0, source
        assert "chat template" in says, source


def test_long_strings_that_a_namespace_comes_to_keep_are_not_gone_over() -> None:
    source = LONG + OPERANDS["m"] + "{% set n = namespace() %}{% set n.k = m %}{{ n.k|length }}"
    ((says, status, seconds, _),) = measured([source])
    assert (says, status) == ("killed 'rendered'", 0)
    assert seconds < 1, seconds


def test_all_that_a_template_calls_is_added_where_it_pays() -> None:
    rooms = (Path(__file__).parents[2] / "rust/core/src/template").rglob("*.rs")
    kinds = ("filter", "test", "function", "global")
    adding = [path.name for path in rooms if any(f"add_{kind}(" in path.read_text() for kind in kinds)]
    assert adding == ["limits.rs"]
