"""Assign groups to optimizer steps and lay their branches out in packed rows: `pack`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from tracegrad import _core, _validation
from tracegrad.alignment.sequences import Sequences
from tracegrad.errors import ArgumentError
from tracegrad.images import Images, RowImages
from tracegrad.images.spans import Keys
from tracegrad.packing.batch import Batch, Counts, Floats, Ints, Sharing, Skipped, Step, TooLong, Totals
from tracegrad.packing.cost_model import LEAST_GAIN, ModelShape

if TYPE_CHECKING:
    from tracegrad.objective import Needs


def compared_ids(sequences: Sequences) -> tuple[Ints, Keys | None]:
    """[T] int32: the ids by which branches are compared: those of pictures are numbers that no other picture has."""
    ids = np.require(sequences.ids, np.int32, ["C", "A"])
    return (ids, None) if sequences.images is None else sequences.images.keyed(ids, sequences.cu_seqlens)


def towers_as_terms(sequences: Sequences, length: Ints, shape: ModelShape) -> Ints:
    """[N] int32: what the pictures of each branch cost in the tower, as so many terms of the head.

    Args:
        length: [N] tokens of each branch that are laid out.
        shape: of the model.
    """
    out = np.zeros(len(length), np.int32)
    if (images := sequences.images) is not None and shape.feature_flop:
        branch = np.repeat(np.arange(len(length)), np.diff(images.cu_images))
        owner = np.repeat(branch, np.diff(images.cu_features))
        shown = np.bincount(owner[images.at < length[owner]], minlength=len(length))
        out += np.rint(shown * (shape.feature_flop / shape.term_flop)).astype(np.int32)
    return out


class Layout(NamedTuple):
    """The arrays of `_core.pack_lay`, and what `compared_ids` put in place of the ids of pictures."""

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
    images: Images | None = None
    keys: Keys | None = None

    def batch(self, row: int) -> Batch:
        """A row."""
        tokens = slice(self.cu_tokens[row], self.cu_tokens[row + 1])
        heads = slice(self.cu_heads[row], self.cu_heads[row + 1])
        terms = slice(self.cu_row_terms[row], self.cu_row_terms[row + 1])
        ids, images = self.ids[tokens], None
        if self.images is not None and self.keys is not None:
            at, cu, picture = self.keys.read(ids)
            if len(at):
                ids = ids.copy()
                ids[at] = self.images.rule.pad
                images = RowImages(at, cu, picture, self.images.rule, self.images.pictures)
        return Batch(
            ids=ids,
            positions=self.positions[tokens],
            tree_end=self.tree_end[tokens],
            read=self.read[heads],
            target=self.target[heads],
            inv_temperature=self.inv_temperature[heads],
            row=self.row[terms],
            term=self.term[terms],
            images=images,
        )


class Groups(NamedTuple):
    """Steps and counts by trace [R], totals by step."""

    step: Ints
    terms: Counts
    group_terms: Counts
    group_traces: Counts
    totals: list[Totals]


def steps_of(
    group: NDArray[np.integer], there: NDArray[np.bool_], step_groups: int | None, seed: int | None
) -> NDArray[np.int32]:
    """[R] int32: the optimizer step of each trace's group, -1 for groups in none; what `pack` cuts steps by.

    Args:
        group: [R] of each trace.
        there: [R] traces that count in a step: a group without one is in none.
        step_groups: groups of a step; None: one step of all.
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
    step_of_group[order] = np.arange(len(order)) // (step_groups or max(len(order), 1))
    return step_of_group[code]


def nothing_to_train() -> ArgumentError:
    """What is said where no trace has a term that is laid out."""
    return ArgumentError(
        "no token can be trained. Every trace is without a trainable token or longer than token_budget. "
        "Look at the tiers and the drift of the sequences, or raise token_budget."
    )


def group_into_steps(
    sequences: Sequences, terms: Ints, counted: NDArray[np.bool_], step_groups: int | None, seed: int | None
) -> Groups:
    """Steps and counts of traces.

    Args:
        terms: [N] laid out of each branch.
        counted: [R] bool: traces that count without a term.
        step_groups, seed: as for `steps_of`.

    Raises:
        ArgumentError: if no trace has a term and none counts.
    """
    trace_terms = np.bincount(sequences.trace, terms, minlength=sequences.traces).astype(np.int64)
    there = (trace_terms > 0) | counted
    if not there.any():
        raise nothing_to_train()
    codes, group = np.unique(sequences.group, return_inverse=True)
    of_group = steps_of(sequences.group, there, step_groups, seed)
    step = np.where(there, of_group, -1).astype(np.int32)
    steps = int(step.max()) + 1
    alive = np.full(len(codes), -1, np.int32)
    alive[group] = of_group
    by_step = [np.bincount(step[there], trace_terms[there], steps), np.bincount(step[there], minlength=steps)]
    by_step.append(np.bincount(alive[alive >= 0], minlength=steps))
    return Groups(
        step=step,
        terms=trace_terms,
        group_terms=np.bincount(group, trace_terms).astype(np.int64)[group],
        group_traces=np.bincount(group, there).astype(np.int64)[group],
        totals=[Totals(int(terms), int(traces), int(groups)) for terms, traces, groups in zip(*by_step, strict=True)],
    )


