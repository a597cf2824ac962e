"""Sequences become optimizer steps: packed rows of at most a token budget, and the per-term arrays of each step.

`packing` makes them (placement and layout are computed in Rust), `step` is what they are, `cost` predicts what they
cost, `ahead` brings them to a device. No model, no ratios: `policy` reads a batch, `correction` a step.
"""

from tracegrad.batch.ahead import prefetch
from tracegrad.batch.cost import ModelShape
from tracegrad.batch.packing import advantages_by_token, pack
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
    "pack",
    "prefetch",
]
