"""verl's policy losses beside ours, with every aggregation, weight and rejection, and its KL estimators."""

import itertools
from dataclasses import replace
from typing import NamedTuple

import pytest
import torch

from padded import hard, per_position, run, spoilt
from tracegrad.objective import (
    Aggregation,
    Clip,
    DropCovariance,
    GeoClip,
    Importance,
    Objective,
    Penalty,
    PolicyGradient,
    Ratio,
    Reduce,
    Rejection,
    Sigmoid,
    TopCovariance,
    Truncate,
    Weight,
)
from verl_plan import OLD, REDUCTIONS, actor_config, gates_of, thresholds_of, weights_of

core_algos = pytest.importorskip("verl.trainer.ppo.core_algos")
helper = pytest.importorskip("verl.trainer.ppo.rollout_corr_helper")

KEPT_MEAN = Aggregation("trace", "mean", "token", terms="kept")
ABOVE, BELOW = {"high": 0.28, "when": "A>0"}, {"low": -0.2, "when": "A<=0"}
OPTIONS = {
    "clip_cov": {"clip_cov_ratio": 0.1, "clip_cov_lb": 0.1, "clip_cov_ub": 2.0},
    "kl_cov": {"kl_cov_ratio": 0.1, "ppo_kl_coef": 0.3},
    "dro": {"dro_beta": 0.2},
}


def parts(loss: str, weighted: bool) -> tuple[dict, tuple[Weight, ...], tuple, tuple[Penalty, ...]]:
    """(surrogate and ratio, weights, gates, penalties) of a policy loss at the options above."""
    clip = {"surrogate": Clip(0.2, 0.28), "ratio": OLD}
    plain = {"surrogate": PolicyGradient()}
    truncated = (Weight(OLD, transform=Truncate(0.0, 3.0)),)
    extra = {"masked": True, "weighted": weighted}
    return {
        "vanilla": ({"surrogate": Clip(0.2, 0.28, dual=3.0), "ratio": OLD}, (), (), ()),
        "dppo_tv": (plain, truncated, (Rejection(OLD, "dprob", **ABOVE), Rejection(OLD, "dprob", **BELOW)), ()),
        "dppo_kl": (plain, truncated, (Rejection(OLD, "binary_kl", **ABOVE), Rejection(OLD, "binary_kl", **BELOW)), ()),
        "gspo": ({"surrogate": Clip(0.2, 0.28, level=KEPT_MEAN), "ratio": OLD}, (), (), ()),
        "sapo": ({"surrogate": Sigmoid(1.0, 1.05), "ratio": OLD}, (), (), ()),
        "gpg": (plain, (), (), ()),
        "clip_cov": (clip, (), (DropCovariance(0.1, 0.1, 2.0, "microbatch"),), ()),
        "kl_cov": (
            {"surrogate": Importance(), "ratio": OLD},
            (),
            (),
            (Penalty(OLD, "abs", 0.3, where=TopCovariance(0.1, "microbatch"), **extra),),
        ),
        "geo_mean": ({"surrogate": GeoClip(0.2, 0.28), "ratio": OLD}, (), (), ()),
        "dro": (plain, (), (), (Penalty(OLD, "k2", 0.2, **extra),)),
        "cispo": (plain, (Weight(OLD, transform=Truncate(0.8, 1.28)),), (), ()),
    }[loss]


LOSSES = ("vanilla", "dppo_tv", "dppo_kl", "gspo", "sapo", "gpg", "clip_cov", "kl_cov", "geo_mean", "dro", "cispo")


class Case(NamedTuple):
    loss: str
    mode: str
    rollout_is: str | None = None
    rollout_rs: str | None = None
    counts: str = "local"  # or "global": what verl's trainer passes as global_batch_info

    def __str__(self) -> str:
        return " ".join(filter(None, self))

    @property
    def objective(self) -> Objective:
        told, weights, gates, penalties = parts(self.loss, self.rollout_is is not None)
        reduce = REDUCTIONS["seq-mean-token-mean" if self.loss in ("sapo", "geo_mean") else self.mode]
        if self.counts == "local" and self.loss != "geo_mean" and reduce.per != "constant":
            reduce = replace(reduce, denominator="kept")
        rejected = gates_of(self.rollout_rs, thresholds_of(self.rollout_rs)) if self.rollout_rs else ()
        weights = weights_of(self.rollout_is) + weights
        return Objective(**told, weights=weights, rejections=rejected + gates, penalties=penalties, reduce=reduce)


def theirs(case: Case, data):
    """verl's loss and gradient, after its own rollout correction."""
    kept, weights = data["mask"], None
    if case.rollout_is or case.rollout_rs:
        weights, kept, _ = helper.compute_rollout_correction_and_rejection_mask(
            data["old"],
            data["rollout"],
            data["mask"],
            rollout_is=case.rollout_is,
            rollout_rs=case.rollout_rs,
            rollout_rs_threshold=thresholds_of(case.rollout_rs) if case.rollout_rs else None,
        )
        weights = None if weights is None else weights.batch["rollout_is_weights"]
    info = {}
    if case.counts == "global":
        info = {"batch_num_tokens": data["mask"].sum(), "global_batch_size": data["mask"].any(1).sum()}
    logprobs = data["logprobs"].clone().requires_grad_()
    config = actor_config(global_batch_info=info, **OPTIONS.get(case.loss, {}))
    loss, metrics = core_algos.get_policy_loss_fn(case.loss)(
        old_log_prob=data["old"],
        log_prob=logprobs,
        advantages=per_position(data["advantages"], logprobs),
        response_mask=kept,
        loss_agg_mode=case.mode,
        config=config,
        rollout_is_weights=weights,
    )
    loss.backward()
    return loss.detach(), logprobs.grad, kept, metrics


