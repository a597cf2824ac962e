"""Every preset through the learner: it trains, whatever the cut of a step, and its memory goes through a checkpoint."""

from dataclasses import replace

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from tiny import sampled, tiny_model
from tracegrad.objective import AdaptiveEntropy, EntropyBonus, Objective, Penalty, Ratio, Reduce, presets, with_kl
from training_runs import SignalAfter, assert_same, run

NAMES = [name for name in presets.__all__ if isinstance(getattr(presets, name), Objective)]
VERSIONS = 5


@pytest.fixture(scope="module")
def traces():
    """Recorded by versions 0 to 4 of a policy, a missing logprob here and there."""
    recorded = sampled(tiny_model(), groups=8)
    random = np.random.default_rng(1)
    version = np.where(recorded.trainable, random.integers(0, VERSIONS, recorded.tokens), -1).astype(np.int32)
    noise = random.normal(0, 0.05, recorded.tokens).astype(np.float32)
    logprobs = np.minimum(recorded.rollout_logprobs + noise, -1e-4)
    logprobs[recorded.terms[::37]] = np.nan
    return replace(recorded, version=version, rollout_logprobs=logprobs)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.first_cases(10)
def test_a_preset_trains_and_its_gradient_does_not_depend_on_the_cut(traces, tmp_path, name):
    objective = getattr(presets, name)
    common = {"objective": objective, "train__epochs": 1, "optimizer__lr": 1e-3, "train__groups_per_step": 4}
    done, wide = run(traces, tmp_path / "wide", pack__tokens_per_row=512, **common)
    assert done.step == 2
    before = tiny_model().state_dict()
    assert any(not torch.equal(before[key], value) for key, value in wide.items())
    if objective.microbatch_components:
        return
    _, narrow = run(traces, tmp_path / "narrow", pack__tokens_per_row=24, **common)
    for key, value in wide.items():
        torch.testing.assert_close(narrow[key], value, rtol=1e-4, atol=2e-5)


def test_a_bonus_and_penalties_with_their_own_denominators_train_too(traces, tmp_path):
    per_trace = Reduce("trace", "mean")
    penalty = Penalty(Ratio("theta", "ref"), "k3", 0.1, masked=False, weighted=False, reduce=per_trace)
    objective = replace(
        presets.DAPO, penalties=(penalty,), entropy=EntropyBonus(0.5, masked=False, reduce=Reduce("token"))
    )
    done, with_bonus = run(traces, tmp_path / "a", objective=objective, optimizer__lr=1e-2)
    plain, _ = run(traces, tmp_path / "b", objective=replace(objective, entropy=None), optimizer__lr=1e-2)
    assert with_bonus
    assert done.rows[-1]["entropy"] > plain.rows[-1]["entropy"]  # the bonus holds it up


def test_an_adapting_bonus_resumes_where_it_was(traces, tmp_path):
    entropy = EntropyBonus(0.01, masked=True, adapt=AdaptiveEntropy(target=10.0, delta=0.02, high=0.5))
    objective = with_kl(replace(presets.DAPO, entropy=entropy), 0.01)
    done, parameters = run(traces, tmp_path / "whole", objective=objective)
    coefs = [row["entropy_coef"] for row in done.rows[1:]]
    assert coefs == pytest.approx([0.01 + 0.02 * step for step in range(len(coefs))])  # always below the target
    run(traces, tmp_path / "cut", objective=objective, sinks=[SignalAfter(2)])
    again, resumed = run(traces, tmp_path / "cut", tiny_model(9), objective=objective, resume=True)
    assert [row["entropy_coef"] for row in again.rows[1:]] == coefs
    assert_same(parameters, resumed)


def test_the_proximal_needs_no_pass_for_old(traces, tmp_path):
    done, _ = run(traces, tmp_path / "a3po", objective=presets.A3PO, train__updates_per_old_logprobs=2)
    assert "old" not in done.seconds
    assert all(np.isfinite(row["loss"]) for row in done.rows[1:])
