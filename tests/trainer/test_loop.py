"""Training runs: one update against plain torch, exact resume, and what is refused."""

import itertools
import signal
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("transformers")

import tracegrad as tg
from tiny import sampled, spoilt, tiny_model
from tracegrad import advantage, metrics
from tracegrad import objective as algebra
from tracegrad.data.codes import ENDINGS, TRUNCATED
from tracegrad.errors import ArgumentError, TracegradError
from tracegrad.objective import presets
from tracegrad.objective.correction import Correction
from tracegrad.trainer import StepResult, train
from tracegrad.trainer.step import compute_logprobs, optimizer_step
from tracegrad.trainer.step_metrics import off_policy, tally
from tracegrad.trainer.steps import TrainingData
from training_runs import (
    SignalAfter,
    assert_same,
    run,
    told,
    torch,
    traces,  # noqa: F401
    without_times,
)


def test_one_update_is_that_of_plain_torch_on_padded_rows(traces):
    """DAPO as its papers write it, with [B, S] tensors, log_softmax and autograd, against `optimizer_step`."""
    drifted = replace(traces, rollout_logprobs=traces.rollout_logprobs - 0.4 * (np.arange(traces.tokens) % 3))
    feed = TrainingData.of(drifted, presets.DAPO, told(data__holdout=0))
    step = feed.steps(0)[0]
    step = step.with_logprobs(old=compute_logprobs(tiny_model(1), step.batches))
    ours, theirs = tiny_model(2), tiny_model(2)
    outcome = optimizer_step(ours, step, presets.DAPO, torch.optim.SGD(ours.parameters(), lr=0.1), grad_clip=0.05)

    total = 0.0
    for trace in np.unique(step.trace):
        own = step.trace == trace
        start, end = drifted.cu_seqlens[trace], drifted.cu_seqlens[trace + 1]
        ids = torch.from_numpy(drifted.ids[start:end]).long()
        place = torch.from_numpy(step.origin[own] - start)
        logp = theirs(ids[None]).logits[0].float().log_softmax(-1)[place - 1, ids[place]]
        old, rollout = (torch.from_numpy(a[own]) for a in (step.old_logprobs, step.rollout_logprobs))
        advantage = float(feed.rewards[trace] - feed.rewards[drifted.group == drifted.group[trace]].mean())
        ratio = (logp - old).exp()
        surrogate = torch.maximum(-advantage * ratio, -advantage * ratio.clamp(0.8, 1.28))
        total = total + ((old - rollout).exp().clamp(max=2.0) * surrogate).sum()
    total = total / len(step)
    total.backward()
    total = total.detach()
    norm = torch.nn.utils.clip_grad_norm_(theirs.parameters(), 0.05)
    torch.optim.SGD(theirs.parameters(), lr=0.1).step()

    assert outcome.loss == pytest.approx(float(total), rel=1e-5)
    assert outcome.grad_norm == pytest.approx(float(norm), rel=1e-5)
    for name, value in theirs.state_dict().items():
        torch.testing.assert_close(ours.state_dict()[name], value, rtol=0, atol=1e-7, msg=name)


@pytest.mark.parametrize("preset", ["DAPO", "GRPO_DIRECT", "DR_GRPO"])
def test_the_update_does_not_depend_on_how_the_step_was_cut(traces, preset):
    objective, found = presets.find(preset), []
    for budget in (13, 64, 4096):
        step = TrainingData.of(traces, objective, told(data__holdout=0, pack__tokens_per_row=budget)).steps(0)[0]
        model = tiny_model(5)
        step = step.with_logprobs(old=compute_logprobs(tiny_model(1), step.batches))
        optimizer_step(model, step, objective, torch.optim.SGD(model.parameters(), lr=1.0))
        moved = [(a - b).flatten() for a, b in zip(model.parameters(), tiny_model(5).parameters(), strict=True)]
        found.append(torch.cat(moved).double())
    for other in found[:2]:
        assert (other - found[2]).norm() / found[2].norm() < 1e-5