def possible(case: Case) -> bool:
    if case.loss in ("sapo", "geo_mean") and case.mode != "token-mean":
        return False  # it ignores the mode
    if case.loss == "geo_mean" and (case.rollout_is == "token" or case.rollout_rs == "token_k1"):
        return False  # see TestWhereVerlIsUndefined
    if case.counts == "global" and case.loss == "geo_mean":
        return False  # it ignores the counts
    mixed = case.loss == "sapo" or case.mode == "seq-mean-token-mean"
    return not (case.counts == "global" and mixed and case.rollout_rs == "token_k1")  # see TestWhereVerlIsUndefined


CASES = [
    case
    for loss, mode, level, rejection, counts in itertools.product(
        LOSSES, REDUCTIONS, (None, "token", "sequence"), (None, "token_k1", "seq_mean_k1"), ("local", "global")
    )
    if possible(case := Case(loss, mode, level, rejection, counts))
]


def branches(case: Case, data, found, kept) -> dict:
    per_term, told = found.per_term, {"RS drop": data["mask"] & ~kept}
    bad = (data["advantages"] < 0)[:, None] & data["mask"]
    good = (data["advantages"] > 0)[:, None] & data["mask"]
    if case.loss in ("vanilla", "gspo", "clip_cov", "geo_mean"):
        told[f"{case.loss} clip high"] = per_term.clipped & good
        told[f"{case.loss} clip low"] = per_term.clipped & bad & (per_term.ratio < 1)
    if case.loss == "vanilla":
        told["dual clip"] = per_term.clipped & bad & (per_term.ratio > 1)
    if case.loss in ("dppo_tv", "dppo_kl", "clip_cov"):
        told[f"{case.loss} drop"] = kept & ~per_term.keep
    if case.loss == "kl_cov":
        told["kl_cov penalty"] = per_term.penalty > 0
    if case.loss in ("dppo_tv", "dppo_kl", "cispo") and case.rollout_is is None:
        told[f"{case.loss} truncate"] = per_term.weight == (1.28 if case.loss == "cispo" else 3.0)
    return told


@pytest.mark.parametrize("place", range(len(CASES)), ids=lambda place: str(CASES[place]))
def test_loss_and_gradient_are_those_of_verl(close, fired, place):
    case, data = CASES[place], hard(place % 7)
    torch.manual_seed(place)
    loss, gradient, kept, _ = theirs(case, data)
    torch.manual_seed(place)
    found = run(case.objective, data, rows=case.loss == "geo_mean")
    # verl's 1e-8 in denominators, and in the weights of geo_mean 1e-10
    rtol = 1e-6 if case.loss == "geo_mean" else 1e-7
    close(f"verl {case.loss} loss", found.loss, loss, rtol, floor=0.1)
    close(f"verl {case.loss} gradient", found.gradient, gradient, rtol, floor=1e-5)
    fired("verl losses", branches(case, data, found, kept))


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("mode", ["token-mean", "seq-mean-token-mean"])
@pytest.mark.parametrize("loss", [loss for loss in LOSSES if loss != "geo_mean"])
def test_advantages_may_differ_within_a_trace(close, loss, mode, seed):
    case, data = Case(loss, mode, "token", "token_k1"), hard(seed)
    data["advantages"] = torch.randn(data["mask"].shape, generator=torch.Generator().manual_seed(seed)).double()
    torch.manual_seed(seed)
    value, gradient, _, _ = theirs(case, data)
    torch.manual_seed(seed)
    found = run(case.objective, data)
    close("verl with advantages per token, loss", found.loss, value, floor=0.1)
    close("verl with advantages per token, gradient", found.gradient, gradient, floor=1e-5)


@pytest.mark.parametrize("loss", LOSSES)
def test_in_float32_they_agree_to_float32(close, loss):
    case, data = Case(loss, "token-mean", "sequence", "seq_mean_k1"), hard(1, torch.float32)
    torch.manual_seed(0)
    value, gradient, _, _ = theirs(case, data)
    torch.manual_seed(0)
    found = run(case.objective, data, rows=loss == "geo_mean")
    close("verl losses, float32", found.loss, value, 1e-5, floor=0.1)
    close("verl gradients, float32", found.gradient, gradient, 1e-5, floor=1e-2)


