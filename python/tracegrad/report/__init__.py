"""Write report.html, one page about a run, and the model card of a checkpoint.

The page is one file without network access and with no script but its search. Curves are inline SVG, images are drawn
anew, and a content policy forbids the rest, so that a hostile trace stays text.
"""

from tracegrad.report.model_card import write_card
from tracegrad.report.page import Counts, TermArrays, add_success, write_report

__all__ = ["Counts", "TermArrays", "add_success", "write_card", "write_report"]
