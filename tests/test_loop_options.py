"""Options of a run that change its work and nothing else: shared prefixes, and what cannot matter left out."""

from __future__ import annotations

from dataclasses import replace
from unittest import mock

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from test_loop import run, told, without_times
from tiny import sampled, tiny_model
from tracegrad.errors import ArgumentError
from tracegrad.objective import Gate, Level, Ratio, presets, with_entropy
from tracegrad.trainer.distributed import Ranks
from tracegrad.trainer.setup import choose_attention
from tracegrad.trainer.step import measure, optimizer_step
from tracegrad.trainer.steps import Feed

GATED = replace(presets.GRPO, gates=(Gate(Ratio("old", "rollout"), level=Level("trace", "mean"), low=0.99, high=1.01),))
"""Drops the terms of many traces before a logprob of theta is known."""


@pytest.fixture(scope="module")
def traces():
    """Groups, one of three with equal rewards, recorded by a policy that had drifted."""
    found = sampled(tiny_model())
    rewards = found.rewards.copy()
    rewards[found.group % 3 == 0] = 1.0
    drift = 0.05 * (found.trace % 2)[np.repeat(np.arange(found.branches), np.diff(found.cu_seqlens))]
    return replace(found, rewards=rewards, rollout_logprobs=found.rollout_logprobs - drift.astype(np.float32))


def truncated(_=None):
    """A row of test_every_option.py. A trace that was cut off counts with its reward and as a trace, no more."""
    found = sampled(tiny_model())
    ending = np.ones(found.traces, np.uint8)
    ending[0] = 2
    masking = told(filter__truncated=True, data__holdout=0, pack__step_groups=100)
    feed = Feed.of(replace(found, ending=ending), presets.DR_GRPO, masking)
    (step,) = feed.steps(0)
    assert np.unique(step.trace).tolist() == list(range(1, found.traces))
    assert step.totals.traces == found.traces
    group = found.group == found.group[0]
    np.testing.assert_allclose(feed.advantages[group], found.reward[group] - found.reward[group].mean(), atol=1e-6)
    assert feed.notes[-1] == f"1 of {found.traces} traces were cut off and are masked: filter.truncated."


def timeout(folder):
    """A row of tests/test_every_option.py. What waits so long in truth is in tests/test_nodes.py."""
    joined, seen = Ranks.join, []
    with mock.patch.object(Ranks, "join", lambda *given: seen.append(given) or joined(*given)):
        run(sampled(tiny_model()), folder / "run", train__timeout=7.0)
    assert seen == [(7.0,)]


def of_groups(rewards, **how):
    """The tiny model's traces with the rewards given for those of the first groups, and equal ones in the others."""
    found = sampled(tiny_model())
    told_so = np.ones_like(found.rewards)
    for group, values in enumerate(rewards):
        told_so[np.flatnonzero(found.group == np.unique(found.group)[group])[: len(values)], 0] = values
    return Feed.of(
        replace(found, rewards=told_so), presets.DR_GRPO, told(data__holdout=0, pack__step_groups=100, **how)
    )


def even_groups(_=None):
    """A row of tests/test_every_option.py."""
    found = of_groups([[0.0]], filter__even_groups=True)
    assert [step.totals.traces for step in found.steps(0)] == [int(found.taken.sum())]
    assert np.unique(found.catalog.group[found.taken]).tolist() == [found.catalog.group.min()]
    assert found.notes[-1].endswith("are left out: filter.even_groups.")


def mask_even(_=None):
    """A row of tests/test_every_option.py."""
    found = of_groups([[0.0]], filter__mask_even=True)
    (step,) = found.steps(0)
    s = found.catalog
    assert np.unique(s.group[np.unique(step.trace)]).tolist() == [s.group.min()]
    assert step.totals.traces == s.traces
    others = int((s.group != s.group.min()).sum())
    assert found.notes[-1] == f"{others} traces of groups in which all rewards are equal are masked: filter.mask_even."


def tolerance(_=None):
    """A row of tests/test_every_option.py."""
    for how in ("filter__even_groups", "filter__mask_even"):
        for within, wanted in ((0.2, 2), (0.25, 1), (0.3, 1)):
            found = of_groups([[0.0], [0.75]], **{how: True}, filter__tolerance=within)
            assert len(np.unique(found.catalog.group[found.trained])) == wanted


