"""Shared code of the integrations: padded tensors of aligned traces, and checks of objectives."""

import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from tracegrad.alignment.sequences import Sequences
from tracegrad.data.sampling import mismatch, options_on
from tracegrad.errors import ArgumentError
from tracegrad.integrations.metrics import as_trl_loss
from tracegrad.metrics import OffPolicySums, Rows
from tracegrad.metrics.definition import MetricSums
from tracegrad.model import logprobs_from_logits, support_of_tokens
from tracegrad.objective import MissingLogprobs, Objective
from tracegrad.objective.correction import AllReduce, Correction, correct
from tracegrad.objective.torch_loss import PerTerm, Terms
from tracegrad.packing import Support, Totals, advantages_by_token

INPUTS = {
    "old": "logprobs of the policy before the update",
    "rollout": "recorded logprobs",
    "ref": "a reference policy",
    "proximal": "the proximal policy, which lies between policy versions that are counted",
    "entropy": "the entropy of the next-token distribution",
    "turn": "the turn of each trained token",
    "group": "the group of each trace",
    "step": "a statistic of the whole optimizer step",
    "kept": "counts of the tokens of the step that rejections keep",
    "group_counts": "counts of each group",
    "reductions": "denominators of its own",
    "advantages": "advantages that nothing has divided, as it is not A times something",
}
"""Inputs that an objective may need in addition to logprobs, advantages and a mask, with their descriptions."""


@dataclass(frozen=True)
class TrainerInputs:
    """The inputs that a trainer passes to an objective.

    Args:
        names: keys of `INPUTS`.
        why: a sentence that explains why the trainer passes no other inputs.
        fix: the alternative for the user.
        cures: alternatives for single inputs.
        detached: False if components without gradient are evaluated elsewhere, so that their inputs are not checked.

    >>> from tracegrad.objective import presets
    >>> TrainerInputs(frozenset({"old", "rollout"}), "x sees no more.", "Take y.").check(presets.DAPO)
    """

    names: frozenset[str]
    why: str
    fix: str
    cures: Mapping[str, str] = field(default_factory=dict)
    detached: bool = True

    def check(self, objective: Objective, extra: frozenset[str] = frozenset()) -> None:
        """Check that an objective needs only these inputs, and those in `extra`.

        Raises:
            ArgumentError: for other inputs, with the components that need them.
        """
        missing = [
            (thing, part)
            for thing, part in required_inputs(objective, self.detached)
            if thing not in self.names | extra
        ]
        if missing:
            reasons = dict.fromkeys(f"'{part}' needs {INPUTS[thing]}" for thing, part in missing)
            cures = dict.fromkeys(self.cures.get(thing, self.fix) for thing, _ in missing)
            raise ArgumentError(f"TG-INTEG-029: {'; '.join(reasons)}. {self.why} {' '.join(cures)}")


def required_inputs(objective: Objective, detached: bool = True) -> Iterator[tuple[str, str]]:
    """Yield (key of `INPUTS`, component that needs it) for each input of an objective, in the order of the components.

    Args:
        objective: the objective.
        detached: whether to include components without gradient, which are evaluated before the step.

    >>> from tracegrad.objective import presets
    >>> [thing for thing, _ in required_inputs(presets.DAPO)]
    ['old', 'old', 'rollout']
    """
    surrogate, surrogate_text = objective.surrogate, str(objective.surrogate)
    for thing in surrogate.reads:
        yield thing, surrogate_text
    if not surrogate.times_advantage:
        yield "advantages", surrogate_text
    pairs = [] if objective.ratio is None else [(surrogate_text, objective.ratio, objective.level)]
    for part in objective.components:
        if part.detached and not detached:
            continue
        pairs += [(str(part), *pair) for pair in part.ratios()]
        if part.detached and part.cross_trace_reason:
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
    """Check that the denominators of a trainer are those of the objective.

    Args:
        option, value: the trainer's option and its value.
        modes: the corresponding `reduce.per` and `reduce.inner` of an objective, by value.
        objective: to be trained.

    Raises:
        ArgumentError: if they differ.
    """
    if modes.get(value) != (objective.reduce.per, objective.reduce.inner):
        raise ArgumentError(
            f"TG-INTEG-003: {option} is {value}, but the objective's scale is {objective.reduce}. Only one of them has "
            "an effect. Set both to the same scale."
        )


