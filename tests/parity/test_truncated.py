"""Traces that were cut off, masked from records to loss and gradient, beside what TRL and SkyRL do with them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from padded import hard
from peer_code import trl_advantages, trl_loss, trl_mask_truncated
from tracegrad import recipes
from tracegrad.alignment.sequences import Sequences
from tracegrad.trainer.step import detached
from tracegrad.trainer.steps import Feed

STOP, PAD = 2, 0
REWARDS = torch.tensor([1.0, 0.0, 0.25, 1.0, 0.5, 0.0, 2.0, 1.0], dtype=torch.float64)
CUT = torch.tensor([False, True, False, False, True, True, False, True])  # rows 4 and 5 are a whole group
TRL = [{"loss_type": loss} for loss in ("dapo", "grpo", "bnpo", "dr_grpo", "luspo", "sapo", "vespo")]
TRL += [{"loss_type": "cispo", "epsilon_high": 5.0}, {"scale_rewards": "batch"}, {"beta": 0.04}]
TRL += [{"importance_sampling_level": "sequence", "loss_type": "grpo"}, {"entropy_coef": 0.05}]
TRL += [{"top_entropy_quantile": 0.4}]


def padded() -> dict[str, Any]:
    """Eight traces in four groups, none without a term."""
    data = hard(1)
    data["mask"][1, :5] = True
    return data


def recorded(data: dict[str, Any]) -> Sequences:
    """The same as a run reads them: a prompt of one token, then the row up to its last term."""
    rows, width = data["mask"].shape
    trainable = torch.cat([torch.zeros(rows, 1, dtype=torch.bool), data["mask"]], 1)
    ids = np.where(trainable, np.arange(width + 1) + 5, 3)
    ids[:, -1] = np.where(CUT, 9, STOP)
    return Sequences.from_arrays(
        ids.reshape(-1),
        np.arange(rows + 1) * (width + 1),
        np.full(ids.size, np.nan),
        trainable.reshape(-1).numpy(),
        group=np.arange(rows) // 2,
        rewards=REWARDS,
        ending=np.where(CUT, 2, 1),
    )


def ours(
    recipe: recipes.Recipe, data: dict[str, Any], sequences: Sequences | None = None
) -> tuple[torch.Tensor, torch.Tensor, Feed]:
    """Loss, and gradient by position, of the one step that a run with this recipe takes."""
    chosen, _ = recipe.settle(overrides=[("data.holdout", 0), ("pack.token_budget", 1000)])
    sequences = sequences or recorded(data)
    feed = Feed.of(sequences, recipe.objective, chosen)
    (step,) = feed.steps(0)
    row, column = np.divmod(step.origin, data["mask"].shape[1] + 1)
    at = (torch.from_numpy(row), torch.from_numpy(column - 1))
    needs = recipe.objective.needs
    step = step.with_logprobs(**{name: data[name][at].numpy() for name in ("old", "ref") if getattr(needs, name)})
    corrected = detached(step, recipe.objective, chosen.train.missing)
    logprobs, loss = data["logprobs"].clone().requires_grad_(), torch.zeros((), dtype=torch.float64)
    for batch in step.batches:
        own = tuple(index[torch.from_numpy(batch.term).long()] for index in at)
        entropy = data["entropy"][own] if needs.entropy else None
        loss = loss + recipe.objective(logprobs[own], entropy, step.terms(batch, corrected)).loss
    loss.backward()
    return loss.detach(), logprobs.grad, feed


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
    own = Feed.of(recorded(data), recipe.objective, recipe.settle(overrides=[("data.holdout", 0)])[0]).advantages
    flat = torch.from_numpy(own).double()[:, None].expand_as(mask)
    how = (reduction, 8, 40, [(0, 2), (2, 4), (4, 6), (6, 8)])
    scaled = ppo.apply_loss_reduction_to_advantages_minibatch(flat, mask, *how)
    logprobs = data["logprobs"].clone().requires_grad_()
    loss, _ = ppo.PolicyLossRegistry.get("regular")(logprobs, data["old"], scaled, algorithm, mask, None)
    loss.backward()
    found, gradient, _ = ours(recipe, data)
    close("SkyRL's overlong filtering, loss", found, loss.detach(), 1e-6, floor=0.1)
    close("SkyRL's overlong filtering, gradient", gradient, logprobs.grad, 1e-6, floor=1e-2)