def losses(sequences: Sequences, groups: Groups, lost: Counts, over: Ints) -> list[TooLong]:
    """Per step, what `too_long` took of it."""
    out = [TooLong()] * len(groups.totals)
    if not len(over):
        return out
    step_of_group = {
        int(group): int(step) for group, step in zip(sequences.group, groups.step, strict=True) if step >= 0
    }
    for trace in over.tolist():
        step = step_of_group.get(int(sequences.group[trace]), 0)
        out[step] = TooLong((*out[step].traces, sequences.trace_name(trace)), out[step].terms + int(lost[trace]))
    return out


def without_advantage(sequences: Sequences, advantages: Floats, groups: Groups) -> NDArray[np.bool_]:
    """[R]: traces of a step whose every term has advantage 0."""
    owner = np.repeat(sequences.trace, np.diff(sequences.cu_seqlens))
    pulled = np.zeros(sequences.traces, bool)
    pulled[owner[advantages != 0]] = True
    return ~pulled & (groups.step >= 0)


def skipped(groups: Groups, idle: NDArray[np.bool_]) -> list[Skipped]:
    """Per step, what `skip_zero_advantage` took of it."""
    steps = len(groups.totals)
    traces = np.bincount(groups.step[idle], minlength=steps)
    terms = np.bincount(groups.step[idle], groups.terms[idle], steps)
    return [Skipped(int(count), int(lost)) for count, lost in zip(traces, terms, strict=True)]


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
    skip_zero_advantage: bool = False,
    counted: ArrayLike | None = None,
    shape: ModelShape | None = None,
    seed: int | None = None,
    pad_to_multiple_of: int = 1,
) -> list[Step]:
    """Packs traces into optimizer steps of rows of at most `token_budget` tokens.

    A group stays in one step, a trace on one rank, a branch in one row: best fit, longest first, deterministic. A
    branch is laid out up to its last trainable token, as what follows cannot matter; one without any is left out.
    Ranks get traces by what they cost (`ModelShape`), the costliest first; `Step.imbalance` says how even that is.

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
        share_prefixes: lay out what branches of a row begin with alike, id by id, once: in groups, in the branches of a
            trace, in anything that begins with the same system prompt. Branches that share much are put into one row,
            whose budget then counts a shared token once. Done in each step whose predicted FLOP ratio is above 1.05,
            and where a trace that must lie in one row fits only so; `Step.sharing` has the prediction. The gradient is
            the same. For models whose layers attend alone: `model` refuses recurrent ones.
        skip_zero_advantage: leave out traces whose advantage is 0, which have no gradient, and count them in totals and
            counts. Refused where the objective looks at them nevertheless (`needs.zero_advantage`). A step of which
            nothing is left is there all the same, so that the plan does not depend on rewards: `Step.trains` is False.
        counted: [R] bool: traces that count among the traces and groups of their step though they have no term, as one
            that is masked because it was cut off; `Step.skipped` counts them too. None counts those with a term alone.
        shape: of the model, for predictions; None takes that of Qwen3-4B.
        seed: shuffles the groups; None keeps the order in which they first appear.
        pad_to_multiple_of: rows are padded to a multiple of this with tokens that see only themselves.

    Returns:
        the steps of this rank; of those with `Step.trains` False nothing is to train.

    Raises:
        ArgumentError: if nothing can be trained, a trace is too long, or arguments contradict one another.

    >>> from tracegrad.alignment.sequences import Sequences
    >>> nan = float("nan")
    >>> ids, trainable = [5, 6, 7, 5, 8], [False, True, True, False, True]
    >>> s = Sequences.from_arrays(ids, [0, 3, 5], [nan, -0.5, -0.1, nan, -1.0], trainable, group=[0, 0])
    >>> [step] = pack(s, [1.0, -1.0], token_budget=16)
    >>> step.totals, step.origin.tolist(), step.batches[0].read.tolist()
    (Totals(terms=3, traces=2, groups=1), [1, 2, 4], [0, 1, 3])
    """
    _check_kinds(sequences, needs, shape, too_long, share_prefixes, seed)
    _check(needs, token_budget, ranks, rank, step_groups, pad_to_multiple_of, skip_zero_advantage)
    per_token = advantages_by_token(sequences, advantages, per)
    whole = needs is not None and needs.trace_ratio
    trace = _contiguous(sequences.trace, np.int32)
    cu = _contiguous(sequences.cu_seqlens, np.int64)
    ids, keys = compared_ids(sequences)
    trainable = _contiguous(sequences.trainable, np.bool_)
    fit = (int(token_budget), whole)
    length, terms, lost, over, present, place = _measured(sequences, ids, *fit, share_prefixes, too_long)
    without = np.zeros(sequences.traces, bool)
    masked = without if counted is None else _validation.flags(counted, "counted", length=sequences.traces)
    groups = group_into_steps(sequences, terms, masked, step_groups, seed)
    idle = without_advantage(sequences, per_token, groups) if skip_zero_advantage else without
    length = np.where(idle[trace], 0, length).astype(np.int32)
    shape = shape or ModelShape()
    costs = (shape.token_flop, shape.pair_flop, shape.term_flop)
    least = LEAST_GAIN if share_prefixes else None
    step = _contiguous(groups.step[present], groups.step.dtype)
    weighed = terms + towers_as_terms(sequences, length, shape)
    placed = _Placed(*_core.pack_place(ids, cu, length, weighed, place, step, int(ranks), *fit, costs, least))
    # Every rank holds as many rows; a step that nothing is left of still has one, of padding, as an optimizer may move.
    rows = np.maximum(placed.rows.reshape(-1, ranks).max(1), 1)
    mine = np.where(placed.rank == rank, groups.step[trace], -1).astype(np.int32)
    columns = (ids, trainable, _contiguous(sequences.inv_temperature, np.float32), cu)
    plan = (length, mine, placed.row, placed.order, rows, placed.shared)
    laid = _core.pack_lay(*columns, *plan, int(pad_to_multiple_of))
    layout = Layout(*laid, images=sequences.images, keys=keys)
    idle |= masked & (groups.terms == 0)
    by_term = _by_term(sequences, groups, layout, trace, per_token)
    packed = _Found(groups, placed, layout, by_term, losses(sequences, groups, lost, over), skipped(groups, idle))
    return [_step(packed, share_prefixes, index) for index in range(len(rows))]


