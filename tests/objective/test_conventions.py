"""The conventions in which peers differ without saying so, each pinned down as a sentence."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from padded import hard, run
from tracegrad import recipes
from tracegrad.errors import ArgumentError
from tracegrad.objective import (
    Aggregation,
    Clip,
    Objective,
    PolicyGradient,
    Ratio,
    Rejection,
    Truncate,
    Weight,
    presets,
)
from tracegrad.objective.correction import correct
from tracegrad.objective.torch_loss import Terms, evaluate

OLD, MISMATCH, DIRECT = Ratio("theta", "old"), Ratio("old", "rollout"), Ratio("theta", "rollout")


def kept_at(ratios, gate):
    """Which of these values of old/rollout a gate keeps, each in a trace of its own."""
    old = np.full(len(ratios), -3.0)
    return correct(old, old - np.log(ratios), trace=np.arange(len(ratios)), rejections=[gate]).keep.tolist()


class TestVerlsK1BoundsTheInverseRatio:
    # "0.5_3" in verl keeps rollout/old in [0.5, 3], that is old/rollout in [1/3, 2]
    ratios = (0.3, 0.4, 1.0, 1.9, 2.5, 3.5)

    def test_the_same_numbers_mean_another_band_in_nemo_rl_skyrl_and_here(self):
        assert kept_at(self.ratios, Rejection(MISMATCH, low=0.5, high=3.0)) == [False, False, True, True, True, False]

    def test_inverted_they_are_verls(self):
        inverted = kept_at(self.ratios, Rejection(MISMATCH, low=1 / 3.0, high=1 / 0.5))
        assert inverted == [False, True, True, True, False, False]
        helper = pytest.importorskip("verl.trainer.ppo.rollout_corr_helper")
        log_ratio = torch.tensor(self.ratios, dtype=torch.float64).log()[:, None]
        kept, _ = helper.compute_rollout_rejection_mask(log_ratio, torch.ones(6, 1).bool(), "token_k1", "0.5_3")
        assert kept[:, 0].tolist() == inverted


class TestWhereEverythingIsRejected:
    def test_loss_and_gradient_are_zero_and_so_is_the_effective_sample_size(self):
        data = hard(0)
        data["old"] = data["rollout"] - 3.0
        objective = replace(presets.ICEPOP, rejections=presets.GEO_RS.rejections)
        found = run(objective, data)
        assert found.loss == 0
        assert (found.gradient == 0).all()
        assert not found.per_term.keep.any()
        weights = correct(data["old"], data["rollout"], mask=data["mask"], weights=presets.ICEPOP.weights)
        assert (weights.weight == 0).all()

    def test_also_where_the_kept_terms_are_the_denominator(self):
        data = hard(0)
        data["old"] = data["rollout"] - 3.0
        found = run(recipes.find("VERL_DECOUPLED_GEO_RS").objective, data)
        assert found.loss == 0
        assert (found.gradient == 0).all()


class TestTheSameMismatchIsCorrectedOnce:
    @pytest.mark.parametrize(
        ("surrogate", "ratio", "weights"),
        [
            (Clip(), DIRECT, (Weight(MISMATCH),)),  # bypass mode's clip with its own weights
            (Clip(), OLD, (Weight(MISMATCH), Weight(MISMATCH, Aggregation("trace", "sum")))),
            (PolicyGradient(), None, (Weight(DIRECT), Weight(MISMATCH))),  # SkyRL's cispo_anchor="rollout" with TIS
            (PolicyGradient(), None, (Weight(DIRECT), Weight(DIRECT))),  # ART's truncation on its own ratio
        ],
    )
    def test_ratios_that_do_not_telescope_are_refused(self, surrogate, ratio, weights):
        with pytest.raises(ArgumentError, match="TG-OBJ-018"):
            Objective(surrogate, ratio, weights)

    def test_gates_are_no_factors(self):
        gates = (Rejection(MISMATCH, high=2.0), Rejection(MISMATCH, level=Aggregation("trace", "mean"), high=1.01))
        assert Objective(Clip(), OLD, (Weight(MISMATCH),), gates).weights


def test_cispo_has_no_lower_bound_and_a_default_of_a_clip_is_not_its_own():
    bound = presets.CISPO.weights[-1].transform
    assert (bound.low, bound.high) == (0.0, 5.0)
    # verl's default of 0.2 on both sides lifts a ratio of 0.1 to 0.8; the paper leaves it
    terms = Terms(old=torch.zeros(1), advantages=torch.ones(1), scale=torch.ones(1))
    logprobs = torch.tensor([0.1]).log()
    for shape, expected in ((bound, 0.1), (Truncate(0.8, 1.2), 0.8)):
        objective = Objective(PolicyGradient(), weights=(Weight(OLD, transform=shape),))
        assert evaluate(objective, logprobs, None, terms).per_term.weight.item() == pytest.approx(expected)


@pytest.mark.parametrize("preset", ["DPPO_TV", "DPPO_KL", "PRIME_RL_DEFAULT"])
def test_an_advantage_of_zero_takes_dppos_low_branch_which_changes_what_is_counted_and_no_loss(preset):
    # p - q = 0.05 - 0.5 is below -0.2, so the term is dropped where A = 0; A * r is 0 there anyway
    objective = replace(presets.find(preset), penalties=())
    logprobs = torch.tensor([0.05]).log().requires_grad_()
    terms = Terms(rollout=torch.tensor([0.5]).log(), advantages=torch.zeros(1), scale=torch.ones(1))
    found = evaluate(objective, logprobs, None, terms)
    found.loss.backward()
    assert found.per_term.keep.tolist() == [False]
    assert found.loss == 0
    assert logprobs.grad.item() == 0
    bad = replace(terms, advantages=-torch.ones(1))
    assert evaluate(objective, logprobs, None, bad).per_term.keep.tolist() == [False]
    good = replace(terms, advantages=torch.ones(1))
    assert evaluate(objective, logprobs, None, good).per_term.keep.tolist() == [True]
