"""advantage: baselines by group id, explicit about ddof, singletons and traces without a score."""

import numpy as np
import pytest
import torch

from peer_code import trl_advantages
from tracegrad.advantage import batch_mean, group_counts, group_mean
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
    with pytest.raises(ArgumentError, match="trace 2: group 9 has one scorable trace"):
        group_mean([1.0, 0.0, 3.0], [0, 0, 9])
    assert group_mean([1.0, 0.0, 3.0], [0, 0, 9], singleton="zero").tolist() == [0.5, -0.5, 0.0]
    assert group_mean([1.0, 0.0, 3.0], [0, 0, 9], singleton="keep").tolist() == [0.5, -0.5, 3.0]


def test_a_singleton_among_unscorable_traces_is_one_too():
    with pytest.raises(ArgumentError, match="one scorable trace"):
        group_mean([1.0, NAN], [0, 0])


def test_the_batch_is_one_group():
    assert batch_mean([3.0, 1.0, 2.0]).tolist() == [1.0, -1.0, 0.0]
    with pytest.raises(ArgumentError, match="one scorable trace"):
        batch_mean([3.0])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"scale": "std"}, "pass 1"),
        ({"scale": "std", "ddof": 2}, "pass 1"),
        ({"ddof": 1}, "no effect"),
        ({"eps": 1e-6}, "no effect"),
        ({"scale": "max"}, "'none' or 'std'"),
    ],
)
def test_options_that_say_nothing_are_refused(options, message):
    with pytest.raises(ArgumentError, match=message):
        group_mean([1.0, 0.0], [0, 0], **options)


def test_unknown_singleton_policy_and_bad_rewards_are_refused():
    with pytest.raises(ArgumentError, match="'refuse', 'zero' or 'keep'"):
        group_mean([1.0], [0], singleton="drop")
    with pytest.raises(ArgumentError, match="trace 1: the reward is inf"):
        group_mean([1.0, float("inf")], [0, 0])
    with pytest.raises(ArgumentError, match="one of each per trace"):
        group_mean([1.0, 2.0], [0])


def test_no_traces_have_no_advantages():
    assert group_mean([], []).shape == (0,)


@pytest.mark.parametrize("scale", ["group", "none"])
def test_trl_normalises_groups_the_same_way(scale):
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
