"""Escape text for HTML pages and notebooks, format numbers, and build the small tables of `_repr_html_`."""

import html
import math
import unicodedata
from collections.abc import Iterable, Sequence
from itertools import groupby

from tracegrad.errors import escape_terminal

_SHOWN_AS = {"\n": "⏎\n", "\t": "⇥\t"}
_HIDDEN = {"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"}


def escape(text: object) -> str:
    """Return text escaped for element content and quoted attributes.

    Besides markup, it escapes characters that a page scanner could read as an address or an attribute: `=`, `://` and
    the backtick.

    >>> escape('<a href="x">')
    '&lt;a href&#61;&quot;x&quot;&gt;'
    """
    safe = html.escape(_plain(str(text)), quote=True)
    return safe.replace("=", "&#61;").replace("://", "&#58;//").replace("`", "&#96;")


def visible(data: bytes) -> str:
    """Return the escaped text of a token, with invisible bytes and characters made visible.

    Bytes that are not valid UTF-8 and control characters are printed in hexadecimal. Line breaks and tabs get a sign.

    >>> visible("é<".encode()), visible(b"\\xf0\\x9f"), visible(b"\\x00")
    ('é&lt;', '<i>F0·9F</i>', '<i>00</i>')
    """
    out: list[str] = []
    for is_printable, run in groupby(data.decode("utf-8", "surrogateescape"), str.isprintable):
        for char in ["".join(run)] if is_printable else run:
            if char in _SHOWN_AS:
                out.append(_SHOWN_AS[char])
            elif "\udc80" <= char <= "\udcff":
                _add_code(out, f"{ord(char) - 0xDC00:02X}")
            elif not is_printable and unicodedata.category(char) in _HIDDEN:
                _add_code(out, f"{ord(char):02X}" if ord(char) < 0x80 else f"U+{ord(char):04X}")
            else:
                out.append(escape(char))
    return "".join(out).replace("://", "&#58;//")


def number(value: float) -> str:
    """Format a number with four significant digits and a thousands separator.

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


def plural(count: int, noun: str) -> str:
    """Return a number with its noun, in the plural unless it is 1.

    >>> plural(1, "trace"), plural(1200, "trace"), plural(0, "branch")
    ('1 trace', '1,200 traces', '0 branches')
    """
    return f"{count:,} {noun}" + ("" if count == 1 else "es" if noun.endswith("ch") else "s")


def percent(share: float) -> str:
    """Format a share (0 to 1) as a percentage with three significant digits.

    >>> percent(0.1234), percent(0.00004), percent(1.0)
    ('12.3 %', '0.004 %', '100 %')
    """
    return f"{share * 100:.3g} %" if math.isfinite(share) else number(share)


def _plain(text: str) -> str:
    """Return the text with every hidden character replaced by its code point."""
    if text.isprintable():  # which no hidden character is
        return text
    unchanged = {"\n": "\n", "\t": "\t"}
    characters = ((char, unicodedata.category(char) in _HIDDEN) for char in text)
    return "".join(unchanged.get(char, f"[U+{ord(char):04X}]") if is_hidden else char for char, is_hidden in characters)


def _add_code(out: list[str], code: str) -> None:
    if out and out[-1].endswith("</i>"):
        out[-1] = out[-1].removesuffix("</i>") + f"·{code}</i>"
    else:
        out.append(f"<i>{code}</i>")


def cell(value: object) -> str:
    """Return one value as element content. None becomes an empty string, and floats get four significant digits.

    >>> cell("<b>"), cell(None), cell(0.123456)
    ('&lt;b&gt;', '', '0.1235')
    """
    if value is None:
        return ""
    return html.escape(escape_terminal(f"{value:.4g}" if isinstance(value, float) else value))


def table(title: str, head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Return the HTML of a title with a table below it.

    >>> table("1 trace", ("id",), [("a<b",)])
    '<p>1 trace</p><table><tr><th>id</th></tr><tr><td>a&lt;b</td></tr></table>'
    """
    top = "".join(f"<th>{cell(name)}</th>" for name in head)
    body = "".join("<tr>" + "".join(f"<td>{cell(value)}</td>" for value in row) + "</tr>" for row in rows)
    return f"<p>{cell(title)}</p><table><tr>{top}</tr>{body}</table>"


def text(lines: str | Iterable[str]) -> str:
    """Return lines unchanged in a `<pre>` element.

    >>> text("a\\nb")
    '<pre>a\\nb</pre>'
    """
    parts = lines.split("\n") if isinstance(lines, str) else lines
    return "<pre>" + "\n".join(cell(line) for line in parts) + "</pre>"
