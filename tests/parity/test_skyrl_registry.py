"""integrations.skyrl: our objective in SkyRL's registry takes the gradient of SkyRL's own loss and correction."""

import ast
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from padded import hard
from skyrl_loss_cases import objective_of, ppo_utils, scaled
from skyrl_plan import Correction, algorithm
from tracegrad.errors import ArgumentError
from tracegrad.integrations import skyrl
from tracegrad.objective import (
    Aggregation,
    Function,
    Objective,
    Ratio,
    Reduce,
    Rejection,
    Weight,
    presets,
    with_entropy,
    with_kl,
)

cloudpickle = pytest.importorskip("cloudpickle")
REDUCTIONS = ("token_mean", "sequence_mean", "seq_mean_token_sum_norm", "prompt_mean")
CORRECTIONS = [
    Correction(),
    Correction("token", "geometric", 1e-4, 100.0),
    Correction("sequence", None, 1e-4, None, True),
    Correction(None, "product", None, 100.0, True),
]
LOSSES = ("regular", "dual_clip", "gspo", "cispo", "sapo")


def step(function, data, loss, correction, reduction, rows=None):
    """(loss, gradient, metrics) of SkyRL's call of a policy loss on some rows of a mini-batch."""
    rows = slice(None) if rows is None else rows
    logprobs = data["logprobs"].clone().requires_grad_()
    mask, advantages = data["mask"].to(logprobs.dtype), scaled(data, reduction)
    config = algorithm(loss, correction)
    config.loss_reduction = reduction
    arrays = (logprobs[rows], data["old"][rows], advantages[rows])
    value, metrics = function(*arrays, config=config, loss_mask=mask[rows], rollout_logprobs=data["rollout"][rows])
    value.backward()
    return value.detach(), logprobs.grad, metrics


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("correction", CORRECTIONS, ids=str)
@pytest.mark.parametrize("loss", LOSSES)
def test_the_registered_loss_is_skyrls_own_with_its_correction(close, loss, correction, reduction):
    data, objective = hard(LOSSES.index(loss)), objective_of(loss, correction, reduction)
    skyrl.register(objective)
    ours = ppo_utils.PolicyLossRegistry.get("tracegrad")
    mine = step(ours, data, "tracegrad", Correction(), reduction)
    theirs = step(ppo_utils.PolicyLossRegistry.get(loss), data, loss, correction, reduction)
    close("SkyRL's registry: loss", mine[0], theirs[0], 1e-5, floor=0.1)
    close("SkyRL's registry: gradient", mine[1], theirs[1], 1e-5, floor=1e-4)
    named = [name for name in mine[2] if name.startswith("is_ratio_") and name in theirs[2]]
    for name in named:
        close("SkyRL's registry: metrics", mine[2][name], theirs[2][name], 1e-5)
    assert len(named) == (0 if correction == Correction() else 4)
    cut = [step(ours, data, "tracegrad", Correction(), reduction, rows) for rows in (slice(0, 3), slice(3, 8))]
    close("SkyRL's registry: micro-batches", cut[0][1] + cut[1][1], mine[1], 1e-9)


def test_the_preset_of_pull_849_is_registered_as_it_stands(close):
    data = hard(3)
    correction = Correction("token", "geometric", 1e-4, 100.0)
    skyrl.register(presets.SKYRL_849)
    mine = step(ppo_utils.PolicyLossRegistry.get("tracegrad"), data, "tracegrad", Correction(), "token_mean")

    def own(*arrays, config, **options):
        config.off_policy_correction.geo_mask_low, config.off_policy_correction.geo_mask_high = 0.99, 1.01
        config.eps_clip_high = 0.2
        return ppo_utils.ppo_policy_loss(*arrays, config, **options)

    theirs = step(own, data, "regular", correction, "token_mean")
    close("SkyRL's registry: PR 849", mine[1], theirs[1], 1e-5, floor=1e-4)
    assert 0 < mine[2]["masked_fraction"] < 1


def test_a_loss_of_ones_own_is_registered_as_any_other(close):
    def clipped(view):
        return (-view.advantages * view.ratio).maximum(-view.advantages * view.ratio.clamp(0.8, 1.28))

    mine = Objective(Function(clipped, "term", times_advantage=True), Ratio("theta", "old"), reduce=Reduce("token"))
    function = skyrl.register(mine, "mine")
    arrived = cloudpickle.loads(cloudpickle.dumps(function))  # as its actor hands it to workers
    data = hard(1)
    found = step(arrived, data, "mine", Correction(), "token_mean")
    theirs = step(ppo_utils.ppo_policy_loss, data, "regular", Correction(), "token_mean")
    close("SkyRL's registry: one's own", found[1], theirs[1], 1e-5, floor=1e-4)
    with pytest.raises(ArgumentError, match=r"TG-INTEG-029.*clipped.*=True"):
        skyrl.register(replace(mine, surrogate=clipped))


def test_a_logprob_that_its_server_does_not_know_is_missing_and_not_e_to_the_minus_9999():
    data = hard(0)
    data["rollout"][0, 0] = -9999.0
    skyrl.register(presets.GRPO_DIRECT)
    function = ppo_utils.PolicyLossRegistry.get("tracegrad")
    _, gradient, metrics = step(function, data, "tracegrad", Correction(), "sequence_mean")
    assert gradient[0, 0] == 0
    assert gradient[0].any()
    assert gradient.isfinite().all()
    assert metrics["frac_missing"] == pytest.approx(1 / int(data["mask"].sum()))


