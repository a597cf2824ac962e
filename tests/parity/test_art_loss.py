"""ART's `loss_fn` beside ours: its two losses, four ratio levels, shifts of the advantage, masks and truncation."""

import itertools
from dataclasses import replace
from typing import Any, NamedTuple

import pytest
import torch

from padded import hard, per_position, run
from tracegrad.errors import ArgumentError
from tracegrad.objective import (
    AdvantageShift,
    Aggregation,
    Clip,
    MaskOutside,
    Objective,
    PolicyGradient,
    Ratio,
    Reduce,
    Rejection,
    Truncate,
    Weight,
    presets,
)

art = pytest.importorskip("art.loss")
from art_loss_cases import shifted

DIRECT, OLD, MISMATCH = Ratio("theta", "rollout"), Ratio("theta", "old"), Ratio("old", "rollout")
LEVELS = {
    "token": Aggregation(),
    "sequence": Aggregation("trace", "mean"),
    "average": Aggregation("trace", "mean", blend="arithmetic"),
    "geometric_average": Aggregation("trace", "mean", blend="geometric"),
}


class Case(NamedTuple):
    ppo: bool
    level: str = "token"
    cap: float | None = None  # max_negative_advantage_importance_sampling_weight
    masked: bool = False  # mask_prob_ratio
    tau: float | None = None
    kl: float = 0.0
    truncation: float | None = None
    epsilon: float | None = None
    epsilon_high: float | None = None

    def __str__(self) -> str:
        return " ".join(f"{name} {value}" for name, value in self._asdict().items() if value)

    @property
    def config(self) -> dict[str, Any]:
        names = {
            "ppo": self.ppo,
            "importance_sampling_level": self.level,
            "max_negative_advantage_importance_sampling_weight": self.cap,
            "mask_prob_ratio": self.masked,
            "kimi_k2_tau": self.tau,
            "kl_penalty_coef": self.kl,
            "truncated_importance_sampling": self.truncation,
            "epsilon": self.epsilon,
            "epsilon_high": self.epsilon_high,
        }
        return {name: value for name, value in names.items() if value is not None}

    @property
    def objective(self) -> Objective:
        """With a truncation the recorded logprobs are ART's original_logprobs, and its old ones are ours."""
        ratio = DIRECT if self.truncation is None else OLD
        low, high = self.bounds
        level, shifts = LEVELS[self.level], ()
        weights = () if self.truncation is None else (Weight(MISMATCH, transform=Truncate(0.0, self.truncation)),)
        if self.tau is not None:
            shifts += (AdvantageShift(ratio, self.tau),)
        if self.kl:
            shifts += (AdvantageShift(Ratio("theta", "ref"), self.kl, center="microbatch"),)
        if self.ppo:
            return Objective(Clip(low, high, delta=self.cap, level=level), ratio, weights, shifts=shifts)
        shape = Truncate(1 - low, 1 + high if self.cap is None else min(1 + high, self.cap))
        if self.masked:
            shape = MaskOutside(1 - low, 1 + high, strict=True)
        return Objective(PolicyGradient(), None, (*weights, Weight(ratio, level, shape)), shifts=shifts)

    @property
    def bounds(self) -> tuple[float, float]:
        low = (0.2 if self.ppo else 1.0) if self.epsilon is None else self.epsilon
        high = self.epsilon_high if self.epsilon_high is not None else (low if self.ppo else 4.0)
        return low, high


def theirs(case: Case, data):
    """ART's loss over packed rows: one group id for each row, weights of 1."""
    mask = data["mask"].clone()
    mask[:, -1] = False  # the position that its shift loses
    logprobs = data["logprobs"].clone().requires_grad_()
    groups = torch.arange(1, len(mask) + 1)[:, None].expand_as(mask)
    recorded = data["rollout"] if case.truncation is None else data["old"]
    inputs = {
        "logprobs": shifted(recorded, float("nan")),
        "advantages": shifted(per_position(data["advantages"], logprobs).contiguous(), 0.0),
        "assistant_mask": shifted(mask, False),
        "weights": torch.ones_like(logprobs),
        "group_ids": shifted(groups.contiguous(), 0),
    }
    if case.truncation is not None:
        inputs["original_logprobs"] = shifted(data["rollout"], 0.0)
    found = art.loss_fn(inputs, logprobs, data["ref"], None, case.config)
    found.policy_loss.backward()
    return found.policy_loss.detach(), logprobs.grad


