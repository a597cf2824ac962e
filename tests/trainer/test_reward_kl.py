"""KL in the reward of a run: each batch is charged and compared before its first update, and a resumed run goes on."""

import json
from dataclasses import replace

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

import tracegrad as tg
from tiny import tiny_model
from tracegrad import online
from tracegrad.advantage import AdaptiveKl, group_mean, kl_in_reward
from tracegrad.cli import main
from tracegrad.errors import ArgumentError
from tracegrad.objective import override, override_all, presets
from tracegrad.trainer.steps import TrainingData
from training_runs import SignalAfter, run
from watched import told, traces, watched

CHARGED = {"reward_kl__coef": 0.5, "data__holdout": 0, "train__updates_per_old_logprobs": 2, "optimizer__lr": 3e-2}


def paid_by(batch, coef, **how):
    """What is charged for the steps of a batch, and the advantages of all traces by it."""
    given = (
        np.concatenate([getattr(step, name) for step in batch]) for name in ("old_logprobs", "ref_logprobs", "trace")
    )
    paid = kl_in_reward(traces().reward, *given, coef=coef, **how)
    return paid, group_mean(paid.rewards, traces().group)


@pytest.mark.parametrize("objective", [presets.DAPO, presets.TOPR_POSITIVE], ids=["with old", "without a ratio"])
def test_each_batch_pays_for_having_left_the_reference_before_it_is_compared(tmp_path, objective):
    told_so = {**CHARGED, "train__epochs": 2, "reward_kl__target_kl": 1e-4, "reward_kl__horizon": 200.0}
    found = watched(traces(), tmp_path, objective=objective, **told_so)
    steps, coef, seen = [each.step for each in found.steps], AdaptiveKl(0.5, 1e-4, 200.0), []
    assert len(steps) == 8
    for first in range(0, 8, 2):
        batch = steps[first : first + 2]
        paid, wanted = paid_by(batch, coef.coef)
        for step in batch:
            np.testing.assert_allclose(step.advantages, wanted[step.trace], atol=1e-6)
            seen.append((pytest.approx(paid.kl), pytest.approx(coef.coef)))
        coef = coef.after(paid.kl, sum(step.totals.traces for step in batch))
    assert not np.allclose(wanted[step.trace], group_mean(traces().reward, traces().group)[step.trace], atol=1e-3)
    rows = [row for row in found.done.rows if "reward_kl" in row]
    assert [(row["reward_kl"], row["reward_kl_coef"]) for row in rows] == seen
    assert len({row["reward_kl_coef"] for row in rows}) == 4


def test_without_a_ratio_each_step_of_one_pass_is_a_batch_too():
    chosen = told(reward_kl__coef=0.5, data__holdout=0)
    feed = TrainingData.of(traces(), presets.TOPR_POSITIVE, chosen)
    assert feed.plan(4).window(1) == range(1, 2)
    assert any("before every update" in note for note in feed.notes)


@pytest.mark.parametrize("stop", [1, 2, 3])
def test_a_resumed_run_charges_as_the_uninterrupted_one(tmp_path, stop):
    told_so = {
        "train__updates_per_old_logprobs": 2,
        "data__holdout": 0,
        "optimizer__lr": 3e-2,
        "train__groups_per_step": 3,
    }
    told_so |= {"reward_kl__coef": 0.5, "reward_kl__target_kl": 1e-3, "reward_kl__horizon": 50.0, "train__epochs": 1}
    whole, parameters = run(traces(), tmp_path / "whole", **told_so)
    run(traces(), tmp_path / "cut", sinks=[SignalAfter(stop)], **told_so)
    again, resumed = run(traces(), tmp_path / "cut", tiny_model(9), resume=True, **told_so)
    assert all(torch.equal(parameters[name], resumed[name]) for name in parameters)
    charged = [(row["reward_kl"], row["reward_kl_coef"]) for row in whole.rows[1:]]
    assert [(row["reward_kl"], row["reward_kl_coef"]) for row in again.rows[1:]] == charged
    assert len(set(charged)) == 2


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"pack__skip_zero_weight": True}, "TG-TRAIN-085"),
        ({"train__ref_sync_steps": 3}, "TG-TRAIN-088"),
        ({"reward_kl__coef": 0.0, "reward_kl__kind": "k3"}, r"TG-TRAIN-085.*reward_kl\.kind.*reward_kl\.coef.*0"),
        ({"reward_kl__horizon": 5.0}, r"TG-TRAIN-085.*reward_kl\.target.*0"),
        ({"reward_kl__coef": -1.0}, r"TG-CONFIG-010.*0"),
    ],
)
def test_what_cannot_go_with_it_is_refused(changes, why):
    with pytest.raises(ArgumentError, match=why):
        TrainingData.of(traces(), presets.DAPO, told(**{**CHARGED, **changes}))


def test_it_does_not_go_with_a_penalty_over_the_vocabulary():
    objective = override_all(presets.DAPO, {"kl": 0.1, "kl_over": "vocabulary"})
    with pytest.raises(ArgumentError, match="TG-TRAIN-098"):
        TrainingData.of(traces(), objective, told(**CHARGED))
    TrainingData.of(traces(), override(objective, "kl_over", "support"), told(**CHARGED))


def test_a_step_that_is_played_is_not_charged_and_says_so(example, tmp_path):
    charged = tg.config.update(tg.config.Config(), [("reward_kl.coef", 0.1)])
    with pytest.raises(ArgumentError, match="TG-ONLINE-045"):
        online.train(example / "model", ["a"], rewards=[len], config=charged, out=tmp_path)


def test_a_run_of_the_command_line_is_charged_as_verls_config_says(example, tmp_path, capsys):
    path = tmp_path / "traces.jsonl"
    tg.write(tg.read(example / "traces.jsonl.zst", limit=32), path)
    algorithm = {"adv_estimator": "grpo", "use_kl_in_reward": True, "kl_ctrl": {"type": "adaptive", "kl_coef": 0.1}}
    (tmp_path / "verl.json").write_text(json.dumps({"algorithm": algorithm}))
    said = ["--from-config", f"verl:{tmp_path / 'verl.json'}", "--train.groups_per_step", "2", "--optimizer.lr", "1e-3"]
    run_ = ["train", str(path), "--model", str(example / "model"), "--out", str(tmp_path / "out")]
    assert main([*run_, *said, "--data.holdout", "0", "--data.on_error", "skip"]) == 0
    assert "reward_kl.coef = 0.1" in capsys.readouterr().out
    rows = [json.loads(line) for line in (tmp_path / "out" / "metrics.jsonl").read_text().splitlines()]
    charged = [(row["reward_kl"], row["reward_kl_coef"]) for row in rows if "reward_kl" in row]
    assert len(charged) == 2
    assert charged[0] == (0.0, 0.1)
    assert charged[1][0] != 0.0
    assert charged[1][1] == pytest.approx(0.1 * (1 - 0.2 * 16 / 10_000))


def test_the_reference_that_is_given_is_measured_for_the_reward_alone(tmp_path):
    one = replace(traces(), rollout_logprobs=traces().rollout_logprobs)
    plain, moved = ({"reference": each} for each in (tiny_model(0), tiny_model(5)))
    found = []
    for at, given in enumerate((plain, moved)):
        how = {"objective": presets.TOPR_POSITIVE, "config": told(**CHARGED), "sinks": (), "log": lambda _: None}
        found.append(tg.trainer.train(one, tiny_model(), out=tmp_path / str(at), **how, **given).rows[1]["reward_kl"])
    assert found[0] == pytest.approx(0.0, abs=1e-6)
    assert abs(found[1]) > 1e-3
