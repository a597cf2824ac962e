"""Recipes of peers' configs: read from their own classes, and each option's value beside their own loss."""

from __future__ import annotations

import inspect
from dataclasses import fields, is_dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from trl import GRPOConfig

from padded import hard, per_position, run
from peer_code import trl_advantages, trl_importance_ratio, trl_loss
from tracegrad import presets, recipes
from tracegrad.errors import ArgumentError
from tracegrad.learner.feed import Feed
from tracegrad.recipes.art import ART
from tracegrad.recipes.peer import Peer, flat
from tracegrad.recipes.skyrl import SKYRL
from tracegrad.recipes.trl import TRL
from tracegrad.recipes.verl import VERL
from tracegrad.recipes.verl_options import A as ACTOR
from tracegrad.recipes.verl_options import C as CORRECTION
from tracegrad.recipes.verl_options import G as ALGORITHM
from tracegrad.sequence import Sequences

ALGO, POLICY = "trainer.algorithm.", "trainer.policy.optimizer_config."


def told(peer: Peer) -> list[dict[str, Any]]:
    """Every value of every option, with what it needs; and nothing told."""
    return [{}, *({**beside, name: value} for name, value, beside in peer.cases())]


def ids(case: dict[str, Any]) -> str:
    return " ".join(f"{name.rpartition('.')[2]}={value}" for name, value in case.items()) or "nothing told"


def covered(peer: Peer, names: set[str]) -> set[str]:
    """Options of a peer's own class that are neither read, nor refused, nor known to say how a run runs."""
    known = {*peer.options, *peer.without}
    return {name for name in names - known if not any(fnmatchcase(name, each) for each in peer.own.split())}


def grpo_config(**options: Any) -> GRPOConfig:
    return GRPOConfig(output_dir="unused", bf16=False, report_to=[], **options)


class TestTrl:
    def test_every_option_of_its_class_is_read_refused_or_its_own(self):
        assert covered(TRL, {each.name for each in fields(GRPOConfig)}) == {"vllm_importance_sampling_cap"}
        config = grpo_config()
        for name, (default, *_) in TRL.options.items():
            found = getattr(config, name)
            assert (1 if name == "steps_per_generation" else default) == getattr(found, "value", found), name
        for name, each in TRL.without.items():
            found = getattr(config, name, each.harmless[0])
            assert getattr(found, "value", found) in each.harmless, name

    @pytest.mark.parametrize("case", told(TRL), ids=ids)
    def test_its_own_class_and_a_dict_say_the_same(self, case):
        assert recipes.from_trl(grpo_config(**case)) == recipes.from_trl(case)

    @pytest.mark.parametrize("case", told(TRL), ids=ids)
    def test_each_value_is_its_loss(self, close, case):
        config, data = grpo_config(**case), hard(1)
        mask = data["mask"].long()
        inputs = {
            "completion_mask": (mask.flip(1).cumsum(1).flip(1) > 0).long(),
            "tool_mask": mask,
            "advantages": data["advantages"],
            "old_per_token_logps": data["old"],
            "ref_per_token_logps": data["ref"],
        }
        if config.use_vllm:
            inputs["sampling_per_token_logps"] = data["rollout"]
        if config.use_vllm and config.vllm_importance_sampling_correction:
            bounds = {side: getattr(config, f"vllm_importance_sampling_{side}") for side in ("clip_min", "clip_max")}
            given = (data["old"], data["rollout"], mask, config.vllm_importance_sampling_mode)
            inputs["importance_sampling_ratio"] = trl_importance_ratio(*given, **bounds)
        elsewhere = ("use_adaptive_entropy", "steps_per_generation")  # test_entropy.py; how a batch is cut
        still = {name: value for name, value in case.items() if name not in elsewhere}
        logprobs, entropy = data["logprobs"].clone().requires_grad_(), data["entropy"].clone().requires_grad_()
        loss = trl_loss(logprobs, inputs, entropy, **still)
        loss.backward()
        found = run(recipes.from_trl(still).objective, data, rows=True)
        close("TRL's config, loss", found.loss, loss.detach(), 1e-6)  # its temperatures are float32
        close("TRL's config, gradient", found.gradient, logprobs.grad, 1e-6)
        if config.entropy_coef:
            close("TRL's config, gradient of the bonus", found.entropy_gradient, entropy.grad)

    @pytest.mark.parametrize("more", [{}, {"epsilon_high": 0.5}, {"epsilon": 0.1}, {"epsilon_high": 1.0}])
    def test_cispo_caps_its_weight_below_1_too(self, close, more):
        self.test_each_value_is_its_loss(close, {"loss_type": "cispo", **more})

    def test_the_bonus_on_the_quantiles_terms_alone_is_trls_but_for_its_denominator(self):
        data = hard(1)
        recipe = recipes.from_trl({"entropy_coef": 0.05, "top_entropy_quantile": 0.4})
        mask = data["mask"].long()
        inputs = {"completion_mask": mask, "advantages": data["advantages"], "old_per_token_logps": data["old"]}
        logprobs, entropy = data["logprobs"].clone().requires_grad_(), data["entropy"].clone().requires_grad_()
        trl_loss(logprobs, inputs, entropy, entropy_coef=0.05, top_entropy_quantile=0.4).backward()
        found = run(recipe.objective, data, rows=True)
        share = found.per_term.keep.sum() / mask.sum()
        torch.testing.assert_close(found.entropy_gradient, entropy.grad * share)


