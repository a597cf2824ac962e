"""The learner: its plan, what it can know of its progress, and one update worked by hand."""

import math
import signal

import numpy as np
import pytest

from tracegrad.config import load
from tracegrad.metrics import unreliable_reason
from tracegrad.trainer.off_policy_eval import SUM_LIMIT, choose_held_out, difference, estimate, good_and_bad
from tracegrad.trainer.schedule import Schedule
from tracegrad.trainer.signals import Interrupt


def test_each_epoch_has_a_seed_of_its_own_and_the_run_seed_changes_all():
    seeds = [Schedule(3, epochs=4, seed=run).shuffle_seed(epoch) for run in range(3) for epoch in range(4)]
    assert len(set(seeds)) == 12
    assert Schedule(3, seed=2).shuffle_seed(1) == Schedule(9, seed=2, epochs=7).shuffle_seed(1)


def test_old_is_refreshed_each_epoch_unless_told_otherwise():
    each_epoch = Schedule(3, epochs=2)
    assert [s for s in range(6) if each_epoch.refreshes_old(s)] == [0, 3]
    assert list(each_epoch.window(4)) == [4, 5]
    often = Schedule(3, epochs=2, updates_per_old_logprobs=4)
    assert [s for s in range(6) if often.refreshes_old(s)] == [0, 4]
    assert list(often.window(4)) == [4, 5]  # the run ends before the window does


def test_value_is_measured_before_the_first_step_and_at_each_epochs_end():
    plan = Schedule(10, epochs=2, ope_per_epoch=4)
    measured = [taken for taken in range(plan.total + 1) if plan.evaluates(taken)]
    assert measured == [0, 3, 5, 8, 10, 13, 15, 18, 20]


@pytest.mark.parametrize(("packed", "size", "times"), [(6, 2, 3), (4, 4, 2), (3, 1, 4)])
def test_batches_are_repeated_as_trls_sampler_repeats_them(packed, size, times):
    """One group a step; its sampler drops a last batch that is not whole."""
    utils = pytest.importorskip("trl.trainer.utils")
    sampler = utils.RepeatSampler(
        range(packed), mini_repeat_count=1, batch_size=size, repeat_count=times, shuffle=False
    )
    plan = Schedule(packed * times, updates_per_old_logprobs=size, iterations=times)
    assert [plan.packed_index(step) for step in range(plan.total)] == list(sampler)
    starts = [step for step in range(plan.total) if plan.refreshes_old(step)]
    assert starts == list(range(0, packed * times, size * times))
    assert [plan.packed_index(step) for step in plan.window(starts[-1])] == list(range(packed - size, packed))


def test_a_last_batch_that_is_smaller_is_repeated_as_often():
    plan = Schedule(15, epochs=2, updates_per_old_logprobs=2, iterations=3)  # of 5 packed steps
    assert [plan.packed_index(step) for step in range(15)] == [0, 1] * 3 + [2, 3] * 3 + [4] * 3
    assert [step for step in range(30) if plan.refreshes_old(step)] == [0, 6, 12, 15, 21, 27]
    assert [list(plan.window(step)) for step in (0, 12, 15)] == [[0, 1], [12], [15, 16]]
    assert [plan.last_refresh(step) for step in (5, 14, 20, 26)] == [0, 12, 15, 21]


def test_a_run_may_end_within_an_epoch():
    config = load(overrides=[("train.max_steps", 7)])
    plan = Schedule.of(config, 3)
    assert (plan.total, plan.epochs, plan.epoch_of(6)) == (7, 3, 2)
    assert plan.saves(7)
    assert plan.evaluates(7)
    assert Schedule.of(load(overrides=[("train.max_steps", 4), ("train.iterations", 2)]), 3).epochs == 1


def test_checkpoints_come_at_each_epochs_end_and_at_the_last_step():
    assert [t for t in range(7) if t and Schedule(3, epochs=2).saves(t)] == [3, 6]
    assert [t for t in range(7) if t and Schedule(3, epochs=2, checkpoint_every=4).saves(t)] == [4, 6]


