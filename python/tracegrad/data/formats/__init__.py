"""Convert records of other producers to records that the core reads.

The adapters of `registry` are tried in order, and the first that recognizes a record converts it. Other records stay
unchanged. Records that are left out are counted and reported.
"""

from tracegrad.data.formats.generic import is_verdict
from tracegrad.data.formats.openai import Gather, is_chunk
from tracegrad.data.formats.record_fields import is_failed
from tracegrad.data.formats.registry import ANSWERS, Adapted, adapt, needed, only_roots

__all__ = ["ANSWERS", "Adapted", "Gather", "adapt", "is_chunk", "is_failed", "is_verdict", "needed", "only_roots"]
