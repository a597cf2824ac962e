"""Folders of LoRA adapters: a run that starts from one, whole weights merged from one, and what is no such folder."""

import json
import os
import shutil
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from safetensors.torch import load_file, save_file

from few_probes import few  # noqa: F401
from online_runs import CONFIG as PLAYED
from policy_server import MODEL, PolicyServer
from tiny import tiny_model
from tracegrad import config, online, trainer
from tracegrad.cli import main
from tracegrad.errors import ArgumentError, ReadError, ServerError
from tracegrad.objective import presets, with_kl
from tracegrad.trainer.lora import load_model, merge_adapters
from tracegrad.trainer.resource_estimate import estimate_resources
from tracegrad.trainer.steps import TrainingData
from training_runs import assert_same, told, traces  # noqa: F401

LORA = {"train__epochs": 1, "optimizer__lr": 5e-2}


@pytest.fixture(scope="module")
def trained(traces, tmp_path_factory):
    """The checkpoint of a run with adapters on a model in a folder that it names relatively."""
    folder = tmp_path_factory.mktemp("adapted")
    tiny_model().save_pretrained(folder / "base")
    before = Path.cwd()
    os.chdir(folder)
    try:
        train(traces, load_model(Path("base")), Path("run"), tokenizer=MODEL, train__lora_rank=4)
    finally:
        os.chdir(before)
    return folder / "run" / "checkpoint"


def train(traces, model, out, *, objective=presets.DAPO, tokenizer=None, log=lambda _: None, **changes):
    chosen = told(**{**LORA, **changes})
    given = {"tokenizer": tokenizer, "sinks": (), "log": log}
    return trainer.train(traces, model, objective=objective, out=out, config=chosen, **given)


def theirs(checkpoint):
    """As peft itself puts the adapters on the model."""
    from transformers import AutoModelForCausalLM

    base = AutoModelForCausalLM.from_pretrained(checkpoint.parent.parent / "base", dtype=torch.float32)
    return pytest.importorskip("peft").PeftModel.from_pretrained(base, str(checkpoint))


