"""A local page over traces and runs: list, search, histograms, tokens with what training made of them.

Here are `Session`, which opens paths, `serve`, and `write`, which makes one page without a server of rows that were
`chosen`. Nothing is sent
anywhere; the page loads nothing from elsewhere. Called by `tracegrad view`.
"""

from tracegrad.view.export import chosen, write
from tracegrad.view.serve import serve
from tracegrad.view.session import Session

__all__ = ["Session", "chosen", "serve", "write"]
