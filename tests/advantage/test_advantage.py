"""advantage: baselines by group id, explicit about ddof, singletons and traces without a score."""

import numpy as np
import pytest
import torch

from tracegrad.advantage import (
    a_star,
    batch_mean,
    divide_by_mean_abs,
    gpg,
    group_counts,
    group_mean,
    max_rl,
    normalize_then_sum,
    opo,
    overlong,
    pass_at_k,
    rloo,
    weighted_sum,
    whiten,
)
from tracegrad.errors import ArgumentError

NAN = float("nan")


def test_groups_go_by_id_and_may_be_ragged():
    # group 7: 1, 0, 0.5 -> mean 0.5; group 3: 2, 4 -> mean 3
    found = group_mean([1.0, 2.0, 0.0, 4.0, 0.5], [7, 3, 7, 3, 7])
    assert found.tolist() == [0.5, -1.0, -0.5, 1.0, 0.0]
    assert found.dtype == np.float32


def test_group_names_may_be_text():
    assert group_mean([1.0, 0.0], np.array(["a", "a"])).tolist() == [0.5, -0.5]


def test_std_divides_by_the_deviation_with_the_ddof_asked_for():
    # rewards 0 and 2: mean 1, sample variance 2 (ddof 1), population variance 1 (ddof 0)
    assert group_mean([0.0, 2.0], [0, 0], scale="std", ddof=0, eps=0.0).tolist() == [-1.0, 1.0]
    found = group_mean([0.0, 2.0], [0, 0], scale="std", ddof=1, eps=0.0)
    np.testing.assert_allclose(found, [-1 / 2**0.5, 1 / 2**0.5], rtol=1e-7)


def test_equal_rewards_give_exact_zeros():
    # 0.1 three times: the mean in floating point is not 0.1
    assert group_mean([0.1, 0.1, 0.1], [0, 0, 0], scale="std", ddof=1).tolist() == [0.0, 0.0, 0.0]
    assert group_counts([0.1, 0.1, 0.1, 1.0, 0.0], [0, 0, 0, 1, 1]).equal == 1


def test_a_trace_without_a_score_stands_outside_the_baseline():
    assert group_mean([1.0, NAN, 0.0], [0, 0, 0]).tolist() == [0.5, 0.0, -0.5]
    counts = group_counts([1.0, NAN, 0.0, NAN], [0, 0, 0, 5])
    assert (counts.traces, counts.unscorable, counts.groups, counts.singletons) == (4, 2, 1, 0)


def test_a_group_of_one_is_an_explicit_choice():
    with pytest.raises(ArgumentError, match=r"TG-ADV-009.*2.*9"):
        group_mean([1.0, 0.0, 3.0], [0, 0, 9])
    assert group_mean([1.0, 0.0, 3.0], [0, 0, 9], single_sample_group="zero").tolist() == [0.5, -0.5, 0.0]
    assert group_mean([1.0, 0.0, 3.0], [0, 0, 9], single_sample_group="keep").tolist() == [0.5, -0.5, 3.0]
    found = group_mean([1.0, 3.0, 0.7], [0, 0, 1], scale="std", ddof=1, eps=1e-6, single_sample_group="keep")
    assert found[2] == pytest.approx(0.7, rel=1e-5)  # as in verl's and SkyRL's GRPO


def test_a_singleton_among_unscorable_traces_is_one_too():
    with pytest.raises(ArgumentError, match="TG-ADV-009"):
        group_mean([1.0, NAN], [0, 0])


def test_the_batch_is_one_group():
    assert batch_mean([3.0, 1.0, 2.0]).tolist() == [1.0, -1.0, 0.0]
    with pytest.raises(ArgumentError, match="TG-ADV-009"):
        batch_mean([3.0])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"scale": "std"}, "TG-ADV-013"),
        ({"scale": "std", "ddof": 2}, r"TG-ADV-013.*2"),
        ({"ddof": 1}, "TG-ADV-012"),
        ({"eps": 1e-6}, "TG-ADV-012"),
        ({"scale": "max"}, "TG-ADV-011"),
    ],
)
def test_options_that_say_nothing_are_refused(options, message):
    with pytest.raises(ArgumentError, match=message):
        group_mean([1.0, 0.0], [0, 0], **options)


