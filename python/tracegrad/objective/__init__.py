"""The differentiated half of a loss, in plain torch: what depends on the policy being trained.

Here are `Terms`, the arrays an objective is called with, the evaluator of `tracegrad.algebra.Objective`, and
`padded_loss`, from tensors to a loss in one call. Weights, gates and denominators that are known before the step arrive
as arrays from `correction`. Called by learner and any trainer.
"""

from tracegrad.algebra import Objective
from tracegrad.objective.evaluate import Loss, PerTerm, Terms, evaluate
from tracegrad.objective.padded import padded_loss, terms_of

__all__ = ["Loss", "Objective", "PerTerm", "Terms", "evaluate", "padded_loss", "terms_of"]
