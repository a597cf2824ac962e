"""verl's bypass mode and its nineteen rollout-correction presets, each run through verl's own pipeline, beside ours."""

import itertools
from dataclasses import replace

import pytest
import torch

from padded import hard, per_position, run
from tracegrad import recipes
from tracegrad.objective import Clip, Objective, PolicyGradient, Ratio
from verl_plan import REDUCTIONS, THRESHOLDS, actor_config, gates_of, thresholds_of, weights_of

core_algos = pytest.importorskip("verl.trainer.ppo.core_algos")
helper = pytest.importorskip("verl.trainer.ppo.rollout_corr_helper")
RolloutCorrectionConfig = pytest.importorskip("verl.trainer.config.algorithm").RolloutCorrectionConfig

DIRECT = Ratio("theta", "rollout")
NAMES = {
    name: f"VERL_{name.upper()}"
    for name, value in vars(RolloutCorrectionConfig).items()
    if isinstance(value, classmethod) and name != "disabled" and not name.startswith("_")
} | {"disabled": "VERL_DEFAULT"}
CLIP = {"clip_ratio_low": 0.2, "clip_ratio_high": 0.2}


def counts_of(data):
    """What verl's trainer passes: the terms and rows of the batch, before any rejection."""
    return {"batch_num_tokens": data["mask"].sum(), "global_batch_size": data["mask"].any(1).sum()}


def bypass(data, correction, mode="token-mean", info=None, **options):
    """verl's bypass-mode loss: rollout logprobs in the place of old ones, everything computed inside the loss."""
    config = actor_config(global_batch_info=info or {}, **(CLIP | options))
    object.__setattr__(config.policy_loss, "rollout_correction", correction)
    logprobs = data["logprobs"].clone().requires_grad_()
    loss, metrics = core_algos.compute_policy_loss_bypass_mode(
        old_log_prob=data["rollout"],
        log_prob=logprobs,
        advantages=per_position(data["advantages"], logprobs),
        response_mask=data["mask"],
        loss_agg_mode=mode,
        config=config,
    )
    loss.backward()
    return loss.detach(), logprobs.grad, metrics


def decoupled(data, correction):
    """verl's trainer and actor with an old policy: weights and mask first, then the vanilla loss."""
    weights, mask, _ = helper.compute_rollout_correction_and_rejection_mask(
        data["old"],
        data["rollout"],
        data["mask"],
        rollout_is=correction.rollout_is,
        rollout_is_threshold=correction.rollout_is_threshold,
        rollout_is_batch_normalize=correction.rollout_is_batch_normalize,
        rollout_rs=correction.rollout_rs,
        rollout_rs_threshold=correction.rollout_rs_threshold,
    )
    logprobs = data["logprobs"].clone().requires_grad_()
    loss, _ = core_algos.compute_policy_loss_vanilla(
        data["old"],
        logprobs,
        per_position(data["advantages"], logprobs),
        mask,
        config=actor_config(**CLIP),
        rollout_is_weights=None if weights is None else weights.batch["rollout_is_weights"],
    )
    loss.backward()
    return loss.detach(), logprobs.grad


def test_there_are_nineteen_of_them_and_each_has_a_value_of_ours():
    assert len(NAMES) == 19
    assert set(NAMES.values()) == set(recipes.verl.NAMES)


@pytest.mark.parametrize("seed", range(7))
@pytest.mark.parametrize("name", NAMES)
def test_each_preset_is_what_verl_does_with_it(close, fired, name, seed):
    correction, data = getattr(RolloutCorrectionConfig, name)(), hard(seed)
    preset = recipes.find(NAMES[name]).objective
    assert recipes.from_verl(correction).objective == preset  # its own config class
    if correction.bypass_mode:
        loss, gradient, _ = bypass(data, correction, info=counts_of(data))
    else:
        loss, gradient = decoupled(data, correction)
    found = run(preset, data)
    close("verl presets loss", found.loss, loss, floor=0.1)
    close("verl presets gradient", found.gradient, gradient, floor=1e-5)
    fell = data["mask"] & ~found.per_term.keep
    assert fell.any() == (correction.rollout_rs is not None)
    assert (data["mask"] & found.per_term.keep).any()
    weighed = (found.per_term.weight != 1).any()
    assert weighed == (correction.rollout_is is not None)
    fired("verl presets", {f"{name} drop": fell} if correction.rollout_rs else {})
    fired("verl presets", {f"{name} weight": weighed} if correction.rollout_is else {})


BYPASS = list(
    itertools.product(
        ("ppo_clip", "reinforce"),
        ("token-mean", "seq-mean-token-sum"),
        (None, "token", "sequence"),
        [None, *THRESHOLDS],
    )
)


@pytest.mark.parametrize("place", range(len(BYPASS)), ids=lambda place: "-".join(map(str, BYPASS[place])))
def test_bypass_mode_with_every_option(close, fired, place):
    """Weights are computed for the metrics and left out of the loss where the clip bounds the ratio."""
    loss_type, mode, level, rejection = BYPASS[place]
    data = hard(place % 7)
    thresholds = thresholds_of(rejection) if rejection else None
    correction = RolloutCorrectionConfig(
        rollout_is=level, rollout_rs=rejection, rollout_rs_threshold=thresholds, bypass_mode=True, loss_type=loss_type
    )
    loss, gradient, metrics = bypass(data, correction, mode, counts_of(data))
    gates = gates_of(rejection, thresholds, DIRECT)
    if loss_type == "ppo_clip":
        objective = Objective(Clip(0.2, 0.2, dual=3.0), DIRECT, (), gates, reduce=REDUCTIONS[mode])
    else:
        weights = weights_of(level, ratio=DIRECT)
        objective = Objective(PolicyGradient(), None, weights, gates, reduce=REDUCTIONS[mode])
    found = run(objective, data)
    close(f"verl bypass {loss_type} loss", found.loss, loss, floor=0.1)
    close(f"verl bypass {loss_type} gradient", found.gradient, gradient, floor=1e-5)
    told = {f"bypass {loss_type}": gradient != 0}
    if rejection is not None:
        fell = (data["mask"] & ~found.per_term.keep).sum() / data["mask"].sum()
        assert fell.item() == pytest.approx(metrics["rollout_corr/rollout_rs_masked_fraction"], abs=1e-6)
        told[f"bypass RS {rejection}"] = fell > 0
    fired("verl presets", told)


def test_in_bypass_mode_verl_counts_locally_what_its_rejection_left():
    """Ours counts before the gates that see the policy being trained, so that the gradient does not hang on the cut."""
    data = hard(2)
    correction = RolloutCorrectionConfig.bypass_pg_geo_rs(rs_threshold="0.95_1.02")
    _, gradient, metrics = bypass(data, correction)
    gates = gates_of("seq_mean_k1", "0.95_1.02", DIRECT)
    found = run(replace(recipes.find("VERL_BYPASS_PG_GEO_RS").objective, rejections=gates), data)
    left = 1 - metrics["rollout_corr/rollout_rs_masked_fraction"]
    assert 0 < left < 1
    torch.testing.assert_close(found.gradient, gradient * left, rtol=1e-6, atol=1e-12)


def test_every_branch_has_fired(fired):
    counts = fired("verl presets")
    if len(counts) < 30:
        pytest.skip("the other tests of this file have not run")
    assert {name for name, count in counts.items() if count == 0} == set()
