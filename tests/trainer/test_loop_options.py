"""Options of a run that change its work and nothing else: shared prefixes, and what cannot matter left out."""

from dataclasses import replace

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from tiny import sampled, tiny_model
from tracegrad.errors import ArgumentError
from tracegrad.objective import Aggregation, Ratio, Rejection, presets, with_entropy
from tracegrad.trainer.step import compute_logprobs, optimizer_step
from tracegrad.trainer.steps import TrainingData
from training_runs import run, told, without_times

GATED = replace(
    presets.GRPO,
    rejections=(Rejection(Ratio("old", "rollout"), level=Aggregation("trace", "mean"), low=0.99, high=1.01),),
)
"""Drops the terms of many traces before a logprob of theta is known."""


@pytest.fixture(scope="module")
def traces():
    """Groups, one of three with equal rewards, recorded by a policy that had drifted."""
    found = sampled(tiny_model())
    rewards = found.rewards.copy()
    rewards[found.group % 3 == 0] = 1.0
    drift = 0.05 * (found.trace % 2)[np.repeat(np.arange(found.branches), np.diff(found.cu_seqlens))]
    return replace(found, rewards=rewards, rollout_logprobs=found.rollout_logprobs - drift.astype(np.float32))


def test_what_does_not_say_how_it_ended_keeps_no_reward_by_chance(traces):
    zeroing = told(filter__zero_truncated=True)
    with pytest.raises(ArgumentError, match=r"TG-TRAIN-071.*0.*95.*filter\.zero_truncated"):
        TrainingData.of(traces, presets.DR_GRPO, zeroing)
    unsaid = np.where(traces.group == traces.group[0], 0, 1).astype(np.uint8)
    unknown = np.where(unsaid[:, None] == 0, np.float32(np.nan), traces.rewards)
    assert TrainingData.of(replace(traces, ending=unsaid, rewards=unknown), presets.DR_GRPO, zeroing).trained.any()


def test_a_group_is_masked_for_the_rewards_of_what_was_not_cut_off(traces):
    ending, rewards = np.ones(traces.traces, np.uint8), traces.rewards.copy()
    first, *others = members = np.flatnonzero(traces.group == 1)
    rewards[members], rewards[first], ending[first] = 0.25, 1.0, 2
    cut = replace(traces, ending=ending, rewards=rewards)
    both = told(filter__mask_zero_std_groups=True, filter__mask_truncated=True, data__holdout=0)
    assert TrainingData.of(cut, presets.DR_GRPO, both).masked[members].all()
    alone = TrainingData.of(cut, presets.DR_GRPO, told(filter__mask_zero_std_groups=True, data__holdout=0))
    assert not alone.masked[members].any()
    ending[members[:-1]] = 2  # one that is left alone has none to be equal to
    lone = TrainingData.of(replace(cut, ending=ending), presets.DR_GRPO, both)
    assert lone.masked[members].tolist() == [True] * len(others) + [False]


def test_a_trace_that_keeps_its_reward_is_of_no_even_group(traces):
    group = traces.group.copy()
    group[0] = 10_000
    for kept in ("keep", "zero"):
        told_ = told(filter__drop_zero_std_groups=True, advantage__single_sample_group=kept, data__holdout=0)
        assert TrainingData.of(replace(traces, group=group), presets.DR_GRPO, told_).count_eligible[0] == (
            kept == "keep"
        )


def test_masks_that_leave_nothing_are_said(traces):
    near = replace(traces, rewards=(traces.rewards * np.float32(1e-3)).astype(np.float32))
    with pytest.raises(ArgumentError, match=r"TG-TRAIN-097.*filter\.mask_zero_std_groups.*92"):
        TrainingData.of(near, presets.DR_GRPO, told(filter__mask_zero_std_groups=True, filter__zero_std_tolerance=0.1))


def test_a_trace_that_may_have_been_cut_off_is_not_guessed(traces):
    masking = told(filter__mask_truncated=True)
    with pytest.raises(ArgumentError, match=r"TG-TRAIN-071.*0.*91"):
        TrainingData.of(traces, presets.DR_GRPO, masking)
    held = TrainingData.of(traces, presets.DR_GRPO, told()).held_out
    only_held = np.where(held, 0, 1).astype(np.uint8)
    assert not TrainingData.of(replace(traces, ending=only_held), presets.DR_GRPO, masking).masked.any()
    with pytest.raises(ArgumentError, match=r"TG-TRAIN-097.*filter\.mask_truncated"):
        TrainingData.of(replace(traces, ending=np.full(traces.traces, 2, np.uint8)), presets.DR_GRPO, masking)


