"""TRL over several micro-batches, its experimental trainers, and where its numbers are undefined."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from trl.experimental.a2po import A2POTrainer
from trl.experimental.gmpo.gmpo_config import GMPOConfig
from trl.experimental.gmpo.gmpo_trainer import GMPOTrainer

from padded import NAN, hard, run, spoilt
from peer_code import trl_importance_ratio, trl_loss, trl_loss_of, trl_trainer
from tracegrad.errors import ArgumentError
from tracegrad.objective import (
    EntropyBonus,
    GeoClip,
    Objective,
    Ratio,
    Reduce,
    Regression,
    TopEntropy,
    Truncate,
    Weight,
    presets,
)
from trl_loss_cases import LOSSES, MISMATCH, OLD, PRODUCT, Case, given, theirs


def cut(data, rows):
    return {name: value[rows] for name, value in data.items()}


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("loss", [loss for loss in LOSSES if loss != "bnpo"])
def test_two_accumulated_micro_batches_are_our_step(close, loss, seed):
    case, data = Case(loss, mode="token_truncate", kl="corrected"), hard(seed)
    terms = data["mask"].sum()
    total, gradients = 0.0, []
    for rows in (slice(0, 4), slice(4, 8)):
        part = cut(data, rows)
        logprobs = part["logprobs"].clone().requires_grad_()
        inputs = given(case, part) | {"num_items_in_batch": terms}
        found = trl_loss(logprobs, inputs, part["entropy"], accumulation=2, **case.config)
        found.backward()
        total, gradients = total + found.item(), [*gradients, logprobs.grad]
    whole = run(case.objective, data, rows=True)
    close("TRL over two micro-batches, loss", whole.loss, total)
    close("TRL over two micro-batches, gradient", whole.gradient, torch.cat(gradients))


@pytest.mark.parametrize("seed", range(3))
def test_bnpo_is_a_mean_within_each_micro_batch(seed):
    """Ours is over the step, so it equals TRL's on one micro-batch only."""
    data = hard(seed)
    halves = [theirs(Case("bnpo"), cut(data, rows))[0] for rows in (slice(0, 2), slice(2, 8))]
    counts = [data["mask"][rows].sum() for rows in (slice(0, 2), slice(2, 8))]
    ours = run(Case("bnpo").objective, data).loss
    step = sum(loss * count for loss, count in zip(halves, counts, strict=True)) / sum(counts)
    torch.testing.assert_close(ours, step, rtol=1e-10, atol=0)
    assert abs(ours - sum(halves) / 2) > 1e-6


@pytest.mark.parametrize("seed", range(5))
def test_the_entropy_bonus_of_selected_terms_differs_by_its_denominator(close, seed):
    """TRL divides the bonus by the terms that the entropy selector left; our denominators are counted before it."""
    case, data = Case("dapo", share=0.4, coef=0.05), hard(seed)
    loss, gradient, entropy_gradient = theirs(case, data)
    plain = run(Case("dapo", share=0.4).objective, data)
    left = plain.per_term.keep.sum() / data["mask"].sum()
    bonus = EntropyBonus(0.05 / left.item(), masked=True)
    found = run(replace(case.objective, entropy=bonus), data)
    close("TRL entropy bonus on selected terms", found.loss, loss)
    close("TRL entropy bonus on selected terms", found.gradient, gradient)
    close("TRL entropy bonus on selected terms", found.entropy_gradient, entropy_gradient)


