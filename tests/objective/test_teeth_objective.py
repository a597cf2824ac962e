"""Numbers that a wrong line in the evaluator would change, worked by hand; options are in test_every_field."""

import math

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from tracegrad import model
from tracegrad.objective import (
    AdaptiveEntropy,
    AdvantageShift,
    Aggregation,
    Clip,
    EntropyBonus,
    Gamma,
    Identity,
    Inverse,
    MaskOutside,
    Objective,
    Penalty,
    PolicyGradient,
    Ratio,
    Reduce,
    Rejection,
    TopEntropy,
    Truncate,
    Weight,
)
from tracegrad.objective.torch_loss import Terms, evaluate
from tracegrad.packing import Batch

SUM = Reduce("constant", norm=1.0)
OLD, DIRECT, REF = Ratio("theta", "old"), Ratio("theta", "rollout"), Ratio("theta", "ref")


def terms(**given):
    known = {name: torch.tensor(value, dtype=torch.float64) for name, value in given.items() if name != "keep"}
    shape = known["advantages"].shape
    known.setdefault("scale", torch.ones(shape, dtype=torch.float64))
    return Terms(**known, **({"keep": torch.tensor(given["keep"])} if "keep" in given else {}))


@pytest.mark.parametrize(
    ("shape", "expected"),
    [
        (Truncate(0.5, 2.0), [0.5, 0.5, 1.0, 2.0, 2.0]),
        (MaskOutside(0.5, 2.0), [0.0, 0.5, 1.0, 2.0, 0.0]),
        (MaskOutside(0.5, 2.0, strict=True), [0.0, 0.0, 1.0, 0.0, 0.0]),
        (Inverse(2.0), [2.0, 2.0, 1.0, 0.5, 0.25]),
        (Identity(), [0.25, 0.5, 1.0, 2.0, 4.0]),
    ],
)
def test_shapes_of_tensors_at_and_around_their_bounds(shape, expected):
    ratios = torch.tensor([0.25, 0.5, 1.0, 2.0, 4.0], dtype=torch.float64)
    # log2 and exp2 would be exact; exp(log(x)) is x for these in float64.
    assert ratios.log().exp().tolist() == ratios.tolist()
    assert shape.apply(ratios.log()).tolist() == expected


def test_an_entropy_bonus_says_all_that_it_does():
    assert str(EntropyBonus(0.01, masked=False)) == "0.01 * entropy"
    bonus = EntropyBonus(0.0, masked=True, reduce=Reduce("token"), adapt=AdaptiveEntropy(target=0.3))
    assert str(bonus) == "0 * entropy [kept tokens only, scale 1 / tokens, adapting to 0.3 nats]"


def test_a_shift_is_centred_on_the_terms_that_count_and_have_both_logprobs():
    # l = 1, 3 | 50 at a dropped term | unknown | 90 in padding. The mean of the first two is 2, so A' = 1.5 and 0.5.
    # A shift with a gradient of its own would change the coefficients, as the two logprobs differ.
    theta = torch.tensor([-1.0, -3.0, -1.0, -1.0, -1.0], dtype=torch.float64)
    given = terms(
        advantages=[1.0, 1.0, 1.0, 1.0, 1.0],
        rollout=[-2.0, -6.0, -51.0, math.nan, -91.0],
        keep=[True, True, False, False, True],
        scale=[1.0, 1.0, 1.0, 1.0, 0.0],
    )
    objective = Objective(PolicyGradient(), shifts=(AdvantageShift(DIRECT, 0.5, "microbatch"),), reduce=SUM)
    assert objective.coefficients(theta, given).tolist() == pytest.approx([1.5, 0.5, 0.0, 0.0, 0.0])


def test_the_quantile_of_entropy_is_of_terms_and_not_of_padding():
    # Terms have 1, 2, 3, 4 nats: half of them are 3 and 4. Padding has 0 in one row and 50 in the other, and no rank.
    entropy = torch.tensor([[1.0, 2.0, 0.0, 0.0, 0.0], [3.0, 4.0, 50.0, 0.0, 0.0]], dtype=torch.float64)
    real = torch.tensor([[1.0, 1.0, 0.0, 0.0, 0.0]] * 2, dtype=torch.float64)
    given = Terms(advantages=torch.ones(2, 5).double(), scale=real)
    objective = Objective(PolicyGradient(), rejections=(TopEntropy(0.5, "microbatch"),), reduce=SUM)
    found = evaluate(objective, -torch.ones(2, 5).double(), entropy, given)
    assert (found.per_term.keep & real.bool()).tolist() == [[False] * 5, [True, True, False, False, False]]
    assert found.loss.item() == 2.0


