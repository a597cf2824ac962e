"""Convert records of other producers to records that the core reads.

The adapters of `registry` are tried in order, and the first that recognizes a record converts it. Other records stay
unchanged. Records that are left out are counted and reported.
"""

from tracegrad.data.formats.generic import is_reward_row
from tracegrad.data.formats.openai import ChunkJoiner, is_chunk
from tracegrad.data.formats.record_fields import is_failed
from tracegrad.data.formats.registry import ANSWERS, RecordConverter, adapt, core_reads, needs_adapter, only_roots
from tracegrad.data.formats.span_containers import is_spans

__all__ = [
    "ANSWERS",
    "ChunkJoiner",
    "RecordConverter",
    "adapt",
    "core_reads",
    "is_chunk",
    "is_failed",
    "is_reward_row",
    "is_spans",
    "needs_adapter",
    "only_roots",
]
