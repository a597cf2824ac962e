"""integrations in verl and ART, on their own objects: a DataProto, trajectories, RULER."""

import ast
import asyncio
import importlib
import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import tracegrad as tg
from tracegrad import recipes
from tracegrad.errors import ArgumentError
from tracegrad.integrations import art as from_art
from tracegrad.integrations import verl as in_verl
from tracegrad.integrations.art import to_groups
from tracegrad.objective import Ratio, Reduce, Rejection, presets, with_kl
from truncated import restricted

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # ART imports litellm, which asks the network otherwise
helper = pytest.importorskip("verl.trainer.ppo.rollout_corr_helper")
core_algos = pytest.importorskip("verl.trainer.ppo.core_algos")
algorithm = pytest.importorskip("verl.trainer.config.algorithm")
actor = pytest.importorskip("verl.workers.config.actor")
protocol = pytest.importorskip("verl.protocol")
art = pytest.importorskip("art")
Choice = pytest.importorskip("openai.types.chat.chat_completion").Choice

MISMATCH = Ratio("old", "rollout")


def data_proto(seed=0, rows=12, width=40, spread=0.05, dtype=torch.float64):
    """A DataProto as verl's trainer holds it before rollout correction; row 0 is all but empty."""
    generator = torch.Generator().manual_seed(seed)

    def draw():
        return torch.randn(rows, width, generator=generator, dtype=dtype)

    old = -draw().abs() - 0.05
    mask = (torch.rand(rows, width, generator=generator) > 0.3).long()
    mask[0], mask[0, 3] = 0, 1
    rollout = old + draw() * spread * torch.linspace(0.0, 3.0, rows, dtype=dtype)[:, None]
    rollout = rollout.clamp(max=-1e-3)
    rollout[5, 7], mask[5, 7] = old[5, 7] - 3.0, 1
    tensors = {"old_log_probs": old, "rollout_log_probs": rollout, "response_mask": mask}
    uid = np.array([f"prompt {row // 4}" for row in range(rows)], dtype=object)
    return protocol.DataProto.from_dict(tensors=tensors, non_tensors={"uid": uid})


VERL = {
    "decoupled_token_is": recipes.find("VERL_DECOUPLED_TOKEN_IS").objective,
    "decoupled_seq_is": recipes.find("VERL_DECOUPLED_SEQ_IS").objective,
    "decoupled_token_icepop": recipes.find("VERL_DECOUPLED_TOKEN_ICEPOP").objective,
    "decoupled_seq_is_rs": recipes.find("VERL_DECOUPLED_SEQ_IS_RS").objective,
    "decoupled_geo_rs": recipes.find("VERL_DECOUPLED_GEO_RS").objective,
    "decoupled_geo_rs_seq_tis": recipes.find("VERL_DECOUPLED_GEO_RS_SEQ_TIS").objective,
    "decoupled_geo_rs_token_tis": recipes.find("VERL_DECOUPLED_GEO_RS_TOKEN_TIS").objective,
    "decoupled_k3_rs": recipes.find("VERL_DECOUPLED_K3_RS").objective,
    "decoupled_k3_rs_seq_tis": recipes.find("VERL_DECOUPLED_K3_RS_SEQ_TIS").objective,
    "decoupled_k3_rs_token_tis": recipes.find("VERL_DECOUPLED_K3_RS_TOKEN_TIS").objective,
    "disabled": presets.VERL_DEFAULT,
}


@pytest.mark.parametrize("spread", [0.005, 0.05, 0.5])
@pytest.mark.parametrize("name", list(VERL))
def test_a_data_proto_is_corrected_as_verl_does_it(close, name, spread):
    objective = VERL[name]
    config = getattr(algorithm.RolloutCorrectionConfig, name)()
    theirs, their_metrics = helper.compute_rollout_correction_and_add_to_batch(data_proto(spread=spread), config)
    ours, metrics = in_verl.correct_batch(data_proto(spread=spread), objective)
    assert set(ours.batch.keys()) == set(theirs.batch.keys())
    for key in theirs.batch.keys():  # noqa: SIM118
        assert ours.batch[key].dtype == theirs.batch[key].dtype
        close(f"DataProto {key}", ours.batch[key], theirs.batch[key], 1e-7)
    assert set(their_metrics) <= set(metrics)
    for key, value in their_metrics.items():
        close("DataProto metrics", metrics[key], value, 1e-5)


