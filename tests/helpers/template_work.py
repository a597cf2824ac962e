"""Give operands and methods whose work in a template is measured."""

# Renders each template of its input in a process of its own; writes CPU seconds, growth of peak memory in MiB, outcome.
MEASURED = """
import json, os, resource, sys
from tracegrad.errors import TemplateError
from tracegrad.alignment.tokenizer import Template
Template("{{ 1 }}").render([])
for source, messages, tools in map(json.loads, sys.stdin):
    sys.stdout.flush()
    child = os.fork()
    if child == 0:
        resource.setrlimit(resource.RLIMIT_CPU, (20, 20))
        says = "rendered"
        try:
            Template(source).render(messages, tools)
        except TemplateError as error:
            says = str(error)[:200]
        print(repr(says), end=" ", flush=True)
        os._exit(0)
    _, status, usage = os.wait4(child, 0)
    grown = max(usage.ru_maxrss / 1024 - peak(), 0)  # a fork begins with what its parent has now
    print(status, round(usage.ru_utime + usage.ru_stime, 3), int(grown), flush=True)
"""

LONG = "{% set a = '9' * 1000000 %}"

OPERANDS = {
    "a": "",
    "l": "{% set l = [a] * 9999 %}",
    "m": "{% set m = [{'k': a}] * 999 %}",
    "d": "{% set d = {a: a, 'k': l} %}",
    "n": "{% set n = namespace(k=a, l=[[a]]) %}",
}

METHODS = sorted({name for kind in (str, list, dict, tuple) for name in dir(kind) if not name.startswith("_")})