def without_last(data):
    mask = data["mask"].clone()
    mask[:, -1] = False
    return data | {"mask": mask}


CASES = [
    case
    for ppo, level, (cap, masked), tau, kl, truncation, epsilons in itertools.product(
        (False, True),
        LEVELS,
        ((None, False), (4.0, False), (None, True)),
        (None, 0.1),
        (0.0, 0.05),
        (None, 2.0),
        ((None, None), (0.3, 0.5)),
    )
    # after mask_prob_ratio a bound is applied to r = 0: see TestWhereArtIsUndefined for bounds above 0
    if not (masked and (ppo or epsilons[0] is not None))
    for case in [Case(ppo, level, cap, masked, tau, kl, truncation, *epsilons)]
]


@pytest.mark.parametrize("place", range(len(CASES)), ids=lambda place: str(CASES[place]))
def test_loss_and_gradient_are_those_of_art(close, fired, place):
    case, data = CASES[place], without_last(hard(place % 7))
    loss, gradient = theirs(case, data)
    found = run(case.objective, data)
    name = "ppo" if case.ppo else "cispo"
    # ART adds 1e-6 to the number of terms, and 1e-8 to that of a row
    scale = 1 + 1e-6 / data["mask"].sum()
    close(f"ART {name} loss", found.loss, loss * scale, floor=0.1)
    close(f"ART {name} gradient", found.gradient, gradient * scale, floor=1e-4)
    fired("ART", branches(case, data, found))


def branches(case: Case, data, found) -> dict:
    good, bad = ((data["advantages"] > 0)[:, None] & data["mask"], (data["advantages"] < 0)[:, None] & data["mask"])
    per_term, (low, high) = found.per_term, case.bounds
    told = {"empty row": ~data["mask"].any(1)}
    if case.ppo and not case.tau and not case.kl:
        told["clip high"] = per_term.clipped & good
        told["clip low"] = per_term.clipped & bad & (per_term.ratio < 1)
        if case.cap:
            told["cap"] = per_term.clipped & bad & (per_term.ratio > case.cap)
    if not case.ppo and case.truncation is None:
        told["window" if case.masked else "truncate high"] = per_term.weight == (
            0.0 if case.masked else min(1 + high, case.cap or 1 + high)
        )
        if not case.masked and low < 1:
            told["truncate low"] = per_term.weight == 1 - low
    if case.truncation is not None:
        told["truncation"] = found.corrected.weight[data["mask"]] == 2.0
    return told


@pytest.mark.parametrize("seed", range(3))
def test_the_preset_is_its_default_loss(close, seed):
    data = without_last(hard(seed))
    loss, gradient = theirs(Case(False), data)
    found = run(presets.ART_467, data)
    close("ART default", found.loss, loss, floor=0.1)
    close("ART default", found.gradient, gradient * (1 + 1e-6 / data["mask"].sum()), floor=1e-4)


@pytest.mark.parametrize("case", [Case(False), Case(True, "sequence"), Case(False, kl=0.05)], ids=str)
def test_in_float32_they_agree_to_float32(close, case):
    data = without_last(hard(1, torch.float32))
    loss, gradient = theirs(case, data)
    found = run(case.objective, data)
    close("ART losses, float32", found.loss, loss, 1e-5, floor=0.1)
    close("ART gradients, float32", found.gradient, gradient, 1e-5, floor=1e-2)


