"""verl's functions beside ours: rollout correction, the vanilla policy loss, KL estimators."""

from dataclasses import replace

import pytest
import torch

from test_objective import padded
from tracegrad.algebra import (
    Clamp,
    Clip,
    Gate,
    Level,
    Objective,
    Penalty,
    PolicyGradient,
    Ratio,
    Reduce,
    Weight,
    Window,
)
from tracegrad.correction import correct
from tracegrad.objective import Terms

core_algos = pytest.importorskip("verl.trainer.ppo.core_algos")
helper = pytest.importorskip("verl.trainer.ppo.rollout_corr_helper")
workers = pytest.importorskip("verl.workers.config")

MISMATCH = Ratio("old", "rollout")
LEVELS = {"token": Level(), "sequence": Level("trace", "sum")}
RS_LEVELS = {
    "token": Level(),
    "seq_sum": Level("trace", "sum"),
    "seq_mean": Level("trace", "mean"),
    "seq_max": Level("trace", "max"),
}


def case(seed, dtype=torch.float64):
    data = padded(seed, rows=12, width=40, dtype=dtype)
    data["old"] = data["rollout"] + (data["old"] - data["rollout"]) * 0.3
    return data


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize(("threshold", "shape"), [(2.0, Clamp(0.0, 2.0)), ("0.5_5.0", Window(0.5, 5.0))])
@pytest.mark.parametrize("level", list(LEVELS))
def test_importance_weights_and_their_metrics(close, level, threshold, shape, normalize, seed):
    data = case(seed)
    theirs, metrics = helper.compute_rollout_correction_weights(
        data["old"] - data["rollout"], data["mask"], level, threshold, normalize
    )
    weight = Weight(MISMATCH, LEVELS[level], shape, normalize=normalize)
    ours = correct(data["old"], data["rollout"], mask=data["mask"], weights=[weight])
    close(f"verl weights, {level}", ours.weight, theirs * data["mask"], 1e-12)
    if level == "token" and not normalize:
        # verl adds 1e-8 to the mean before it divides
        close("verl ESS of token weights", ours.metrics["ess"], metrics["rollout_is_eff_sample_size"], 1e-6)
        close("verl mean token weight", ours.metrics["weight_mean"], metrics["rollout_is_mean"], 1e-6)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(
    ("option", "threshold", "stat", "bounds"),
    [
        # verl's k1 is -log(old/rollout): "0.6_1.2" keeps rollout/old in it, ours old/rollout in [1/1.2, 1/0.6]
        ("token_k1", "0.6_1.2", "ratio", (1 / 1.2, 1 / 0.6)),
        ("token_k2", 0.02, "k2", (None, 0.02)),
        ("token_k3", 0.02, "k3", (None, 0.02)),
        ("seq_sum_k1", "0.5_2.0", "ratio", (0.5, 2.0)),
        ("seq_sum_k2", 0.5, "k2", (None, 0.5)),
        ("seq_sum_k3", 0.5, "k3", (None, 0.5)),
        ("seq_mean_k1", "0.98_1.02", "ratio", (1 / 1.02, 1 / 0.98)),
        ("seq_mean_k2", 0.01, "k2", (None, 0.01)),
        ("seq_mean_k3", 0.01, "k3", (None, 0.01)),
        ("seq_max_k2", 0.06, "k2", (None, 0.06)),
        ("seq_max_k3", 0.06, "k3", (None, 0.06)),
    ],
)
def test_rejection_masks(close, option, threshold, stat, bounds, seed, dtype):
    data = case(seed, dtype)
    theirs, _ = helper.compute_rollout_rejection_mask(data["old"] - data["rollout"], data["mask"], option, threshold)
    gate = Gate(MISMATCH, stat, RS_LEVELS[option.rsplit("_", 1)[0]], low=bounds[0], high=bounds[1])
    ours = correct(data["old"], data["rollout"], mask=data["mask"], gates=[gate])
    close("verl rejection masks", ours.keep.double(), theirs.double(), 0.0)
    rejected = 1 - ours.keep.sum() / data["mask"].sum()
    assert 0 < rejected < 1, f"{option}: the gate fired on {rejected}"


