"""integrations.trl.WithObjective: GRPOTrainer plays by itself, and takes the step that its loss or ours takes."""

import copy
import importlib
import sys
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import tracegrad as tg
from tiny import ONE_STEP
from tracegrad.errors import ArgumentError
from tracegrad.integrations import trl
from tracegrad.integrations.trl import WithObjective
from tracegrad.objective import Aggregation, Objective, Ratio, Reduce, Rejection, Truncate, Weight, presets, with_beta
from tracegrad.recipes import from_trl

sys.path.insert(0, str(Path(__file__).parents[2] / "examples" / "trainers"))
GROUP, LR = 4, 0.05
PROMPTS = ["How many lamps are there?", "Order 3 chairs.", "What does a desk cost?", "Is there a rug?"]
NO_WEIGHT = {"weights": (), "rejections": ()}
GRPO, DAPO = (replace(preset, **NO_WEIGHT) for preset in (presets.GRPO, presets.DAPO))


@cache
def trainers():
    """Return TRL's trainer and ours as a user would write it. Collecting the tests does not import TRL."""
    from trl import GRPOTrainer

    return {"trl": GRPOTrainer, "ours": type("Live", (WithObjective, GRPOTrainer), {})}


@pytest.fixture(scope="module")
def start(example):
    return SimpleNamespace(
        model=AutoModelForCausalLM.from_pretrained(example / "model", dtype=torch.float32),
        tokenizer=AutoTokenizer.from_pretrained(example / "model"),
        folder=str(example / "model"),
    )


def reward(completion_ids, **_):
    """Of the ids alone, so that equal completions are equally good."""
    return [float(sum(ids) % 7) / 7 for ids in completion_ids]


def config(folder, accumulate=1, **changes):
    from trl import GRPOConfig

    fixed: dict[str, Any] = {
        **ONE_STEP,
        "learning_rate": LR,
        "lr_scheduler_type": "constant",
        "seed": 7,
        "num_generations": GROUP,
        "max_completion_length": 12,
        "per_device_train_batch_size": len(PROMPTS) * GROUP // accumulate,
        "gradient_accumulation_steps": accumulate,
        **changes,
    }
    return GRPOConfig(str(folder), **fixed)


def trained(kind, start, args, *, with_ratio=False, **options) -> Any:
    """A trainer after training a copy of the model with SGD; `with_ratio` has TRL form its ratio without a vLLM."""
    from datasets import Dataset

    model = copy.deepcopy(start.model)
    model.config._name_or_path = start.folder
    trainer = trainers()[kind](
        model,
        reward,
        args=args,
        train_dataset=Dataset.from_dict({"prompt": PROMPTS}),
        processing_class=start.tokenizer,
        optimizers=(torch.optim.SGD(model.parameters(), args.learning_rate), None),
        **options,
    )
    if with_ratio:
        trainer.use_vllm, trainer._last_loaded_step = True, -1
        trainer.vllm_generation = SimpleNamespace(sync_weights=lambda: None)
    torch.manual_seed(args.seed)
    trainer.train()
    return trainer


def assert_same_step(one, other, start, atol=2e-6):
    moved = 0.0
    pairs = zip(one.model.named_parameters(), other.model.parameters(), start.model.parameters(), strict=True)
    for (name, a), b, before in pairs:
        torch.testing.assert_close(a, b, rtol=1e-5, atol=atol, msg=lambda text, name=name: f"{name}: {text}")
        moved = max(moved, float((a - before).detach().abs().max()))
    assert moved > 1e-4


SAME = {
    "dapo": (DAPO, {"loss_type": "dapo", "epsilon_high": 0.28}),
    "grpo": (GRPO, {"loss_type": "grpo"}),
    "dr_grpo": (replace(GRPO, reduce=Reduce("trace", "sum", norm=12.0)), {"loss_type": "dr_grpo"}),
    "grpo with TRL's beta": (with_beta(GRPO, 0.04), {"loss_type": "grpo", "beta": 0.04}),
    "sapo": (replace(presets.SAPO, **NO_WEIGHT), {"loss_type": "sapo"}),
}


@pytest.mark.parametrize("case", list(SAME))
@pytest.mark.first_cases(2)
def test_two_updates_on_what_it_generates_are_those_of_trls_own_loss(case, start, tmp_path):
    objective, options = SAME[case]
    live = {"num_iterations": 2, "max_steps": 2, "learning_rate": 1.0}
    own = {name: value for name, value in options.items() if name == "beta"}
    mine = trained("ours", start, config(tmp_path, **live, **own), objective=objective)
    theirs = trained("trl", start, config(tmp_path, **live, **options))
    assert torch.equal(mine._buffered_inputs[0]["completion_ids"], theirs._buffered_inputs[0]["completion_ids"])
    assert_same_step(mine, theirs, start)
    rows, logged = mine.state.log_history, theirs.state.log_history[1]
    names = [name for name in logged if name.startswith("clip_ratio/") or name in ("entropy", "kl")]
    assert len(names) == (1 if case == "sapo" else 6) + ("beta" in case)
    assert {name: rows[1][name] for name in names} == pytest.approx({name: logged[name] for name in names}, rel=1e-4)