class TestExperimental:
    @pytest.mark.parametrize("seed", range(7))
    @pytest.mark.parametrize("beta", [0.0, 0.04])
    def test_gmpo(self, close, beta, seed):
        data = hard(seed)
        logprobs = data["logprobs"].clone().requires_grad_()
        trainer = trl_trainer(GMPOTrainer, GMPOConfig, beta=beta)
        theirs = trl_loss_of(trainer, logprobs, given(Case("grpo"), data), data["entropy"])
        theirs.backward()
        preset = replace(presets.GMPO, weights=())
        found = run(presets.with_kl(preset, beta), data, rows=True)
        empty = data["advantages"][~data["mask"].any(1)]  # its loss, not its gradient, counts -A of rows without a term
        close("TRL GMPO loss", found.loss, theirs.detach() + empty.sum() / len(data["mask"]))
        close("TRL GMPO gradient", found.gradient, logprobs.grad)
        assert isinstance(preset.surrogate, GeoClip)
        assert found.per_term.clipped.any()

    @pytest.mark.parametrize("seed", range(7))
    @pytest.mark.parametrize("share", [0.8, 0.4, 0.05])
    def test_gmpo_over_the_terms_that_the_quantile_leaves(self, close, share, seed):
        """A trace of which it leaves nothing has the ratio 1 and no gradient, there and here."""
        data = hard(seed)
        logprobs = data["logprobs"].clone().requires_grad_()
        trainer = trl_trainer(GMPOTrainer, GMPOConfig, top_entropy_quantile=share)
        theirs = trl_loss_of(trainer, logprobs, given(Case("grpo"), data), data["entropy"])
        theirs.backward()
        preset = replace(presets.GMPO, weights=(), surrogate=GeoClip(0.4, 0.4, TopEntropy(share, "microbatch")))
        found = run(preset, data, rows=True)
        empty = data["advantages"][~data["mask"].any(1)]
        close("TRL GMPO with a quantile, loss", found.loss, theirs.detach() + empty.sum() / len(data["mask"]))
        close("TRL GMPO with a quantile, gradient", found.gradient, logprobs.grad)
        assert (found.gradient[data["mask"]] == 0).any()
        assert preset.requirements.entropy
        assert preset.locality == "batch"

    @pytest.mark.parametrize("seed", range(3))
    def test_a2po(self, close, seed):
        """Its reference model takes the place of the recorded policy."""
        data = hard(seed)
        data["mask"][1, 2] = True
        logprobs = data["logprobs"].clone().requires_grad_()
        sums = (logprobs * data["mask"]).sum(1)
        advantages = data["advantages"]
        trainer = SimpleNamespace(
            args=SimpleNamespace(beta2=1e-3),
            model=SimpleNamespace(training=True),
            _get_sequence_logps=lambda *_: sums,
            _metrics={"train": {"implicit_reward": [], "advantage": []}},
        )
        inputs = {
            "input_ids": None,
            "attention_mask": None,
            "logits_to_keep": None,
            "ref_logps": (data["ref"] * data["mask"]).sum(1),
            "rewards": advantages + 0.25,
            "v_star": torch.full_like(advantages, 0.25),
        }
        theirs = A2POTrainer.compute_loss(trainer, None, inputs)
        theirs.backward()
        objective = Objective(Regression(1e-3), Ratio("theta", "rollout"), reduce=Reduce("trace", "mean"))
        found = run(objective, data | {"rollout": data["ref"]})
        close("TRL A2PO loss", found.loss, theirs.detach())
        close("TRL A2PO gradient", found.gradient, logprobs.grad)


