"""integrations in TRL and transformers: their loops, trained from traces, take the steps that theirs or ours take."""

import copy
import importlib
import re
import sys
import warnings
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM, AutoTokenizer

import tracegrad as tg
from tiny import ONE_STEP, sampled, tiny_model
from tracegrad import recipes
from tracegrad.data.sampling import OPTIONS
from tracegrad.errors import ArgumentError
from tracegrad.integrations import peer
from tracegrad.integrations.transformers import TraceLoss
from tracegrad.integrations.trl import FromTraces
from tracegrad.objective import (
    Aggregation,
    Clip,
    EntropyBonus,
    Penalty,
    Ratio,
    Reduce,
    Rejection,
    Truncate,
    Weight,
    presets,
    with_beta,
    with_kl,
)
from truncated import restricted

sys.path.insert(0, str(Path(__file__).parents[2] / "examples" / "trainers"))
LR = 3.0
GROUP = 4


@cache
def on_traces():
    """Return GRPOTrainer as a user would write it. Collecting the tests does not import TRL."""
    from trl import GRPOTrainer

    return type("OnTraces", (FromTraces, GRPOTrainer), {})


@pytest.fixture(scope="module")
def start(tmp_path_factory):
    """A policy, the traces it sampled, and a policy that has moved away from it; some logprobs lie far out."""
    behaviour = tiny_model(0)
    data = sampled(behaviour, groups=6, size=GROUP)
    data.rollout_logprobs[data.terms[::7]] -= 1.5
    data.rollout_logprobs[data.terms[3::11]] /= 4
    folder = str(tmp_path_factory.mktemp("behaviour"))
    behaviour.save_pretrained(folder)
    moved = copy.deepcopy(behaviour)
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in moved.parameters():
            parameter += 0.1 * parameter.std() * torch.randn_like(parameter) if parameter.ndim > 1 else 0
    moved.config._name_or_path = folder
    return SimpleNamespace(model=moved, data=data, advantages=tg.advantage.group_mean(data.reward, data.group))


@pytest.fixture(scope="module")
def tokenizer(example):
    return AutoTokenizer.from_pretrained(example / "model")


def config(folder, traces, accumulate=1, kind=None, **changes):
    from trl import GRPOConfig

    kind = kind or GRPOConfig
    defaults = {
        **ONE_STEP,
        "per_device_train_batch_size": traces // accumulate,
        "gradient_accumulation_steps": accumulate,
        "learning_rate": LR,
    }
    extra = {"num_generations": GROUP} if kind is GRPOConfig else {}
    return kind(str(folder), **(defaults | extra | changes))


def run(make, args, model, *rest, **kwargs):
    """The trainer after training a copy of `model` with SGD."""
    model = copy.deepcopy(model)
    trainer = make(
        model, *rest, args=args, optimizers=(torch.optim.SGD(model.parameters(), args.learning_rate), None), **kwargs
    )
    trainer.train()
    return trainer


def trls_own(start, tokenizer, args, *, with_ratio=True):
    """GRPOTrainer by itself on the same tokens, through `rollout_func`."""
    from datasets import Dataset
    from trl import GRPOTrainer

    data, groups = start.data, start.data.traces // GROUP

    def rollout(prompts, trainer):
        seen, out = {}, {"prompt_ids": [], "completion_ids": [], "logprobs": [], "env_mask": [], "trace": []}
        for prompt in prompts:
            trace = int(prompt) * GROUP + seen.setdefault(prompt, 0)
            seen[prompt] += 1
            here = slice(*data.cu_seqlens[trace : trace + 2])
            first = int(np.argmax(data.trainable[here]))
            out["prompt_ids"].append(data.ids[here][:first].tolist())
            out["completion_ids"].append(data.ids[here][first:].tolist())
            out["logprobs"].append(data.rollout_logprobs[here][first:].tolist())
            out["env_mask"].append(data.trainable[here][first:].astype(int).tolist())
            out["trace"].append(trace)
        return out

    def make(model, **kwargs):
        trainer = GRPOTrainer(
            model,
            lambda trace, **_: [float(data.reward[each]) for each in trace],
            train_dataset=Dataset.from_dict({"prompt": [str(group) for group in range(groups)]}),
            processing_class=tokenizer,
            rollout_func=rollout,
            **kwargs,
        )
        if with_ratio:  # without a vLLM engine TRL has no switch for it
            trainer.use_vllm, trainer._last_loaded_step = True, -1
            trainer.vllm_generation = SimpleNamespace(sync_weights=lambda: None)
        return trainer

    return run(make, args, start.model)


