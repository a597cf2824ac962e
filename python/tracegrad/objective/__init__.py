"""The differentiated half of a loss, in plain torch: what depends on the policy being trained.

In come logprobs of the policy being trained and `Terms`, the arrays that an objective is called with; out goes a loss
with its gradient. Weights, gates and denominators that are known before the step arrive as arrays from `correction`.
Called by learner and any trainer. Its files, each using those before it alone: `evaluate`, `padded` (from tensors to
a loss in one call).
"""

from tracegrad.algebra import Objective
from tracegrad.objective.evaluate import Loss, PerTerm, Terms, evaluate
from tracegrad.objective.padded import padded_loss, terms_of

__all__ = ["Loss", "Objective", "PerTerm", "Terms", "evaluate", "padded_loss", "terms_of"]
