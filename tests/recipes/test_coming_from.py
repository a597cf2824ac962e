"""Configs of other trainers: read without them, spelled option by option, refused by name, and trained with."""

import html
import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest

import tracegrad as tg
from generate_docs import PEERS, coming_from_page, imported_configs_page
from tracegrad import config, recipes
from tracegrad.cli import main
from tracegrad.errors import ArgumentError
from tracegrad.objective import presets
from tracegrad.recipes.import_config import read
from tracegrad.view import runs

FROM = {"trl": recipes.from_trl, "verl": recipes.from_verl, "skyrl": recipes.from_skyrl, "art": recipes.from_art}


def test_the_page_is_the_one_that_the_code_makes():
    page = Path(__file__).parents[2] / "docs" / "how-to" / "coming-from.md"
    assert page.read_text(encoding="utf-8") == coming_from_page()
    reference = page.parents[1] / "reference" / "imported-configs.md"
    assert reference.read_text(encoding="utf-8") == imported_configs_page()


@pytest.mark.parametrize("peer", PEERS, ids=lambda peer: peer.name)
def test_every_value_on_the_page_changes_something_and_is_spelled(peer):
    for name, value, beside in peer.cases():
        recipe = read(peer, {**beside, name: value})
        assert f"{name} = {value}" in dict(recipe.imported_options)
        assert f"# {name} = {value}" in str(recipe)
        settled, otherwise = recipe.resolve()
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
    told = dict(
        recipes.from_trl({"loss_type": "grpo", "epsilon_high": 0.28, "beta": "1e-3", "delta": None}).imported_options
    )
    assert told == {
        "loss_type = grpo": "objective.reduce.per = trace, objective.reduce.inner = mean",
        "epsilon_high = 0.28": "objective.surrogate.high = 0.28",
        "beta = 0.001": "objective.beta = 0.001",  # YAML 1.1 leaves 1e-3 as a text
    }
    idle = dict(recipes.from_trl({"vllm_importance_sampling_cap": 2.0}).imported_options)
    assert idle == {"vllm_importance_sampling_cap = 2.0": "no effect with the other options"}  # use_vllm is off


@pytest.mark.parametrize(
    ("peer", "told", "named"),
    [
        ("trl", {"loss_typ": "grpo"}, "Did you mean loss_type?"),
        ("trl", {"loss_type": "ppo"}, "one of dapo, grpo"),
        ("trl", {"beta": "high"}, "beta = 'high' (it must be int or float"),
        ("trl", {"use_vllm": "yes"}, "it must be bool"),
        ("trl", {"loss_type": "vespo", "importance_sampling_level": "sequence"}, "use token levels"),
        ("trl", {"top_entropy_quantile": 0.5, "entropy_coef": 0.1, "off_policy_mask_threshold": 0.1}, "of the three"),
        ("verl", {"rollout_is": "token", "rollout_is_threshold": "1_2_3"}, "0.5_2.0"),
        ("verl", {"rollout_is": None, "rollout_rs": "seq_k9", "rollout_rs_threshold": 1}, "is not a rejection"),
        ("verl", {"rollout_is": None, "rollout_rs": "token_k1"}, "need one threshold"),
        ("verl", {"actor_rollout_ref": {"actor": {"clip_ratio": "${x}"}}}, "it is an interpolation"),
        (
            "skyrl",
            {"policy_loss_type": "clip_cov", "off_policy_correction": {"tis_ratio_type": "token"}},
            "SkyRL does not correct this loss",
        ),
        ("skyrl", {"trainer.algorithm.off_policy_correction.token_mask_is_threshold_low": 0.5}, "ignores one bound"),
        ("skyrl", {"policy_loss_type": "rollout_is", "off_policy_correction.tis_ratio_type": "token"}, "telescope"),
        ("art", {"truncated_importance_sampling": 2.0}, "squares the ratio"),
        ("art", {"mask_prob_ratio": True, "ppo": True}, "epsilon 1, or a Rejection"),
    ],
)  # fmt: skip
def test_what_has_no_counterpart_is_refused_by_its_name_with_a_cure(peer, told, named):
    with pytest.raises(ArgumentError) as refused:
        FROM[peer](told)
    assert named in str(refused.value)
    assert str(refused.value).removeprefix("TG-RECIPE-015: ").startswith(f"{peer}: ")


