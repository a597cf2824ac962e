"""Share what integrations need: padded tensors of aligned traces, and which objectives a trainer supports."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from tracegrad.alignment.sequences import Sequences
from tracegrad.errors import ArgumentError
from tracegrad.integrations.metrics import as_trl_loss
from tracegrad.metrics import OffPolicy, Rows
from tracegrad.metrics.definition import Measured
from tracegrad.objective import Missing, Objective
from tracegrad.objective.correction import AllReduce, Corrected, correct
from tracegrad.objective.torch_loss import PerTerm, Terms
from tracegrad.packing import Totals, advantages_by_token

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

    >>> from tracegrad.objective import presets
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

    >>> from tracegrad.objective import presets
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


Floats = NDArray[np.float32]
_IDS, _LOGPROBS = ("trace", "turn", "group", "advantages"), ("old", "rollout", "ref")


@dataclass(frozen=True)
class Padded:
    """Branches of some traces, a row each, cut after their last term. Rows of a trace stand together.

    Args:
        ids, attention: [B, S] int64; 0 at padding.
        row, column: [m] int64, where the terms are.
        inv_temperature: [m] float32, what the logits that predict a term are multiplied by.
        origin: [m] int64 numpy, the terms' tokens in the `Sequences`, in order.
        first: the first column that holds a term.
    """

    ids: Tensor
    attention: Tensor
    row: Tensor
    column: Tensor
    inv_temperature: Tensor
    origin: NDArray[np.int64]
    first: int

    def to(self, device: Any) -> "Padded":
        """The same on `device`."""
        moved = [each.to(device) for each in (self.ids, self.attention, self.row, self.column, self.inv_temperature)]
        return Padded(*moved, origin=self.origin, first=self.first)

    @property
    def target(self) -> Tensor:
        """[m] int64: the terms' ids."""
        return self.ids[self.row, self.column]


@dataclass(frozen=True)
class Recorded:
    """Aligned traces, what each of their terms is worth, and the objective they are trained with.

    Args:
        sequences: R traces.
        advantages: [T] float32, read at terms.
        objective: whose detached half `correct` evaluates.
        missing: the policy for terms without a rollout logprob, as in `correct`.
    """

    sequences: Sequences
    advantages: Floats
    objective: Objective
    missing: Missing

    @classmethod
    def of(cls, sequences: Sequences, advantages: ArrayLike, objective: Objective, missing: Missing) -> "Recorded":
        """Checks and spreads the advantages, [R] by trace or [M] by term.

        Raises:
            ArgumentError: if a term is the first token of its branch, an advantage is not finite, the objective
                refuses `missing`, or a trace holds a picture.
        """
        if sequences.images is not None:
            raise ArgumentError(
                f"the traces hold {len(sequences.images)} pictures, and padded rows of ids carry none. The model would "
                "not see what the policy saw. Train with tracegrad.train, or leave these traces out."
            )
        objective.check_missing(missing)
        starts = sequences.cu_seqlens[:-1][np.diff(sequences.cu_seqlens) > 0]
        first = starts[sequences.trainable[starts]]
        if len(first):
            raise ArgumentError(
                f"token {first[0]} is trainable and the first of its branch, and {len(first)} are. No token before it "
                "predicts it. Begin each branch with a token that is not trained."
            )
        return cls(sequences, advantages_by_token(sequences, advantages), objective, missing)

    @cached_property
    def owner(self) -> NDArray[np.int32]:
        """[T] the trace of each token."""
        return np.repeat(self.sequences.trace, np.diff(self.sequences.cu_seqlens))

    @cached_property
    def traces(self) -> list[int]:
        """The traces that have a term."""
        return np.unique(self.owner[self.sequences.trainable]).tolist()

    def padded(self, traces: Sequence[int], side: Literal["left", "right"]) -> Padded:
        """All branches of `traces` that have a term, padded on one side."""
        s, rows = self.sequences, []
        for trace in traces:
            first, last = np.searchsorted(s.trace, [trace, trace + 1])
            for branch in range(first, last):
                start, end = s.cu_seqlens[branch : branch + 2]
                terms = np.flatnonzero(s.trainable[start:end])
                if len(terms):
                    rows.append((start, terms))
        width = max(terms[-1] + 1 for _, terms in rows)
        ids, attention = np.zeros((2, len(rows), width), np.int64)
        columns = []
        for row, (start, terms) in enumerate(rows):
            length = terms[-1] + 1
            offset = width - length if side == "left" else 0
            ids[row, offset : offset + length] = s.ids[start : start + length]
            attention[row, offset : offset + length] = 1
            columns.append(offset + terms)
        origin = np.concatenate([start + terms for start, terms in rows])
        row = np.repeat(np.arange(len(rows)), [len(terms) for _, terms in rows])
        column = np.concatenate(columns)
        arrays = (ids, attention, row, column, s.inv_temperature[origin])
        return Padded(*map(torch.from_numpy, arrays), origin=origin, first=int(column.min()))

    def step(
        self,
        parts: Sequence[Padded],
        old: Sequence[Tensor] | None,
        ref: Sequence[Tensor] | None = None,
        *,
        totals: Totals | None = None,
        all_reduce: AllReduce | None = None,
    ) -> tuple[list[Terms], Mapping[str, float]]:
        """What the objective takes of the micro-batches of one optimizer step, corrected together, and the metrics.

        Args:
            parts: this rank's micro-batches; a part of them where `totals` counts all.
            old: [m] by micro-batch: logprobs of the policy before the step; None where the objective takes none.
            ref: likewise of the reference policy.
            totals, all_reduce: as in `correct`.
        """
        s, given = self.sequences, []
        for place, part in enumerate(parts):
            origin, trace = part.origin, self.owner[part.origin]
            arrays: dict[str, Any] = {
                "trace": trace.astype(np.int64),
                "turn": s.turn[origin].astype(np.int64),
                "group": s.group[trace].astype(np.int64),
                "advantages": self.advantages[origin],
                "rollout": s.rollout_logprobs[origin],
            }
            given.append(arrays | {"old": old and old[place], "ref": ref and ref[place]})
        how = {"missing": self.missing, "totals": totals, "all_reduce": all_reduce}
        return step_terms(self.objective, given, parts[0].ids.device, **how)


