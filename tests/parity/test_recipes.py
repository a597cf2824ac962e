"""Recipes of peers' configs: read from their own classes, and each option's value beside their own loss."""

import inspect
from dataclasses import fields, is_dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from trl import GRPOConfig

import whole_configs
from padded import hard, run
from peer_code import trl_advantages, trl_loss
from tracegrad import recipes
from tracegrad.alignment.sequences import Sequences
from tracegrad.errors import ArgumentError
from tracegrad.objective import presets
from tracegrad.recipes.art import ART
from tracegrad.recipes.import_config import Peer, flat
from tracegrad.recipes.skyrl import SKYRL
from tracegrad.recipes.trl import TRL
from tracegrad.recipes.verl import VERL
from tracegrad.recipes.verl import A as ACTOR
from tracegrad.recipes.verl import C as CORRECTION
from tracegrad.recipes.verl import G as ALGORITHM
from tracegrad.trainer.steps import TrainingData
from whole_configs import ours, without_empty, without_last

ALGO, POLICY = "trainer.algorithm.", "trainer.policy.optimizer_config."


def told(peer: Peer) -> list[dict[str, Any]]:
    """Every value of every option, with what it needs; and nothing told."""
    return [{}, *({**beside, name: value} for name, value, beside in peer.cases())]


def ids(case: dict[str, Any]) -> str:
    return " ".join(f"{name.rpartition('.')[2]}={value}" for name, value in case.items()) or "nothing told"


def covered(peer: Peer, names: set[str]) -> set[str]:
    """Options of a peer's own class that are neither read, nor refused, nor known to say how a run runs."""
    known = {*peer.options, *peer.unsupported, *peer.truncation}
    return {name for name in names - known if not any(fnmatchcase(name, each) for each in peer.ignored.split())}


def grpo_config(**options: Any) -> GRPOConfig:
    return GRPOConfig(output_dir="unused", bf16=False, report_to=[], **options)


