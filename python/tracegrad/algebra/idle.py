"""Which terms an objective cannot feel: why those without advantage, weight or place behind a gate may still matter.

Reasons in words, derived from the parts of the objective; "" where there is none. No arrays. Read by `Objective.needs`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from tracegrad.algebra.gate import Budget, Gate
from tracegrad.algebra.surrogate import CrossEntropy, Regress

if TYPE_CHECKING:
    from tracegrad.algebra.loss import Objective


def why_zero_advantage(objective: Objective) -> str:
    """Why a trace whose every advantage is 0 matters to the gradient of a step, itself or through other traces.

    Without a reason its surrogate is -0 * something, and nothing counts over more than its own trace but the integer
    totals, which are known without it.
    """
    reasons = [*_beyond_advantage(objective), *_statistics(objective)]
    return reasons[0] if reasons else ""


def why_dropped(objective: Objective) -> str:
    """Why the logprob of a term that a detached gate or a missing logprob dropped matters."""
    reasons = [
        *_of_microbatch(objective),
        *_trained_levels(objective),
        *(
            f"the penalty '{penalty}' runs over dropped terms too"
            for penalty in objective.penalties
            if not penalty.gated
        ),
    ]
    if objective.entropy is not None and not objective.entropy.gated:
        reasons.append("the entropy bonus runs over dropped terms too")
    return reasons[0] if reasons else ""


def why_weightless(objective: Objective) -> str:
    """Why the logprob of a term with weight 0 or advantage 0 matters."""
    reasons = [*_beyond_advantage(objective), *_trained_levels(objective)]
    return reasons[0] if reasons else ""


def _beyond_advantage(objective: Objective) -> Iterator[str]:
    """What gives a term a gradient, or others one through it, whatever its advantage."""
    if isinstance(objective.surrogate, (CrossEntropy, Regress)):
        yield f"the surrogate {objective.surrogate} has a gradient where the advantage is 0"
    for shift in objective.shifts:
        yield f"the shift '{shift}' gives a term an advantage of its own"
    for penalty in objective.penalties:
        yield f"the penalty '{penalty}' has a gradient whatever the advantage"
    if objective.entropy is not None:
        yield "the entropy bonus has a gradient whatever the advantage"
    yield from _of_microbatch(objective)


def _of_microbatch(objective: Objective) -> Iterator[str]:
    for part in objective.per_microbatch:
        yield f"'{part}' is a statistic of all terms of a micro-batch"


def _trained_levels(objective: Objective) -> Iterator[str]:
    """Ratios of the policy being trained that a term shares with others."""
    for ratio, level in objective.ratios():
        if level.over != "token" and not ratio.detached:
            yield f"the ratio {ratio} is taken over the {level.over}, its terms together"


def _statistics(objective: Objective) -> Iterator[str]:
    """What is counted over other traces too, and is not an integer known before."""
    for reduce in objective.reductions:
        if reduce.denominator == "kept":
            yield f"the denominator of '{reduce}' counts the terms that its gates keep"
    for gate in objective.gates:
        if isinstance(gate, Budget):
            yield f"'{gate}' is a budget of the whole step"
        elif isinstance(gate, Gate) and (gate.level.wide or gate.scope == "group"):
            yield f"'{gate}' reaches over a {gate.level.over if gate.level.wide else 'group'}"
    for weight in objective.weights:
        if weight.normalize:
            yield f"the weight '{weight}' is divided by its mean over the step"
        elif weight.level.wide:
            yield f"the weight '{weight}' reaches over a {weight.level.over}"
