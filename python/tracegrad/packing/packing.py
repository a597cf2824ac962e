"""Assign groups to optimizer steps, and lay out their branches in packed rows (`pack`)."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from tracegrad import _core, _validation
from tracegrad.alignment.sequences import Sequences
from tracegrad.errors import ArgumentError
from tracegrad.images import ImageSpans, RowImages
from tracegrad.images.spans import ImageKeys
from tracegrad.packing.batch import Batch, Counts, Floats, Ints, Sharing, SkippedTraces, Step, Totals, TruncationLoss
from tracegrad.packing.cost_model import MIN_SHARING_GAIN, ModelShape
from tracegrad.packing.support import RecordedSampling

if TYPE_CHECKING:
    from tracegrad.objective import Requirements


def ids_with_image_keys(sequences: Sequences) -> tuple[Ints, ImageKeys | None]:
    """Return the ids [T] int32 by which branches are compared. Ids of each distinct image are replaced."""
    ids = np.require(sequences.ids, np.int32, ["C", "A"])
    return (ids, None) if sequences.images is None else sequences.images.with_image_keys(ids, sequences.cu_seqlens)


def vision_cost(sequences: Sequences, length: Ints, shape: ModelShape) -> Ints:
    """Return [N] int32: the cost of each branch's images in the vision tower, in units of trained tokens in the head.

    Args:
        sequences: N branches.
        length: [N] tokens of each branch that are laid out.
        shape: of the model.
    """
    cost = np.zeros(len(length), np.int32)
    if (images := sequences.images) is not None and shape.feature_flop:
        branch = np.repeat(np.arange(len(length)), np.diff(images.cu_images))
        owner = np.repeat(branch, np.diff(images.cu_features))
        features = np.bincount(owner[images.position < length[owner]], minlength=len(length))
        cost += np.rint(features * (shape.feature_flop / shape.term_flop)).astype(np.int32)
    return cost


class Layout(NamedTuple):
    """The arrays of `_core.pack_lay`, and the unique ids that `ids_with_image_keys` used for images."""

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
    cu_row_terms: Counts
    cu_rows: Counts
    origin: NDArray[np.int64]
    branch: Ints
    cu_terms: Counts
    images: ImageSpans | None = None
    keys: ImageKeys | None = None
    sampling: RecordedSampling | None = None

    def batch(self, row: int, origin: NDArray[np.int64]) -> Batch:
        """Return one row as a batch.

        Args:
            row: its number among all rows.
            origin: of the trained tokens of its step.
        """
        tokens = slice(self.cu_tokens[row], self.cu_tokens[row + 1])
        logit_rows = slice(self.cu_heads[row], self.cu_heads[row + 1])
        terms = slice(self.cu_row_terms[row], self.cu_row_terms[row + 1])
        ids, images = self.ids[tokens], None
        if self.images is not None and self.keys is not None:
            positions, offsets, picture = self.keys.read(ids)
            if len(positions):
                ids = ids.copy()
                ids[positions] = self.images.rule.pad
                images = RowImages(positions, offsets, picture, self.images.rule, self.images.pictures)
        batch = Batch(
            ids=ids,
            positions=self.positions[tokens],
            tree_end=self.tree_end[tokens],
            read=self.read[logit_rows],
            target=self.target[logit_rows],
            inv_temperature=self.inv_temperature[logit_rows],
            logit_row=self.row[terms],
            term=self.term[terms],
            images=images,
        )
        return batch if self.sampling is None else with_support(batch, self.sampling, origin[batch.term])


def with_support(batch: Batch, sampling: RecordedSampling, tokens: NDArray[np.int64]) -> Batch:
    """Return the row with the support of its logit rows.

    Branches may have sampled the same token after the same ids with different options. It then gets a logit row for
    each.

    Args:
        batch: a row without support.
        sampling: of all tokens of the sequences.
        tokens: [m] the token of each trained token of the row.
    """
    keys = np.stack([batch.logit_row, *sampling.keys(tokens)])
    if not keys[1:].any():
        return batch
    rows, first, logit_row = np.unique(keys, axis=1, return_index=True, return_inverse=True)
    arrays = {name: getattr(batch, name)[rows[0]] for name in ("read", "target", "inv_temperature")}
    support = sampling.support_of(tokens[first])
    return replace(batch, **arrays, logit_row=logit_row.reshape(-1).astype(np.int32), support=support)


class Groups(NamedTuple):
    """The step and the counts of each trace [R], and the totals of each step."""

    step: Ints
    terms: Counts
    group_terms: Counts
    group_traces: Counts
    totals: list[Totals]


def steps_of(
    group: NDArray[np.integer], there: NDArray[np.bool_], groups_per_step: int | None, seed: int | None
) -> NDArray[np.int32]:
    """Return [R] int32: the optimizer step of each trace's group in `pack`, -1 for groups in no step.

    Args:
        group: [R] the group of each trace.
        there: [R] bool: traces that count in a step. A group without such a trace is in no step.
        groups_per_step: groups per step; None: one step of all groups.
        seed: shuffles the groups; None keeps the order in which they first appear.

    >>> steps_of(np.array([4, 4, 2, 7]), np.array([True, False, True, False]), 1, None).tolist()
    [0, 0, 1, -1]
    """
    names, code = np.unique(group, return_inverse=True)
    alive, first = np.unique(code[there], return_index=True)
    order = alive[np.argsort(first)]
    if seed is not None:
        order = np.random.default_rng(seed).permutation(order)
    step_of_group = np.full(len(names), -1, np.int32)
    step_of_group[order] = np.arange(len(order)) // (groups_per_step or max(len(order), 1))
    return step_of_group[code]


def nothing_to_train() -> ArgumentError:
    """Create the error for sequences in which no trace has a trained token that is laid out."""
    return ArgumentError(
        "TG-PACK-008: no token can be trained. Every trace is without a trainable token or longer than tokens_per_row. "
        "Look at the alignment levels and the alignment report of the sequences, or raise tokens_per_row."
    )


def group_into_steps(
    sequences: Sequences, terms: Ints, counted: NDArray[np.bool_], groups_per_step: int | None, seed: int | None
) -> Groups:
    """Assign traces to steps, and count their trained tokens, traces and groups.

    Args:
        sequences: R traces, N branches.
        terms: [N] trained tokens of each branch that are laid out.
        counted: [R] bool: traces that count without a trained token.
        groups_per_step, seed: as for `steps_of`.

    Raises:
        ArgumentError: if no trace has a trained token and none counts.
    """
    trace_terms = np.bincount(sequences.trace, terms, minlength=sequences.traces).astype(np.int64)
    there = (trace_terms > 0) | counted
    if not there.any():
        raise nothing_to_train()
    codes, group = np.unique(sequences.group, return_inverse=True)
    step_of_trace = steps_of(sequences.group, there, groups_per_step, seed)
    step = np.where(there, step_of_trace, -1).astype(np.int32)
    steps = int(step.max()) + 1
    step_of_group = np.full(len(codes), -1, np.int32)
    step_of_group[group] = step_of_trace
    counts_of_step = [np.bincount(step[there], trace_terms[there], steps), np.bincount(step[there], minlength=steps)]
    counts_of_step.append(np.bincount(step_of_group[step_of_group >= 0], minlength=steps))
    return Groups(
        step=step,
        terms=trace_terms,
        group_terms=np.bincount(group, trace_terms).astype(np.int64)[group],
        group_traces=np.bincount(group, there).astype(np.int64)[group],
        totals=[
            Totals(int(terms), int(traces), int(groups)) for terms, traces, groups in zip(*counts_of_step, strict=True)
        ],
    )


def too_long_losses(sequences: Sequences, groups: Groups, lost: Counts, over: Ints) -> list[TruncationLoss]:
    """Return, for each step, the traces and trained tokens that `too_long` dropped or cut."""
    out = [TruncationLoss()] * len(groups.totals)
    if not len(over):
        return out
    step_of_group = {
        int(group): int(step) for group, step in zip(sequences.group, groups.step, strict=True) if step >= 0
    }
    for trace in over.tolist():
        step = step_of_group.get(int(sequences.group[trace]), 0)
        out[step] = TruncationLoss(
            (*out[step].traces, sequences.trace_name(trace)), out[step].tokens + int(lost[trace])
        )
    return out


def has_zero_advantage(sequences: Sequences, advantages: Floats, groups: Groups) -> NDArray[np.bool_]:
    """Return [R] bool: the traces of a step in which all trained tokens have advantage 0."""
    owner = np.repeat(sequences.trace, np.diff(sequences.cu_seqlens))
    has_advantage = np.zeros(sequences.traces, bool)
    has_advantage[owner[advantages != 0]] = True
    return ~has_advantage & (groups.step >= 0)


def count_skipped(groups: Groups, idle: NDArray[np.bool_]) -> list[SkippedTraces]:
    """Return, for each step, the number of skipped traces and of their trained tokens."""
    steps = len(groups.totals)
    traces = np.bincount(groups.step[idle], minlength=steps)
    terms = np.bincount(groups.step[idle], groups.terms[idle], steps)
    return [SkippedTraces(int(count), int(lost)) for count, lost in zip(traces, terms, strict=True)]


def pack(
    sequences: Sequences,
    advantages: ArrayLike,
    *,
    tokens_per_row: int,
    per: Literal["trace", "term"] | None = None,
    groups_per_step: int | None = None,
    ranks: int = 1,
    rank: int = 0,
    requirements: Requirements | None = None,
    too_long: Literal["error", "drop", "truncate"] = "error",
    share_prefixes: bool = False,
    skip_zero_advantage: bool = False,
    count_always: ArrayLike | None = None,
    shape: ModelShape | None = None,
    seed: int | None = None,
    pad_to_multiple_of: int = 1,
) -> list[Step]:
    """Pack traces into optimizer steps of rows of at most `tokens_per_row` tokens.

    A group is in one step, a trace on one rank, and a branch in one row. Rows are filled by best fit, longest first,
    deterministically. A branch is laid out up to its last trainable token, because later tokens do not matter. A branch
    without a trainable token is left out. Traces are assigned to ranks by their cost (`ModelShape`), the most expensive
    first; `Step.imbalance` measures the result.

    Args:
        sequences: R traces.
        advantages: [R], one per trace, or [M], one per trained token of `sequences`.
        tokens_per_row: maximum number of tokens in a row, before padding.
        per: the kind of `advantages`; None decides by their number, and uses "trace" if R = M.
        groups_per_step: groups with a trained token per optimizer step; the last step may have fewer. None: one step.
        ranks, rank: the number of processes that share each step, and the index of this one. All compute the same plan.
        requirements: `objective.requirements`. If it needs the current-policy ratio of a trace, all branches of a trace
            are in one row.
        too_long: the treatment of a trace that is longer than a row: "error" raises an error that names the longest,
            "drop" leaves the trace out, "truncate" cuts its branch at the budget. `Step.too_long` counts the last two.
        share_prefixes: store common prefixes of the branches of a row, compared id by id, once. Branches of a group or
            of a trace share prefixes, and so do all branches with the same system prompt. Branches that share much are
            put into one row, whose budget counts a shared token once. Prefixes are shared in each step whose predicted
            FLOP ratio is above 1.05, and if a trace that must be in one row fits only with sharing. `Step.sharing` has
            the prediction. The gradient is the same. All layers must be attention layers: `model` rejects recurrent
            ones.
        skip_zero_advantage: leave out traces whose advantage is 0, which have no gradient, but count them in totals and
            counts. It raises an error if the objective reads such traces for another purpose
            (`requirements.zero_advantage_reason`).
            A step without remaining traces is returned too, with `Step.has_trained_tokens` False, so that the plan does
            not depend on rewards.
        count_always: [R] bool: traces that count among the traces and groups of their step without a trained token, for
            example a truncated trace that is masked. `Step.skipped` counts them too. None counts only traces with a
            trained token.
        shape: of the model, for predictions; None uses that of Qwen3-4B.
        seed: shuffles the groups; None keeps the order in which they first appear.
        pad_to_multiple_of: rows are padded to a multiple of this with tokens that see only themselves.

    Returns:
        the steps of this rank. A step with `Step.has_trained_tokens` False has nothing to train.

    Raises:
        ArgumentError: if nothing can be trained, a trace is too long, or arguments contradict one another.

    >>> from tracegrad.alignment.sequences import Sequences
    >>> nan = float("nan")
    >>> ids, trainable = [5, 6, 7, 5, 8], [False, True, True, False, True]
    >>> s = Sequences.from_arrays(ids, [0, 3, 5], [nan, -0.5, -0.1, nan, -1.0], trainable, group=[0, 0])
    >>> [step] = pack(s, [1.0, -1.0], tokens_per_row=16)
    >>> step.totals, step.origin.tolist(), step.batches[0].read.tolist()
    (Totals(terms=3, traces=2, groups=1), [1, 2, 4], [0, 1, 3])
    """
    _check_types(sequences, requirements, shape, too_long, share_prefixes, seed)
    _check(requirements, tokens_per_row, ranks, rank, groups_per_step, pad_to_multiple_of, skip_zero_advantage)
    per_token = advantages_by_token(sequences, advantages, per)
    whole_traces = requirements is not None and requirements.trace_ratio
    trace = _contiguous(sequences.trace, np.int32)
    cu = _contiguous(sequences.cu_seqlens, np.int64)
    ids, keys = ids_with_image_keys(sequences)
    trainable = _contiguous(sequences.trainable, np.bool_)
    limits = (int(tokens_per_row), whole_traces)
    sizes = _measure_branches(sequences, ids, *limits, share_prefixes, too_long)
    none = np.zeros(sequences.traces, bool)
    masked = none if count_always is None else _validation.flags(count_always, "count_always", length=sequences.traces)
    groups = group_into_steps(sequences, sizes.terms, masked, groups_per_step, seed)
    idle = has_zero_advantage(sequences, per_token, groups) if skip_zero_advantage else none
    length = np.where(idle[trace], 0, sizes.length).astype(np.int32)
    shape = shape or ModelShape()
    cost = PlacementCost(shape.token_flop, shape.pair_flop, shape.term_flop)
    least_gain = MIN_SHARING_GAIN if share_prefixes else None
    step = _contiguous(groups.step[sizes.present], groups.step.dtype)
    weights = sizes.terms + vision_cost(sequences, length, shape)
    placement = _Placed(
        **_core.pack_place(ids, cu, length, weights, sizes.trace_index, step, int(ranks), *limits, cost, least_gain)
    )
    # All ranks have the same number of rows. An empty step still has one row of padding, because the optimizer may
    # still update parameters.
    rows = np.maximum(placement.rows.reshape(-1, ranks).max(1), 1)
    own_step = np.where(placement.rank == rank, groups.step[trace], -1).astype(np.int32)
    columns = (ids, trainable, _contiguous(sequences.inv_temperature, np.float32), cu)
    plan = (length, own_step, placement.row, placement.order, rows, placement.shared)
    rows_of_rank = _core.pack_lay(*columns, *plan, int(pad_to_multiple_of))
    layout = Layout(**rows_of_rank, images=sequences.images, keys=keys, sampling=RecordedSampling.of(sequences))
    idle |= masked & (groups.terms == 0)
    by_term = _by_term(sequences, groups, layout, trace, per_token)
    packed = _Packing(
        groups,
        placement,
        layout,
        by_term,
        too_long_losses(sequences, groups, sizes.lost, sizes.too_long),
        count_skipped(groups, idle),
    )
    return [_step(packed, share_prefixes, index) for index in range(len(rows))]


MAX_ROW_TOKENS = (1 << 31) - 1
"""Maximum number of tokens in a row."""


def measure(
    sequences: Sequences,
    *,
    tokens_per_row: int,
    whole_traces: bool = False,
    share_prefixes: bool = False,
    too_long: Literal["error", "drop", "truncate"] = "error",
) -> NDArray[np.int64]:
    """Return [R] int64: the trained tokens of each trace that `pack` lays out, after `too_long` is applied.

    Args:
        sequences: R traces.
        whole_traces: `objective.requirements.trace_ratio`; the others are as for `pack`.

    Raises:
        ArgumentError: if a trace is too long, as in `pack`.
    """
    ids, _ = ids_with_image_keys(sequences)
    sizes = _measure_branches(sequences, ids, tokens_per_row, whole_traces, share_prefixes, too_long)
    return np.bincount(sequences.trace, sizes.terms, minlength=sequences.traces).astype(np.int64)


class PlacementCost(NamedTuple):
    """FLOP of a token, of a (key, query) pair and of a trained token, for `_core.pack_place`."""

    token: float
    pair: float
    term: float


class _Placed(NamedTuple):
    """The arrays of `_core.pack_place`."""

    rank: Ints
    row: Ints
    order: Ints
    rows: Ints
    load: NDArray[np.float64]
    shared: NDArray[np.bool_]
    needed: NDArray[np.bool_]
    tokens: NDArray[np.uint64]
    tree_tokens: NDArray[np.uint64]
    ratio: NDArray[np.float64]


class _Packing(NamedTuple):
    """The results of packing all steps."""

    groups: Groups
    placed: _Placed
    layout: Layout
    by_term: dict[str, NDArray[Any]]
    losses: list[TruncationLoss]
    skipped: list[SkippedTraces]


def advantages_by_token(
    sequences: Sequences, advantages: ArrayLike, per: Literal["trace", "term"] | None = None
) -> Floats:
    """Return [T] float32: the advantage of each trained token, 0 for other tokens.

    Args:
        sequences: R traces.
        advantages: [R], one per trace, or [M], one per trained token.
        per: the kind of `advantages`; None decides by their number, and uses "trace" if R = M.

    Raises:
        ArgumentError: if the shape is different, or the advantage of a trained token is not finite.
    """
    _validation.one_of(per, "per", ("trace", "term", None))
    values = _validation.as_floats(_validation.numbers(advantages, "advantages"), np.float32, "advantages")
    lengths = np.diff(sequences.cu_seqlens)
    if per != "term" and values.shape == (sequences.traces,) and np.isfinite(values).all():
        out = np.repeat(values[sequences.trace], lengths)
        # This takes a fifth of the time of `np.where`.
        return np.multiply(out, sequences.trainable, out=out)
    owner = np.repeat(sequences.trace, lengths)
    terms = sequences.terms
    out = np.zeros(sequences.tokens, np.float32)
    if per != "term" and values.shape == (sequences.traces,):
        out[terms] = values[owner[terms]]
    elif per != "trace" and values.shape == terms.shape:
        out[terms] = values
    else:
        where = f"per={per!r} and there" if per else "there"
        raise ArgumentError(
            f"TG-PACK-009: advantages has shape {values.shape}, but {where} are {sequences.traces} traces and "
            f"{len(terms)} trained tokens. Pass one per trace, or one per trainable token."
        )
    bad = terms[~np.isfinite(out[terms])]
    if len(bad):
        name = sequences.trace_name(int(owner[bad[0]]))
        raise ArgumentError(
            f"TG-PACK-010: trace '{name}': the advantage of a trained token is {out[bad[0]]}, and {len(bad)} are not "
            "finite. The gradient would not be a number. Give every trained trace a reward, or leave it out."
        )
    return out


class _BranchSizes(NamedTuple):
    """Sizes of N branches of R traces.

    Args:
        length: [N] int32, tokens that are laid out.
        terms: [N] int32, trained tokens among them.
        lost: [R] int64, trained tokens that are not laid out.
        too_long: rows of the traces that are too long.
        present: rows of the traces that have a branch.
        trace_index: [N] int32, index of each branch's trace in `present`.
    """

    length: Ints
    terms: Ints
    lost: Counts
    too_long: Ints
    present: Ints
    trace_index: Ints


def _measure_branches(
    sequences: Sequences, ids: Ints, tokens_per_row: int, whole_traces: bool, share_prefixes: bool, too_long: str
) -> _BranchSizes:
    """Measure the branches for `pack`."""
    # Folders of earlier versions may have traces without a branch at the end; the core counts traces with a branch.
    present, trace_index = np.unique(_contiguous(sequences.trace, np.int32), return_inverse=True)
    trace_index = trace_index.astype(np.int32)
    names = [sequences.trace_ids[row] for row in present] if sequences.trace_ids else []
    cu = _contiguous(sequences.cu_seqlens, np.int64)
    trainable = _contiguous(sequences.trainable, np.bool_)
    limits = (int(tokens_per_row), whole_traces, share_prefixes, too_long)
    sizes = _core.pack_measure(cu, trace_index, ids, trainable, names, *limits)
    lost = np.zeros(sequences.traces, sizes["lost"].dtype)
    lost[present] = sizes["lost"]
    too_long_traces = present[sizes["too_long"]]
    return _BranchSizes(sizes["length"], sizes["terms"], lost, too_long_traces, present, trace_index)


def _by_term(
    sequences: Sequences, groups: Groups, layout: Layout, trace: Ints, advantages: Floats
) -> dict[str, NDArray[Any]]:
    """Return the columns of all trained tokens, by the name of their field in `Step`."""
    of_tokens = {
        "turn": _contiguous(sequences.turn, np.int32),
        "version": _contiguous(sequences.version, np.int32),
        "rollout_logprobs": _contiguous(sequences.rollout_logprobs, np.float32),
        "advantages": advantages,
        "alignment_level": _contiguous(sequences.alignment_level, np.uint8),
    }
    of_branches = {
        "trace": trace,
        "group": _contiguous(sequences.group[trace], np.int32),
        "trace_terms": groups.terms[trace],
        "group_terms": groups.group_terms[trace],
        "group_traces": groups.group_traces[trace],
    }
    gathered = _core.pack_gather(layout.origin, layout.branch, [*of_tokens.values()], [*of_branches.values()])
    columns = dict(zip([*of_tokens, *of_branches], gathered, strict=True))
    return {"origin": layout.origin, "branch": layout.branch, **columns}


def _step(packed: _Packing, report_sharing: bool, index: int) -> Step:
    groups, placement, layout = packed.groups, packed.placed, packed.layout
    terms = slice(layout.cu_terms[index], layout.cu_terms[index + 1])
    sharing = Sharing(
        shared=bool(placement.shared[index]),
        tokens=int(placement.tokens[index]),
        tree_tokens=int(placement.tree_tokens[index]),
        flop_ratio=float(placement.ratio[index]),
        needed=bool(placement.needed[index]),
    )
    origin = layout.origin[terms]
    return Step(
        batches=tuple(layout.batch(row, origin) for row in range(layout.cu_rows[index], layout.cu_rows[index + 1])),
        **{name: column[terms] for name, column in packed.by_term.items()},
        totals=groups.totals[index],
        too_long=packed.losses[index],
        skipped=packed.skipped[index],
        sharing=sharing if report_sharing else None,
        load=placement.load.reshape(len(groups.totals), -1)[index],
    )


def _check_types(
    sequences: Sequences,
    needs: Requirements | None,
    shape: ModelShape | None,
    too_long: str,
    share: bool,
    seed: int | None,
) -> None:
    _validation.instance(sequences, "sequences", Sequences, "Pass what align() gave.")
    if needs is not None and not hasattr(needs, "trace_ratio"):
        raise ArgumentError(f"TG-PACK-011: requirements is {_validation.describe(needs)}. Pass objective.requirements.")
    if shape is not None:
        _validation.instance(shape, "shape", ModelShape, "Pass ModelShape.of(model.config).")
    _validation.one_of(too_long, "too_long", ("error", "drop", "truncate"))
    _validation.flag(share, "share_prefixes")
    if seed is not None:
        _validation.integer(seed, "seed", least=0)


def _check(
    needs: Requirements | None,
    tokens_per_row: int,
    ranks: int,
    rank: int,
    groups_per_step: int | None,
    multiple: int,
    skip: bool,
) -> None:
    for name, value in {"tokens_per_row": tokens_per_row, "ranks": ranks, "pad_to_multiple_of": multiple}.items():
        _validation.integer(value, name, least=1, most=MAX_ROW_TOKENS)
    if groups_per_step is not None:
        _validation.integer(groups_per_step, "groups_per_step", least=1)
    if _validation.integer(rank, "rank", least=0) >= ranks:
        raise ArgumentError(f"TG-PACK-012: rank is {rank} of {ranks}. Ranks count from 0.")
    _validation.flag(skip, "skip_zero_advantage")
    if skip and (needs is None or needs.zero_advantage_reason):
        reason = "it is not known what the objective looks at" if needs is None else needs.zero_advantage_reason
        fix = "Pass requirements=objective.requirements" if needs is None else "Pass skip_zero_advantage=False"
        raise ArgumentError(
            f"TG-PACK-013: skip_zero_advantage=True, but {reason}. A trace whose advantage is 0 could still "
            f"matter. {fix}."
        )


def _contiguous(values: ArrayLike, dtype: Any) -> Any:
    return np.require(values, dtype, ["C", "A"])
