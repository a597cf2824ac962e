"""Escape text for HTML pages and notebooks, format numbers, and build the small tables of `_repr_html_`."""

import html
import math
import unicodedata
from collections.abc import Iterable, Sequence

from tracegrad.errors import shown

_SHOWN_AS = {"\n": "⏎\n", "\t": "⇥\t"}
_HIDDEN = {"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"}


def escape(text: object) -> str:
    """Text for element content and quoted attributes.

    Beside markup it takes apart whatever could look like an address or an attribute to a scanner of the page.

    >>> escape('<a href="x">')
    '&lt;a href&#61;&quot;x&quot;&gt;'
    """
    safe = html.escape(_plain(str(text)), quote=True)
    return safe.replace("=", "&#61;").replace("://", "&#58;//").replace("`", "&#96;")


def visible(data: bytes) -> str:
    """Escaped text of a token; bytes that are no character of their own in hexadecimal, line ends with a sign.

    >>> visible("é<".encode()), visible(b"\\xf0\\x9f"), visible(b"\\x00")
    ('é&lt;', '<i>F0·9F</i>', '<i>00</i>')
    """
    out: list[str] = []
    for char in data.decode("utf-8", "surrogateescape"):
        if char in _SHOWN_AS:
            out.append(_SHOWN_AS[char])
        elif "\udc80" <= char <= "\udcff":
            _add_code(out, f"{ord(char) - 0xDC00:02X}")
        elif unicodedata.category(char) in _HIDDEN:
            _add_code(out, f"{ord(char):02X}" if ord(char) < 0x80 else f"U+{ord(char):04X}")
        else:
            out.append(escape(char))
    return "".join(out).replace("://", "&#58;//")


def number(value: float) -> str:
    """Four significant digits, with thousands separated.

    >>> [number(x) for x in (0.123456, 12345.6, -2e-7, 0.0, 3.0, float("nan"))]
    ['0.1235', '12,346', '-2e-07', '0', '3', 'not known']
    """
    if not math.isfinite(value):
        return "not known" if math.isnan(value) else ("∞" if value > 0 else "-∞")
    if value == int(value) and abs(value) < 1e15:
        return f"{int(value):,}"
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.4g}"


def percent(share: float) -> str:
    """A share as percent, three significant digits.

    >>> percent(0.1234), percent(0.00004), percent(1.0)
    ('12.3 %', '0.004 %', '100 %')
    """
    return f"{share * 100:.3g} %" if math.isfinite(share) else number(share)


def _plain(text: str) -> str:
    """The text with every hidden character spelled out."""
    shown = {"\n": "\n", "\t": "\t"}
    hidden = ((char, unicodedata.category(char) in _HIDDEN) for char in text)
    return "".join(shown.get(char, f"[U+{ord(char):04X}]") if hides else char for char, hides in hidden)


def _add_code(out: list[str], code: str) -> None:
    if out and out[-1].endswith("</i>"):
        out[-1] = out[-1].removesuffix("</i>") + f"·{code}</i>"
    else:
        out.append(f"<i>{code}</i>")


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
