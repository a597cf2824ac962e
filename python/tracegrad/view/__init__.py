"""Show traces and runs on a local page: a list, search, histograms, and tokens with their training values.

`Session` opens paths, `serve` serves the page, `write` writes one page that works without a server. Nothing is loaded
from or sent to another machine.
"""

from tracegrad.view.export import chosen, write
from tracegrad.view.loaded import Session
from tracegrad.view.serve import serve

__all__ = ["Session", "chosen", "serve", "write"]