MOST = (1 << 31) - 1
"""The most tokens a row holds."""


def measure(
    sequences: Sequences,
    *,
    token_budget: int,
    whole_traces: bool = False,
    share_prefixes: bool = False,
    too_long: Literal["refuse", "drop", "truncate"] = "refuse",
) -> NDArray[np.int64]:
    """[R] int64: the terms of each trace that `pack` lays out, after what it does with traces that are too long.

    Args:
        sequences: R traces.
        whole_traces: `objective.needs.trace_ratio`; the others are as for `pack`.

    Raises:
        ArgumentError: as `pack` does for a trace that is too long.
    """
    _, terms, *_ = _measured(
        sequences, compared_ids(sequences)[0], token_budget, whole_traces, share_prefixes, too_long
    )
    return np.bincount(sequences.trace, terms, minlength=sequences.traces).astype(np.int64)


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


class _Found(NamedTuple):
    """All that is known of the steps."""

    groups: Groups
    placed: _Placed
    layout: Layout
    by_term: dict[str, NDArray[Any]]
    losses: list[TooLong]
    skipped: list[Skipped]


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
    _validation.one_of(per, "per", ("trace", "term", None))
    given = _validation.narrowed(_validation.numbers(advantages, "advantages"), np.float32, "advantages")
    lengths = np.diff(sequences.cu_seqlens)
    if per != "term" and given.shape == (sequences.traces,) and np.isfinite(given).all():
        out = np.repeat(given[sequences.trace], lengths)
        # A fifth of the time that `where` takes.
        return np.multiply(out, sequences.trainable, out=out)
    owner = np.repeat(sequences.trace, lengths)
    terms = sequences.terms
    out = np.zeros(sequences.tokens, np.float32)
    if per != "term" and given.shape == (sequences.traces,):
        out[terms] = given[owner[terms]]
    elif per != "trace" and given.shape == terms.shape:
        out[terms] = given
    else:
        where = f"per={per!r} and there" if per else "there"
        raise ArgumentError(
            f"advantages has shape {given.shape}, but {where} are {sequences.traces} traces and {len(terms)} terms. "
            "Pass one per trace, or one per trainable token."
        )
    bad = terms[~np.isfinite(out[terms])]
    if len(bad):
        name = sequences.trace_name(int(owner[bad[0]]))
        raise ArgumentError(
            f"trace '{name}': the advantage of a trained token is {out[bad[0]]}, and {len(bad)} are not finite. "
            "The gradient would not be a number. Give every trained trace a reward, or leave it out."
        )
    return out