def ours(start, tokenizer, args, **kwargs):
    return run(
        on_traces(),
        args,
        start.model,
        sequences=start.data,
        advantages=start.advantages,
        processing_class=tokenizer,
        **kwargs,
    )


def assert_same_step(one, other, start, rtol=1e-5, atol=2e-6):
    moved = 0.0
    pairs = zip(one.model.named_parameters(), other.model.parameters(), start.model.parameters(), strict=True)
    for (name, a), b, before in pairs:
        torch.testing.assert_close(a, b, rtol=rtol, atol=atol, msg=lambda text, name=name: f"{name}: {text}")
        moved = max(moved, float((a - before).detach().abs().max()))
    assert moved > 1e-3


TOKEN_TIS = {"scale_rewards": "none", "vllm_importance_sampling_mode": "token_truncate"}
TOKEN_TIS["vllm_importance_sampling_clip_max"] = 2.0
DR_GRPO_16 = replace(presets.DR_GRPO, reduce=Reduce("trace", "sum", norm=16.0))
SAME = {
    "dapo": (presets.DAPO, TOKEN_TIS | {"loss_type": "dapo", "epsilon_high": 0.28}),
    "grpo": (presets.GRPO, TOKEN_TIS | {"loss_type": "grpo"}),
    "dr_grpo": (DR_GRPO_16, TOKEN_TIS | {"loss_type": "dr_grpo", "max_completion_length": 16}),
    "grpo with TRL's beta": (with_beta(presets.GRPO, 0.04), TOKEN_TIS | {"loss_type": "grpo", "beta": 0.04}),
    "a ratio of the row": (
        replace(presets.GRPO, surrogate=Clip(1e-3, 2e-3, level=Aggregation("trace", "mean"))),
        TOKEN_TIS
        | {"loss_type": "grpo", "importance_sampling_level": "sequence", "epsilon": 1e-3, "epsilon_high": 2e-3},
    ),
    "TRL's defaults": (presets.TRL_DEFAULT, {"scale_rewards": "none"}),
}


def messages_of(warned):
    """The warnings about logprobs that are not used and options without effect, except the latter's scale_rewards."""
    texts = [str(each.message) for each in warned]
    told = [text for text in texts if text.startswith(("The recorded logprobs", "Options of GRPOConfig"))]
    return [text for text in told if not text.endswith("recorded traces: scale_rewards='none'.")]


@pytest.mark.parametrize("case", list(SAME))
@pytest.mark.first_cases(3)
def test_two_updates_on_one_batch_are_those_of_trl_itself(case, start, tokenizer, tmp_path):
    objective, options = SAME[case]
    args = config(tmp_path, start.data.traces, num_iterations=2, max_steps=2, lr_scheduler_type="constant", **options)
    assert recipes.from_trl(args, rollout_logprobs=True).objective == objective
    with warnings.catch_warnings(record=True) as warned:
        mine = ours(start, tokenizer, args, objective=objective)
    assert not messages_of(warned)
    theirs = trls_own(start, tokenizer, args)
    assert_same_step(mine, theirs, start)
    rows = mine.state.log_history
    assert rows[1]["clip_ratio/region_mean"] > rows[0]["clip_ratio/region_mean"] == 0
    logged = theirs.state.log_history[1]
    names = [name for name in logged if name.startswith("clip_ratio/") or name in ("entropy", "kl")]
    assert len(names) == 6 + ("beta" in case)
    assert {name: rows[1][name] for name in names} == pytest.approx({name: logged[name] for name in names}, rel=1e-5)