@pytest.mark.parametrize(
    ("peer", "told", "named"),
    [
        ("verl", {"algorithm": {"adv_estimator": "gae"}}, "one of grpo, rloo, opo"),
        ("verl", {"algorithm.use_kl_in_reward": True, "algorithm.rollout_correction.bypass_mode": True}, "recorded"),
        ("skyrl", {"trainer.algorithm.use_kl_in_reward": True}, "use_kl_loss False"),
        ("skyrl", {"trainer.algorithm.dynamic_sampling.type": "replace"}, "copies of other groups, sampled at random"),
        ("skyrl", {"trainer.algorithm.zero_variance_filter": True, "trainer.algorithm.dynamic_sampling.type": "filter"},
         "already drops such groups"),
        ("skyrl", {"trainer.fully_async.sample_full_batch": True}, "SkyRL has it with zero_variance_filter"),
        ("verl", {"algorithm": {"adv_estimator": "grpo", "filter_groups": {"enable": True, "metric": "acc"}}},
         "filtered by the trained reward"),
        ("art", {"advantage_balance": 0.5}, "advantage_balance = '0.5'"),
        ("trl", {"optim": "adafactor"}, "optim = 'adafactor' (the optimizer is AdamW"),
        ("trl", {"num_train_epochs": 0.5}, "num_train_epochs = '0.5'"),
        ("trl", {"scale_rewards": "token"}, "one of group, batch, none"),
        ("verl", {"actor_rollout_ref.actor.ppo_epochs": 2}, "ppo_epochs = '2'"),
        ("verl", {"actor_rollout_ref.actor.optim.lr_warmup_steps": 10}, "set data.train_batch_size"),
    ],
)  # fmt: skip
def test_what_says_how_a_run_goes_is_refused_by_a_run_alone_and_the_objective_is_there_without_it(peer, told, named):
    recipe = FROM[peer](told)
    assert recipe.objective == FROM[peer]({}).objective or "bypass_mode" in str(told)
    assert any(named in each for each in recipe.unsupported)
    assert named in str(recipe)
    with pytest.raises(ArgumentError) as refused:
        recipe.resolve()
    assert named in str(refused.value)
    assert "recipe.objective has the objective." in str(refused.value)


def test_what_a_run_refuses_is_spelled_as_that_and_nothing_of_the_recipe_is_made_up():
    spelled = dict(recipes.from_trl({"num_train_epochs": 0.5, "epsilon_high": 0.28}).imported_options)
    assert spelled == {
        "num_train_epochs = 0.5": "refused by a run",
        "epsilon_high = 0.28": "objective.surrogate.high = 0.28",
    }
    assert recipes.from_trl({"scale_rewards": "token"}).advantage is None
    assert recipes.from_verl({"algorithm": {"adv_estimator": "gae"}}).advantage is None
    assert recipes.from_skyrl({"trainer.algorithm.advantage_estimator": "gae"}).advantage is None
    synced = dict(
        recipes.from_trl({"sync_ref_model": True, "ref_model_mixup_alpha": 0.5, "beta": 0.04}).imported_options
    )
    assert synced["ref_model_mixup_alpha = 0.5"] == "train.ref_mixup_alpha = 0.5"