@pytest.mark.parametrize("kind", ["k1", "kl", "abs", "mse", "k2", "low_var_kl", "k3", "k1+", "abs+", "k2+", "k3+"])
@pytest.mark.parametrize("seed", range(3))
def test_kl_penalties(close, fired, kind, seed):
    data = hard(seed)
    data["ref"][0, 0], data["logprobs"][0, 0] = -0.1, -6.0  # k3 beyond its cap of 10
    logprobs = data["logprobs"].clone().requires_grad_()
    theirs = core_algos.kl_penalty(logprobs, data["ref"], kind)
    core_algos.agg_loss(theirs, data["mask"], "token-mean").backward()
    name = {"kl": "k1", "mse": "k2", "low_var_kl": "k3"}.get(kind.rstrip("+"), kind.rstrip("+"))
    penalty = Penalty(
        Ratio("theta", "ref"),
        name,
        1.0,
        masked=False,
        weighted=False,
        straight_through=kind.endswith("+") and name != "k2",
        cap=10.0 if name == "k3" else None,
    )
    still = data | {"advantages": torch.zeros_like(data["advantages"])}
    found = run(Objective(PolicyGradient(), penalties=(penalty,)), still)
    close(f"verl {name}{'+' * kind.endswith('+')}", found.per_term.penalty[data["mask"]], theirs[data["mask"]])
    close(f"verl {name}{'+' * kind.endswith('+')} gradient", found.gradient, logprobs.grad)
    fired("verl losses", {"k3 cap": name == "k3" and (theirs[data["mask"]] == 10).any()} if name == "k3" else {})


class TestWhereVerlIsUndefined:
    def test_its_loss_is_nan_where_rejection_leaves_nothing_and_ours_zero(self):
        data = hard(0)
        data["old"] = data["rollout"] - 2.0
        case = Case("vanilla", "token-mean", None, "token_k1")
        loss, gradient, kept, _ = theirs(case, data)
        assert not kept.any()
        assert loss.isnan()
        assert (gradient == 0).all()
        found = run(case.objective, data)
        assert found.loss == 0
        assert (found.gradient == 0).all()

    @pytest.mark.parametrize("loss", LOSSES)
    def test_garbage_off_the_mask_leaves_ours_and_makes_most_of_its_gradients_nan(self, loss):
        case, data = Case(loss, "token-mean", "sequence", "seq_mean_k1"), hard(2)
        torch.manual_seed(0)
        clean = run(case.objective, data)
        torch.manual_seed(0)
        found = run(case.objective, spoilt(data))
        assert torch.equal(found.loss, clean.loss)
        assert torch.equal(found.gradient, clean.gradient)
        torch.manual_seed(0)
        survives = loss in ("vanilla", "gspo", "sapo", "gpg")
        assert theirs(case, spoilt(data))[1].isnan().any() != survives

    def test_with_global_counts_it_divides_a_row_by_what_rejection_left_of_it_and_ours_by_all(self):
        case, data = Case("gpg", "seq-mean-token-mean", None, "token_k1", "global"), hard(1)
        _, gradient, kept, _ = theirs(case, data)
        found = run(case.objective, data)
        share = kept.sum(1) / data["mask"].sum(1).clamp(min=1)
        torch.testing.assert_close(found.gradient, gradient * share[:, None], rtol=1e-6, atol=1e-12)

    def test_its_geo_mean_averages_token_weights_geometrically_and_ours_stay_per_term(self):
        case, data = Case("geo_mean", "token-mean", "token"), hard(1)
        _, gradient, _, _ = theirs(case, data)
        found = run(case.objective, data, rows=True)
        unweighted = run(Case("geo_mean", "token-mean").objective, data, rows=True)
        weight = found.corrected.weight.masked_fill(~data["mask"], 1).log().sum(1) / data["mask"].sum(1).clamp(min=1)
        torch.testing.assert_close(gradient, unweighted.gradient * weight.exp()[:, None], rtol=1e-5, atol=1e-12)
        assert not torch.allclose(gradient, found.gradient)

    def test_its_geo_mean_counts_rows_without_a_term(self):
        data = hard(1)
        _, gradient, _, _ = theirs(Case("geo_mean", "token-mean"), data)
        objective = Case("geo_mean", "token-mean").objective
        rows, traces = len(data["mask"]), data["mask"].any(1).sum()
        torch.testing.assert_close(run(objective, data).gradient * traces / rows, gradient, rtol=1e-7, atol=1e-12)


def test_aggregations_count_what_rejection_left_unless_the_trainer_says_otherwise():
    # 2 of 4 terms are rejected: verl's mean is over 2 locally, over 4 with the counts of the global batch.
    assert REDUCTIONS["token-mean"] == Reduce("token")
    losses, kept = torch.ones(2, 2), torch.tensor([[True, False], [True, False]])
    assert core_algos.agg_loss(losses, kept, "token-mean") == 1
    assert core_algos.agg_loss(losses, kept, "token-mean", batch_num_tokens=4) == 0.5


def test_every_branch_has_fired(fired):
    counts = fired("verl losses")
    if counts["RS drop"] < 100:
        pytest.skip("the other tests of this file have not run")
    assert {name for name, count in counts.items() if count == 0} == set()
    assert {"dual clip", "clip_cov drop", "kl_cov penalty", "k3 cap", "dppo_kl drop", "gspo clip low"} <= set(counts)
