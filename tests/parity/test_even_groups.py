"""Groups without spread and rewards of what was cut off: from records to loss and gradient, beside verl and SkyRL."""

from collections import Counter, defaultdict
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from kl_reward_cases import taken
from tracegrad import recipes
from tracegrad.alignment.sequences import Sequences
from truncated_cases import CUT, ours, padded, recorded

GROUPS = ["a", "a", "b", "b", "c", "c", "d", "d"]
REWARDS = np.float32([1.0, 0.0, 0.5, 0.5, 0.25, 0.25 + 5e-7, 2.0, 1.0])  # b is even, c within SkyRL's tolerance
REASONS = ["length" if cut else "stop" for cut in CUT]
SKYRL = "skyrl.train.utils.trainer_utils"


def batch(data: dict[str, Any], rewards: Any = REWARDS) -> Sequences:
    return replace(recorded(data), rewards=np.float32(rewards)[:, None])


def skyrls(data: dict[str, Any], mask: torch.Tensor, rewards: Any, reduction: str, groups: list[str] = GROUPS):
    """SkyRL's GRPO advantages, its regular loss on a mask of its own making, and the gradient."""
    config = pytest.importorskip("skyrl.train.config.config")
    ppo = pytest.importorskip("skyrl.backends.skyrl_train.utils.ppo_utils")
    flat = torch.zeros_like(mask)
    flat[:, -1] = torch.as_tensor(rewards, dtype=torch.float64)
    advantages, _ = ppo.compute_grpo_outcome_advantage(flat, torch.ones_like(mask), np.array(groups), epsilon=1e-4)
    size = len(groups)
    how = (reduction, size, 40, [(at, at + 2) for at in range(0, size, 2)])
    scaled = ppo.apply_loss_reduction_to_advantages_minibatch(advantages, mask, *how)
    logprobs = data["logprobs"].clone().requires_grad_()
    loss, _ = ppo.PolicyLossRegistry.get("regular")(logprobs, data["old"], scaled, config.AlgorithmConfig(), mask, None)
    loss.backward()
    return loss.detach(), logprobs.grad


def told(**more: Any) -> dict[str, Any]:
    algorithm = {"trainer.algorithm.max_seq_len": 40, "trainer.algorithm.use_kl_loss": False}
    return {**algorithm, **{name.replace("__", "."): value for name, value in more.items()}}


@pytest.mark.parametrize("reduction", ["token_mean", "sequence_mean", "prompt_mean", "seq_mean_token_sum_norm"])
@pytest.mark.parametrize("overlong", [False, True])
@pytest.mark.parametrize("tolerance", [1e-6, 0.0])
def test_masked_groups_are_skyrls(close, reduction, overlong, tolerance):
    utils = pytest.importorskip("skyrl.train.generators.utils")
    keep = taken(SKYRL, "zero_variance_filter", {"defaultdict": defaultdict})
    data = padded()
    mask = data["mask"].double().tolist()
    mask = utils.apply_overlong_filtering(mask, REASONS) if overlong else mask
    kept = set(keep(REWARDS.tolist(), GROUPS, loss_masks=mask, tol=tolerance))
    mask = torch.tensor([row if at in kept else [0] * len(row) for at, row in enumerate(mask)], dtype=torch.float64)
    algorithm = {"loss_reduction": reduction, "zero_variance_filter": True, "zero_variance_filter_tol": tolerance}
    options = told(**{f"trainer__algorithm__{name}": value for name, value in algorithm.items()})
    recipe = recipes.from_skyrl({**options, "generator.apply_overlong_filtering": overlong})
    theirs = skyrls(data, mask, REWARDS, reduction)
    loss, gradient, feed = ours(recipe, data, batch(data))
    assert feed.trained.tolist() == mask.any(1).tolist()
    close("SkyRL's zero-variance filter, loss", loss, theirs[0], 1e-6, floor=0.1)
    close("SkyRL's zero-variance filter, gradient", gradient, theirs[1], 1e-6, floor=1e-2)


def left_by_skyrl(rewards: np.ndarray) -> list[int]:
    """The rows that its dynamic sampling of type filter collects; the rest it samples again."""
    names = ("rewards", "prompt_token_ids", "response_ids", "loss_masks", "rollout_logprobs")
    output: dict[str, Any] = {name: list(range(len(rewards))) for name in names}
    output |= {"rewards": rewards.tolist(), "stop_reasons": REASONS}
    said = SimpleNamespace(info=lambda text: None)
    scope = {"np": np, "defaultdict": defaultdict, "logger": said}
    taken(SKYRL, "filter_generator_output", scope)
    apply = taken(SKYRL, "handle_filter_sampling", scope)
    state: dict[str, Any] = {"sample_batch_count": 1}
    apply(output, GROUPS, {"train_batch_size": 4, "n_samples_per_prompt": 2}, state)
    return state["collected_generator_output"]["response_ids"]


