"""KL in the reward beside verl's `apply_kl_penalty` and SkyRL's `apply_reward_kl_penalty`, and their controllers.

Both stand in modules that import a whole trainer: the functions alone are taken out of their files and executed.
"""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from kl_reward_cases import VERL, Rows, taken
from padded import hard
from tracegrad import advantage as adv

REWARDS = [1.0, 0.0, 0.25, 1.0, 0.5, 0.0, 2.0, 1.0]
SKYRL = {"k1": None, "abs": None, "k2": None, "k3": 10.0}


def flat(data: dict[str, Any]) -> tuple[np.ndarray, ...]:
    mask = data["mask"].numpy()
    return data["old"].numpy()[mask], data["ref"].numpy()[mask], np.nonzero(mask)[0]


def alike(close: Any, name: str, ours: adv.PenalisedRewards, theirs: torch.Tensor, data: dict[str, Any]) -> None:
    """Their rewards of terms: nothing but what each pays, and the outcome at a column where no term need stand."""
    outcome = torch.zeros_like(theirs)
    outcome[:, 0] = torch.tensor(REWARDS, dtype=torch.float64)
    close(f"{name}, rewards", ours.rewards, theirs.sum(1))
    close(f"{name}, per term", ours.per_term, (theirs - outcome)[data["mask"]])


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("kind", VERL)
def test_what_a_trace_pays_is_verls_and_so_is_the_coefficient(close, kind, seed):
    core = pytest.importorskip("verl.trainer.ppo.core_algos")
    from verl.utils.torch_functional import masked_mean

    apply = taken(
        "verl.trainer.ppo.ray_trainer",
        "apply_kl_penalty",
        {"core_algos": core, "torch": torch, "masked_mean": masked_mean},
    )
    data = hard(seed)
    data["old"][4, 1], data["mask"][4, 1] = -12.0, True  # k3 far above its cap
    scores = torch.zeros_like(data["old"])
    scores[:, 0] = torch.tensor(REWARDS, dtype=torch.float64)
    named = {"old_log_probs": data["old"], "ref_log_prob": data["ref"], "token_level_scores": scores}
    batch = Rows(**named, response_mask=data["mask"].double())
    control, ours = core.AdaptiveKLController(0.1, 0.05, 100), adv.AdaptiveKl(0.1, 0.05, 100)
    estimate, cap = VERL[kind]
    for _ in range(3):
        found = adv.kl_in_reward(REWARDS, *flat(data), coef=ours.coef, kind=estimate, cap=cap)
        theirs, told = apply(SimpleNamespace(batch=batch), control, kind)
        alike(close, "verl's KL in the reward", found, theirs.batch["token_level_rewards"], data)
        rows = len(data["mask"])
        alive = int(data["mask"].any(1).sum())  # verl's mean counts the row without a term
        close("verl's KL in the reward, KL", found.kl * alive / rows, told["actor/reward_kl_penalty"], 1e-6)
        ours = ours.after(found.kl * alive / rows, rows)
        close("verl's adaptive coefficient", ours.coef, control.value, 1e-6)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("kind", SKYRL)
def test_what_a_trace_pays_is_skyrls(close, kind, seed):
    ppo = pytest.importorskip("skyrl.backends.skyrl_train.utils.ppo_utils")
    scope = {"torch": torch, "compute_approx_kl": ppo.compute_approx_kl, "masked_mean": ppo.masked_mean}
    apply = taken("skyrl.train.trainer", "apply_reward_kl_penalty", scope)
    data = hard(seed)
    rewards = torch.zeros_like(data["old"])
    rewards[:, 0] = torch.tensor(REWARDS, dtype=torch.float64)
    named = {"base_action_log_probs": data["ref"], "action_log_probs": data["old"], "rewards": rewards}
    batch = Rows(**named, loss_mask=data["mask"].double())
    algorithm = SimpleNamespace(kl_estimator_type=kind, kl_loss_coef=0.1)
    control = ppo.AdaptiveKLController(0.1, 0.05, 100)
    trainer = SimpleNamespace(
        reward_kl_controller=control, cfg=SimpleNamespace(trainer=SimpleNamespace(algorithm=algorithm)), all_metrics={}
    )
    theirs = apply(trainer, batch)
    found = adv.kl_in_reward(REWARDS, *flat(data), coef=0.1, kind=kind, cap=SKYRL[kind])
    alike(close, "SkyRL's KL in the reward", found, theirs["rewards"], data)
    rows = len(data["mask"])
    ours = adv.AdaptiveKl(0.1, 0.05, 100).after(found.kl * int(data["mask"].any(1).sum()) / rows, rows)
    close("SkyRL's adaptive coefficient", ours.coef, control.value, 1e-6)