def zero_truncated(_=None):
    """A row of tests/test_every_option.py. What was cut off has reward 0, unless none is known."""
    found = sampled(tiny_model())
    rewards, ending = found.rewards.copy(), np.ones(found.traces, np.uint8)
    [a, b, c, d, *_] = np.flatnonzero(found.group == found.group[0])
    rewards[[a, b, c, d]], ending[[a, d]] = np.float32([[1], [1], [0.5], [np.nan]]), 2
    zeroed = Feed.of(
        replace(found, rewards=rewards, ending=ending),
        presets.DR_GRPO,
        told(filter__zero_truncated=True, data__holdout=0),
    )
    assert zeroed.rewards[[a, b, c]].tolist() == [0.0, 1.0, 0.5]
    assert np.isnan(zeroed.rewards[d])
    np.testing.assert_allclose(zeroed.advantages[[a, b, c]], [-0.5, 0.5, 0.0], atol=1e-6)
    assert zeroed.trained.all()


def test_what_does_not_say_how_it_ended_keeps_no_reward_by_chance(traces):
    zeroing = told(filter__zero_truncated=True)
    with pytest.raises(
        ArgumentError, match=r"trace '0' and \d+ more .* would keep their reward.*filter.zero_truncated"
    ):
        Feed.of(traces, presets.DR_GRPO, zeroing)
    unsaid = np.where(traces.group == traces.group[0], 0, 1).astype(np.uint8)
    unknown = np.where(unsaid[:, None] == 0, np.float32(np.nan), traces.rewards)
    assert Feed.of(replace(traces, ending=unsaid, rewards=unknown), presets.DR_GRPO, zeroing).trained.any()


def test_a_group_is_masked_for_the_rewards_of_what_was_not_cut_off(traces):
    ending, rewards = np.ones(traces.traces, np.uint8), traces.rewards.copy()
    first, *others = members = np.flatnonzero(traces.group == 1)
    rewards[members], rewards[first], ending[first] = 0.25, 1.0, 2
    cut = replace(traces, ending=ending, rewards=rewards)
    both = told(filter__mask_even=True, filter__truncated=True, data__holdout=0)
    assert Feed.of(cut, presets.DR_GRPO, both).masked[members].all()
    alone = Feed.of(cut, presets.DR_GRPO, told(filter__mask_even=True, data__holdout=0))
    assert not alone.masked[members].any()
    ending[members[:-1]] = 2  # one that is left alone has none to be equal to
    lone = Feed.of(replace(cut, ending=ending), presets.DR_GRPO, both)
    assert lone.masked[members].tolist() == [True] * len(others) + [False]


def test_a_trace_that_keeps_its_reward_is_of_no_even_group(traces):
    group = traces.group.copy()
    group[0] = 10_000
    for singleton in ("keep", "zero"):
        told_ = told(filter__even_groups=True, advantage__singleton=singleton, data__holdout=0)
        assert Feed.of(replace(traces, group=group), presets.DR_GRPO, told_).taken[0] == (singleton == "keep")


def test_masks_that_leave_nothing_are_said(traces):
    near = replace(traces, rewards=(traces.rewards * np.float32(1e-3)).astype(np.float32))
    with pytest.raises(ArgumentError, match=r"in no group do rewards differ, and filter\.mask_even masks \d+ traces"):
        Feed.of(near, presets.DR_GRPO, told(filter__mask_even=True, filter__tolerance=0.1))


def test_a_trace_that_may_have_been_cut_off_is_not_guessed(traces):
    masking = told(filter__truncated=True)
    with pytest.raises(ArgumentError, match=r"trace '0' and \d+ more do not say how they ended"):
        Feed.of(traces, presets.DR_GRPO, masking)
    held = Feed.of(traces, presets.DR_GRPO, told()).held
    only_held = np.where(held, 0, 1).astype(np.uint8)
    assert not Feed.of(replace(traces, ending=only_held), presets.DR_GRPO, masking).masked.any()
    with pytest.raises(ArgumentError, match=r"traces were cut off, and filter\.truncated masks them"):
        Feed.of(replace(traces, ending=np.full(traces.traces, 2, np.uint8)), presets.DR_GRPO, masking)


def test_a_step_of_which_all_was_cut_off_moves_nothing(traces, tmp_path):
    ending = np.where(traces.group < traces.group.max(), 2, 1).astype(np.uint8)
    told_ = {"filter__truncated": True, "pack__step_groups": 1, "data__holdout": 0, "train__epochs": 1}
    done, _ = run(replace(traces, ending=ending), tmp_path, objective=presets.DR_GRPO, **told_)
    rows = [row for row in done.rows if "terms" in row]
    assert len(rows) == len(np.unique(traces.group))
    assert [row["step"] for row in rows if row["grad_norm"] > 0] == [row["step"] for row in rows if row["terms"]]
    assert sum(row["terms"] > 0 for row in rows) == 1


