"""How objects show themselves in a notebook: small HTML tables and texts, with what strangers wrote escaped.

Used by the `_repr_html_` methods of all rooms.
"""

import html
from collections.abc import Iterable, Sequence

from tracegrad.errors import shown


def cell(value: object) -> str:
    """One value as element content: None is empty, floats have four digits.

    >>> cell("<b>"), cell(None), cell(0.123456)
    ('&lt;b&gt;', '', '0.1235')
    """
    if value is None:
        return ""
    return html.escape(shown(f"{value:.4g}" if isinstance(value, float) else value))


def table(title: str, head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """A title and a table below it.

    >>> table("1 trace", ("id",), [("a<b",)])
    '<p>1 trace</p><table><tr><th>id</th></tr><tr><td>a&lt;b</td></tr></table>'
    """
    top = "".join(f"<th>{cell(name)}</th>" for name in head)
    body = "".join("<tr>" + "".join(f"<td>{cell(each)}</td>" for each in row) + "</tr>" for row in rows)
    return f"<p>{cell(title)}</p><table><tr>{top}</tr>{body}</table>"


def text(lines: str | Iterable[str]) -> str:
    """Lines as they are, in letters of one width.

    >>> text("a\\nb")
    '<pre>a\\nb</pre>'
    """
    told = lines.split("\n") if isinstance(lines, str) else lines
    return "<pre>" + "\n".join(cell(line) for line in told) + "</pre>"
