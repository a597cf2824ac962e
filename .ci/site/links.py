"""Find the wrong links of a built site: missing targets and anchors, and files that a page loads from other sites."""

from __future__ import annotations

from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urldefrag, urlsplit

LOADED = {"script": "src", "img": "src", "link": "href", "iframe": "src", "source": "src", "object": "data"}
"""Elements whose files a browser loads by itself, with the attribute of the address."""
POINTERS = ("canonical", "prev", "next")
"""`link`s that nothing is loaded for."""


class Page(HTMLParser):
    """Collect the names in a page, the addresses it links to, and those that it loads."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.names: set[str] = set()
        self.links: list[str] = []
        self.loads: list[str] = []
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        told = {name: value or "" for name, value in attrs}
        self.names |= {told[name] for name in ("id", "name") if name in told}
        if tag == "a" and "href" in told:
            self.links.append(told["href"])
        elif LOADED.get(tag, "") in told and told.get("rel") not in POINTERS:
            self.loads.append(told[LOADED[tag]])


def wrong_links(site: Path) -> list[str]:
    """Return a line for each link without a target, and for each file that is loaded from another site."""
    pages = {path.resolve(): Page(path) for path in sorted(site.rglob("*.html"))}
    wrong = []
    for path, page in pages.items():
        here = path.relative_to(site.resolve())
        if here.name == "404.html":
            continue  # its addresses start at the root of a server
        for link in (*page.links, *page.loads):
            if urlsplit(link).scheme or link.startswith("//"):
                if link in page.loads and urlsplit(link).scheme != "data":
                    wrong.append(f"{here} loads {link}, which is not of this site")
                continue
            address, name = urldefrag(link)
            target = (path.parent / unquote(urlsplit(address).path)).resolve() if address else path
            target = target / "index.html" if target.is_dir() else target
            if not target.exists():
                wrong.append(f"{here} links to {link}, which is not there")
            elif name and target in pages and unquote(name) not in pages[target].names:
                wrong.append(f"{here} links to {link}, and nothing on that page has this name")
    return wrong