def test_rejection_is_not_idle_in_these_comparisons():
    batch, metrics = in_verl.correct_batch(data_proto(), recipes.find("VERL_DECOUPLED_GEO_RS").objective)
    assert 0 < metrics["rollout_corr/rollout_rs_masked_fraction"] < 1
    assert 0 < batch.batch["response_mask"].sum() < data_proto().batch["response_mask"].sum()


def test_a_batch_of_which_nothing_is_left_has_figures_where_verl_divides_by_zero():
    batches = [data_proto() for _ in range(3)]
    for batch in batches:
        batch.batch["rollout_log_probs"] = batch.batch["old_log_probs"] - 9.0  # ratio e^9, far outside [0.5, 5]
    config = algorithm.RolloutCorrectionConfig.decoupled_token_icepop()
    with pytest.raises(ZeroDivisionError):
        helper.compute_rollout_correction_and_add_to_batch(batches[0], config)
    ours, metrics = in_verl.correct_batch(batches[1], recipes.find("VERL_DECOUPLED_TOKEN_ICEPOP").objective)
    assert not ours.batch["rollout_is_weights"].any()
    assert metrics["rollout_corr/rollout_is_eff_sample_size"] == 0.0
    gone, _ = in_verl.correct_batch(batches[2], recipes.find("VERL_DECOUPLED_GEO_RS").objective)
    assert not gone.batch["response_mask"].any()
    logprobs = gone.batch["old_log_probs"].clone().requires_grad_()
    loss, figures = policy_loss(presets.VERL_DEFAULT)(**arguments(gone, logprobs), loss_agg_mode="token-mean")
    loss.backward()
    assert loss.item() == 0.0
    assert not logprobs.grad.any()
    assert all(np.isfinite(value) for value in figures.values())


def test_a_missing_logprob_is_dropped_where_verl_has_nan():
    batch, same = data_proto(), data_proto()
    for each in (batch, same):
        each.batch["rollout_log_probs"][3, :5] = torch.nan
    there = int(batch.batch["response_mask"][3, :5].sum())
    config = algorithm.RolloutCorrectionConfig.decoupled_token_is()
    theirs, _ = helper.compute_rollout_correction_and_add_to_batch(same, config)
    assert theirs.batch["rollout_is_weights"].isnan().any()
    before = int(batch.batch["response_mask"].sum())
    ours, metrics = in_verl.correct_batch(batch, recipes.find("VERL_DECOUPLED_TOKEN_IS").objective)
    assert before - int(ours.batch["response_mask"].sum()) == there > 0
    assert not ours.batch["rollout_is_weights"].isnan().any()
    assert all(np.isfinite(value) for value in metrics.values())


def test_what_verl_has_no_name_for_is_corrected_and_counted():
    veto = replace(presets.VERL_DEFAULT, rejections=(Rejection(MISMATCH, low=0.1, high=10.0, drops="trace"),))
    batch, metrics = in_verl.correct_batch(data_proto(), veto)
    assert not batch.batch["response_mask"][5].any()  # its outlier has the ratio e^3
    assert metrics["rollout_corr/rollout_rs_masked_fraction"] > 0


def policy_loss(objective):
    in_verl.register(objective)
    return core_algos.get_policy_loss_fn("tracegrad")


def arguments(batch, logprobs):
    rows = len(logprobs)
    advantages = torch.linspace(-1.5, 2.0, rows, dtype=logprobs.dtype)[:, None].expand_as(logprobs)
    given = {"old_log_prob": batch.batch["old_log_probs"], "log_prob": logprobs, "advantages": advantages}
    weights = batch.batch.get("rollout_is_weights", None)
    return given | {"response_mask": batch.batch["response_mask"], "rollout_is_weights": weights}


MODES = {
    "token-mean": Reduce("token", denominator="kept"),
    "seq-mean-token-mean": Reduce("trace", "mean", denominator="kept"),
    "seq-mean-token-sum": Reduce("trace", "sum", denominator="kept"),
    "seq-mean-token-sum-norm": Reduce("trace", "sum", norm=40.0, denominator="kept"),
}


