"""What templates do to values, beside transformers."""

from __future__ import annotations

from typing import Any

import pytest

from test_template import CONVERSATIONS, pinned, theirs
from tracegrad.alignment.tokenizer import Template
from tracegrad.errors import TemplateError

# Operators, formats, floats, JSON, and what Python refuses.
EXPRESSIONS = [
    "1.0 ~ 1e20 ~ 1e-7 ~ 1e16 ~ 1e15 ~ 0.1 ~ [1e20, 1e-7, {'a': 2.5}]",
    "[1.0, 1e20, none, true]",
    "(1,) + (2, 3)",
    "7 // -2 ~ 7 % -2 ~ -7.5 % 2 ~ 1 / 3 ~ 2 ** -1 ~ true + 1",
    "'%05.2f|%5d|%-5d|%+d|%x|%e|%g|%s|%r|%%' % (3.14159, 42, 42, 7, 255, 1500.0, 1e-7, [1, 'a'], 'q\\n')",
    "'%d %i %.0f %.1f' % (2.7, -2.7, 2.5, 0.25)",
    "'%(a)s %(b)03d' % {'a': 1, 'b': 2}",
    "'%s' % none",
    "'%s %s' % (1,)",
    "'%s' % (1, 2)",
    "'%d' % 'a'",
    "'' % 1",
    "'%s-%s'|format('a', 2)",
    "'{:>5}|{:05d}|{:.2f}|{}'.format(1, 2, 5.0, 'q')",
    "messages|tojson",
    "{'a': [1, {'b': 2.0}], 'é<>&': none}|tojson(indent=2)",
    "'é😊\\x01'|tojson(ensure_ascii=true)",
    "{'b': 1, 'a': 2}|tojson(sort_keys=true, separators=(',', ':'))",
    "{1: 2, none: 3, false: 4, 1.5: 6}|tojson",
    "nope|tojson",
    "messages|map(attribute='role')|tojson",
    "messages|selectattr('role', 'equalto', 'user')|map(attribute='content')|join('-')",
    "'yes' if messages|selectattr('role', 'equalto', 'nobody') else 'no'",
    "messages|map('length')|sum",
    "none|map('upper')|list",
    "none|list",
    "none|length",
    "none|join",
    "none is iterable",
    "nope is iterable",
    "'' is sequence ~ {} is sequence ~ none is sequence ~ range(2) is sequence",
    "'a' in none",
    "'a' in nope",
    "1 in 'a'",
    "'b' in 'abc' and 'k' in {'k': 1} and 2 in [1, 2] and 3 not in (1, 2)",
    "1 < 2 < 3 and not 1 < 3 < 2",
    "1 < 'a'",
    "none < 1",
    "nope < 1",
    "nope == nothing",
    "nope + 1",
    "nope ~ 1 ~ none ~ true",
    "none + 'a'",
    "1 + 'a'",
    "[1] + (1,)",
    "'ab' * 2 ~ 2 * 'ab' ~ 'ab' * -1 ~ [1] * 2",
    "'<b>'|safe + '<i>' + \"'\"",
    "'%s' % ('<'|safe) ~ ('<%s>'|safe) % '<'",
    "'<>&\\'\"'|e",
    "none[1:] ~ 5[::-1]",
    "nope[1:]",
    "'abcdé'[::-1] ~ 'abcdé'[-2:] ~ 'abcdé'[5:1:-2] ~ [1, 2, 3][::2] ~ (1, 2, 3)[1:]",
    "'a b  c'.split() ~ 'a,b,c'.split(',', 1) ~ 'a,b,c'.rsplit(',', 1) ~ 'a\\x0bb\\r\\nc'.splitlines()",
    "'abc'.partition('b') ~ 'abc'.rpartition('x') ~ '-7'.zfill(4) ~ 'a'.ljust(3, '.') ~ 'a'.rjust(3)",
    "','.join(['a', 1])",
    "''|int ~ 'x'|int(7) ~ '3.9'|int ~ 'x'|float ~ none|int",
    "nope|int",
    "5|indent",
    "'a\\nb\\n\\nc'|indent(2) ~ 'a'|indent(2, true)",
    "'x' is divisibleby(2)",
    "3 is odd and 4 is even and 3 is lt(4) and 2 is in([2])",
    "raise_exception('no')",
    "strftime_now('%Y-%m-%d %H:%M %j %A %d %b')",
    "messages.append(1)",
    "''.__class__.__mro__",
    "a b",
]


def test_expressions_are_what_they_are_in_transformers_or_refused_by_both(monkeypatch: Any) -> None:
    tokenizers, transformers = pytest.importorskip("tokenizers"), pytest.importorskip("transformers")
    model = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0}))
    hf = transformers.PreTrainedTokenizerFast(tokenizer_object=model)
    utils = pytest.importorskip("transformers.utils.chat_template_utils")
    monkeypatch.setattr(utils, "datetime", pinned("2025-03-07"))
    messages, refused = CONVERSATIONS["plain"], 0
    for expression in EXPRESSIONS:
        for source in (
            f"{{{{ {expression} }}}}",
            f"{{% for x in {expression} %}}{{{{ x }}}},{{{{ loop.last }}}};{{% endfor %}}",
        ):
            expected = theirs(hf, source, messages)
            try:
                got = Template(source).render_text(messages, strftime_now="2025-03-07")
            except TemplateError:
                got = None
            assert got == expected, source
            refused += expected is None
    assert 40 < refused < 80