class TestTrl:
    def test_every_option_of_its_class_is_read_refused_or_its_own(self):
        assert covered(TRL, {each.name for each in fields(GRPOConfig)}) == {"vllm_importance_sampling_cap"}
        config = grpo_config()
        for name, (default, *_) in TRL.options.items():
            found = getattr(config, name)
            assert (1 if name == "steps_per_generation" else default) == getattr(found, "value", found), name
        for name, (_, neutral) in TRL.truncation.items():
            assert getattr(config, name) in neutral, name
        for name, each in TRL.unsupported.items():
            found = getattr(config, name, each.harmless[0])
            assert getattr(found, "value", found) in each.harmless, name

    @pytest.mark.parametrize("case", told(TRL), ids=ids)
    def test_its_own_class_and_a_dict_say_the_same(self, case):
        assert recipes.from_trl(grpo_config(**case)) == recipes.from_trl(case)

    @pytest.mark.parametrize("case", told(TRL), ids=ids)
    def test_each_value_is_its_loss(self, close, case):
        elsewhere = ("use_adaptive_entropy", "steps_per_generation")  # test_entropy.py; how a batch is cut
        still, data = {name: value for name, value in case.items() if name not in elsewhere}, hard(1)
        theirs, found = whole_configs.trl(still, data), ours(recipes.from_trl(still).objective, data, rows=True)
        close("TRL's config, loss", found.loss, theirs.loss, 1e-6)  # its temperatures are float32
        close("TRL's config, gradient", found.gradient, theirs.gradient, 1e-6)
        close("TRL's config, gradient of the bonus", found.of_entropy, theirs.of_entropy)

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
        with pytest.raises(ArgumentError, match=r"TG-RECIPE-011.*algorithm.adv_estimator = 'gae'"):
            recipes.from_verl(whole).resolve()
        whole["algorithm"]["adv_estimator"] = "grpo"
        recipe = recipes.from_verl(whole)
        assert recipe.objective == recipes.find("VERL_DEFAULT").objective
        assert ("train.updates_per_old_logprobs", 4) in recipe.options

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
        data = without_empty(hard(1))
        recipe, theirs = recipes.from_verl(case), whole_configs.verl(case, data)
        found = ours(recipe.objective, data)
        rtol = 1e-6 if "geo_mean" in case.values() else 1e-7
        close("verl's config, loss", found.loss, theirs.loss, rtol, floor=0.1)
        close("verl's config, gradient", found.gradient, theirs.gradient, rtol, floor=1e-5)
        close("verl's config, gradient of the bonus", found.of_entropy, theirs.of_entropy)

    @pytest.mark.parametrize("seed", range(3))
    @pytest.mark.parametrize("mode", ["seq-mean-token-sum", "seq-mean-token-mean"])
    def test_its_mean_over_sequences_divides_by_rejected_rows_too(self, mode, seed):
        data = without_empty(hard(seed))
        case = {f"{ACTOR}loss_agg_mode": mode, f"{ACTOR}use_kl_loss": True, f"{ACTOR}entropy_coeff": 0.1}
        case |= {f"{CORRECTION}rollout_rs": "seq_mean_k1", f"{CORRECTION}rollout_rs_threshold": "0.95_1.02"}
        recipe, theirs = recipes.from_verl(case), whole_configs.verl(case, data)
        assert "rejected rows" in dict(recipe.differences)
        found, kept = ours(recipe.objective, data), run(recipe.objective, data).corrected.keep
        share = kept.reshape(data["mask"].shape).any(1).sum() / len(kept.reshape(data["mask"].shape))
        assert 0 < share < 1
        for name, mine, wanted in zip(found._fields, found, theirs, strict=True):
            torch.testing.assert_close(mine * share, wanted, rtol=1e-6, atol=1e-9, msg=name)

    @pytest.mark.parametrize("seed", range(3))
    def test_its_bypass_mode_divides_a_row_by_what_rejection_left_of_it_and_ours_by_all(self, seed):
        data = without_empty(hard(seed))
        case = {f"{ACTOR}loss_agg_mode": "seq-mean-token-mean", f"{CORRECTION}bypass_mode": True}
        case |= {f"{CORRECTION}rollout_rs": "token_k1", f"{CORRECTION}rollout_rs_threshold": "0.6_1.2"}
        recipe, theirs = recipes.from_verl(case), whole_configs.verl(case, data)
        assert "tokens of a rejected row" in dict(recipe.differences)
        found = run(recipe.objective, data)
        share = (found.per_term.keep.sum(1) / data["mask"].sum(1))[:, None]
        assert (share < 1).any()
        torch.testing.assert_close(found.gradient, theirs.gradient * share, rtol=1e-6, atol=1e-9)


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
        data = hard(1)
        theirs = whole_configs.skyrl(case, data)
        found = ours(recipes.from_skyrl(case).objective, data, **whole_configs.skyrl_totals(data))
        close("SkyRL's config, loss", found.loss, theirs.loss, 1e-6, floor=0.1)  # its ratios are float32
        close("SkyRL's config, gradient", found.gradient, theirs.gradient, 1e-6, floor=1e-2)
        close("SkyRL's config, gradient of the bonus", found.of_entropy, theirs.of_entropy)


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
        data = without_last(hard(1))
        theirs, found = whole_configs.art(case, data), ours(recipes.from_art(case).objective, data)
        close("ART's config, loss", found.loss, theirs.loss, 1e-6, floor=0.1)
        close("ART's config, gradient", found.gradient, theirs.gradient, 1e-6, floor=1e-4)


def test_a_dataclass_without_its_peer_is_flat_too():
    assert is_dataclass(grpo_config())
    with pytest.raises(ArgumentError, match="TG-RECIPE-008"):
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
    config, _ = recipes.from_trl(grpo_config(**told)).resolve(overrides=[("data.holdout", 0.0)])
    feed = TrainingData.of(s, presets.DAPO, config)
    given = torch.tensor(table, dtype=torch.float64), 6, scale, aggregation, torch.tensor(weights, dtype=torch.float64)
    close("TRL's advantages of several rewards, in a run", feed.advantages, trl_advantages(*given), 1e-5)
    known = ~np.isnan(table).all(axis=1)
    assert feed.rewards[known] == pytest.approx(np.nansum(table * np.float32(weights), 1)[known], rel=1e-5, abs=1e-6)
