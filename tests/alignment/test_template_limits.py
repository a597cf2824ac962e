"""Templates that raise, do not end, or grow without bounds: an error within a second and within bounds of memory."""

import subprocess
import sys
import time

import pytest

from peak import PEAK
from tracegrad.alignment.tokenizer import Template
from tracegrad.errors import TemplateError
from vocabulary import user


@pytest.mark.parametrize(
    ("source", "says"),
    [
        ("{{ raise_exception('No ' ~ messages[0].role ~ ' here') }}", r'TG-TEMPLATE-003.*"No user here" \(line 1\)'),
        ("{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}", "TG-TEMPLATE-006"),
        (
            "{% set x = 'x' * 999 %}"
            "{% for a in x %}{% for b in x %}{% for c in x %}{% endfor %}{% endfor %}{% endfor %}",
            "TG-TEMPLATE-006",
        ),
        ("{% macro f() %}{{ f() }}{{ f() }}{% endmacro %}{{ f() }}", "TG-TEMPLATE-006"),
        ("{{ messages[0].content.x.y }}", "TG-TEMPLATE-005"),
        ("{{ messages|nope }}", "TG-TEMPLATE-005.*nope"),
        ("{{ 10 ** 10 ** 10 }}", "TG-TEMPLATE-005"),
        ("{% for a in range(10 ** 9) %}{% endfor %}", "TG-TEMPLATE-005"),
    ],
)
def test_a_template_that_raises_or_does_not_end_is_a_clear_error_within_a_second(source: str, says: str) -> None:
    template = Template(source)
    began = time.process_time()
    with pytest.raises(TemplateError, match=says):
        template.render([user("hi")])
    # Of CPU time: a second on the clock means nothing on a busy machine.
    assert time.process_time() - began < 1


LONG = "Some text of a template that is repeated. " * 400
GROWING = [
    "{{ 'a' * 10 ** 9 }}",
    "{{ [1] * 10 ** 9 }}",
    "{{ 9 * 'x' * 10 ** 12 }}",
    "{{ 'a' * 10 ** 8 ~ 'b' * 10 ** 8 }}",
    "{% macro f(x) %}{{ f(x ~ x) }}{% endmacro %}{{ f('ab') }}",
    "{% macro f(x) %}{{ f([x, x]) }}{% endmacro %}{{ f('ab') }}",
    "{% set x = 'x' * 9999 %}" + "{% set x = x ~ x %}" * 40,
    "{% set x = 'x' * 9999 %}" + "{% set x = x + x %}" * 40,
    "{% set x = ['x'] %}" + "{% set x = x + x %}" * 40,
    "{% set x = ['x'] %}" + "{% set x = [x, x] %}" * 40 + "{{ x }}",
    "{% set x = {'a': 1} %}" + "{% set x = {'a': x, 'b': x} %}" * 40 + "{{ x|tojson }}",
    "{% set n = namespace(x=[]) %}{% for a in range(99999) %}{% set n.x = [n.x] %}{% endfor %}",
    "{% set n = namespace(s='') %}{% for a in range(99999) %}{% set n.s = n.s ~ 'x' * 999 %}{% endfor %}",
    "{% set n = namespace(s='x') %}{% for a in range(99) %}{% set n.s = n.s ~ n.s %}{% endfor %}",
    "{% set x = 'a' * 4000000 %}{% set n = namespace(x=[]) %}"
    "{% for a in range(99999) %}{% set n.x = n.x + [x[1:]] %}{% endfor %}",
    "{% set x = 'a' * 4000000 %}{% set n = namespace(x=[]) %}"
    "{% for a in range(99999) %}{% set n.x = n.x + [x|upper] %}{% endfor %}",
    "{% for a in range(99999) %}{% for b in range(99999) %}{{ 'x' * 999 }}{% endfor %}{% endfor %}",
    "{% set x %}{% for a in range(99999) %}{% for b in range(99999) %}.{% endfor %}{% endfor %}{% endset %}",
    "{% set x %}{% for a in range(99999) %}{% for b in range(9) %}" + LONG + "{% endfor %}{% endfor %}{% endset %}",
    "{% set x = 'x' * 999999 %}{{ x|replace('x', x) }}",
    "{% set x = 'x' * 999999 %}{{ x.replace('x', x) }}",
    "{% set x = 'x' * 999999 %}{{ ([x] * 99999)|join }}",
    "{% set x = 'x' * 999999 %}{{ x.join(['a'] * 99999) }}",
    "{% set x = 'x' * 999999 %}{{ ([x] * 99999)|tojson }}",
    "{% set x = 'x' * 999999 %}{{ [x] * 99999 }}",
    "{{ ('x' * 4000000)|list }}",
    "{{ ('x,' * 2000000).split(',') }}",
    "{{ 'x'|indent(10 ** 9) }}",
    "{{ 'x'|batch(10 ** 9, 'y')|list }}",
    "{{ 'x'|slice(10 ** 9)|list }}",
    "{{ '%1000000000d' % 1 }}",
    "{{ '%*d' % (10 ** 9, 1) }}",
    "{{ '%.1000000000f' % 1 }}",
    "{{ '%1000000000d'|format(1) }}",
    "{{ '{:>1000000000}'.format('x') }}",
    "{{ '{:>{}}'.format('x', 10 ** 9) }}",
    "{{ 'x'.ljust(10 ** 9) }}",
]
# Renders what stands in its argument and writes CPU seconds, growth of peak memory in MiB, and the error.
MEASURED = """
import sys, time
from tracegrad.errors import TemplateError
from tracegrad.alignment.tokenizer import Template
Template("{{ 1 }}").render_text([])
for source in sys.stdin.read().split("\\0"):
    before, began = peak(), time.process_time()
    says = "rendered"
    try:
        Template(source).render_text([{"role": "user", "content": "hi"}])
    except TemplateError as error:
        says = str(error)
    print(f"{time.process_time() - began:.3f} {peak() - before:.1f} {says!r}")
"""


def test_a_template_that_grows_without_bounds_ends_in_an_error_within_a_second_and_256_mib() -> None:
    run = subprocess.run(
        [sys.executable, "-c", PEAK + MEASURED], input="\0".join(GROWING), capture_output=True, text=True, check=True
    )
    lines = [line.split(" ", 2) for line in run.stdout.splitlines()]
    for source, (seconds, mebibytes, says) in zip(GROWING, lines, strict=True):
        assert "chat template" in says, source
        assert float(seconds) < 1, source
        assert float(mebibytes) < 256, source
    # Peaks of one process: their sum is what all of them together grew it by.
    assert sum(float(mebibytes) for _, mebibytes, _ in lines) < 256