def test_training_makes_the_better_samples_likelier_and_value_rise(traces, tmp_path):
    done, _ = run(
        sampled(tiny_model(), groups=40, size=6), tmp_path, train__epochs=3, data__holdout=0.2, optimizer__lr=5e-3
    )
    first, last = done.rows[0], done.rows[-1]
    assert first["ope"] == pytest.approx(
        first["ope_recorded_reward"], abs=1e-4
    )  # theta is the policy that was recorded
    assert last["ope"] > first["ope"] + 0.01
    assert last["logprob_good"] - last["logprob_bad"] > first["logprob_good"] - first["logprob_bad"]
    assert last["ope_ess_fraction"] < first["ope_ess_fraction"] == pytest.approx(1, abs=1e-4)


def test_each_number_in_a_row_has_a_definition(traces, tmp_path):
    done, _ = run(traces, tmp_path, objective=algebra.with_kl(presets.DAPO, 0.01))
    named = {metric.name for metric in metrics.METRICS}
    for row in done.rows:
        assert {
            name for name in row if not name.startswith("correction/") and not {name, name.split("/")[0]} & named
        } == set()
    assert metrics.read_rows(tmp_path / "metrics.jsonl") == done.rows
    assert done.rows[1]["kl_ref"] == pytest.approx(0, abs=1e-6)  # the reference is the starting model
    told = {
        "token_ess",
        "token_ess_count",
        "old_rollout_ratio_p50",
        "weight_p99_9",
        "kl_rollout_old_k3_se",
        "chi2_trace",
        "perplexity_gap",
    }
    assert told | {"gradient_largest_trace", "gradient_share_positive", "reward_std"} <= set(done.rows[1])
    assert done.rows[1]["old_rollout_ratio_mean"] == pytest.approx(
        1, abs=1e-4
    )  # the model is the one that was recorded
    assert done.rows[-1]["kl_ref"] > 0


def unequal():
    """Four traces of one given token and 2, 3, 4 and 12 sampled ones; each group has a good and a bad one."""
    lengths = [3, 4, 5, 13]
    trainable = [token > 0 for length in lengths for token in range(length)]
    logprobs, cu = np.where(trainable, -1.0, np.nan), np.cumsum([0, *lengths])
    return tg.Sequences.from_arrays(
        [5] * 25, cu, logprobs, trainable, trace=range(4), group=[0, 0, 1, 1], rewards=[1.0, 0.0, 1.0, 0.0]
    )


NONE = {"traces": 0, "tokens": 0}


def test_a_run_counts_what_is_too_long_and_what_has_a_gradient(tmp_path):
    said = []
    config = told(pack__tokens_per_row=9, pack__too_long="drop", data__holdout=0)
    options = {"objective": presets.TOPR_POSITIVE, "sinks": [], "log": said.append}
    done = train(unequal(), tiny_model(), config=config, out=tmp_path, **options)
    assert done.counts == {
        "trained": {"traces": 3, "tokens": 9},
        "held_out": NONE,
        "dropped": {"traces": 1, "tokens": 12},
        "truncated": NONE,
    }
    # The dropped trace counts in the mean of its group: the other one has an advantage of 0.5 and a gradient.
    with_gradient = {"traces_with_gradient": 2, "tokens_with_gradient": 6}
    assert done.trained == {"traces": 3, "tokens": 9, **with_gradient}  # of the first of two epochs
    assert said[0] == "left out 1 trace, 12 trainable tokens: longer than 9 tokens"
    cut = TrainingData.of(unequal(), presets.DAPO, told(pack__tokens_per_row=9, pack__too_long="truncate"))
    # One of two groups is held out, with 2 + 3 tokens or 4 + 8 of 12.
    counts, lost = cut.counts(), {"traces": 1, "tokens": 4}
    assert counts["truncated"] == lost
    assert sorted([counts["trained"]["tokens"], counts["held_out"]["tokens"]]) == [5, 12]
    assert cut.lines() == ["cut      1 trace, 4 trainable tokens: longer than 9 tokens"]
    assert (cut.longest, TrainingData.of(unequal(), presets.DAPO, told()).longest) == (9, 13)
    dropped = TrainingData.of(unequal(), presets.DAPO, told(pack__tokens_per_row=4, pack__too_long="drop"))
    assert {name: part["traces"] for name, part in dropped.counts().items() if name != "truncated"} in (
        {"trained": 0, "held_out": 2, "dropped": 2},
        {"trained": 2, "held_out": 0, "dropped": 2},
    )


