"""Sequences become optimizer steps: packed rows of at most a token budget, and the per-term arrays of each step.

In come `Sequences` and advantages; out go `Step`s of `Batch`es. Placement and layout are computed in Rust. No model,
no ratios: `policy` reads a batch, `correction` a step. Its files, each using those before it alone: `cost` (what a
pass costs), `step` (what steps and batches are), `grouping` (which trace is of which step), `layout` (rows), `packing`
(makes them), `ahead` (brings them to a device).
"""

from tracegrad.batch.ahead import prefetch
from tracegrad.batch.cost import ModelShape
from tracegrad.batch.grouping import nothing_to_train, steps_of
from tracegrad.batch.packing import advantages_by_token, measure, pack
from tracegrad.batch.step import Batch, Sharing, Skipped, Step, TooLong, Totals

__all__ = [
    "Batch",
    "ModelShape",
    "Sharing",
    "Skipped",
    "Step",
    "TooLong",
    "Totals",
    "advantages_by_token",
    "measure",
    "nothing_to_train",
    "pack",
    "prefetch",
    "steps_of",
]
