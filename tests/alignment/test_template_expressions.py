"""What templates do to values, beside transformers."""

from typing import Any

import pytest

from template_cases import CONVERSATIONS, pinned, theirs
from template_expressions import EXPRESSIONS
from tracegrad.alignment.tokenizer import Template
from tracegrad.errors import TemplateError


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
