"""Off-policy correction of recorded terms: the detached half of a loss, evaluated in Rust once per step.

`correct` is all of it; `layout` brings arrays there and back. Called by the learner, or by any
trainer.
"""

from tracegrad.correction.evaluator import AllReduce, Corrected, Totals, correct
from tracegrad.correction.proximal import proximal_alpha

__all__ = ["AllReduce", "Corrected", "Totals", "correct", "proximal_alpha"]
