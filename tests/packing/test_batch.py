"""Packing: what lies where, what is counted, what is refused."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import tracegrad
from tracegrad.alignment.sequences import Sequences
from tracegrad.errors import ArgumentError
from tracegrad.objective import Reduce
from tracegrad.objective.correction import Correction
from tracegrad.packing import Batch, Step, Totals, TruncationLoss, pack
from tracegrad.packing.batch import SkippedTraces

WHOLE = SimpleNamespace(old=False, rollout=False, ref=False, trace_ratio=True)


def sequences(lengths, terms, trace=None, group=None, **more):
    """Branches of the given lengths; `terms` lists the trainable positions of each. Ids count up over all tokens."""
    cu = np.concatenate([[0], np.cumsum(lengths)])
    trainable = np.zeros(cu[-1], bool)
    for start, places in zip(cu, terms, strict=False):
        trainable[start + np.asarray(places, int)] = True
    logprobs = np.where(trainable, -np.arange(cu[-1]) / 100, np.nan)
    return Sequences.from_arrays(np.arange(cu[-1]), cu, logprobs, trainable, trace=trace, group=group, **more)


# Trace 0: 4 tokens, terms 1 2. Trace 1: branches of 3 (term 2) and 5 (terms 1 4). Trace 2: none. Trace 3: 2 (term 1).
SMALL = sequences([4, 3, 5, 6, 2], [[1, 2], [2], [1, 4], [], [1]], trace=[0, 1, 1, 2, 3], group=[7, 7, 7, 3])


@st.composite
def ragged(draw):
    branches = draw(st.lists(st.tuples(st.integers(2, 12), st.booleans()), min_size=1, max_size=25))
    lengths = [length for length, _ in branches]
    trace = np.cumsum([0, *[fresh for _, fresh in branches[1:]]])
    terms = [draw(st.lists(st.integers(1, length - 1), unique=True, max_size=4)) for length in lengths]
    terms[0] = terms[0] or [1]
    group = draw(st.lists(st.integers(0, 4), min_size=int(trace[-1]) + 1, max_size=int(trace[-1]) + 1))
    return sequences(lengths, terms, trace=trace, group=group, inv_temperature=np.linspace(0.5, 2, sum(lengths)))


def test_a_step_holds_its_terms_by_trace_branch_and_position():
    [step] = pack(SMALL, [1.0, -1.0, 9.0, 0.5], tokens_per_row=8)
    # Tokens of the branches begin at 0, 4, 7, 12, 18.
    assert step.origin.tolist() == [1, 2, 6, 8, 11, 19]
    assert step.trace.tolist() == [0, 0, 1, 1, 1, 3]
    assert step.branch.tolist() == [0, 0, 1, 2, 2, 4]
    assert step.group.tolist() == [7, 7, 7, 7, 7, 3]
    assert step.turn.tolist() == [0] * 6
    assert step.version.tolist() == [-1] * 6
    assert step.advantages.tolist() == [1.0, 1.0, -1.0, -1.0, -1.0, 0.5]
    assert step.rollout_logprobs.tolist() == pytest.approx([-0.01, -0.02, -0.06, -0.08, -0.11, -0.19])
    assert step.trace_terms.tolist() == [2, 2, 3, 3, 3, 1]
    assert step.group_terms.tolist() == [5, 5, 5, 5, 5, 1]
    assert step.group_traces.tolist() == [2, 2, 2, 2, 2, 1]  # trace 2 has no term
    assert step.totals == Totals(terms=6, traces=3, groups=2)
    assert step.old_logprobs is None
    assert step.ref_logprobs is None


def test_a_trace_without_a_term_counts_where_that_is_told():
    alone = sequences([3, 3, 2, 4], [[1, 2], [], [], [1]], trace=[0, 1, 2, 3], group=[0, 0, 1, 2])
    counted = [False, True, True, False]
    both, last = pack(alone, np.zeros(4), tokens_per_row=8, count_always=counted, groups_per_step=2)
    assert both.origin.tolist() == [1, 2]
    # Two terms of one trace; its group has a second trace, and a second group has a trace, neither with a term.
    assert both.totals == Totals(terms=2, traces=3, groups=2)
    assert both.group_traces.tolist() == [2, 2]
    assert (both.skipped, both.has_trained_tokens) == (SkippedTraces(traces=2, tokens=0), True)
    assert last.totals == Totals(terms=1, traces=1, groups=1)
    (step,) = pack(alone, np.zeros(4), tokens_per_row=8)
    assert step.totals == Totals(terms=3, traces=2, groups=2)
    each = pack(alone, np.zeros(4), tokens_per_row=8, count_always=counted, groups_per_step=1)
    assert [(step.totals.terms, step.has_trained_tokens) for step in each] == [(2, True), (0, False), (1, True)]


def test_rows_are_filled_longest_first_and_branches_end_with_their_last_term():
    [step] = pack(SMALL, np.zeros(4), tokens_per_row=8)
    # Laid lengths 3, 3, 5, 0, 2: 5 opens row 0, 3 fills it, 3 opens row 1, 2 joins it.
    first, second = step.batches
    assert first.ids.tolist() == [0, 1, 2, 7, 8, 9, 10, 11]
    assert first.positions.tolist() == [0, 1, 2, 0, 1, 2, 3, 4]
    assert first.tree_end.tolist() == [3, 3, 3, 8, 8, 8, 8, 8]
    assert first.read.tolist() == [0, 1, 3, 6]
    assert first.target.tolist() == [1, 2, 8, 11]
    assert first.logit_row.tolist() == [0, 1, 2, 3]
    assert first.term.tolist() == [0, 1, 3, 4]
    assert second.ids.tolist() == [4, 5, 6, 18, 19]
    assert second.term.tolist() == [2, 5]


@settings(max_examples=60, deadline=None)
@given(ragged(), st.integers(12, 40), st.integers(1, 3), st.integers(1, 3), st.integers(0, 3), st.sampled_from([1, 8]))
def test_over_all_ranks_every_term_is_read_once_where_it_is_predicted(s, budget, groups, ranks, seed, multiple):
    per_rank = [
        pack(
            s,
            np.arange(s.traces),
            tokens_per_row=budget,
            groups_per_step=groups,
            ranks=ranks,
            rank=rank,
            seed=seed,
            pad_to_multiple_of=multiple,
        )
        for rank in range(ranks)
    ]
    seen = []
    for steps in zip(*per_rank, strict=True):
        assert len({step.totals for step in steps}) == 1
        assert len({len(step.batches) for step in steps}) == 1
        assert steps[0].totals.terms == sum(len(step) for step in steps)
        assert steps[0].totals.groups <= groups
        homes = [set(step.trace.tolist()) for step in steps]
        assert sum(map(len, homes)) == len(set().union(*homes)) == steps[0].totals.traces
        for step in steps:
            check_step(s, step, budget, multiple)
            seen += step.origin.tolist()
    assert sorted(seen) == s.terms.tolist()


def check_step(s: Sequences, step: Step, budget: int, multiple: int):
    assert (np.diff(step.origin) > 0).all()
    assert np.array_equal(step.advantages, step.trace)
    places = np.concatenate([batch.term for batch in step.batches])
    assert sorted(places.tolist()) == list(range(len(step)))
    for batch in step.batches:
        assert len(batch.ids) % multiple == 0
        assert len(batch.ids) <= -(-budget // multiple) * multiple
        origin = step.origin[batch.term]
        assert np.array_equal(batch.target, s.ids[origin])
        assert np.array_equal(batch.ids[batch.read], s.ids[origin - 1])
        assert np.array_equal(batch.inv_temperature, s.inv_temperature[origin])
        assert np.array_equal(batch.logit_row, np.arange(len(batch.term)))
        check_tree(s, batch, step.branch[batch.term], origin)


def check_tree(s: Sequences, batch: Batch, branch, origin):
    index = np.arange(len(batch.ids))
    seen = (index[None, :] <= index[:, None]) & (index[:, None] < batch.tree_end[None, :])
    for read, n, token in zip(batch.read, branch, origin, strict=True):
        context = s.ids[s.cu_seqlens[n] : token]  # all that stands before the term in its branch, and nothing else
        assert batch.ids[seen[read]].tolist() == context.tolist()
        assert batch.positions[seen[read]].tolist() == list(range(len(context)))


@settings(max_examples=30, deadline=None)
@given(ragged())
def test_counts_are_those_of_the_whole_step(s):
    owner = np.repeat(s.trace, np.diff(s.cu_seqlens))[s.terms]
    for rank in range(2):
        for step in pack(s, np.zeros(s.traces), tokens_per_row=20, groups_per_step=2, ranks=2, rank=rank):
            for place in range(len(step)):
                same = s.group[owner] == step.group[place]
                assert step.trace_terms[place] == (owner == step.trace[place]).sum()
                assert step.group_terms[place] == same.sum()
                assert step.group_traces[place] == len(set(owner[same]))


def test_a_rank_with_less_work_gets_batches_of_padding():
    s = sequences([9, 9, 9], [[8], [8], [8]])
    steps = [pack(s, np.ones(3), tokens_per_row=9, ranks=2, rank=rank, pad_to_multiple_of=4)[0] for rank in range(2)]
    assert [len(step.batches) for step in steps] == [2, 2]
    assert [len(step) for step in steps] == [2, 1]
    empty = steps[1].batches[1]
    assert len(empty.term) == len(empty.read) == len(empty.logit_row) == 0
    assert empty.tree_end.tolist() == [1, 2, 3, 4]
    assert empty.positions.tolist() == [0] * 4


def test_groups_stay_together_in_the_order_of_their_first_trace():
    s = sequences([2] * 6, [[1]] * 6, group=[5, 1, 5, 9, 1, 9])
    steps = pack(s, np.zeros(6), tokens_per_row=100, groups_per_step=2)
    assert [sorted(set(step.group.tolist())) for step in steps] == [[1, 5], [9]]
    assert [step.totals.groups for step in steps] == [2, 1]


def test_a_seed_shuffles_groups_and_gives_the_same_plan_again():
    s = sequences([2] * 40, [[1]] * 40, group=np.arange(40) // 2)

    def plan(seed):
        return [
            tuple(step.origin.tolist())
            for step in pack(s, np.zeros(40), tokens_per_row=8, groups_per_step=3, seed=seed)
        ]

    assert plan(1) == plan(1)
    assert plan(1) != plan(2)
    assert sorted(sum(plan(1), ())) == sorted(sum(plan(None), ()))


def test_advantages_may_be_given_per_term():
    [step] = pack(SMALL, np.arange(6) / 10, tokens_per_row=8)
    assert step.advantages.tolist() == pytest.approx([0.0, 0.1, 0.2, 0.3, 0.4, 0.5])


def test_a_trace_longer_than_the_budget_is_refused_by_name():
    s = sequences([3, 9, 8], [[2], [8], [7]])
    with pytest.raises(ArgumentError, match=r"TG-PACK-517: trace '1': branch 0 .*9.*5 \(2 .*9"):
        pack(s, np.zeros(3), tokens_per_row=5)


def test_dropped_traces_are_counted_in_the_step_of_their_group():
    s = sequences([3, 3, 9, 9], [[2], [2], [7, 8], [8]], group=[0, 1, 1, 2])
    steps = pack(s, np.zeros(4), tokens_per_row=5, groups_per_step=1, too_long="drop")
    assert [step.totals for step in steps] == [Totals(1, 1, 1), Totals(1, 1, 1)]
    # Group 2 is gone, so its trace stands in the first step.
    assert [step.too_long for step in steps] == [TruncationLoss(("3",), 1), TruncationLoss(("2",), 2)]
    assert [step.group_traces.tolist() for step in steps] == [[1], [1]]


def test_truncated_branches_keep_the_terms_before_the_budget():
    s = sequences([3, 9], [[2], [1, 3, 8]])
    [step] = pack(s, np.zeros(2), tokens_per_row=5, too_long="truncate")
    assert step.origin.tolist() == [2, 4, 6]
    assert step.trace_terms.tolist() == [1, 2, 2]
    assert step.too_long == TruncationLoss(("1",), 1)
    assert max(len(batch.ids) for batch in step.batches) == 4


def test_an_objective_over_whole_traces_keeps_them_in_one_row():
    s = sequences([4, 5, 4, 5], [[3], [4], [3], [4]], trace=[0, 0, 1, 1])
    loose = pack(s, np.zeros(2), tokens_per_row=10)[0].batches
    whole = pack(s, np.zeros(2), tokens_per_row=10, requirements=WHOLE)[0].batches
    assert [batch.term.tolist() for batch in loose] == [[1, 3], [0, 2]]
    assert [batch.term.tolist() for batch in whole] == [[0, 1], [2, 3]]
    with pytest.raises(ArgumentError, match=r"TG-PACK-517.*9"):
        pack(s, np.zeros(2), tokens_per_row=8, requirements=WHOLE)
    with pytest.raises(ArgumentError, match="TG-PACK-515"):
        pack(s, np.zeros(2), tokens_per_row=8, requirements=WHOLE, too_long="truncate")


def test_logprobs_come_back_in_the_order_of_the_step():
    [step] = pack(SMALL, np.zeros(4), tokens_per_row=8)
    per_batch = [np.float32(batch.term) * -1 for batch in step.batches]
    assert step.with_logprobs(old=per_batch).old_logprobs.tolist() == [0, -1, -2, -3, -4, -5]
    flat = step.with_logprobs(ref=np.linspace(-1, 0, 6))
    assert flat.ref_logprobs.dtype == np.float64
    assert flat.old_logprobs is None
    assert step.ref_logprobs is None
    with pytest.raises(ArgumentError, match=r"TG-PACK-004.*old_logprobs"):
        step.with_logprobs(old=per_batch[::-1])
    with pytest.raises(ArgumentError, match=r"TG-PACK-004.*ref_logprobs"):
        step.with_logprobs(ref=np.zeros(5))


def test_lag_counts_versions_behind_the_policy_that_is_trained():
    [step] = pack(SMALL, np.ones(4), tokens_per_row=8)
    step = replace(step, version=np.array([3, 3, 5, 0, -1, 2], np.int32))
    assert step.staleness(5).tolist() == [2, 2, 0, 5, -1, 3]
    assert step.staleness(7).tolist() == [4, 4, 2, 7, -1, 5]
    assert step.staleness(None).tolist() == [-1] * 6
    with pytest.raises(ArgumentError, match=r"TG-PACK-003.*4.*5"):
        step.staleness(4)


def test_imbalance_is_the_busiest_rank_over_the_mean():
    [step] = pack(SMALL, np.ones(4), tokens_per_row=8)
    assert replace(step, load=np.array([5.0, 2.0, 3.0, 2.0])).imbalance == 5 / 3
    assert replace(step, load=np.array([0.25, 0.75])).imbalance == 1.5
    assert replace(step, load=np.zeros(3)).imbalance == 1.0


@pytest.mark.parametrize(
    ("dropped", "weightless", "idle"),
    [
        (False, False, [True, True, False, True]),
        (True, False, [False, True, False, True]),
        (False, True, [True, False, False, False]),
        (True, True, [False, False, False, False]),
    ],
)
def test_a_term_is_idle_where_nothing_else_looks_at_it(dropped, weightless, idle):
    [step] = pack(sequences([5], [[1, 2, 3, 4]]), [1.0], tokens_per_row=8)
    step = replace(step, advantages=np.array([1.0, 1.0, 1.0, 0.0]))  # the first is dropped, the second without weight
    corrected = Correction(np.array([2.0, 0.0, 1.0, 1.0]), np.array([False, True, True, True]), np.ones(4), {})
    assert (
        step.tokens_without_gradient(
            SimpleNamespace(dropped_reason=dropped, zero_weight_reason=weightless), corrected
        ).tolist()
        == idle
    )


def test_padding_is_no_token_of_a_row():
    # One branch of 5 and one of 2, in rows of 5; both are padded to 6.
    [step] = pack(sequences([5, 2], [[1, 4], [1]]), np.ones(2), tokens_per_row=5, pad_to_multiple_of=6)
    assert [(len(batch.ids), batch.tokens) for batch in step.batches] == [(6, 5), (6, 2)]


def test_terms_are_gathered_from_the_step_for_one_batch():
    torch = pytest.importorskip("torch")
    [step] = pack(SMALL, [1.0, -1.0, 0.0, 0.5], tokens_per_row=8)
    step = step.with_logprobs(old=np.arange(6, dtype=np.float32) * -1)
    scales = {Reduce("constant", norm=2.0): np.full(6, 0.5, np.float32)}
    corrected = Correction(np.arange(6.0), np.arange(6) > 2, np.full(6, 0.25, np.float32), {}, scales)
    second = step.batches[1].to("cpu")
    assert second.ids.dtype == second.read.dtype == torch.int64
    terms = step.terms(second, corrected)
    assert terms.old.tolist() == [-2, -5]
    assert terms.rollout.tolist() == pytest.approx([-0.06, -0.19])
    assert terms.ref is None
    assert terms.advantages.tolist() == [-1.0, 0.5]
    assert terms.weight.tolist() == [2.0, 5.0]
    assert terms.keep.tolist() == [False, True]
    assert terms.scale.tolist() == [0.25, 0.25]
    assert {reduce: scale.tolist() for reduce, scale in terms.scales.items()} == {next(iter(scales)): [0.5, 0.5]}
    assert terms.alpha is None
    assert replace(step, alpha=np.arange(6.0)).terms(second, corrected).alpha.tolist() == [2.0, 5.0]
    assert (terms.trace.tolist(), terms.turn.tolist(), terms.group.tolist()) == ([1, 3], [0, 0], [7, 3])


def test_as_many_terms_as_traces_are_told_apart_by_a_word():
    one_each = Sequences.from_arrays([5, 6, 7, 5, 8], [0, 3, 5], [np.nan, -1, -2, np.nan, np.nan], [0, 1, 1, 0, 0])
    [by_trace] = pack(one_each, [1.0, -1.0], tokens_per_row=8)
    [by_term] = pack(one_each, [1.0, -1.0], tokens_per_row=8, per="term")
    assert (by_trace.advantages.tolist(), by_term.advantages.tolist()) == ([1.0, 1.0], [1.0, -1.0])
    [undecided] = pack(sequences([3, 3], [[1, 2], []]), [0.5, 9.0], tokens_per_row=8)
    assert undecided.advantages.tolist() == [0.5, 0.5]
    with pytest.raises(ArgumentError, match=r"TG-PACK-009.*2.*per='trace"):
        pack(SMALL, [1.0, -1.0], tokens_per_row=8, per="trace")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"per": "turn"}, r"TG-ARGS-008.*turn"),
        ({"skip_zero_advantage": True}, "TG-PACK-013"),
        ({"pad_to_multiple_of": 0}, r"TG-ARGS-005.*pad_to_multiple_of.*0"),
        ({"tokens_per_row": 0}, r"TG-ARGS-005.*tokens_per_row.*0"),
        ({"groups_per_step": 0}, r"TG-ARGS-005.*groups_per_step.*0"),
        ({"ranks": 2, "rank": 2}, r"TG-PACK-012.*2"),
        ({"ranks": 2, "rank": 5}, r"TG-PACK-012.*5.*2"),
        ({"too_long": "cut"}, r"TG-ARGS-008.*too_long.*cut"),
        ({"advantages": np.zeros(5)}, r"TG-PACK-009.*4.*6"),
        ({"advantages": [0, np.nan, 0, 0]}, r"TG-PACK-010.*1"),
    ],
)
def test_arguments_that_make_no_sense_are_refused(change, message):
    arguments = {"advantages": np.zeros(4), "tokens_per_row": 8} | change
    with pytest.raises(ArgumentError, match=message):
        pack(SMALL, arguments.pop("advantages"), **arguments)


def test_nothing_to_train_is_an_error():
    with pytest.raises(ArgumentError, match="TG-PACK-008"):
        pack(sequences([3, 3], [[], []]), np.zeros(2), tokens_per_row=8)
    with pytest.raises(ArgumentError, match="TG-PACK-008"):
        pack(sequences([9], [[8]]), np.zeros(1), tokens_per_row=4, too_long="drop")


def test_a_first_token_cannot_be_trained():
    s = Sequences.from_arrays([1, 2], [0, 2], [-0.1, -0.1], [True, True])
    with pytest.raises(ArgumentError, match=r"TG-PACK-516: trace '0': .*branch 0"):
        pack(s, [1.0], tokens_per_row=8)


def test_a_trace_of_which_nothing_was_sampled_stands_beside_those_that_have_branches():
    """The second of three records ends with the question; its neighbours are trained as if it were not there.

    Its branch has no token.
    """
    model = tracegrad.Tokenizer.from_pretrained(Path(__file__).parents[2] / "examples" / "quickstart" / "model")
    ask, say = {"role": "user", "content": "2+3="}, {"role": "assistant", "content": "5"}
    records = [{"messages": turns, "reward": 1} for turns in ([ask, say], [ask], [ask, say])]
    found = tracegrad.align(tracegrad.read(records), model, text_only=True)
    assert (found.traces, found.trace.tolist(), np.diff(found.cu_seqlens).argmin()) == (3, [0, 1, 2], 1)
    [step] = pack(found, [1.0, 0.5, -1.0], tokens_per_row=512)
    neighbours = tracegrad.align(tracegrad.read([records[0], records[2]]), model, text_only=True)
    [alone] = pack(neighbours, [1.0, -1.0], tokens_per_row=512)
    assert set(step.trace.tolist()) == {0, 2}
    assert step.totals.terms == alone.totals.terms > 0
    assert step.advantages.tolist() == alone.advantages.tolist()
    assert step.batches[0].ids.tolist() == alone.batches[0].ids.tolist()
