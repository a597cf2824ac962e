"""A whole config of a peer as its loss and gradients on padded data, by the peer's own code, and the same of ours.

Nothing of a peer is transcribed but SkyRL's sum of its loss, KL loss and bonus, which stands within its worker.
"""

import random
from collections.abc import Callable, Mapping
from fnmatch import fnmatchcase
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from padded import per_position, run
from peer_code import trl_importance_ratio, trl_loss
from tracegrad.objective import Objective
from tracegrad.recipes.import_config import Peer
from tracegrad.recipes.verl import A as ACTOR
from tracegrad.recipes.verl import C as CORRECTION

ALGORITHM = "trainer.algorithm."


class Numbers(NamedTuple):
    """A loss, and its gradients with respect to logprobs and entropies."""

    loss: Tensor
    gradient: Tensor
    of_entropy: Tensor


def trl(case: Mapping[str, Any], data: Mapping[str, Tensor]) -> Numbers:
    """TRL's `_compute_loss`, with the ratio of its generation step."""
    mask = data["mask"].long()
    inputs: dict[str, Any] = {
        "completion_mask": (mask.flip(1).cumsum(1).flip(1) > 0).long(),
        "tool_mask": mask,
        "advantages": data["advantages"],
        "old_per_token_logps": data["old"],
        "ref_per_token_logps": data["ref"],
    }
    if case.get("use_vllm"):
        inputs["sampling_per_token_logps"] = data["rollout"]
        if case.get("vllm_importance_sampling_correction", True):
            named = "vllm_importance_sampling_"
            bounds = {"clip_min": case.get(f"{named}clip_min"), "clip_max": case.get(f"{named}clip_max", 3.0)}
            mode = case.get(f"{named}mode", "sequence_mask")
            inputs["importance_sampling_ratio"] = trl_importance_ratio(
                data["old"], data["rollout"], mask, mode, **bounds
            )
    return _numbers(data, lambda logprobs, entropy: trl_loss(logprobs, inputs, entropy, **case))


def verl(case: Mapping[str, Any], data: Mapping[str, Tensor]) -> Numbers:
    """verl's weights and rejection, then the loss of its actor: `ppo_loss`, with the counts that its engine makes.

    A mini-batch of as many rows as there are, on one rank. Rows without a term are not in it.
    """
    losses = pytest.importorskip("verl.workers.utils.losses")
    helper = pytest.importorskip("verl.trainer.ppo.rollout_corr_helper")
    from verl.trainer.config.algorithm import RolloutCorrectionConfig

    from verl_plan import actor_config

    options = {"clip_ratio_high": 0.2, **under(case, ACTOR)}
    options = {name.rpartition(".")[2]: value for name, value in options.items()}
    correction, config = {"rollout_is": None, **under(case, CORRECTION)}, actor_config(**options)
    bypassed, mask, old, weights = correction.get("bypass_mode"), data["mask"], data["old"], None
    if bypassed:
        old = data["rollout"]
        for name, value in (
            ("rollout_correction", RolloutCorrectionConfig(**correction)),
            ("loss_mode", "bypass_mode"),
        ):
            object.__setattr__(config.policy_loss, name, value)
    else:
        asked = {name: value for name, value in correction.items() if name.startswith("rollout_")}
        weights, mask, _ = helper.compute_rollout_correction_and_rejection_mask(old, data["rollout"], mask, **asked)
    batch = _Batch(
        dp_size=1,
        batch_num_tokens=mask.sum(),
        global_batch_size=len(mask),
        response_mask=mask,
        old_log_probs=old,
        advantages=per_position(data["advantages"], old),
        ref_log_prob=data["ref"],
    )
    if weights is not None:
        batch["rollout_is_weights"] = weights.batch["rollout_is_weights"]
    padded = losses.no_padding_2_padding
    losses.no_padding_2_padding = lambda value, _: value  # what is here is padded already
    try:
        return _numbers(
            data,
            lambda logprobs, entropy: losses.ppo_loss(config, {"log_probs": logprobs, "entropy": entropy}, batch)[0],
        )
    finally:
        losses.no_padding_2_padding = padded


class _Batch(dict[str, Any]):
    """What verl's loss asks of a TensorDict."""

    def select(self, *_: str) -> "_Batch":
        return self

    def to_padded_tensor(self) -> "_Batch":
        return self


