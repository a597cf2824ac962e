"""Pack sequences into optimizer steps: rows of at most a token budget, and arrays per trained token for each step.

`pack` returns `Step`s of `Batch`es for `Sequences` and advantages. Rust computes placement and layout.
"""

from tracegrad.packing.batch import Batch, Sharing, SkippedTraces, Step, Totals, TruncationLoss
from tracegrad.packing.cost_model import ModelShape
from tracegrad.packing.device_prefetch import prefetch
from tracegrad.packing.packing import advantages_by_token, measure, nothing_to_train, pack, steps_of
from tracegrad.packing.support import LogitChanges, Support

__all__ = [
    "Batch",
    "LogitChanges",
    "ModelShape",
    "Sharing",
    "SkippedTraces",
    "Step",
    "Support",
    "Totals",
    "TruncationLoss",
    "advantages_by_token",
    "measure",
    "nothing_to_train",
    "pack",
    "prefetch",
    "steps_of",
]