@pytest.mark.parametrize(
    ("told", "spelled"),
    [
        ({"reward_weights": [1, 2]}, "data.reward_weights = [1.0, 2.0]"),
        ({"num_iterations": 4}, "train.iterations = 4"),
        ({"max_steps": 100}, "train.max_steps = 100"),
        ({"warmup_ratio": 0.1, "max_prompt_length": 512, "no_cuda": False}, "schedule.warmup_ratio = 0.1"),
        ({"warmup_steps": 0.1}, "schedule.warmup_ratio = 0.1"),
        ({"lr_scheduler_type": "polynomial"}, "schedule.name = polynomial"),
    ],
)
def test_what_says_how_a_run_goes_becomes_an_option_of_the_run(told, spelled):
    recipe = recipes.from_trl(told)
    assert [here for _, here in recipe.imported_options] == [spelled]
    assert recipe.imported_options[0][0].partition(" = ")[0] == next(iter(told))
    section, name = spelled.split(" = ")[0].split(".")
    assert f"{config.as_dict(recipe.resolve()[0])[f'{section}.{name}']}" == spelled.split(" = ")[1]


def test_a_grpo_config_with_options_of_a_run_gives_its_objective():
    grpo = pytest.importorskip("trl").GRPOConfig
    config = grpo(output_dir="unused", bf16=False, report_to=[], max_steps=50, warmup_steps=0.1, optim="adafactor",
                  reward_weights=[1.0, 2.0], epsilon_high=0.28, loss_type="grpo")  # fmt: skip
    recipe = recipes.from_trl(config)
    assert recipe.objective == recipes.from_trl({"epsilon_high": 0.28, "loss_type": "grpo"}).objective
    with pytest.raises(ArgumentError, match=r"TG-RECIPE-011.*1.*optim.*=.*adafactor"):
        recipe.resolve()


@pytest.mark.parametrize(
    ("peer", "told", "said"),
    [
        ("trl", {}, {}),
        ("trl", {"entropy_coef": 0.1}, {}),
        ("trl", {"entropy_coef": 0.1, "top_entropy_quantile": 0.4},
         {"bonus of a quantile": "it is about 0.4 times TRL's"}),
        ("trl", {"loss_type": "bnpo"}, {"mean of a micro-batch": "over each micro-batch"}),
        ("trl", {"scale_rewards": "batch"}, {"scale of a batch": "one generation batch, tracegrad by"}),
        ("trl", {"steps_per_generation": 4}, {"tokens of a step": "of the 4 steps of a generation batch"}),
        ("trl", {"steps_per_generation": 4, "loss_type": "grpo"}, {}),
        ("trl", {"use_vllm": True}, {"missing logprobs": "has weight 1 here"}),
        ("trl", {"use_vllm": True, "vllm_importance_sampling_mode": "token_mask"}, {}),
        ("verl", {"rollout_is": None, "rollout_rs": "token_k1", "rollout_rs_threshold": 2}, {}),
        ("verl", {"loss_agg_mode": "seq-mean-token-mean"}, {}),
        ("verl", {"loss_agg_mode": "seq-mean-token-sum", "rs": "seq_mean_k1"}, {"rejected rows": "by all rows"}),
        ("verl", {"loss_mode": "sapo", "rs": "seq_mean_k1"}, {"rejected rows": "by all rows"}),
        ("verl", {"loss_agg_mode": "seq-mean-token-mean", "rs": "token_k1", "bypass_mode": True},
         {"tokens of a rejected row": "the share of these tokens times verl's"}),
        ("verl", {"loss_agg_mode": "seq-mean-token-mean", "rs": "seq_mean_k1", "bypass_mode": True}, {}),
        ("verl", {"loss_mode": "geo_mean", "rs": "token_k1"}, {"rejection within geo_mean": "over the full trace"}),
        ("verl", {"loss_mode": "geo_mean", "rs": "seq_mean_k1"}, {}),
        ("verl", {"loss_mode": "geo_mean", "is": "token"}, {"weights of geo_mean": "each token has its own weight"}),
        ("verl", {"loss_mode": "geo_mean", "is": "sequence"}, {}),
        ("verl", {"loss_mode": "geo_mean", "is": "token", "bypass_mode": True}, {}),
        ("verl", {"warmup": 10}, {"rate within a batch": "for the 4 optimizer steps of a training batch"}),
        ("verl", {"decay": 0.01}, {"norms and biases": "1 - lr * 0.01"}),
        ("verl", {"adv": "grpo"}, {"epsilon of the deviation": "tracegrad 1e-4"}),
        ("skyrl", {}, {"epsilon of the deviation": "1e-6", "norms and biases": "1 - lr * 0.01"}),
        ("skyrl", {"trainer.algorithm.advantage_estimator": "maxrl"},
         {"means below 0": "here the advantage is 0", "norms and biases": "1 - lr * 0.01"}),
        ("skyrl", {"trainer.algorithm.grpo_norm_by_std": False}, {"norms and biases": "1 - lr * 0.01"}),
        ("art", {"scale_rewards": False},
         {"mean size of advantages": "divide_by_mean_abs", "AdamW": "weight decay 0.1",
          "missing logprobs": "a ratio of 1"}),
    ],
)  # fmt: skip
def test_a_recipe_says_each_difference_of_its_config_and_no_other(peer, told, said):
    if peer == "verl":
        actor, correction = "actor_rollout_ref.actor.", "algorithm.rollout_correction."
        places = {
            "loss_mode": f"{actor}policy_loss.loss_mode",
            "loss_agg_mode": f"{actor}loss_agg_mode",
            "bypass_mode": f"{correction}bypass_mode",
            "rs": f"{correction}rollout_rs",
            "is": f"{correction}rollout_is",
            "rollout_is": f"{correction}rollout_is",
            "rollout_rs": f"{correction}rollout_rs",
            "rollout_rs_threshold": f"{correction}rollout_rs_threshold",
            "warmup": f"{actor}optim.lr_warmup_steps",
            "decay": f"{actor}optim.weight_decay",
            "adv": "algorithm.adv_estimator",
        }
        told = {f"{actor}optim.weight_decay": 0.0} | {places[name]: value for name, value in told.items()}
        told |= {f"{correction}rollout_rs_threshold": 1.5} if f"{correction}rollout_rs" in told else {}
        told |= {"data.train_batch_size": 1024} if f"{actor}optim.lr_warmup_steps" in told else {}
    recipe = FROM[peer](told)
    found = dict(recipe.differences)
    assert set(found) == set(said)
    assert all(words in found[name] and "{" not in found[name] for name, words in said.items())
    assert all(f"# differs on purpose, {name}: {words}" in str(recipe) for name, words in found.items())