def test_a_missing_logprob_is_a_ratio_of_1_in_trl_and_neutral_here(start, tokenizer, tmp_path):
    data = copy.deepcopy(start.data)
    data.rollout_logprobs[data.terms[::5]] = np.nan
    holes = SimpleNamespace(model=start.model, data=data, advantages=start.advantages)
    args = config(tmp_path, data.traces, epsilon_high=0.28, **TOKEN_TIS)
    theirs = trls_own(holes, tokenizer, args)
    assert_same_step(ours(holes, tokenizer, args, missing_logprobs="ratio_one"), theirs, start)
    masked = ours(holes, tokenizer, args)
    assert masked.state.log_history[0]["tracegrad/missing"] == len(data.terms[::5])
    with pytest.raises(AssertionError, match="embed_tokens"):
        assert_same_step(masked, theirs, start)


def test_trl_by_itself_takes_recorded_logprobs_and_drops_the_ratio_without_a_word(start, tokenizer, tmp_path):
    args = config(tmp_path, start.data.traces, epsilon_high=0.28, **TOKEN_TIS)
    silent = trls_own(start, tokenizer, args, with_ratio=False)
    other = copy.deepcopy(start.data)
    other.rollout_logprobs[other.terms] = -9.0  # nonsense, and nothing changes
    nonsense = SimpleNamespace(model=start.model, data=other)
    assert_same_step(silent, trls_own(nonsense, tokenizer, args, with_ratio=False), start, atol=0)
    assert not [name for name in silent.state.log_history[0] if name.startswith("sampling/")]
    without = recipes.from_trl(args).objective
    with pytest.warns(UserWarning, match="The recorded logprobs are not used"):
        mine = ours(start, tokenizer, args, objective=without)
    assert_same_step(mine, silent, start)


@pytest.fixture(scope="module")
def branched(start):
    """The same tokens, two branches to a trace, so that a trace has holes and rows of its own."""
    s = start.data
    data = tg.Sequences.from_arrays(
        s.ids, s.cu_seqlens, s.rollout_logprobs, s.trainable.copy(),
        trace=np.arange(s.branches) // 2, group=np.arange(s.branches // 2) // GROUP, turn=np.where(s.trainable, 0, -1),
    )  # fmt: skip
    data.trainable[data.terms[5::9]] = False  # holes, as tools leave them
    rng = np.random.default_rng(0)
    return SimpleNamespace(model=start.model, data=data, advantages=rng.standard_normal(data.traces).astype(np.float32))


@pytest.fixture(scope="module")
def truncated(branched):
    """The same traces, with two of three tokens drawn from a part of the vocabulary."""
    data = restricted(branched.data, vocabulary=48)
    return SimpleNamespace(model=branched.model, data=data, advantages=branched.advantages)


def own_step(branched, objective, lr=LR):
    """The parameters after one step of our own learner on packed rows."""
    from tracegrad.trainer.step import compute_logprobs, optimizer_step

    model = copy.deepcopy(branched.model)
    (step,) = tg.pack(branched.data, branched.advantages, tokens_per_row=64, requirements=objective.requirements)
    of_ref = step.batches
    if objective.requirements.ref_over == "vocabulary":
        of_ref = [replace(batch, support=None) for batch in of_ref]
    step = step.with_logprobs(old=compute_logprobs(model, step.batches), ref=compute_logprobs(model, of_ref))
    optimizer_step(model, step, objective, torch.optim.SGD(model.parameters(), lr))
    return SimpleNamespace(model=model)


SPLIT = {
    "dapo": presets.DAPO,
    "grpo": presets.GRPO,
    "gspo, the trace's own ratio": presets.GSPO,
    "kept terms, normalised weights, a gate": replace(
        presets.GRPO,
        rejections=(Rejection(Ratio("old", "rollout"), level=Aggregation("trace", "mean"), low=0.7, high=1.5),),
        weights=(Weight(Ratio("old", "rollout"), transform=Truncate(0.0, 2.0), normalize=True),),
        reduce=Reduce("trace", "mean", denominator="kept"),
    ),
    "theta/rollout": presets.GRPO_DIRECT,
}


def own_clip(view):
    """DAPO's clip as a user would write it."""
    gain = view.advantages * view.ratio
    return -gain.minimum(view.advantages * view.ratio.clamp(0.8, 1.28))


