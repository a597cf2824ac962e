"""SkyRL's losses, off-policy correction, reductions and KL estimators beside ours. Its ratios are float32."""

import itertools
from types import SimpleNamespace

import pytest
import torch

from padded import hard, run, spoilt
from skyrl_plan import MEAN, MISMATCH, OLD, REDUCTIONS, Correction, algorithm
from tracegrad.errors import ArgumentError
from tracegrad.objective import (
    Clip,
    DropCovariance,
    Importance,
    Objective,
    Penalty,
    PolicyGradient,
    Ratio,
    Reduce,
    Rejection,
    TopCovariance,
    presets,
)
from tracegrad.objective.correction import correct

correction_utils = pytest.importorskip("skyrl.backends.skyrl_train.utils.off_policy_correction_utils")
from skyrl_loss_cases import objective_of, ppo_utils, scaled

CORRECTIONS = [
    Correction(tis, mask, low, high, tokens)
    for tis, mask, (low, high), tokens in itertools.product(
        (None, "token", "sequence"),
        (None, "geometric", "product"),
        ((None, None), (1e-4, None), (None, 100.0), (1e-4, 100.0)),
        (False, True),
    )
]
CORRECTED = ("regular", "dual_clip", "gspo", "cispo", "rollout_is", "dppo_tv", "dppo_kl", "sapo")
UNCORRECTED = ("clip_cov", "kl_cov", "importance_sampling", "cross_entropy")
FLOAT32 = ("regular", "dual_clip", "cispo", "rollout_is", "dppo_tv", "dppo_kl")
ANCHORED = ("rollout_is", "dppo_tv", "dppo_kl")
GROUPS = torch.arange(8) // 2


def theirs(loss: str, correction: Correction, reduction: str, data):
    logprobs = data["logprobs"].clone().requires_grad_()
    mask = data["mask"].to(logprobs.dtype)
    dppo = f"binary_{loss[-2:]}" if loss.startswith("dppo") else "binary_tv"
    name = "dppo" if loss.startswith("dppo") else loss
    function = ppo_utils.PolicyLossRegistry.get(name)
    advantages = scaled(data, reduction)
    value, metrics = function(
        logprobs, data["old"], advantages, algorithm(name, correction, dppo=dppo), mask, data["rollout"]
    )
    value.backward()
    return value.detach(), logprobs.grad, metrics


def branches(loss: str, correction: Correction, data, found, metrics) -> dict:
    good, bad = ((data["advantages"] > 0)[:, None] & data["mask"], (data["advantages"] < 0)[:, None] & data["mask"])
    per_term, kept = found.per_term, found.corrected.keep
    told = {"empty row": ~data["mask"].any(1)}
    if loss in ("regular", "dual_clip", "gspo"):
        told[f"{loss} clip high"] = per_term.clipped & good
        told[f"{loss} clip low"] = per_term.clipped & bad & (per_term.ratio < 1)
    if loss == "dual_clip":
        told["dual clip"] = per_term.clipped & bad & (per_term.ratio > 1)
    if loss in ("dppo_tv", "dppo_kl", "clip_cov"):
        told[f"{loss} drop"] = kept & ~per_term.keep
    if loss in ("cispo", "rollout_is") and correction.tis is None:
        told[f"{loss} bound"] = per_term.weight[per_term.keep] == (5.0 if loss == "cispo" else 0.0)
    if correction.tis:
        told[f"TIS {correction.tis}"] = found.corrected.weight[kept] == (2.0 if correction.tis == "token" else 1.2)
    masks = [f"{metric}_sequence_mask_{side}" for metric in ("geo", "product") for side in ("over_high", "under_low")]
    masks += ["token_mask"] + ["outlier_seq_over_high"] * bool(correction.high)
    masks += ["outlier_seq_under_low"] * bool(correction.low)
    return told | {name: metrics[f"{name}_ratio"] > 0 for name in masks if f"{name}_ratio" in metrics}


CASES = [
    (loss, correction)
    for loss, correction in itertools.product(CORRECTED, CORRECTIONS)
    if not (loss in ANCHORED and correction.tis)  # the same mismatch twice: refused, see below
]