def test_verls_warm_up_counts_training_batches():
    # 1024 prompts in mini-batches of 256 are 4 optimizer steps: 10 batches are 40.
    actor = "actor_rollout_ref.actor."
    told = {"data.train_batch_size": 1024, f"{actor}ppo_mini_batch_size": 256, f"{actor}optim.lr_warmup_steps": 10}
    assert dict(recipes.from_verl(told).options)["schedule.warmup_steps"] == 40
    whole = told | {f"{actor}ppo_mini_batch_size": 1024}
    assert dict(recipes.from_verl(whole).options)["schedule.warmup_steps"] == 10
    assert "rate within a batch" not in dict(recipes.from_verl(whole).differences)


def test_the_command_line_says_where_a_config_differs_and_what_a_run_refuses(example, group, tmp_path, capsys):
    file = tmp_path / "config.json"
    file.write_text(json.dumps({"entropy_coef": 0.1, "top_entropy_quantile": 0.4}))
    told = ["--from-config", f"trl:{file}", "--print-config"]
    assert main(arguments(example, group, tmp_path / "out", *told)) == 0
    said = capsys.readouterr().out.splitlines()
    assert any(line.startswith("# differs  on purpose, bonus of a quantile: TRL divides") for line in said)
    file.write_text(json.dumps({"num_train_epochs": 0.5}))
    assert main(arguments(example, group, tmp_path / "out", *told)) == 1
    assert "num_train_epochs = '0.5'" in capsys.readouterr().err