def test_a_loss_of_ones_own_takes_the_built_in_ones_step_in_trl_in_transformers_and_in_our_learner(
    branched, tokenizer, tmp_path
):
    objective, expected = replace(presets.DAPO, surrogate=own_clip), own_step(branched, presets.DAPO)
    args = config(tmp_path, branched.data.traces, 2)
    assert_same_step(ours(branched, tokenizer, args, objective=objective), expected, branched, rtol=1e-6, atol=1e-6)
    assert_same_step(own_step(branched, objective), expected, branched, rtol=1e-6, atol=1e-6)
    loss = TraceLoss(branched.data, branched.advantages, objective)
    args = config(tmp_path, branched.data.traces, 2, transformers.TrainingArguments)
    told = {"train_dataset": loss.dataset, "data_collator": loss.collate, "compute_loss_func": loss}
    assert_same_step(run(transformers.Trainer, args, branched.model, **told), expected, branched, rtol=1e-6, atol=1e-6)


CUTS = [*(pytest.param(parts, marks=pytest.mark.nightly) for parts in (1, 2)), 4]
"""In how many parts a step is taken."""


@pytest.mark.parametrize("accumulate", CUTS)
@pytest.mark.parametrize("name", list(SPLIT))
@pytest.mark.first_cases(2)
def test_a_step_in_trl_is_that_of_our_learner_however_it_is_cut(name, accumulate, branched, tokenizer, tmp_path):
    args = config(tmp_path, branched.data.traces, accumulate)
    trainer = ours(branched, tokenizer, args, objective=SPLIT[name])
    assert_same_step(trainer, own_step(branched, SPLIT[name]), branched, rtol=1e-6, atol=1e-6)


def test_old_stays_for_all_steps_of_a_generation_and_each_step_has_its_own_denominators(start, tokenizer, tmp_path):
    args = config(tmp_path, start.data.traces, 6, steps_per_generation=6, gradient_accumulation_steps=2, max_steps=3)
    trainer = ours(start, tokenizer, args)
    cut = trainer._buffered_inputs
    shares = [float(batch["terms"].scale.sum()) for batch in cut]
    assert [shares[at] + shares[at + 1] for at in (0, 2, 4)] == pytest.approx([1.0] * 3)
    start.model.eval()
    with torch.no_grad():
        for batch in cut:
            here = batch["padded"]
            scores = start.model(here.ids, attention_mask=here.attention).logits.log_softmax(-1)
            first = scores[here.row, here.column - 1].gather(-1, here.target[:, None])[:, 0]
            torch.testing.assert_close(batch["terms"].old, first, rtol=1e-4, atol=1e-5)
    assert trainer.state.log_history[2]["clip_ratio/region_mean"] > 0


def test_each_epoch_takes_each_trace_once(start, tokenizer, tmp_path):
    args = config(tmp_path, start.data.traces, 3, max_steps=-1, num_train_epochs=2, learning_rate=0.0)
    assert args.generation_batch_size == start.data.traces
    trainer = ours(start, tokenizer, args)
    seen = np.concatenate([batch["terms"].trace.unique().numpy() for batch in trainer._buffered_inputs])
    assert sorted(seen.tolist()) == list(range(start.data.traces))
    assert trainer.state.global_step == 2


def test_trl_refuses_what_would_train_on_something_else(start, tokenizer, tmp_path):
    def build(objective=presets.DAPO, missing_logprobs="mask", **changes):
        args = config(tmp_path, start.data.traces, **changes)
        return on_traces()(
            copy.deepcopy(start.model),
            args,
            start.data,
            start.advantages,
            objective=objective,
            missing_logprobs=missing_logprobs,
            processing_class=tokenizer,
        )

    with pytest.raises(ArgumentError, match=r"TG-INTEG-025.*1\.0.*0\.7"):
        build(temperature=0.7)
    with pytest.raises(ArgumentError, match="TG-INTEG-019"):
        build(steps_per_generation=1, gradient_accumulation_steps=2)
    with pytest.raises(ArgumentError, match=r"TG-INTEG-024.*24.*48"):
        build(per_device_train_batch_size=48)
    with pytest.raises(ArgumentError, match=r"TG-INTEG-029.*Pass.*GRPOConfig\(beta="):
        build(with_kl(presets.DAPO, 0.1))
    with pytest.raises(ArgumentError, match="TG-OBJ-020"):
        build(presets.DAPO_DIRECT, "ratio_one")
    with pytest.raises(ArgumentError, match="TG-INTEG-029"):
        build(presets.A3PO)
    options = {"epsilon": 0.1, "mask_truncated_completions": True, "beta": 0.001}
    with pytest.warns(UserWarning, match="Options of") as warned:
        build(**options)
    [text] = messages_of(warned)
    assert "epsilon=0.1; mask_truncated_completions=True; beta=0.001, which loads a reference" in text
    with pytest.warns(UserWarning, match="Options of") as warned:
        build(recipes.from_trl(options, rollout_logprobs=True).objective, **options)
    assert [each.split(": ", 1)[1] for each in messages_of(warned)] == ["mask_truncated_completions=True."]