def test_nothing_is_held_out_by_default_if_there_can_be_no_estimate():
    def held_out(data, **changes):
        return TrainingData.of(data, presets.TOPR_POSITIVE, told(**changes)).counts()["held_out"]["traces"]

    data = unequal()
    text = replace(data, rollout_logprobs=np.full(data.tokens, np.nan, np.float32))
    assert (held_out(data), held_out(text), held_out(data, data__text_only=True)) == (2, 0, 0)
    assert held_out(text, data__holdout=0.5) == held_out(text, data__holdout=0.05, data__text_only=True) == 2
    with pytest.raises(ArgumentError, match=r"TG-TRAIN-085.*min_ope_ess.*holdout"):
        held_out(text, stop__min_ope_ess=0.5)


def test_lengths_and_tokens_are_those_of_the_traces(traces, tmp_path):
    """Over one epoch that holds nothing out; a third of the traces was cut off."""
    ending = np.where(np.arange(traces.traces) % 3, ENDINGS.index("ended"), TRUNCATED).astype(np.uint8)
    done, _ = run(replace(traces, ending=ending), tmp_path, objective=presets.GRPO, train__epochs=1, data__holdout=0)
    rows, branches = done.rows[1:], list(itertools.pairwise(traces.cu_seqlens))  # one of each trace
    lengths = np.array([traces.trainable[start:end].sum() for start, end in branches])
    prompts = [int(traces.trainable[start:end].argmax()) for start, end in branches]
    assert rows[-1]["num_tokens"] == sum(prompts) + lengths.sum()
    assert all(a["num_tokens"] < b["num_tokens"] for a, b in itertools.pairwise(rows))
    total = sum(row["completions/mean_length"] * row["traces"] for row in rows)
    assert total == pytest.approx(lengths.sum())
    assert min(row["completions/min_length"] for row in rows) == lengths.min()
    assert max(row["completions/max_length"] for row in rows) == lengths.max()
    assert max(row["completions/max_terminated_length"] for row in rows) == lengths[ending != TRUNCATED].max()
    cut = sum(row["completions/clipped_ratio"] * row["traces"] for row in rows)
    assert cut == pytest.approx((ending == TRUNCATED).sum())