def test_value_is_the_weighted_reward_with_a_delta_interval_worked_by_hand():
    # Two traces of two terms each in two groups. Log-ratios sum to log 3 and 0, so w = 3, 1; rewards 1, 0.
    logprobs = np.log(np.array([0.3, 0.5, 0.5, 0.5], np.float32))
    rollout = np.log(np.array([0.1, 0.5, 0.5, 0.5], np.float32))
    value = estimate(logprobs, rollout, np.array([0, 0, 1, 1]), np.array([1, 0], np.float32), np.array([4, 7]))
    assert value.value == pytest.approx(3 / 4)
    assert value.ess == pytest.approx(16 / 10)  # (3 + 1)^2 / (9 + 1)
    assert value.ess_fraction == pytest.approx(0.8)
    assert value.recorded == 0.5
    assert (value.low, value.high) == (0.0, 1.0)  # with one degree of freedom t is 12.7
    assert not value.is_reliable


def test_the_interval_counts_four_more_traces_at_the_ends_of_the_range_worked_by_hand():
    # Five groups of a trace of weight 1 with rewards 1 1 1 0 0. Added are 1 1 0 0: v = 5/9. Of the groups
    # 3 (4/9)^2 + 2 (5/9)^2 = 98/81, times 5/4; added: 2 ((5/9)^2 + (4/9)^2) = 82/81; se^2 = 204.5/81/81.
    # With 4 degrees of freedom t is 2.7764.
    same = np.full(5, -1.0, np.float32)
    value = estimate(same, same, np.arange(5), np.array([1, 1, 1, 0, 0], np.float32), np.arange(5))
    assert value.value == pytest.approx(0.6)
    assert value.low == pytest.approx(5 / 9 - 2.7764 * math.sqrt(204.5) / 81)
    assert value.high == 1.0  # 1.046, cut at the highest reward
    # Rewards 10 and -10 in place of 1 and 0: the same places of a range that is twenty times as wide.
    wide = estimate(same, same, np.arange(5), np.array([10, 10, 10, -10, -10], np.float32), np.arange(5))
    assert (wide.value, wide.low, wide.high) == pytest.approx((2.0, 20 * value.low - 10, 10.0))