PLAIN = {name: SPLIT[name] for name in ("dapo", "grpo", "theta/rollout", "gspo, the trace's own ratio")}
PLAIN["an entropy bonus"] = replace(presets.DAPO_DIRECT, entropy=EntropyBonus(0.01, masked=False))
PLAIN["a constant"] = replace(presets.DAPO, reduce=Reduce("constant", norm=100.0))


@pytest.mark.parametrize("accumulate", CUTS)
@pytest.mark.parametrize("name", list(PLAIN))
@pytest.mark.first_cases(2)
def test_a_step_of_a_plain_trainer_is_that_of_our_learner_however_it_is_cut(name, accumulate, branched, tmp_path):
    loss = TraceLoss(branched.data, branched.advantages, PLAIN[name])
    args = config(tmp_path, branched.data.traces, accumulate, transformers.TrainingArguments)

    def make(model, **kwargs):
        return transformers.Trainer(
            model, train_dataset=loss.dataset, data_collator=loss.collate, compute_loss_func=loss, **kwargs
        )

    trainer = run(make, args, branched.model)
    assert_same_step(trainer, own_step(branched, PLAIN[name]), branched, rtol=1e-6, atol=1e-6)


def test_a_plain_trainer_refuses_an_objective_of_the_whole_step(branched):
    for objective in (presets.M2PO, with_kl(presets.DAPO, 0.1), SPLIT["kept terms, normalised weights, a gate"]):
        with pytest.raises(ArgumentError, match=r"TG-INTEG-029.*compute_loss_func.*micro-batch"):
            TraceLoss(branched.data, branched.advantages, objective)


def test_a_loss_without_its_collator_says_so(branched):
    loss = TraceLoss(branched.data, branched.advantages)
    batch = loss.collate([0, 1])
    outputs = SimpleNamespace(logits=torch.zeros(1, 3, 48))
    with pytest.raises(ArgumentError, match="TG-INTEG-018"):
        loss(outputs, batch["labels"], 5)


def test_a_peer_that_is_absent_or_of_another_shape_is_named_with_its_cure():
    with pytest.raises(ArgumentError, match=r"TG-INTEG-001.*no_such_trainer.*No.*named.*no_such_trainer==1"):
        peer("no_such_trainer", "no_such_trainer==1")
    with pytest.raises(ArgumentError, match=r"TG-INTEG-002.*trl.*GRPOTrainer\.gone.*trl==1\.16\.0"):
        peer("trl", "trl==1.16.0", "GRPOTrainer.gone")


def test_token_weights_of_the_page_give_any_trainer_our_learners_step(branched):
    page = (Path(__file__).parents[2] / "docs" / "how-to" / "your-trainer.md").read_text()
    (block,) = re.findall(r"```python\n(def token_weights.*?)```", page, re.S)
    assert len([line for line in block.splitlines() if line.strip()]) <= 10
    scope = {"tg": tg}
    exec(block, scope)
    for objective in (presets.DAPO, presets.GSPO):
        model = copy.deepcopy(branched.model)
        (step,) = tg.pack(branched.data, branched.advantages, tokens_per_row=512, requirements=objective.requirements)
        (batch,) = step.batches
        logprobs = tg.model.logprobs(model, batch.to("cpu"))
        order = np.argsort(batch.term)
        weights = scope["token_weights"](step, logprobs.detach().numpy()[order], objective)
        (-torch.from_numpy(weights[batch.term]) * logprobs).sum().backward()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter -= LR * parameter.grad
        assert_same_step(SimpleNamespace(model=model), own_step(branched, objective), branched, rtol=1e-6, atol=1e-6)


