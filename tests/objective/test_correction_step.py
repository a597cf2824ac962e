"""correction: denominators, ranks that meet in an exchange, and laws that hold for any plan."""

import threading
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tracegrad.errors import ArgumentError
from tracegrad.objective import (
    Aggregation,
    Gamma,
    Gaussian,
    MaskOutside,
    Ratio,
    Reduce,
    Rejection,
    RejectionBudget,
    Truncate,
    Weight,
)
from tracegrad.objective.correction import correct

NAN = float("nan")
MISMATCH = Ratio("old", "rollout")
KEPT_TRACES = Reduce("trace", "mean", denominator="kept")


class TestDenominators:
    # traces of 2, 1 and 1 terms; the first two in one group
    trace = np.array([0, 0, 1, 2])
    group = np.array([0, 0, 0, 1])
    logprobs = np.full(4, -1.0)

    def scale(self, reduce, **options):
        return correct(self.logprobs, self.logprobs, trace=self.trace, group=self.group, reduce=reduce, **options).scale

    @pytest.mark.parametrize(
        ("reduce", "expected"),
        [
            (Reduce("token"), [1 / 4] * 4),
            (Reduce("trace", "mean"), [1 / 6, 1 / 6, 1 / 3, 1 / 3]),
            (Reduce("trace", "sum"), [1 / 3] * 4),
            (Reduce("trace", "sum", norm=10.0), [1 / 30] * 4),
            # 2 groups, of 2 traces and of 1
            (Reduce("group", "mean"), [1 / 8, 1 / 8, 1 / 4, 1 / 2]),
            (Reduce("group", "sum", norm=5.0), [1 / 20, 1 / 20, 1 / 20, 1 / 10]),
            # of 3 terms and of 1
            (Reduce("prompt", "mean"), [1 / 6, 1 / 6, 1 / 6, 1 / 2]),
            (Reduce("prompt", "sum", norm=2.0), [1 / 4] * 4),
            (Reduce("constant", norm=7.0), [1 / 7] * 4),
        ],
    )
    def test_scales_by_hand(self, reduce, expected):
        np.testing.assert_allclose(self.scale(reduce), expected, rtol=1e-15)

    @pytest.mark.parametrize(
        ("reduce", "expected"),
        [
            (Reduce("token", denominator="kept"), [1 / 2] * 4),
            (Reduce("trace", "mean", denominator="kept"), [1 / 2, 1 / 2, 0, 1 / 2]),
            (Reduce("group", "mean", denominator="kept"), [1 / 2, 1 / 2, 0, 1 / 2]),
            (Reduce("group", "sum", denominator="kept"), [1 / 2, 1 / 2, 0, 1 / 2]),
            (Reduce("prompt", "mean", denominator="kept"), [1 / 2] * 4),
        ],
    )
    def test_kept_denominators_count_what_the_gates_left(self, reduce, expected):
        # the first and the third term fall: one of two in trace 0, all of trace 1
        rollout = np.array([-3.0, -1.0, -3.0, -1.0])
        gates = [Rejection(MISMATCH, "k1", high=1.0)]
        found = correct(self.logprobs, rollout, trace=self.trace, group=self.group, reduce=reduce, rejections=gates)
        np.testing.assert_allclose(found.scale, expected, rtol=1e-15)

    def test_totals_over_ranks_stand_in_all_denominators(self):
        given = {
            "totals": SimpleNamespace(terms=100, traces=20, groups=5),
            "group_terms": [10, 10, 10, 1],
            "group_traces": [4, 4, 4, 1],
        }
        for reduce, expected in [
            (Reduce("token"), [1 / 100] * 4),
            (Reduce("trace", "mean"), [1 / 40, 1 / 40, 1 / 20, 1 / 20]),
            (Reduce("group", "mean"), [1 / 40, 1 / 40, 1 / 20, 1 / 5]),
            (Reduce("prompt", "mean"), [1 / 50, 1 / 50, 1 / 50, 1 / 5]),
            (Reduce("prompt", "sum"), [1 / 5] * 4),
        ]:
            np.testing.assert_allclose(self.scale(reduce, **given), expected, rtol=1e-15)
            alone = self.scale(reduce, **given, all_reduce=lambda array, op: array)
            np.testing.assert_allclose(alone, expected, rtol=1e-15)

    def test_groups_that_may_span_ranks_need_totals(self):
        def over_ranks(reduce, **options):
            return self.scale(reduce, all_reduce=lambda array, op: array, **options)

        for per in ("group", "prompt"):
            with pytest.raises(ArgumentError, match=r"TG-RATIO-001.*over.*ranks.*counts.*groups"):
                over_ranks(Reduce(per, "mean"))
            with pytest.raises(ArgumentError, match=r"TG-RATIO-001.*over.*ranks.*counts.*groups"):
                over_ranks(Reduce(per, "mean", denominator="kept"), totals=SimpleNamespace(terms=1, traces=1, groups=1))
            with pytest.raises(ArgumentError, match=r"TG-RATIO-001.*without.*group"):
                correct(self.logprobs, self.logprobs, trace=self.trace, reduce=Reduce(per, "mean"))
        for part in (
            {"rejections": [Rejection(MISMATCH, low=0.5, drops="group")]},
            {"weights": [Weight(MISMATCH, Aggregation("group", "sum"))]},
        ):
            with pytest.raises(ArgumentError, match=r"TG-RATIO-001.*group.*level.*over.*ranks"):
                over_ranks(Reduce(), **part)

    def test_every_part_of_an_objective_finds_its_own_scale(self):
        reductions = (Reduce("constant", norm=3.0), Reduce(), KEPT_TRACES)
        found = correct(
            self.logprobs, self.logprobs, trace=self.trace, reduce=Reduce("trace", "sum"), reductions=reductions
        )
        assert list(found.scales) == [Reduce("trace", "sum"), *reductions]
        assert found.scales[Reduce("trace", "sum")] is found.scale
        np.testing.assert_allclose(found.scales[reductions[0]], [1 / 3] * 4)
        np.testing.assert_allclose(found.scales[KEPT_TRACES], [1 / 6, 1 / 6, 1 / 3, 1 / 3])

    def test_one_number_for_all_terms_takes_no_memory(self):
        found = correct(self.logprobs, self.logprobs, trace=self.trace)
        assert found.scale.strides == (0,)
        assert found.scale.dtype == np.float64
        single = torch.full((4,), -1.0)
        scale = correct(single, single, trace=torch.arange(4)).scale
        assert (scale.stride(), scale.dtype, scale.tolist()) == ((0,), torch.float32, [0.25] * 4)

    @pytest.mark.parametrize("per", ["token", "trace", "group", "prompt", "constant"])
    def test_padding_has_scale_zero_and_rows_may_share_ids(self, per):
        inner = None if per in ("token", "constant") else "mean"
        reduce = Reduce(per, inner, norm=2.0 if per == "constant" else None)
        mask = np.array([[True, False, True], [False, True, False], [False, False, False]])
        logprobs = np.where(mask, -1.0, NAN)
        rows = {"trace": np.array([4, 9, 5]), "group": np.array([1, 1, 2])}
        found = correct(logprobs, logprobs, mask=mask, reduce=reduce, **rows)
        expected = {
            "token": [1 / 3, 1 / 3, 1 / 3],
            "trace": [1 / 4, 1 / 4, 1 / 2],
            "group": [1 / 4, 1 / 4, 1 / 2],
            "prompt": [1 / 3, 1 / 3, 1 / 3],
            "constant": [1 / 2, 1 / 2, 1 / 2],
        }
        np.testing.assert_allclose(found.scale[mask], expected[per], rtol=1e-15)
        assert (found.scale[~mask] == 0).all()