def rollouts(tokenizer, lacking=()):
    """A rollout_func that says what a server with another policy sampled, two turns with a tool between them."""

    def rollout(prompts, trainer):
        rng, told = np.random.default_rng(0), {"prompt_ids": [], "completion_ids": [], "logprobs": [], "env_mask": []}
        for row, prompt in enumerate(prompts):
            length = int(rng.integers(5, 10))
            told["prompt_ids"].append(tokenizer(prompt).input_ids)
            told["completion_ids"].append(rng.integers(3, 200, length).tolist())
            told["logprobs"].append([None if row in lacking else x for x in (-4 - 2 * rng.random(length)).tolist()])
            told["env_mask"].append([0 if place in (2, 3) else 1 for place in range(length)])
        return told

    return rollout


TRUNCATED = {"vllm_importance_sampling_mode": "token_truncate", "vllm_importance_sampling_clip_max": 2.0}


@pytest.mark.parametrize("missing", [(1, 6), ()])
@pytest.mark.first_cases(1)
def test_the_logprobs_that_came_with_the_tokens_weigh_as_trls_ratio_does(missing, start, tmp_path):
    rollout = rollouts(start.tokenizer, missing)
    options = {"loss_type": "dapo", "epsilon_high": 0.28, **TRUNCATED}
    theirs = trained("trl", start, config(tmp_path, **options), rollout_func=rollout, with_ratio=True)
    told = {"objective": presets.DAPO, "missing_logprobs": "ratio_one", "rollout_func": rollout}
    mine = trained("ours", start, config(tmp_path), with_ratio=True, **told)
    assert_same_step(mine, theirs, start)
    assert mine.state.log_history[0]["tracegrad/missing"] == int(
        mine._buffered_inputs[0]["sampling_per_token_logps"].isnan()[mine._buffered_inputs[0]["tool_mask"].bool()].sum()
    )
    with pytest.warns(UserWarning, match="logprobs are not used") as warned:
        unweighed = trained("ours", start, config(tmp_path, accumulate=2), objective=DAPO, rollout_func=rollout)
    assert sum("logprobs are not used" in str(each.message) for each in warned) == 1
    with pytest.raises(AssertionError, match="embed_tokens"):
        assert_same_step(unweighed, theirs, start)


WHOLE = {
    "a normalised weight, kept terms": replace(
        presets.GRPO,
        rejections=(Rejection(Ratio("old", "rollout"), level=Aggregation("trace", "mean"), low=0.01, high=2.0),),
        weights=(Weight(Ratio("old", "rollout"), transform=Truncate(0.0, 2.0), normalize=True),),
        reduce=Reduce("trace", "mean", denominator="kept"),
    ),
    "a budget": presets.M2PO,
    "a turn's ratio": replace(
        presets.GRPO, surrogate=replace(presets.GRPO.surrogate, level=Aggregation("turn", "mean"))
    ),
    "counts of each prompt": replace(presets.GRPO, reduce=Reduce("prompt", "mean")),
    "theta/rollout": presets.GRPO_DIRECT,
    "one's own": Objective(lambda view: (view.log_ratio - view.advantages).square(), Ratio("theta", "rollout")),
}


@pytest.mark.parametrize("accumulate", [pytest.param(1, marks=pytest.mark.nightly), 2])
@pytest.mark.parametrize("name", list(WHOLE))
@pytest.mark.first_cases(2)
def test_any_objective_takes_its_own_gradient_on_trls_tensors(name, accumulate, start, tmp_path):
    args, objective = config(tmp_path, accumulate), WHOLE[name]
    trainer = trained("ours", start, args, objective=objective, rollout_func=rollouts(start.tokenizer))
    parts, model = trainer._buffered_inputs, copy.deepcopy(start.model)
    assert bool(objective.rejections) == (0 < trainer.state.log_history[0]["tracegrad/masked_fraction"] < 1)
    held = {key: torch.cat([part[key] for part in parts]) for key in parts[0] if getattr(parts[0][key], "ndim", 0)}
    ids = torch.cat([held["prompt_ids"], held["completion_ids"]], 1)
    attention = torch.cat([held["prompt_mask"], held["completion_mask"]], 1)
    width = held["completion_ids"].shape[1]
    scores = model(ids, attention_mask=attention).logits[:, -width - 1 : -1].log_softmax(-1)
    logprobs = scores.gather(-1, held["completion_ids"][..., None]).squeeze(-1)
    turn = torch.tensor([0, 0, 0, 0, *[1] * (width - 4)]).expand(len(ids), -1)
    ours = tg.objective.padded_loss(
        objective,
        logprobs,
        mask=(held["completion_mask"] * held["tool_mask"]).bool(),
        advantages=held["advantages"],
        rollout=held["sampling_per_token_logps"],
        group=torch.unique(held["prompt_ids"], dim=0, return_inverse=True)[1],
        turn=turn,
    )
    ours.loss.backward()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter -= LR * parameter.grad
    assert_same_step(trainer, SimpleNamespace(model=model), start)


