"""Templates that nest without bounds, or hold what the engine panics at: refused on a stack of 256 KiB."""

import subprocess
import sys

import pytest

from tracegrad.alignment.tokenizer import Template
from tracegrad.errors import TemplateError

LONGEST = 512 << 10
# What stands before a link, the link that is repeated, and what stands behind.
CHAINS = [
    ("{{ ", "-", "1 }}"),
    ("{{ ", "not ", "1 }}"),
    ("{{ a", " and a", " }}"),
    ("{{ a", ".a", " }}"),
    ("{{ a", "[0]", " }}"),
    ("{{ a", "|string", " }}"),
    ("{{ a", "|f(1", "}}"),
    ("{{ 1", " is string", " }}"),
    ("{{ a", " is not a", " }}"),
    ("{{ 1", " if 1 else 1", " }}"),
    ("{{ a", "()", " }}"),
    ("{{ a ", "~ a", " }}"),
    ("{{ a", " + a - a", " }}"),
    ("{{ 2", "**2", " }}"),
    ("{{ a", " < a", " }}"),
    ("{{ ", "'a' ", "}}"),
    ("{{ ", "(", "1 }}"),
    ("{{ ", "[", "1 }}"),
    ("{{ ", "{1: ", "1 }}"),
    ("{{ a[", "::", "] }}"),
    ("{{ f(", "*", "a) }}"),
    ("{{ ", "a", " }}"),
    ("{{ ", "1", " }}"),
    ("{% if 0 %}", "{% elif 0 %}", "{% endif %}"),
    ("", "{% if 1 %}", ""),
    ("", "{% for a in b %}", ""),
    ("", "{% set x %}", ""),
    ("", "{% with a = 1 %}", ""),
    ("", "{% macro f() %}", ""),
    ("", "{% generation %}", ""),
    ("{% set a", "|string", " %}{% endset %}"),
    ("{% set ", "(", "a %}"),
    ("{% set a", ".a", " = 1 %}"),
    ("{% filter a", "|string", " %}{% endfilter %}"),
    ("{% autoescape ", "not ", "1 %}{% endautoescape %}"),
    ("{% for a in ", "(", "b) %}{% endfor %}"),
    ("{% macro f(a=", "not ", "1) %}{% endmacro %}"),
    ("{% call f(", "-", "1) %}{% endcall %}"),
    ("{% raw %}", "{%", "{% endraw %}"),
    ("", "{#", ""),
    ("", "{{ a b }}", ""),
    ("", "{%", ""),
    # What does not nest, as densely as it can be written.
    ("", "{{1}}", ""),
    ("", "{%if a%}{%endif%}", ""),
    ("", "{%macro a()%}{%endmacro%}", ""),
    ("{{ [", "{},", "] }}"),
    ("{{ f(", "a,", ") }}"),
    ("{{ {", "1:1,", "} }}"),
    ("", "{% set x = [x] %}", ""),
    ("", "{% set x = x|batch(1) %}", ""),
]
# Compiles and renders what stands in its input on a thread with little stack; writes CPU seconds and the error.
SMALL_STACK = """
import resource, sys, threading, time
from tracegrad.errors import TemplateError
from tracegrad.alignment.tokenizer import Template
resource.setrlimit(resource.RLIMIT_CPU, (60, 60))
threading.stack_size(256 << 10)

def tried(source):
    began, says = time.process_time(), "rendered"
    try:
        Template(source).render([{"role": "user", "content": "hi"}])
    except TemplateError as error:
        says = str(error)
    print(f"{time.process_time() - began:.3f} {says!r}", flush=True)

for source in sys.stdin.read().split("\\0"):
    thread = threading.Thread(target=tried, args=(source,))
    thread.start()
    thread.join()
"""


