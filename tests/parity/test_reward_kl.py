"""KL in the reward of a run beside verl's `apply_kl_penalty` and the advantages of its GRPO, batch after batch."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from kl_reward_cases import VERL, Rows, taken
from padded import hard
from tracegrad import recipes
from tracegrad.trainer.advantages import RewardKl
from tracegrad.trainer.steps import TrainingData
from truncated_cases import REWARDS, padded, recorded


@pytest.mark.parametrize("kind", VERL)
@pytest.mark.parametrize("scale", [True, False])
def test_what_each_batch_keeps_is_compared_as_by_verl(close, kind, scale):
    core = pytest.importorskip("verl.trainer.ppo.core_algos")
    from verl.utils.torch_functional import masked_mean

    scope = {"core_algos": core, "torch": torch, "masked_mean": masked_mean}
    apply = taken("verl.trainer.ppo.ray_trainer", "apply_kl_penalty", scope)
    control = {"type": "adaptive", "kl_coef": 0.3, "target_kl": 0.05, "horizon": 100}
    algorithm = {"adv_estimator": "grpo", "norm_adv_by_std_in_grpo": scale, "kl_penalty": kind, "kl_ctrl": control}
    recipe = recipes.from_verl({"algorithm": {**algorithm, "use_kl_in_reward": True}})
    chosen, _ = recipe.resolve(overrides=[("data.holdout", 0), ("pack.tokens_per_row", 1000)])
    data = padded()
    sequences = recorded(data)
    feed = TrainingData.of(sequences, recipe.objective, chosen)
    steps = feed.steps(0)
    charge = RewardKl(feed.source, feed.rewards, feed.eligible, chosen)
    theirs = core.get_kl_controller(SimpleNamespace(**control))
    scores, mask = torch.zeros_like(data["old"]), data["mask"].double()
    scores[:, 0] = REWARDS
    for seed in range(3):
        moved = {name: hard(seed)[name] for name in ("old", "ref")}
        batch = Rows(old_log_probs=moved["old"], ref_log_prob=moved["ref"], token_level_scores=scores)
        batch["response_mask"] = mask
        coef = theirs.value
        paid, said = apply(SimpleNamespace(batch=batch), theirs, kind)
        groups, how = np.arange(8) // 2, {"norm_adv_by_std_in_grpo": scale, "epsilon": 1e-4}
        rewards = paid.batch["token_level_rewards"] * mask + scores * (1 - mask)  # the outcome where no term stands
        wanted, _ = core.compute_grpo_outcome_advantage(rewards, torch.ones_like(mask), groups, **how)
        row, column = np.divmod(np.arange(sequences.tokens), mask.shape[1] + 1)
        of = [np.float32(moved[name].numpy()[row, np.maximum(column - 1, 0)]) for name in ("old", "ref")]
        terms = np.sort(steps[0].origin)
        charge.batch(8, np.repeat(sequences.trace, np.diff(sequences.cu_seqlens))[terms], *(each[terms] for each in of))
        close("verl's KL in the reward of a run, advantages", charge.advantages, wanted[:, 0], 2e-5, floor=1e-2)
        close("verl's KL in the reward of a run, KL", charge.kl, said["actor/reward_kl_penalty"], 1e-6)
        close("verl's KL in the reward of a run, coefficient", charge.coef, coef, 1e-6)
    assert charge.following == pytest.approx(theirs.value)
    assert charge.following != 0.3