def logged(weights, rewards, size=4):
    """An estimate of traces with these weights, `size` a group."""
    count = len(weights)
    given = np.log(weights).astype(np.float32), np.zeros(count, np.float32), np.arange(count)
    return estimate(*given, np.asarray(rewards, np.float32), np.arange(count) // size)


@pytest.mark.parametrize(
    ("weights", "rewards", "known"),
    [
        (np.ones(40), [1, 0] * 20, True),
        (np.ones(40), [1] * 40, False),  # no reward differs: nothing says how far others may
        (np.ones(8), [1, 0] * 4, False),  # 8 effective traces
        (np.r_[np.full(100, 1e-6), np.ones(31)], [1, 0] * 65 + [1], False),  # 31 of 131
        (np.r_[np.full(100, 1e-6), np.ones(60)], [1, 0] * 80, True),  # 60 of 160
        (np.r_[np.ones(39), 1e9], [1, 0] * 20, False),  # clamped, and alone
        (np.r_[np.ones(39), 1e-9], [1, 0] * 20, False),  # clamped
    ],
)
def test_a_value_is_known_if_no_weight_is_clamped_and_enough_traces_are_left(weights, rewards, known):
    found = logged(weights, rewards)
    assert found.is_reliable is known
    assert found.row()["ope_reliable"] == known
    assert (unreliable_reason(found.row()) is None) is known
    assert min(rewards) <= found.low <= found.value <= found.high <= max(rewards)


def test_a_single_group_has_no_interval():
    found = logged(np.ones(40), [1, 0] * 20, size=40)
    assert math.isnan(found.low)
    assert not found.is_reliable


@pytest.mark.parametrize(("groups", "t"), [(2, 12.706), (11, 2.2281), (31, 2.0423), (32, 2.0395), (101, 1.9840)])
def test_the_quantiles_are_students(groups, t):
    """Those of a printed table, by the half width of an interval in the middle of the range."""
    found = logged(np.ones(groups), np.r_[0.0, np.full(groups - 2, 0.5), 1.0], size=1)
    # v = 1/2; the two groups and the four added traces are 1/2 from it, and groups + 4 traces are summed.
    se = math.sqrt((groups / (groups - 1) * 2 + 4) / 4) / (groups + 4)
    assert found.high - 0.5 == pytest.approx(min(t * se, 0.5), rel=1e-4)


def test_value_leaves_out_traces_that_cannot_be_weighted():
    logprobs = np.full(4, -1.0, np.float32)
    rollout = np.array([-1.0, np.nan, -1.0, -1.0], np.float32)
    trace = np.array([0, 1, 2, 3])
    rewards = np.array([1, 0, np.nan, 0, 5], np.float32)  # trace 1 has no logprob, 2 no reward, 4 no term
    value = estimate(logprobs, rollout, trace, rewards, np.arange(5))
    assert (value.traces, value.value) == (2, 0.5)


def test_value_clamps_and_counts_and_stays_finite():
    logprobs = np.array([-1.0, -1000.0], np.float32)
    rollout = np.array([-1000.0, -1.0], np.float32)
    value = estimate(logprobs, rollout, np.array([0, 1]), np.array([0.25, 1], np.float32), np.array([0, 1]))
    assert value.clamped == 2
    assert value.value == pytest.approx((0.25 + math.exp(-2 * SUM_LIMIT)) / (1 + math.exp(-2 * SUM_LIMIT)))


def test_without_a_held_out_trace_value_is_unknown():
    nothing = np.zeros(0, np.float32)
    value = estimate(nothing, nothing, np.zeros(0, np.int64), nothing, np.zeros(0, np.int64))
    assert math.isnan(value.value)
    assert not value.is_reliable


def test_the_interval_of_value_covers_in_nineteen_of_twenty():
    rng = np.random.default_rng(0)
    groups, size, runs, truth = 30, 8, 400, 0.6
    covered = 0
    for _ in range(runs):
        # A trace is one binary event: rollout draws it with p, theta with 0.6; p differs by group, so groups matter.
        p = np.repeat(rng.uniform(0.3, 0.7, groups), size)
        hit = rng.random(groups * size) < p
        rollout = np.log(np.where(hit, p, 1 - p)).astype(np.float32)
        theta = np.log(np.where(hit, truth, 1 - truth)).astype(np.float32)
        value = estimate(theta, rollout, np.arange(len(p)), hit.astype(np.float32), np.repeat(np.arange(groups), size))
        covered += value.low <= truth <= value.high
    assert 0.92 <= covered / runs <= 0.98


def test_the_interval_of_a_difference_covers_and_is_narrow_where_the_groups_are_the_same():
    rng, groups, size, runs = np.random.default_rng(1), 30, 8, 400
    covered, narrow = 0, 0
    for _ in range(runs):
        p = np.repeat(rng.uniform(0.3, 0.7, groups), size)  # value is 0.45 under the one, 0.5 under the other
        hit = rng.random(groups * size) < p
        given = [np.log(np.where(hit, q, 1 - q)).astype(np.float32) for q in (0.45, 0.5, p)]
        trace, group = np.arange(len(p)), np.repeat(np.arange(groups), size)
        change, half = difference(*given, trace, hit.astype(np.float32), group)
        alone = estimate(given[0], given[2], trace, hit.astype(np.float32), group)
        covered += change - half <= -0.05 <= change + half
        narrow += half < 0.3 * (alone.high - alone.low) / 2
    assert 0.9 <= covered / runs <= 0.98  # a difference of ratios is skewed
    assert narrow == runs


def test_good_and_bad_are_above_and_below_their_own_group():
    logprobs = np.array([-1, -2, -3, -4], np.float32)
    rewards, group = np.array([1, 0, 5, 7], np.float32), np.array([0, 0, 1, 1])
    assert good_and_bad(logprobs, np.arange(4), rewards, group) == (-2.5, -2.5)  # (-1 - 4) / 2, (-2 - 3) / 2


def test_held_out_groups_are_whole_and_a_twentieth():
    group = np.repeat(np.arange(100), 3)
    out = choose_held_out(group, 0.05, seed=3)
    assert out.sum() == 15
    assert len(np.unique(group[out])) == 5
    assert not choose_held_out(group, 0.0, seed=3).any()
    assert not choose_held_out(np.zeros(8, np.int32), 0.05, seed=3).any()  # the only group is trained on


@pytest.fixture
def default_sigint():
    """A shell that starts its commands in the background leaves SIGINT ignored; here it is as at a terminal."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("default_sigint")
def test_the_first_signal_waits_for_the_step_and_the_second_does_not():
    with Interrupt() as interrupt:
        signal.raise_signal(signal.SIGINT)
        assert interrupt.exit_code == 130
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)


def test_the_handlers_of_the_process_are_put_back():
    before = signal.getsignal(signal.SIGTERM)
    with Interrupt() as interrupt:
        signal.raise_signal(signal.SIGTERM)
        assert interrupt.exit_code == 143
    assert signal.getsignal(signal.SIGTERM) is before