def in_ranks(calls):
    """Runs the calls in threads whose all_reduce meets at a barrier, as ranks do."""
    barrier = threading.Barrier(len(calls), timeout=60)
    slots, found = [None] * len(calls), [None] * len(calls)

    def rank(index):
        def all_reduce(array, op):
            slots[index] = array
            barrier.wait()
            result = {"sum": np.sum, "max": np.max}[op](np.stack(slots), axis=0)
            barrier.wait()
            return result

        try:
            found[index] = calls[index](all_reduce)
        finally:
            if found[index] is None:
                barrier.abort()

    threads = [threading.Thread(target=rank, args=(index,)) for index in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


PARTS = {
    "geometric gate": {"rejections": [Rejection(MISMATCH, "k1", Aggregation("trace", "mean"), low=-0.3, high=0.3)]},
    "batch mean": {"rejections": [Rejection(MISMATCH, "k2", Aggregation("batch", "mean"), high=0.25)]},
    "batch mean over kept": {
        "rejections": [
            Rejection(MISMATCH, high=2.0),
            Rejection(MISMATCH, "k1", Aggregation("batch", "mean"), low=-0.2, terms="kept"),
        ]
    },
    "batch sum as a weight": {"weights": [Weight(MISMATCH, Aggregation("batch", "sum"), Truncate(0.0, 5.0))]},
    "batch maximum as a weight": {"weights": [Weight(MISMATCH, Aggregation("batch", "max", terms="kept"))]},
    "budget": {"rejections": [RejectionBudget(MISMATCH, mean=0.3)]},
    "budget over kept": {
        "rejections": [Rejection(MISMATCH, "k3", high=0.5), RejectionBudget(MISMATCH, "abs", 0.3, terms="kept")]
    },
    "budget in the active quadrants": {"rejections": [RejectionBudget(MISMATCH, mean=0.1, quadrants="active")]},
    "normalised tokens": {"weights": [Weight(MISMATCH, transform=Truncate(0, 2), normalize=True)]},
    "normalised traces": {
        "rejections": [Rejection(MISMATCH, low=0.4)],
        "weights": [Weight(MISMATCH, Aggregation("trace", "sum", terms="kept"), MaskOutside(0.1, 5.0), normalize=True)],
    },
    "a smooth shape of a running product": {
        "weights": [Weight(MISMATCH, Aggregation("trace", "prefix_sum", blend="geometric"), Gamma(2.0, 3.0))]
    },
    "a shape of the running minimum of a turn": {
        "weights": [Weight(MISMATCH, Aggregation("turn", "prefix_min"), Gaussian(0.7))],
        "rejections": [Rejection(MISMATCH, "dprob", low=-0.3, high=0.3, when="A<0", drops="trace")],
    },
    "against the reference": {
        "weights": [Weight(Ratio("ref", "rollout"), Aggregation("turn", "mean", blend="arithmetic"), Truncate(0, 2))],
        "rejections": [Rejection(Ratio("old", "ref"), "binary_kl", low=-0.1, high=0.1, when="A>=0")],
    },
}
REDUCTIONS = [Reduce(), Reduce(denominator="kept"), Reduce("trace", "mean"), KEPT_TRACES, Reduce("constant", norm=9.0)]


def random_step(seed, size=60):
    generator = np.random.default_rng(seed)
    rollout = -generator.exponential(1.0, size)
    old = np.minimum(rollout + generator.normal(0, 0.7, size), -1e-3)
    rollout[generator.random(size) < 0.1] = NAN
    trace = np.sort(generator.integers(0, 12, size))
    return {
        "old": old,
        "rollout": rollout,
        "ref": old + generator.normal(0, 0.3, size),
        "trace": trace,
        "turn": generator.integers(0, 3, size),
        "group": trace // 3,
        "advantages": generator.normal(0, 1, 12)[trace],
    }


def assert_same(found, expected):
    np.testing.assert_allclose(found.weight, expected.weight, rtol=1e-11)
    assert (found.keep == expected.keep).all()
    for reduce, scale in expected.scales.items():
        np.testing.assert_allclose(found.scales[reduce], scale, rtol=1e-14)


@pytest.mark.parametrize("name", list(PARTS))
@settings(max_examples=12, deadline=None)
@given(seed=st.integers(0, 10**6), ranks=st.lists(st.integers(0, 2), min_size=12, max_size=12))
def test_any_split_of_the_traces_over_ranks_gives_the_same(name, seed, ranks):
    step, plan = random_step(seed), {**PARTS[name], "reduce": REDUCTIONS[0], "reductions": REDUCTIONS[1:]}
    whole = correct(**step, **plan)
    here = [np.array(ranks)[step["trace"]] == rank for rank in range(3)]  # a rank may be empty

    def call(mine):
        columns = {name: column[mine] for name, column in step.items()}
        return lambda all_reduce: correct(**columns, all_reduce=all_reduce, **plan)

    found = in_ranks([call(mine) for mine in here])
    for mine, rank in zip(here, found, strict=True):
        part = SimpleNamespace(
            weight=whole.weight[mine],
            keep=whole.keep[mine],
            scales={reduce: scale[mine] for reduce, scale in whole.scales.items()},
        )
        assert_same(rank, part)
        assert rank.metrics == pytest.approx(whole.metrics, rel=1e-10)


@pytest.mark.parametrize("name", list(PARTS))
@pytest.mark.parametrize("missing", ["mask", "ratio_one"])
@settings(max_examples=12, deadline=None)
@given(seed=st.integers(0, 10**6))
def test_a_permutation_of_the_terms_permutes_the_results(name, missing, seed):
    step, plan = random_step(seed), {**PARTS[name], "reduce": REDUCTIONS[0], "reductions": REDUCTIONS[1:]}
    order = np.random.default_rng(seed + 1).permutation(60)
    if "running" in name:  # the order of the terms within a trace counts
        order = np.concatenate([np.flatnonzero(step["trace"] % 5 == rest) for rest in (3, 0, 4, 2, 1)])
    plan["missing_logprobs"] = missing
    first = correct(**step, **plan)
    second = correct(**{name: column[order] for name, column in step.items()}, **plan)
    expected = SimpleNamespace(
        weight=first.weight[order],
        keep=first.keep[order],
        scales={reduce: scale[order] for reduce, scale in first.scales.items()},
    )
    assert_same(second, expected)


@pytest.mark.parametrize("name", list(PARTS))
@settings(max_examples=12, deadline=None)
@given(seed=st.integers(0, 10**6), junk=st.sampled_from([NAN, float("inf"), -float("inf"), 1e30, -9999.0]))
def test_padding_is_never_read(name, seed, junk):
    step, plan = random_step(seed), {**PARTS[name], "reduce": REDUCTIONS[0], "reductions": REDUCTIONS[1:]}
    mask = np.random.default_rng(seed + 2).random((5, 30)) < 0.4
    while mask.sum() != 60:  # 60 terms on 150 positions
        places = np.flatnonzero(mask.reshape(-1) == (mask.sum() > 60))
        mask.reshape(-1)[places[0]] ^= True

    def spread(column):
        padded = np.full(mask.shape, junk if column.dtype.kind == "f" else 10**6, column.dtype)
        padded[mask] = column
        return padded

    flat = correct(**step, **plan)
    padded = correct(**{name: spread(column) for name, column in step.items()}, mask=mask, **plan)
    expected = SimpleNamespace(weight=flat.weight, keep=flat.keep, scales=flat.scales)
    for values in (padded.weight, padded.keep, *padded.scales.values()):
        assert (values[~mask] == 0).all()
    found = SimpleNamespace(
        weight=padded.weight[mask],
        keep=padded.keep[mask],
        scales={reduce: scale[mask] for reduce, scale in padded.scales.items()},
    )
    assert_same(found, expected)
    assert np.isfinite(list(padded.metrics.values())).all()


def test_ranks_without_any_term_meet_the_others():
    none = {"old": np.zeros(0), "rollout": np.zeros(0), "trace": np.zeros(0, int)}
    for plan in PARTS.values():
        plan = {key: [part for part in parts if "ref" not in part.ratio] for key, parts in plan.items()}
        step = {**none, "turn": np.zeros(0, int), "advantages": np.zeros(0)}
        found = in_ranks([lambda all_reduce, plan=plan, step=step: correct(**step, all_reduce=all_reduce, **plan)] * 2)
        assert [len(rank.weight) for rank in found] == [0, 0]


def test_what_all_reduce_raises_or_forgets_is_told():
    logprobs = np.full(3, -1.0)

    def fails(array, op):
        raise ConnectionError("rank 3 is gone")

    with pytest.raises(ConnectionError):
        correct(logprobs, logprobs, trace=np.arange(3), all_reduce=fails)
    with pytest.raises(ArgumentError, match=r"TG-BORDER-012.*all_reduce.*1"):
        correct(logprobs, logprobs, trace=np.arange(3), all_reduce=lambda array, op: array[:1])


@pytest.mark.parametrize("kind", [np.int32, np.int64, np.int16, np.uint8])
def test_ids_of_any_width_group_alike(kind):
    step = random_step(0)
    expected = correct(**step, **PARTS["geometric gate"])
    step |= {name: step[name].astype(kind) for name in ("trace", "turn", "group")}
    assert_same(correct(**step, **PARTS["geometric gate"]), expected)


def test_a_large_step_is_the_same_in_any_pieces():
    # several shares of 65,536 terms: a trace gate and token weights have no sum over traces, so pieces are exact
    generator = np.random.default_rng(5)
    rollout = -generator.exponential(1.0, 300_000).astype(np.float32)
    old = rollout + generator.normal(0, 0.5, 300_000).astype(np.float32)
    old, trace = np.minimum(old, 0), np.arange(300_000, dtype=np.int32) // 500
    plan = {
        "rejections": [
            Rejection(MISMATCH, "ratio", Aggregation("trace", "mean"), low=0.97, high=1.03),
            Rejection(MISMATCH, "k3", high=2.0),
        ],
        "weights": [
            Weight(MISMATCH, transform=Truncate(0.0, 2.0)),
            Weight(MISMATCH, Aggregation("trace", "sum"), Truncate(0.5, 2.0)),
        ],
    }
    whole = correct(old, rollout, trace=trace, **plan)
    assert 0.1 < whole.keep.mean() < 0.9
    for start in range(0, 300_000, 50_000):
        here = slice(start, start + 50_000)
        piece = correct(old[here], rollout[here], trace=trace[here], **plan)
        assert (piece.weight == whole.weight[here]).all()
        assert (piece.keep == whole.keep[here]).all()