@pytest.mark.parametrize(
    ("stop", "changes", "objective"),
    [
        pytest.param(6, {}, presets.DAPO, marks=pytest.mark.nightly),
        (4, {}, presets.DAPO),  # the end of an epoch: old is due
        (3, {"train__updates_per_old_logprobs": 5, "checkpoint__every_steps": 2}, presets.GRPO),
        (1, {"schedule__warmup_steps": 5, "optimizer__weight_decay": 0.1}, algebra.with_kl(presets.GRPO_DIRECT, 0.05)),
        pytest.param(0, {}, presets.DAPO, marks=pytest.mark.nightly),
        # Batches of two packed steps, each trained three times: step 4 is within the second time of the first batch.
        (3, {"train__updates_per_old_logprobs": 2, "train__iterations": 3, "train__epochs": 1}, presets.DAPO),
        pytest.param(5, {"train__max_steps": 7}, presets.DAPO, marks=pytest.mark.nightly),
        (4, {"train__updates_per_old_logprobs": 2, "train__iterations": 2, "train__max_steps": 7}, presets.GRPO),
        # Mixed after steps 2, 4 and 6; at step 2 before the mixture was measured.
        (3, {"train__ref_sync_steps": 2, "train__ref_mixup_alpha": 0.4}, algebra.with_kl(presets.GRPO_DIRECT, 0.05)),
        pytest.param(
            2,
            {"train__ref_sync_steps": 2, "train__ref_mixup_alpha": 0.4},
            algebra.with_kl(presets.GRPO_DIRECT, 0.05),
            marks=pytest.mark.nightly,
        ),
    ],
    ids=[
        "within an epoch",
        "between epochs",
        "old across epochs",
        "with a reference",
        "before the first step",
        "within iterations",
        "before max_steps",
        "within iterations, before max_steps",
        "with a mixed reference",
        "before a mixed reference is measured",
    ],
)
@pytest.mark.first_cases(2)
def test_a_resumed_run_is_the_uninterrupted_one_bit_for_bit(traces, tmp_path, stop, changes, objective):
    whole, parameters = run(traces, tmp_path / "whole", objective=objective, **changes)
    cut, _ = run(traces, tmp_path / "cut", objective=objective, sinks=[SignalAfter(stop)], **changes)
    assert (cut.stopped, cut.step, cut.exit_code) == ("signal", stop, 130)
    again, resumed = run(traces, tmp_path / "cut", tiny_model(9), objective=objective, resume=True, **changes)
    assert (again.stopped, again.step, again.exit_code) == ("done", whole.total, 0)
    assert_same(parameters, resumed)
    assert again.seconds["train"] >= cut.seconds.get("train", 0)  # what the process before spent is in it
    for one, other in zip(whole.terms, again.terms, strict=True):  # of the last epoch, for the report
        assert all(np.array_equal(vars(one)[name], value) for name, value in vars(other).items())
    held = ("ope", "logprob_")  # not measured at the step after which the run was stopped
    names = {name for row in without_times(whole.rows) for name in row if not name.startswith(held)}
    for one, other in zip(whole.rows, again.rows, strict=True):
        assert {k: one.get(k) for k in names} == {k: other.get(k) for k in names}
    assert without_times(metrics.read_rows(tmp_path / "whole" / "metrics.jsonl"))[-1] == without_times(again.rows)[-1]


def test_sigterm_stops_after_the_step_too(traces, tmp_path):
    done, _ = run(traces, tmp_path, sinks=[SignalAfter(2, signal.SIGTERM)])
    assert (done.exit_code, done.step, done.checkpoint.name) == (143, 2, "step-00000002")


@pytest.mark.parametrize(
    ("option", "how", "first", "second"),
    [
        # The first run ends within the iterations of a batch; the second goes on there, into the next epoch.
        ("train__max_steps", {"train__updates_per_old_logprobs": 2, "train__iterations": 2}, (3, 3), (9, 9)),
        ("train__epochs", {}, (2, 8), (3, 12)),
    ],
    ids=["steps", "epochs"],
)
def test_a_finished_run_can_be_given_more(traces, tmp_path, option, how, first, second):
    _, parameters = run(traces, tmp_path / "whole", **{option: second[0]}, **how)
    ended, _ = run(traces, tmp_path / "more", **{option: first[0]}, **how)
    assert (ended.stopped, ended.step) == ("done", first[1])
    again, resumed = run(traces, tmp_path / "more", tiny_model(9), resume=True, **{option: second[0]}, **how)
    assert (again.stopped, again.step) == ("done", second[1])
    assert_same(parameters, resumed)