def warn_unused_logprobs() -> None:
    """Print a warning that the objective has no ratio to the recorded logprobs of the traces."""
    warnings.warn(
        "The recorded logprobs are not used: the objective has no ratio to the policy that sampled the tokens. Take "
        "one that has, such as presets.DAPO, or recipes.from_trl(arguments, rollout_logprobs=True).objective.",
        stacklevel=4,
    )


def check_sampling(objective: Objective, prefix: str, options: Mapping[str, Any]) -> None:
    """Check that a trainer, which computes logprobs over the whole vocabulary, also samples from all of it.

    Args:
        objective: to be trained. Without recorded logprobs it is not checked.
        prefix: of the names of the options, with a dot.
        options: the trainer's sampling options by vLLM's names; None is not set.

    Raises:
        ArgumentError: if an option changes the distribution, other than the temperature.
    """
    changed = {name: value for name, value in mismatch(options, "processed").items() if name != "temperature"}
    if changed and objective.requirements.rollout:
        names = ", ".join(f"{prefix}{name}={value!r:.40}" for name, value in changed.items())
        raise ArgumentError(
            f"TG-INTEG-030: {names}: tokens are sampled from another distribution than the trainer computes, so the "
            "ratio to recorded logprobs is wrong at each token even for the same policy. Remove the options, use an "
            "objective on theta/old, or train from records with the kept ids: tracegrad online with "
            "rollout.top_logprobs, or integrations.trl.FromTraces."
        )


Floats = NDArray[np.float32]
_IDS, _LOGPROBS = ("trace", "turn", "group", "advantages"), ("old", "rollout", "ref")


@dataclass(frozen=True)
class PaddedRows:
    """Branches of some traces, one per row, cut after their last trained token. Rows of a trace are adjacent.

    Args:
        ids, attention: [B, S] int64; 0 at padding.
        row, column: [m] int64, the positions of trained tokens.
        inv_temperature: [m] float32, the factor of the logits that predict a trained token.
        origin: [m] int64 numpy, the index of each trained token in the `Sequences`, in order.
        first: the first column with a trained token.
        support: of the m trained tokens; None if all were sampled from the whole vocabulary.
    """

    ids: Tensor
    attention: Tensor
    row: Tensor
    column: Tensor
    inv_temperature: Tensor
    origin: NDArray[np.int64]
    first: int
    support: Support | None = None

    def to(self, device: Any) -> "PaddedRows":
        """Return the same rows on `device`."""
        tensors = [
            tensor.to(device) for tensor in (self.ids, self.attention, self.row, self.column, self.inv_temperature)
        ]
        return PaddedRows(
            *tensors, origin=self.origin, first=self.first, support=self.support and self.support.to(device)
        )

    @property
    def target(self) -> Tensor:
        """[m] int64: the ids of the trained tokens."""
        return self.ids[self.row, self.column]

    def logprobs(
        self, logits: Tensor, *, entropy_over_support: bool = False, over_vocabulary: bool = False
    ) -> tuple[Tensor, Tensor]:
        """Return logprobs and entropies [m] of the trained tokens, over their support.

        Args:
            logits: [B, K, V] of the last K columns, the model's own. K may be S.
            entropy_over_support: as in `logprobs_from_logits`.
            over_vocabulary: return them over the whole vocabulary instead, without penalties of the sampler.
        """
        predicting = self.column - 1 - (self.ids.shape[1] - logits.shape[1])
        return logprobs_from_logits(
            logits[self.row, predicting],
            self.target,
            inv_temperature=self.inv_temperature,
            support=None if over_vocabulary else self.support,
            entropy_over_support=entropy_over_support,
        )


