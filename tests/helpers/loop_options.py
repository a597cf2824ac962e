"""Check options of filters, attention and time limits, rows of test_every_option.py."""

from dataclasses import replace
from unittest import mock

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")
from tiny import sampled, tiny_model
from tracegrad.objective import presets
from tracegrad.trainer.distributed import Ranks
from tracegrad.trainer.setup import choose_attention
from tracegrad.trainer.steps import TrainingData
from training_runs import run, told


def mask_truncated(_=None):
    """A row of test_every_option.py. A trace that was cut off counts with its reward and as a trace, no more."""
    found = sampled(tiny_model())
    ending = np.ones(found.traces, np.uint8)
    ending[0] = 2
    masking = told(filter__mask_truncated=True, data__holdout=0, train__groups_per_step=100)
    feed = TrainingData.of(replace(found, ending=ending), presets.DR_GRPO, masking)
    (step,) = feed.steps(0)
    assert np.unique(step.trace).tolist() == list(range(1, found.traces))
    assert step.totals.traces == found.traces
    group = found.group == found.group[0]
    np.testing.assert_allclose(feed.advantages[group], found.reward[group] - found.reward[group].mean(), atol=1e-6)
    assert feed.notes[-1] == f"1 of {found.traces} traces are truncated and masked (filter.mask_truncated)."


def timeout(folder):
    """A row of tests/trainer/test_every_option.py. What waits so long in truth is in tests/trainer/test_nodes.py."""
    joined, seen = Ranks.join, []
    with mock.patch.object(Ranks, "join", lambda *given: seen.append(given) or joined(*given)):
        run(sampled(tiny_model()), folder / "run", train__timeout_s=7.0)
    assert seen == [(7.0,)]


def of_groups(rewards, **how):
    """The tiny model's traces with the rewards given for those of the first groups, and equal ones in the others."""
    found = sampled(tiny_model())
    told_so = np.ones_like(found.rewards)
    for group, values in enumerate(rewards):
        told_so[np.flatnonzero(found.group == np.unique(found.group)[group])[: len(values)], 0] = values
    return TrainingData.of(
        replace(found, rewards=told_so), presets.DR_GRPO, told(data__holdout=0, train__groups_per_step=100, **how)
    )


def drop_zero_std_groups(_=None):
    """A row of tests/trainer/test_every_option.py."""
    found = of_groups([[0.0]], filter__drop_zero_std_groups=True)
    assert [step.totals.traces for step in found.steps(0)] == [int(found.count_eligible.sum())]
    assert np.unique(found.catalog.group[found.count_eligible]).tolist() == [found.catalog.group.min()]
    assert found.notes[-1].count("filter.drop_zero_std_groups") == 1


def mask_zero_std_groups(_=None):
    """A row of tests/trainer/test_every_option.py."""
    found = of_groups([[0.0]], filter__mask_zero_std_groups=True)
    (step,) = found.steps(0)
    s = found.catalog
    assert np.unique(s.group[np.unique(step.trace)]).tolist() == [s.group.min()]
    assert step.totals.traces == s.traces
    others = int((s.group != s.group.min()).sum())
    assert found.notes[-1].startswith(f"{others} traces ")
    assert "filter.mask_zero_std_groups" in found.notes[-1]


def zero_std_tolerance(_=None):
    """A row of tests/trainer/test_every_option.py."""
    for how in ("filter__drop_zero_std_groups", "filter__mask_zero_std_groups"):
        for within, wanted in ((0.2, 2), (0.25, 1), (0.3, 1)):
            found = of_groups([[0.0], [0.75]], **{how: True}, filter__zero_std_tolerance=within)
            assert len(np.unique(found.catalog.group[found.trained])) == wanted


def zero_truncated(_=None):
    """A row of tests/trainer/test_every_option.py. What was cut off has reward 0, unless none is known."""
    found = sampled(tiny_model())
    rewards, ending = found.rewards.copy(), np.ones(found.traces, np.uint8)
    [a, b, c, d, *_] = np.flatnonzero(found.group == found.group[0])
    rewards[[a, b, c, d]], ending[[a, d]] = np.float32([[1], [1], [0.5], [np.nan]]), 2
    zeroed = TrainingData.of(
        replace(found, rewards=rewards, ending=ending),
        presets.DR_GRPO,
        told(filter__zero_truncated=True, data__holdout=0),
    )
    assert zeroed.rewards[[a, b, c]].tolist() == [0.0, 1.0, 0.5]
    assert np.isnan(zeroed.rewards[d])
    np.testing.assert_allclose(zeroed.advantages[[a, b, c]], [-0.5, 0.5, 0.0], atol=1e-6)
    assert zeroed.trained.all()


def of_two_groups(**how):
    """Eight traces of two groups: rewards 0, 1, 2, 3 in each; of 1 and 2 turns in turn, levels T0 and T4, versions."""
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
        alignment_level=np.where(found.trainable & last & (owner == 5), 4, found.alignment_level).astype(np.uint8),
        version=np.where(found.trainable, 9 - owner, -1).astype(np.int32),
    )
    changes = {
        "data__holdout": 0,
        "train__groups_per_step": 100,
        **{f"filter__{name}": value for name, value in how.items()},
    }
    return TrainingData.of(cut, presets.DR_GRPO, told(**changes))


BY_TRACE = [
    ({"min_reward": 1.5}, [2, 3, 6, 7], "4 of 8 traces are left out by filter.min_reward."),
    ({"max_reward": 1}, [0, 1, 4, 5], "4 of 8 traces are left out by filter.max_reward."),
    ({"min_turns": 2}, [1, 3, 5, 7], "4 of 8 traces are left out by filter.min_turns."),
    ({"max_turns": 1}, [0, 2, 4, 6], "4 of 8 traces are left out by filter.max_turns."),
    ({"worst_level": "T3"}, [0, 1, 2, 3, 4, 6, 7], "1 of 8 traces are left out by filter.worst_level."),
    ({"max_staleness": 2}, [0, 1, 2], "5 of 8 traces are left out by filter.max_staleness."),
    ({"min_reward": 1, "max_reward": 2}, [1, 2, 5, 6], "2 of 6 traces are left out by filter.max_reward."),
]


def check_filter(how, left, said):
    found = of_two_groups(**how)
    assert np.flatnonzero(found.eligible).tolist() == left
    assert said in found.notes
    (step,) = found.steps(0)
    assert np.unique(step.trace).tolist() == left
    assert step.totals.traces == len(left)
    group, reward = found.catalog.group[left], found.rewards[left]
    mean = np.array([reward[group == each].mean() for each in group])
    np.testing.assert_allclose(found.advantages[left], reward - mean, atol=1e-6)
    assert not found.advantages[~found.eligible].any()


def by_trace(option):
    """Return the row of test_every_option.py of a filter of traces alone."""
    return lambda _: [check_filter(*row) for row in BY_TRACE if option in row[0]]


# What `test_every_option` gives these options of [filter] to.
OF_FILTER = (drop_zero_std_groups, mask_zero_std_groups, zero_std_tolerance, mask_truncated, zero_truncated)


def attention(_):
    """A row of test_every_option.py: the attention of a model on CUDA."""
    model = tiny_model()
    choose_attention(model, told(attention__implementation="sdpa"))
    assert model.config._attn_implementation == "sdpa"
    choose_attention(model, told())
    assert model.config._attn_implementation == "tracegrad_flex"