def skyrl(case: Mapping[str, Any], data: Mapping[str, Tensor]) -> Numbers:
    """SkyRL's policy loss, KL loss and entropy."""
    config = pytest.importorskip("skyrl.train.config.config")
    ppo = pytest.importorskip("skyrl.backends.skyrl_train.utils.ppo_utils")
    from skyrl.backends.skyrl_train.utils.torch_utils import masked_mean

    algorithm = config.AlgorithmConfig()
    for name, value in under(case, ALGORITHM).items():
        *path, last = name.split(".")
        place: Any = algorithm
        for each in path:
            place = getattr(place, each)
        setattr(place, last, value)
    mask = data["mask"].double()
    how = (algorithm.loss_reduction, 8, algorithm.max_seq_len, [(0, 2), (2, 4), (4, 6), (6, 8)])
    advantages = per_position(data["advantages"], mask)
    advantages = ppo.apply_loss_reduction_to_advantages_minibatch(advantages, mask, *how)
    function = ppo.PolicyLossRegistry.get(algorithm.policy_loss_type)

    def total(logprobs: Tensor, entropy: Tensor) -> Tensor:
        loss, _ = function(logprobs, data["old"], advantages, algorithm, mask, data["rollout"])
        if algorithm.use_kl_loss:
            kl = ppo.compute_approx_kl(logprobs, data["ref"], mask, algorithm.kl_estimator_type)
            loss = loss + algorithm.kl_loss_coef * masked_mean(kl, mask, dim=-1).mean()
        if algorithm.use_entropy_loss:
            loss = loss - algorithm.entropy_loss_coef * masked_mean(entropy, mask)
        return loss

    return _numbers(data, total)


def art(case: Mapping[str, Any], data: Mapping[str, Tensor]) -> Numbers:
    """ART's `loss_fn`, on its weights, 1 / length over their mean, which make a mean over each trace."""
    loss = pytest.importorskip("art.loss")
    from art_loss_cases import shifted

    mask, like, first = data["mask"], data["logprobs"], case.get("precalculate_logprobs", False)
    weights = (1 / mask.sum(1, keepdim=True).clamp(min=1)).expand_as(like) * mask
    inputs = {
        "logprobs": shifted(data["old"] if first else data["rollout"], float("nan")),
        "assistant_mask": shifted(mask, False),
        "weights": shifted(weights / weights[mask].mean(), 0.0),
        "group_ids": shifted(torch.arange(1, len(mask) + 1)[:, None].expand_as(mask).contiguous(), 0),
    }
    if case.get("truncated_importance_sampling"):
        inputs["original_logprobs"] = shifted(data["rollout"], 0.0)
    ppo = case.get("ppo", False) or case.get("loss_fn") == "ppo"
    options = {name: value for name, value in case.items() if name != "loss_fn"} | {"ppo": ppo}

    def total(logprobs: Tensor, _: Tensor) -> Tensor:  # kimi_k2_tau changes the advantages in place
        advantages = shifted(per_position(data["advantages"], like).contiguous(), 0.0)
        return loss.loss_fn(inputs | {"advantages": advantages}, logprobs, data["ref"], None, options).policy_loss

    return _numbers(data, total)


def ours(objective: Objective, data: dict[str, Tensor], **how: Any) -> Numbers:
    """The same of an objective."""
    torch.manual_seed(0)
    found = run(objective, data, **how)
    nothing = torch.zeros_like(found.gradient)
    return Numbers(found.loss, found.gradient, nothing if found.entropy_gradient is None else found.entropy_gradient)


def skyrl_totals(data: Mapping[str, Tensor]) -> dict[str, Any]:
    """How `ours` counts as SkyRL does: empty rows are sequences there, groups are of two."""
    counts = SimpleNamespace(terms=int(data["mask"].sum()), traces=8, groups=4)
    return {"group": torch.arange(8) // 2, "totals": counts}


def _numbers(data: Mapping[str, Tensor], total: Callable[[Tensor, Tensor], Tensor]) -> Numbers:
    logprobs, entropy = (data[name].clone().requires_grad_() for name in ("logprobs", "entropy"))
    torch.manual_seed(0)
    loss = total(logprobs, entropy)
    loss.backward()
    nothing = torch.zeros_like(logprobs)
    gradients = (nothing if leaf.grad is None else leaf.grad for leaf in (logprobs, entropy))
    return Numbers(loss.detach(), *gradients)


def without_empty(data: dict[str, Tensor]) -> dict[str, Tensor]:
    """Without its empty row, which a trainer has none of."""
    return {name: value[data["mask"].any(1)] for name, value in data.items()}


def without_last(data: dict[str, Tensor]) -> dict[str, Tensor]:
    """Without the last column, which ART's shift loses."""
    mask = data["mask"].clone()
    mask[:, -1] = False
    return data | {"mask": mask}


def under(case: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    """Options below a prefix, without it and without those of a run."""
    of_run = ("optim.*", "grad_*", "ppo_m*")
    told = {name.removeprefix(prefix): value for name, value in case.items() if name.startswith(prefix)}
    return {name: value for name, value in told.items() if not any(fnmatchcase(name, each) for each in of_run)}


def drawn(peer: Peer, draw: random.Random, without: str) -> dict[str, Any]:
    """A random config: some of the options, each with what it needs, numbers up to a factor of 1.4 from those known.

    Args:
        without: patterns of options that are left alone.
    """
    names = [name for name in peer.options if not any(fnmatchcase(name, each) for each in without.split())]
    told: dict[str, Any] = {}
    for name in draw.sample(names, draw.randint(1, min(12, len(names)))):
        _, *values = peer.options[name]
        if not values:
            continue
        value = draw.choice(values)
        for beside, needed in peer.with_options.get((name, value), peer.with_options.get(name, {})).items():
            told.setdefault(beside, needed)
        told.setdefault(name, value * draw.choice((0.7, 1.0, 1.4)) if isinstance(value, float) else value)
    return told
