"""Off-policy correction of recorded terms: the detached half of a loss, evaluated in Rust once per step.

In come the logprobs of a step's terms (old, rollout, ref), what each term belongs to, and weights, gates and a
reduction of the algebra; out go `weight`, `keep` and `scale` per term [M], with metrics. Called by the learner, or by
any trainer. Its files, each using those before it alone: `layout` (arrays there and back), `proximal`, `evaluator`
(all of it).
"""

from tracegrad.correction.evaluator import AllReduce, Corrected, Totals, correct
from tracegrad.correction.proximal import proximal_alpha

__all__ = ["AllReduce", "Corrected", "Totals", "correct", "proximal_alpha"]
