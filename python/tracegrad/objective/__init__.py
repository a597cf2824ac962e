"""The differentiated half of a loss, in plain torch: what depends on the policy being trained.

Here are `Terms`, the arrays an objective is called with, and the evaluator of `tracegrad.algebra.Objective`. Weights,
gates and denominators that are known before the step arrive as arrays from `correction`. Called by learner and any
trainer.
"""

from tracegrad.algebra import Objective
from tracegrad.objective.evaluate import Loss, PerTerm, Terms, coefficients, evaluate

__all__ = ["Loss", "Objective", "PerTerm", "Terms", "coefficients", "evaluate"]
