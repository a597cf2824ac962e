"""A local page over traces and runs: list, search, histograms, tokens with what training made of them.

In come paths of trace files, shards and runs; out goes a page. Here are `Session`, which opens paths, `serve`, and
`write`, which makes one page without a server of rows that were `chosen`. Nothing is sent anywhere; the page loads
nothing from elsewhere. Called by `tracegrad view`. Its files, each using those before it alone: `sources`,
`database`, `place` (where an index stands), `features` (what is known of a trace); `search`, `searcher`, `tokens`,
`indexer`, `session` (all that is looked at, without HTTP); `detail`, `runs`, `pieces` (HTML, escaped where it is
made); `page`, `export`, `app`, `serve`.
"""

from tracegrad.view.export import chosen, write
from tracegrad.view.serve import serve
from tracegrad.view.session import Session

__all__ = ["Session", "chosen", "serve", "write"]
