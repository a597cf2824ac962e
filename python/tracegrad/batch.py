"""Sequences become optimizer steps: packed rows of at most a token budget, and the per-term arrays of each step.

Here are `pack`, `Step` and `Batch`. Placement and layout are computed in Rust; torch is imported by `.to` and `.terms`
alone. No model, no ratios: `policy` reads a batch, `correction` reads a step, `learner` drives both.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from tracegrad import _core
from tracegrad.errors import ArgumentError
from tracegrad.sequence import Sequences

if TYPE_CHECKING:
    from tracegrad.algebra import Needs
    from tracegrad.correction import Corrected
    from tracegrad.objective import Terms

Ints = NDArray[np.int32]
Counts = NDArray[np.int64]
Floats = NDArray[np.float32]


@dataclass(frozen=True)
class Totals:
    """Of one step over all ranks: its terms, the traces with one, the groups with one."""

    terms: int
    traces: int
    groups: int


@dataclass(frozen=True)
class TooLong:
    """What a step lost to the token budget, over all ranks: traces dropped or cut, by name, and their lost terms."""

    traces: tuple[str, ...] = ()
    terms: int = 0


@dataclass(frozen=True, eq=False)
class Batch:
    """One packed row. numpy as `pack` makes it, torch tensors after `.to(device)` (indices then int64).

    Args:
        ids: [T] int32; 0 where the row is padded.
        positions: [T] int32, depth in the tree, which in a plain pack is the position in the branch.
        tree_end: [T] int32: a query q sees a key k iff k <= q < tree_end[k]. A padding token sees only itself.
        read: [U] int32: the position whose hidden state predicts the token.
        target: [U] int32: the token.
        inv_temperature: [U] float32: what the logits are multiplied by.
        row: [m] int32: the head row of each term.
        term: [m] int32: its place in the step. Stays numpy, as it indexes the arrays of the step.
    """

    ids: Any
    positions: Any
    tree_end: Any
    read: Any
    target: Any
    inv_temperature: Any
    row: Any
    term: Ints

    def to(self, device: Any) -> Batch:
        """The same batch as torch tensors on `device` (anything `torch.Tensor.to` takes)."""
        import torch

        def moved(values: Any) -> Any:
            tensor = values if isinstance(values, torch.Tensor) else torch.from_numpy(np.asarray(values))
            tensor = tensor.to(device, non_blocking=True)
            return tensor if tensor.is_floating_point() else tensor.long()

        columns = {field.name: getattr(self, field.name) for field in fields(self) if field.name != "term"}
        return replace(self, **{name: moved(values) for name, values in columns.items()})


@dataclass(frozen=True, eq=False)
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
        group_traces: [M] int64, traces with a term in its group.
        totals: terms, traces and groups of the step. These and the three counts are over all ranks, after `too_long`
            and before any gate.
        too_long: what was dropped or cut. A trace whose whole group was dropped is counted in the first step.
        old_logprobs, ref_logprobs: [M], nats, or None until `with_logprobs`.
        alpha: [M] in [0, 1], where the proximal policy lies between rollout (0) and theta (1); None where none is used.
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
    old_logprobs: NDArray[np.floating] | None = None
    ref_logprobs: NDArray[np.floating] | None = None
    alpha: NDArray[np.floating] | None = None

    def __len__(self) -> int:
        """Number of terms M on this rank."""
        return len(self.origin)

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

        from tracegrad.objective import Terms

        device = batch.ids.device if isinstance(batch.ids, torch.Tensor) else "cpu"

        def gathered(values: Any) -> Any:
            return None if values is None else torch.from_numpy(_host(values)[batch.term]).to(device, non_blocking=True)

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
            given = _host(given)
            self._check(name, [len(given)], [len(self)])
            return _floats(given)
        parts = [_floats(_host(part)) for part in given]
        self._check(name, [len(part) for part in parts], [len(batch.term) for batch in self.batches])
        out = np.empty(len(self), np.result_type(np.float32, *parts))
        for batch, part in zip(self.batches, parts, strict=True):
            out[batch.term] = part
        return out

    def _check(self, name: str, found: list[int], needed: list[int]) -> None:
        if found != needed:
            raise ArgumentError(
                f"{name} has {found} entries but the step has {needed}. Each term needs its own logprob. "
                "Pass one array per batch, each of the batch's terms, or one array in the step's order."
            )


def pack(
    sequences: Sequences,
    advantages: ArrayLike,
    *,
    token_budget: int,
    per: Literal["trace", "term"] | None = None,
    step_groups: int | None = None,
    ranks: int = 1,
    rank: int = 0,
    needs: Needs | None = None,
    too_long: Literal["refuse", "drop", "truncate"] = "refuse",
    share_prefixes: bool = False,
    seed: int | None = None,
    pad_to_multiple_of: int = 1,
) -> list[Step]:
    """Packs traces into optimizer steps of rows of at most `token_budget` tokens.

    A group stays in one step, a trace on one rank, a branch in one row: best fit, longest first, deterministic. A
    branch is laid out up to its last trainable token, as what follows cannot matter; one without any is left out.

    Args:
        sequences: R traces.
        advantages: [R], one per trace, or [M], one per term of `sequences`.
        token_budget: the most tokens a row holds, before padding.
        per: which of the two `advantages` are; None goes by their number, and takes them per trace where R = M.
        step_groups: groups per optimizer step that have a term; the last step may have fewer. None: one step of all.
        ranks, rank: how many processes share each step, and which of them this is. All compute the same plan.
        needs: `objective.needs`. Where it takes a trace's current-policy ratio, all its branches lie in one row.
        too_long: what is done with a trace longer than a row: an error that names the longest, the trace left out, or
            its branch cut at the budget. The last two are counted in `Step.too_long`.
        share_prefixes: not built yet.
        seed: shuffles the groups; None keeps the order in which they first appear.
        pad_to_multiple_of: rows are padded to a multiple of this with tokens that see only themselves.

    Returns:
        the steps of this rank.

    Raises:
        ArgumentError: if nothing can be trained, a trace is too long, or arguments contradict one another.

    >>> from tracegrad.sequence import Sequences
    >>> nan = float("nan")
    >>> ids, trainable = [5, 6, 7, 5, 8], [False, True, True, False, True]
    >>> s = Sequences.from_arrays(ids, [0, 3, 5], [nan, -0.5, -0.1, nan, -1.0], trainable, group=[0, 0])
    >>> [step] = pack(s, [1.0, -1.0], token_budget=16)
    >>> step.totals, step.origin.tolist(), step.batches[0].read.tolist()
    (Totals(terms=3, traces=2, groups=1), [1, 2, 4], [0, 1, 3])
    """
    if share_prefixes:
        raise ArgumentError(
            "share_prefixes=True is not built yet. Rows would hold a prefix once for all branches that share it. "
            "Pass share_prefixes=False: the gradient is the same."
        )
    _check_counts(token_budget=token_budget, ranks=ranks, pad_to_multiple_of=pad_to_multiple_of)
    if step_groups is not None:
        _check_counts(step_groups=step_groups)
    if not 0 <= rank < ranks:
        raise ArgumentError(f"rank is {rank} of {ranks}. Ranks count from 0.")
    per_token = advantages_by_token(sequences, advantages, per)
    whole = needs is not None and needs.trace_ratio
    trace = _contiguous(sequences.trace, np.int32)
    cu = _contiguous(sequences.cu_seqlens, np.int64)
    trainable = _contiguous(sequences.trainable, np.bool_)
    names = list(sequences.trace_ids)
    length, terms, lost, over = _core.pack_measure(cu, trace, trainable, names, int(token_budget), whole, too_long)
    groups = _group_into_steps(sequences, terms, step_groups, seed)
    placed = _core.pack_place(length, trace, groups.step, int(ranks), int(token_budget), whole)
    rows = placed[2].reshape(-1, ranks).max(1)
    mine = np.where(placed[0] == rank, groups.step[trace], -1).astype(np.int32)
    inv_temperature = _contiguous(sequences.inv_temperature, np.float32)
    ids = _contiguous(sequences.ids, np.int32)
    layout = _Layout(
        *_core.pack_lay(ids, trainable, inv_temperature, cu, length, mine, placed[1], rows, int(pad_to_multiple_of))
    )
    losses = _losses(sequences, groups, lost, over)
    return [_step(sequences, layout, groups, per_token, losses[index], index) for index in range(len(rows))]


class _Layout(NamedTuple):
    """The arrays of `_core.pack_lay`."""

    ids: Ints
    positions: Ints
    tree_end: Ints
    cu_tokens: Counts
    read: Ints
    target: Ints
    inv_temperature: Floats
    row: Ints
    term: Ints
    cu_heads: Counts
    cu_rows: Counts
    origin: NDArray[np.int64]
    branch: Ints
    cu_terms: Counts


class _Groups(NamedTuple):
    """Steps and counts by trace [R], totals by step."""

    step: Ints
    terms: Counts
    group_terms: Counts
    group_traces: Counts
    totals: list[Totals]


def advantages_by_token(
    sequences: Sequences, advantages: ArrayLike, per: Literal["trace", "term"] | None = None
) -> Floats:
    """[T] float32: the advantage of each token that is a term, 0 elsewhere.

    Args:
        sequences: R traces.
        advantages: [R], one per trace, or [M], one per term.
        per: which of the two; None goes by their number, and takes them per trace where R = M.

    Raises:
        ArgumentError: for another shape, or a term whose advantage is not finite.
    """
    if per not in ("trace", "term", None):
        raise ArgumentError(f"per is {per!r}. It must be 'trace', 'term' or None.")
    given = np.asarray(_host(advantages), np.float32)
    owner = np.repeat(sequences.trace, np.diff(sequences.cu_seqlens))
    terms = sequences.terms
    out = np.zeros(sequences.tokens, np.float32)
    if per != "term" and given.shape == (sequences.traces,):
        out[terms] = given[owner[terms]]
    elif per != "trace" and given.shape == terms.shape:
        out[terms] = given
    else:
        told = f"per={per!r} and there" if per else "there"
        raise ArgumentError(
            f"advantages has shape {given.shape}, but {told} are {sequences.traces} traces and {len(terms)} terms. "
            "Pass one per trace, or one per trainable token."
        )
    bad = terms[~np.isfinite(out[terms])]
    if len(bad):
        at = int(owner[bad[0]])
        name = sequences.trace_ids[at] if sequences.trace_ids else at
        raise ArgumentError(
            f"trace '{name}': the advantage of a trained token is {out[bad[0]]}, and {len(bad)} are not finite. "
            "The gradient would not be a number. Give every trained trace a reward, or leave it out."
        )
    return out


def _group_into_steps(sequences: Sequences, terms: Ints, step_groups: int | None, seed: int | None) -> _Groups:
    trace_terms = np.bincount(sequences.trace, terms, minlength=sequences.traces).astype(np.int64)
    trained = trace_terms > 0
    if not trained.any():
        raise ArgumentError(
            "no token can be trained. Every trace is without a trainable token or longer than token_budget. "
            "Look at the tiers and the drift of the sequences, or raise token_budget."
        )
    names, group = np.unique(sequences.group, return_inverse=True)
    alive, first = np.unique(group[trained], return_index=True)
    order = alive[np.argsort(first)]
    if seed is not None:
        order = np.random.default_rng(seed).permutation(order)
    step_of_group = np.full(len(names), -1, np.int32)
    step_of_group[order] = np.arange(len(order)) // (step_groups or len(order))
    step = np.where(trained, step_of_group[group], -1).astype(np.int32)
    steps = int(step.max()) + 1
    by_step = [np.bincount(step[trained], trace_terms[trained], steps), np.bincount(step[trained], minlength=steps)]
    by_step.append(np.bincount(step_of_group[order], minlength=steps))
    return _Groups(
        step=step,
        terms=trace_terms,
        group_terms=np.bincount(group, trace_terms).astype(np.int64)[group],
        group_traces=np.bincount(group, trained).astype(np.int64)[group],
        totals=[Totals(int(terms), int(traces), int(groups)) for terms, traces, groups in zip(*by_step, strict=True)],
    )


def _losses(sequences: Sequences, groups: _Groups, lost: Counts, over: Ints) -> list[TooLong]:
    """Per step, what `too_long` took of it."""
    step_of_group = {
        int(group): int(step) for group, step in zip(sequences.group, groups.step, strict=True) if step >= 0
    }
    out = [TooLong()] * len(groups.totals)
    for trace in over.tolist():
        step = step_of_group.get(int(sequences.group[trace]), 0)
        name = sequences.trace_ids[trace] if sequences.trace_ids else str(trace)
        out[step] = TooLong((*out[step].traces, name), out[step].terms + int(lost[trace]))
    return out


def _step(
    sequences: Sequences, layout: _Layout, groups: _Groups, advantages: Floats, too_long: TooLong, index: int
) -> Step:
    here = slice(layout.cu_terms[index], layout.cu_terms[index + 1])
    origin, branch = layout.origin[here], layout.branch[here]
    trace = _contiguous(sequences.trace, np.int32)[branch]
    return Step(
        batches=tuple(_batch(layout, row) for row in range(layout.cu_rows[index], layout.cu_rows[index + 1])),
        origin=origin,
        trace=trace,
        branch=branch,
        turn=np.asarray(sequences.turn)[origin],
        group=np.asarray(sequences.group)[trace],
        version=np.asarray(sequences.version)[origin],
        rollout_logprobs=np.asarray(sequences.rollout_logprobs)[origin],
        advantages=advantages[origin],
        trace_terms=groups.terms[trace],
        group_terms=groups.group_terms[trace],
        group_traces=groups.group_traces[trace],
        totals=groups.totals[index],
        too_long=too_long,
    )


def _batch(layout: _Layout, row: int) -> Batch:
    tokens = slice(layout.cu_tokens[row], layout.cu_tokens[row + 1])
    heads = slice(layout.cu_heads[row], layout.cu_heads[row + 1])
    return Batch(
        ids=layout.ids[tokens],
        positions=layout.positions[tokens],
        tree_end=layout.tree_end[tokens],
        read=layout.read[heads],
        target=layout.target[heads],
        inv_temperature=layout.inv_temperature[heads],
        row=layout.row[heads],
        term=layout.term[heads],
    )


def _check_counts(**counts: int) -> None:
    for name, value in counts.items():
        if int(value) != value or value < 1:
            raise ArgumentError(f"{name} is {value}. It must be an integer of at least 1.")


def _contiguous(values: ArrayLike, dtype: Any) -> Any:
    return np.ascontiguousarray(values, dtype)


def _host(values: Any) -> Any:
    """A numpy array of a numpy array, a sequence or a torch tensor, without importing torch."""
    if hasattr(values, "detach"):
        values = values.detach().cpu().numpy()
    return np.asarray(values)


def _floats(values: Any) -> NDArray[np.floating]:
    return values if values.dtype in (np.float32, np.float64) else values.astype(np.float32)
