"""The prose of README and docs/ is plain: few words that only we use, and short sentences in tutorials and how-tos."""

import re

import pytest

from doc_blocks import PAGES, ROOT

OURS = [
    "told",
    "tells",
    "beside",
    "stands",
    "stand",
    "lies",
    "alone",
    "apart",
    "anew",
    "whoever",
    "nobody",
    "elsewhere",
    "stranger",
    "strangers",
    "road",
    "roads",
    "room",
    "rooms",
    "cure",
    "hurts",
    "lot",
    "lots",
    "aside",
    "brought",
    "brings",
    "heat",
]
"""Words that stood for other things in earlier versions of these pages (an argument, a package, a fix)."""
MOST = 8
"""Allowed number of them per 1,000 words."""
LONGEST = 30
"""Words of the longest sentence of a tutorial or how-to."""


def prose(text: str) -> str:
    """Return the text of a page without code, tables, comments and addresses."""
    text = re.sub(r"```.*?```|<!--.*?-->", " ", text, flags=re.DOTALL)
    text = re.sub(r"^\|.*$", "", text, flags=re.MULTILINE)
    return re.sub(r"\]\([^)]*\)", "]", re.sub(r"`[^`]*`", "x", text))


def sentences(text: str) -> list[str]:
    """Split prose into sentences. A heading, an empty line and the start of a list entry end one."""
    parts = re.split(r"\n\s*\n|\n(?=\s*(?:- |\d+\. ))|^#.*$|(?<=[.!?:;])\s", prose(text), flags=re.MULTILINE)
    return [" ".join(part.split()) for part in parts if part and part.strip()]


def test_sentences_end_where_a_reader_ends_them():
    found = sentences("# Head\n\nOne `a.b c` two. Three:\n- four\n- five\n\n```bash\nsix\n```\n| seven |\n")
    assert found == ["One x two.", "Three:", "- four", "- five"]


@pytest.mark.parametrize("kind", ["tutorial", "how-to"])
def test_a_lesson_has_short_sentences(kind):
    pages = (ROOT / "docs" / kind).glob("*.md")
    found = [(page.name, each) for page in pages for each in sentences(page.read_text(encoding="utf-8"))]
    assert len(found) > 50
    assert [(name, each) for name, each in found if len(re.findall(r"[\w'/-]+", each)) > LONGEST] == []


def test_pages_use_the_words_of_the_field():
    text = " ".join(prose(page.read_text(encoding="utf-8")) for page in PAGES)
    count, words = len(re.findall(rf"\b(?:{'|'.join(OURS)})\b", text, re.IGNORECASE)), len(text.split())
    assert 1000 * count <= MOST * words
