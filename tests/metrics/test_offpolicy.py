"""OffPolicy: each number by hand or by numpy, and the same from the parts of a step as from the whole."""

import math
import re
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tracegrad.errors import ArgumentError
from tracegrad.metrics import OFF_POLICY, OffPolicySums, aggregate

NAN = math.nan


def step(seed=0, traces=40, outlier=30.0):
    """A step of ragged traces of several turns, with missing logprobs, gates, outliers, unknown versions."""
    rng = np.random.default_rng(seed)
    lengths = rng.integers(1, 30, traces)
    trace = np.repeat(rng.permutation(traces * 3)[:traces], lengths)
    m = len(trace)
    rollout = -rng.exponential(0.7, m)
    old = rollout + rng.normal(0, 0.2, m)
    old[0], old[1] = rollout[0] + outlier, rollout[1] - outlier
    rollout[rng.random(m) < 0.1] = NAN
    weight = np.where(np.isnan(rollout), 0.0, np.minimum(np.exp(np.clip(np.nan_to_num(old - rollout), -20, 20)), 2.0))
    theta = old + rng.normal(0, 0.05, m)
    advantages = np.repeat(rng.choice([-1.0, 0.0, 0.5], traces), lengths)
    turn = np.concatenate([np.sort(rng.integers(0, 11, n)) for n in lengths])
    staleness = np.repeat(rng.choice([-1, 0, 1, 5, 40], traces), lengths)
    return {
        "trace": trace,
        "old": old,
        "rollout": rollout,
        "theta": theta,
        "ref": theta + rng.normal(0, 0.1, m),
        "keep": rng.random(m) > 0.2,
        "weight": weight,
        "advantages": advantages,
        "gradient": -advantages * weight / m,
        "turn": turn,
        "alignment_level": np.repeat(rng.choice([0, 2, 255], traces), lengths).astype(np.uint8),
        "staleness": staleness,
    }


def measured(arrays, at=slice(None)):
    return OffPolicySums.of(**{name: values[at] for name, values in arrays.items()})


def assert_equal(found, expected):
    """Counts and extrema of terms to the last bit, sums to 1e-12, and what is read of them; percentiles exactly."""
    for name, value in expected.sums.counts.items():
        assert (found.sums.counts[name] == value).all(), name
    for name, value in expected.sums.maxima.items():
        exact = "magnitude" not in name  # the largest sum over a trace is a sum
        assert found.sums.maxima[name] == pytest.approx(value, rel=0 if exact else 1e-12, abs=0), name
    for name, value in expected.sums.totals.items():
        assert found.sums.totals[name] == pytest.approx(value, rel=1e-12, abs=1e-12), name
    a, b = found.values(), expected.values()
    assert list(a) == list(b)
    assert a == pytest.approx(b, rel=1e-9, abs=1e-11, nan_ok=True)
    percentiles = [name for name in a if re.search(r"_p\d", name)]
    assert [a[name] for name in percentiles] == [b[name] for name in percentiles]


@settings(max_examples=12, deadline=None)
@given(st.integers(0, 10_000), st.lists(st.integers(0, 39), max_size=6))
def test_parts_cut_between_traces_are_the_whole(seed, cuts):
    arrays = step(seed)
    starts = np.flatnonzero(np.diff(arrays["trace"], prepend=-1))
    ends = [0, *sorted(starts[cut] for cut in cuts), len(arrays["trace"])]
    parts = [measured(arrays, slice(a, b)) for a, b in pairwise(ends)]
    assert_equal(sum(parts[1:], start=parts[0]), measured(arrays))


def test_terms_in_any_order_and_dealt_to_ranks_by_trace_are_the_whole():
    arrays = step()
    order = np.random.default_rng(1).permutation(len(arrays["trace"]))
    shuffled = {name: values[order] for name, values in arrays.items()}
    assert_equal(measured(shuffled), measured(arrays))
    ranks = [measured(shuffled, shuffled["trace"] % 3 == rank) for rank in range(3)]
    assert_equal(ranks[0] + ranks[1] + ranks[2], measured(arrays))


def test_what_is_of_terms_does_not_mind_a_cut_inside_a_trace():
    arrays = step()
    whole = measured(arrays).values()
    every_other = np.arange(len(arrays["trace"])) % 2 == 0
    parts = (measured(arrays, every_other) + measured(arrays, ~every_other)).values()
    of_traces = ("trace", "perplexity", "_se")
    for name in whole:
        if not any(word in name for word in of_traces):
            assert parts[name] == pytest.approx(whole[name], rel=1e-9, nan_ok=True), name
    assert parts["chi2_trace"] != pytest.approx(whole["chi2_trace"])


