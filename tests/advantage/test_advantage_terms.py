"""advantage, within a trace: rewards of terms and of turns, flat arrays with the trace of each term."""

from dataclasses import FrozenInstanceError

import numpy as np
import pytest

from tracegrad.advantage import (
    AdaptiveKl,
    at_turn_ends,
    gae,
    group_mean,
    kl_in_reward,
    optimal_token_baseline,
    reinforce_plus_plus,
    reinforce_plus_plus_baseline,
    remax,
    returns,
    turn_returns,
    turns_to_terms,
)
from tracegrad.errors import ArgumentError

NAN = float("nan")


@pytest.mark.parametrize("gamma", [0.0, 0.5, 0.97, 1.0])
def test_returns_are_those_of_a_plain_loop_over_scattered_terms(gamma):
    draw = np.random.default_rng(0)
    trace = draw.choice([2, 5, 6, 40], 300, p=[0.1, 0.2, 0.69, 0.01])
    rewards = draw.normal(size=300)
    expected, after = np.zeros(300), dict.fromkeys([2, 5, 6, 40], 0.0)
    for t in range(299, -1, -1):
        after[trace[t]] = expected[t] = rewards[t] + gamma * after[trace[t]]
    np.testing.assert_allclose(returns(rewards, trace, gamma=gamma), expected, rtol=1e-12, atol=1e-12)


def test_a_return_is_unknown_only_where_no_known_reward_follows():
    np.testing.assert_array_equal(returns([NAN, 1.0, NAN, NAN], [0, 0, 0, 1], gamma=1.0), [1.0, 1.0, NAN, NAN])
    np.testing.assert_array_equal(returns([NAN, 1.0, NAN, NAN], [0, 0, 0, 1], gamma=0.0), [NAN, 1.0, NAN, NAN])


def test_returns_refuse_what_they_cannot_sum():
    with pytest.raises(ArgumentError, match=r"TG-ADV-024.*1\.5"):
        returns([1.0], [0], gamma=1.5)
    with pytest.raises(ArgumentError, match=r"TG-ADV-022.*1.*7.*inf"):
        returns([1.0, np.inf], [7, 7], gamma=1.0)
    with pytest.raises(ArgumentError, match="TG-ADV-021"):
        returns([1.0, 2.0], [0], gamma=1.0)
    assert returns([], np.zeros(0, int), gamma=1.0).shape == (0,)


# trace 0: three turns with rewards 1, none, 4; trace 1: one turn with 8; trace 2: none of its two turns has a reward
TURNS, CU = [1.0, NAN, 4.0, 8.0, NAN, NAN], [0, 3, 4, 6]
TRACE, TURN = np.array([0, 0, 0, 0, 0, 1, 2]), np.array([0, 0, 1, 2, 2, 0, 1])


def test_a_turn_has_its_own_reward_and_by_gamma_those_of_later_turns():
    np.testing.assert_array_equal(turn_returns(TURNS, CU, gamma=1.0), [5.0, 4.0, 4.0, 8.0, NAN, NAN])
    np.testing.assert_array_equal(turn_returns(TURNS, CU, gamma=0.5), [2.0, 2.0, 4.0, 8.0, NAN, NAN])
    np.testing.assert_array_equal(turn_returns(TURNS, CU, gamma=0.0), [1.0, NAN, 4.0, 8.0, NAN, NAN])


def test_every_term_has_what_its_turn_has():
    found = turns_to_terms(turn_returns(TURNS, CU, gamma=0.5), CU, TRACE, TURN)
    assert found.tolist() == [2.0, 2.0, 2.0, 4.0, 4.0, 8.0, 0.0]
    assert found.dtype == np.float32


def test_a_reward_at_the_end_of_a_turn_is_discounted_by_terms():
    rewards = at_turn_ends(TURNS, CU, TRACE, TURN)
    np.testing.assert_array_equal(rewards, [0.0, 1.0, NAN, 0.0, 4.0, 8.0, NAN])
    # from the end: 4, 2, then 1, then 1 + 0.5, then 0.75
    np.testing.assert_array_equal(returns(rewards, TRACE, gamma=0.5), [0.75, 1.5, 1.0, 2.0, 4.0, 8.0, NAN])


def test_the_reward_of_a_turn_without_terms_goes_to_the_term_before_it():
    # turn 1 of trace 0 has no term; turn 0 of trace 1 has none either, and nothing stands before it
    found = at_turn_ends([1.0, 2.0, 4.0, 8.0, 16.0], [0, 3, 5], [0, 0, 1], [0, 2, 1])
    assert found.tolist() == [3.0, 4.0, 16.0]
    assert at_turn_ends([1.0], [0, 1], np.zeros(0, int), np.zeros(0, int)).shape == (0,)