AGGREGATIONS = {
    "token-mean": Reduce("token"),
    "seq-mean-token-sum": Reduce("trace", "sum"),
    "seq-mean-token-sum-norm": Reduce("trace", "sum", norm=64.0),
    "seq-mean-token-mean": Reduce("trace", "mean"),
}


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("rejection", [None, "token_k1", "seq_mean_k1"])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("aggregation", list(AGGREGATIONS))
def test_the_vanilla_policy_loss(close, aggregation, weighted, rejection, seed):
    data = case(seed)
    kept, gates, weights, is_weights = data["mask"], (), (), None
    if weighted:
        weights = (Weight(MISMATCH, shape=Clamp(0.0, 2.0)),)
        is_weights, _ = helper.compute_rollout_correction_weights(
            data["old"] - data["rollout"], data["mask"], "token", 2.0
        )
    if rejection:
        bounds = {"token_k1": (0.6, 1.2), "seq_mean_k1": (0.98, 1.02)}[rejection]
        kept, _ = helper.compute_rollout_rejection_mask(
            data["old"] - data["rollout"], data["mask"], rejection, f"{bounds[0]}_{bounds[1]}"
        )
        level = Level() if rejection == "token_k1" else Level("trace", "mean")
        gates = (Gate(MISMATCH, "ratio", level, low=1 / bounds[1], high=1 / bounds[0]),)
    logprobs = data["logprobs"].clone().requires_grad_()
    config = workers.ActorConfig(strategy="fsdp", rollout_n=1, ppo_micro_batch_size_per_gpu=1, use_dynamic_bsz=False)
    config.global_batch_info["loss_scale_factor"] = 64
    theirs, metrics = core_algos.compute_policy_loss_vanilla(
        data["old"],
        logprobs,
        data["advantages"][:, None].expand_as(logprobs),
        kept,
        loss_agg_mode=aggregation,
        config=config,
        rollout_is_weights=is_weights,
    )
    theirs.backward()
    # verl counts what rejection left
    objective = Objective(
        Clip(0.2, 0.2, dual=3.0),
        Ratio("theta", "old"),
        weights,
        gates,
        reduce=replace(AGGREGATIONS[aggregation], denominator="kept"),
    )
    found, gradient = _ours(objective, data)
    # verl's mean over a sequence divides by its length + 1e-8, its mean over tokens likewise
    close("verl vanilla loss", found.loss.item(), theirs.item(), 2e-8)
    close("verl vanilla gradient", gradient, logprobs.grad, 2e-7)
    clipped = (found.per_term.clipped & kept).sum() / kept.sum()
    close("verl clip fraction", clipped, metrics["actor/pg_clipfrac"] + metrics["actor/pg_clipfrac_lower"], 1e-6)


def _ours(objective, data):
    logprobs = data["logprobs"].clone().requires_grad_()
    plan = {"weights": objective.weights, "gates": objective.gates, "reduce": objective.reduce}
    corrected = correct(data["old"], data["rollout"], mask=data["mask"], **plan)
    found = objective(
        logprobs,
        None,
        Terms(
            old=data["old"],
            ref=data["ref"],
            advantages=data["advantages"][:, None].expand_as(logprobs),
            weight=corrected.weight,
            keep=corrected.keep,
            scale=corrected.scale,
        ),
    )
    found.loss.backward()
    return found, logprobs.grad


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("kind", ["k1", "k2", "k3"])
def test_kl_penalties(close, kind, seed):
    data = case(seed)
    logprobs = data["logprobs"].clone().requires_grad_()
    theirs = core_algos.kl_penalty(logprobs, data["ref"], kind)
    (theirs * data["mask"]).sum().backward()
    terms = Terms(ref=data["ref"], advantages=torch.zeros_like(logprobs), scale=data["mask"].double())
    again = data["logprobs"].clone().requires_grad_()
    penalty = Penalty(Ratio("theta", "ref"), kind, 1.0, gated=False, weighted=False)
    found = Objective(PolicyGradient(), penalties=(penalty,))(again, None, terms)
    found.loss.backward()
    close(f"verl {kind}", found.per_term.penalty[data["mask"]], theirs[data["mask"]], 1e-9)
    close(f"verl {kind} gradient", again.grad, logprobs.grad, 1e-9)
