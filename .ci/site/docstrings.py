"""Convert the docstrings of this package for mkdocstrings: fence examples, and repeat a description of several names
for each of them."""

from __future__ import annotations

import re

import griffe


class Docstrings(griffe.Extension):
    """Change each docstring before it is parsed."""

    def on_object(self, *, obj: griffe.Object, **_: object) -> None:
        """Called by griffe for whatever it has loaded."""
        if obj.docstring is not None:
            said = each_name(fenced(obj.docstring.value))
            # griffe treats the fields of a dataclass as parameters, but not the fields of these classes.
            fields = isinstance(obj, griffe.Class) and {"NamedTuple", "Protocol"} & {str(base) for base in obj.bases}
            obj.docstring.value = said.replace("Args:\n", "Attributes:\n") if fields else said


def fenced(text: str) -> str:
    """Return the text with examples, from `>>>` to the next empty line, as blocks.

    >>> fenced("Adds.\\n\\n>>> 1 + 1\\n2\\n")
    'Adds.\\n\\n```pycon\\n>>> 1 + 1\\n2\\n```\\n'
    """
    return re.sub(r"(?m)^>>> (?:.+\n?)+", lambda found: f"```pycon\n{found[0].rstrip()}\n```\n", text)


def each_name(text: str) -> str:
    """Return `a, b: text` in a section as `a: text` and `b: text`.

    >>> print(each_name("Args:\\n    a, b: text\\n        goes on.\\n    c: other."))
    Args:
        a: text
            goes on.
        b: text
            goes on.
        c: other.
    """

    def apart(found: re.Match[str]) -> str:
        return "\n".join(f"    {name}: {found[2]}" for name in found[1].split(", "))

    return re.sub(r"(?m)^    (\*{0,2}\w+(?:, \*{0,2}\w+)+): (.*(?:\n     .*)*)", apart, text)