class TestWhereTrlIsUndefined:
    @pytest.mark.parametrize("loss", LOSSES)
    def test_garbage_off_the_mask_makes_its_loss_nan_and_leaves_ours(self, loss):
        case, data = Case(loss, mode="token_truncate", kl="corrected"), hard(2)
        dirty = spoilt(data)
        assert theirs(case, dirty)[0].isnan()
        clean, found = run(case.objective, data), run(case.objective, dirty)
        assert torch.equal(found.loss, clean.loss)
        assert torch.equal(found.gradient, clean.gradient)

    def test_a_ratio_beyond_float_range_makes_its_loss_infinite_and_ours_large(self):
        data = hard(0, torch.float32)
        data["logprobs"][0, 3], data["old"][0, 3], data["advantages"][0] = -0.01, -120.0, -1.0
        assert theirs(Case("grpo"), data)[0].isinf()
        found = run(Case("grpo").objective, data)
        assert found.loss.isfinite()
        assert found.gradient.isfinite().all()
        assert found.per_term.surrogate.max().item() == pytest.approx(float(torch.tensor(20.0).exp()))

    @pytest.mark.parametrize("loss", LOSSES)
    def test_a_batch_without_a_term_has_loss_zero_in_both(self, loss):
        data = hard(1)
        data["mask"][:] = False
        assert theirs(Case(loss), data)[0] == 0
        found = run(Case(loss).objective, data)
        assert found.loss == 0
        assert (found.gradient == 0).all()

    def test_it_gives_an_unknown_term_its_rows_product_and_we_give_it_one(self):
        data = hard(3)
        data["rollout"][0, 0] = NAN
        ratio = trl_importance_ratio(data["old"], data["rollout"], data["mask"].long(), "sequence_truncate", clip_max=3)
        weights = (Weight(MISMATCH, PRODUCT, Truncate(0.0, 3.0)),)
        objective = Objective(Case("dapo").objective.surrogate, OLD, weights)
        ours = run(objective, data, missing_logprobs="ratio_one").corrected.weight
        torch.testing.assert_close(ours[0, 1:], ratio.expand_as(ours)[0, 1:], rtol=1e-12, atol=0)
        assert ours[0, 0] == 1
        assert ratio[0] != 1

    def test_it_counts_an_unknown_difference_as_zero_in_the_mean_of_opsm(self):
        # Two terms, rollout/theta e^0.3 at one and unknown at the other: TRL's mean is 0.15, ours 0.3.
        data = hard(0)
        data["mask"][:] = False
        data["mask"][0, :2], data["advantages"][0] = True, -1.0
        data["rollout"][0, :2] = torch.tensor([-0.2, NAN])
        data["old"][0, :2] = data["logprobs"][0, :2] = torch.tensor([-0.5, -0.5])
        case = Case("dapo", mode="token_truncate", opsm=0.2)
        assert theirs(case, data)[1][0, 0] != 0
        assert not run(case.objective, data, missing_logprobs="ratio_one").per_term.keep.any()
        assert run(case._replace(opsm=0.31).objective, data, missing_logprobs="ratio_one").per_term.keep[0, :2].all()


def test_its_cispo_bound_is_the_ratio_itself_so_its_default_bounds_nothing_from_above():
    # epsilon_high None is epsilon, 0.2: every ratio above 0.2 weighs 0.2
    data = hard(2)
    gradient = theirs(Case("cispo"), data)[1]
    logprobs = data["logprobs"].clone().requires_grad_()
    trl_loss(logprobs, given(Case("cispo"), data), data["entropy"], loss_type="cispo").backward()
    near = data["mask"] & ((data["logprobs"] - data["old"]).abs() < 0.1) & (data["advantages"] != 0)[:, None]
    ratio = (data["logprobs"] - data["old"]).exp()
    torch.testing.assert_close(logprobs.grad[near] * ratio[near], 0.2 * gradient[near], rtol=1e-10, atol=0)
    with pytest.raises(ArgumentError, match="TG-ARGS-015"):
        Weight(OLD, transform=Truncate(0.0, 0.2))


@pytest.mark.parametrize("seed", range(5))
def test_its_selector_with_share_zero_keeps_the_highest_entropy_only(close, seed):
    case, data = Case("dapo", share=0.0), hard(seed)
    data["entropy"] = data["entropy"].float().double()  # both take the quantile in float32
    loss, gradient, _ = theirs(case, data)
    found = run(case.objective, data)
    assert (gradient != 0).sum() <= 1
    assert found.per_term.keep.sum() == 1
    close("TRL entropy selector of share 0", found.loss, loss)
    close("TRL entropy selector of share 0", found.gradient, gradient)