def test_unknown_singleton_policy_and_bad_rewards_are_refused():
    with pytest.raises(ArgumentError, match="TG-ADV-008"):
        group_mean([1.0], [0], single_sample_group="drop")
    with pytest.raises(ArgumentError, match=r"TG-ADV-010.*1.*inf"):
        group_mean([1.0, float("inf")], [0, 0])
    with pytest.raises(ArgumentError, match="TG-ADV-007"):
        group_mean([1.0, 2.0], [0])


def test_no_traces_have_no_advantages():
    assert group_mean([], []).shape == (0,)


@pytest.mark.parametrize("scale", ["group", "none"])
def test_trl_normalises_groups_the_same_way(scale):
    from peer_code import trl_advantages

    generator = torch.Generator().manual_seed(0)
    rewards = torch.randn(48, generator=generator)
    rewards[:8] = 0.3  # all equal
    rewards[17] = NAN
    rewards[24:32] = torch.tensor([1.0, 0, 0, 0, 0, 0, 0, 1])
    theirs = trl_advantages(rewards, 8, scale)
    ours = group_mean(rewards.numpy(), np.arange(48) // 8, **({"scale": "std", "ddof": 1} if scale == "group" else {}))
    np.testing.assert_allclose(ours[8:], theirs[8:], rtol=2e-5, atol=2e-6)
    # TRL computes in float32: equal rewards leave it the rounding of the mean, over 1e-4.
    assert np.abs(ours[:8]).max() == 0.0
    np.testing.assert_allclose(ours[:8], theirs[:8], atol=1e-3)


def test_leaving_one_out_compares_with_the_mean_of_the_others():
    # 6 with (0 + 3) / 2, 0 with (6 + 3) / 2, 3 with (6 + 0) / 2; group 1 is ragged: 1 with 0
    assert rloo([6.0, 0.0, 3.0, 1.0, 0.0], [0, 0, 0, 1, 1]).tolist() == [4.5, -4.5, 0.0, 1.0, -1.0]
    assert rloo([5.0, 1.0, NAN], [0, 1, 1], single_sample_group="keep").tolist() == [5.0, 1.0, 0.0]
    assert rloo([5.0, 1.0, NAN], [0, 1, 1], single_sample_group="zero").tolist() == [0.0, 0.0, 0.0]
    with pytest.raises(ArgumentError, match=r"TG-ADV-009.*0.*4"):
        rloo([5.0], [4])


def test_long_traces_weigh_more_in_the_baseline_of_opo():
    # (1 * 10 + 0 * 30 + 2 * 10) / 50 = 0.6; the unscorable trace weighs nothing
    found = opo([1.0, 0.0, 2.0, NAN], [10, 30, 10, 1000], [0, 0, 0, 0])
    np.testing.assert_allclose(found, [0.4, -0.6, 1.4, 0.0], rtol=1e-6)
    assert opo([1.0, 2.0], [0, 0], [0, 0]).tolist() == [0.0, 0.0]
    with pytest.raises(ArgumentError, match=r"TG-ADV-018.*-1"):
        opo([1.0, 2.0], [1, -1], [0, 0])
    with pytest.raises(ArgumentError, match=r"TG-ADV-018.*3.*2"):
        opo([1.0, 2.0], [1, 2, 3], [0, 0])


def test_gpg_makes_up_for_what_carries_no_gradient():
    # group 0: 1, 0 -> 0.5, -0.5; group 1: 1, 1 -> 0, 0
    rewards, groups = [1.0, 0.0, 1.0, 1.0], [0, 0, 1, 1]
    assert gpg(rewards, groups, nonzero="advantages").tolist() == [1.0, -1.0, 0.0, 0.0]  # 4 traces, 2 with a gradient
    np.testing.assert_allclose(gpg(rewards, groups, nonzero="rewards"), [2 / 3, -2 / 3, 0, 0], rtol=1e-7)  # 3 rewards
    assert gpg([1.0, 1.0], [0, 0], nonzero="advantages").tolist() == [0.0, 0.0]
    with pytest.raises(ArgumentError, match="TG-ADV-019"):
        gpg(rewards, groups, nonzero="groups")


def test_max_rl_divides_by_the_mean_and_gives_nothing_where_none_solved_it():
    # group 0: mean 0.25; group 1: none solved it; group 2: mean below 0
    rewards, groups = [1.0, 0.0, 0.0, 0.0, 0.0, 0.0, -1.0, -3.0], [0, 0, 0, 0, 1, 1, 2, 2]
    assert max_rl(rewards, groups).tolist() == [3.0, -1.0, -1.0, -1.0, 0.0, 0.0, 0.0, 0.0]
    np.testing.assert_allclose(max_rl(rewards[:4], groups[:4], eps=0.25), [1.5, -0.5, -0.5, -0.5], rtol=1e-7)


def test_only_the_best_of_a_group_has_what_it_adds():
    # group 0: 3 leads 1 by 2; group 1: two are best, no lead; group 2: -1 leads -4 by 3
    rewards, groups = [1.0, 3.0, 0.0, 2.0, 2.0, -4.0, -1.0, NAN], [0, 0, 0, 1, 1, 2, 2, 2]
    assert pass_at_k(rewards, groups).tolist() == [0.0, 2.0, 0.0, 0.0, 0.0, 0.0, 3.0, 0.0]
    # population deviation of -4 and -1 is 1.5
    found = pass_at_k(rewards[5:], groups[5:], scale="std", ddof=0, eps=0.0)
    assert found.tolist() == [0.0, 2.0, 0.0]
    with pytest.raises(ArgumentError, match="TG-ADV-012"):
        pass_at_k(rewards, groups, ddof=1)


def test_the_optimal_value_lies_between_mean_and_maximum_and_does_not_overflow():
    # V* = ln((e^1 + e^0) / 2) = 0.6201
    np.testing.assert_allclose(a_star([1.0, 0.0], [0, 0], beta=1.0), [0.3799, -0.6201], atol=1e-4)
    np.testing.assert_allclose(a_star([1e6, 0.0], [0, 0], beta=0.001), [0.001 * np.log(2), -1e6], rtol=1e-5)
    assert a_star([0.1, 0.1, 0.1, NAN], [0, 0, 0, 0], beta=0.3).tolist() == [0.0] * 4
    with pytest.raises(ArgumentError, match="TG-ADV-020"):
        a_star([1.0, 0.0], [0, 0], beta=0.0)


def test_the_deviation_of_the_batch_is_that_of_all_rewards():
    # rewards 0, 2 and 4, 6: mean 3, squares 9 + 1 + 1 + 9 = 20, population deviation sqrt(5); differences -1 and 1
    found = group_mean([0.0, 2.0, 4.0, 6.0], [0, 0, 1, 1], scale="batch_std", ddof=0, eps=0.0)
    np.testing.assert_allclose(found, np.array([-1, 1, -1, 1]) / 5**0.5, rtol=1e-7)


def test_no_spread_and_no_eps_is_zero_and_not_nan():
    assert group_mean([2.0, 2.0], [0, 0], scale="std", ddof=1, eps=0.0).tolist() == [0.0, 0.0]
    assert group_mean([NAN, NAN], [0, 0], scale="batch_std", ddof=1, eps=0.0).tolist() == [0.0, 0.0]


def test_the_report_says_which_groups_teach_nothing():
    found = group_counts([1.0, 1.0, 0.0, 0.0, 5.0, NAN, 0.0, 1.0], ["a", "a", "b", "b", "c", "d", "e", "e"])
    assert (found.equal_ids, found.equal_rewards) == (("a", "b"), (1.0, 0.0))
    assert (found.singleton_ids, found.unscorable_ids) == (("c",), ("d",))


def test_a_reward_that_is_none_adds_nothing_and_all_of_them_make_a_trace_unscorable():
    table = [[1.0, 10.0], [3.0, NAN], [NAN, NAN]]
    np.testing.assert_array_equal(weighted_sum(table, [1.0, 0.1]), [2.0, 3.0, NAN])
    # column 0: 1 and 3 -> -1, 1; column 1 has one reward in its group
    each = normalize_then_sum(table, [0, 0, 0], ddof=0, eps=0.0, single_sample_group="zero")
    np.testing.assert_array_equal(each, [-1.0, 1.0, NAN])
    with pytest.raises(ArgumentError, match="TG-ADV-009"):
        normalize_then_sum(table, [0, 0, 0], ddof=0)
    with pytest.raises(ArgumentError, match="TG-ADV-005"):
        weighted_sum(table, [1.0])
    with pytest.raises(ArgumentError, match=r"TG-ADV-010.*1.*inf"):
        weighted_sum([[0.0], [-np.inf]])


def test_a_large_reward_drowns_a_small_one_only_if_summed_first():
    table = np.array([[0.0, 100.0], [1.0, 0.0], [0.0, 0.0], [1.0, 100.0]])
    summed = group_mean(weighted_sum(table), [0, 0, 0, 0], scale="std", ddof=0, eps=0.0)
    each = normalize_then_sum(table, [0, 0, 0, 0], ddof=0, eps=0.0)
    np.testing.assert_allclose(summed, [1.0, -1.0, -1.0, 1.0], atol=0.02)
    assert each.tolist() == [0.0, 0.0, -2.0, 2.0]


def test_whitening_leaves_out_what_is_not_known():
    # 1, 3: mean 2, variance 2 with n - 1
    np.testing.assert_allclose(whiten([1.0, NAN, 3.0], ddof=1, eps=2.0, eps_in="variance"), [-0.5, 0.0, 0.5], rtol=1e-7)
    np.testing.assert_allclose(
        whiten([1.0, NAN, 3.0], ddof=0, eps=1.0, eps_in="deviation"), [-0.5, 0.0, 0.5], rtol=1e-7
    )
    assert whiten([0.1, 0.1, 0.1], ddof=1, eps=0.0, eps_in="variance").tolist() == [0.0, 0.0, 0.0]
    with pytest.raises(ArgumentError, match=r"TG-ADV-015.*1.*2"):
        whiten([1.0, NAN], ddof=1, eps=0.0, eps_in="variance")
    with pytest.raises(ArgumentError, match="TG-ADV-014"):
        whiten([1.0, 2.0], ddof=1, eps=0.0, eps_in="mean")


def test_long_answers_pay_along_a_line_that_begins_before_the_budget_ends():
    # budget 100, buffer 20: free up to 80, then 1/20 of the penalty a token; 2 * 5/20, 2 * 20/20, 2 * 25/20
    found = overlong([0, 80, 85, 100, 105], longest=100, buffer=20, penalty=2.0)
    assert found.tolist() == [0.0, 0.0, -0.5, -2.0, -2.5]
    for wrong in ({"buffer": 0}, {"buffer": 101}, {"buffer": 20, "penalty": -1.0}):
        with pytest.raises(ArgumentError, match="TG-ADV-006"):
            overlong([1], longest=100, **wrong)


def test_advantages_by_their_mean_size():
    # Sizes 4, 2 and 0: the mean is 2; with the weights 1, 3 and 4 it is (4 + 6) / 8.
    assert divide_by_mean_abs([4.0, -2.0, 0.0]).tolist() == [2.0, -1.0, 0.0]
    assert divide_by_mean_abs([4.0, -2.0, 0.0], weights=[1.0, 3.0, 4.0]).tolist() == pytest.approx([3.2, -1.6, 0.0])
    # A half off the negative one leaves 4 and -1, a mean size of 5 / 3; off the positive one 2 and -2.
    assert divide_by_mean_abs([4.0, -2.0, 0.0], balance=0.5).tolist() == pytest.approx([2.4, -0.6, 0.0])
    assert divide_by_mean_abs([4.0, -2.0, 0.0], balance=-0.5).tolist() == pytest.approx([1.5, -1.5, 0.0])
    assert divide_by_mean_abs([0.0, 0.0]).tolist() == [0.0, 0.0]
    for wrong in ({"weights": [1.0]}, {"weights": [1.0, -1.0]}, {"weights": [1.0, NAN]}, {"balance": 1.5}):
        with pytest.raises(ArgumentError):
            divide_by_mean_abs([1.0, 2.0], **wrong)


@pytest.mark.parametrize("shape", [(4,), (4, 0), (4, 2, 2)])
def test_several_rewards_are_a_table_and_nothing_else(shape):
    for use in (lambda: weighted_sum(np.ones(shape)), lambda: normalize_then_sum(np.ones(shape), [0, 0, 1, 1])):
        with pytest.raises(ArgumentError, match="TG-ADV-004"):
            use()