class TestVerl:
    @pytest.fixture
    def whole(self):
        """verl's configuration as it ships."""
        verl = pytest.importorskip("verl")
        place = Path(str(verl.__file__)).parent / "trainer" / "config" / "_generated_ppo_trainer.yaml"
        return yaml.safe_load(place.read_text(encoding="utf-8"))

    def test_its_yaml_is_taken_whole_and_has_our_defaults(self, whole):
        found = flat(whole)
        assert covered(VERL, set(found)) == set()
        told_by_hand = {f"{ALGORITHM}adv_estimator", "data.train_batch_size", f"{ACTOR}grad_clip"}
        told_by_hand.add(f"{ALGORITHM}filter_groups.metric")
        for name, (default, *_) in VERL.options.items():
            if name not in told_by_hand:
                same = list(default) if isinstance(default, tuple) else default
                assert found[name] == same, name
        with pytest.raises(ArgumentError, match=r"algorithm.adv_estimator = 'gae'"):
            recipes.from_verl(whole)
        whole["algorithm"]["adv_estimator"] = "grpo"
        recipe = recipes.from_verl(whole)
        assert recipe.objective == recipes.find("VERL_DEFAULT").objective
        assert ("train.updates_per_old", 4) in recipe.options

    def test_its_classes_are_taken_alone(self):
        pytest.importorskip("verl")
        from verl.trainer.config.algorithm import AlgoConfig, RolloutCorrectionConfig

        from verl_plan import actor_config

        actor = actor_config(clip_ratio_high=0.3, loss_mode="gspo", entropy_coeff=0.1)
        plain = {"clip_ratio_high": 0.3, "policy_loss": {"loss_mode": "gspo"}, "entropy_coeff": 0.1}
        same = recipes.from_verl({"actor_rollout_ref": {"actor": plain}})
        assert recipes.from_verl(actor).objective == same.objective
        correction = RolloutCorrectionConfig.decoupled_geo_rs()
        algorithm = AlgoConfig(adv_estimator="rloo", rollout_correction=correction)
        assert recipes.from_verl(algorithm).objective == recipes.from_verl(correction).objective

    @pytest.mark.parametrize("case", told(VERL), ids=ids)
    def test_each_value_is_its_loss(self, close, case):
        core = pytest.importorskip("verl.trainer.ppo.core_algos")
        helper = pytest.importorskip("verl.trainer.ppo.rollout_corr_helper")
        from verl.trainer.config.algorithm import RolloutCorrectionConfig

        from test_verl_presets import bypass, counts_of
        from verl_plan import actor_config

        data = hard(1)
        recipe = recipes.from_verl(case)
        options = {"clip_ratio_high": 0.2, **_under(case, ACTOR)}
        of_run = ("optim.", "grad_", "ppo_m")
        options = {k.rpartition(".")[2]: v for k, v in options.items() if not k.startswith(of_run)}
        correction = {"rollout_is": None, **_under(case, CORRECTION)}
        mode = options.get("loss_agg_mode", "token-mean")
        torch.manual_seed(0)
        if correction.get("bypass_mode"):
            loss, gradient, _ = bypass(data, RolloutCorrectionConfig(**correction), mode, counts_of(data))
        else:
            loss, gradient = _decoupled(core, helper, data, correction, actor_config(**options), mode)
        torch.manual_seed(0)
        geometric = options.get("loss_mode") == "geo_mean"
        found = run(recipe.objective, data, rows=geometric)
        rtol = 1e-6 if geometric else 1e-7
        close("verl's config, loss", found.loss, loss, rtol, floor=0.1)
        close("verl's config, gradient", found.gradient, gradient, rtol, floor=1e-5)