def test_a_step_of_which_all_was_cut_off_moves_nothing(traces, tmp_path):
    ending = np.where(traces.group < traces.group.max(), 2, 1).astype(np.uint8)
    told_ = {"filter__mask_truncated": True, "train__groups_per_step": 1, "data__holdout": 0, "train__epochs": 1}
    done, _ = run(replace(traces, ending=ending), tmp_path, objective=presets.DR_GRPO, **told_)
    rows = [row for row in done.rows if "tokens_trained" in row]
    assert len(rows) == len(np.unique(traces.group))
    assert [row["step"] for row in rows if row["grad_norm"] > 0] == [
        row["step"] for row in rows if row["tokens_trained"]
    ]
    assert sum(row["tokens_trained"] > 0 for row in rows) == 1


def parameters(found):
    return torch.cat([value.flatten().double() for value in found.values()])


@pytest.mark.parametrize("objective", [presets.DR_GRPO, GATED], ids=["advantage 0", "dropped"])
@pytest.mark.parametrize(
    "options",
    [("pack__skip_zero_weight",), ("pack__share_prefixes",), ("pack__skip_zero_weight", "pack__share_prefixes")],
)
@pytest.mark.first_cases(1)
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
    plain = TrainingData.of(traces, presets.DR_GRPO, told(data__holdout=0)).steps(0)
    even = TrainingData.of(traces, presets.DR_GRPO, told(data__holdout=0), bucket=64).steps(0)
    assert {len(batch.ids) for step in even for batch in step.batches} == {64}
    assert [sum(b.tokens for b in step.batches) for step in even] == [
        sum(len(b.ids) for b in step.batches) for step in plain
    ]
    one, other = (tiny_model(3) for _ in range(2))
    for model, [step, *_] in ((one, plain), (other, even)):
        step = step.with_logprobs(old=compute_logprobs(tiny_model(1), step.batches))
        optimizer_step(model, step, presets.DR_GRPO, torch.optim.SGD(model.parameters(), lr=1.0))
    start, found, wanted = (parameters(model.state_dict()) for model in (tiny_model(3), other, one))
    assert (found - wanted).norm() / (wanted - start).norm() < 1e-5


def test_nothing_can_be_left_out_under_an_ungated_entropy_bonus(traces, tmp_path):
    bonus = with_entropy(presets.GRPO, 0.05)
    bonus = replace(bonus, entropy=replace(bonus.entropy, masked=False))
    with pytest.raises(ArgumentError, match=r"TG-TRAIN-085.*pack\.skip_zero_weight.*entropy"):
        run(traces, tmp_path, objective=bonus, pack__skip_zero_weight=True)


# --- which traces are left out ---


def test_held_out_traces_stay_whatever_a_filter_says():
    found = sampled(tiny_model())
    feed = TrainingData.of(
        found, presets.DR_GRPO, told(data__holdout=0.25, filter__min_reward=0.5, advantage__single_sample_group="zero")
    )
    assert feed.held_out.sum() == found.traces / 4
    assert np.array_equal(feed.eligible, ~feed.held_out & (found.reward >= 0.5))


def test_a_trace_without_a_reward_is_within_bounds_and_one_of_no_version_within_no_staleness():
    found = sampled(tiny_model(), groups=2)
    rewards, version = found.rewards.copy(), np.where(found.trainable, 3, -1).astype(np.int32)
    rewards[0] = np.nan
    version[found.terms[-1]] = -1
    some = replace(found, rewards=rewards, version=version)
    for most in (0, 5):
        how = told(data__holdout=0, filter__min_reward=0.001, filter__max_staleness=most, train__groups_per_step=100)
        used = TrainingData.of(some, presets.DR_GRPO, how).eligible
        assert used[0]
        assert not used[-1]


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ({"filter__max_staleness": 3}, "TG-TRAIN-070"),
        ({"filter__min_reward": 7.0}, r"TG-TRAIN-076.*96.*filter\.min_reward"),
        ({"filter__min_turns": 1}, r"TG-CONFIG-010.*filter\.min_turns.*1"),
        ({"filter__min_turns": -1}, r"TG-CONFIG-010.*filter\.min_turns.*-1"),
        ({"filter__max_turns": -1}, r"TG-CONFIG-010.*filter\.max_turns.*-1"),
        ({"filter__min_turns": 3, "filter__max_turns": 2}, r"TG-CONFIG-010.*filter\.max_turns.*2.*min_turns"),
        (
            {"filter__min_reward": 1.0, "filter__max_reward": 0.5},
            r"TG-CONFIG-010.*filter\.max_reward.*0\.5.*min_reward",
        ),
        ({"filter__max_staleness": -2}, r"TG-CONFIG-010.*filter\.max_staleness.*-2"),
        ({"filter__worst_level": "T8"}, r"TG-CONFIG-003.*filter\.worst_level.*T8"),
    ],
)
def test_a_filter_that_cannot_work_is_refused(how, said):
    with pytest.raises(ArgumentError, match=said):
        TrainingData.of(sampled(tiny_model()), presets.DR_GRPO, told(data__holdout=0, **how))