def test_the_size_of_a_step_and_the_temperature_of_a_config_are_compared_with_those_of_the_run(
    example, group, tmp_path, capsys
):
    def lines(peer, options, *more):
        (tmp_path / "c.json").write_text(json.dumps(options))
        told = ["--from-config", f"{peer}:{tmp_path / 'c.json'}", "--dry-run", "--data.holdout", "0", *more]
        assert main(arguments(example, group, tmp_path / "out", *told)) == 0
        said = [line.removeprefix("# ") for line in capsys.readouterr().out.splitlines()]
        return [line for line in said if line.startswith(("batch  ", "idle  ", "instead", "warning"))]

    batch = {"per_device_train_batch_size": 8, "gradient_accumulation_steps": 4, "num_generations": 16}
    options = {**batch, "temperature": 0.9, "use_vllm": True, "entropy_coef_min": 0.01}
    first, idle, instead, warning = lines("trl", options)
    assert first == (
        "batch    16 groups per step (train.groups_per_step); the config has 32 completions on each device, 2 groups"
    )
    assert idle == "idle     no effect with the other options: entropy_coef_min = 0.01"
    assert instead.endswith("temperature (the recorded temperature; online, rollout.temperature)")
    assert warning == "warning  the temperature 0.9 of the config is not used: the traces record 1."
    assert lines("trl", {"temperature": 1.0, "use_vllm": True}) == [instead]
    verl = {"algorithm.adv_estimator": "grpo", "actor_rollout_ref.actor.ppo_mini_batch_size": 64}
    verl["algorithm.rollout_correction.rollout_is"] = "token"
    assert lines("verl", verl, "--train.groups_per_step", "2") == [
        "batch    2 groups per step (train.groups_per_step); the config has 64 prompts"
    ]


def test_all_that_is_refused_is_said_at_once():
    with pytest.raises(ArgumentError, match=r"TG-RECIPE-015.*3.*cannot.*method"):
        recipes.from_trl({"optim": "adafactor", "num_train_epochs": 0.5, "beta": 0.1, "mask": 0})


def test_what_is_no_config_is_refused():
    with pytest.raises(ArgumentError, match="TG-RECIPE-008"):
        recipes.from_trl(["loss_type"])
    with pytest.raises(ArgumentError, match=r"TG-RECIPE-009.*2,000"):
        recipes.from_verl({"data": {str(place): 0 for place in range(3000)}})


def arguments(example, traces, out, *more):
    return ["train", str(traces), "--model", str(example / "model"), "--out", str(out), *more]


@pytest.mark.parametrize("peer", FROM)
def test_a_run_like_each_peers_defaults_takes_its_steps(example, group, tmp_path, capsys, peer):
    pytest.importorskip("transformers")
    config = {"verl": {"algorithm": {"adv_estimator": "grpo"}}, "trl": {"use_vllm": True, "num_train_epochs": 1}}
    file = tmp_path / "config.json"
    file.write_text(json.dumps(config.get(peer, {})))
    told = ["--from-config", f"{peer}:{file}", "--data.holdout", "0"]
    assert main(arguments(example, group, tmp_path / "out", *told)) == 0
    said = capsys.readouterr().out
    recipe = recipes.like(f"{peer}:{file}")
    lines = said.splitlines()
    assert lines[0].startswith(f"recipe   {peer}:{file}: {'' if peer in ('skyrl', 'art') else 'objective = '}")
    assert len(lines[0]) < 500
    assert all(f"         {line}" in lines for line in str(recipe.objective).splitlines())
    assert "trained  1 step" in said
    out = tmp_path / "out"
    header = (out / "config.toml").read_text().split("\n\n")[0].splitlines()
    notes = [f"recipe {peer}:{file}", *recipe.import_notes]
    assert header[-len(notes) :] == [f"# {note}" for note in notes]
    assert json.loads((out / "summary.json").read_text())["recipe"] == {"source": notes[0][7:], "notes": notes[1:]}
    report = html.unescape((out / "report.html").read_text())
    assert [note for note in notes if note.removeprefix("recipe ")[:190] not in report] == []
    assert f"{peer}:{file}" in runs.page([out])


WITHOUT_CORRECTION = {
    "trl": {},
    "verl": {"algorithm": {"adv_estimator": "grpo"}},
    "skyrl": {},
    "art": {"precalculate_logprobs": True},
}