def test_merged_weights_are_those_of_peft_bit_for_bit(trained, tmp_path, capsys):
    assert main(["merge", str(trained), "--out", str(tmp_path / "whole")]) == 0
    assert "AutoModelForCausalLM" in capsys.readouterr().out
    assert main(["merge", str(trained), "--out", str(tmp_path / "again"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"checkpoint": str(trained), "model": str(tmp_path / "again")}
    ours = load_model(tmp_path / "whole").state_dict()
    assert_same(ours, theirs(trained).merge_and_unload().state_dict())
    name = "model.layers.0.self_attn.q_proj"
    said = load_file(trained / "adapter_model.safetensors")
    up, down = (said[f"base_model.model.{name}.lora_{each}.weight"] for each in "BA")
    whole = load_model(trained.parent.parent / "base").state_dict()[f"{name}.weight"]
    torch.testing.assert_close(ours[f"{name}.weight"], whole + 2 * up @ down, rtol=0, atol=1e-6)  # alpha is 2 ranks
    assert float((2 * up @ down).abs().max()) > 1e-2


def test_merged_weights_have_tokenizer_and_template_beside_them(trained, tmp_path):
    merge_adapters(trained, tmp_path / "whole")
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        assert (MODEL / name).is_file() == (tmp_path / "whole" / name).is_file()
        if (MODEL / name).is_file():
            assert (tmp_path / "whole" / name).read_bytes() == (MODEL / name).read_bytes()
    assert not list(tmp_path.glob(".tmp*"))


def test_a_checkpoint_of_adapters_is_the_policy_that_was_saved(trained, traces, tmp_path):
    loaded = load_model(trained)
    assert {name for name, p in loaded.named_parameters() if p.requires_grad} == {
        name for name, _ in loaded.named_parameters() if "lora_" in name
    }
    ids = torch.arange(3, 12)[None]
    with torch.no_grad():
        torch.testing.assert_close(loaded.eval()(ids).logits, theirs(trained).eval()(ids).logits, rtol=0, atol=0)
    assert json.loads((trained / "config.json").read_text())["vocab_size"] == loaded.config.vocab_size


def test_a_run_goes_on_with_the_adapters_and_its_reference_is_the_model_without_them(trained, traces, tmp_path):
    said: list[str] = []
    objective = with_kl(presets.DAPO, 0.05)
    done = train(traces, load_model(trained), tmp_path / "more", objective=objective, log=said.append)
    assert any("adapters are trained further" in each for each in said)
    assert done.rows[1]["kl_ref"] > 1e-3  # a model that had just become its own reference would have none
    before, after = (load_file(each / "adapter_model.safetensors") for each in (trained, done.checkpoint))
    assert before.keys() == after.keys()
    assert all(not torch.equal(before[name], value) for name, value in after.items())
    base = (trained.parent.parent / "base").resolve()
    assert json.loads((done.checkpoint / "adapter_config.json").read_text())["base_model_name_or_path"] == str(base)
    again = train(traces, load_model(trained), tmp_path / "again", objective=objective)
    assert_same(after, load_file(again.checkpoint / "adapter_model.safetensors"))


def test_new_adapters_on_adapters_are_refused_with_both_ways_on(trained, traces, tmp_path):
    with pytest.raises(ArgumentError, match="TG-TRAIN-040"):
        train(traces, load_model(trained), tmp_path, train__lora_rank=4)


def test_a_dry_run_counts_the_adapters_of_a_checkpoint(trained, traces):
    found = estimate_resources(trained, told(), TrainingData.of(traces, presets.DAPO, told()), 1)
    assert found.trained == sum(value.numel() for value in load_file(trained / "adapter_model.safetensors").values())


@pytest.mark.nightly
def test_an_online_run_starts_from_adapters(tmp_path):
    async def agent(task, policy):
        return -float(len((await policy.chat(task["prompt"]))["content"] or "")) / 10

    from collect_run import questions

    chosen = config.update(PLAYED, [("train.lora_rank", 4), ("optimizer.lr", 5e-2)])
    plain = config.update(chosen, [("train.lora_rank", 0)])
    options = {"objective": presets.DAPO_DIRECT, "agent": agent, "sinks": (), "log": lambda _: None}
    how = {
        "online": online.OnlineConfig(steps=2, steps_ahead=0, max_resample_factor=1),
        "rollout": online.RolloutConfig(group_size=4, max_tokens=12, max_turns=1),
    }
    first = {**options, "config": chosen, **how, "out": tmp_path / "first"}
    more = {**options, "config": plain, **how, "out": tmp_path / "more"}
    with PolicyServer() as server:
        found = online.train(MODEL, questions(count=8), servers=[server.url], **first)
    with PolicyServer() as server:
        again = online.train(found.checkpoint, questions(count=8), servers=[server.url], **more)
    assert max(row["weight_check/max"] for row in again.rows) < 1e-4
    before, after = (load_file(each.checkpoint / "adapter_model.safetensors") for each in (found, again))
    assert before.keys() == after.keys()
    assert any(not torch.equal(before[name], value) for name, value in after.items())


def test_a_server_that_is_started_for_adapters_is_given_the_model_below_them_and_their_rank(trained, tmp_path):
    """An interpreter that writes down what it is asked to start, and ends."""
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\necho "$@" > {tmp_path}/asked\nexit 1\n')
    python.chmod(0o755)
    how = {
        "python": str(python),
        "config": PLAYED,
        "online": online.OnlineConfig(steps=1, weight_sync="lora"),
        "out": tmp_path / "o",
    }
    with pytest.raises(ServerError):
        online.train(trained, ["2 x lamp"], rewards=lambda prompts, completions: [0.0] * len(prompts), **how)
    asked = (tmp_path / "asked").read_text().split()
    assert str((trained.parent.parent / "base").resolve()) in asked
    assert asked[asked.index("--max-lora-rank") + 1] == "8"  # the least that vLLM takes


# --- what is refused ---


def spoiled(trained, folder, **changes):
    """A copy of the checkpoint whose adapter_config.json says something else."""
    shutil.copytree(trained, folder, ignore=shutil.ignore_patterns("resume"))
    said = json.loads((folder / "adapter_config.json").read_text()) | changes
    (folder / "adapter_config.json").write_text(json.dumps(said))
    return folder


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"peft_type": "IA3"}, "TG-TRAIN-042"),
        ({"megatron_config": {"a": 1}}, r"TG-TRAIN-042.*megatron_config"),
        ({"megatron_core": "this"}, r"TG-TRAIN-042.*megatron_core"),
        ({"layers_pattern": "(a+)+b"}, r"TG-TRAIN-042.*layers_pattern"),
        ({"target_modules": "(a+)+b"}, r"TG-TRAIN-042.*target_modules"),
        ({"init_lora_weights": "pissa"}, "TG-TRAIN-042"),
        ({"r": 1 << 40}, r"TG-TRAIN-042.*1099511627776.*adapter_model\.safetensors.*4"),
        ({"r": "4"}, "TG-TRAIN-042"),
        ({"base_model_name_or_path": None}, "TG-TRAIN-042"),
        ({"base_model_name_or_path": "someone/a-model"}, r"TG-TRAIN-043.*someone/a-model"),
        ({"target_modules": ["q_proj"]}, "TG-TRAIN-044"),
        ({"target_modules": ["no_such"]}, "TG-TRAIN-044"),
        ({"use_dora": True}, r"TG-TRAIN-044.*lora_magnitude_vector"),
    ],
)
def test_a_folder_that_is_not_understood_is_refused(trained, tmp_path, changes, why):
    with pytest.raises(ReadError, match=why):
        load_model(spoiled(trained, tmp_path / "a", **changes))


