"""trainer.optim: the adaptive coefficient, step by step and against TRL's own controller."""

from dataclasses import replace

import pytest
import torch

from tracegrad.errors import ArgumentError
from tracegrad.objective import AdaptiveEntropy, EntropyBonus, presets
from tracegrad.trainer.optim import EntropyController

ADAPT = AdaptiveEntropy(target=0.5, delta=0.1, low=0.05, high=0.3)


def control(coef=0.1, adapt=ADAPT):
    return EntropyController(replace(presets.DAPO, entropy=EntropyBonus(coef, masked=False, adapt=adapt)))


def test_the_bonus_applies_only_after_a_step_at_or_below_the_target():
    seen = control()
    assert seen.applied().entropy is None
    seen.update(0.5)
    assert seen.applied().entropy.coef == pytest.approx(0.2)
    seen.update(0.51)
    assert seen.applied().entropy is None


def test_a_gated_bonus_looks_at_kept_terms_alone():
    seen = EntropyController(replace(presets.DAPO, entropy=EntropyBonus(0.1, masked=True, adapt=ADAPT)))
    seen.update([0.2, 9.0], [True, False])
    assert seen.last == 0.2
    seen.update([0.2, 9.0], [False, False])
    assert seen.last == 0.0


def test_a_fixed_bonus_and_none_stay_as_they_are():
    fixed = control(adapt=None)
    fixed.update(0.1)
    assert fixed.applied() is fixed.objective
    assert fixed.state() == {}
    assert EntropyController(presets.DAPO).applied() is presets.DAPO


def test_a_state_goes_through_a_checkpoint():
    seen, again = control(), control()
    seen.update(0.2)
    again.restore(seen.state())
    assert again.applied() == seen.applied()


def test_a_bonus_of_zero_that_cannot_rise_is_refused():
    with pytest.raises(ArgumentError, match=r"TG-ARGS-013.*coefficient.*0.*does.*adapt"):
        EntropyBonus(0.0, masked=False)


def test_the_controller_is_that_of_trl():
    from peer_code import trl_loss_of, trl_trainer

    mask = torch.ones(2, 5, dtype=torch.long)
    logprobs = -torch.ones(2, 5)
    trainer = trl_trainer(
        use_adaptive_entropy=True,
        entropy_coef=0.1,
        entropy_target=0.5,
        entropy_coef_delta=0.1,
        entropy_coef_min=0.05,
        entropy_coef_max=0.3,
    )
    seen = control()
    for step in range(12):
        entropy = torch.full((2, 5), 0.5 + 0.4 * torch.sin(torch.tensor(step * 1.3)).item())
        inputs = {"completion_mask": mask, "advantages": torch.zeros(2), "old_per_token_logps": logprobs}
        bonus = seen.applied().entropy
        loss = trl_loss_of(trainer, logprobs, inputs, entropy)
        assert loss.item() == pytest.approx(-(bonus.coef if bonus else 0.0) * entropy.mean().item(), abs=1e-7)
        seen.update(entropy.reshape(-1).numpy())
        assert seen.coef == pytest.approx(trainer.entropy_coef)
