"""Fields of an objective by their dotted names, as a command line and a TOML file write them.

No field is listed here: names and types are those of the dataclasses.
"""

from collections.abc import Mapping

from tracegrad import dotted
from tracegrad.algebra.loss import Objective, with_beta, with_entropy, with_kl


def override(objective: Objective, name: str, value: object) -> Objective:
    """The objective with one field changed by its dotted name, as `--objective.surrogate.high 0.28` does.

    >>> from tracegrad.algebra import Clip, Ratio
    >>> override(Objective(Clip(), Ratio("theta", "old")), "surrogate.high", "0.28").surrogate.high
    0.28
    >>> override(Objective(Clip(), Ratio("theta", "old")), "surrogate.hihg", "0.28")  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    ...
    tracegrad.ArgumentError: objective.surrogate.hihg is no option. ... Did you mean objective.surrogate.high?
    """
    return override_all(objective, {name: value})


def override_all(objective: Objective, changes: Mapping[str, object]) -> Objective:
    """The objective with several fields changed at once, checked when all are in place.

    Args:
        changes: dotted names to values; a text is read as its field's type ("none" for None). Entries of a tuple go by
            their index (`weights.0.shape.high`), "none" empties it; `kl` is the coefficient of `with_kl`, `beta`
            that of `with_beta`, `entropy` that of `with_entropy`.

    Raises:
        ArgumentError: for an unknown name, with the nearest valid one; for a value of the wrong type; for a
            combination that the algebra refuses.
    """
    added = {"kl": with_kl, "beta": with_beta, "entropy": with_entropy}
    changed = dotted.changed(
        objective, ((name, value) for name, value in changes.items() if name not in added), at="objective", finite=False
    )
    for name, add in added.items():
        if name in changes:
            changed = add(changed, dotted.changed({name: 0.0}, [(name, changes[name])], at="objective")[name])
    return changed
