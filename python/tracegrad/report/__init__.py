"""report.html: one page that shows a run, and the traces that pulled hardest, token by token.

In come rows of metrics and per-term arrays; out goes report.html. Here are `write_report`, `add_success`, and
`write_card` for the README.md of a checkpoint. The page is one file without network and with no script but its search:
curves are inline SVG, hovering is CSS, pictures are drawn anew and small, and a content policy forbids the rest, so
that a hostile trace stays text. Called after training. Its files, each using those before it alone: `text`,
`curves`, `thumbnails`, `tokens`, `page`; `card`.
"""

from tracegrad.report.card import write_card
from tracegrad.report.page import Counts, TermArrays, add_success, write_report

__all__ = ["Counts", "TermArrays", "add_success", "write_card", "write_report"]