def parameters(found):
    return torch.cat([value.flatten().double() for value in found.values()])


@pytest.mark.parametrize("objective", [presets.DR_GRPO, GATED], ids=["advantage 0", "dropped"])
@pytest.mark.parametrize(
    "options",
    [("pack__skip_zero_weight",), ("pack__share_prefixes",), ("pack__skip_zero_weight", "pack__share_prefixes")],
)
def test_a_run_with_the_options_comes_to_the_same_parameters(traces, tmp_path, objective, options):
    plain, wanted = run(traces, tmp_path / "plain", objective=objective, optimizer__eps=1e-3)
    told_so = dict.fromkeys(options, True)
    done, found = run(traces, tmp_path / "with", objective=objective, optimizer__eps=1e-3, **told_so)
    moved = parameters(wanted) - parameters(tiny_model().state_dict())
    assert (parameters(found) - parameters(wanted)).norm() / moved.norm() < 1e-4
    ours, theirs = without_times(done.rows)[1:], without_times(plain.rows)[1:]
    for row, other in zip(ours, theirs, strict=True):
        assert row["frac_zero_advantage"] == pytest.approx(other["frac_zero_advantage"])
        assert row["loss"] == pytest.approx(other["loss"], rel=1e-4, abs=1e-6)
    assert any(row["frac_zero_advantage"] for row in ours)
    assert sum(row["tokens"] for row in ours) < sum(row["tokens"] for row in theirs)


def test_metrics_of_a_run_that_skips_are_of_the_terms_it_has_computed(traces, tmp_path):
    done, _ = run(traces, tmp_path, objective=GATED, pack__skip_zero_weight=True, train__epochs=1)
    for row in done.rows[1:]:
        assert 0 < row["entropy"] < np.log(tiny_model().config.vocab_size)
        assert np.isfinite(row["ratio_mean"])
    for part in done.terms:
        assert len(part.logprobs)
        assert not np.isnan(part.logprobs).any()


def test_rows_padded_to_one_length_train_the_same_and_padding_is_no_token(traces, tmp_path):
    plain = Feed.of(traces, presets.DR_GRPO, told(data__holdout=0)).steps(0)
    even = Feed.of(traces, presets.DR_GRPO, told(data__holdout=0), bucket=64).steps(0)
    assert {len(batch.ids) for step in even for batch in step.batches} == {64}
    assert [sum(b.tokens for b in step.batches) for step in even] == [
        sum(len(b.ids) for b in step.batches) for step in plain
    ]
    one, other = (tiny_model(3) for _ in range(2))
    for model, [step, *_] in ((one, plain), (other, even)):
        step = step.with_logprobs(old=measure(tiny_model(1), step.batches))
        optimizer_step(model, step, presets.DR_GRPO, torch.optim.SGD(model.parameters(), lr=1.0))
    start, found, wanted = (parameters(model.state_dict()) for model in (tiny_model(3), other, one))
    assert (found - wanted).norm() / (wanted - start).norm() < 1e-5


def test_nothing_can_be_left_out_under_an_ungated_entropy_bonus(traces, tmp_path):
    bonus = with_entropy(presets.GRPO, 0.05)
    bonus = replace(bonus, entropy=replace(bonus.entropy, gated=False))
    with pytest.raises(ArgumentError, match=r"pack.skip_zero_weight has no effect: .*entropy"):
        run(traces, tmp_path, objective=bonus, pack__skip_zero_weight=True)


# --- which traces are left out ---


def of_two_groups(**how):
    """Eight traces of two groups: rewards 0, 1, 2, 3 in each; of 1 and 2 turns in turn, tiers T0 and T4, versions."""
    found = sampled(tiny_model(), groups=2)
    place = np.arange(found.traces) % 4
    owner = np.repeat(found.trace, np.diff(found.cu_seqlens))
    last = np.append(np.diff(owner) > 0, True)
    turn = np.where(found.trainable & last & (owner % 2 == 1), 1, found.turn).astype(np.int32)
    turns = 1 + np.arange(found.traces) % 2
    cut = replace(
        found,
        rewards=place.astype(np.float32)[:, None],
        turn=turn,
        cu_turns=np.concatenate([[0], np.cumsum(turns)]).astype(np.int64),
        turn_rewards=np.full(turns.sum(), np.nan, np.float32),
        tier=np.where(found.trainable & last & (owner == 5), 4, found.tier).astype(np.uint8),
        version=np.where(found.trainable, 9 - owner, -1).astype(np.int32),
    )
    changes = {
        "data__holdout": 0,
        "pack__step_groups": 100,
        **{f"filter__{name}": value for name, value in how.items()},
    }
    return Feed.of(cut, presets.DR_GRPO, told(**changes))