class TestWhereArtIsUndefined:
    def test_its_truncation_without_original_logprobs_squares_the_ratio_and_we_refuse(self):
        data = without_last(hard(1))
        mask = data["mask"]
        _, once = theirs(Case(False), data)
        config = {"truncated_importance_sampling": 5.0}
        logprobs = data["logprobs"].clone().requires_grad_()
        inputs = {
            "logprobs": shifted(data["rollout"], float("nan")),
            "advantages": shifted(per_position(data["advantages"], logprobs).contiguous(), 0.0),
            "assistant_mask": shifted(mask, False),
            "weights": torch.ones_like(logprobs),
            "group_ids": shifted(mask.long(), 0),
        }
        art.loss_fn(inputs, logprobs, None, None, config).policy_loss.backward()
        ratio = (data["logprobs"] - data["rollout"]).exp().clamp(max=5.0)
        torch.testing.assert_close(logprobs.grad[mask], (once * ratio)[mask])
        truncated = Weight(DIRECT, transform=Truncate(0.0, 5.0))
        with pytest.raises(ArgumentError, match="TG-OBJ-018"):
            Objective(PolicyGradient(), weights=(truncated, truncated))

    def test_a_missing_logprob_is_a_ratio_of_one_there_and_a_dropped_term_here(self):
        data = without_last(hard(1))
        data["rollout"][0, :4] = float("nan")
        _, gradient = theirs(Case(False), data)
        assert (gradient[0, :4] != 0).all()
        found = run(presets.ART_467, data)
        assert (found.gradient[0, :4] == 0).all()
        with pytest.raises(ArgumentError, match="TG-OBJ-020"):
            presets.ART_467.check_missing("ratio_one")

    def test_garbage_off_the_mask_makes_its_loss_nan_and_leaves_ours(self, fired):
        data = without_last(hard(1))
        dirty = data | {"logprobs": data["logprobs"].masked_fill(~data["mask"], float("nan"))}
        loss, _ = theirs(Case(False), dirty)
        clean, found = run(presets.ART_467, data), run(presets.ART_467, dirty)
        assert torch.equal(found.loss, clean.loss)
        assert torch.equal(found.gradient, clean.gradient)
        fired("ART", {"NaN": loss.isnan()})

    def test_a_recorded_logprob_of_minus_infinity_makes_its_loss_infinite_and_is_refused_here(self):
        data = without_last(hard(1))
        data["rollout"][0, 0], data["advantages"][0] = -float("inf"), -1.0
        loss, _ = theirs(Case(True), data)
        assert loss.isinf()
        with pytest.raises(ArgumentError, match=r"TG-RATIO-001.*inf"):
            run(Case(True).objective, data)

    def test_its_cap_on_negative_advantages_holds_for_all_signs(self):
        # CISPO with bounds of [0, 5] and a cap of 4: A > 0 at a ratio above 5 weighs 4 there
        data = without_last(hard(1))
        data["advantages"][:] = 1.0
        _, free = theirs(Case(False), data)
        _, capped = theirs(Case(False, cap=4.0), data)
        assert (free != capped).any()

    def test_its_window_weighs_masked_terms_by_the_lower_bound_and_ours_by_zero(self):
        case, data = Case(False, masked=True, epsilon=0.3, epsilon_high=0.5), without_last(hard(1))
        _, gradient = theirs(case, data)
        found = run(case.objective, data)
        ratio = (data["logprobs"] - data["rollout"]).exp()
        outside = data["mask"] & ((ratio <= 0.7) | (ratio >= 1.5))
        torch.testing.assert_close(gradient[data["mask"] & ~outside], found.gradient[data["mask"] & ~outside])
        expected = -0.7 * per_position(data["advantages"], ratio) / data["mask"].sum()
        torch.testing.assert_close(gradient[outside], expected[outside])
        assert (found.gradient[outside] == 0).all()

    def test_its_window_before_ppos_clip_leaves_a_constant_and_ours_is_a_gate(self):
        # Outside the window r is 0, so that min(0, clip(0) A) is (1 - epsilon) A for A < 0: a loss, not a gradient.
        data = without_last(hard(1))
        _, gradient = theirs(Case(True, masked=True), data)
        _, plain = theirs(Case(True), data)
        ratio = (data["logprobs"] - data["rollout"]).exp()
        inside = data["mask"] & (ratio > 0.8) & (ratio < 1.2)
        torch.testing.assert_close(gradient[inside], plain[inside])
        assert (gradient[data["mask"] & ~inside] == 0).all()
        window = replace(Case(True).objective, rejections=(Rejection(DIRECT, low=0.8, high=1.2),))
        torch.testing.assert_close(run(window, data).gradient[data["mask"]], gradient[data["mask"]], rtol=1e-6, atol=0)
        assert window.reduce == Reduce()


def test_every_branch_has_fired(fired):
    counts = fired("ART")
    if counts["empty row"] < len(CASES):
        pytest.skip("the other tests of this file have not run")
    assert {name for name, count in counts.items() if count == 0} == set()
    assert {"clip low", "clip high", "cap", "window", "truncate low", "truncate high", "truncation", "NaN"} <= set(
        counts
    )
