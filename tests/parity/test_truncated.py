"""Traces that were cut off, masked from records to loss and gradient, beside what TRL and SkyRL do with them."""

import numpy as np
import pytest
import torch

from peer_code import trl_advantages, trl_loss, trl_mask_truncated
from tracegrad import recipes
from tracegrad.trainer.steps import TrainingData
from truncated_cases import CUT, PAD, REWARDS, STOP, ours, padded, recorded

TRL = [{"loss_type": loss} for loss in ("dapo", "grpo", "bnpo", "dr_grpo", "luspo", "sapo", "vespo")]
TRL += [{"loss_type": "cispo", "epsilon_high": 5.0}, {"scale_rewards": "batch"}, {"beta": 0.04}]
TRL += [{"importance_sampling_level": "sequence", "loss_type": "grpo"}, {"entropy_coef": 0.05}]
TRL += [{"top_entropy_quantile": 0.4}]


@pytest.mark.parametrize("case", TRL, ids=str)
def test_masked_traces_are_trls(close, case):
    data = padded()
    recipe = recipes.from_trl({"mask_truncated_completions": True, **case})
    shown = data["mask"].long()
    row = torch.ones_like(shown)
    ids = [[7] * (row.shape[1] - 1) + [9 if cut else STOP] for cut in CUT]
    completion, tools = trl_mask_truncated(ids, row, shown, (STOP,), PAD)
    assert completion.sum() == 4 * row.shape[1]
    inputs = {
        "completion_mask": completion,
        "tool_mask": tools,
        "advantages": trl_advantages(REWARDS, 2, case.get("scale_rewards", "group")),
        "old_per_token_logps": data["old"],
        "ref_per_token_logps": data["ref"],
    }
    logprobs = data["logprobs"].clone().requires_grad_()
    loss = trl_loss(logprobs, inputs, data["entropy"], **case)
    loss.backward()
    found, gradient, feed = ours(recipe, data)
    np.testing.assert_allclose(feed.advantages, inputs["advantages"], rtol=1e-5)  # of cut traces too
    close("TRL's masked completions, loss", found, loss.detach(), 1e-6, floor=0.1)
    close("TRL's masked completions, gradient", gradient, logprobs.grad, 1e-6, floor=1e-2)
    assert not gradient[CUT].any()


@pytest.mark.parametrize("reduction", ["token_mean", "sequence_mean", "prompt_mean", "seq_mean_token_sum_norm"])
def test_filtered_traces_are_skyrls(close, reduction):
    config = pytest.importorskip("skyrl.train.config.config")
    ppo = pytest.importorskip("skyrl.backends.skyrl_train.utils.ppo_utils")
    utils = pytest.importorskip("skyrl.train.generators.utils")
    data, algorithm = padded(), config.AlgorithmConfig()
    told = {"trainer": {"algorithm": {"loss_reduction": reduction, "max_seq_len": 40, "use_kl_loss": False}}}
    recipe = recipes.from_skyrl({**told, "generator": {"apply_overlong_filtering": True}})
    reasons = ["length" if cut else "stop" for cut in CUT]
    mask = torch.tensor(utils.apply_overlong_filtering(data["mask"].double().tolist(), reasons), dtype=torch.float64)
    own = TrainingData.of(
        recorded(data), recipe.objective, recipe.resolve(overrides=[("data.holdout", 0)])[0]
    ).advantages
    flat = torch.from_numpy(own).double()[:, None].expand_as(mask)
    how = (reduction, 8, 40, [(0, 2), (2, 4), (4, 6), (6, 8)])
    scaled = ppo.apply_loss_reduction_to_advantages_minibatch(flat, mask, *how)
    logprobs = data["logprobs"].clone().requires_grad_()
    loss, _ = ppo.PolicyLossRegistry.get("regular")(logprobs, data["old"], scaled, algorithm, mask, None)
    loss.backward()
    found, gradient, _ = ours(recipe, data)
    close("SkyRL's overlong filtering, loss", found, loss.detach(), 1e-6, floor=0.1)
    close("SkyRL's overlong filtering, gradient", gradient, logprobs.grad, 1e-6, floor=1e-2)