def test_an_empty_part_adds_nothing():
    arrays = step()
    assert_equal(measured(arrays) + measured(arrays, slice(0, 0)), measured(arrays))
    assert measured(arrays, slice(0, 0)).values() == {}


def test_ranks_that_met_other_turns_fit_together():
    arrays = step()
    first = arrays["turn"] == 0
    found = (measured(arrays, first) + measured(arrays, ~first)).values()
    assert found["tokens_with_rollout_logprob/turn_0"] == np.sum(first & ~np.isnan(arrays["rollout"]))


def test_two_processes_reduce_to_the_whole(tmp_path):
    torch = pytest.importorskip("torch")
    if not torch.distributed.is_available():
        pytest.skip("this torch has no distributed package")
    arguments = (str(tmp_path / "store"), str(tmp_path))
    torch.multiprocessing.start_processes(_rank, arguments, nprocs=2, start_method="fork")
    whole = measured(step())
    for rank in range(2):
        found = np.load(tmp_path / f"{rank}.npz")
        expected = whole.values()
        assert found["names"].tolist() == list(expected)
        assert found["values"] == pytest.approx(list(expected.values()), rel=1e-9, abs=1e-11, nan_ok=True)


def _rank(rank, store, out):
    import torch
    from torch import distributed

    distributed.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    operations = {"sum": distributed.ReduceOp.SUM, "max": distributed.ReduceOp.MAX}

    def all_reduce(array, op):
        tensor = torch.from_numpy(array.copy())
        distributed.all_reduce(tensor, operations[op])
        return tensor.numpy()

    arrays = step()
    named = measured(arrays, arrays["trace"] % 2 == rank).all_reduce(all_reduce).values()
    np.savez(f"{out}/{rank}.npz", names=list(named), values=list(named.values()))
    distributed.destroy_process_group()


def test_the_numbers_are_worked_by_hand():
    """Traces 7 (two terms: ratios 2 and 1/2) and 3 (ratio 1, and a term without a rollout logprob)."""
    two = math.log(2)
    found = OffPolicySums.of(
        [-1.0, -2.0, -0.5, -0.1],
        [-1.0 - two, -2.0 + two, -0.5, NAN],
        trace=[7, 7, 3, 3],
        weight=[1.5, 0.5, 1.0, 0.0],
        keep=[True, True, False, True],
        advantages=[1.0, 1.0, -1.0, -1.0],
        gradient=[-3.0, -1.0, 2.0, 2.0],
    ).values()
    assert found["tokens_with_rollout_logprob"] == 3
    assert found["old_rollout_ratio_mean"] == pytest.approx(3.5 / 3)
    assert (found["old_rollout_ratio_min"], found["old_rollout_ratio_max"]) == (pytest.approx(0.5), pytest.approx(2.0))
    assert found["old_rollout_ratio_p50"] == 1.0
    assert found["old_rollout_ratio_ess_count"] == pytest.approx(3.5**2 / (4 + 0.25 + 1))
    assert found["old_rollout_ratio_ess"] == pytest.approx(3.5**2 / 5.25 / 3)
    assert found["old_rollout_ratio_trace_ess"] == pytest.approx(1.0)  # both products are 1
    assert found["kl_rollout_old_k1"] == pytest.approx(0.0)
    assert found["kl_rollout_old_k2"] == pytest.approx(two**2 / 3)  # 2 * log(2)^2 / 2 over three terms
    assert found["kl_rollout_old_k3"] == pytest.approx((2 - 1 - two + 0.5 - 1 + two) / 3)
    assert found["chi2_token"] == pytest.approx(5.25 / 3 - 1)
    assert found["chi2_trace"] == pytest.approx(0.0)
    assert found["perplexity_old"] == pytest.approx((math.exp(1.5) + math.exp(0.5)) / 2)
    assert found["perplexity_gap"] == pytest.approx(0.0)
    assert found["old_rollout_logprob_diff_mean"] == pytest.approx(2 * two / 3)
    # kept and known: the two terms of trace 7
    assert found["token_ess_count"] == pytest.approx(2.0**2 / 2.5)
    assert found["token_ess"] == pytest.approx(0.8)
    assert (found["weight_mean"], found["weight_min"], found["weight_max"]) == (1.0, 0.5, 1.5)
    assert (found["weight_p5"], found["weight_p99_9"]) == (pytest.approx(0.5, rel=2e-3), 1.5)
    assert (found["advantage_mean"], found["advantage_std"]) == (0.0, 1.0)
    # |gradient| is 3, 1, 2, 2: trace 7 and trace 3 have 4 each
    assert (found["gradient_share_positive"], found["gradient_share_negative"]) == (0.5, 0.5)
    assert (found["gradient_largest_trace"], found["gradient_effective_traces"]) == (0.5, 2.0)


