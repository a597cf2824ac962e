"""FIPO, ASPO and M2PO beside their formulas, written out term by term in loops."""

import math

import pytest
import torch

from padded import hard, run
from tracegrad.objective import presets


@pytest.mark.parametrize("seed", range(4))
def test_fipo_is_its_sum_over_what_follows(seed):
    data = hard(seed)
    found = run(presets.FIPO, data)
    mask, count = data["mask"], int(data["mask"].sum())
    gradient, influences = torch.zeros_like(data["logprobs"]), []
    for row in range(len(mask)):
        here = mask[row].nonzero().flatten().tolist()
        l_of = [(data["logprobs"] - data["old"])[row, column].item() for column in here]
        for place, column in enumerate(here):
            later = list(enumerate(l_of))[place:]
            future = sum(2 ** (-(k - place) / 32) * l for k, l in later if math.exp(l) <= 10)  # noqa: E741
            f = min(max(math.exp(future), 1.0), 1.2)
            a, r = data["advantages"][row].item(), math.exp(min(max(l_of[place], -20), 20))
            weight = min(math.exp((data["old"] - data["rollout"])[row, column].item()), 2.0)
            clipped = (a > 0 and r > 1.28) or (a < 0 and (r < 0.8 or r > 10))
            gradient[row, column] = 0.0 if clipped else -a * r * f * weight / count
            influences.append(f)
    torch.testing.assert_close(found.gradient, gradient, rtol=1e-9, atol=1e-12)
    assert 1.0 in influences
    assert any(1 < f < 1.2 for f in influences)


@pytest.mark.parametrize("seed", range(4))
def test_aspo_turns_the_ratio_of_good_tokens_over(seed):
    """As Archer2.0's loss has it: A min(1/r, 3) up to the clip for A > 0, A min(r, 3) above it for A < 0."""
    data = hard(seed)
    data["logprobs"][2, 0], data["old"][2, 0], data["mask"][2, 0] = -4.0, -1.0, True
    data["advantages"][2] = 1.0  # old/theta is e^3: beyond 3
    found = run(presets.ASPO, data)
    a = data["advantages"][:, None].expand_as(data["mask"])
    r = (data["logprobs"] - data["old"]).clamp(-20, 20).exp()
    good = (1 / r).clamp(max=3.0) * (r <= 1.2)
    bad = r.clamp(max=3.0) * (r >= 0.8)
    weight = (data["old"] - data["rollout"]).exp().clamp(max=2.0)
    expected = -a * torch.where(a > 0, good, bad) * weight * data["mask"] / data["mask"].sum()
    torch.testing.assert_close(found.gradient, expected, rtol=1e-9, atol=1e-12)
    assert ((1 / r > 3) & data["mask"]).any()


@pytest.mark.parametrize("seed", [0, 2, 3, 5, 6])  # each of these masks some
def test_m2po_masks_what_its_algorithm_masks(seed):
    """Algorithm 1: of the tokens in the active quadrants the largest is masked until the mean of the rest fits."""
    data = hard(seed)
    found = run(presets.M2PO, data)
    a = data["advantages"][:, None].expand_as(data["mask"])
    l_of = data["old"] - data["rollout"]
    places = [tuple(place) for place in data["mask"].nonzero().tolist()]
    active = sorted((p for p in places if a[p] * l_of[p] > 0), key=lambda p: l_of[p].item() ** 2)
    masked = []
    while len(active) > 1 and sum(l_of[p].item() ** 2 for p in active) / len(active) > 0.04:
        masked.append(active.pop())
    r = (data["logprobs"] - data["old"]).clamp(-20, 20).exp()
    clipped = ((a > 0) & (r > 1.2)) | ((a < 0) & (r < 0.8))
    expected = -a * r * ~clipped * l_of.clamp(-20, 20).exp() * data["mask"] / data["mask"].sum()
    for place in masked:
        expected[place] = 0.0
    torch.testing.assert_close(found.gradient, expected, rtol=1e-9, atol=1e-12)
    assert masked
    assert active
