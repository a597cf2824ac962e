"""Build the page itself: the skeleton, its scripts and its styles. The scripts load the content."""

from collections.abc import Callable
from importlib.resources import files

from tracegrad.report.page import colours
from tracegrad.view.detail import MODES

SCRIPTS = (
    "store.js",
    "address.js",
    "columns.js",
    "histograms.js",
    "list.js",
    "tokens.js",
    "markdown.js",
    "trace.js",
    "runs.js",
    "main.js",
)
"""The scripts in the order in which they run. Each is a plain script that adds to `window.tracegrad`."""


def style() -> str:
    """Return the report's style, followed by the page's own style and the colours of the overlays."""
    page_style = files("tracegrad.view").joinpath("static/view.css").read_text("utf-8")
    return files("tracegrad.report").joinpath("style.css").read_text("utf-8") + page_style + colours(_OVERLAYS)


_OVERLAYS = {
    "gradient": ("down", "up"),
    "advantage": ("down", "up"),
    "ratio": ("less", "more"),
    "old": ("less", "more"),
    "weight": ("less", "more"),
    "entropy": ("less", "more"),
    "logprob": ("less", "down"),
}
STYLES: dict[str, Callable[[], str]] = {"view.css": style}


def page(scripts: str = "", head: str = "") -> str:
    """Return the HTML of the skeleton."""
    links = "".join(f'<script src="static/{name}" defer></script>' for name in SCRIPTS)
    modes = "".join(
        f'<input type="radio" name="mode" id="by-{key}"{" checked" * (key == "gradient")}>'
        f'<label for="by-{key}" title="{meaning}">{name}</label>'
        for key, name, meaning in MODES
    )
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8"><title>tracegrad view</title>'
        '<link rel="icon" href="data:,">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f"{head or '<link rel=stylesheet href=static/view.css>'}</head><body>"
        '<header class="bar"><b>tracegrad</b><nav aria-label="pages"><a href="#list" id="to-list">traces</a>'
        '<a href="#runs" id="to-runs">runs</a></nav><output id="state" aria-live="polite"></output></header>'
        '<p id="problem" role="alert"></p>'
        '<main id="list"><h1 class="unseen">Traces</h1>'
        '<form id="ask" role="search"><input id="query" type="search" aria-label="search" title="Press / to search." '
        'placeholder="search ids and text" autocomplete="off" spellcheck="false"><label><input type="checkbox" '
        'id="regex"> regular expression</label><button type="button" id="clear" hidden>clear filters</button></form>'
        '<details id="filters"><summary>Filters and histograms <small id="active"></small></summary>'
        '<div id="tags"></div><div id="histograms"></div></details>'
        '<div id="rows" tabindex="0" role="grid" aria-label="traces"></div>'
        '<p class="below"><button type="button" id="export">export these</button> '
        "<small>j and k select a trace, Enter opens it, / searches</small></p></main>"
        '<main id="trace" hidden><div id="top"></div><div id="facts"></div><div id="history"></div>'
        '<label id="as-markdown" title="m"><input type="checkbox" id="markdown"> messages as markdown</label>'
        '<div id="words"></div><section id="beside" aria-label="group"></section><h2>Tokens</h2>'
        f'<div class="modes" id="overlay">{modes}'
        '<p class="legend" id="legend"></p><div id="tokens"></div></div><output id="token"></output></main>'
        '<main id="runs-page" hidden></main><noscript>This page needs JavaScript.</noscript>'
        f"{scripts or links}</body></html>"
    )