@dataclass(frozen=True)
class RecordedTraces:
    """Aligned traces with their advantages and their objective.

    Args:
        sequences: R traces.
        advantages: [T] float32; only the values of trained tokens are used.
        objective: the objective. `correct` evaluates its components without gradient.
        missing_logprobs: the treatment of trained tokens without a rollout logprob, as in `correct`.
    """

    sequences: Sequences
    advantages: Floats
    objective: Objective
    missing_logprobs: MissingLogprobs

    @classmethod
    def of(
        cls, sequences: Sequences, advantages: ArrayLike, objective: Objective, missing_logprobs: MissingLogprobs
    ) -> "RecordedTraces":
        """Check the traces, and expand advantages [R] of traces or [M] of trained tokens to all tokens.

        Raises:
            ArgumentError: if a trained token is the first token of its branch, an advantage is not finite, the
                objective does not allow `missing_logprobs`, a trace has an image, or a trace was sampled with options
                that its record does not replay (`Sequences.reshaped`) and the objective has a ratio.
        """
        if sequences.images is not None:
            raise ArgumentError(
                f"TG-INTEG-004: the traces contain {len(sequences.images)} images, but padded rows of ids cannot. "
                "Train with tracegrad.train, or drop these traces."
            )
        objective.check_missing(missing_logprobs)
        if objective.requirements.rollout and len(changed := np.flatnonzero(sequences.reshaped)):
            options = ", ".join(options_on(int(np.bitwise_or.reduce(sequences.reshaped[changed]))))
            raise ArgumentError(
                f"TG-INTEG-032: {len(changed)} traces, '{sequences.trace_name(int(changed[0]))}' first, were sampled "
                f"with {options}, and their records do not show from which tokens. The ratio to another distribution "
                "would be wrong. Record the kept tokens (docs/how-to/truncated-sampling.md), use an objective without "
                "a ratio, or accept the ratio with dataclasses.replace(sequences, reshaped=0 * sequences.reshaped)."
            )
        starts = sequences.cu_seqlens[:-1][np.diff(sequences.cu_seqlens) > 0]
        first = starts[sequences.trainable[starts]]
        if len(first):
            raise ArgumentError(
                f"TG-INTEG-005: token {first[0]} is trainable and the first of its branch ({len(first)} such tokens). "
                "It has no previous token that predicts it. Start each branch with a token that is not trained."
            )
        if not objective.requirements.rollout and np.isfinite(sequences.rollout_logprobs[sequences.terms]).any():
            warn_unused_logprobs()
        return cls(sequences, advantages_by_token(sequences, advantages), objective, missing_logprobs)

    @cached_property
    def owner(self) -> NDArray[np.int32]:
        """[T] int32: the trace of each token."""
        return np.repeat(self.sequences.trace, np.diff(self.sequences.cu_seqlens))

    @cached_property
    def traces(self) -> list[int]:
        """The traces that have a trained token."""
        return np.unique(self.owner[self.sequences.trainable]).tolist()

    @property
    def entropy_over_support(self) -> bool:
        """Whether the objective has an entropy bonus over the support of each token."""
        return self.objective.entropy is not None and self.objective.entropy.over == "support"

    def padded(self, traces: Sequence[int], side: Literal["left", "right"]) -> PaddedRows:
        """Return all branches of `traces` that have a trained token, padded on one side."""
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
        return PaddedRows(
            *map(torch.from_numpy, arrays),
            origin=origin,
            first=int(column.min()),
            support=support_of_tokens(s, origin),
        )

    def step(
        self,
        parts: Sequence[PaddedRows],
        old: Sequence[Tensor] | None,
        ref: Sequence[Tensor] | None = None,
        *,
        totals: Totals | None = None,
        all_reduce: AllReduce | None = None,
    ) -> tuple[list[Terms], Mapping[str, float]]:
        """Return the objective's inputs for each micro-batch of one optimizer step, and the metrics.

        All micro-batches are corrected together.

        Args:
            parts: this rank's micro-batches, or some of them if `totals` counts all.
            old: [m] for each micro-batch: logprobs of the policy before the step; None if the objective needs none.
            ref: the same for the reference policy.
            totals, all_reduce: as in `correct`.
        """
        s, inputs = self.sequences, []
        for index, part in enumerate(parts):
            origin, trace = part.origin, self.owner[part.origin]
            arrays: dict[str, Any] = {
                "trace": trace.astype(np.int64),
                "turn": s.turn[origin].astype(np.int64),
                "group": s.group[trace].astype(np.int64),
                "advantages": self.advantages[origin],
                "rollout": s.rollout_logprobs[origin],
            }
            inputs.append(arrays | {"old": old and old[index], "ref": ref and ref[index]})
        return step_terms(
            self.objective,
            inputs,
            parts[0].ids.device,
            missing_logprobs=self.missing_logprobs,
            totals=totals,
            all_reduce=all_reduce,
        )


