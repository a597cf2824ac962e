"""objective, for every preset: finite differences, coefficients, garbage off the mask, and any cut of a step."""

from dataclasses import dataclass, fields, replace

import numpy as np
import pytest
import torch

from padded import NAN, hard, run, spoilt, terms_of
from tracegrad.errors import ArgumentError
from tracegrad.objective import (
    AdaptiveEntropy,
    Aggregation,
    EntropyBonus,
    FutureClip,
    Objective,
    Ratio,
    Reduce,
    TopEntropy,
    presets,
    with_kl,
)
from tracegrad.objective.torch_loss import Terms, evaluate

NAMES = [name for name in presets.__all__ if isinstance(getattr(presets, name), Objective)]
GROUPS = torch.arange(8) // 2


@dataclass(frozen=True)
class _Influence(FutureClip, locality="trace", ratio=True):
    """What FIPO multiplies, as a loss."""

    def loss(self, view):
        return self.influence(view)


def loss_of(objective, logprobs, terms):
    """The loss, with one seed for what is drawn."""
    torch.manual_seed(0)
    return evaluate(objective, logprobs, None, terms)


def frozen(objective, data, terms):
    """(objective, Terms) with the same gradient at data's logprobs, in which nothing that is held constant moves.

    Weights, gates and the proximal become arrays; a ratio whose gradient goes through the token becomes the token's.
    """
    base = loss_of(objective, data["logprobs"], terms).per_term
    changed = {"weights": (), "rejections": ()}
    arrays = {field.name: getattr(terms, field.name) for field in fields(terms)}
    arrays |= {"weight": base.weight, "keep": base.keep}
    if objective.ratio is not None and "proximal" in objective.ratio:
        rollout = data["rollout"]
        arrays["old"] = rollout + data["alpha"] * (data["logprobs"] - rollout)
        changed["ratio"] = Ratio("theta", "old")
    if isinstance(objective.surrogate, FutureClip):
        found = loss_of(replace(objective, surrogate=_Influence()), data["logprobs"], terms).per_term.surrogate
        arrays["weight"] = base.weight * found.where(base.keep, 1)
        changed["surrogate"] = objective.surrogate.clip
    if objective.level.grad == "token":
        arrays["old"] = data["logprobs"] - base.ratio.log()
        changed["surrogate"] = replace(objective.surrogate, level=Aggregation())
    return replace(objective, **changed), Terms(**arrays)


@pytest.mark.parametrize("name", NAMES)
def test_the_gradient_is_that_of_finite_differences(name):
    objective, data, step = with_kl(presets.find(name), 0.1), hard(3), 1e-6
    data["ref"] = data["logprobs"] + 0.1 * (data["ref"] - data["old"])
    terms, _ = terms_of(objective, data, group=GROUPS)
    logprobs = data["logprobs"].clone().requires_grad_()
    found = loss_of(objective, logprobs, terms)
    found.loss.backward()
    rounding = 1e-9 * max(10.0, found.per_term.surrogate.abs().max().item())
    still, held = frozen(objective, data, terms)
    drawn = torch.Generator().manual_seed(0)
    directions = [torch.randn(logprobs.shape, generator=drawn, dtype=torch.float64) for _ in range(3)]
    for row, column in data["mask"].nonzero()[::6].tolist():
        directions.append(torch.zeros_like(directions[0]))
        directions[-1][row, column] = 1.0
    for direction in directions:
        up, down = (loss_of(still, data["logprobs"] + sign * step * direction, held).loss for sign in (1, -1))
        expected = (logprobs.grad * direction).sum().item()
        assert ((up - down) / (2 * step)).item() == pytest.approx(expected, rel=1e-6, abs=rounding)
    assert logprobs.grad.abs().sum() > 0


@pytest.mark.parametrize("name", NAMES)
def test_coefficients_are_minus_the_gradient_for_torch_and_numpy(name):
    objective, data = presets.find(name), hard(2)
    terms, _ = terms_of(objective, data, group=GROUPS)
    logprobs = data["logprobs"].clone().requires_grad_()
    loss_of(objective, logprobs, terms).loss.backward()
    torch.manual_seed(0)
    found = objective.coefficients(logprobs, terms)
    assert isinstance(found, np.ndarray)
    assert found.dtype == np.float64
    np.testing.assert_array_equal(found, -logprobs.grad.numpy())
    plain = {field.name: getattr(terms, field.name) for field in fields(terms)}
    plain = {key: value.numpy() if isinstance(value, torch.Tensor) else value for key, value in plain.items()}
    torch.manual_seed(0)
    np.testing.assert_array_equal(objective.coefficients(data["logprobs"].numpy(), Terms(**plain)), found)


def test_a_loss_weighted_by_its_coefficients_has_its_gradient():
    objective, data = presets.DAPO, hard(1)
    terms, _ = terms_of(objective, data)
    coefficients = torch.from_numpy(objective.coefficients(data["logprobs"], terms))
    logprobs = data["logprobs"].clone().requires_grad_()
    (-coefficients * logprobs).sum().backward()
    assert torch.equal(logprobs.grad, run(objective, data).gradient)


@pytest.mark.parametrize(
    "objective",
    [
        replace(presets.DAPO, entropy=EntropyBonus(0.01, masked=False)),
        replace(presets.DAPO, entropy=EntropyBonus(0.0, masked=False, adapt=AdaptiveEntropy())),
        replace(presets.DAPO, rejections=(TopEntropy(0.2, "microbatch"),)),
    ],
)
def test_coefficients_are_refused_where_the_entropy_matters(objective):
    data = hard(1)
    with pytest.raises(ArgumentError, match="TG-OBJ-043"):
        objective.coefficients(data["logprobs"], terms_of(objective, data)[0])