@pytest.mark.nightly
def test_a_run_that_gets_worse_stops_and_a_resumed_one_knows_how_good_it_was(traces, tmp_path):
    other = spoilt()
    how = {"objective": presets.DAPO_DIRECT, "data__holdout": 0.3, "eval__ope_per_epoch": 99, "train__epochs": 6}
    on, _ = run(other, tmp_path / "on", **how)
    done, _ = run(other, tmp_path / "a", stop__ope_falls=True, **how)
    assert (on.stopped, done.stopped) == ("done", "ope_falls")
    assert done.best_step < done.step < done.total
    assert done.rows[-1]["ope"] < done.rows[done.best_step]["ope"]
    assert done.checkpoint.name == f"step-{done.step:08d}"
    run(other, tmp_path / "b", stop__ope_falls=True, sinks=[SignalAfter(done.step - 1)], **how)
    again, _ = run(other, tmp_path / "b", resume=True, stop__ope_falls=True, **how)
    assert (again.stopped, again.step) == ("ope_falls", done.step)
    better, _ = run(traces, tmp_path / "c", stop__ope_falls=True, **how)
    assert better.step > done.step


def test_a_run_is_not_overwritten_and_a_resumed_one_must_be_the_same(traces, tmp_path):
    done, _ = run(traces, tmp_path, resume=True)  # without a checkpoint it starts at the first step
    assert done.stopped == "done"
    with pytest.raises(ArgumentError, match=r"TG-TRAIN-037.*step-00000008"):
        run(traces, tmp_path)
    with pytest.raises(ArgumentError, match=r"TG-TRAIN-066.*optimizer\.lr.*0\.003.*0\.5"):
        run(traces, tmp_path, resume=True, optimizer__lr=0.5)
    with pytest.raises(ArgumentError, match="TG-TRAIN-066"):
        run(traces, tmp_path, resume=True, objective=presets.GRPO)
    with pytest.raises(ArgumentError, match="TG-TRAIN-067"):
        run(replace(traces, rewards=traces.rewards + 1), tmp_path, resume=True)


def test_a_gradient_that_is_no_number_is_one_error_and_the_parameters_stay(traces):
    model = tiny_model()
    model.model.norm.weight.register_hook(lambda gradient: gradient * torch.inf)
    step = TrainingData.of(traces, presets.DAPO_DIRECT, told()).steps(0)[0]
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(TracegradError, match=r"TG-TRAIN-068.*nan"):
        optimizer_step(model, step, presets.DAPO_DIRECT, torch.optim.AdamW(model.parameters()))
    assert_same(before, model.state_dict())


def test_a_folder_that_cannot_be_written_is_one_error(traces, tmp_path):
    (tmp_path / "out").write_text("a file")
    with pytest.raises(TracegradError, match=r"TG-STORE-024.*File.*exists"):
        run(traces, tmp_path / "out")


def test_a_row_is_broken_down_by_turn_level_and_staleness():
    from tracegrad.alignment.sequences import Sequences
    from tracegrad.packing import pack

    ids, trainable = [5, 6, 7, 8, 9, 3], [0, 1, 1, 1, 0, 1]
    logprobs = [np.nan, -1, -2, -1, np.nan, -1]
    two = Sequences.from_arrays(ids, [0, 4, 6], logprobs, trainable, group=[0, 0])
    two = replace(
        two,
        turn=np.array([-1, 0, 0, 1, -1, 0], np.int32),
        version=np.array([-1, 3, 3, 5, -1, -1], np.int32),
        alignment_level=np.array([255, 0, 0, 2, 255, 2], np.uint8),
    )
    [step] = pack(two, [1.0, -1.0], tokens_per_row=16)
    assert step.staleness(5).tolist() == [2, 2, 0, -1]
    ones = np.ones(4, np.float32)
    outcome = StepResult(
        0.0, 0.0, Correction(ones, ones > 0, ones, {}), -ones, ones, ones, ones < 0, step.advantages, ones, ones > 0
    )
    found = off_policy(step, outcome, 5).values()
    assert {name: found[name] for name in found if name.startswith("tokens_with_rollout_logprob/")} == {
        "tokens_with_rollout_logprob/turn_0": 3,
        "tokens_with_rollout_logprob/turn_1": 1,
        "tokens_with_rollout_logprob/level_T0": 2,
        "tokens_with_rollout_logprob/level_T2": 2,
        "tokens_with_rollout_logprob/staleness_0": 1,
        "tokens_with_rollout_logprob/staleness_2": 2,
        "tokens_with_rollout_logprob/staleness_unknown": 1,
    }