def test_the_standard_error_takes_a_trace_as_one_draw():
    """-l sums to 3, 0 and 0 over traces of 2, 1 and 1 terms: mean 3/4; residues 3 - 1.5, 0 - .75, 0 - .75."""
    found = OffPolicySums.of([-2.0, -3.0, -1.0, -1.0], [-1.0, -1.0, -1.0, -1.0], trace=[0, 0, 1, 2]).values()
    assert found["kl_rollout_old_k1"] == 0.75
    assert found["kl_rollout_old_k1_se"] == pytest.approx(math.sqrt(3 / 2 * (1.5**2 + 2 * 0.75**2)) / 4)
    assert math.isnan(OffPolicySums.of([-1.0], [-2.0], trace=[0]).values()["kl_rollout_old_k1_se"])


def test_the_standard_error_is_the_spread_over_repeated_draws():
    rng = np.random.default_rng(0)
    trace = np.repeat(np.arange(60), 20)

    def draw():
        shared = np.repeat(rng.normal(0, 0.1, 60), 20)  # of a whole trace, as a prefix shifts every term after it
        rollout = -rng.exponential(1.0, len(trace))
        return OffPolicySums.of(rollout + shared + rng.normal(0, 0.1, len(trace)), rollout, trace=trace).values()

    runs = [draw() for _ in range(150)]
    spread = np.std([run["kl_rollout_old_k1"] for run in runs])
    assert np.mean([run["kl_rollout_old_k1_se"] for run in runs]) == pytest.approx(spread, rel=0.2)


