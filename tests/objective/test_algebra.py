"""algebra: what can be said, what is refused and why, and fields changed by their names."""

import math
from dataclasses import replace

import pytest
import torch

import tracegrad.objective
from tracegrad.errors import ArgumentError
from tracegrad.objective import (
    AdaptiveEntropy,
    AdvantageShift,
    Aggregation,
    Clip,
    CrossEntropy,
    DropCovariance,
    EntropyBonus,
    Gamma,
    Identity,
    MaskOutside,
    Objective,
    Penalty,
    PolicyGradient,
    Ratio,
    Reduce,
    Regression,
    Rejection,
    RejectionBudget,
    Requirements,
    Terms,
    TopEntropy,
    Truncate,
    Weight,
    override,
    override_all,
    presets,
    with_kl,
)
from tracegrad.objective.serialize import from_source, to_source

MISMATCH = Ratio("old", "rollout")
OLD, DIRECT = Ratio("theta", "old"), Ratio("theta", "rollout")
TIS = Weight(MISMATCH, transform=Truncate(0.0, 2.0))


@pytest.mark.parametrize(
    "objective",
    [
        Objective(PolicyGradient()),
        Objective(Clip(), OLD),
        Objective(Clip(), OLD, weights=(TIS,)),
        Objective(Clip(), DIRECT),
        Objective(Clip(), DIRECT, rejections=(Rejection(MISMATCH, high=2.0),)),
        Objective(PolicyGradient(), weights=(TIS,)),
    ],
)
def test_products_that_telescope_are_accepted(objective):
    assert objective.reduce == Reduce("token")


@pytest.mark.parametrize(
    ("ratio", "weights", "product"),
    [
        (DIRECT, (TIS,), "theta/rollout * old/rollout"),
        (OLD, (TIS, TIS), "theta/old * old/rollout * old/rollout"),
        (OLD, (TIS, Weight(MISMATCH, when="A<0")), "theta/old * old/rollout * old/rollout"),
        (DIRECT, (Weight(MISMATCH, when="A>0"),), "theta/rollout * old/rollout"),
    ],
)
def test_double_correction_is_refused_for_each_sign_of_the_advantage(ratio, weights, product):
    with pytest.raises(ArgumentError, match="TG-OBJ-018") as caught:
        Objective(Clip(), ratio, weights=weights)
    assert str(caught.value).startswith(f"TG-OBJ-018: {product}")