def test_what_skyrl_does_not_give_is_refused_by_name():
    budget = replace(presets.GRPO, weights=(Weight(Ratio("old", "rollout"), normalize=True),))
    for objective, match in (
        (with_kl(presets.GRPO, 0.1), r"TG-INTEG-029.*'0.1 \* k3\(theta/ref\)'.*use_kl_loss"),
        (with_entropy(presets.GRPO, 0.1), "TG-INTEG-029.*use_entropy_loss"),
        (budget, "TG-INTEG-029.*optimizer step"),
        (
            replace(
                presets.GRPO, rejections=(Rejection(Ratio("theta", "old"), low=0.5, level=Aggregation("turn", "mean")),)
            ),
            "TG-INTEG-029.*turn",
        ),
        (replace(presets.GRPO, reduce=Reduce("token", denominator="kept")), "TG-INTEG-029.*denominator='all'"),
    ):
        with pytest.raises(ArgumentError, match=match):
            skyrl.register(objective)
    with pytest.raises(ArgumentError, match=r"TG-INTEG-016.*regular"):
        skyrl.register(presets.GRPO, "regular")
    function, data = skyrl.register(presets.GRPO), hard(0)
    with pytest.raises(ArgumentError, match=r"TG-INTEG-003.*loss_reduction is token_mean"):
        step(function, data, "tracegrad", Correction(), "token_mean")
    with pytest.raises(ArgumentError, match="TG-INTEG-014"):
        step(function, data, "tracegrad", Correction("token"), "sequence_mean")
    without = SimpleNamespace(**vars(algorithm("tracegrad")))
    with pytest.raises(ArgumentError, match=r"TG-INTEG-015.*sampling_params\.logprobs=0"):
        function(data["logprobs"], data["old"], data["advantages"][:, None].expand_as(data["old"]), without)


def test_registered_again_it_is_replaced():
    for objective in (presets.GRPO, presets.GSPO):
        skyrl.register(objective)
    assert ppo_utils.PolicyLossRegistry.get("tracegrad").objective == presets.GSPO


def test_the_example_trains_the_bundled_example_on_skyrls_batches(example):
    script = example.parent / "trainers" / "skyrl_batch_from_traces.py"
    command = [sys.executable, script, example / "traces.jsonl.zst", example / "model", "--steps", "2"]
    done = subprocess.run([*map(str, command)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    log = ast.literal_eval(done.stdout.splitlines()[-1])
    assert log[0]["is_ratio_mean"] == pytest.approx(1.0, abs=1e-4)
    assert log[0]["is_ratio_max"] == pytest.approx(1.0, abs=1e-3)
    assert log[1]["is_ratio_max"] > 1.02  # the policy has moved
    assert log[0]["frac_missing"] == 0


class TestRowsThatAreTurns:
    WIDE = (presets.SKYRL_849, presets.GSPO, replace(presets.TIS, reduce=Reduce("trace", "mean")))

    @pytest.mark.parametrize("objective", WIDE, ids=["a gate of traces", "a ratio of traces", "a mean over traces"])
    def test_what_looks_at_whole_traces_is_refused(self, objective):
        told = {"generator": {"step_wise_trajectories": True}}
        with pytest.raises(ArgumentError, match="TG-INTEG-017"):
            skyrl.register(objective, "stepwise", config=told)
        skyrl.register(objective, "stepwise", config={"generator": {"step_wise_trajectories": False}})
        ppo_utils.PolicyLossRegistry.unregister("stepwise")

    def test_its_own_class_is_read_and_what_looks_at_tokens_is_taken(self):
        config = pytest.importorskip("skyrl.train.config.config").SkyRLTrainConfig()
        skyrl.register(presets.GSPO, "stepwise", config=config)
        config.generator.step_wise_trajectories = True
        skyrl.register(presets.TIS, "stepwise", config=config)
        with pytest.raises(ArgumentError, match="TG-INTEG-017"):
            skyrl.register(presets.GSPO, "stepwise", config=config)
        ppo_utils.PolicyLossRegistry.unregister("stepwise")


@pytest.mark.parametrize("option", [{"top_p": 0.9}, {"top_k": 20}, {"min_p": 0.1}, {"additional_kwargs": {"top_k": 5}}])
def test_a_part_of_the_vocabulary_is_not_compared_with_the_whole(option):
    whole = {"temperature": 0.7, "top_p": 1.0, "top_k": -1, "min_p": 0.0, "logprobs": 1}
    skyrl.register(presets.SKYRL_849, config={"generator": {"sampling_params": whole}})
    truncated = {"generator": {"sampling_params": {**whole, **option}}}
    with pytest.raises(ArgumentError, match="TG-INTEG-030"):
        skyrl.register(presets.SKYRL_849, config=truncated)
    skyrl.register(replace(presets.SKYRL_849, weights=(), rejections=()), config=truncated)  # reads none
    config = pytest.importorskip("skyrl.train.config.config").SkyRLTrainConfig()
    skyrl.register(presets.SKYRL_849, config=config)
    for name, value in option.items():
        setattr(config.generator.sampling_params, name, value)
    with pytest.raises(ArgumentError, match="TG-INTEG-030"):
        skyrl.register(presets.SKYRL_849, config=config)


def test_its_example_compares_over_the_support(example):
    script = Path(__file__).parents[1] / "helpers" / "examples_over_support.py"
    command = [sys.executable, str(script), "skyrl_batch_from_traces", str(example)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert float(done.stdout.splitlines()[-1]) < 2e-4