@pytest.mark.parametrize("place", range(len(CASES)), ids=lambda place: " ".join(map(str, CASES[place])))
def test_losses_with_every_correction_are_those_of_skyrl(close, fired, place):
    loss, correction = CASES[place]
    reduction = ("token_mean", "sequence_mean", "seq_mean_token_sum_norm")[place % 3]
    data = hard(place % 7)
    value, gradient, metrics = theirs(loss, correction, reduction, data)
    found = run(objective_of(loss, correction, reduction), data, rows=True)
    rtol = 1e-5 if loss in FLOAT32 or correction.tis else 1e-7
    close(f"SkyRL {loss} loss", found.loss, value, rtol, floor=0.1)
    close(f"SkyRL {loss} gradient", found.gradient, gradient, rtol, floor=1e-4)
    fired("SkyRL", branches(loss, correction, data, found, metrics))


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("loss", UNCORRECTED)
def test_losses_without_a_correction_are_those_of_skyrl(close, fired, loss, seed):
    data, plain = hard(seed), Correction()
    torch.manual_seed(seed)
    value, gradient, metrics = theirs(loss, plain, "token_mean", data)
    torch.manual_seed(seed)
    found = run(objective_of(loss, plain, "token_mean", int(data["mask"].sum())), data)
    close(f"SkyRL {loss} loss", found.loss, value, floor=0.1)
    close(f"SkyRL {loss} gradient", found.gradient, gradient, floor=1e-5)
    fired("SkyRL", branches(loss, plain, data, found, metrics))
    if loss == "kl_cov":
        fired("SkyRL", {"kl_cov penalty": found.per_term.penalty > 0})


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("seed", range(3))
def test_covariances_of_scaled_advantages_are_skyrls(close, fired, reduction, seed):
    """With the bounds, the coefficient and the reduction that a config says, whatever the number of terms."""
    data, told = hard(seed), Reduce("constant", norm=1.0)
    where = TopCovariance(0.2, "microbatch", scaled=True)
    added = Penalty(OLD, "abs", 1.0, masked=True, weighted=False, where=where, reduce=told)
    reduce = REDUCTIONS[reduction]
    gate = DropCovariance(0.1, 1e-3, 0.03, "microbatch", scaled=True)
    ours = {
        "clip_cov": Objective(Clip(0.2, 0.28), OLD, rejections=(gate,), reduce=reduce),
        "kl_cov": Objective(Importance(), OLD, penalties=(added,), reduce=reduce),
    }
    for loss, objective in ours.items():
        torch.manual_seed(seed)
        value, gradient, _ = theirs(loss, Correction(), reduction, data)
        torch.manual_seed(seed)
        counts = SimpleNamespace(terms=int(data["mask"].sum()), traces=8, groups=4)
        found = run(objective, data, group=GROUPS, totals=counts)
        close(f"SkyRL {loss} with scaled advantages, loss", found.loss, value, floor=0.1)
        close(f"SkyRL {loss} with scaled advantages, gradient", found.gradient, gradient, floor=1e-5)
        if loss == "clip_cov":
            fired("SkyRL", {"clip_cov drop": found.corrected.keep & ~found.per_term.keep})


@pytest.mark.parametrize("loss", CORRECTED)
@pytest.mark.parametrize("seed", range(3))
def test_advantages_may_differ_within_a_trace(close, loss, seed):
    correction, data = Correction(mask="geometric", tokens=True), hard(seed)
    data["advantages"] = torch.randn(data["mask"].shape, generator=torch.Generator().manual_seed(seed)).double()
    value, gradient, _ = theirs(loss, correction, "token_mean", data)
    found = run(objective_of(loss, correction, "token_mean"), data)
    close("SkyRL with advantages per token, loss", found.loss, value, 1e-5, floor=0.1)
    close("SkyRL with advantages per token, gradient", found.gradient, gradient, 1e-5, floor=1e-4)


@pytest.mark.parametrize("loss", CORRECTED)
def test_in_float32_they_agree_to_float32(close, loss):
    data, correction = hard(1, torch.float32), Correction(mask="product", low=1e-4)
    value, gradient, _ = theirs(loss, correction, "token_mean", data)
    found = run(objective_of(loss, correction, "token_mean"), data)
    close("SkyRL losses, float32", found.loss, value, 1e-5, floor=0.1)
    close("SkyRL gradients, float32", found.gradient, gradient, 1e-5, floor=1e-2)


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("seed", range(3))
def test_reductions(close, reduction, seed):
    data = hard(seed) | {"advantages": torch.ones(8, dtype=torch.float64)}
    totals = {"totals": _rows(data)} if reduction != "prompt_mean" else {}
    ours = correct(
        data["old"], data["rollout"], mask=data["mask"], group=GROUPS, reduce=REDUCTIONS[reduction], **totals
    )
    close(f"SkyRL {reduction}", ours.scale[data["mask"]], scaled(data, reduction)[data["mask"]], 1e-12)


def _rows(data):
    """Its counts: empty rows are sequences."""
    return SimpleNamespace(terms=int(data["mask"].sum()), traces=len(data["mask"]), groups=4)


@pytest.mark.parametrize("kind", ["k1", "abs", "k2", "k3"])
def test_kl_estimators(close, fired, kind):
    data = hard(0)
    data["ref"][0, 0], data["logprobs"][0, 0] = -0.1, -6.0  # k3 beyond its cap of 10
    logprobs = data["logprobs"].clone().requires_grad_()
    theirs = ppo_utils.compute_approx_kl(logprobs, data["ref"], data["mask"].double(), kind)
    (theirs.sum() / data["mask"].sum()).backward()
    cap = 10.0 if kind == "k3" else None
    penalty = Penalty(Ratio("theta", "ref"), kind, 1.0, masked=False, weighted=False, cap=cap)
    still = data | {"advantages": torch.zeros_like(data["advantages"])}
    found = run(Objective(PolicyGradient(), penalties=(penalty,)), still)
    close(f"SkyRL {kind}", found.per_term.penalty, theirs)
    close(f"SkyRL {kind} gradient", found.gradient, logprobs.grad)
    fired("SkyRL", {"k3 cap": (theirs == 10).any()} if kind == "k3" else {})