def _measured(
    sequences: Sequences, ids: Ints, token_budget: int, whole: bool, share_prefixes: bool, too_long: str
) -> tuple[Ints, Ints, Counts, Ints, Ints, Ints]:
    """Tokens laid out and terms of each branch; terms lost by trace, and which are too long; the traces that have a
    branch, and which of these each branch is of.
    """
    # Folders of earlier versions may end in traces without a branch; the core counts those that have one.
    present, place = np.unique(_contiguous(sequences.trace, np.int32), return_inverse=True)
    place = place.astype(np.int32)
    names = [sequences.trace_ids[row] for row in present] if sequences.trace_ids else []
    cu = _contiguous(sequences.cu_seqlens, np.int64)
    trainable = _contiguous(sequences.trainable, np.bool_)
    fit = (int(token_budget), whole, share_prefixes, too_long)
    length, terms, cut, over = _core.pack_measure(cu, place, ids, trainable, names, *fit)
    lost = np.zeros(sequences.traces, cut.dtype)
    lost[present] = cut
    return length, terms, lost, present[over], present, place


def _by_term(
    sequences: Sequences, groups: Groups, layout: Layout, trace: Ints, advantages: Floats
) -> dict[str, NDArray[Any]]:
    """Columns of all terms, by the name that they have in a `Step`."""
    of_tokens = {
        "turn": _contiguous(sequences.turn, np.int32),
        "version": _contiguous(sequences.version, np.int32),
        "rollout_logprobs": _contiguous(sequences.rollout_logprobs, np.float32),
        "advantages": advantages,
        "tier": _contiguous(sequences.tier, np.uint8),
    }
    of_branches = {
        "trace": trace,
        "group": _contiguous(sequences.group[trace], np.int32),
        "trace_terms": groups.terms[trace],
        "group_terms": groups.group_terms[trace],
        "group_traces": groups.group_traces[trace],
    }
    found = _core.pack_gather(layout.origin, layout.branch, [*of_tokens.values()], [*of_branches.values()])
    columns = dict(zip([*of_tokens, *of_branches], found, strict=True))
    return {"origin": layout.origin, "branch": layout.branch, **columns}


def _step(packed: _Found, asked: bool, index: int) -> Step:
    groups, placed, layout = packed.groups, packed.placed, packed.layout
    terms = slice(layout.cu_terms[index], layout.cu_terms[index + 1])
    sharing = Sharing(
        shared=bool(placed.shared[index]),
        tokens=int(placed.tokens[index]),
        tree_tokens=int(placed.tree_tokens[index]),
        flop_ratio=float(placed.ratio[index]),
        needed=bool(placed.needed[index]),
    )
    return Step(
        batches=tuple(layout.batch(row) for row in range(layout.cu_rows[index], layout.cu_rows[index + 1])),
        **{name: column[terms] for name, column in packed.by_term.items()},
        totals=groups.totals[index],
        too_long=packed.losses[index],
        skipped=packed.skipped[index],
        sharing=sharing if asked else None,
        load=placed.load.reshape(len(groups.totals), -1)[index],
    )


def _check_kinds(
    sequences: Sequences, needs: Needs | None, shape: ModelShape | None, too_long: str, share: bool, seed: int | None
) -> None:
    _validation.instance(sequences, "sequences", Sequences, "Pass what align() gave.")
    if needs is not None and not hasattr(needs, "trace_ratio"):
        raise ArgumentError(f"needs is {_validation.described(needs)}. Pass objective.needs.")
    if shape is not None:
        _validation.instance(shape, "shape", ModelShape, "Pass ModelShape.of(model.config).")
    _validation.one_of(too_long, "too_long", ("refuse", "drop", "truncate"))
    _validation.flag(share, "share_prefixes")
    if seed is not None:
        _validation.integer(seed, "seed", least=0)


def _check(
    needs: Needs | None, token_budget: int, ranks: int, rank: int, step_groups: int | None, multiple: int, skip: bool
) -> None:
    for name, value in {"token_budget": token_budget, "ranks": ranks, "pad_to_multiple_of": multiple}.items():
        _validation.integer(value, name, least=1, most=MOST)
    if step_groups is not None:
        _validation.integer(step_groups, "step_groups", least=1)
    if _validation.integer(rank, "rank", least=0) >= ranks:
        raise ArgumentError(f"rank is {rank} of {ranks}. Ranks count from 0.")
    _validation.flag(skip, "skip_zero_advantage")
    if skip and (needs is None or needs.zero_advantage):
        why = "it is not known what the objective looks at" if needs is None else needs.zero_advantage
        cure = "Pass needs=objective.needs" if needs is None else "Pass skip_zero_advantage=False"
        raise ArgumentError(
            f"skip_zero_advantage=True, but {why}. A trace whose advantage is 0 could still matter. {cure}."
        )


def _contiguous(values: ArrayLike, dtype: Any) -> Any:
    return np.require(values, dtype, ["C", "A"])
