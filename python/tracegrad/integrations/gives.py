"""What an objective takes of a trainer, what a trainer gives, and the one comparison of the two.

Parts say what they take (`ratios`, `reads`, `reach`, `reduce`), an adapter says what it gives (`Gives`). Nothing here
knows a trainer. Called by every adapter, before it trains.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from tracegrad.algebra import Objective
from tracegrad.errors import ArgumentError

TAKES = {
    "old": "logprobs of the policy before the update",
    "rollout": "recorded logprobs",
    "ref": "a reference policy",
    "proximal": "the proximal policy, which lies between policy versions that are counted",
    "entropy": "the entropy of the next-token distribution",
    "turn": "the turn of each term",
    "group": "the group of each trace",
    "step": "a statistic of the whole optimizer step",
    "kept": "counts of what the gates have left of the step",
    "group_counts": "counts of each group",
    "reductions": "denominators of its own",
    "advantages": "advantages that nothing has divided, as it is not A times something",
}
"""What an objective may take beside logprobs, advantages and a mask, by the word an adapter uses for it."""


@dataclass(frozen=True)
class Gives:
    """What a trainer gives an objective.

    Args:
        things: of `TAKES`.
        why: a sentence that says who gives no more.
        cure: what to take instead.
        cures: the same for one thing.
        detached: False where what is known before the step is corrected elsewhere, so that it is not asked for.

    >>> from tracegrad import presets
    >>> Gives(frozenset({"old", "rollout"}), "x sees no more.", "Take y.").check(presets.DAPO)
    """

    things: frozenset[str]
    why: str
    cure: str
    cures: Mapping[str, str] = field(default_factory=dict)
    detached: bool = True

    def check(self, objective: Objective, also: frozenset[str] = frozenset()) -> None:
        """Refuses an objective that takes more, by the parts that do."""
        taken = [(thing, part) for thing, part in takes(objective, self.detached) if thing not in self.things | also]
        if taken:
            told = dict.fromkeys(f"'{part}' takes {TAKES[thing]}" for thing, part in taken)
            cures = dict.fromkeys(self.cures.get(thing, self.cure) for thing, _ in taken)
            raise ArgumentError(f"{'; '.join(told)}. {self.why} {' '.join(cures)}")


def takes(objective: Objective, detached: bool = True) -> Iterator[tuple[str, str]]:
    """(what, the part that takes it) of `TAKES`, in the order of the parts.

    Args:
        objective: whose parts are asked.
        detached: whether those that are known before the step are, too.

    >>> from tracegrad import presets
    >>> [thing for thing, _ in takes(presets.DAPO)]
    ['old', 'old', 'rollout']
    """
    surrogate, spoken = objective.surrogate, str(objective.surrogate)
    for thing in surrogate.reads:
        yield thing, spoken
    if not surrogate.times_advantage:
        yield "advantages", spoken
    pairs = [] if objective.ratio is None else [(spoken, objective.ratio, objective.level)]
    for part in objective.parts:
        if part.detached and not detached:
            continue
        pairs += [(str(part), *pair) for pair in part.ratios()]
        if part.detached and part.reach:
            yield "step", str(part)
        if part.takes_entropy:
            yield "entropy", str(part)
    for part, ratio, level in pairs:
        for policy in (ratio.num, ratio.den):
            if policy != "theta":
                yield policy, part
        if level.over in ("turn", "group"):
            yield level.over, part
    for part in (*objective.penalties, *objective.shifts):
        yield "advantages", str(part)
    if objective.entropy is not None:
        yield "entropy", str(objective.entropy)
    for reduce in objective.reductions:
        if reduce.per in ("group", "prompt"):
            yield "group_counts", str(reduce)
        if reduce.denominator == "kept":
            yield "kept", str(reduce)
    for reduce in objective.reductions[1:]:
        yield "reductions", str(reduce)


def same_scale(option: str, value: str, modes: Mapping[str, tuple[str, str | None]], objective: Objective) -> None:
    """Refuses a trainer's own denominators where they are not the objective's.

    Args:
        option, value: the trainer's option and what it is set to.
        modes: by value, the objective's `reduce.per` and `reduce.inner`.
        objective: to be trained.
    """
    if modes.get(value) != (objective.reduce.per, objective.reduce.inner):
        raise ArgumentError(
            f"{option} is {value}, the objective's scale {objective.reduce}. One of them would have no effect. Make "
            "them the same."
        )