class TestWhereSkyrlIsUndefined:
    @pytest.mark.parametrize("tis", [None, "token", "sequence"])
    @pytest.mark.parametrize("loss", CORRECTED)
    def test_garbage_off_the_mask_makes_its_loss_nan_and_leaves_ours(self, fired, loss, tis):
        correction, data = Correction(tis if loss not in ANCHORED else None, "geometric", 1e-4), hard(2)
        value, _, _ = theirs(loss, correction, "token_mean", spoilt(data))
        objective = objective_of(loss, correction, "token_mean")
        clean, found = run(objective, data), run(objective, spoilt(data))
        assert torch.equal(found.loss, clean.loss)
        assert torch.equal(found.gradient, clean.gradient)
        assert value.isnan()
        fired("SkyRL", {"NaN": value.isnan()})

    @pytest.mark.parametrize("loss", ANCHORED)
    def test_it_corrects_the_same_mismatch_twice_and_we_refuse(self, loss):
        data = hard(2)
        once, _, _ = theirs(loss, Correction(), "token_mean", data)
        twice, _, _ = theirs(loss, Correction("token"), "token_mean", data)
        assert abs(twice - once) > 1e-3
        with pytest.raises(ArgumentError, match="TG-OBJ-018"):
            objective_of(loss, Correction("token"), "token_mean")

    def test_one_bound_of_a_token_mask_does_nothing_there_and_is_a_gate_here(self):
        data = hard(2)
        options = Correction(mask="geometric").options
        options.token_mask_is_threshold_low = 0.99
        _, kept, _ = correction_utils.apply_off_policy_correction(
            torch.zeros_like(data["old"]), data["old"], data["rollout"], data["mask"].double(), options
        )
        geometric = Correction(mask="geometric").rejections
        plan = {"mask": data["mask"]}
        without = correct(data["old"], data["rollout"], rejections=geometric, **plan).keep
        assert torch.equal(without.double(), kept)
        halved = correct(
            data["old"], data["rollout"], rejections=(Rejection(MISMATCH, low=0.99), *geometric), **plan
        ).keep
        assert halved.sum() < without.sum()

    def test_missing_logprobs_switch_its_correction_off_and_are_an_error_here(self):
        data, options = hard(0), Correction("token").options
        loss = torch.ones_like(data["old"])
        same, _, metrics = correction_utils.apply_off_policy_correction(
            loss, data["old"], None, data["mask"].double(), options
        )
        assert same is loss
        assert not metrics
        with pytest.raises(ArgumentError, match=r"TG-RATIO-001.*rollout"):
            correct(data["old"], None, mask=data["mask"], weights=Correction("token").weights)

    def test_its_floor_for_an_unknown_logprob_takes_the_whole_row_and_is_refused_here(self):
        data = hard(0)
        data["rollout"][0, 0] = -9999.0
        _, kept, _ = correction_utils.apply_off_policy_correction(
            torch.ones_like(data["old"]),
            data["old"],
            data["rollout"],
            data["mask"].double(),
            Correction(mask="product").options,
        )
        assert not kept[0].any()
        with pytest.raises(ArgumentError, match=r"TG-RATIO-001.*9999"):
            correct(data["old"], data["rollout"], mask=data["mask"])
        data["rollout"][0, 0] = float("nan")
        found = correct(data["old"], data["rollout"], mask=data["mask"], weights=Correction("token").weights)
        assert found.keep[0].tolist() == [False] + [True] * 13


@pytest.mark.parametrize("seed", range(3))
def test_the_preset_is_its_correction_of_pull_849(close, seed):
    # outlier veto [1e-4, 100], token TIS 2, geometric mask [0.99, 1.01]
    data = hard(seed)
    config = algorithm("regular", Correction("token", "geometric", 1e-4, 100.0))
    config.eps_clip_high = 0.2
    config.off_policy_correction.geo_mask_low, config.off_policy_correction.geo_mask_high = 0.99, 1.01
    logprobs = data["logprobs"].clone().requires_grad_()
    value, _ = ppo_utils.ppo_policy_loss(
        logprobs, data["old"], scaled(data, "token_mean"), config, data["mask"].double(), data["rollout"]
    )
    value.backward()
    found = run(presets.SKYRL_849, data)
    close("SkyRL 849", found.loss, value.detach(), 1e-5, floor=0.1)
    close("SkyRL 849", found.gradient, logprobs.grad, 1e-5, floor=1e-4)
    assert presets.SKYRL_849.rejections[1].level == MEAN


def test_every_branch_has_fired(fired):
    counts = fired("SkyRL")
    if counts["empty row"] < len(CASES):
        pytest.skip("the other tests of this file have not run")
    assert {name for name, count in counts.items() if count == 0} == set()
    told = {"dual clip", "TIS sequence", "token_mask", "outlier_seq_under_low", "kl_cov penalty", "k3 cap", "NaN"}
    told |= {"geo_sequence_mask_over_high", "product_sequence_mask_under_low"}
    assert told <= set(counts)
