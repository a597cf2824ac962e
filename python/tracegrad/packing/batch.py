"""One optimizer step as one rank holds it: packed rows, and the arrays of their terms.

Here are `Batch` and `Step`, values that `packing` makes. torch is imported by `.to` and `.terms` alone. No placement,
no model: `model` reads a batch, `objective.correction` a step.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from tracegrad import _html, _validation
from tracegrad.errors import ArgumentError
from tracegrad.images import RowImages

if TYPE_CHECKING:
    from tracegrad.objective import Needs
    from tracegrad.objective.correction import Corrected
    from tracegrad.objective.torch_loss import Terms

Ints = NDArray[np.int32]
Counts = NDArray[np.int64]
Floats = NDArray[np.float32]


@dataclass(frozen=True)
class Totals:
    """Of one step over all ranks: its terms, the traces and the groups with one, and what `pack` was told to count."""

    terms: int
    traces: int
    groups: int


@dataclass(frozen=True)
class TooLong:
    """What a step lost to the token budget, over all ranks: traces dropped or cut, by name, and their lost terms."""

    traces: tuple[str, ...] = ()
    terms: int = 0


@dataclass(frozen=True)
class Skipped:
    """Traces counted in a step and not packed, over all ranks: their advantage is 0 and cannot matter, or `counted`."""

    traces: int = 0
    terms: int = 0


@dataclass(frozen=True)
class Sharing:
    """What sharing prefixes does to one step, over all ranks, as it was predicted before any forward pass.

    Args:
        shared: whether its rows share prefixes.
        tokens: of all branches that are laid out.
        tree_tokens: of its rows if prefixes are shared, without padding.
        flop_ratio: predicted FLOP forward and backward without over with sharing: linear layers, attention and head.
        needed: a trace fits a row only so, whatever the ratio.
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
    """One packed row. numpy as `pack` makes it, torch tensors after `.to(device)` (indices then int64).

    Args:
        ids: [T] int32; 0 where the row is padded.
        positions: [T] int32, depth in the tree, which is the position in the branch.
        tree_end: [T] int32: a query q sees a key k iff k <= q < tree_end[k]. Branches that begin alike hold their
            prefix once if the row shares prefixes; else each stands alone. A padding token sees only itself.
        read: [U] int32: the position whose hidden state predicts the token.
        target: [U] int32: the token.
        inv_temperature: [U] float32: what the logits are multiplied by. No two head rows have equal (read, target,
            inv_temperature) where prefixes are shared.
        row: [m] int32: the head row of each term. A token that several traces sampled after the same ids is one head
            row and a term of each of them.
        term: [m] int32: its place in the step. Stays numpy, as it indexes the arrays of the step.
        longest: tokens of the longest branch; counted on the host by `to`, where it is not known.
        images: its pictures; None where it has none. Their places stay numpy.
    """

    ids: Any
    positions: Any
    tree_end: Any
    read: Any
    target: Any
    inv_temperature: Any
    row: Any
    term: Ints
    longest: int | None = None
    images: RowImages | None = None

    def __repr__(self) -> str:
        return f"Batch({len(self.ids)} tokens, {len(self.term)} terms)"

    def to(self, device: Any) -> Batch:
        """The same batch as torch tensors on `device` (anything `torch.Tensor.to` takes).

        To a CUDA device arrays go from page-locked memory without a wait: the copy is ordered before what the current
        stream does next, and integers are widened there. A batch that is on the device already is returned as it is.
        """
        longest = self.reach if isinstance(self.positions, np.ndarray) else self.longest
        images = self.images and self.images.to(device)
        return replace(
            self, longest=longest, images=images, **{n: moved(getattr(self, n), device) for n in columns_of(self)}
        )

    @property
    def reach(self) -> int:
        """Tokens of the longest branch; a batch on a device that does not know it waits for its positions."""
        if self.longest is not None:
            return self.longest
        return int(self.positions.max()) + 1 if len(self.positions) else 0

    @property
    def tokens(self) -> int:
        """How many of the row's tokens are no padding; read from a batch that was not moved."""
        alone = np.asarray(self.tree_end) == np.arange(1, len(self.ids) + 1)  # a root that nothing follows
        return len(self.ids) - int(np.count_nonzero(alone & (np.asarray(self.positions) == 0)))

    def without(self, dropped: ArrayLike) -> Batch:
        """The same row with fewer terms, and without the head rows that no term is left of.

        The tokens stay, so every hidden state is what it was. Loss and gradient stay too where the dropped terms have
        none: `Step.idle` says which these are.

        Args:
            dropped: [m] bool, in the order of `term`.

        Raises:
            ArgumentError: for another shape, or a batch that was moved already.
        """
        if not isinstance(self.row, np.ndarray):
            raise ArgumentError("the batch was moved to a device already. Call without() before to(), on the host.")
        gone = np.asarray(dropped)
        if gone.dtype != np.bool_ or gone.shape != self.term.shape:
            raise ArgumentError(
                f"dropped is {gone.dtype} of shape {gone.shape}, but the batch has {len(self.term)} terms. "
                "Pass one bool per term: dropped[batch.term] of an array in the step's order."
            )
        used, row = np.unique(self.row[~gone], return_inverse=True)
        heads = {name: getattr(self, name)[used] for name in ("read", "target", "inv_temperature")}
        return replace(self, **heads, row=row.astype(np.int32), term=self.term[~gone])