@pytest.mark.parametrize("peer", FROM)
def test_a_config_that_leaves_the_recorded_logprobs_unused_is_one_warning_with_its_cure(
    example, group, tmp_path, capsys, peer
):
    def warnings(options):
        (tmp_path / "config.json").write_text(json.dumps(options))
        told = ["--from-config", f"{peer}:{tmp_path / 'config.json'}", "--dry-run", "--data.holdout", "0"]
        assert main(arguments(example, group, tmp_path / "out", *told)) == 0
        return [line for line in capsys.readouterr().out.splitlines() if "warning  the recorded logprobs" in line]

    options = WITHOUT_CORRECTION[peer]
    [warning] = warnings(options)
    name, _, value = warning.split(" Set ")[1].split(" in the config")[0].partition(": ")
    cured = {"true": True}.get(value, float(value) if value[0].isdigit() else value)
    assert warnings({**options, name: cured}) == []


def test_a_run_whose_loss_leaves_the_recorded_logprobs_unused_says_so(example, group, tmp_path, capsys):
    pytest.importorskip("transformers")
    told = ["--data.holdout", "0", "--train.max_steps", "2", "--train.lora_rank", "1"]
    assert main(arguments(example, group, tmp_path / "a", *told, "--objective", "TOPR_POSITIVE")) == 0
    said = capsys.readouterr().out
    assert said.count("warning  the recorded logprobs are not used: ") == 1
    assert "DAPO, the default objective, has one" in said
    lines = []
    recipe = recipes.from_trl({"num_train_epochs": 1})
    options = {"data.holdout": 0.0}
    tg.train(example / "model", group, out=tmp_path / "b", recipe=recipe, options=options, log=lines.append)
    [warning] = [line for line in lines if line.startswith("warning")]
    assert "the recorded logprobs are not used" in warning
    assert warning.endswith(" Call from_trl(config, rollout_logprobs=True).")
    assert recipes.from_trl({}, rollout_logprobs=True) == recipes.from_trl({"use_vllm": True})


def test_a_yaml_file_is_spelled_on_the_terminal_and_what_is_told_by_hand_wins(example, group, tmp_path, capsys):
    pytest.importorskip("yaml")
    file = tmp_path / "config.yaml"
    file.write_text("loss_type: grpo\nlearning_rate: 2e-6\nbf16: true\n")
    told = ["--from-config", f"trl:{file}", "--print-config"]
    assert main(arguments(example, group, tmp_path / "out", *told, "--optimizer.lr", "1e-4")) == 0
    said = capsys.readouterr().out.splitlines()
    assert "#          loss_type = grpo: objective.reduce.per = trace, objective.reduce.inner = mean" in said
    assert "# override these options replace the recipe's: optimizer.lr = 0.0001 (not 2e-06)" in said
    assert "lr = 0.0001" in said
    assert main(arguments(example, group, tmp_path / "out", *told, "--recipe", "DAPO")) == 1
    assert "TG-CLI-005: --recipe and --from-config " in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "text", "why"),
    [
        ("a.yaml", "a: &x [1, 2]\nb: *x\n", "an alias"),
        ("a.yaml", "- 1\n- 2\n", "contains a list"),
        ("a.yaml", "a: [", "cannot be parsed"),
        ("a.json", "[" * 200_000, "cannot be parsed"),
        ("a.yaml", "a" * 300_000, "too many for a config"),
        ("a.yaml", "!!python/object/apply:os.system ['true']", "cannot be parsed"),
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
    with pytest.raises(ArgumentError, match="TG-RECIPE-002"):
        recipes.like("trlx:a.yaml")
    with pytest.raises(ArgumentError, match=r"TG-RECIPE-003.*No"):
        recipes.like(f"trl:{tmp_path / 'none.yaml'}")


def test_without_pyyaml_the_error_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "yaml", None)
    (tmp_path / "a.yaml").write_text("loss_type: grpo\n")
    with pytest.raises(ArgumentError, match="TG-RECIPE-005"):
        recipes.like(f"trl:{tmp_path / 'a.yaml'}")