OVER_SUPPORT = {
    "dapo": presets.DAPO,
    "theta/rollout": presets.GRPO_DIRECT,
    "the entropy of the vocabulary": replace(presets.DAPO_DIRECT, entropy=EntropyBonus(0.1, masked=False)),
    "the entropy of the support": replace(presets.DAPO_DIRECT, entropy=EntropyBonus(0.1, masked=False, over="support")),
}


@pytest.mark.parametrize("name", list(OVER_SUPPORT))
@pytest.mark.parametrize("peers", ["trl", "transformers"])
def test_tokens_drawn_from_a_part_of_the_vocabulary_are_compared_over_it(
    name, peers, truncated, branched, tokenizer, tmp_path
):
    from transformers import Trainer, TrainingArguments

    objective, expected = OVER_SUPPORT[name], own_step(truncated, OVER_SUPPORT[name])
    if peers == "trl":
        trainer = ours(truncated, tokenizer, config(tmp_path, truncated.data.traces, 2), objective=objective)
    else:
        loss = TraceLoss(truncated.data, truncated.advantages, objective)
        parts = {"train_dataset": loss.dataset, "data_collator": loss.collate, "compute_loss_func": loss}
        trainer = run(Trainer, config(tmp_path, truncated.data.traces, 2, TrainingArguments), truncated.model, **parts)
    assert_same_step(trainer, expected, truncated, rtol=1e-5, atol=1e-6)
    with pytest.raises(AssertionError, match="embed_tokens"):
        assert_same_step(trainer, own_step(branched, objective), branched, rtol=1e-5, atol=1e-6)


def test_old_and_the_reference_of_trl_are_over_the_support_too(truncated, tokenizer, tmp_path):
    objective = with_beta(presets.GRPO, 0.5)
    args = config(tmp_path, truncated.data.traces, beta=0.5, max_steps=2, num_iterations=2)
    trainer = ours(truncated, tokenizer, args, objective=objective)
    [inputs] = trainer._buffered_inputs
    padded, terms = inputs["padded"], inputs["terms"]
    for policy, values in ((truncated.model, terms.old), (trainer.ref_model, terms.ref)):
        with torch.no_grad():
            scores = policy(padded.ids, attention_mask=padded.attention).logits[padded.row, padded.column - 1]
        rows = truncated.data.support.rows(padded.origin)
        for term in range(len(padded.origin)):
            kept = scores[term, rows[term].tolist()] if len(rows[term]) else scores[term]
            expected = scores[term, padded.target[term]] - kept.logsumexp(-1)
            assert float(values[term]) == pytest.approx(float(expected), abs=2e-5)


def test_a_penalty_of_trl_is_over_the_vocabulary_if_the_objective_says_so(truncated, tokenizer, tmp_path):
    # k1 has a gradient if the policy is the reference.
    penalty = Penalty(Ratio("theta", "ref"), "k1", 0.5, masked=False, weighted=False, over="vocabulary")
    objective = replace(presets.GRPO, penalties=(penalty,))
    trainer = ours(truncated, tokenizer, config(tmp_path, truncated.data.traces, beta=0.5), objective=objective)
    [inputs] = trainer._buffered_inputs
    padded, terms = inputs["padded"], inputs["terms"]
    with torch.no_grad():
        scores = trainer.ref_model(padded.ids, attention_mask=padded.attention).logits[padded.row, padded.column - 1]
    whole = scores.log_softmax(-1).gather(1, padded.target[:, None]).squeeze(1)
    torch.testing.assert_close(terms.ref, whole, rtol=1e-4, atol=2e-5)
    found = trainer._score(trainer.model, padded, compute_vocabulary_logprobs=True)[1]
    expected = trainer._score(trainer.model, replace(padded, support=None))[0]
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=2e-5)
    # The penalty has the gradient of these logprobs, and the step is that of packed rows.
    assert_same_step(trainer, own_step(truncated, objective), truncated, rtol=1e-5, atol=1e-6)


