"""Packed rows (`Batch`) and optimizer steps (`Step`) of one rank, with the arrays of their trained tokens.

Only `Batch.to` and `Step.terms` import torch. A "term" is a trained token.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from tracegrad import _html, _validation
from tracegrad.errors import ArgumentError
from tracegrad.images import RowImages
from tracegrad.packing.device_copy import copy_to_device, to_device
from tracegrad.packing.support import Support

if TYPE_CHECKING:
    from tracegrad.objective import Requirements
    from tracegrad.objective.correction import Correction
    from tracegrad.objective.torch_loss import Terms

Ints = NDArray[np.int32]
Counts = NDArray[np.int64]
Floats = NDArray[np.float32]


@dataclass(frozen=True)
class Totals:
    """Counts of one step over all ranks: trained tokens, and the traces and groups that have one.

    Traces that the argument `count_always` of `pack` selects count without a trained token, and so do their groups.
    """

    terms: int
    traces: int
    groups: int


@dataclass(frozen=True)
class TruncationLoss:
    """Losses of a step to the token budget, over all ranks: names of dropped or cut traces, and lost trained tokens."""

    traces: tuple[str, ...] = ()
    tokens: int = 0


@dataclass(frozen=True)
class SkippedTraces:
    """Traces that count in a step but are not packed, over all ranks.

    They have advantage 0, which cannot affect the loss, or they have no trained token and are in `count_always`.
    """

    traces: int = 0
    tokens: int = 0


@dataclass(frozen=True)
class Sharing:
    """The predicted effect of shared prefixes on one step, over all ranks.

    Args:
        shared: whether the rows of the step share prefixes.
        tokens: tokens of all branches that are laid out.
        tree_tokens: tokens of the rows if prefixes are shared, without padding.
        flop_ratio: predicted FLOP without sharing divided by FLOP with sharing, forward and backward, in linear layers,
            attention and head.
        needed: whether a trace fits into a row only with shared prefixes. They are then shared at any ratio.
    """

    shared: bool
    tokens: int
    tree_tokens: int
    flop_ratio: float
    needed: bool = False

    def __str__(self) -> str:
        gain = f"{self.tree_tokens} of {self.tokens} tokens, predicted FLOP ratio {self.flop_ratio:.2f}"
        if self.needed:
            return f"prefixes shared, as a trace fits a row only so: {gain}"
        return f"prefixes shared: {gain}" if self.shared else f"prefixes not shared, too little to gain: {gain}"


@dataclass(frozen=True, eq=False, repr=False)
class Batch:
    """One packed row. Arrays are numpy from `pack`, and torch tensors after `.to(device)` (indices then int64).

    Args:
        ids: [T] int32; 0 for padding.
        positions: [T] int32, the depth in the tree, which is the position in the branch.
        tree_end: [T] int32: a query q sees a key k iff k <= q < tree_end[k]. If the row shares prefixes, a common
            prefix of branches is stored once; else branches are separate. A padding token sees only itself.
        read: [U] int32: the position whose hidden state predicts the token.
        target: [U] int32: the token.
        inv_temperature: [U] float32: the factor of the logits. If prefixes are shared, no two logit rows have equal
            (read, target, inv_temperature).
        logit_row: [m] int32: the logit row of each trained token. A token that several traces sampled after the same
            ids is one logit row and a trained token of each trace.
        term: [m] int32: the index of each trained token in the step. It stays numpy because it indexes the arrays of
            the step.
        longest: tokens of the longest branch; None if unknown. `to` counts it on the host.
        images: the images of the row; None if there are none. Their positions stay numpy.
        support: the ids from which each logit row's token was drawn; None if all were drawn from the whole vocabulary.
            Two logit rows may then have equal (read, target, inv_temperature) and different support.

    >>> from tracegrad import Sequences, pack
    >>> nan = float("nan")
    >>> sequences = Sequences.from_arrays([5, 6, 7], [0, 3], [nan, -0.5, -0.1], [False, True, True])
    >>> [step] = pack(sequences, advantages=[1.0], tokens_per_row=16)
    >>> [batch] = step.batches
    >>> # Position 0 predicts id 6, and position 1 id 7.
    >>> batch.ids.tolist(), batch.read.tolist(), batch.target.tolist()
    ([5, 6, 7], [0, 1], [6, 7])
    """

    ids: Any
    positions: Any
    tree_end: Any
    read: Any
    target: Any
    inv_temperature: Any
    logit_row: Any
    term: Ints
    longest: int | None = None
    images: RowImages | None = None
    support: Support | None = None

    def __repr__(self) -> str:
        return f"Batch({len(self.ids)} tokens, {len(self.term)} trained tokens)"

    def to(self, device: Any) -> Batch:
        """Return the same batch as torch tensors on `device` (any argument of `torch.Tensor.to`).

        Copies to a CUDA device are asynchronous, from page-locked memory. They are ordered before later work of the
        current stream, and integers are widened on the device. Tensors that are on the device already are not copied.
        """
        longest = self.longest_branch if isinstance(self.positions, np.ndarray) else self.longest
        images = self.images and self.images.to(device)
        support = self.support and self.support.to(device)
        return replace(
            self,
            longest=longest,
            images=images,
            support=support,
            **{n: to_device(getattr(self, n), device) for n in columns_of(self)},
        )

    @property
    def longest_branch(self) -> int:
        """Tokens of the longest branch. If `longest` is None and the batch is on a device, this synchronizes."""
        if self.longest is not None:
            return self.longest
        return int(self.positions.max()) + 1 if len(self.positions) else 0

    @property
    def tokens(self) -> int:
        """Number of tokens without padding. Read it before the batch is moved to a device."""
        is_leaf = np.asarray(self.tree_end) == np.arange(1, len(self.ids) + 1)  # tokens without descendants
        return len(self.ids) - int(np.count_nonzero(is_leaf & (np.asarray(self.positions) == 0)))

    def drop_tokens(self, dropped: ArrayLike) -> Batch:
        """Return the row without the dropped trained tokens, and without logit rows that no trained token needs.

        All tokens stay in the row, so hidden states do not change. Loss and gradient do not change either if the
        dropped trained tokens do not contribute to them: see `Step.tokens_without_gradient`.

        Args:
            dropped: [m] bool, in the order of `term`.

        Raises:
            ArgumentError: if the dtype or shape is different, or the batch was moved to a device.
        """
        if not isinstance(self.logit_row, np.ndarray):
            raise ArgumentError(
                "TG-PACK-001: the batch was moved to a device already. Call drop_tokens() before to(), on the host."
            )
        mask = np.asarray(dropped)
        if mask.dtype != np.bool_ or mask.shape != self.term.shape:
            raise ArgumentError(
                f"TG-PACK-002: dropped is {mask.dtype} of shape {mask.shape}, but the batch has {len(self.term)} "
                "trained tokens. Pass one bool for each: dropped[batch.term] of an array in the step's order."
            )
        rows, row = np.unique(self.logit_row[~mask], return_inverse=True)
        logit_rows = {name: getattr(self, name)[rows] for name in ("read", "target", "inv_temperature")}
        logit_rows["support"] = self.support and self.support.take(rows)
        return replace(self, **logit_rows, logit_row=row.astype(np.int32), term=self.term[~mask])


@dataclass(frozen=True, eq=False, repr=False)
class Step:
    """One optimizer step of one rank. Arrays [M] have one entry per trained token, by trace, branch, position.

    Args:
        batches: the rows. All ranks have the same number; the last ones may be empty.
        origin: [M] int64, the index of the token in the `Sequences` that `pack` got.
        trace, branch: [M] int32, trace and branch index in the `Sequences`.
        group: [M] int32, as in the `Sequences`.
        turn, version: [M] int32, as in the `Sequences`.
        rollout_logprobs: [M] float32, nats, NaN if unknown.
        advantages: [M] float32.
        trace_terms: [M] int64, trained tokens of the token's trace.
        group_terms: [M] int64, trained tokens of its group.
        group_traces: [M] int64, traces of its group that count, as in `totals`.
        totals: trained tokens, traces and groups of the step. These and the three counts are over all ranks, after
            `too_long` and before any rejection.
        sharing: the predicted effect of shared prefixes; None if `share_prefixes` is off.
        load: [ranks] float64, the predicted FLOP of each rank.
        skipped: traces that count in totals and counts but are in no batch: their advantage is 0, or they have no
            trained token.
        too_long: the traces that were dropped or cut. A trace whose group was dropped completely is counted in the
            first step.
        old_logprobs, ref_logprobs: [M], nats, or None until `with_logprobs`.
        alpha: [M] in [0, 1], the proximal policy between rollout (0) and theta (1); None if it is not used.
        alignment_level: [M] uint8, as in the `Sequences`; None if unknown.

    >>> from tracegrad import Sequences, pack
    >>> nan = float("nan")
    >>> ids, trainable = [5, 6, 7, 5, 8], [False, True, True, False, True]
    >>> sequences = Sequences.from_arrays(ids, [0, 3, 5], [nan, -0.5, -0.1, nan, -1.0], trainable, group=[0, 0])
    >>> [step] = pack(sequences, advantages=[1.0, -1.0], tokens_per_row=16)
    >>> # One entry for each of three trained tokens.
    >>> step.trace.tolist(), step.advantages.tolist(), step.trace_terms.tolist()
    ([0, 0, 1], [1.0, 1.0, -1.0], [2, 2, 1])
    """

    batches: tuple[Batch, ...]
    origin: NDArray[np.int64]
    trace: Ints
    branch: Ints
    turn: Ints
    group: Ints
    version: Ints
    rollout_logprobs: Floats
    advantages: Floats
    trace_terms: Counts
    group_terms: Counts
    group_traces: Counts
    totals: Totals
    too_long: TruncationLoss = TruncationLoss()
    skipped: SkippedTraces = SkippedTraces()
    sharing: Sharing | None = None
    load: NDArray[np.float64] = field(default_factory=lambda: np.ones(1))
    old_logprobs: NDArray[np.floating] | None = None
    ref_logprobs: NDArray[np.floating] | None = None
    alpha: NDArray[np.floating] | None = None
    alignment_level: NDArray[np.uint8] | None = None

    def __len__(self) -> int:
        """Return the number M of trained tokens on this rank."""
        return len(self.origin)

    def __repr__(self) -> str:
        totals = f"{self.totals.terms} trained tokens, {self.totals.traces} traces, {self.totals.groups} groups"
        return f"Step({totals}; here {len(self.batches)} rows of {sum(len(row.ids) for row in self.batches)} tokens)"

    def _repr_html_(self) -> str:
        rows = [(number, len(batch.ids), len(batch.term)) for number, batch in enumerate(self.batches[:10])]
        return _html.table(repr(self), ("row", "tokens", "trained tokens"), rows)

    @property
    def has_trained_tokens(self) -> bool:
        """Whether any rank has a trained token: False if `skip_zero_advantage` has skipped all of them.

        In such a step, the optimizer moves parameters only by its state, such as momentum.
        """
        return self.totals.terms > self.skipped.tokens

    def staleness(self, version: int | None) -> Counts:
        """Return the staleness [M] of each trained token, in policy versions; -1 if a version is unknown.

        Args:
            version: of the policy that is trained; None if unknown.

        Raises:
            ArgumentError: if a token was sampled by a later version.
        """
        if version is None:
            return np.full(len(self), -1, np.int64)
        newest = int(np.max(self.version, initial=-1))
        if newest > version:
            raise ArgumentError(
                f"TG-PACK-003: version is {version}, and a token was sampled by version {newest}. A policy samples "
                "after it was trained, so one of the two counts otherwise. Pass the version that the servers were "
                "given last."
            )
        return np.where(self.version < 0, -1, version - self.version.astype(np.int64))

    @property
    def imbalance(self) -> float:
        """The largest load of a rank divided by the mean load; 1 is balanced."""
        mean = float(np.mean(self.load))
        return float(np.max(self.load)) / mean if mean > 0 else 1.0

    @property
    def branch_tokens(self) -> int:
        """Tokens of this rank's branches up to their last trained token. A shared prefix counts in each branch.

        Unlike the number of tokens in the batches, it does not depend on packing or on shared prefixes.
        """
        branches, branch_index = np.unique(self.branch, return_inverse=True)
        length = np.zeros(len(branches), np.int64)
        for batch in self.batches:
            depth = to_numpy(batch.positions)[to_numpy(batch.read)][
                to_numpy(batch.logit_row)
            ]  # of the token before the trained token
            np.maximum.at(length, branch_index[batch.term], depth + 2)
        return int(length.sum())

    def tokens_without_gradient(self, needs: Requirements, corrected: Correction) -> NDArray[np.bool_]:
        """Return [M] bool: the trained tokens whose logprob cannot change loss or gradient, for any current policy.

        These are the tokens that `corrected` dropped and those with weight or advantage 0, unless `needs` says that
        the objective reads them for another purpose. Their logit rows can be skipped:
        `batch.without(idle[batch.term])`. Metrics then have no logprob and entropy of these tokens.

        Args:
            needs: `objective.requirements`.
            corrected: of the whole step: weight and keep [M].
        """
        idle = np.zeros(len(self), bool)
        if not needs.dropped_reason:
            idle |= ~np.asarray(corrected.keep, bool)
        if not needs.zero_weight_reason:
            idle |= np.asarray(corrected.weight) == 0
            idle |= self.advantages == 0
        return idle

    def with_logprobs(self, *, old: Any = None, ref: Any = None) -> Step:
        """Return the step with the logprobs of the proximal policy, of the reference policy, or of both.

        Args:
            old: one array [m] per batch, as `model.logprobs` returns them, or one array [M] in the step's order; numpy
                or torch; None keeps the current value.
            ref: as `old`.

        Raises:
            ArgumentError: if the lengths do not match the step or its batches.
        """
        new = {"old_logprobs": old, "ref_logprobs": ref}
        return replace(
            self, **{name: self._in_step_order(name, values) for name, values in new.items() if values is not None}
        )

    def terms(self, batch: Batch, corrected: Correction) -> Terms:
        """Return the inputs of the objective for the trained tokens of `batch`, on the device of `batch`.

        Args:
            batch: a batch of this step, on any device.
            corrected: of the whole step: weight, keep and scales [M].
        """
        import torch

        from tracegrad.objective.torch_loss import Terms

        device = batch.ids.device if isinstance(batch.ids, torch.Tensor) else "cpu"

        def gather(values: Any) -> Any:
            return None if values is None else copy_to_device(torch.from_numpy(to_numpy(values)[batch.term]), device)

        return Terms(
            old=gather(self.old_logprobs),
            rollout=gather(self.rollout_logprobs),
            ref=gather(self.ref_logprobs),
            advantages=gather(self.advantages),
            weight=gather(corrected.weight),
            keep=gather(corrected.keep),
            scale=gather(corrected.scale),
            trace=gather(self.trace.astype(np.int64)),
            turn=gather(self.turn.astype(np.int64)),
            group=gather(self.group.astype(np.int64)),
            alpha=gather(self.alpha),
            scales={reduce: gather(scale) for reduce, scale in corrected.scales.items()},
        )

    def _in_step_order(self, name: str, values: Any) -> NDArray[np.floating]:
        if not isinstance(values, (list, tuple)) or (values and np.ndim(values[0]) == 0):
            values = _floats(values, name)
            self._check(name, [len(values)], [len(self)])
            return values
        parts = [_floats(part, f"{name}[{index}]") for index, part in enumerate(values)]
        self._check(name, [len(part) for part in parts], [len(batch.term) for batch in self.batches])
        out = np.full(len(self), np.nan, np.result_type(np.float32, *parts))  # NaN: trained tokens in no batch
        for batch, part in zip(self.batches, parts, strict=True):
            out[batch.term] = part
        return out

    def _check(self, name: str, lengths: list[int], expected: list[int]) -> None:
        if lengths != expected:
            raise ArgumentError(
                f"TG-PACK-004: {name} has {lengths} entries but the step has {expected}. Each trained token "
                "needs a logprob. Pass one array per batch, of the batch's trained tokens, or one array in the step's "
                "order."
            )


def to_numpy(values: Any) -> Any:
    """Convert a numpy array, a sequence or a torch tensor to a numpy array, without importing torch."""
    if hasattr(values, "detach"):
        values = values.detach().cpu().numpy()
    return np.asarray(values)


def _floats(values: Any, name: str) -> NDArray[np.floating]:
    array = _validation.check_flat(_validation.numbers(values, name), name)
    return _validation.as_floats(array, np.float64 if array.dtype == np.float64 else np.float32, name)


def columns_of(batch: Batch) -> list[str]:
    """Return the names of the arrays that `Batch.to` moves."""
    return [column.name for column in fields(batch) if column.name not in ("term", "longest", "images", "support")]
