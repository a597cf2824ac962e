"""Why terms with zero advantage, zero weight or a closed gate may still change the gradient.

Each function gives one reason in words, derived from the parts of the objective, or "": then such terms may be left out
of the forward pass. No arrays. Read by `Objective.needs`.
"""

from collections.abc import Iterator
from itertools import chain

from tracegrad.algebra.whole import Whole


def why_zero_advantage(objective: Whole) -> str:
    """Why a trace whose advantages are all 0 may change the gradient of a step, by its own terms or those of others.

    Without a reason its surrogate is 0 times something, and other traces depend on it by integer totals alone, which
    are known without its forward pass.
    """
    return next(chain(_beyond_advantage(objective), _statistics(objective)), "")


def why_dropped(objective: Whole) -> str:
    """Why the logprob of a dropped term (closed detached gate, missing logprob) may change the gradient."""
    kl = (f"the penalty '{penalty}'" for penalty in objective.penalties if not penalty.gated)
    bonus = ("the entropy bonus" for part in [objective.entropy] if part is not None and not part.gated)
    over = (f"{part} runs over dropped terms too" for part in chain(kl, bonus))
    return next(chain(_of_microbatch(objective), _trained_levels(objective), over), "")


def why_weightless(objective: Whole) -> str:
    """Why the logprob of a term with weight 0 or advantage 0 may change the gradient."""
    return next(chain(_beyond_advantage(objective), _trained_levels(objective)), "")


def _beyond_advantage(objective: Whole) -> Iterator[str]:
    """Parts through which a term with advantage 0 has a gradient, or changes that of others."""
    if not objective.surrogate.times_advantage:
        yield f"the surrogate {objective.surrogate} has a gradient where the advantage is 0"
    for shift in objective.shifts:
        yield f"the shift '{shift}' gives a term an advantage of its own"
    for penalty in objective.penalties:
        yield f"the penalty '{penalty}' has a gradient whatever the advantage"
    if objective.entropy is not None:
        yield "the entropy bonus has a gradient whatever the advantage"
    yield from _of_microbatch(objective)


def _of_microbatch(objective: Whole) -> Iterator[str]:
    for part in objective.per_microbatch:
        yield f"'{part}' is a statistic of all terms of a micro-batch"


def _trained_levels(objective: Whole) -> Iterator[str]:
    """Ratios of the policy being trained that are aggregated over several terms."""
    if objective.surrogate.locality != "term":
        yield f"the surrogate {objective.surrogate} looks at a {objective.surrogate.locality}, its terms together"
    for ratio, level in objective.ratios():
        if level.over != "token" and not ratio.detached:
            yield f"the ratio {ratio} is taken over the {level.over}, its terms together"


def _statistics(objective: Whole) -> Iterator[str]:
    """Statistics over several traces that are not integers known before the step."""
    for reduce in objective.reductions:
        if reduce.denominator == "kept":
            yield f"the denominator of '{reduce}' counts the terms that its gates keep"
    yield from (part.reach for part in (*objective.gates, *objective.weights) if part.reach)