def test_metrics_are_worked_by_hand():
    """Three terms of two traces; the last has no rollout logprob and was dropped by a gate."""
    from tracegrad.alignment.sequences import Sequences

    nan = float("nan")
    two = Sequences.from_arrays([5, 6, 7, 5, 8], [0, 3, 5], [nan, -1, -2, nan, nan], [0, 1, 1, 0, 1], group=[0, 0])
    from tracegrad.packing import pack

    [step] = pack(two, [1.0, 0.0], tokens_per_row=16)
    step = step.with_logprobs(old=np.array([-1.0, -1.0, -1.0], np.float32))
    keep = np.array([True, True, False])
    outcome = StepResult(
        loss=0.0,
        grad_norm=0.0,
        corrected=Correction(np.ones(3), keep, np.ones(3), {}, {}),
        logprobs=np.array([-0.5, -1.0, -3.0], np.float32),
        entropy=np.array([1.0, 2.0, 6.0], np.float32),
        ratio=np.array([np.exp(0.5), 0.5, 1.0], np.float32),
        clipped=keep & [True, False, False],
        gradient=np.zeros(3, np.float32),
        weight=np.ones(3, np.float32),
        keep=keep,
    )
    found = tally(step, outcome, presets.DAPO).means() | off_policy(step, outcome).values()
    assert found["entropy"] == 3.0
    assert found["rollout_logprob_coverage"] == pytest.approx(2 / 3)
    assert found["mean_importance_ratio"] == pytest.approx((np.exp(0.5) + np.exp(1.0)) / 2)  # theta - rollout: 0.5, 1
    assert found["kl_rollout_theta"] == pytest.approx(((np.exp(0.5) - 1 - 0.5) + (np.exp(1.0) - 1 - 1.0)) / 2)
    assert found["trainer_rollout_logprob_diff_mean"] == pytest.approx(0.75)
    assert found["kl_old_theta"] == pytest.approx(
        ((np.exp(0.5) - 1.5) + 0 + (np.exp(-2.0) + 1)) / 3
    )  # theta - old: 0.5, 0, -2
    assert found["ratio_mean"] == pytest.approx((np.exp(0.5) + 0.5) / 2)
    assert found["ratio_max"] == pytest.approx(np.exp(0.5))
    assert found["clip_fraction"] == pytest.approx(1 / 3)
    assert found["clip_fraction_unsigned"] == pytest.approx(2 / 3)  # one above and one below the bounds
    assert found["frac_zero_advantage"] == 0.5


def test_bf16_rounds_the_forward_pass_and_keeps_float32_parameters(traces, tmp_path):
    done, parameters = run(traces, tmp_path, train__dtype="bf16", train__epochs=1)
    assert {value.dtype for value in parameters.values()} == {torch.float32}
    assert 1e-5 < done.rows[1]["trainer_rollout_logprob_diff_mean"] < 0.05
    assert done.rows[1]["ratio_mean"] == pytest.approx(1, abs=1e-5)  # theta and old are rounded alike


# --- what is refused ---


def levels(traces, level, share=1.0):
    """The sequences with the sampled tokens of the first traces at `level`."""
    owner = np.repeat(traces.trace, np.diff(traces.cu_seqlens))
    here = traces.trainable & (owner < share * traces.traces)
    gone = np.where(here, np.nan, traces.rollout_logprobs).astype(np.float32)
    return replace(
        traces, alignment_level=np.where(here, level, traces.alignment_level).astype(np.uint8), rollout_logprobs=gone
    )


def test_text_of_another_model_gets_no_ratio_and_is_told_what_works(traces, tmp_path):
    foreign = levels(traces, 6, share=0.5)
    with pytest.raises(ArgumentError, match=r"TG-TRAIN-089.*48.*96.*0.*--objective"):
        run(foreign, tmp_path)
    done, _ = run(foreign, tmp_path / "sft", objective=presets.WEIGHTED_SFT, data__text_only=True)
    assert done.stopped == "done"
    assert 0 < done.rows[1]["rollout_logprob_coverage"] < 1