@pytest.mark.parametrize(("to_ref", "expected"), [(-5.0, -2.0), (-1.0, -1.0), (1.0, 1.0), (5.0, 2.0)])
def test_a_capped_estimate_is_held_on_both_sides_and_has_no_gradient_beyond(to_ref, expected):
    penalty = Penalty(REF, "k1", 1.0, masked=False, weighted=False, cap=2.0)
    theta = torch.tensor([-3.0], dtype=torch.float64, requires_grad=True)
    given = terms(advantages=[0.0], ref=[-3.0 - to_ref])
    found = evaluate(Objective(PolicyGradient(), penalties=(penalty,), reduce=SUM), theta, None, given)
    found.loss.backward()
    assert found.loss.item() == expected
    assert theta.grad.item() == (1.0 if abs(to_ref) < 2 else 0.0)


@pytest.mark.parametrize(("w", "log_ratio"), [(2.0, 0.0), (0.5, 0.0), (2.0, math.log(3))])
def test_an_absorbed_weight_multiplies_the_ratio_inside_the_shape(w, log_ratio):
    # u = theta/old * w; e^3 u^2 e^(-3 u), not of theta/old / w, and not times w again.
    weights = (Weight(Ratio("old", "rollout")), Weight(OLD, Aggregation("trace", "sum"), Gamma(2.0, 3.0), absorbs=True))
    theta = torch.tensor([-1.0], dtype=torch.float64)
    given = terms(advantages=[1.0], old=[-1.0 - log_ratio], weight=[w], trace=[0.0])
    found = evaluate(Objective(PolicyGradient(), weights=weights, reduce=SUM), theta, None, given)
    u = w * math.exp(log_ratio)
    assert found.loss.item() == pytest.approx(math.exp(3) * u**2 * math.exp(-3 * u))


@pytest.mark.parametrize(("delta", "at"), [(1.1, [1, 0, 0, 0, 1]), (3.0, [0, 1, 0, 0, 1]), (None, [0, 1, 0, 0, 0])])
def test_delta_takes_the_gradient_where_r_lies_above_it_on_either_side(delta, at):
    # r = 1.15, 1.5, 1 at A = 1; 0.9 and 5 at A = -1, against [0.8, 1.2].
    ratio = [1.15, 1.5, 1.0, 0.9, 5.0]
    at = [bool(x) for x in at]
    at[1] = True  # above 1.2 with or without delta
    given = terms(advantages=[1.0, 1.0, 1.0, -1.0, -1.0], old=[-9 - math.log(r) for r in ratio])
    theta = torch.full((5,), -9.0, dtype=torch.float64)
    found = evaluate(Objective(Clip(delta=delta), OLD, reduce=SUM), theta, None, given)
    assert found.per_term.clipped.tolist() == at


@pytest.mark.parametrize(("gated", "expected"), [(True, -2.0), (False, -5.0)])
def test_a_gated_bonus_leaves_dropped_terms_out_and_its_gradient_too(gated, expected):
    # Entropies 2 and 3; the gate on theta/old drops the second.
    objective = Objective(
        PolicyGradient(), rejections=(Rejection(OLD, high=2.0),), reduce=SUM, entropy=EntropyBonus(1.0, masked=gated)
    )
    theta, entropy = torch.tensor([-9.0, -9.0]).double(), torch.tensor([2.0, 3.0]).double().requires_grad_()
    given = terms(advantages=[0.0, 0.0], old=[-9.0, -11.0])
    found = evaluate(objective, theta, entropy, given)
    found.loss.backward()
    assert found.loss.item() == expected
    assert entropy.grad.tolist() == [-1.0, 0.0 if gated else -1.0]


@pytest.mark.parametrize("window", range(1, 18))
def test_a_block_is_seen_whole_only_where_every_pair_of_it_is(window):
    """Window by window over four blocks of four: at a distance of exactly the window nothing is seen."""
    length, size = 16, 4
    index, ones = torch.arange(length), torch.ones(length)
    batch = Batch(index, index, torch.full((length,), length), index, index, ones, index, np.arange(length))
    mask = model.block_mask(batch, window=window, block=size)
    distance = index[:, None] - index[None, :]
    pairs = (distance >= 0) & (distance < window)
    assert torch.equal(pairs, model.dense_mask(batch, window=window)[0, 0])
    pairs = pairs.view(4, size, 4, size).transpose(1, 2)  # [query block, key block, 4, 4]
    for query in range(4):
        whole = set(mask.full_kv_indices[0, 0, query, : mask.full_kv_num_blocks[0, 0, query]].tolist())
        some = set(mask.kv_indices[0, 0, query, : mask.kv_num_blocks[0, 0, query]].tolist())
        for key in range(4):
            seen = pairs[query, key]
            assert key not in whole or bool(seen.all()), f"window {window}: block {query} does not see all of {key}"
            assert key in whole | some or not bool(seen.any()), f"window {window}: block {query} sees some of {key}"