def step_terms(
    objective: Objective,
    parts: Sequence[Mapping[str, Any]],
    device: Any,
    *,
    missing_logprobs: MissingLogprobs,
    totals: Totals | None = None,
    all_reduce: AllReduce | None = None,
) -> tuple[list[Terms], Mapping[str, float]]:
    """Return the objective's inputs for each micro-batch of one optimizer step, and the metrics.

    All micro-batches are corrected together.

    Args:
        objective: the objective. `correct` evaluates its components without gradient.
        parts: for each micro-batch, [m] arrays or tensors: trace, advantages, and optionally turn, group, old, rollout,
            ref. `old` can be left out if no component without gradient reads it.
        device: of the returned tensors.
        missing_logprobs, totals, all_reduce: as in `correct`.
    """
    names = [*_IDS, *(name for name in _LOGPROBS if getattr(objective.requirements, name))]
    columns = {name: [part[name] for part in parts] for name in names if parts[0].get(name) is not None}
    joined = {name: np.concatenate([*map(_host, arrays)]) for name, arrays in columns.items()}
    old, rollout = joined.pop("old", None), joined.pop("rollout", None)
    if old is None and rollout is None:
        old = np.zeros(len(joined["trace"]), np.float32)
    corrected = correct(
        old,
        rollout,
        **joined,
        **objective.plan,
        missing_logprobs=missing_logprobs,
        totals=totals,
        all_reduce=all_reduce,
    )
    per_term, terms, start = {"weight": corrected.weight, "keep": corrected.keep, "scale": corrected.scale}, [], 0
    for index, part in enumerate(parts):
        rows = slice(start, start + len(part["trace"]))
        arrays = {name: column[index] for name, column in columns.items()} | {
            name: column[rows] for name, column in per_term.items()
        }
        scales = {reduce: _to_tensor(scale[rows], device) for reduce, scale in corrected.scales.items()}
        terms.append(Terms(**{name: _to_tensor(each, device) for name, each in arrays.items()}, scales=scales))
        start = rows.stop
    return terms, {**corrected.metrics, **_off_policy_metrics(old, rollout, joined["trace"], corrected, all_reduce)}


def _off_policy_metrics(
    old: Any, rollout: Any, trace: Any, corrected: Correction, all_reduce: AllReduce | None
) -> Mapping[str, float]:
    """Return the off-policy metrics of a step by name; empty if a policy is missing."""
    if old is None or rollout is None:
        return {}
    metrics = OffPolicySums.of(old, rollout, trace=trace, weight=corrected.weight, keep=corrected.keep)
    return (metrics.all_reduce(all_reduce) if all_reduce else metrics).values()


def as_trl(objective: Objective, per_term: PerTerm, terms: Terms, entropy: Tensor, logprobs: Tensor) -> MetricSums:
    """Return the metrics of a micro-batch as TRL counts them.

    They are `entropy`, `clip_ratio/*` if the surrogate clips, and `kl` if the objective has a k3 penalty to the
    reference. A row is a trace, or a turn if the ratio is aggregated over turns.
    """
    surrogate, names = objective.surrogate, ["trace", "turn"] if objective.level.over == "turn" else ["trace"]
    ids = np.stack([getattr(terms, name).cpu().numpy() for name in names])
    rows = Rows.of(np.unique(ids, axis=1, return_inverse=True)[1].reshape(-1))
    shared: dict[str, Any] = {"entropy": _host(entropy)}
    penalty = next((each for each in objective.penalties if each.ratio.den == "ref" and each.kind == "k3"), None)
    if penalty is not None and terms.ref is not None:
        shared |= {"theta": _host(logprobs), "ref": _host(terms.ref)}
        if penalty.importance is not None and penalty.importance == objective.ratio:
            shared["kl_weight"] = _host(per_term.ratio)
    if surrogate.bounds is not None:
        low, high = surrogate.bounds
        return as_trl_loss(
            rows,
            **shared,
            ratio=_host(per_term.ratio),
            sequence=surrogate.level.over != "token",
            epsilon=1 - low,
            epsilon_high=high - 1,
            delta=getattr(surrogate, "delta", None),
            advantages=_host(terms.advantages),
        )
    if surrogate.clips:
        clipped = per_term.clipped.cpu().numpy()
        return as_trl_loss(rows, **shared, clipped=clipped, advantages=_host(terms.advantages))
    return as_trl_loss(rows, **shared)


def _to_tensor(values: Any, device: Any) -> Tensor:
    return (values if isinstance(values, Tensor) else torch.from_numpy(np.array(values))).to(device)


def _host(values: Any) -> NDArray[Any]:
    """Convert to numpy; half-precision tensors become float32."""
    if not isinstance(values, Tensor):
        return values
    return (values.detach().float() if values.is_floating_point() else values).cpu().numpy()