def test_a_router_loss_and_metrics_come_with_the_logprobs_over_the_support(truncated, tokenizer, tmp_path):
    torch.manual_seed(0)
    shape = {"hidden_size": 16, "num_hidden_layers": 1, "head_dim": 8, "num_attention_heads": 2}
    experts = {"num_key_value_heads": 1, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
    moe = transformers.Qwen3MoeForCausalLM(transformers.Qwen3MoeConfig(vocab_size=48, **shape, **experts))
    routed = SimpleNamespace(model=moe, data=truncated.data, advantages=truncated.advantages)
    trainer = ours(routed, tokenizer, config(tmp_path, truncated.data.traces, router_aux_loss_coef=1.0))
    trainer.model.eval()
    [inputs] = trainer._buffered_inputs
    padded, whole = inputs["padded"], replace(inputs["padded"], support=None)
    with torch.no_grad():
        options = {"compute_entropy": True, "compute_aux_loss": True}
        ours_, theirs = (trainer._score(trainer.model, each, **options) for each in (padded, whole))
    restricted = np.diff(padded.support.offsets) > 0
    assert restricted.mean() == pytest.approx(2 / 3, abs=0.02)
    assert bool((ours_[0] >= theirs[0] - 1e-5).all())
    torch.testing.assert_close(ours_[0][~restricted], theirs[0][~restricted], rtol=1e-4, atol=1e-5)
    for one, other in zip(ours_[1:], theirs[1:], strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
    assert "entropy" in trainer.state.log_history[0]


QUICK = {"per_device_train_batch_size": 4, "use_cpu": True, "save_strategy": "no", "disable_tqdm": True}


@pytest.mark.parametrize("name", ["grpo_trainer_from_traces", "plain_trainer_from_traces"])
def test_the_example_scripts_train_the_bundled_example(name, example, tmp_path):
    script = importlib.import_module(name)
    model = str(example / "model")
    quick = QUICK | {"gradient_checkpointing": False}
    trainer = script.train(str(example / "traces.jsonl.zst"), model, 2, out=str(tmp_path), **quick)
    assert trainer.state.global_step == 2
    assert all(np.isfinite(row["loss"]) for row in trainer.state.log_history[:2])
    start = AutoModelForCausalLM.from_pretrained(model)
    pairs = zip(trainer.model.parameters(), start.parameters(), strict=True)
    assert max(float((a - b).detach().abs().max()) for a, b in pairs) > 1e-5
    lines = Path(script.__file__).read_text().splitlines()
    assert len(lines) <= 42


def test_a_router_loss_is_added_as_trl_adds_it(start, tokenizer, tmp_path):
    torch.manual_seed(0)
    shape = {"hidden_size": 16, "num_hidden_layers": 1, "head_dim": 8, "num_attention_heads": 2}
    experts = {
        "num_key_value_heads": 1,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
        "router_aux_loss_coef": 1.0,
    }
    moe = transformers.Qwen3MoeForCausalLM(transformers.Qwen3MoeConfig(vocab_size=48, **shape, **experts))
    routed = SimpleNamespace(model=moe, data=start.data, advantages=start.advantages)
    args = config(tmp_path, start.data.traces, epsilon_high=0.28, learning_rate=0.5, **TOKEN_TIS)
    mine = ours(routed, tokenizer, args)
    routerless = ours(
        routed, tokenizer, config(tmp_path, start.data.traces, learning_rate=0.5, router_aux_loss_coef=0.0)
    )
    assert mine.aux_loss_enabled
    assert not routerless.aux_loss_enabled
    assert_same_step(mine, trls_own(routed, tokenizer, args), routed)
    gates = [trainer.model.model.layers[0].mlp.gate.weight for trainer in (mine, routerless)]
    assert not torch.allclose(*gates, atol=1e-5)


def test_traces_whose_sampling_is_not_replayed_need_an_objective_without_a_ratio(start):
    top_k = np.full(start.data.traces, 1 << OPTIONS.index("top_k"), np.uint32)
    changed = replace(start.data, reshaped=top_k)
    with pytest.raises(ArgumentError, match=r"TG-INTEG-032.*top_k"):
        TraceLoss(changed, start.advantages, tg.presets.DAPO_DIRECT)
    TraceLoss(changed, start.advantages, tg.presets.TOPR_POSITIVE)
    TraceLoss(replace(changed, reshaped=0 * top_k), start.advantages, tg.presets.DAPO_DIRECT)
