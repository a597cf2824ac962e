"""Configs of other trainers: read without them, spelled option by option, refused by name, and trained with."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from tracegrad import presets, recipes
from tracegrad.cli import main
from tracegrad.errors import ArgumentError
from tracegrad.recipes.coming import PEERS, describe
from tracegrad.recipes.peer import read

FROM = {"trl": recipes.from_trl, "verl": recipes.from_verl, "skyrl": recipes.from_skyrl, "art": recipes.from_art}


def test_the_page_is_the_one_that_the_code_makes():
    page = Path(__file__).parent.parent / "docs" / "coming-from.md"
    assert page.read_text(encoding="utf-8") == describe()


@pytest.mark.parametrize("peer", PEERS, ids=lambda peer: peer.name)
def test_every_value_on_the_page_changes_something_and_is_spelled(peer):
    for name, value, beside in peer.cases():
        recipe = read(peer, {**beside, name: value})
        assert f"{name} = {value}" in dict(recipe.told)
        assert f"# {name} = {value}" in str(recipe)
        settled, otherwise = recipe.settle()
        assert otherwise == ()
        assert presets.find(settled.objective.preset) == recipe.objective or settled.objective.overrides


def test_the_peers_defaults_are_the_presets_of_their_names():
    assert recipes.from_trl({"use_vllm": True}).objective == presets.TRL_DEFAULT
    assert recipes.from_verl({}).objective == presets.VERL_DEFAULT
    skyrl = {
        "use_kl_loss": False,
        "policy_loss_type": "regular",
        "off_policy_correction": {
            "tis_ratio_type": "token",
            "sequence_mask_metric": "geometric",
            "outlier_token_is_threshold_low": 1e-4,
            "outlier_token_is_threshold_high": 100.0,
        },
    }
    assert recipes.from_skyrl(skyrl).objective == presets.SKYRL_849
    art = recipes.from_art({}).objective
    assert (art.surrogate, art.weights) == (presets.ART_467.surrogate, presets.ART_467.weights)


def test_each_option_is_spelled_as_what_is_due_to_it():
    told = dict(recipes.from_trl({"loss_type": "grpo", "epsilon_high": 0.28, "beta": "1e-3", "delta": None}).told)
    assert told == {
        "loss_type = grpo": "objective.reduce.per = trace, objective.reduce.inner = mean",
        "epsilon_high = 0.28": "objective.surrogate.high = 0.28",
        "beta = 0.001": "objective.beta = 0.001",  # YAML 1.1 leaves 1e-3 as a text
    }
    idle = dict(recipes.from_trl({"vllm_importance_sampling_clip_max": 2.0}).told)
    assert idle == {"vllm_importance_sampling_clip_max = 2.0": "without effect beside the others"}  # use_vllm is off


@pytest.mark.parametrize(
    ("peer", "told", "named"),
    [
        ("trl", {"reward_weights": [1, 2]}, "reward_weights = '[1, 2]' (a run trains on one column of rewards"),
        ("trl", {"num_iterations": 4}, "num_iterations = '4'"),
        ("trl", {"loss_typ": "grpo"}, "Did you mean loss_type?"),
        ("trl", {"loss_type": "ppo"}, "known: dapo, grpo"),
        ("trl", {"beta": "high"}, "beta = 'high' (it must be int or float"),
        ("trl", {"use_vllm": "yes"}, "it must be bool"),
        ("trl", {"loss_type": "cispo"}, "write 0.8 and 1.28"),
        ("trl", {"sync_ref_model": True}, "ref_model_mixup_alpha = '0.6'"),
        ("trl", {"loss_type": "vespo", "importance_sampling_level": "sequence"}, "take token levels"),
        ("trl", {"top_entropy_quantile": 0.5, "entropy_coef": 0.1, "off_policy_mask_threshold": 0.1}, "of the three"),
        ("verl", {"algorithm": {"adv_estimator": "gae"}}, "known: grpo, rloo, opo"),
        ("verl", {"rollout_is": "token", "rollout_is_threshold": "1_2_3"}, "0.5_2.0"),
        ("verl", {"rollout_is": None, "rollout_rs": "seq_k9", "rollout_rs_threshold": 1}, "no rejection"),
        ("verl", {"rollout_is": None, "rollout_rs": "token_k1"}, "need one threshold"),
        ("verl", {"actor_rollout_ref": {"actor": {"clip_ratio": "${x}"}}}, "it is an interpolation"),
        ("verl", {"algorithm.use_kl_in_reward": True, "algorithm.rollout_correction.bypass_mode": True}, "that pays"),
        ("skyrl", {"trainer.algorithm.use_kl_in_reward": True}, "use_kl_loss False"),
        (
            "skyrl",
            {"policy_loss_type": "clip_cov", "off_policy_correction": {"tis_ratio_type": "token"}},
            "SkyRL does not correct this loss",
        ),
        ("skyrl", {"trainer.algorithm.off_policy_correction.token_mask_is_threshold_low": 0.5}, "one bound"),
        ("skyrl", {"policy_loss_type": "rollout_is", "off_policy_correction.tis_ratio_type": "token"}, "telescope"),
        ("skyrl", {"trainer.algorithm.dynamic_sampling.type": "replace"}, "copies of other groups, drawn at random"),
        ("skyrl", {"trainer.algorithm.zero_variance_filter": True, "trainer.algorithm.dynamic_sampling.type": "filter"},
         "has left such groups out"),
        ("skyrl", {"trainer.fully_async.sample_full_batch": True}, "SkyRL has it with zero_variance_filter"),
        ("verl", {"algorithm": {"adv_estimator": "grpo", "filter_groups": {"enable": True, "metric": "acc"}}},
         "compared by the reward that is trained on"),
        ("art", {"truncated_importance_sampling": 2.0}, "squares the ratio"),
        ("art", {"advantage_balance": 0.5}, "advantage_balance = '0.5'"),
        ("art", {"mask_prob_ratio": True, "ppo": True}, "epsilon 1, or a Gate"),
    ],
)  # fmt: skip
def test_what_has_no_counterpart_is_refused_by_its_name_with_a_cure(peer, told, named):
    with pytest.raises(ArgumentError) as refused:
        FROM[peer](told)
    assert named in str(refused.value)
    assert str(refused.value).startswith(f"{peer}: ")


def test_all_that_is_refused_is_said_at_once():
    with pytest.raises(ArgumentError, match=r"4 of the options .*reward_weights.*max_steps.*mask.*num_iterations"):
        recipes.from_trl({"reward_weights": [2.0], "max_steps": 5, "beta": 0.1} | {"num_iterations": 2, "mask": 0})


def test_what_is_no_config_is_refused():
    with pytest.raises(ArgumentError, match="options have no names"):
        recipes.from_trl(["loss_type"])
    with pytest.raises(ArgumentError, match="more than 2,000 options"):
        recipes.from_verl({"data": {str(place): 0 for place in range(3000)}})


def arguments(example, traces, out, *more):
    return ["train", str(traces), "--model", str(example / "model"), "--out", str(out), *more]


@pytest.mark.parametrize("peer", FROM)
def test_a_run_like_each_peers_defaults_takes_its_steps(example, group, tmp_path, capsys, peer):
    pytest.importorskip("transformers")
    config = {"verl": {"algorithm": {"adv_estimator": "grpo"}}, "trl": {"use_vllm": True, "num_train_epochs": 1}}
    file = tmp_path / "config.json"
    file.write_text(json.dumps(config.get(peer, {})))
    told = ["--like", f"{peer}:{file}", "--data.holdout", "0"]
    assert main(arguments(example, group, tmp_path / "out", *told)) == 0
    said = capsys.readouterr().out
    assert said.startswith(f"recipe   {peer}:{file}: objective = ")
    assert "trained  1 steps" in said


def test_a_yaml_file_is_spelled_on_the_terminal_and_what_is_told_by_hand_wins(example, group, tmp_path, capsys):
    pytest.importorskip("yaml")
    file = tmp_path / "config.yaml"
    file.write_text("loss_type: grpo\nlearning_rate: 2e-6\nbf16: true\n")
    told = ["--like", f"trl:{file}", "--print-config"]
    assert main(arguments(example, group, tmp_path / "out", *told, "--optimizer.lr", "1e-4")) == 0
    said = capsys.readouterr().out.splitlines()
    assert "#          loss_type = grpo: objective.reduce.per = trace, objective.reduce.inner = mean" in said
    assert "# told     otherwise, which wins: optimizer.lr = 0.0001 (not 2e-06)" in said
    assert "lr = 0.0001" in said
    assert main(arguments(example, group, tmp_path / "out", *told, "--recipe", "DAPO")) == 1
    assert "--recipe and --like are both told" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "text", "why"),
    [
        ("a.yaml", "a: &x [1, 2]\nb: *x\n", "an alias"),
        ("a.yaml", "- 1\n- 2\n", "it holds a list"),
        ("a.yaml", "a: [", "it cannot be read"),
        ("a.json", "[" * 200_000, "it cannot be read"),
        ("a.yaml", "a" * 300_000, "It is no config"),
        ("a.yaml", "!!python/object/apply:os.system ['true']", "it cannot be read"),
    ],
)
def test_a_file_that_is_no_config_is_refused_with_its_name(tmp_path, name, text, why):
    pytest.importorskip("yaml")
    (tmp_path / name).write_text(text)
    with pytest.raises(ArgumentError) as refused:
        recipes.like(f"trl:{tmp_path / name}")
    assert why in str(refused.value)
    assert name in str(refused.value)


def test_other_peers_and_files_that_are_not_there_are_refused(tmp_path):
    with pytest.raises(ArgumentError, match="names no config"):
        recipes.like("trlx:a.yaml")
    with pytest.raises(ArgumentError, match="No such file"):
        recipes.like(f"trl:{tmp_path / 'none.yaml'}")


def test_without_pyyaml_the_error_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "yaml", None)
    (tmp_path / "a.yaml").write_text("loss_type: grpo\n")
    with pytest.raises(ArgumentError, match="pip install pyyaml"):
        recipes.like(f"trl:{tmp_path / 'a.yaml'}")