def test_no_trace_at_all_is_said_and_sent_to_the_doctor():
    model = Path(__file__).parents[2] / "examples" / "quickstart" / "model"
    nothing = tg.align(tg.Traces.from_records([]), tg.Tokenizer.from_pretrained(model))
    with pytest.raises(ArgumentError, match="TG-TRAIN-075"):
        TrainingData.of(nothing, presets.DAPO, told())


def test_logprobs_of_an_unknown_kind_get_no_ratio_unless_the_temperature_is_one(traces):
    unknown = replace(traces, logprob_kind=np.zeros(traces.traces, np.uint8))
    with pytest.raises(ArgumentError, match=r"TG-TRAIN-092.*95"):
        TrainingData.of(unknown, presets.DAPO, told())
    warm = replace(unknown, temperature=np.full(traces.traces, 0.7, np.float32))
    with pytest.raises(ArgumentError, match=r"TG-TRAIN-092.*0\.7"):
        TrainingData.of(warm, presets.DAPO, told())
    TrainingData.of(replace(unknown, temperature=np.ones(traces.traces, np.float32)), presets.DAPO, told())
    TrainingData.of(unknown, presets.DAPO, told(data__logprob_kind="unknown"))
    TrainingData.of(unknown, presets.WEIGHTED_SFT, told())


def test_raw_logprobs_of_warm_samples_are_said_to_be_no_sampling_ratio(traces):
    warm = replace(
        traces, logprob_kind=np.ones(traces.traces, np.uint8), temperature=np.full(traces.traces, 0.7, np.float32)
    )
    assert "measures the mismatch" in TrainingData.of(warm, presets.DAPO, told()).notes[0]


def test_how_long_an_old_stays_follows_the_number_of_passes_and_is_said(traces):
    def feed(objective=presets.DAPO, **changes):
        return TrainingData.of(traces, objective, told(**{"train__groups_per_step": 4, **changes}))

    def said(found):
        return [note for note in found.notes if "train.updates_per_old_logprobs" in note]

    def refreshed(found):
        return [step for step in range(8) if found.plan(5).refreshes_old(step)]

    one, several = feed(train__epochs=1), feed(train__epochs=3)
    assert "before every update" in said(one)[0]
    assert "once per epoch" in said(several)[0]
    assert (refreshed(one), refreshed(several)) == ([*range(8)], [0, 5])
    by_hand = feed(train__epochs=1, train__updates_per_old_logprobs=2)
    assert (said(by_hand), refreshed(by_hand)) == ([], [0, 2, 4, 6])
    assert refreshed(feed(presets.A3PO, train__epochs=1)) == [0, 5]  # its proximal is of the epoch's beginning
    assert not said(feed(train__epochs=1, train__groups_per_step=1000))  # one step, whose old it is
    assert not said(feed(presets.DAPO_DIRECT, train__epochs=1))


def test_no_logprob_at_all_is_refused_and_a_missing_one_is_counted(traces, tmp_path):
    none = replace(traces, rollout_logprobs=np.full(traces.tokens, np.nan, np.float32))
    with pytest.raises(ArgumentError, match=r"TG-TRAIN-090.*554"):
        TrainingData.of(none, presets.DAPO, told())
    some = traces.rollout_logprobs.copy()
    some[traces.terms[::10]] = np.nan
    holes = replace(traces, rollout_logprobs=some)
    assert "56 of 554 trained tokens have no logprob" in TrainingData.of(holes, presets.DAPO, told()).notes[0]
    done, _ = run(holes, tmp_path)
    assert done.rows[1]["rollout_logprob_coverage"] == pytest.approx(0.9, abs=0.02)
    assert done.rows[1]["correction/kept"] == pytest.approx(0.9 * done.rows[1]["tokens_trained"], rel=0.02)
    with pytest.raises(ArgumentError, match="TG-OBJ-020"):
        run(holes, tmp_path / "n", objective=presets.DAPO_DIRECT, train__missing_logprobs="ratio_one")