def _decoupled(core: Any, helper: Any, data: Any, correction: dict[str, Any], config: Any, mode: str):
    """verl's weights, its loss, and the bonus and KL loss that its actor adds."""
    weights, mask, _ = helper.compute_rollout_correction_and_rejection_mask(
        data["old"], data["rollout"], data["mask"], **{k: v for k, v in correction.items() if k.startswith("rollout_")}
    )
    weights = None if weights is None else weights.batch["rollout_is_weights"]
    logprobs, entropy = data["logprobs"].clone().requires_grad_(), data["entropy"]
    loss, _ = core.get_policy_loss_fn(config.policy_loss.loss_mode)(
        old_log_prob=data["old"],
        log_prob=logprobs,
        advantages=per_position(data["advantages"], logprobs),
        response_mask=mask,
        loss_agg_mode=mode,
        config=config,
        rollout_is_weights=weights,
    )
    norm = {"loss_scale_factor": config.loss_scale_factor}
    if config.entropy_coeff:
        loss = loss - config.entropy_coeff * core.agg_loss(entropy, mask, mode, **norm)
    if config.use_kl_loss:
        kl = core.kl_penalty(logprobs, data["ref"], config.kl_loss_type)
        loss = loss + config.kl_loss_coef * core.agg_loss(kl, mask, mode, **norm)
    loss.backward()
    return loss.detach(), logprobs.grad