def step_terms(
    objective: Objective,
    parts: Sequence[Mapping[str, Any]],
    device: Any,
    *,
    missing: Missing,
    totals: Totals | None = None,
    all_reduce: AllReduce | None = None,
) -> tuple[list[Terms], Mapping[str, float]]:
    """What an objective takes of the micro-batches of one optimizer step, corrected together, and the metrics.

    Args:
        objective: whose detached half `correct` evaluates.
        parts: by micro-batch [m] arrays or tensors: trace, advantages, and turn, group, old, rollout, ref where there
            are any. `old` may stay out where nothing that is known before the step reads it.
        device: where the terms go.
        missing, totals, all_reduce: as in `correct`.
    """
    names = [*_IDS, *(name for name in _LOGPROBS if getattr(objective.needs, name))]
    given = {name: [part[name] for part in parts] for name in names if parts[0].get(name) is not None}
    whole = {name: np.concatenate([*map(_host, each)]) for name, each in given.items()}
    old, rollout = whole.pop("old", None), whole.pop("rollout", None)
    if old is None and rollout is None:
        old = np.zeros(len(whole["trace"]), np.float32)
    found = correct(old, rollout, **whole, **objective.plan, missing=missing, totals=totals, all_reduce=all_reduce)
    half, terms, start = {"weight": found.weight, "keep": found.keep, "scale": found.scale}, [], 0
    for place, part in enumerate(parts):
        here = slice(start, start + len(part["trace"]))
        arrays = {name: each[place] for name, each in given.items()} | {name: each[here] for name, each in half.items()}
        scales = {reduce: _moved(scale[here], device) for reduce, scale in found.scales.items()}
        terms.append(Terms(**{name: _moved(each, device) for name, each in arrays.items()}, scales=scales))
        start = here.stop
    return terms, {**found.metrics, **_of_ratios(old, rollout, whole["trace"], found, all_reduce)}


def _of_ratios(
    old: Any, rollout: Any, trace: Any, found: Corrected, all_reduce: AllReduce | None
) -> Mapping[str, float]:
    """How far the two policies of a step are apart, where both are there; the names of docs/metrics.md."""
    if old is None or rollout is None:
        return {}
    apart = OffPolicy.of(old, rollout, trace=trace, weight=found.weight, keep=found.keep)
    return (apart.all_reduce(all_reduce) if all_reduce else apart).named()


def as_trl(objective: Objective, per_term: PerTerm, terms: Terms, entropy: Tensor) -> Measured:
    """`entropy` of a micro-batch, and `clip_ratio/*` where the surrogate has a clip, as TRL counts them.

    A row is a trace, or a turn where the ratio is the turn's.
    """
    clip, names = objective.surrogate, ["trace", "turn"] if objective.level.over == "turn" else ["trace"]
    ids = np.stack([getattr(terms, name).cpu().numpy() for name in names])
    rows = Rows.of(np.unique(ids, axis=1, return_inverse=True)[1].reshape(-1))
    told: dict[str, Any] = {"entropy": _host(entropy)}
    if clip.bounds is not None:
        told |= {"ratio": _host(per_term.ratio), "sequence": clip.level.over != "token"}
        low, high = clip.bounds
        told |= {"epsilon": 1 - low, "epsilon_high": high - 1, "delta": getattr(clip, "delta", None)}
    elif clip.clips:
        told["clipped"] = per_term.clipped.cpu().numpy()
    if "ratio" in told or "clipped" in told:
        told["advantages"] = _host(terms.advantages)
    return as_trl_loss(rows, **told)


def _moved(values: Any, device: Any) -> Tensor:
    return (values if isinstance(values, Tensor) else torch.from_numpy(np.array(values))).to(device)


def _host(values: Any) -> NDArray[Any]:
    """As numpy; logprobs of half precision in single."""
    if not isinstance(values, Tensor):
        return values
    return (values.detach().float() if values.is_floating_point() else values).cpu().numpy()