def test_weights_that_are_torn_or_of_another_model_are_refused(trained, tmp_path):
    torn = spoiled(trained, tmp_path / "torn") / "adapter_model.safetensors"
    torn.write_bytes(torn.read_bytes()[:-8])
    with pytest.raises(ReadError, match=r"TG-TRAIN-042.*adapter_config\.json.*Error.*while.*deserializing"):
        load_model(torn.parent)
    other = spoiled(trained, tmp_path / "other") / "adapter_model.safetensors"
    said = {name: torch.cat([value, value], 1) for name, value in load_file(other).items()}
    save_file(said, other)
    with pytest.raises(ReadError, match="TG-TRAIN-044"):
        load_model(other.parent)
    (other.parent / "adapter_config.json").write_text("{")
    with pytest.raises(ReadError, match="TG-TRAIN-042"):
        load_model(other.parent)


def test_what_cannot_be_merged_is_refused_and_leaves_nothing(trained, tmp_path, capsys):
    base = trained.parent.parent / "base"
    with pytest.raises(ArgumentError, match=r"TG-TRAIN-045.*adapter_config\.json"):
        merge_adapters(base, tmp_path / "whole")
    with pytest.raises(ArgumentError, match="TG-TRAIN-046"):
        merge_adapters(trained, tmp_path)
    broken = spoiled(trained, tmp_path / "nan") / "adapter_model.safetensors"
    save_file({name: value * float("nan") for name, value in load_file(broken).items()}, broken)
    assert main(["merge", str(broken.parent), "--out", str(tmp_path / "whole")]) == 1
    assert "Merge an earlier checkpoint" in capsys.readouterr().err
    assert main(["merge", str(trained), "--out", str(tmp_path / "whole"), "--optimizer.lr", "1"]) == 1
    assert not (tmp_path / "whole").exists()


def test_a_model_that_has_moved_is_named_for_the_merge(trained, tmp_path):
    moved = spoiled(trained, tmp_path / "moved", base_model_name_or_path=str(tmp_path / "nowhere"))
    merge_adapters(moved, tmp_path / "whole", base=trained.parent.parent / "base")
    merge_adapters(trained, tmp_path / "same")
    assert_same(load_file(tmp_path / "whole/model.safetensors"), load_file(tmp_path / "same/model.safetensors"))
