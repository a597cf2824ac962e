"""Write report.html, one page about a run, and the model card of a checkpoint.

The page is one file that needs no network access. Its only script is the search. Curves are inline SVG, and images are
re-encoded. A content security policy forbids everything else, so a hostile trace cannot run code.
"""

from tracegrad.report.model_card import write_card
from tracegrad.report.page import TermArrays, TraceCounts, add_success, write_report

__all__ = ["TermArrays", "TraceCounts", "add_success", "write_card", "write_report"]