def test_percentiles_are_within_the_resolution():
    rng = np.random.default_rng(0)
    for scale in (1e-5, 1e-2, 0.3, 5.0):
        log = np.clip(rng.normal(0, scale, 20_000), -20, 20)
        found = OffPolicySums.of(log - 25.0, np.full(len(log), -25.0), trace=np.arange(len(log)) // 10).values()
        for name, share in {"p1": 0.01, "p25": 0.25, "p50": 0.5, "p99": 0.99, "p99_9": 0.999}.items():
            exact = np.quantile(log, share, method="inverted_cdf")
            bound = aggregate.RESOLUTION * math.hypot(exact, aggregate.FINE) * 1.01 + 1e-12
            assert math.log(found[f"old_rollout_ratio_{name}"]) == pytest.approx(exact, abs=bound, rel=0), (scale, name)
    assert aggregate.RESOLUTION < 0.0013


def test_on_policy_every_ratio_is_1():
    logprobs = -np.random.default_rng(0).exponential(1.0, 100)
    found = OffPolicySums.of(logprobs, logprobs, trace=np.arange(100) // 5, weight=np.ones(100)).values()
    ones = [
        name
        for name in found
        if name.startswith(("old_rollout_ratio_p", "weight_p")) or name in ("token_ess", "old_rollout_ratio_ess")
    ]
    assert len(ones) == 18
    assert all(found[name] == 1.0 for name in ones)
    assert found["kl_rollout_old_k3"] == found["chi2_token"] == found["chi2_trace"] == 0.0


def test_weights_of_0_are_below_every_percentile_and_without_effect():
    found = OffPolicySums.of([-1.0] * 4, [-1.0] * 4, trace=[0, 0, 1, 1], weight=[0.0, 0.0, 0.0, 2.0]).values()
    assert (found["weight_p50"], found["weight_p99"], found["token_ess_count"]) == (0.0, 2.0, 1.0)
    gone = OffPolicySums.of([-1.0], [-1.0], trace=[0], weight=[0.0]).values()
    assert (gone["token_ess"], gone["token_ess_count"]) == (0.0, 0.0)


def test_outliers_are_clamped_and_counted():
    found = OffPolicySums.of([-1.0, -40.0, -1.0], [-31.0, -1.0, -1.0], trace=[0, 1, 2]).values()
    assert found["old_rollout_ratio_clamped"] == 2
    assert (found["old_rollout_ratio_max"], found["old_rollout_ratio_min"]) == (
        pytest.approx(np.exp(20)),
        pytest.approx(np.exp(-20)),
    )
    assert found["old_rollout_logprob_diff_max"] == 39.0
    assert all(math.isfinite(value) for value in found.values())


def test_a_breakdown_names_its_cells_and_adds_up():
    arrays = step()
    found = measured(arrays).values()
    assert {name.split("/")[1] for name in found if "/level" in name} == {"level_T0", "level_T2", "level_unknown"}
    cells = {"staleness_0", "staleness_1", "staleness_4-7", "staleness_16+", "staleness_unknown"}
    assert {name.split("/")[1] for name in found if "/staleness" in name} == cells
    assert {f"turn_{i}" for i in range(8)} | {"turn_8+"} == {n.split("/")[1] for n in found if "/turn" in n}
    for cells in ("turn", "level", "staleness"):
        here = {name: value for name, value in found.items() if f"/{cells}_" in name}
        assert (
            sum(v for name, v in here.items() if name.startswith("tokens_with_rollout_logprob/"))
            == found["tokens_with_rollout_logprob"]
        )
        assert sum(v for name, v in here.items() if name.startswith("gradient_share/")) == pytest.approx(1.0)


def test_a_cell_says_what_its_terms_alone_say():
    arrays = step()
    found = measured(arrays).values()
    cells = {
        "turn_8+": arrays["turn"] >= 8,
        "staleness_1": arrays["staleness"] == 1,
        "level_T2": arrays["alignment_level"] == 2,
    }
    for cell, at in cells.items():
        alone = measured(
            {k: v for k, v in arrays.items() if k not in ("turn", "alignment_level", "staleness")}, at
        ).values()
        for name, value in alone.items():
            assert found[f"{name}/{cell}"] == pytest.approx(value, rel=1e-9, abs=1e-12, nan_ok=True), name


def test_a_breakdown_into_one_cell_says_nothing_new():
    arrays = step()
    arrays["alignment_level"] = np.zeros_like(arrays["alignment_level"])
    assert not [name for name in measured(arrays).values() if "/level" in name]


def test_all_names_are_in_the_table():
    names = {name.split("/")[0] for name in measured(step()).values()}
    assert names == {row.name for row in OFF_POLICY}


def test_only_what_was_given_is_named():
    arrays = step()
    found = OffPolicySums.of(arrays["old"], arrays["rollout"], trace=arrays["trace"]).values()
    assert "token_ess" not in found
    assert not [name for name in found if "/" in name or name.startswith(("gradient", "advantage", "kl_old_theta"))]
    nothing_known = OffPolicySums.of([-1.0, -2.0], [NAN, NAN], trace=[0, 1], theta=[-1.5, -2.0]).values()
    assert set(nothing_known) == {"kl_old_theta"}


def test_what_does_not_fit_is_refused():
    with pytest.raises(ArgumentError, match=r"TG-METRIC-007.*1.*2"):
        OffPolicySums.of([-1.0, -1.0], [-1.0], trace=[0, 0])
    with pytest.raises(ArgumentError, match=r"TG-METRIC-008.*1"):
        OffPolicySums.of([-math.inf], [-1.0], trace=[0])
    with pytest.raises(ArgumentError, match="TG-METRIC-010"):
        OffPolicySums.of([-1.0], [-1.0], trace=[0], gradient=[1.0])
    a = OffPolicySums.of([-1.0], [-1.0], trace=[0])
    with pytest.raises(ArgumentError, match="TG-METRIC-002"):
        a + OffPolicySums.of([-1.0], [-1.0], trace=[0], weight=[1.0])


def test_where_gates_drop_every_term_nothing_is_said_of_effective_samples():
    old, rollout = [-1.0, -2.0], [-1.5, -1.0]
    none = OffPolicySums.of(old, rollout, trace=[0, 1], keep=[False, False], weight=[1.0, 1.0]).values()
    assert not {"token_ess", "token_ess_count"} & set(none)
    one = OffPolicySums.of(old, rollout, trace=[0, 1], keep=[True, False], weight=[0.5, 1.0]).values()
    assert (one["token_ess"], one["token_ess_count"]) == (1.0, 1.0)