def test_weights_on_opposite_signs_do_not_multiply():
    Objective(
        Clip(), OLD, weights=(Weight(MISMATCH, when="A>0"), Weight(MISMATCH, transform=Truncate(0, 1), when="A<=0"))
    )
    with pytest.raises(ArgumentError, match="TG-OBJ-018"):
        Objective(Clip(), OLD, weights=(Weight(MISMATCH, when="A>=0"), Weight(MISMATCH, when="A<=0")))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Ratio("old", "old"), "TG-OBJ-028"),
        (lambda: Ratio("theta", "behaviour"), r"TG-ARGS-011.*Ratio\.den.*behaviour"),
        (lambda: Aggregation("token", "sum"), r"TG-ARGS-013.*Aggregation\.reduce"),
        (lambda: Aggregation("token", terms="kept"), r"TG-ARGS-013.*Aggregation\.terms"),
        (lambda: Aggregation("trace"), r"TG-ARGS-011"),
        (lambda: Aggregation("word", "sum"), r"TG-ARGS-011.*Aggregation\.over.*word"),
        (lambda: Aggregation("batch", "prefix_sum"), r"TG-ARGS-011.*Aggregation\.reduce.*prefix_sum"),
        (lambda: Aggregation("trace", "sum", scope="microbatch"), r"TG-ARGS-013.*Aggregation\.scope"),
        (lambda: Truncate(3.0, 2.0), r"TG-ARGS-014.*3\.0.*2\.0"),
        (lambda: MaskOutside(5.0, 0.5), r"TG-ARGS-014.*5\.0.*0\.5"),
        (lambda: Weight(DIRECT, normalize=True), "TG-OBJ-053"),
        (lambda: Weight(DIRECT, Aggregation("batch", "mean")), "TG-OBJ-029: Weight"),
        (lambda: Weight(MISMATCH, Aggregation("batch", "mean", scope="microbatch")), r"TG-ARGS-013.*step"),
        (lambda: Weight(DIRECT, transform=Gamma(2.0, -1.0)), r"TG-OBJ-050.*Gamma\.rate.*-1\.0"),
        (lambda: Weight(MISMATCH, transform=Gamma(2.0, 3.0), absorbs=True), r"TG-ARGS-013.*Weight\.absorbs"),
        (lambda: Weight(DIRECT, absorbs=True), "TG-OBJ-054"),
        (lambda: Truncate(-0.2, 0.2), "TG-ARGS-016"),
        (lambda: Truncate(0.0, 0.28), r"TG-ARGS-015.*1"),
        (lambda: MaskOutside(0.1, 0.3), r"TG-ARGS-015.*1"),
        (lambda: Weight(MISMATCH, Aggregation("trace", "mean", "token")), r"TG-ARGS-013.*Weight\.level\.grad"),
        (lambda: Weight(MISMATCH, when="A<0", normalize=True), "TG-OBJ-052"),
        (lambda: Weight(MISMATCH, when="negative"), r"TG-ARGS-011.*Weight\.when"),
        (lambda: Rejection(MISMATCH), "TG-OBJ-032"),
        (lambda: Rejection(MISMATCH, low=2.0, high=0.5), r"TG-ARGS-014.*2\.0.*0\.5"),
        (lambda: Rejection(MISMATCH, high=2.0, terms="kept"), r"TG-ARGS-013.*Rejection\.terms"),
        (
            lambda: Rejection(MISMATCH, "k1", Aggregation("trace", "sum"), high=1.0, drops="turn"),
            r"TG-ARGS-013.*Rejection\.drops",
        ),
        (
            lambda: Rejection(MISMATCH, "k1", Aggregation("trace", "sum", terms="kept"), high=1.0),
            r"TG-ARGS-013.*Rejection\.level\.terms",
        ),
        (lambda: Rejection(OLD, high=2.0, drops="group"), "TG-OBJ-031"),
        (lambda: Rejection(OLD, "k1", Aggregation("batch", "mean"), high=2.0), "TG-OBJ-029: Rejection"),
        (lambda: Rejection(MISMATCH, "ratio", high=0.2), r"TG-ARGS-015.*1"),
        (lambda: Rejection(MISMATCH, "k1", low=0.8, high=1.2), r"TG-ARGS-015.*k1.*difference"),
        (lambda: Rejection(MISMATCH, "k3", low=0.1), r"TG-ARGS-013.*k3.*never"),
        (lambda: Rejection(MISMATCH, "square", high=0.0), r"TG-ARGS-017.*square.*0"),
        (lambda: RejectionBudget(OLD), r"TG-OBJ-033.*theta/old"),
        (lambda: TopEntropy(0.2, "step"), r"TG-ARGS-011.*TopEntropy\.scope.*step"),
        (lambda: TopEntropy(1.0, "microbatch"), "TG-OBJ-035"),
        (lambda: Clip(0.8, 1.28), r"TG-OBJ-039.*0\.2.*2\.28.*Clip\(0\.2.*0\.28"),
        (lambda: Clip(dual=3.0, delta=4.0), "TG-OBJ-041"),
        (lambda: Reduce("constant"), "TG-OBJ-030"),
        (lambda: AdvantageShift(MISMATCH, 0.1), "TG-OBJ-025"),
        (lambda: EntropyBonus(-0.1, masked=False), "TG-OBJ-023"),
        (lambda: EntropyBonus(0.1, masked="kept"), r"TG-ARGS-011.*EntropyBonus\.masked.*kept"),
        (lambda: EntropyBonus(0.1, masked="detached", adapt=AdaptiveEntropy()), "TG-OBJ-024"),
        (
            lambda: Penalty(Ratio("theta", "ref"), "k3", 0.1, masked="all", weighted=False),
            r"TG-ARGS-011.*Penalty\.masked.*all",
        ),
        (lambda: Objective(CrossEntropy(), shifts=(AdvantageShift(OLD, 0.1),)), r"TG-ARGS-013.*read"),
        (lambda: Objective(Regression(), DIRECT, weights=(TIS,)), "TG-OBJ-042"),
        (lambda: Objective(Clip(level=Aggregation("batch", "mean")), OLD), "TG-OBJ-017"),
        (
            lambda: Objective(Clip(), OLD, rejections=(Rejection(OLD, high=2.0), Rejection(MISMATCH, high=2.0))),
            "TG-OBJ-019",
        ),
        (lambda: Objective(PolicyGradient(), rejections=(DropCovariance(0.1, 1.0, 5.0, "microbatch"),)), "TG-OBJ-034"),
        (lambda: Clip(low=-0.2), "TG-OBJ-037"),
        (lambda: Clip(low=1.2), "TG-OBJ-038"),
        (lambda: Clip(dual=0.5), "TG-OBJ-040"),
        (lambda: Penalty(Ratio("ref", "theta"), "k3", 0.1, masked=True, weighted=False), "TG-OBJ-021"),
        (
            lambda: Penalty(Ratio("theta", "ref"), "k4", 0.1, masked=True, weighted=False),
            r"TG-ARGS-011.*Penalty\.kind.*k4",
        ),
        (lambda: Penalty(Ratio("theta", "ref"), "k3", 0.0, masked=True, weighted=False), "TG-ARGS-017"),
        (lambda: Reduce("token", "mean"), r"TG-ARGS-013.*Reduce\.inner"),
        (lambda: Reduce("trace", "mean", norm=10.0), r"TG-ARGS-013.*Reduce\.norm"),
        (lambda: Reduce("trace", "sum", norm=0.0), "TG-ARGS-017"),
        (lambda: Reduce("trace"), r"TG-ARGS-011.*Reduce\.inner"),
        (lambda: Objective(PolicyGradient(), OLD), r"TG-ARGS-013.*PolicyGradient.*ratio"),
        (lambda: Objective(Clip()), "TG-OBJ-016"),
        (lambda: Objective(Clip(), MISMATCH), "TG-OBJ-016"),
        (
            lambda: Objective(Clip(), OLD, penalties=(Penalty(Ratio("theta", "ref"), "k3", 0.1, True, True),)),
            r"TG-ARGS-013.*Penalty\.weighted",
        ),
        (
            lambda: Objective(
                Clip(),
                OLD,
                penalties=(Penalty(Ratio("theta", "ref"), "k3", 0.1, False, False),),
                reduce=Reduce("token", denominator="kept"),
            ),
            "TG-OBJ-014",
        ),
    ],
)
def test_what_contradicts_itself_or_has_no_effect_is_refused(make, message):
    with pytest.raises(ArgumentError, match=message):
        make()


