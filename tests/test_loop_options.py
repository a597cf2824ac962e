"""Options of a run that change its work and nothing else: shared prefixes, and what cannot matter left out."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from test_loop import run, told, without_times  # noqa: E402
from tiny import sampled, tiny_model  # noqa: E402
from tracegrad import presets  # noqa: E402
from tracegrad.algebra import Gate, Level, Ratio, with_entropy  # noqa: E402
from tracegrad.errors import ArgumentError  # noqa: E402
from tracegrad.learner.feed import Feed  # noqa: E402
from tracegrad.learner.step import measure, optimizer_step  # noqa: E402

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


def parameters(found):
    return torch.cat([value.flatten().double() for value in found.values()])


@pytest.mark.parametrize("objective", [presets.DR_GRPO, GATED], ids=["advantage 0", "dropped"])
@pytest.mark.parametrize("option", ["idle", "repeats", "both"])
def test_a_run_with_the_option_comes_to_the_same_parameters(traces, tmp_path, objective, option):
    plain, wanted = run(traces, tmp_path / "plain", objective=objective, optimizer__eps=1e-3)
    done, found = run(traces, tmp_path / "with", objective=objective, optimizer__eps=1e-3, pack__leave_out=option)
    moved = parameters(wanted) - parameters(tiny_model().state_dict())
    assert (parameters(found) - parameters(wanted)).norm() / moved.norm() < 1e-4
    ours, theirs = without_times(done.rows)[1:], without_times(plain.rows)[1:]
    for row, other in zip(ours, theirs, strict=True):
        assert row["frac_zero_advantage"] == pytest.approx(other["frac_zero_advantage"])
        assert row["loss"] == pytest.approx(other["loss"], rel=1e-4, abs=1e-6)
    assert any(row["frac_zero_advantage"] for row in ours)
    assert sum(row["tokens"] for row in ours) < sum(row["tokens"] for row in theirs)


def test_metrics_of_a_run_that_skips_are_of_the_terms_it_has_computed(traces, tmp_path):
    done, _ = run(traces, tmp_path, objective=GATED, pack__leave_out="idle", train__epochs=1)
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
    with pytest.raises(ArgumentError, match=r"pack.leave_out has no effect: .*entropy"):
        run(traces, tmp_path, objective=bonus, pack__leave_out="idle")