BY_TRACE = [
    ({"min_reward": 1.5}, [2, 3, 6, 7], "4 of 8 traces are left out: filter.min_reward."),
    ({"max_reward": 1}, [0, 1, 4, 5], "4 of 8 traces are left out: filter.max_reward."),
    ({"min_turns": 2}, [1, 3, 5, 7], "4 of 8 traces are left out: filter.min_turns."),
    ({"max_turns": 1}, [0, 2, 4, 6], "4 of 8 traces are left out: filter.max_turns."),
    ({"worst_tier": "T3"}, [0, 1, 2, 3, 4, 6, 7], "1 of 8 traces are left out: filter.worst_tier."),
    ({"max_lag": 2}, [0, 1, 2], "5 of 8 traces are left out: filter.max_lag."),
    ({"min_reward": 1, "max_reward": 2}, [1, 2, 5, 6], "2 of 6 traces are left out: filter.max_reward."),
]


@pytest.mark.parametrize(("how", "left", "said"), BY_TRACE)
def test_a_filter_of_traces_leaves_them_out_before_any_is_compared(how, left, said):
    check_filter(how, left, said)


def check_filter(how, left, said):
    found = of_two_groups(**how)
    assert np.flatnonzero(found.used).tolist() == left
    assert said in found.notes
    (step,) = found.steps(0)
    assert np.unique(step.trace).tolist() == left
    assert step.totals.traces == len(left)
    group, reward = found.catalog.group[left], found.rewards[left]
    mean = np.array([reward[group == each].mean() for each in group])
    np.testing.assert_allclose(found.advantages[left], reward - mean, atol=1e-6)
    assert not found.advantages[~found.used].any()


def by_trace(_=None):
    """A row of tests/test_every_option.py for each filter of traces alone."""
    for how, left, said in BY_TRACE:
        check_filter(how, left, said)


def test_held_out_traces_stay_whatever_a_filter_says():
    found = sampled(tiny_model())
    feed = Feed.of(
        found, presets.DR_GRPO, told(data__holdout=0.25, filter__min_reward=0.5, advantage__singleton="zero")
    )
    assert feed.held.sum() == found.traces / 4
    assert np.array_equal(feed.used, ~feed.held & (found.reward >= 0.5))


def test_a_trace_without_a_reward_is_within_bounds_and_one_of_no_version_within_no_lag():
    found = sampled(tiny_model(), groups=2)
    rewards, version = found.rewards.copy(), np.where(found.trainable, 3, -1).astype(np.int32)
    rewards[0] = np.nan
    version[found.terms[-1]] = -1
    some = replace(found, rewards=rewards, version=version)
    for most in (0, 5):
        how = told(data__holdout=0, filter__min_reward=0.001, filter__max_lag=most, pack__step_groups=100)
        used = Feed.of(some, presets.DR_GRPO, how).used
        assert used[0]
        assert not used[-1]


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ({"filter__max_lag": 3}, "filter.max_lag has no effect: no trace says which version"),
        ({"filter__min_reward": 7.0}, r"nothing is left to train on: 96 of 96 traces are left out: filter.min_reward"),
        ({"filter__min_turns": 1}, "filter.min_turns is 1: each trace has one"),
        ({"filter__min_turns": -1}, "filter.min_turns is -1"),
        ({"filter__max_turns": -1}, "filter.max_turns is -1: it must not be negative"),
        ({"filter__min_turns": 3, "filter__max_turns": 2}, "filter.max_turns is 2: it is below min_turns"),
        ({"filter__min_reward": 1.0, "filter__max_reward": 0.5}, "filter.max_reward is 0.5: it is below min_reward"),
        ({"filter__max_lag": -2}, "filter.max_lag is -2"),
        ({"filter__worst_tier": "T7"}, "filter.worst_tier is 'T7'"),
    ],
)
def test_a_filter_that_cannot_work_is_refused(how, said):
    with pytest.raises(ArgumentError, match=said):
        Feed.of(sampled(tiny_model()), presets.DR_GRPO, told(data__holdout=0, **how))


# What `test_every_option` gives these options of [filter] to.
OF_FILTER = (even_groups, mask_even, tolerance, truncated, zero_truncated)


def attention(_):
    """A row of test_every_option.py: the attention of a model on CUDA."""
    model = tiny_model()
    choose_attention(model, told(attention__implementation="sdpa"))
    assert model.config._attn_implementation == "sdpa"
    choose_attention(model, told())
    assert model.config._attn_implementation == "tracegrad_flex"
