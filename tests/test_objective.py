"""objective: losses and gradients against TRL's own code, finite differences, and the laws of a step."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from peer_code import trl_importance_ratio, trl_loss
from tracegrad import presets
from tracegrad.algebra import Clip, Level, Objective, Penalty, PolicyGradient, Ratio, Reduce, with_kl
from tracegrad.correction import correct
from tracegrad.errors import ArgumentError
from tracegrad.objective import Terms, evaluate

NAN = float("nan")
THETA_OLD = Ratio("theta", "old")


def padded(seed=0, rows=6, width=11, dtype=torch.float64):
    """[B, S] logprobs of all policies with tool holes, a single-token row, outliers and NaN off the mask."""
    generator = torch.Generator().manual_seed(seed)

    def draw(scale):
        return scale * torch.randn(rows, width, generator=generator, dtype=dtype)

    rollout = -draw(1.0).abs() - 0.05
    old = rollout + draw(0.4)
    logprobs, ref = old + draw(0.3), old + draw(0.3)
    mask = torch.rand(rows, width, generator=generator) > 0.3
    mask[0], mask[1] = False, True
    mask[0, 4] = True
    old[1, 2], logprobs[2, 3] = rollout[1, 2] + 9.0, old[2, 3] + 4.0  # far outside every bound
    mask[2, 3] = True
    advantages = torch.linspace(-1.5, 2.0, rows, dtype=dtype)
    advantages[3] = 0.0
    return {"logprobs": logprobs, "old": old, "rollout": rollout, "ref": ref, "mask": mask, "advantages": advantages}


def ours(objective, data, missing="mask"):
    """Loss and gradient through correct() and the objective, as a trainer with padded tensors would call them."""
    logprobs = data["logprobs"].clone().requires_grad_()
    direct = objective.ratio == Ratio("theta", "rollout")
    corrected = correct(
        None if direct else data["old"],
        data["rollout"] if objective.needs.rollout else None,
        mask=data["mask"],
        advantages=data["advantages"],
        weights=objective.weights,
        gates=objective.gates,
        reduce=objective.reduce,
        missing=missing,
    )
    terms = Terms(
        old=data["old"],
        rollout=data["rollout"],
        ref=data["ref"],
        advantages=data["advantages"][:, None].expand_as(logprobs),
        weight=corrected.weight,
        keep=corrected.keep,
        scale=corrected.scale,
        trace=torch.arange(len(logprobs))[:, None].expand_as(logprobs),
    )
    found = objective(logprobs, None, terms)
    found.loss.backward()
    return found, logprobs.grad


TRL_CASES = {
    "grpo": (presets.GRPO, {"loss_type": "grpo"}),
    "dapo": (presets.DAPO, {"loss_type": "dapo", "epsilon_high": 0.28}),
    "bnpo on one micro-batch": (presets.DAPO, {"loss_type": "bnpo", "epsilon_high": 0.28}),
    "dr_grpo": (presets.DR_GRPO, {"loss_type": "dr_grpo", "max_completion_length": 1024}),
}


@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize("beta", [0.0, 0.04])
@pytest.mark.parametrize("tis", [True, False])
@pytest.mark.parametrize("case", list(TRL_CASES))
def test_loss_and_gradient_are_those_of_trl(case, tis, beta, seed):
    preset, config = TRL_CASES[case]
    objective = with_kl(preset if tis else replace(preset, weights=()), beta)
    data = padded(seed)
    inputs = {
        "completion_mask": data["mask"].long(),
        "advantages": data["advantages"],
        "old_per_token_logps": data["old"],
        "ref_per_token_logps": data["ref"],
    }
    if tis:
        inputs["importance_sampling_ratio"] = trl_importance_ratio(
            data["old"], data["rollout"], data["mask"].long(), "token_truncate", clip_max=2.0
        )
    logprobs = data["logprobs"].clone().requires_grad_()
    theirs = trl_loss(logprobs, inputs, beta=beta, **config)
    theirs.backward()
    found, gradient = ours(objective, data)
    torch.testing.assert_close(found.loss, theirs, rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(gradient, logprobs.grad, rtol=1e-12, atol=1e-14)
    assert found.per_term.clipped[data["mask"]].any()


@pytest.mark.parametrize("seed", [0, 1])
def test_a_trace_level_ratio_with_gradient_through_the_mean_is_trls_sequence_level(seed):
    objective = Objective(Clip(0.02, 0.03, level=Level("trace", "mean")), THETA_OLD, reduce=Reduce("trace", "mean"))
    data = padded(seed)
    logprobs = data["logprobs"].clone().requires_grad_()
    inputs = {
        "completion_mask": data["mask"].long(),
        "advantages": data["advantages"],
        "old_per_token_logps": data["old"],
    }
    theirs = trl_loss(
        logprobs, inputs, loss_type="grpo", importance_sampling_level="sequence", epsilon=0.02, epsilon_high=0.03
    )
    theirs.backward()
    found, gradient = ours(objective, data)
    torch.testing.assert_close(found.loss, theirs, rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(gradient, logprobs.grad, rtol=1e-12, atol=1e-14)


def test_trl_takes_a_missing_logprob_as_neutral():
    data = padded(4)
    data["rollout"][1, 5] = NAN
    ratio = trl_importance_ratio(data["old"], data["rollout"], data["mask"].long(), "token_truncate", clip_max=2.0)
    logprobs = data["logprobs"].clone().requires_grad_()
    inputs = {
        "completion_mask": data["mask"].long(),
        "advantages": data["advantages"],
        "old_per_token_logps": data["old"],
        "importance_sampling_ratio": ratio,
    }
    trl_loss(logprobs, inputs, loss_type="dapo", epsilon_high=0.28).backward()
    torch.testing.assert_close(ours(presets.DAPO, data, "neutral")[1], logprobs.grad, rtol=1e-12, atol=1e-14)
    assert ours(presets.DAPO, data, "mask")[1][1, 5] == 0


WIDE = Clip(0.9, 30.0)  # no term on an edge of the clip, where there is no derivative


def smooth():
    """Terms whose ratios lie inside WIDE, for derivatives."""
    data = padded(3, rows=4, width=6)
    data["old"] = data["rollout"] - 0.02
    data["logprobs"] = data["rollout"] + 0.02 * data["ref"]
    return data


@pytest.mark.parametrize(
    "objective",
    [
        with_kl(presets.WEIGHTED_SFT, 0.1),
        *(
            with_kl(replace(preset, surrogate=replace(WIDE, level=level)), 0.1)
            for preset in (presets.GRPO, presets.DAPO_DIRECT)
            for level in (Level(), Level("trace", "sum"), Level("trace", "mean"), Level("trace", "max"))
        ),
    ],
)
def test_the_gradient_is_that_of_finite_differences(objective):
    data, step = smooth(), 1e-6
    _, gradient = ours(objective, data)
    for at in data["mask"].nonzero():
        shifted = []
        for sign in (1, -1):
            moved = dict(data, logprobs=data["logprobs"].clone())
            moved["logprobs"][tuple(at)] += sign * step
            shifted.append(ours(objective, moved)[0].loss.item())
        assert gradient[tuple(at)].item() == pytest.approx((shifted[0] - shifted[1]) / (2 * step), rel=1e-6, abs=1e-9)


def test_a_token_gradient_gives_each_term_that_of_its_own_surrogate():
    # d(-A s)/dlogp_t = -A s where s is held at its value: one factor, not the mean's 1 / length.
    level = Level("trace", "mean", "token")
    objective = Objective(replace(WIDE, level=level), THETA_OLD, reduce=Reduce("token"))
    data = smooth()
    found, gradient = ours(objective, data)
    through, _ = ours(replace(objective, surrogate=replace(WIDE, level=Level("trace", "mean"))), data)
    torch.testing.assert_close(found.loss, through.loss, rtol=1e-14, atol=0)
    expected = found.per_term.surrogate / data["mask"].sum() * data["mask"]
    torch.testing.assert_close(gradient, expected, rtol=1e-12, atol=1e-15)


SPLIT_CASES = [
    with_kl(presets.GRPO, 0.04),
    presets.DAPO_DIRECT,
    presets.DR_GRPO,
    replace(presets.GRPO, reduce=Reduce("trace", "mean", denominator="kept")),
    replace(presets.GRPO, reduce=Reduce("group", "mean")),
    replace(presets.GRPO, reduce=Reduce("prompt", "mean")),
    presets.WEIGHTED_SFT,
]


@settings(max_examples=60, deadline=None)
@given(
    objective=st.sampled_from(SPLIT_CASES),
    cut=st.lists(st.integers(0, 4), min_size=40, max_size=40),
    seed=st.integers(0, 10**6),
)
def test_the_losses_of_any_split_sum_to_the_loss_of_the_step(objective, cut, seed):
    generator = torch.Generator().manual_seed(seed)
    size = len(cut)
    rollout = -torch.rand(size, generator=generator, dtype=torch.float64)
    rollout[::7] = NAN
    old = -torch.rand(size, generator=generator, dtype=torch.float64)
    arrays = {
        "old": old,
        "rollout": rollout,
        "ref": old - 0.1,
        "advantages": torch.randn(size, generator=generator, dtype=torch.float64),
        "trace": torch.randint(0, 9, (size,), generator=generator),
    }
    corrected = correct(
        None if objective.ratio == Ratio("theta", "rollout") else old,
        rollout if objective.needs.rollout else None,
        trace=arrays["trace"],
        group=arrays["trace"] // 3,
        weights=objective.weights,
        reduce=objective.reduce,
    )
    arrays |= {"weight": corrected.weight, "keep": corrected.keep, "scale": corrected.scale}
    start = -torch.rand(size, generator=generator, dtype=torch.float64)

    whole = start.clone().requires_grad_()
    total = evaluate(objective, whole, None, Terms(**arrays)).loss
    total.backward()
    pieces = start.clone().requires_grad_()
    summed = 0.0
    for batch in range(5):
        here = torch.tensor(cut) == batch
        loss = evaluate(objective, pieces[here], None, Terms(**{k: v[here] for k, v in arrays.items()})).loss
        loss.backward()  # an empty batch is connected too
        summed += loss.item()
    assert summed == pytest.approx(total.item(), rel=1e-12, abs=1e-13)
    torch.testing.assert_close(pieces.grad, whole.grad, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("level", [Level(), Level("trace", "mean"), Level("trace", "mean", terms="kept")])
def test_nan_at_a_masked_term_reaches_neither_loss_nor_gradient(level):
    objective = with_kl(replace(presets.GRPO, surrogate=Clip(level=level)), 0.04)
    data = padded(5)
    clean, gradient = ours(objective, data)
    dirty = {name: value.clone() for name, value in data.items()}
    for name in ("logprobs", "old", "rollout", "ref"):
        dirty[name][~data["mask"]] = NAN
    found, dirty_gradient = ours(objective, dirty)
    assert found.loss.item() == clean.loss.item()
    assert torch.equal(dirty_gradient, gradient)
    assert (dirty_gradient[~data["mask"]] == 0).all()
    assert not any(getattr(found.per_term, name).isnan().any() for name in ("surrogate", "ratio", "penalty"))


def test_a_step_without_a_kept_term_has_loss_zero_and_a_gradient_of_zeros():
    logprobs = torch.tensor([NAN, NAN], requires_grad=True)
    nothing = torch.zeros(2)
    terms = Terms(old=nothing, advantages=nothing + 1, scale=nothing, keep=nothing.bool())
    found = presets.GRPO(logprobs, None, terms)
    found.loss.backward()
    assert found.loss.item() == 0.0
    assert logprobs.grad.tolist() == [0.0, 0.0]


def test_the_clipped_flag_knows_the_sign_of_the_advantage():
    # ratios e^0.5 = 1.65 and e^-0.5 = 0.61 against [0.8, 1.2]: only where the clip takes the gradient away
    logprobs = torch.tensor([-0.5, -0.5, -1.5, -1.5])
    ones = torch.ones(4)
    terms = Terms(old=-ones, advantages=torch.tensor([1.0, -1.0, 1.0, -1.0]), scale=ones)
    found = evaluate(Objective(Clip(), THETA_OLD), logprobs, None, terms).per_term
    assert found.clipped.tolist() == [True, False, False, True]
    torch.testing.assert_close(found.surrogate, torch.tensor([-1.2, 0.5**-0.7213475, -(0.5**0.7213475), 0.8]))


def test_dual_clip_bounds_the_loss_of_a_bad_token():
    # ratio e^2 = 7.39, A = -1: the loss would be 7.39 and stops at 3
    logprobs = torch.tensor([-1.0], requires_grad=True)
    terms = Terms(old=torch.tensor([-3.0]), advantages=torch.tensor([-1.0]), scale=torch.ones(1))
    found = evaluate(Objective(Clip(dual=3.0), THETA_OLD), logprobs, None, terms)
    found.loss.backward()
    assert found.loss.item() == 3.0
    assert found.per_term.clipped.item()
    assert logprobs.grad.item() == 0.0


@pytest.mark.parametrize(("kind", "expected"), [("k1", 0.5), ("k2", 0.125), ("k3", float(np.exp(-0.5)) - 1 + 0.5)])
def test_each_penalty_is_its_formula(kind, expected):
    penalty = Penalty(Ratio("theta", "ref"), kind, 2.0, gated=True, weighted=False)
    terms = Terms(ref=torch.tensor([-1.5]), advantages=torch.zeros(1), scale=torch.ones(1))
    found = evaluate(Objective(PolicyGradient(), penalties=(penalty,)), torch.tensor([-1.0]), None, terms)
    assert found.loss.item() == pytest.approx(2 * expected, rel=1e-6)
    assert found.per_term.penalty.item() == pytest.approx(2 * expected, rel=1e-6)


def test_a_penalty_says_whether_gates_and_weights_touch_it():
    # l = 1 at both terms, the first dropped, the second with weight 3, coefficient 1, scale 1
    def loss(gated, weighted):
        penalty = Penalty(Ratio("theta", "ref"), "k1", 1.0, gated=gated, weighted=weighted)
        terms = Terms(
            old=torch.zeros(2),
            ref=torch.full((2,), -1.0),
            advantages=torch.zeros(2),
            scale=torch.ones(2),
            weight=torch.tensor([3.0, 3.0]),
            keep=torch.tensor([False, True]),
        )
        objective = replace(presets.GRPO, penalties=(penalty,))
        return evaluate(objective, torch.zeros(2), None, terms).loss.item()

    assert [loss(False, False), loss(True, False), loss(False, True), loss(True, True)] == [2.0, 1.0, 6.0, 3.0]


def test_bf16_logprobs_are_computed_in_float32():
    terms = Terms(advantages=torch.ones(1), scale=torch.ones(1))
    assert presets.WEIGHTED_SFT(torch.tensor([-1.0], dtype=torch.bfloat16), None, terms).loss.dtype == torch.float32


def test_what_is_missing_or_misshapen_is_named():
    one = torch.ones(1)
    with pytest.raises(ArgumentError, match="needs old of every term"):
        presets.GRPO(one, None, Terms(advantages=one, scale=one))
    with pytest.raises(ArgumentError, match="needs ref of every term"):
        with_kl(presets.WEIGHTED_SFT, 0.1)(one, None, Terms(advantages=one, scale=one))
    with pytest.raises(ArgumentError, match=r"terms.scale is \(2,\) but logprobs are \(1,\)"):
        presets.GRPO(one, None, Terms(old=one, advantages=one, scale=torch.ones(2)))