@dataclass(frozen=True, eq=False, repr=False)
class Step:
    """One optimizer step as one rank holds it. Per-term arrays are ordered by trace, branch, position.

    Args:
        batches: the rows; every rank has equally many, the last ones possibly empty.
        origin: [M] int64, the token of the `Sequences` given to `pack`.
        trace, branch, group: [M] int32, rows of the `Sequences`.
        turn, version: [M] int32, as in the `Sequences`.
        rollout_logprobs: [M] float32, nats, NaN where not known.
        advantages: [M] float32.
        trace_terms: [M] int64, terms of the term's trace.
        group_terms: [M] int64, terms of its group.
        group_traces: [M] int64, traces of its group that count, as in `totals`.
        totals: terms, traces and groups of the step. These and the three counts are over all ranks, after `too_long`
            and before any gate.
        sharing: what sharing prefixes does, predicted; None where it was not asked for.
        load: [ranks] float64, what each rank has to do, in predicted FLOP.
        skipped: traces counted in totals and counts but in no batch: their advantage is 0, or they have no term.
        too_long: what was dropped or cut. A trace whose whole group was dropped is counted in the first step.
        old_logprobs, ref_logprobs: [M], nats, or None until `with_logprobs`.
        alpha: [M] in [0, 1], where the proximal policy lies between rollout (0) and theta (1); None where none is used.
        tier: [M] uint8, as in the `Sequences`; None where it is not known.
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
    too_long: TooLong = TooLong()
    skipped: Skipped = Skipped()
    sharing: Sharing | None = None
    load: NDArray[np.float64] = field(default_factory=lambda: np.ones(1))
    old_logprobs: NDArray[np.floating] | None = None
    ref_logprobs: NDArray[np.floating] | None = None
    alpha: NDArray[np.floating] | None = None
    tier: NDArray[np.uint8] | None = None

    def __len__(self) -> int:
        """Number of terms M on this rank."""
        return len(self.origin)

    def __repr__(self) -> str:
        whole = f"{self.totals.terms} terms, {self.totals.traces} traces, {self.totals.groups} groups"
        return f"Step({whole}; here {len(self.batches)} rows of {sum(len(row.ids) for row in self.batches)} tokens)"

    def _repr_html_(self) -> str:
        rows = [(number, len(batch.ids), len(batch.term)) for number, batch in enumerate(self.batches[:10])]
        return _html.table(repr(self), ("row", "tokens", "terms"), rows)

    @property
    def trains(self) -> bool:
        """Whether a term is left to train, on any rank: False where `skip_zero_advantage` has left out all of them.

        An optimizer step on such a step moves parameters by what the optimizer remembers alone.
        """
        return self.totals.terms > self.skipped.terms

    def lag(self, version: int | None) -> Counts:
        """[M] versions between the policy that is trained and the one that sampled the term; -1 where one is unknown.

        Args:
            version: of the policy that is trained; None where it is not known.

        Raises:
            ArgumentError: if a term is of a later version.
        """
        if version is None:
            return np.full(len(self), -1, np.int64)
        newest = int(np.max(self.version, initial=-1))
        if newest > version:
            raise ArgumentError(
                f"version is {version}, and a term was sampled by version {newest}. A policy samples after it was "
                "trained, so one of the two counts otherwise. Pass the version that the servers were given last."
            )
        return np.where(self.version < 0, -1, version - self.version.astype(np.int64))

    @property
    def imbalance(self) -> float:
        """What the busiest rank has to do over the mean of all; 1 is balanced."""
        mean = float(np.mean(self.load))
        return float(np.max(self.load)) / mean if mean > 0 else 1.0

    @property
    def branch_tokens(self) -> int:
        """Tokens of this rank's branches, each up to its last term: a prefix that branches share counts in each.

        It does not depend on how rows are cut or prefixes shared, as the tokens of the batches do.
        """
        branches, place = np.unique(self.branch, return_inverse=True)
        length = np.zeros(len(branches), np.int64)
        for batch in self.batches:
            depth = host(batch.positions)[host(batch.read)][host(batch.row)]  # of the token before the term
            np.maximum.at(length, place[batch.term], depth + 2)
        return int(length.sum())

    def idle(self, needs: Needs, corrected: Corrected) -> NDArray[np.bool_]:
        """[M]: terms whose logprob cannot change loss or gradient, whatever the policy being trained says.

        Those are the terms that `corrected` dropped, and those with weight or advantage 0, where `needs` says that
        nothing else looks at them. Their head rows need not be computed: `batch.without(idle[batch.term])`. What is
        then not known of them is their logprob and entropy, for metrics.
        """
        out = np.zeros(len(self), bool)
        if not needs.dropped:
            out |= ~np.asarray(corrected.keep, bool)
        if not needs.weightless:
            out |= np.asarray(corrected.weight) == 0
            out |= self.advantages == 0
        return out

    def with_logprobs(self, *, old: Any = None, ref: Any = None) -> Step:
        """The step with the proximal or the reference policy's logprobs.

        Args:
            old: one array [m] per batch, as `policy.logprobs` returns them, or one array [M] in the step's order;
                numpy or torch; None leaves what is there.
            ref: likewise.

        Raises:
            ArgumentError: if lengths do not fit the step or its batches.
        """
        new = {"old_logprobs": old, "ref_logprobs": ref}
        return replace(self, **{name: self._ordered(name, given) for name, given in new.items() if given is not None})

    def terms(self, batch: Batch, corrected: Corrected) -> Terms:
        """What the objective needs of the terms of `batch`, on the device of `batch`.

        Args:
            batch: one of this step's, moved or not.
            corrected: of the whole step: weight, keep and scales [M].
        """
        import torch

        from tracegrad.objective.torch_loss import Terms

        device = batch.ids.device if isinstance(batch.ids, torch.Tensor) else "cpu"

        def gathered(values: Any) -> Any:
            return None if values is None else sent(torch.from_numpy(host(values)[batch.term]), device)

        return Terms(
            old=gathered(self.old_logprobs),
            rollout=gathered(self.rollout_logprobs),
            ref=gathered(self.ref_logprobs),
            advantages=gathered(self.advantages),
            weight=gathered(corrected.weight),
            keep=gathered(corrected.keep),
            scale=gathered(corrected.scale),
            trace=gathered(self.trace.astype(np.int64)),
            turn=gathered(self.turn.astype(np.int64)),
            group=gathered(self.group.astype(np.int64)),
            alpha=gathered(self.alpha),
            scales={reduce: gathered(scale) for reduce, scale in corrected.scales.items()},
        )

    def _ordered(self, name: str, given: Any) -> NDArray[np.floating]:
        if not isinstance(given, (list, tuple)) or (given and np.ndim(given[0]) == 0):
            given = _floats(given, name)
            self._check(name, [len(given)], [len(self)])
            return given
        parts = [_floats(part, f"{name}[{at}]") for at, part in enumerate(given)]
        self._check(name, [len(part) for part in parts], [len(batch.term) for batch in self.batches])
        out = np.full(len(self), np.nan, np.result_type(np.float32, *parts))  # terms in no batch stay unknown
        for batch, part in zip(self.batches, parts, strict=True):
            out[batch.term] = part
        return out

    def _check(self, name: str, lengths: list[int], needed: list[int]) -> None:
        if lengths != needed:
            raise ArgumentError(
                f"{name} has {lengths} entries but the step has {needed}. Each term needs its own logprob. "
                "Pass one array per batch, each of the batch's terms, or one array in the step's order."
            )


def host(values: Any) -> Any:
    """A numpy array of a numpy array, a sequence or a torch tensor, without importing torch."""
    if hasattr(values, "detach"):
        values = values.detach().cpu().numpy()
    return np.asarray(values)


def _floats(values: Any, name: str) -> NDArray[np.floating]:
    array = _validation.flat(_validation.numbers(values, name), name)
    return _validation.narrowed(array, np.float64 if array.dtype == np.float64 else np.float32, name)


def columns_of(batch: Batch) -> list[str]:
    """The names of the arrays that move with a batch."""
    return [field.name for field in fields(batch) if field.name not in ("term", "longest", "images")]


def moved(values: Any, device: Any) -> Any:
    """An array or tensor as a torch tensor on `device`, integers as int64; to CUDA by page-locked memory, no wait."""
    import torch

    tensor = sent(values if isinstance(values, torch.Tensor) else torch.from_numpy(np.asarray(values)), device)
    return tensor if tensor.is_floating_point() else tensor.long()


def sent(tensor: Any, device: Any) -> Any:
    """A tensor on `device`, in its dtype; to CUDA by page-locked memory, no wait."""
    import torch

    if tensor.device.type == "cpu" and torch.device(device).type == "cuda":
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)