def test_options_of_a_config_that_have_no_effect_are_named(tmp_path, capsys):
    config = {"beta": 0.0, "optim": "adamw_torch", "output_dir": "o", "use_peft": True, "lora_r": 16}
    (tmp_path / "trl.json").write_text(json.dumps(config))
    command = ["train", "none.jsonl", "--model", "m", "--out", str(tmp_path / "o"), "--print-config"]
    assert main([*command, "--from-config", f"trl:{tmp_path / 'trl.json'}"]) == 0
    said = capsys.readouterr().out
    warned = [line.split()[2] for line in said.splitlines() if line.startswith("# warning")]
    assert warned == ["use_peft"]
    assert "--train.lora_rank" not in said
    assert "train.lora_rank is set" in said
    assert "# instead  not read from the config, but set by (...): output_dir (--out), lora_r (train.lora_rank)" in said
    assert "# default  as trl's default: beta, optim\n" in said
    recipe = recipes.from_trl({**config, "use_peft": False, "use_vllm": True})
    assert [name for name, warning in recipe.ignored_options if warning] == []
    assert recipe.config == recipes.from_trl({"beta": 0.0, "use_vllm": True}).config  # nothing else changes


TRUNCATED = {
    "top_p": ("trl", {"top_p": 0.9, "top_k": 0, "min_p": None}, {"top_p": 0.9, "top_logprobs": 64}),
    "top_k, one more of which is listed": (
        "trl",
        {"top_p": 0.9, "top_k": 20, "min_p": 0.05},
        {"top_p": 0.9, "top_k": 20, "min_p": 0.05, "top_logprobs": 21},
    ),
    "YAML's text": ("trl", {"min_p": "5e-2"}, {"min_p": 0.05, "top_logprobs": 64}),
    "verl": (
        "verl",
        {"actor_rollout_ref": {"rollout": {"top_p": 1, "top_k": 50, "val_kwargs": {"top_p": 0.7}}}},
        {"top_k": 50, "top_logprobs": 51},
    ),
    "SkyRL": (
        "skyrl",
        {"generator": {"sampling_params": {"top_p": 0.95, "top_k": -1, "min_p": 0.02}}},
        {"top_p": 0.95, "min_p": 0.02, "top_logprobs": 64},
    ),
}


@pytest.mark.parametrize("case", list(TRUNCATED))
def test_truncation_is_that_of_rollouts_and_the_recipe_says_how_tokens_are_compared(case):
    peer, options, rollout = TRUNCATED[case]
    recipe = FROM[peer](options)
    assert dict(recipe.rollout) == {f"rollout.{name}": value for name, value in rollout.items()}
    translated = dict(recipe.imported_options)
    for name, value in rollout.items():
        assert f"rollout.{name} = {value}" in str(recipe)
        if name != "top_logprobs":
            [(option, effect)] = [each for each in translated.items() if each[0].endswith(f"{name} = {value}")]
            assert f"rollout.top_logprobs = {rollout['top_logprobs']}" in effect
            assert "over their support" in effect
            assert option.partition(" = ")[0] not in dict(recipe.ignored_options)
    assert recipe == replace(FROM[peer]({}), rollout=recipe.rollout)  # the loss and the other options are the same


def test_truncation_that_is_off_is_ignored_and_that_of_a_wrong_type_is_refused():
    recipe = recipes.from_trl({"top_p": 1.0, "top_k": 0, "min_p": 0.0})
    assert (recipe.rollout, dict(recipe.ignored_options)) == ((), {"top_p": "", "top_k": "", "min_p": ""})
    assert recipes.from_verl({"actor_rollout_ref": {"rollout": {"top_p": None, "top_k": -1}}}).rollout == ()
    for value in ("${oc.env:P}", "most", True):
        with pytest.raises(ArgumentError, match=r"TG-RECIPE-015.*top_p"):
            recipes.from_trl({"top_p": value})