def test_turns_may_be_compared_before_or_after_they_are_summed():
    rewards, cu, groups = [1.0, 0.0, 0.0, 1.0], [0, 2, 4], np.repeat([3, 3], 2)
    # before, as in process supervision: -0.5 and 0.5 by turn, then sums; after: returns 1, 0, 1, 1 and their mean 0.75
    before = turn_returns(group_mean(rewards, groups), cu, gamma=1.0)
    after = group_mean(turn_returns(rewards, cu, gamma=1.0), groups)
    assert before.tolist() == [0.0, -0.5, 0.0, 0.5]
    assert after.tolist() == [0.25, -0.75, 0.25, 0.25]


def test_turns_that_do_not_fit_are_refused():
    with pytest.raises(ArgumentError, match=r"TG-ADV-031.*1"):
        turns_to_terms([1.0, 2.0], [0, 1, 2], [0, 0], [0, 1])
    with pytest.raises(ArgumentError, match="TG-ADV-029"):
        turn_returns([1.0, 2.0], [0, 1], gamma=1.0)
    with pytest.raises(ArgumentError, match=r"TG-ADV-023.*1"):
        turns_to_terms([1.0], [0, 1], [1], [0])


def test_reinforce_plus_plus_whitens_returns_over_all_terms():
    # returns 1, 1, 0, 0: mean 0.5, variance 4 * 0.25 / 3
    found = reinforce_plus_plus([0.0, 1.0, 0.0, 0.0], [0, 0, 1, 1], gamma=1.0)
    np.testing.assert_allclose(found, np.array([1, 1, -1, -1]) * 0.5 / (1 / 3) ** 0.5, rtol=1e-6)


def test_its_baseline_counts_a_trace_once_per_term_and_an_unscorable_one_not_at_all():
    # group 0: 1, 0 -> 0.5 on one term, -0.5 on three; mean -0.25, squares 0.75^2 + 3 * 0.25^2 = 0.75, variance 0.25
    found = reinforce_plus_plus_baseline([1.0, 0.0, NAN], [0, 0, 0], [0, 1, 1, 1, 2])
    np.testing.assert_allclose(found, [1.5, -0.5, -0.5, -0.5, 0.0], rtol=1e-6)


def test_remax_subtracts_the_greedy_answer():
    assert remax([0.0, 1.0, 0.5, 1.0], [0.25, 0.5, NAN], [0, 0, 1, 2]).tolist() == [0.75, 0.75, 0.0, 0.0]
    with pytest.raises(ArgumentError, match=r"TG-ADV-023.*1"):
        remax([1.0], [0.5], [1])


def test_gae_between_one_step_and_all():
    rewards, values, trace = [0.0, 2.0, 1.0], [1.0, 0.5, 0.25], [0, 0, 1]
    # d = 0 + 0.5 * 0.5 - 1 = -0.75, d = 2 - 0.5 = 1.5; A = -0.75 + 0.5 * 0.5 * 1.5 = -0.375
    found = gae(rewards, values, trace, gamma=0.5, lam=0.5)
    assert found.advantages.tolist() == [-0.375, 1.5, 0.75]
    assert found.returns.tolist() == [0.625, 2.0, 1.0]
    assert gae(rewards, values, trace, gamma=1.0, lam=1.0).returns.tolist() == [2.0, 2.0, 1.0]
    with pytest.raises(ArgumentError, match=r"TG-ADV-025.*1.*2\.0.*nan"):
        gae(rewards, [1.0, NAN, 0.0], trace, gamma=1.0, lam=1.0)


def token_baseline(**options):
    """Two traces of group 5 with two and three terms, and one of group 6; every w is 1 - 2 * 0.5 + 0.5 = 0.5."""
    trace = [0, 0, 1, 1, 1, 2]
    given = {"logprobs": np.log(np.full(6, 0.5)), "sum_pi_squared": np.full(6, 0.5)}
    given |= {"eps": 0.0, "single_sample_group": "zero"}
    rewards = [1.0, 3.0, 0.0, 0.0, 2.0, 7.0]
    return optimal_token_baseline(rewards, [5, 5, 6], trace, **given | options).tolist()


def test_the_token_baseline_compares_terms_at_the_same_step():
    # step 1: returns 4 and 2 with W 0.5 each; step 2: 3 and 2 with 1 each; step 3: one trace is left
    assert token_baseline(tail="zero") == pytest.approx([1.0, 0.5, -1.0, -0.5, 0.0, 0.0])
    assert token_baseline(tail="keep", single_sample_group="keep") == pytest.approx([1.0, 0.5, -1.0, -0.5, 2.0, 7.0])