def test_a_loss_of_ones_own_is_registered_as_any_other(close):
    def clipped(view):
        a, r = view.advantages, view.ratio
        value = (-a * r).maximum(-a * r.clamp(0.8, 1.2))
        return value.minimum(-3.0 * a).where(a < 0, value)

    batch, results = data_proto(spread=0.003), []
    config = actor.ActorConfig(strategy="fsdp", rollout_n=1, ppo_micro_batch_size_per_gpu=1)
    own = policy_loss(replace(presets.VERL_DEFAULT, surrogate=clipped))
    for loss in (own, core_algos.compute_policy_loss_vanilla):
        noise = torch.randn(12, 40, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
        logprobs = (batch.batch["old_log_probs"] + 0.3 * noise).requires_grad_()
        loss(**arguments(batch, logprobs), loss_agg_mode="token-mean", config=config)[0].backward()
        results.append(logprobs.grad)
    close("verl's policy loss, one's own: gradient", *results, 1e-7)


@pytest.mark.parametrize("counts", [{}, {"dp_size": 2, "batch_num_tokens": 700, "global_batch_size": 24}])
@pytest.mark.parametrize("mode", list(MODES))
@pytest.mark.parametrize("name", ["decoupled_token_is", "decoupled_geo_rs_seq_tis"])
def test_the_registered_loss_on_verls_batch_is_verls_own(close, name, mode, counts):
    objective = replace(VERL[name], reduce=MODES[mode])
    batch, _ = in_verl.correct_batch(data_proto(spread=0.003), objective)
    torch.manual_seed(0)
    start = batch.batch["old_log_probs"] + 0.3 * torch.randn(12, 40, dtype=torch.float64)
    config = actor.ActorConfig(strategy="fsdp", rollout_n=1, ppo_micro_batch_size_per_gpu=1)
    config.global_batch_info.update(counts)
    results = []
    for loss in (policy_loss(objective), core_algos.compute_policy_loss_vanilla):
        logprobs = start.clone().requires_grad_()
        value, metrics = loss(**arguments(batch, logprobs), loss_agg_mode=mode, config=config)
        value.backward()
        results.append((value, logprobs.grad, metrics))
    (ours, gradient, mine), (theirs, their_gradient, their_metrics) = results
    close("verl's policy loss, registered", ours, theirs, 1e-7)
    close("verl's policy loss, registered: gradient", gradient, their_gradient, 1e-7)
    close("verl's ppo_kl", mine["actor/ppo_kl"], their_metrics["actor/ppo_kl"], 1e-6)
    assert mine["actor/pg_clipfrac"] > 0


def test_verl_refuses_what_its_loss_is_not_handed():
    for objective in (presets.GRPO_DIRECT, with_kl(presets.GRPO, 0.1), presets.OPSM):
        with pytest.raises(ArgumentError, match="TG-INTEG-029"):
            in_verl.register(objective)
    batch = data_proto()
    with pytest.raises(ArgumentError, match=r"TG-INTEG-003.*loss_agg_mode is seq-mean-token-mean"):
        policy_loss(presets.DAPO)(**arguments(batch, batch.batch["old_log_probs"]), loss_agg_mode="seq-mean-token-mean")


@pytest.fixture(scope="module")
def tokenizer(example):
    return tg.Tokenizer.from_pretrained(example / "model")


@pytest.fixture(scope="module")
def recorded(example, tokenizer):
    traces = tg.read(example / "traces.jsonl.zst", limit=32)
    return traces, tg.align(traces, tokenizer)


def test_traces_become_trajectories_from_which_arts_tokenizer_gets_our_ids_and_logprobs(recorded, example):
    from art.preprocessing.tokenize import tokenize_trajectory
    from transformers import AutoTokenizer

    traces, s = recorded
    groups = to_groups(traces, s)
    assert [len(group) for group in groups] == [8] * 4
    theirs, compared = AutoTokenizer.from_pretrained(example / "model"), 0
    for row, trajectory in enumerate(one for group in groups for one in group):
        assert trajectory.reward == traces[row].reward
        history = art.trajectories.History(messages_and_choices=trajectory.messages_and_choices, tools=trajectory.tools)
        found = tokenize_trajectory(theirs, None, history, 1.0, False, trajectory)
        here = np.flatnonzero(np.repeat(s.trace, np.diff(s.cu_seqlens)) == row)
        own = here[s.trainable[here]]
        if found is None:
            assert not len(own)
            continue
        mask = np.array(found.assistant_mask, bool)
        assert np.array(found.token_ids)[mask].tolist() == s.ids[own].tolist()
        np.testing.assert_allclose(np.array(found.logprobs)[mask], s.rollout_logprobs[own], rtol=1e-6)
        compared += 1
    assert compared > 20


def test_trajectories_come_back_as_the_same_terms(recorded, tokenizer):
    traces, s = recorded
    back = from_art.to_traces(to_groups(traces, s))
    again = tg.align(back, tokenizer)
    assert back.reward.tolist() == traces.reward.tolist()
    assert len(set(back.groups)) == len(set(traces.groups))
    assert again.ids[again.terms].tolist() == s.ids[s.terms].tolist()
    np.testing.assert_array_equal(again.rollout_logprobs[again.terms], s.rollout_logprobs[s.terms])


def test_a_dict_message_with_logprobs_is_sampled_as_pull_request_467_wanted(tokenizer):
    said = {"role": "assistant", "content": "I can help.", "logprobs": None}
    ids = tokenizer.encode("I can help.")
    with_logprobs = {**said, "logprobs": {"content": [{"logprob": -0.5}] * len(ids)}}
    few_shot = {"role": "assistant", "content": "Hello."}
    trajectory = art.Trajectory(
        messages_and_choices=[
            {"role": "user", "content": "Hi"}, few_shot, {"role": "user", "content": "Help"}, with_logprobs,
        ],
        reward=1.0,
    )  # fmt: skip
    (trace,) = from_art.to_traces([art.TrajectoryGroup([trajectory])])
    assert [generation.message for generation in trace.generations] == [3]
    traces = tg.Traces.from_records([trace])
    assert not tg.align(traces, tokenizer).trainable.any()  # ids without tokens are a guess, though the count fits
    s = tg.align(traces, tokenizer, assume_canonical=True)
    assert s.ids[s.terms].tolist() == list(ids)
    assert s.rollout_logprobs[s.terms].tolist() == [-0.5] * len(ids)


def choice(text, ids):
    tokens = [{"token": f"token_id:{each}", "logprob": -0.25, "top_logprobs": []} for each in ids]
    message = {"role": "assistant", "content": text}
    return Choice.model_validate(
        {"index": 0, "finish_reason": "stop", "message": message, "logprobs": {"content": tokens}}
    )


def test_additional_histories_are_branches_of_one_trace(tokenizer):
    ids = [int(each) for each in tokenizer.encode("4 lamps")]
    one = [{"role": "user", "content": "How many?"}, choice("4 lamps", ids)]
    two = [{"role": "user", "content": "Summary: how many?"}, choice("4 lamps", ids)]
    history = art.trajectories.History(messages_and_choices=two)
    trajectory = art.Trajectory(
        messages_and_choices=one, additional_histories=[history], reward=0.5, initial_policy_version=3,
        final_policy_version=3,
    )  # fmt: skip
    s = tg.align(from_art.to_traces([art.TrajectoryGroup([trajectory])]), tokenizer)
    assert (s.traces, s.branches, len(s.terms)) == (1, 2, 2 * len(ids))
    assert s.ids[s.terms].tolist() == ids * 2
    assert (s.version[s.terms] == 3).all()


def test_a_rewritten_history_goes_to_art_as_an_additional_one(tokenizer):
    def said(text, logprob, **place):
        ids = [*map(int, tokenizer.encode(text)), 2]
        return {
            "role": "assistant",
            "content": text,
            "generation": {"token_ids": ids, "logprobs": [logprob] * len(ids), **place},
        }

    native = {"format": "tracegrad/1", "group": "g", "reward": 1}
    native["messages"] = [{"role": "user", "content": "Summary: 4."}, said("Bought.", -0.5, call=1)]
    native["extra_messages"] = [{"role": "user", "content": "How much?"}, said("4", -0.25, context=[2], call=0)]
    traces = tg.Traces.from_records([native])
    s = tg.align(traces, tokenizer)
    ((trajectory,),) = to_groups(traces, s)
    (history,) = trajectory.additional_histories
    asked, answered = history.messages_and_choices
    assert asked["content"] == "How much?"
    assert [each.logprob for each in answered.logprobs.content] == [-0.25] * (len(tokenizer.encode("4")) + 1)
    again = tg.align(from_art.to_traces([art.TrajectoryGroup([trajectory])]), tokenizer)
    assert sorted(again.rollout_logprobs[again.terms].tolist()) == sorted(s.rollout_logprobs[s.terms].tolist())


def test_the_metrics_of_pull_request_467_by_hand():
    # 4 positions, of which 3 terms; recorded -1, NaN, -2; trained -0.5, -0.7, -4: ratios e^0.5, 1, e^-2.
    # Valid: 2 of 4. Mean: (1.6487 + 1 + 0.1353) / 3 = 0.9280. Outside [0.8, 1.2]: 2 of 3.
    s = tg.Sequences.from_arrays([5, 6, 7, 8], [0, 4], [np.nan, -1.0, np.nan, -2.0], [False, True, True, True])
    found = from_art.metrics(s, [-0.5, -0.7, -4.0], [1.0, 1.0, 1.0], ppo=True)
    assert found["frac_old_logprobs_valid"] == pytest.approx(0.5, rel=1e-5)
    assert found["mean_importance_ratio"] == pytest.approx(0.9280, rel=1e-4)
    assert found["clip_fraction"] == pytest.approx(2 / 3, rel=1e-5)


def test_ruler_sees_no_logprob_and_the_scored_trajectories_still_have_them(monkeypatch):
    ruler, seen = importlib.import_module("art.rewards.ruler"), []

    async def judge(*, messages, **_):
        seen.append(json.dumps(messages))
        scores = [{"trajectory_id": str(n), "explanation": "", "score": n / 10} for n in (1, 2)]
        message = {"role": "assistant", "content": json.dumps({"scores": scores})}
        return ruler.ModelResponse(choices=[{"index": 0, "finish_reason": "stop", "message": message}])

    monkeypatch.setattr(ruler, "acompletion", judge)
    logprobs = {"content": [{"token": "Hi", "logprob": -0.123456}]}

    def trajectory(text):
        said = {"role": "assistant", "content": text, "logprobs": logprobs}
        return art.Trajectory(messages_and_choices=[{"role": "user", "content": "?"}, said, choice("ok", [5])])

    group = art.TrajectoryGroup([trajectory("one"), trajectory("two")])
    asyncio.run(ruler.ruler_score_group(group, "openai/judge"))
    assert "0.123456" in seen[0]  # as ART does it
    scored = asyncio.run(from_art.ruler_score_group(group, "openai/judge"))
    assert "logprob" not in seen[1]
    assert "one" in seen[1]
    assert [one.reward for one in scored] == [0.1, 0.2]
    assert [one.messages_and_choices for one in scored] == [one.messages_and_choices for one in group]
    failed = SimpleNamespace(choices=[])
    monkeypatch.setattr(ruler, "acompletion", lambda **_: asyncio.sleep(0, failed))
    assert asyncio.run(from_art.ruler_score_group(group, "openai/judge", swallow_exceptions=True)) is None


def printed(example, script, *options):
    """What an example prints, in a process of its own: ART patches transformers when it is imported."""
    command = [sys.executable, example.parent / "trainers" / script, example / "traces.jsonl.zst", example / "model"]
    done = subprocess.run([*map(str, command), *options], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return ast.literal_eval(done.stdout.splitlines()[-1])


def test_the_example_for_verl_trains_the_bundled_example(example):
    log = printed(example, "data_proto_from_traces.py", "--steps", "2")
    assert all(np.isfinite(value) for row in log for value in row.values())
    assert log[0]["rollout_corr/rollout_is_mean"] == pytest.approx(1.0, abs=1e-4)
    assert log[1]["rollout_corr/rollout_is_std"] > 10 * log[0]["rollout_corr/rollout_is_std"]  # the policy has moved


def test_the_example_for_verl_compares_over_the_support(example):
    script = Path(__file__).parents[1] / "helpers" / "examples_over_support.py"
    command = [sys.executable, str(script), "data_proto_from_traces", str(example)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert float(done.stdout.splitlines()[-1]) < 2e-4


def test_art_gets_no_tokens_that_it_would_compare_over_the_whole_vocabulary(recorded):
    traces, s = recorded
    with pytest.raises(ArgumentError, match="TG-INTEG-031"):
        to_groups(traces, restricted(s, vocabulary=600))


def test_the_example_for_art_measures_the_bundled_example(example):
    found = printed(example, "trajectory_groups_and_traces.py", "--limit", "16")
    assert found["mean_importance_ratio"] == pytest.approx(1.0, abs=1e-4)
    assert 0 < found["frac_old_logprobs_valid"] < 1
