"""Training from recorded sequences: one step, the loop around it, and checkpoints to resume from exactly."""

from tracegrad.learner.adapted import merge_adapters
from tracegrad.learner.loop import train
from tracegrad.learner.memory import Memory
from tracegrad.learner.parallel import Placed, Policy, prepare
from tracegrad.learner.ranks import Ranks
from tracegrad.learner.record import TermRecord, Trained
from tracegrad.learner.run import Run
from tracegrad.learner.step import Outcome, measure, optimizer_step
from tracegrad.learner.value import Value, estimate

__all__ = [
    "Memory",
    "Outcome",
    "Placed",
    "Policy",
    "Ranks",
    "Run",
    "TermRecord",
    "Trained",
    "Value",
    "estimate",
    "measure",
    "merge_adapters",
    "optimizer_step",
    "prepare",
    "train",
]