def test_importance_weights_enter_the_token_baseline_squared():
    # step 1: w 0.5 and 2 -> (4 * 0.5 + 2 * 2) / 2.5 = 2.4; step 2: W 1 and 2.5 -> (3 + 5) / 3.5
    found = token_baseline(tail="zero", weights=[1.0, 1.0, 2.0, 1.0, 1.0, 1.0])
    assert found[:4] == pytest.approx([1.6, 3 - 8 / 3.5, -0.4, 2 - 8 / 3.5])


def test_positions_say_which_terms_stand_at_one_step():
    # trace 0 at 0 and 2, trace 1 at 0, 1 and 2: its W there is 1.5 against 1, (3 * 1 + 2 * 1.5) / 2.5 = 2.4
    found = token_baseline(tail="keep", position=[0, 2, 0, 1, 2, 0])
    assert found == pytest.approx([1.0, 0.6, -1.0, 2.0, -0.4, 0.0])
    with pytest.raises(ArgumentError, match=r"TG-ADV-028.*0"):
        token_baseline(tail="keep", position=[0, 0, 0, 1, 2, 0])


def test_the_token_baseline_leaves_out_unscorable_traces_and_refuses_what_has_no_weight():
    found = optimal_token_baseline(
        [1.0, 0.0, NAN, 9.0], [0, 0, 0], [0, 1, 2, 2], tail="keep", logprobs=[-1.0] * 4, sum_pi_squared=[0.5] * 4
    )
    assert found.tolist() == pytest.approx([0.5, -0.5, 0.0, 0.0])
    with pytest.raises(ArgumentError, match=r"TG-ADV-009.*6"):
        token_baseline(tail="keep", single_sample_group="error")
    with pytest.raises(ArgumentError, match=r"TG-ADV-027.*5.*2"):
        token_baseline(tail="keep", sum_pi_squared=[0.5] * 5 + [NAN])
    with pytest.raises(ArgumentError, match="TG-ADV-026"):
        token_baseline(tail="both")


def test_a_trace_pays_for_having_left_the_reference():
    # l = 1 and -1 in trace 0, 0.5 in trace 1: k1 sums to 0, |l| to 2, l^2 / 2 to 1; trace 2 has no term.
    given = ([1.0, 0.0, 3.0], [-1.0, -2.0, -1.0], [-2.0, -1.0, -1.5], [0, 0, 1])
    assert kl_in_reward(*given, coef=0.5).rewards.tolist() == [1.0, -0.25, 3.0]
    assert kl_in_reward(*given, coef=0.5, kind="abs").rewards.tolist() == [0.0, -0.25, 3.0]
    found = kl_in_reward(*given, coef=0.5, kind="k2")
    assert found.rewards.tolist() == [0.5, -0.0625, 3.0]
    assert found.per_term.tolist() == [-0.25, -0.25, -0.0625]
    assert found.kl == (0.5 + 0.125) / 2
    # exp(-l) - 1 + l of 1, -1 and 0.5.
    terms = [np.exp(-1), np.e - 2, np.exp(-0.5) - 0.5]
    assert kl_in_reward(*given, coef=1.0, kind="k3").per_term.tolist() == pytest.approx([-each for each in terms])
    assert kl_in_reward(*given, coef=1.0, kind="k3", cap=0.5).per_term.tolist()[1] == -0.5
    assert np.isnan(kl_in_reward([NAN, 0.0, 0.0], *given[1:], coef=1.0).rewards[0])


def test_what_a_trace_pays_is_never_guessed():
    with pytest.raises(ArgumentError, match=r"TG-ADV-002.*1.*0.*-2\.0.*nan"):
        kl_in_reward([1.0], [-1.0, -2.0], [-1.0, NAN], [0, 0], coef=0.1)
    with pytest.raises(ArgumentError, match=r"TG-ADV-001.*-0\.1"):
        kl_in_reward([1.0], [-1.0], [-1.0], [0], coef=-0.1)
    with pytest.raises(ArgumentError, match="TG-ARGS-008"):
        kl_in_reward([1.0], [-1.0], [-1.0], [0], coef=0.1, kind="k4")
    with pytest.raises(ArgumentError, match=r"TG-ADV-023.*1"):
        kl_in_reward([1.0], [-1.0], [-1.0], [1], coef=0.1)


def test_the_coefficient_follows_its_target_within_a_fifth():
    start = AdaptiveKl(coef=1.0, target=0.5, horizon=10.0)
    assert start.after(kl=0.55, traces=5).coef == pytest.approx(1.05)
    assert start.after(kl=50.0, traces=5).coef == pytest.approx(1.1)
    assert start.after(kl=0.0, traces=5).coef == pytest.approx(0.9)
    with pytest.raises(FrozenInstanceError):
        start.coef = 2.0  # pyright: ignore[reportAttributeAccessIssue]
    with pytest.raises(ArgumentError, match=r"TG-ADV-003.*AdaptiveKl\.target"):
        AdaptiveKl(coef=1.0, target=0, horizon=1)