class TestSkyrl:
    def test_its_own_class_is_taken_whole_and_has_our_defaults(self):
        config = pytest.importorskip("skyrl.train.config.config")
        whole = config.SkyRLTrainConfig()
        found = flat(whole)
        assert covered(SKYRL, set(found)) == set()
        for name, (default, *_) in SKYRL.options.items():
            if name != "trainer.train_batch_size":
                assert found[name] == (list(default) if isinstance(default, tuple) else default), name
        told_by_it = recipes.from_skyrl(whole)
        assert told_by_it == recipes.from_skyrl({"trainer": {"train_batch_size": 1024}})
        assert told_by_it.objective == recipes.from_skyrl(whole.trainer.algorithm).objective

    @pytest.mark.parametrize("case", told(SKYRL), ids=ids)
    def test_each_value_is_its_loss(self, close, case):
        config = pytest.importorskip("skyrl.train.config.config")
        ppo = pytest.importorskip("skyrl.backends.skyrl_train.utils.ppo_utils")
        from skyrl.backends.skyrl_train.utils.torch_utils import masked_mean

        data, algorithm = hard(1), config.AlgorithmConfig()
        for name, value in _under(case, ALGO).items():
            *path, last = name.split(".")
            place: Any = algorithm
            for each in path:
                place = getattr(place, each)
            setattr(place, last, value)
        mask = data["mask"].double()
        how = (algorithm.loss_reduction, 8, algorithm.max_seq_len, [(0, 2), (2, 4), (4, 6), (6, 8)])
        advantages = per_position(data["advantages"], mask)
        advantages = ppo.apply_loss_reduction_to_advantages_minibatch(advantages, mask, *how)
        logprobs = data["logprobs"].clone().requires_grad_()
        torch.manual_seed(0)
        function = ppo.PolicyLossRegistry.get(algorithm.policy_loss_type)
        loss, _ = function(logprobs, data["old"], advantages, algorithm, mask, data["rollout"])
        if algorithm.use_kl_loss:
            kl = ppo.compute_approx_kl(logprobs, data["ref"], mask, algorithm.kl_estimator_type)
            loss = loss + algorithm.kl_loss_coef * masked_mean(kl, mask, dim=-1).mean()
        if algorithm.use_entropy_loss:
            loss = loss - algorithm.entropy_loss_coef * masked_mean(data["entropy"], mask)
        loss.backward()
        counts = SimpleNamespace(terms=int(data["mask"].sum()), traces=8, groups=4)  # empty rows are sequences there
        torch.manual_seed(0)
        found = run(recipes.from_skyrl(case).objective, data, group=torch.arange(8) // 2, totals=counts)
        close("SkyRL's config, loss", found.loss, loss.detach(), 1e-6, floor=0.1)  # its ratios are float32
        close("SkyRL's config, gradient", found.gradient, logprobs.grad, 1e-6, floor=1e-2)


class TestArt:
    def test_every_option_of_its_call_is_read_refused_or_its_own(self):
        backend = pytest.importorskip("art.local.backend")
        from art.dev.train import TrainConfig as Dev
        from art.types import TrainConfig

        called = inspect.signature(backend.LocalBackend.train).parameters
        names = {*called, *Dev.__annotations__, *TrainConfig.model_fields} - {"self", "model", "trajectory_groups"}
        assert covered(ART, names) == set()
        for name, (default, *_) in ART.options.items():
            assert name == "ppo" or called[name].default == default, name
        assert recipes.from_art(TrainConfig(learning_rate=1e-5)) == recipes.from_art({"learning_rate": 1e-5})

    @pytest.mark.parametrize("case", told(ART), ids=ids)
    def test_each_value_is_its_loss(self, close, case):
        """On its weights, 1 / length over their mean, which make a mean over each trace of the mean over tokens."""
        art = pytest.importorskip("art.loss")
        from test_art_loss import shifted, without_last

        data = without_last(hard(1))
        mask, logprobs = data["mask"], data["logprobs"].clone().requires_grad_()
        first = case.get("precalculate_logprobs", False)
        weights = (1 / mask.sum(1, keepdim=True).clamp(min=1)).expand_as(logprobs) * mask
        inputs = {
            "logprobs": shifted(data["old"] if first else data["rollout"], float("nan")),
            "advantages": shifted(per_position(data["advantages"], logprobs).contiguous(), 0.0),
            "assistant_mask": shifted(mask, False),
            "weights": shifted(weights / weights[mask].mean(), 0.0),
            "group_ids": shifted(torch.arange(1, len(mask) + 1)[:, None].expand_as(mask).contiguous(), 0),
        }
        if case.get("truncated_importance_sampling"):
            inputs["original_logprobs"] = shifted(data["rollout"], 0.0)
        options = {name: value for name, value in case.items() if name != "loss_fn"} | {"ppo": _ppo(case)}
        found = art.loss_fn(inputs, logprobs, data["ref"], None, options)
        found.policy_loss.backward()
        ours = run(recipes.from_art(case).objective, data)
        close("ART's config, loss", ours.loss, found.policy_loss.detach(), 1e-6, floor=0.1)
        close("ART's config, gradient", ours.gradient, logprobs.grad, 1e-6, floor=1e-4)


def _ppo(case: dict[str, Any]) -> bool:
    return case.get("ppo", False) or case.get("loss_fn") == "ppo"


def _under(case: dict[str, Any], prefix: str) -> dict[str, Any]:
    return {name.removeprefix(prefix): value for name, value in case.items() if name.startswith(prefix)}


def test_a_dataclass_without_its_peer_is_flat_too():
    assert is_dataclass(grpo_config())
    with pytest.raises(ArgumentError, match="options have no names"):
        flat(GRPOConfig)


@pytest.mark.parametrize("scale", ["group", "batch", "none"])
@pytest.mark.parametrize("aggregation", ["sum_then_normalize", "normalize_then_sum"])
def test_a_run_with_several_rewards_has_trls_advantages(close, scale, aggregation):
    """Four groups of six, three rewards of which some are not known."""
    draw = np.random.default_rng(3)
    table = (draw.normal(size=(24, 3)) * [1.0, 20.0, 0.1]).astype(np.float32)
    table[draw.random(table.shape) < 0.15] = np.nan
    count = len(table)
    nan = float("nan")
    s = Sequences.from_arrays(
        np.arange(2 * count),
        2 * np.arange(count + 1),
        [nan, -1.0] * count,
        [False, True] * count,
        group=np.arange(count) // 6,
        rewards=np.column_stack([np.full(count, nan, np.float32), table]),
        reward_names=("reward", "a", "b", "c"),
    )
    weights = [2.0, 0.5, -1.0]
    told = {"scale_rewards": scale, "multi_objective_aggregation": aggregation, "reward_weights": weights}
    config, _ = recipes.from_trl(grpo_config(**told)).settle(overrides=[("data.holdout", 0.0)])
    feed = Feed.of(s, presets.DAPO, config)
    given = torch.tensor(table, dtype=torch.float64), 6, scale, aggregation, torch.tensor(weights, dtype=torch.float64)
    close("TRL's advantages of several rewards, in a run", feed.advantages, trl_advantages(*given), 1e-5)
    known = ~np.isnan(table).all(axis=1)
    assert feed.rewards[known] == pytest.approx(np.nansum(table * np.float32(weights), 1)[known], rel=1e-5, abs=1e-6)
