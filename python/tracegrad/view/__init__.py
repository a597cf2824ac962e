"""Show traces and runs on a local page: a list, search, histograms, and tokens with their training values.

`Viewer` opens paths, `serve` serves the page, `export_page` writes one page that works without a server. Nothing is
loaded from or sent to another machine.
"""

from tracegrad.view.export import export_page, select_rows
from tracegrad.view.loaded import Viewer
from tracegrad.view.serve import serve

__all__ = ["Viewer", "export_page", "select_rows", "serve"]