def tried(sources: list[str]) -> list[tuple[float, str]]:
    """CPU seconds and outcome of each source, on a small stack."""
    run = subprocess.run(
        [sys.executable, "-c", SMALL_STACK], input="\0".join(sources), capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, f"it died at {sources[len(run.stdout.splitlines())][:200]!r}: {run.stderr[-500:]}"
    assert "panicked" not in run.stderr
    lines = [line.split(" ", 1) for line in run.stdout.splitlines()]
    return [(float(seconds), says) for seconds, says in lines]


def test_chains_of_any_length_are_read_or_refused_within_a_second_on_a_small_stack() -> None:
    sources = [
        before + link * times + behind
        for before, link, behind in CHAINS
        for times in (95, 480, (LONGEST - len(before + behind)) // len(link))
    ]
    for source, (seconds, says) in zip(sources, tried(sources), strict=True):
        assert seconds < 1, source[:200]
        assert says == "'rendered'" or "chat template" in says, source[:200]


@pytest.mark.parametrize(("before", "link", "behind"), CHAINS[:12])
def test_a_chain_that_no_template_has_is_refused_with_its_line(before: str, link: str, behind: str) -> None:
    with pytest.raises(TemplateError, match=r"TG-TEMPLATE-011.*nests.*too.*deeply.*500"):
        Template("\n" + before + link * 501 + behind)


def test_a_template_that_is_longer_than_any_is_refused() -> None:
    assert Template("a" * LONGEST).render_text([]) == "a" * LONGEST
    with pytest.raises(TemplateError, match=r"TG-TEMPLATE-011.*524289.*524288.*are.*most"):
        Template("a" * (LONGEST + 1))


RECURSIVE = [
    "{% macro f(n) %}{{ f(n + 1) }}{% endmacro %}{{ f(0) }}",
    "{% macro f() %}{{ caller() }}{% endmacro %}"
    "{% macro g(n) %}{% call f() %}{{ g(n + 1) }}{% endcall %}{% endmacro %}{{ g(0) }}",
    "{% for a in [1] recursive %}{{ loop([1]) }}{% endfor %}",
    "{% block a %}{{ self.a() }}{% endblock %}",
    "{% include 'chat_template' %}",
    "{% import 'chat_template' as a %}",
    "{% from 'chat_template' import a %}",
    "{% extends 'chat_template' %}",
]


def test_a_template_that_calls_itself_without_end_is_refused_on_a_small_stack() -> None:
    for source, (_, says) in zip(RECURSIVE, tried(RECURSIVE), strict=True):
        assert "the chat template" in says, source


def test_values_as_deep_as_they_may_be_are_printed_compared_and_sorted_on_a_small_stack() -> None:
    nested = "{% set n = namespace(x=[]) %}{% for a in range(120) %}{% set n.x = [n.x] %}{% endfor %}"
    used = [
        "{{ n.x }}",
        "{{ n.x|tojson }}",
        "{{ n.x == n.x }}",
        "{{ [n.x, n.x]|sort }}",
        "{{ [n.x]|unique|list }}",
        "{{ n.x|map('map', " + "'map', " * 110 + "'list')|list }}",
    ]
    for source, (_, says) in zip(used, tried([nested + source for source in used]), strict=True):
        assert says == "'rendered'", source


@pytest.mark.parametrize(
    ("source", "says"),
    [
        ("{% for a in [1] %}{{ loop.cycle() }}{% endfor %}", "loop.cycle has no items"),
        ("{% for a in [1] %}{% set b = loop %}{{ b.cycle(*[]) }}{% endfor %}", "loop.cycle has no items"),
        (
            "{% for a in [1] %}{% generation %}{% break %}{% endgeneration %}{% endfor %}",
            "'break' leaves a 'generation'",
        ),
        ("{% for a in [1] %}{% with b = 1 %}{% continue %}{% endwith %}{% endfor %}", "'continue' leaves a 'with'"),
        ("{% for a in [1] %}{% set b %}{% break %}{% endset %}{% endfor %}", "'break' leaves a 'set'"),
        ("{% for a in [1] %}{% filter upper %}{% break %}{% endfilter %}{% endfor %}", "'break' leaves a 'filter'"),
    ],
)
def test_what_the_engine_panics_at_is_refused_with_the_line(source: str, says: str) -> None:
    # jinja2 makes a function of a generation block, and says of a break in there: SyntaxError, 'break' outside loop.
    with pytest.raises(TemplateError, match=r"TG-TEMPLATE-0(05|11).*\(line 2\)") as caught:
        Template("\n" + source).render_text([])
    assert says in str(caught.value)


def test_loops_cycle_and_see_changes_as_in_jinja() -> None:
    source = "{% for a in [1, 1, 2] %}{{ loop.cycle('x', 'y') }}{{ loop.changed(a) }} {% endfor %}"
    assert Template(source).render_text([]) == "xTrue yFalse xTrue "
    inner = "{% for b in [3, 4] %}{{ b }}{% break %}{% endfor %}"
    source = "{% for a in [1, 2] %}{% generation %}" + inner + "{% endgeneration %}{% endfor %}"
    assert Template(source).render_text([]) == "33"