def test_completions_that_are_left_out_leave_a_micro_batch_without_terms(start, tmp_path):
    args = config(tmp_path, 16, mask_truncated_completions=True)
    trainer = trained("ours", start, args, objective=GRPO)
    sizes = [len(part["terms"].scale) for part in trainer._buffered_inputs]
    assert min(sizes) == 0 < max(sizes)
    assert np.isfinite(trainer.state.log_history[0]["loss"])


def test_evaluation_is_trls_own(start, tmp_path):
    from datasets import Dataset

    dataset = Dataset.from_dict({"prompt": PROMPTS})
    trainer = trained(
        "ours", start, config(tmp_path, per_device_eval_batch_size=16), objective=GRPO, eval_dataset=dataset
    )
    assert np.isfinite(trainer.evaluate()["eval_loss"])
    assert "terms" in trainer._buffered_inputs[0]


def test_what_trl_would_not_give_or_not_read_is_refused_by_name(start, tmp_path):
    def build(objective=DAPO, **changes):
        rollout = changes.pop("rollout_func", None)
        return trained("ours", start, config(tmp_path, **changes), objective=objective, rollout_func=rollout)

    with pytest.raises(ArgumentError, match=r"TG-INTEG-029.*w.*=.*old/rollout.*GRPOTrainer"):
        build(replace(DAPO, weights=(Weight(Ratio("old", "rollout")),)))
    with pytest.raises(ArgumentError, match=r"TG-INTEG-029.*theta/ref.*\*.*theta/old.*GRPOTrainer"):
        build(with_beta(DAPO, 0.04))
    with pytest.raises(ArgumentError, match=r"TG-INTEG-022.*0\.04"):
        build(beta=0.04)
    with pytest.raises(ArgumentError, match=r"TG-INTEG-021.*loss_type='cispo', epsilon_high=5\.0.*from_trl"):
        build(loss_type="cispo", epsilon_high=5.0)
    cispo = config(tmp_path, loss_type="cispo", epsilon_high=5.0, beta=0.04)
    trl._check_live(cispo, from_trl(cispo).objective)  # the options are those of the objective
    with pytest.raises(ArgumentError, match="TG-INTEG-019"):
        build(steps_per_generation=1, gradient_accumulation_steps=2)
    with pytest.raises(ArgumentError, match=r"TG-INTEG-029.*w.*=.*proximal/rollout.*GRPOTrainer"):
        build(presets.A3PO, rollout_func=rollouts(start.tokenizer))

    def silent(prompts, trainer):
        return {**rollouts(start.tokenizer)(prompts, trainer), "logprobs": None}

    with pytest.raises(ArgumentError, match="TG-INTEG-020"):
        build(presets.DAPO, rollout_func=silent)


@pytest.mark.parametrize(
    "option",
    [{"top_p": 0.9}, {"top_k": 20}, {"min_p": 0.1}, {"repetition_penalty": 1.1}, {"generation_kwargs": {"top_k": 5}}],
)
def test_a_part_of_the_vocabulary_is_not_compared_with_the_whole(option, tmp_path):
    args = config(tmp_path, use_vllm=True, **option)
    with pytest.raises(ArgumentError, match="TG-INTEG-030"):
        trl._check_live(args, presets.DAPO)
    trl._check_live(args, DAPO)  # reads no recorded logprobs
    trl._check_live(config(tmp_path, use_vllm=True, temperature=0.7, top_k=0), presets.DAPO)
    trl._check_live(config(tmp_path, **option), presets.DAPO)  # vLLM does not sample


def test_the_example_script_trains_the_bundled_model_as_it_plays(example, start, tmp_path):
    script = importlib.import_module("grpo_trainer_live")
    quick = {"use_cpu": True, "save_strategy": "no", "disable_tqdm": True, "gradient_checkpointing": False}
    trainer = script.train(str(example / "model"), 2, out=str(tmp_path), max_completion_length=12, **quick)
    assert trainer.state.global_step == 2
    pairs = zip(trainer.model.parameters(), start.model.parameters(), strict=True)
    assert max(float((a - b).detach().abs().max()) for a, b in pairs) > 1e-5
