"""Configs of other trainers as numbers: loss and gradient of a few tokens, worked out by hand."""

from math import log
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from padded import Outcome, run
from tracegrad import recipes
from tracegrad.objective import Objective, PolicyGradient, TopEntropy

ACTOR, CORRECTION = "actor_rollout_ref.actor.", "algorithm.rollout_correction."
CAP = "max_negative_advantage_importance_sampling_weight"


def row(objective: Objective, advantage: float, **logprobs: Any) -> Outcome:
    """Our loss of one trace, its tokens' logprobs by policy; the entropy is 1 at each."""
    data = {name: torch.tensor([each], dtype=torch.float64) for name, each in logprobs.items()}
    data["mask"] = torch.ones_like(data["logprobs"], dtype=torch.bool)
    advantages = torch.tensor([advantage], dtype=torch.float64)
    return run(objective, data | {"advantages": advantages, "entropy": torch.ones_like(data["logprobs"])})


KL = {f"{ACTOR}use_kl_loss": True, f"{ACTOR}kl_loss_coef": 0.3, f"{ACTOR}kl_loss_type": "mse"}


class TestVerl:
    def test_its_kl_loss_and_bonus_run_over_what_the_gates_of_its_loss_drop(self):
        # e^-0.3 - e^-1 = 0.37 > 0.2 drops the first token of dppo_tv: (1 + 1) / 3 is left of the loss. The KL loss is
        # 0.3 (1.2^2 + 0.5^2 + 0.5^2) / 6 over all three, 0.097, and the bonus, of entropies of 1, its coefficient.
        told = KL | {f"{ACTOR}policy_loss.loss_mode": "dppo_tv", f"{ACTOR}entropy_coeff": 0.06}
        still = [-1.0, -1.0, -1.0]
        objective = recipes.from_verl(told).objective
        found = row(objective, 1.0, logprobs=[-0.3, -1.0, -1.0], old=still, rollout=still, ref=[-1.5] * 3)
        assert found.loss.item() == pytest.approx(2 / 3 + 0.097 - 0.06)
        assert found.gradient[0].tolist() == pytest.approx([0.12, -1 / 3 + 0.05, -1 / 3 + 0.05])
        assert found.entropy_gradient[0].tolist() == pytest.approx([-0.02] * 3)

    def test_rejection_before_the_loss_takes_its_tokens_from_all_three(self):
        # old/rollout of e^2 is rejected: two tokens are left, and a third of nothing.
        told = KL | {f"{CORRECTION}rollout_rs": "token_k1", f"{CORRECTION}rollout_rs_threshold": 2.0}
        told |= {f"{CORRECTION}rollout_is": None, f"{ACTOR}entropy_coeff": 0.06}
        objective = recipes.from_verl(told).objective
        still = [-1.0, -1.0, -1.0]
        found = row(objective, 1.0, logprobs=still, old=still, rollout=[-3.0, -1.0, -1.0], ref=[-1.5] * 3)
        assert found.gradient[0].tolist() == pytest.approx([0.0, -0.5 + 0.075, -0.5 + 0.075])
        assert found.entropy_gradient[0].tolist() == pytest.approx([0.0, -0.03, -0.03])

    def test_rejection_of_bypass_mode_is_within_the_loss_and_leaves_the_two_others_whole(self):
        # theta/rollout of e^2 is rejected: the loss has tokens two and three, the KL loss and the bonus all three.
        told = KL | {f"{CORRECTION}rollout_rs": "token_k1", f"{CORRECTION}rollout_rs_threshold": 2.0}
        told |= {f"{CORRECTION}bypass_mode": True, f"{CORRECTION}rollout_is": None, f"{ACTOR}entropy_coeff": 0.06}
        for loss_type in ("ppo_clip", "reinforce"):
            objective = recipes.from_verl(told | {f"{CORRECTION}loss_type": loss_type}).objective
            recorded = [-3.0, -1.0, -1.0]
            found = row(objective, 1.0, logprobs=[-1.0] * 3, rollout=recorded, ref=[-1.5] * 3)
            assert found.gradient[0].tolist() == pytest.approx([0.05, -1 / 3 + 0.05, -1 / 3 + 0.05])
            assert found.entropy_gradient[0].tolist() == pytest.approx([-0.02] * 3)

    def test_geo_means_kl_loss_is_divided_by_what_rejection_left(self):
        told = KL | {f"{CORRECTION}rollout_rs": "token_k1", f"{CORRECTION}rollout_rs_threshold": 2.0}
        told |= {f"{CORRECTION}rollout_is": None, f"{ACTOR}policy_loss.loss_mode": "geo_mean"}
        still = [-1.0, -1.0, -1.0]
        objective = recipes.from_verl(told).objective
        found = row(objective, 0.0, logprobs=still, old=still, rollout=[-3.0, -1.0, -1.0], ref=[-1.5] * 3)
        assert found.gradient[0].tolist() == pytest.approx([0.0, 0.075, 0.075])  # 0.3 * 0.5 / 2 tokens


class TestArt:
    @pytest.mark.parametrize(
        ("told", "weights"),
        [
            ({"loss_fn": "ppo", "epsilon_high": 3.0, CAP: 1.5}, [0.0, 1.0]),  # held at 1.5 before both branches
            ({"loss_fn": "ppo", "epsilon_high": 3.0, CAP: 5.0}, [2.0, 1.0]),
            ({"mask_prob_ratio": True, CAP: 1.5}, [1.5, 1.0]),  # and before the window, which it then never leaves
            ({"mask_prob_ratio": True, "epsilon_high": 0.5, CAP: 5.0}, [0.0, 1.0]),
            ({"epsilon_high": 3.0, CAP: 1.5}, [1.5, 1.0]),
            ({CAP: 0.0}, [2.0, 1.0]),  # no cap, as for ART
        ],
    )
    def test_its_cap_holds_the_ratio_before_anything_else_looks_at_it(self, told, weights):
        # A = -1, ratios 2 and 1, over two tokens: the gradient is the weight over 2.
        objective = recipes.from_art(told).objective
        found = row(objective, -1.0, logprobs=[log(2) - 1, -1.0], rollout=[-1.0, -1.0], old=[-1.0, -1.0])
        assert found.gradient[0].tolist() == pytest.approx([weight / 2 for weight in weights])


class TestTrl:
    @pytest.mark.parametrize("terms", range(1, 60))
    def test_its_quantile_is_torchs_where_its_rank_is_whole_too(self, terms):
        # Of 11 terms 0.7 are 7: (1 - 0.7) 10 is 3, and torch's 0.3 is a float32 a hair above, so that value 3 falls.
        entropy = torch.rand(terms, generator=torch.Generator().manual_seed(terms))
        padded = torch.cat([entropy, torch.full((4,), float("nan"))])[None]
        data = {"logprobs": -torch.ones(1, terms + 4), "mask": ~padded.isnan(), "advantages": torch.ones(1)}
        for share in (0.05, 0.1, 0.2, 0.25, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9):
            objective = Objective(PolicyGradient(), rejections=(TopEntropy(share, "microbatch"),))
            kept = run(objective, data | {"entropy": padded}).per_term.keep[0, :terms]
            assert kept.tolist() == (entropy >= torch.quantile(entropy, 1 - share)).tolist(), share