@pytest.mark.parametrize(
    ("objective", "changes", "said"),
    [
        (presets.DAPO_DIRECT, {"train__updates_per_old_logprobs": 3}, r"train\.updates_per_old_logprobs"),
        (presets.WEIGHTED_SFT, {"train__missing_logprobs": "error"}, r"train\.missing_logprobs"),
        (presets.DAPO, {"data__holdout": 0, "stop__min_ope_ess": 0.1}, r"stop\.min_ope_ess.*data\.holdout"),
        (presets.DAPO, {"advantage__ddof": 0}, "advantage.scale is none"),
        (presets.DAPO, {"advantage__baseline": "none", "advantage__scale": "std"}, "advantage.baseline is none"),
        (presets.DAPO, {"advantage__baseline": "rloo", "advantage__scale": "std"}, "advantage.baseline is rloo"),
    ],
)
def test_an_option_without_effect_is_an_error(traces, objective, changes, said):
    with pytest.raises(ArgumentError, match=rf"TG-TRAIN-085.*{said}"):
        TrainingData.of(traces, objective, told(**changes))


def test_equal_rewards_are_refused_as_there_is_nothing_to_learn(traces):
    equal = replace(traces, rewards=np.ones_like(traces.rewards))
    with pytest.raises(ArgumentError, match="TG-TRAIN-079"):
        TrainingData.of(equal, presets.DAPO, told())
    many = sampled(tiny_model(), groups=75)
    even = replace(many, rewards=np.ones_like(many.rewards))
    with pytest.raises(ArgumentError, match="TG-TRAIN-077"):
        TrainingData.of(even, presets.DAPO, told(advantage__baseline="none", filter__drop_zero_std_groups=True))


def test_a_baseline_of_the_config_is_the_function_of_that_name(traces):
    owner = np.repeat(traces.trace, np.diff(traces.cu_seqlens))
    lengths = np.bincount(owner[traces.trainable], minlength=traces.traces)
    whole = {"data__holdout": 0}
    for name, expected in {
        "rloo": advantage.rloo(traces.reward, traces.group),
        "opo": advantage.opo(traces.reward, lengths, traces.group),
        "max_rl": advantage.max_rl(traces.reward, traces.group),
    }.items():
        found = TrainingData.of(traces, presets.DAPO, told(advantage__baseline=name, **whole)).advantages
        np.testing.assert_array_equal(found, expected)
    found = TrainingData.of(traces, presets.DAPO, told(advantage__scale="batch_std", **whole)).advantages
    np.testing.assert_array_equal(found, advantage.group_mean(traces.reward, traces.group, scale="batch_std", ddof=1))


def test_a_group_of_one_is_an_explicit_choice(traces):
    alone = replace(traces, group=np.arange(traces.traces, dtype=np.int32))
    with pytest.raises(ArgumentError, match="TG-TRAIN-006"):
        TrainingData.of(alone, presets.DAPO, told())
    assert TrainingData.of(alone, presets.DAPO, told(advantage__baseline="batch_mean")).advantages.any()


def test_ids_of_another_tokenizer_are_refused(traces, tmp_path):
    with pytest.raises(ArgumentError, match=r"TG-TRAIN-062.*4.*400.*48"):
        run(replace(traces, ids=np.where(traces.ids == 3, 400, traces.ids).astype(np.int32)), tmp_path)


def test_held_out_traces_are_not_trained_on(traces):
    feed = TrainingData.of(traces, presets.DAPO, told(data__holdout=0.25))
    trained = np.unique(np.concatenate([step.trace for step in feed.steps(0)]))
    [rows] = feed.held_pieces()
    measured = np.unique(feed.pack_held_out(rows).step.trace)
    assert sorted([*trained, *measured]) == list(range(traces.traces))
    assert len(np.unique(traces.group[measured])) == 6
