"""Draw chat templates from a grammar."""

import random
from collections.abc import Callable

import jinja2.defaults

from template_work import LONG, METHODS, OPERANDS
from tracegrad.alignment.tokenizer import Template
from tracegrad.errors import TemplateError

BEFORE = (
    LONG
    + "".join(OPERANDS.values())
    + "{% macro f(x, y=1) %}{{ x }}{{ caller and caller(x) }}{% endmacro %}{% set x, y, i = 1, 'b', 0 %}"
)

SHARE_OF_SENSE = 0.9  # of operands that are of the kind that is wanted


def known(names: list[str], operator: str) -> list[str]:
    """Those that the engine has."""

    def is_known(name: str) -> bool:
        try:
            Template(f"{{{{ 'a' {operator} {name} }}}}").render([])
        except TemplateError as error:
            return "unknown" not in str(error)
        return True

    return [name for name in names if is_known(name)]


FILTERS = known([*jinja2.defaults.DEFAULT_FILTERS, "tojson"], "|")

TESTS = known([name for name in jinja2.defaults.DEFAULT_TESTS if name.isidentifier()], "is")

OF = {kind: [name for name in METHODS if hasattr(kind, name)] for kind in (str, list, dict)}


class Grammar(random.Random):
    """Draws templates; `depth` is what may still nest."""

    def any(self, depth: int) -> str:
        return self.choice([self.text, self.text, self.items, self.items, self.table, self.number, self.truth])(depth)

    def wanted(self, kind: Callable[[int], str], depth: int) -> str:
        return (kind if self.random() < SHARE_OF_SENSE else self.any)(depth - 1)

    def text(self, depth: int) -> str:
        if depth <= 0:
            return self.choice(
                ["'a'", "''", "'9'", "'\\n'", "y", "a", "a", "messages[1].content", "n.k", "'%s{}' * 999"]
            )
        one, two = (self.wanted(self.text, depth) for _ in range(2))
        return self.choice(
            [
                f"({one} ~ {two})",
                f"({one} + {two})",
                f"({one} * {self.wanted(self.number, depth)})",
                f"({one} % {self.any(depth - 1)})",
                f"({one})[{self.number(0)}:{self.choice(['', self.number(0)])}:{self.choice(['', '-1', '2'])}]",
                f"({one}).{self.choice(OF[str])}({self.arguments(depth)})",
                f"({one})|{self.choice(FILTERS)}({self.arguments(depth)})",
                f"({one}).replace({two}, {self.text(0)})",
                f"({one}).join({self.wanted(self.items, depth)})",
                f"({self.any(depth - 1)})|{self.choice(['tojson', 'string', 'pprint', 'join', 'upper', 'trim'])}",
                f"f({self.any(depth - 1)}, y={one})",
                f"strftime_now({self.choice(['a', one])})",
            ]
        )

    def items(self, depth: int) -> str:
        if depth <= 0:
            return self.choice(["l", "m", "[]", "[1, 'a', x]", "messages", "range(99999)", "n.l", "(1, a)", "[[a, l]]"])
        one = self.wanted(self.items, depth)
        return self.choice(
            [
                f"[{self.any(depth - 1)}, {self.any(depth - 1)}]",
                f"({self.any(depth - 1)}, {self.any(depth - 1)})",
                f"({one} + {self.wanted(self.items, depth)})",
                f"({one} * {self.wanted(self.number, depth)})",
                f"({one})[{self.number(0)}:]",
                f"({one})|{self.choice(FILTERS)}({self.arguments(depth)})",
                f"({one})|{self.choice(['map', 'select', 'reject'])}('{self.choice(FILTERS + TESTS)}')|list",
                f"({one})|{self.choice(['map', 'sort', 'sum', 'groupby', 'unique', 'max'])}(attribute={self.text(0)})",
                f"({one}).{self.choice(OF[list])}({self.arguments(depth)})",
                f"({self.wanted(self.text, depth)}).{self.choice(['split', 'splitlines', 'rsplit', 'partition'])}()",
                f"({self.wanted(self.table, depth)}).{self.choice(['items', 'keys', 'values'])}()",
                f"range({self.wanted(self.number, depth)}, {self.number(depth - 1)})",
            ]
        )

    def table(self, depth: int) -> str:
        if depth <= 0:
            return self.choice(["d", "{}", "messages[0]", "m[0]", "dict(k=a)", "n", "{'k': l}", "{1: 2}"])
        return self.choice(
            [
                f"{{{self.any(depth - 1)}: {self.any(depth - 1)}, 'k': {self.any(depth - 1)}}}",
                f"dict({self.wanted(self.table, depth)}, k={self.any(depth - 1)})",
                f"dict(**{self.wanted(self.table, depth)})",
                f"namespace(k={self.any(depth - 1)}, l={self.any(depth - 1)})",
                f"({self.wanted(self.table, depth)}).{self.choice(OF[dict])}({self.arguments(depth)})",
            ]
        )

    def number(self, depth: int) -> str:
        if depth <= 0:
            return self.choice(
                ["0", "1", "-1", "2", "9", "1.5", "x", "i", "99999", "10 ** 9", "2 ** 62", "-(2 ** 63)", "1e308"]
            )
        one, two = (self.wanted(self.number, depth) for _ in range(2))
        return self.choice(
            [
                f"({one} {self.choice(['+', '-', '*', '/', '//', '%', '**'])} {two})",
                f"({self.any(depth - 1)})|{self.choice(['length', 'int', 'float', 'count', 'sum', 'abs', 'round'])}",
                f"({self.wanted(self.text, depth)}).{self.choice(['count', 'find', 'index'])}({self.text(depth - 1)})",
                f"({self.wanted(self.items, depth)})[{one}]",
                "loop.index",
            ]
        )

    def truth(self, depth: int) -> str:
        one, two = (self.any(depth - 1) for _ in range(2))
        return self.choice(
            [
                f"({one} {self.choice(['==', '!=', '<', '<=', 'in', 'not in', 'and', 'or'])} {two})",
                f"(({one}) is {self.choice(TESTS)}({two}))",
                f"(({one}) is {self.choice(TESTS)})",
                f"(not {one})",
                f"({one} if {two} else {one})",
                f"loop.changed({one})",
                f"loop.cycle({one}, {two})",
            ]
        )

    def arguments(self, depth: int) -> str:
        one, two = (self.any(depth - 1) for _ in range(2))
        return self.choice(
            ["", "", one, one, f"{one}, {two}", f"*{self.items(0)}", f"attribute={one}", "2", "a", "a, a", "l"]
        )

    def statements(self, depth: int) -> str:
        return "".join(self.statement(depth) for _ in range(self.randint(1, 3)))

    def statement(self, depth: int) -> str:
        value, inner = self.any(self.randint(0, 3)), self.statements(depth - 1) if depth else "text"
        loops = ["range(99999)", "range(99)", "a", "l", self.items(2)]
        leave = f"{{% if {value} %}}{{% {self.choice(['break', 'continue'])} %}}{{% endif %}}"
        return self.choice(
            [
                f"{{{{ {value} }}}}",
                f"{{{{ {value} }}}}",
                f"{{% set {self.choice(['x', 'y', 'n.k', 'n.l', 'a', 'l'])} = {value} %}}",
                *[f"{{% for i in {over} %}}{inner}{{% endfor %}}" for over in loops],
                f"{{% for i in {self.items(1)} %}}{inner}{leave}{inner}{{% endfor %}}",
                f"{{% for i in {self.items(1)} if {value} %}}{inner}{{% else %}}{inner}{{% endfor %}}",
                f"{{% for i in {self.items(1)} recursive %}}{{{{ loop({self.items(1)}) }}}}{{% endfor %}}",
                f"{{% if {value} %}}{inner}{{% elif {value} %}}{{% else %}}{inner}{{% endif %}}",
                f"{{% macro f(x, y={value}) %}}{inner}{{{{ caller and caller(x) }}}}{{% endmacro %}}",
                f"{{% macro f(x, y) %}}{inner}{{{{ f(x, y) }}}}{{% endmacro %}}",
                f"{{% call(x) f({value}) %}}{inner}{{% endcall %}}",
                f"{{% filter {self.choice(FILTERS)} %}}{inner}{{% endfilter %}}",
                f"{{% set x %}}{inner}{{% endset %}}",
                f"{{% with x = {value} %}}{inner}{{% endwith %}}",
                f"{{% generation %}}{inner}{{% endgeneration %}}",
                "x" * 99,
            ]
        )