@pytest.mark.parametrize("name", NAMES)
def test_no_preset_takes_terms_without_what_correct_knows(name):
    objective, data = presets.find(name), hard(2)
    terms, _ = terms_of(objective, data, group=GROUPS)
    for lost, parts in (("weight", objective.weights), ("keep", objective.rejections)):
        if any(part.detached for part in parts):
            with pytest.raises(ArgumentError, match=rf"TG-OBJ-045.*{lost}"):
                objective(data["logprobs"], None, replace(terms, **{lost: None}))
        else:
            assert objective(data["logprobs"], None, replace(terms, **{lost: None})).loss.isfinite()


@pytest.mark.parametrize("garbage", [NAN, float("inf"), -float("inf"), -9999.0, 1e30])
@pytest.mark.parametrize("name", NAMES)
def test_nothing_off_the_mask_reaches_a_loss_or_a_gradient(name, garbage):
    objective, data = with_kl(presets.find(name), 0.1), hard(5)
    dirty = spoilt(data, garbage)
    dirty["alpha"] = data["alpha"].masked_fill(~data["mask"], garbage)
    found = []
    for each in (data, dirty):
        terms, _ = terms_of(objective, each, group=GROUPS)
        arrays = {field.name: getattr(terms, field.name) for field in fields(terms)}
        arrays["advantages"] = terms.advantages.masked_fill(~each["mask"], NAN if each is dirty else 0.0)
        logprobs = each["logprobs"].clone().requires_grad_()
        result = loss_of(objective, logprobs, Terms(**arrays))
        result.loss.backward()
        found.append((result, logprobs.grad))
    (clean, gradient), (result, dirty_gradient) = found
    assert torch.equal(result.loss, clean.loss)
    assert torch.equal(dirty_gradient, gradient)
    assert (dirty_gradient[~data["mask"]] == 0).all()
    for field in fields(result.per_term):
        assert torch.equal(getattr(result.per_term, field.name), getattr(clean.per_term, field.name)), field.name


@pytest.mark.parametrize("name", NAMES)
def test_a_missing_logprob_is_finite_everywhere(name):
    objective, data = presets.find(name), hard(4)
    data["rollout"][torch.rand(data["mask"].shape, generator=torch.Generator().manual_seed(0)) < 0.3] = NAN
    found = run(objective, data, group=GROUPS)
    assert found.loss.isfinite()
    assert found.gradient.isfinite().all()
    if objective.requirements.rollout:
        assert (found.gradient[data["rollout"].isnan()] == 0).all()


CUT = {name: presets.find(name) for name in NAMES if not presets.find(name).microbatch_components}
REDUCED = {
    f"{reduce}": replace(presets.GRPO, reduce=reduce)
    for reduce in (
        Reduce("trace", "mean", denominator="kept"),
        Reduce("group", "mean"),
        Reduce("prompt", "mean"),
        Reduce("prompt", "sum", norm=8.0, denominator="kept"),
        Reduce("constant", norm=100.0),
    )
}


def test_what_is_defined_per_micro_batch_says_so():
    assert set(NAMES) - CUT.keys() == {"CLIP_COV", "KL_COV"}


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", CUT | REDUCED)
def test_the_losses_of_any_cut_sum_to_the_loss_of_the_step(name, seed):
    objective, data = with_kl((CUT | REDUCED)[name], 0.1), hard(seed)
    data["rollout"][torch.rand(data["mask"].shape, generator=torch.Generator().manual_seed(seed)) < 0.1] = NAN
    terms, _ = terms_of(objective, data, group=GROUPS)
    mask = data["mask"]
    arrays = {field.name: getattr(terms, field.name) for field in fields(terms)}
    arrays = {key: value[mask] if isinstance(value, torch.Tensor) else value for key, value in arrays.items()}
    start = data["logprobs"][mask]
    drawn = torch.randint(0, 4, (len(start),), generator=torch.Generator().manual_seed(seed))
    batch = drawn[arrays["trace"]] if objective.requirements.trace_ratio else drawn  # then whole traces stay together

    whole = start.clone().requires_grad_()
    total = evaluate(objective, whole, None, Terms(**arrays)).loss
    total.backward()
    pieces, summed = start.clone().requires_grad_(), 0.0
    for part in range(5):  # the last one is empty, and connected too
        here = batch == part
        cut = {key: value[here] if isinstance(value, torch.Tensor) else value for key, value in arrays.items()}
        loss = evaluate(objective, pieces[here], None, Terms(**cut)).loss
        loss.backward()
        summed += loss.item()
    assert summed == pytest.approx(total.item(), rel=1e-12, abs=1e-13)
    torch.testing.assert_close(pieces.grad, whole.grad, rtol=1e-12, atol=1e-14)


def test_reductions_of_their_own_are_taken_from_the_scales():
    # the penalty is a mean over traces, the surrogate over terms: 3 and 1 terms, k1 = 1 at each
    objective = replace(with_kl(presets.WEIGHTED_SFT, 1.0), reduce=Reduce("token"))
    penalty = replace(objective.penalties[0], kind="k1", reduce=Reduce("constant", norm=4.0))
    terms = Terms(
        advantages=torch.zeros(4),
        ref=torch.full((4,), -2.0),
        scale=torch.full((4,), 0.25),
        scales={Reduce("constant", norm=4.0): torch.full((4,), 0.5)},
    )
    objective = replace(objective, penalties=(penalty,))
    assert evaluate(objective, torch.full((4,), -1.0), None, terms).loss.item() == pytest.approx(2.0)
    with pytest.raises(ArgumentError, match="TG-OBJ-005"):
        evaluate(objective, torch.full((4,), -1.0), None, replace(terms, scales=None))
