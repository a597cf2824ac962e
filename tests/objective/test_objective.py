"""objective: values worked by hand, the flags and values of each term, and what is refused."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from padded import NAN, hard, run, spoilt
from tracegrad.errors import ArgumentError
from tracegrad.objective import (
    Aggregation,
    Clip,
    EntropyBonus,
    Function,
    Objective,
    Penalty,
    PolicyGradient,
    Ratio,
    Reduce,
    Rejection,
    Sigmoid,
    Surrogate,
    Truncate,
    Weight,
    presets,
    with_kl,
)
from tracegrad.objective.correction import correct
from tracegrad.objective.torch_loss import Terms, evaluate, padded_loss

THETA_OLD = Ratio("theta", "old")
NP = np.array([-1.0])
WIDE = Clip(0.9, 30.0)  # no term outside the clip


@pytest.mark.parametrize(
    "level", [Aggregation(), Aggregation("trace", "mean"), Aggregation("trace", "mean", terms="kept")]
)
def test_nan_at_a_masked_term_reaches_neither_loss_nor_gradient(level):
    objective = with_kl(replace(presets.GRPO, surrogate=Clip(level=level)), 0.04)
    data = hard(5)
    clean, found = run(objective, data), run(objective, spoilt(data))
    assert torch.equal(found.loss, clean.loss)
    assert torch.equal(found.gradient, clean.gradient)
    assert (found.gradient[~data["mask"]] == 0).all()
    assert not any(getattr(found.per_term, name).isnan().any() for name in ("surrogate", "ratio", "penalty"))


def test_a_level_reaches_over_the_branches_and_turns_of_its_trace_wherever_they_stand():
    # log-ratios 0.1 0.2 | 0.4 in two turns of trace 7, 0.8 in trace 3; sums 0.7 and 0.8, by turn 0.3, 0.4 and 0.8
    logprobs = torch.tensor([0.1, 0.8, 0.2, 0.4]) - 1
    terms = Terms(
        old=torch.full((4,), -1.0),
        advantages=torch.ones(4),
        scale=torch.ones(4),
        trace=torch.tensor([7, 3, 7, 7]),
        turn=torch.tensor([0, 0, 0, 5]),
    )

    def ratios(level):
        return evaluate(Objective(replace(WIDE, level=level), THETA_OLD), logprobs, None, terms).per_term.ratio.log()

    torch.testing.assert_close(ratios(Aggregation("trace", "sum")), torch.tensor([0.7, 0.8, 0.7, 0.7]))
    torch.testing.assert_close(ratios(Aggregation("turn", "sum")), torch.tensor([0.3, 0.8, 0.3, 0.4]))
    torch.testing.assert_close(ratios(Aggregation("trace", "prefix_sum")), torch.tensor([0.1, 0.8, 0.3, 0.7]))
    torch.testing.assert_close(ratios(Aggregation("trace", "max")), torch.tensor([0.4, 0.8, 0.4, 0.4]))


def test_the_proximal_lies_between_the_recorded_and_the_trained_policy():
    # rollout -2, theta -1: alpha 0.25 gives -1.75, so theta/proximal = e^0.75 and proximal/rollout = e^0.25
    objective = Objective(WIDE, Ratio("theta", "proximal"), weights=(Weight(Ratio("proximal", "rollout")),))
    logprobs = torch.tensor([-1.0], requires_grad=True)
    terms = Terms(
        rollout=torch.tensor([-2.0]), alpha=torch.tensor([0.25]), advantages=torch.ones(1), scale=torch.ones(1)
    )
    found = evaluate(objective, logprobs, None, terms)
    found.loss.backward()
    assert found.per_term.ratio.item() == pytest.approx(np.exp(0.75))
    assert found.per_term.weight.item() == pytest.approx(np.exp(0.25))
    assert found.loss.item() == pytest.approx(-np.exp(1.0))
    assert logprobs.grad.item() == pytest.approx(-np.exp(1.0))  # the proximal is held constant


def test_a_step_without_a_kept_term_has_loss_zero_and_a_gradient_of_zeros():
    logprobs = torch.tensor([NAN, NAN], requires_grad=True)
    nothing = torch.zeros(2)
    terms = Terms(old=nothing, advantages=nothing + 1, scale=nothing, keep=nothing.bool())
    found = presets.VERL_DEFAULT(logprobs, None, terms)
    found.loss.backward()
    assert found.loss.item() == 0.0
    assert logprobs.grad.tolist() == [0.0, 0.0]


@pytest.mark.parametrize(("kind", "expected"), [("k1", 0.5), ("k2", 0.125), ("k3", float(np.exp(-0.5)) - 1 + 0.5)])
def test_each_penalty_is_its_formula(kind, expected):
    penalty = Penalty(Ratio("theta", "ref"), kind, 2.0, masked=True, weighted=False)
    terms = Terms(ref=torch.tensor([-1.5]), advantages=torch.zeros(1), scale=torch.ones(1))
    found = evaluate(Objective(PolicyGradient(), penalties=(penalty,)), torch.tensor([-1.0]), None, terms)
    assert found.loss.item() == pytest.approx(2 * expected, rel=1e-6)
    assert found.per_term.penalty.item() == pytest.approx(2 * expected, rel=1e-6)


def test_a_penalty_and_a_bonus_run_over_what_all_gates_left_or_the_detached_ones_or_over_all():
    # Three terms of l = 1 and entropy 1; before the step the first was dropped, now the second, its probability up by
    # e^-0.3 - e^-1 = 0.37 > 0.2. Coefficients 1 and 10, scale 1: the sums are 1 or 10 for each term that is left.
    moved = Rejection(Ratio("theta", "old"), "dprob", high=0.2)
    terms = Terms(
        old=torch.tensor([-1.0, -1.0, -0.3]),
        ref=torch.full((3,), -1.3),
        advantages=torch.zeros(3),
        scale=torch.ones(3),
        keep=torch.tensor([False, True, True]),
    )

    def loss(gated):
        penalty = Penalty(Ratio("theta", "ref"), "k1", 1.0, masked=gated, weighted=False)
        parts = {"penalties": (penalty,), "entropy": EntropyBonus(10.0, masked=gated)}
        return evaluate(
            Objective(Clip(), THETA_OLD, (), (moved,), **parts), torch.full((3,), -0.3), torch.ones(3), terms
        )

    found = {gated: loss(gated) for gated in (False, "detached", True)}
    assert {gated: each.per_term.penalty.sum().item() for gated, each in found.items()} == pytest.approx(
        {False: 3.0, "detached": 2.0, True: 1.0}
    )
    assert {gated: each.loss.item() for gated, each in found.items()} == pytest.approx(
        {False: -27.0, "detached": -18.0, True: -9.0}
    )


def test_terms_of_padded_data_are_shaped_as_correct_takes_them():
    # Two rows of two; log theta/old of 1 at each: a row is a trace, and [B] arrays are of rows.
    old, mask, advantages = (
        torch.full((2, 2), -2.0),
        torch.tensor([[True, True], [True, False]]),
        torch.tensor([1.0, 2.0]),
    )
    group, logprobs = torch.tensor([5, 5]), torch.full((2, 2), -1.0)
    objective = Objective(replace(WIDE, level=Aggregation("trace", "sum")), THETA_OLD, reduce=Reduce("prompt", "mean"))
    fixed = correct(old, None, mask=mask, advantages=advantages, group=group, **objective.plan)
    terms = Terms(old=old, advantages=advantages, group=group, scale=fixed.scale)
    assert terms.trace.tolist() == [[0, 0], [1, 1]]
    found = objective(logprobs, None, terms)
    assert found.per_term.ratio[mask].log().tolist() == pytest.approx([2.0, 2.0, 1.0])
    assert found.loss.item() == pytest.approx(-(2 * np.exp(2) + 2 * np.exp(1)) / 3)  # one prompt of three terms
    short = padded_loss(objective, logprobs, mask=mask, advantages=advantages, old=old, group=group)
    assert short.loss.item() == found.loss.item()
    with pytest.raises(ArgumentError, match=r"TG-OBJ-046.*terms\.group.*3.*2"):
        objective(logprobs, None, replace(terms, group=torch.zeros(3)))


def test_bf16_logprobs_are_computed_in_float32():
    terms = Terms(advantages=torch.ones(1), scale=torch.ones(1))
    assert presets.WEIGHTED_SFT(torch.tensor([-1.0], dtype=torch.bfloat16), None, terms).loss.dtype == torch.float32


def test_what_is_missing_or_misshapen_is_named():
    one = torch.ones(1)
    with pytest.raises(ArgumentError, match="TG-OBJ-004"):
        presets.VERL_DEFAULT(one, None, Terms(advantages=one, scale=one))
    with pytest.raises(ArgumentError, match="TG-OBJ-004"):
        with_kl(presets.WEIGHTED_SFT, 0.1)(one, None, Terms(advantages=one, scale=one))
    with pytest.raises(ArgumentError, match=r"TG-OBJ-046.*terms\.scale.*2.*1"):
        presets.GRPO(one, None, Terms(old=one, advantages=one, scale=torch.ones(2)))


def test_parts_that_were_evaluated_before_the_step_cannot_be_left_out_of_the_terms():
    one, known = torch.ones(1), {"advantages": torch.ones(1), "scale": torch.ones(1), "old": -torch.ones(1)}
    weighed = Objective(Clip(), THETA_OLD, weights=(Weight(Ratio("old", "rollout"), transform=Truncate(0, 2)),))
    with pytest.raises(ArgumentError, match=r"TG-OBJ-045.*clamp\(w.*0.*2.*w"):
        weighed(-one, None, Terms(**known))
    gated = Objective(Clip(), THETA_OLD, rejections=(Rejection(Ratio("old", "rollout"), high=2.0),))
    with pytest.raises(ArgumentError, match=r"TG-OBJ-045.*ratio\(old/rollout.*<=.*2.*Terms\(keep="):
        gated(-one, None, Terms(**known))
    # A ratio of 1 and A = 1: the loss is -weight.
    assert weighed(-one, None, Terms(**known, weight=2 * one)).loss.item() == -2.0
    assert gated(-one, None, Terms(**known, keep=one.bool())).loss.item() == -1.0
    on_theta = Objective(Clip(), THETA_OLD, rejections=(Rejection(THETA_OLD, high=2.0),))
    assert on_theta(-one, None, Terms(**known)).loss.item() == -1.0  # evaluated here: nothing is missing


@pytest.mark.parametrize("kind", [Clip, PolicyGradient, Sigmoid])
def test_a_surrogate_below_a_known_one_runs_its_own_formula_and_inherits_no_promise(kind):
    mine = type("Mine", (kind,), {"loss": lambda self, view: 7 * view.logprobs})()
    objective = Objective(mine, None if kind is PolicyGradient else THETA_OLD)
    one = torch.ones(1)
    assert objective(-one, None, Terms(old=-one, advantages=one, scale=one)).loss.item() == -7.0
    assert (objective.locality, objective.requirements.trace_ratio, objective.microbatch_components) == (
        "batch",
        True,
        (str(mine),),
    )
    assert objective.requirements.zero_advantage_reason
    assert objective.requirements.dropped_reason
    assert objective.requirements.zero_weight_reason
    assert Objective(kind(), objective.ratio).locality == "term"


def test_what_is_no_surrogate_is_refused_and_not_taken_for_a_clip():
    with pytest.raises(ArgumentError, match=r"TG-ARGS-012.*Objective\.surrogate.*SimpleNamespace"):
        Objective(SimpleNamespace(level=Aggregation()), THETA_OLD)
    with pytest.raises(ArgumentError, match=r"TG-OBJ-015.*Mine"):
        Objective(type("Mine", (Surrogate,), {})())


@pytest.mark.parametrize(
    ("value", "found"), [(lambda view: view.logprobs.sum(), r"\(\)"), (lambda view: 1.0, "float"), (repr, "str")]
)
def test_a_loss_that_is_not_one_value_for_each_term_is_refused(value, found):
    terms = Terms(advantages=torch.ones(2), scale=torch.ones(2))
    with pytest.raises(ArgumentError, match=rf"TG-OBJ-044.*{found}"):
        Objective(value)(torch.zeros(2), None, terms)


@pytest.mark.parametrize("keep", [False, True])
def test_a_missing_logprob_has_one_rule_in_surrogates_gates_weights_and_penalties(keep):
    """log theta/old = 1 and, where nothing is recorded, 3: means of 1 where it is masked, of 2 where it is neutral."""
    mean, neutral = Aggregation("trace", "mean"), np.exp(2.0 if keep else 1.0)
    terms = Terms(
        old=torch.tensor([-4.0, -6.0]),
        rollout=torch.tensor([-4.0, NAN]),
        ref=torch.tensor([-4.0, -4.0]),
        advantages=torch.ones(2),
        scale=torch.tensor([1.0, 1.0]),
        keep=torch.tensor([True, keep]),
        trace=torch.zeros(2, dtype=torch.long),
    )

    def first(objective):
        return evaluate(objective, torch.tensor([-3.0, -3.0]), None, terms).per_term

    assert first(Objective(Clip(level=mean), THETA_OLD)).ratio[0].item() == pytest.approx(neutral)
    weighed = Objective(PolicyGradient(), weights=(Weight(THETA_OLD, mean),))
    assert first(weighed).weight[0].item() == pytest.approx(neutral)
    gated = Objective(PolicyGradient(), rejections=(Rejection(THETA_OLD, "k1", mean, high=1.5),))
    assert first(gated).keep[0].item() is not keep
    kl = {"masked": False, "weighted": False, "importance": THETA_OLD, "importance_level": mean}
    penalised = Objective(PolicyGradient(), penalties=(Penalty(Ratio("theta", "ref"), "k1", 1.0, **kl),))
    assert first(penalised).penalty.tolist() == pytest.approx([neutral, neutral])  # a KL is of every term


def test_a_loss_that_reads_a_ratio_is_told_where_it_comes_from():
    terms = Terms(advantages=torch.ones(1), scale=torch.ones(1))
    with pytest.raises(ArgumentError, match="TG-OBJ-002"):
        Objective(lambda view: -view.ratio)(torch.zeros(1), None, terms)
    with pytest.raises(ArgumentError, match="TG-OBJ-004"):
        Objective(lambda view: view.logprob("ref", view.keep))(torch.zeros(1), None, terms)
    with pytest.raises(ArgumentError, match=r"TG-ARGS-011.*Function\.reads.*reference"):
        Function(len, reads=("reference",))
    with pytest.raises(ArgumentError, match=r"TG-ARGS-011.*Mine\.locality.*token"):
        type("Mine", (Surrogate,), {}, locality="token")


def test_what_the_core_evaluates_must_be_of_a_type_that_it_knows():
    ratio, mismatch = Ratio("theta", "rollout"), Ratio("old", "rollout")
    for said, make in {
        "weights": lambda: Objective(PolicyGradient(), weights=(type("Mine", (Weight,), {})(mismatch),)),
        "rejections": lambda: Objective(
            PolicyGradient(), rejections=(type("Mine", (Rejection,), {})(mismatch, high=2.0),)
        ),
        "reduce": lambda: Objective(PolicyGradient(), reduce=type("Mine", (Reduce,), {})()),
        "Weight.transform": lambda: Weight(mismatch, transform=type("Mine", (Truncate,), {})()),
        "a weight": lambda: correct(NP, NP, trace=[0], weights=[type("Mine", (Weight,), {})(mismatch)]),
        "a rejection": lambda: correct(
            NP, NP, trace=[0], rejections=[type("Mine", (Rejection,), {})(mismatch, high=2.0)]
        ),
    }.items():
        with pytest.raises(ArgumentError, match=rf"TG-OBJ-001.*{said}"):
            make()
    with pytest.raises(ArgumentError, match=r"TG-ARGS-012.*Clip"):
        Objective(PolicyGradient(), weights=(Clip(),))
    twice = type("Twice", (Truncate,), {"apply": lambda self, log_ratio: 2 * log_ratio.exp()})()
    objective = Objective(PolicyGradient(), weights=(Weight(ratio, transform=twice),))
    one = torch.ones(1)
    found = objective(-one, None, Terms(rollout=-one, advantages=one, scale=one))
    assert found.per_term.weight.item() == 2.0  # theta stands in it, so that its own formula runs


@pytest.mark.parametrize(
    "clip", [Clip(), Clip(dual=1.5), Clip(dual=3.0), Clip(delta=1.1), Clip(delta=3.0), Clip(0.0, 0.0), Clip(1.0, 4.0)]
)
def test_a_term_is_flagged_exactly_where_the_clip_leaves_it_no_gradient(clip):
    """By autograd of the surrogate itself, over ratios from e^-2 to e^2 on both sides of every bound."""
    log_ratio = torch.linspace(-2, 2, 401, dtype=torch.float64).repeat(2) + 1e-9
    advantages = torch.tensor([1.5, -0.5], dtype=torch.float64).repeat_interleave(401)
    logprobs = (log_ratio - 3).requires_grad_()
    terms = Terms(old=torch.full((802,), -3.0).double(), advantages=advantages, scale=torch.ones(802).double())
    gate = Rejection(THETA_OLD, high=1.01)  # drops half of them, and takes none of the flags back
    free, gated = (evaluate(Objective(clip, THETA_OLD, rejections=g), logprobs, None, terms) for g in ((), (gate,)))
    free.loss.backward()
    assert torch.equal(free.per_term.clipped, logprobs.grad == 0)
    assert torch.equal(gated.per_term.clipped, free.per_term.clipped)
    assert torch.equal(gated.per_term.ratio, free.per_term.ratio)
    assert not gated.per_term.keep.all()
    assert (gated.per_term.surrogate[~gated.per_term.keep] == 0).all()