def test_needs_say_what_to_compute():
    assert Objective(PolicyGradient()).requirements == Requirements(
        old=False, rollout=False, ref=False, trace_ratio=False
    )
    assert Objective(Clip(), DIRECT).requirements == Requirements(old=False, rollout=True, ref=False, trace_ratio=False)
    gspo = Objective(Clip(3e-4, 4e-4, level=Aggregation("trace", "mean")), OLD, weights=(TIS,))
    assert with_kl(gspo, 0.1).requirements == Requirements(old=True, rollout=True, ref=True, trace_ratio=True)


def test_an_objective_says_what_depends_on_the_cut_of_a_step():
    assert [name for name in presets.__all__ if getattr(getattr(presets, name), "microbatch_components", ())] == [
        "CLIP_COV",
        "KL_COV",
    ]
    part = Weight(DIRECT, Aggregation("batch", "mean", scope="microbatch"))
    assert Objective(PolicyGradient(), weights=(part,)).microbatch_components == (str(part),)
    centred = AdvantageShift(OLD, 0.1, "microbatch")
    assert Objective(Clip(), OLD, shifts=(centred,)).microbatch_components == (str(centred),)


def test_neutral_is_refused_where_rollout_is_trained_against():
    Objective(Clip(), OLD, weights=(TIS,)).check_missing("ratio_one")
    Objective(Clip(), DIRECT).check_missing("mask")
    with pytest.raises(ArgumentError, match="TG-OBJ-020"):
        Objective(Clip(), DIRECT).check_missing("ratio_one")
    with pytest.raises(ArgumentError, match=r"TG-ARGS-011.*missing.*drop"):
        Objective(Clip(), DIRECT).check_missing("drop")