def left_by_verl(rewards: np.ndarray) -> list[int]:
    """The rows of the groups that its replay buffer does not evict for their shared reward."""
    scores = {f"{group}_{at}": torch.tensor([0.0, rewards[at]]) for at, group in enumerate(GROUPS)}
    store = SimpleNamespace(kv_batch_get=lambda keys, **_: {"rm_scores": [scores[key] for key in keys]})
    scope = {
        "np": np,
        "defaultdict": defaultdict,
        "Counter": Counter,
        "tq": store,
        "FILTER_GROUPS_REWARD_METRIC": "reward",
    }
    apply = taken("verl.trainer.ppo.v1.replay_buffer", "_dapo_filtered_keys", scope)
    buffer = SimpleNamespace(
        filter_groups_metric="reward",
        finished_keys={"train": set(GROUPS)},
        partitions={"train": list(scores)},
        _dapo_classification_cache={"train": {}},
    )
    evicted, _ = apply(buffer, "train")
    return [at for at, group in enumerate(GROUPS) if group not in evicted]


@pytest.mark.parametrize("peer", ["skyrl", "verl"])
@pytest.mark.parametrize("reduction", ["token_mean", "sequence_mean"])
def test_what_is_left_of_a_batch_is_theirs_and_counts_alone(close, peer, reduction):
    """The rest of a batch in the loss of SkyRL, which both regular losses are on the policy as it was."""
    pytest.importorskip(peer)
    left = (left_by_skyrl if peer == "skyrl" else left_by_verl)(REWARDS)
    assert left == [0, 1, 4, 5, 6, 7]
    data, part = padded(), {}
    for name, values in data.items():
        part[name] = values[left] if torch.is_tensor(values) and len(values) == 8 else values
    theirs = skyrls(part, part["mask"].double(), REWARDS[left], reduction, [GROUPS[at] for at in left])
    if peer == "skyrl":
        more = {"dynamic_sampling__type": "filter", "loss_reduction": reduction}
        recipe = recipes.from_skyrl(told(**{f"trainer__algorithm__{name}": value for name, value in more.items()}))
    else:
        mode = {"token_mean": "token-mean", "sequence_mean": "seq-mean-token-mean"}[reduction]
        algorithm = {"adv_estimator": "grpo", "filter_groups": {"enable": True, "metric": "reward"}}
        actor = {"loss_agg_mode": mode, "clip_ratio_c": 1e9}
        recipe = recipes.from_verl({"algorithm": algorithm, "actor_rollout_ref": {"actor": actor}})
    loss, gradient, feed = ours(recipe, data, batch(data))
    assert np.flatnonzero(feed.trained).tolist() == left
    close("dynamic sampling, loss", loss, theirs[0], 1e-6, floor=0.1)
    close("dynamic sampling, gradient", gradient[left], theirs[1], 1e-6, floor=1e-2)
    assert not gradient[[2, 3]].any()


def test_rewards_of_what_did_not_stop_are_skyrls(close):
    """Group a then has spread by that alone, and group d has another one."""
    zero = taken("skyrl.train.generators.skyrl_gym_generator", "_zero_reward_if_not_stop", {"List": list, "Union": Any})
    rewards = [1.0, 1.0, 0.5, 0.25, 0.0, 2.0, 2.0, 1.5]
    settled = zero(SimpleNamespace(), list(rewards), REASONS)
    assert settled == [1.0, 0.0, 0.5, 0.25, 0.0, 0.0, 2.0, 0.0]
    data = padded()
    theirs = skyrls(data, data["mask"].double(), settled, "token_mean")
    recipe = recipes.from_skyrl(told(generator__zero_reward_on_non_stop=True))
    loss, gradient, feed = ours(recipe, data, batch(data, rewards))
    assert feed.rewards.tolist() == settled
    close("SkyRL's zero reward, loss", loss, theirs[0], 1e-6, floor=0.1)
    close("SkyRL's zero reward, gradient", gradient, theirs[1], 1e-6, floor=1e-2)