class TestOverride:
    objective = Objective(Clip(), OLD, weights=(TIS,))

    @pytest.mark.parametrize(
        ("name", "value", "read"),
        [
            ("surrogate.high", "0.28", lambda o: o.surrogate.high == 0.28),
            ("surrogate.high", 1, lambda o: o.surrogate.high == 1.0 and type(o.surrogate.high) is float),
            ("surrogate.dual", "3", lambda o: o.surrogate.dual == 3.0),
            ("weights.0.transform.high", "5", lambda o: o.weights[0].transform == Truncate(0.0, 5.0)),
            ("weights.0.normalize", "true", lambda o: o.weights[0].normalize is True),
            ("weights", "none", lambda o: o.weights == ()),
            ("reduce.denominator", "kept", lambda o: o.reduce.denominator == "kept"),
            ("kl", "0.04", lambda o: [p.coef for p in o.penalties] == [0.04]),
        ],
    )
    def test_a_field_is_changed_by_its_name(self, name, value, read):
        changed = override(self.objective, name, value)
        assert read(changed)
        assert not read(self.objective)

    def test_none_takes_an_optional_value_back(self):
        dual = override(self.objective, "surrogate.dual", 3.0)
        assert override(dual, "surrogate.dual", "none") == self.objective

    def test_several_changes_are_checked_together(self):
        changed = override_all(self.objective, {"reduce.per": "trace", "reduce.inner": "sum", "reduce.norm": "256"})
        assert changed.reduce == Reduce("trace", "sum", norm=256.0)
        with pytest.raises(ArgumentError, match=r"TG-ARGS-011.*Reduce\.inner"):
            override(self.objective, "reduce.per", "trace")

    def test_the_direct_form_is_two_overrides(self):
        changed = override_all(self.objective, {"ratio.den": "rollout", "weights": "none"})
        assert changed == Objective(Clip(), DIRECT)
        with pytest.raises(ArgumentError, match="TG-OBJ-018"):
            override(self.objective, "ratio.den", "rollout")

    def test_an_entropy_bonus_is_one_number(self):
        changed = override(self.objective, "entropy", "0.01")
        assert changed.entropy == EntropyBonus(0.01, masked=False)
        assert override(changed, "entropy.coef", 0.02).entropy.coef == 0.02
        assert override(changed, "entropy", 0) == self.objective

    def test_a_penalty_over_the_vocabulary_is_the_only_reader_of_ref(self):
        changed = override_all(self.objective, {"kl_over": "vocabulary", "kl": "0.04"})
        assert changed.penalties == (replace(with_kl(self.objective, 0.04).penalties[0], over="vocabulary"),)
        assert from_source(to_source(changed), vars(tracegrad.objective)) == changed
        assert "over the vocabulary" in str(changed)
        assert changed.requirements.ref_over == "vocabulary"
        assert override(changed, "kl_over", "support") == with_kl(self.objective, 0.04)
        with pytest.raises(ArgumentError, match="TG-ARGS-013"):
            override(self.objective, "kl_over", "vocabulary")
        with pytest.raises(ArgumentError, match="TG-ARGS-011"):
            override(changed, "kl_over", "nucleus")
        with pytest.raises(ArgumentError, match="TG-OBJ-056"):
            Penalty(OLD, "k2", 0.1, masked=False, weighted=False, over="vocabulary")
        for readers in (
            {"penalties": (*changed.penalties, *with_kl(self.objective, 0.1).penalties)},
            {"shifts": (AdvantageShift(Ratio("theta", "ref"), 0.1),)},
            {"rejections": (Rejection(Ratio("theta", "ref"), high=2.0),)},
            {"penalties": (replace(changed.penalties[0], importance=Ratio("theta", "ref")),)},
        ):
            with pytest.raises(ArgumentError, match="TG-OBJ-057"):
                replace(changed, **readers)

    def test_logprobs_over_the_vocabulary_are_read_by_that_penalty_alone(self):
        objective = override_all(Objective(PolicyGradient()), {"kl": "0.5", "kl_over": "vocabulary"})
        assert objective.penalties[0].kind == "k3"
        logprobs, whole = (torch.tensor([value], requires_grad=True) for value in (-1.0, -3.0))
        terms = Terms(advantages=torch.tensor([2.0]), scale=torch.tensor([1.0]), ref=torch.tensor([-3.0 - math.log(2)]))
        loss = objective(logprobs, None, terms, vocabulary_logprobs=whole).loss
        # -A logp, and half of exp(-l) - 1 + l with l = log 2.
        assert loss.item() == pytest.approx(2.0 + 0.5 * (0.5 - 1 + math.log(2)))
        by = torch.autograd.grad(loss, [logprobs, whole])
        assert [each.item() for each in by] == pytest.approx([-2.0, 0.5 * (1 - 0.5)])
        with pytest.raises(ArgumentError, match="TG-OBJ-055"):
            objective(logprobs, None, terms, vocabulary_logprobs=torch.zeros(2))

    def test_kl_zero_takes_the_penalty_out(self):
        assert override(with_kl(self.objective, 0.1), "kl", "0") == self.objective
        assert with_kl(with_kl(self.objective, 0.1), 0.2).penalties[0].coef == 0.2

    @pytest.mark.parametrize(
        ("name", "value", "message"),
        [
            ("surogate.high", "1", r"TG-CONFIG-001.*objective\.surogate\.high.*objective\.surrogate\.high"),
            ("surrogate.hi", "1", r"TG-CONFIG-001.*objective\.surrogate\.hi.*objective\.surrogate\.high"),
            (
                "weights.1.transform.high",
                "1",
                r"TG-CONFIG-001.*objective\.weights\.1\.transform\.high.*objective\.weights\.0\.transform\.high",
            ),
            ("surrogate", "Clip", r"TG-CONFIG-003.*objective\.surrogate.*Clip.*objective\.surrogate\.low"),
            ("surrogate.high.x", "1", r"TG-CONFIG-001.*objective\.surrogate\.high\.x"),
            ("surrogate.high", "wide", r"TG-CONFIG-003.*objective\.surrogate\.high.*wide"),
            ("surrogate.dual", "wide", r"TG-CONFIG-003.*objective\.surrogate\.dual.*wide"),
            ("weights.0.normalize", "yes", r"TG-CONFIG-003.*objective\.weights\.0\.normalize.*yes"),
            ("reduce.per", "word", r"TG-CONFIG-003.*objective\.reduce\.per.*word.*token.*trace"),
            ("rejections", 3, r"TG-CONFIG-003.*objective\.rejections is 3.*none"),
        ],
    )
    def test_a_wrong_name_or_value_is_told_with_the_right_ones(self, name, value, message):
        with pytest.raises(ArgumentError, match=message):
            override(self.objective, name, value)


def test_values_compare_and_hash():
    assert Weight(MISMATCH, transform=Identity()) == Weight(MISMATCH)
    assert len({Objective(Clip(), OLD), Objective(Clip(), OLD), Objective(Clip(), DIRECT)}) == 2
