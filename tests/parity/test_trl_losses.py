"""TRL 1.16's `_compute_loss` beside ours: every loss, level, vLLM mode, mask, penalty and bonus, alone and together."""

import itertools
from dataclasses import replace

import pytest
import torch

from padded import hard, run
from peer_code import trl_loss
from tracegrad.objective import with_beta
from trl_loss_cases import LEVELS, LOSSES, Case, given, theirs

CLIPPED = LOSSES[:5]
MODES = ("token_truncate", "token_mask", "sequence_truncate", "sequence_mask")
BOUNDS = ((None, 3.0), (0.5, 2.0))


def possible(case: Case) -> bool:
    """Whether TRL takes the options together, and the bonus has a denominator of its own (see below for the other)."""
    if case.loss == "vespo" and (case.level == "sequence" or (case.mode or "token").startswith("sequence")):
        return False
    if case.delta is not None and case.loss not in CLIPPED:
        return False
    return not (case.coef and case.share < 1)


def branches(case: Case, data: dict[str, torch.Tensor], found) -> dict[str, torch.Tensor]:
    """What this case's parts did to its terms."""
    mask, per_term = data["mask"], found.per_term
    good, bad = (data["advantages"] > 0)[:, None] & mask, (data["advantages"] < 0)[:, None] & mask
    weight = found.corrected.weight[mask]
    fell = ~per_term.keep & mask
    told = {"empty row": (~mask.any(1)).any(), "single-term row": (mask.sum(1) == 1).any()}
    if case.loss in CLIPPED:
        told["clip high"] = per_term.clipped & good
        told["clip low"] = per_term.clipped & bad & (per_term.ratio < 1)
    if case.delta is not None:
        told["delta"] = per_term.clipped & bad & (per_term.ratio > 1)
    if case.mode is not None:
        kind = case.mode.split("_")[1]
        told[f"{case.mode} high" if kind == "truncate" else case.mode] = weight == (
            case.bounds[1] if kind == "truncate" else 0
        )
        if kind == "truncate" and case.bounds[0]:
            told[f"{case.mode} low"] = weight == case.bounds[0]
    if case.opsm is not None and case.share == 1:
        told["OPSM drop"] = fell
    if case.share < 1 and case.opsm is None:
        told["entropy drop"] = fell
    if case.kl is not None:
        told["penalty"] = per_term.penalty > 0
    return told


PRODUCTS = [
    case
    for loss, level, (mode, bounds), delta, kl, opsm, (share, coef) in itertools.product(
        LOSSES,
        LEVELS,
        [(None, BOUNDS[0]), *itertools.product(MODES, BOUNDS)],
        (None, 1.6),
        (None, "plain", "corrected"),
        (None, 0.05),
        ((1.0, 0.0), (0.4, 0.0), (1.0, 0.05)),
    )
    if possible(case := Case(loss, level, mode, bounds, delta, kl, opsm, share, coef))
]


@pytest.mark.parametrize("place", range(len(PRODUCTS)), ids=lambda place: str(PRODUCTS[place]))
def test_loss_and_gradients_are_those_of_trl(close, fired, place):
    case, data = PRODUCTS[place], hard(place % 7)
    loss, gradient, entropy_gradient = theirs(case, data)
    found = run(case.objective, data, rows=True)
    close(f"TRL {case.loss} loss", found.loss, loss)
    close(f"TRL {case.loss} gradient", found.gradient, gradient)
    if case.coef:
        close("TRL entropy bonus gradient", found.entropy_gradient, entropy_gradient)
    fired("TRL", branches(case, data, found))


SINGLE = PRODUCTS[::11]


@pytest.mark.parametrize("place", range(len(SINGLE)), ids=lambda place: str(SINGLE[place]))
def test_in_float32_they_agree_to_float32(close, place):
    case, data = SINGLE[place], hard(place % 7, torch.float32)
    if case.kl == "corrected":  # e^9 less e^9 leaves no digit of a float32, there or here
        data["ref"] = (data["logprobs"] + 0.3 * (data["ref"] - data["old"])).clamp(max=-1e-3)
    loss, gradient, _ = theirs(case, data)
    found = run(case.objective, data, rows=True)
    assert found.loss.dtype == loss.dtype == torch.float32
    close(f"TRL {case.loss} loss, float32", found.loss, loss, 1e-5, floor=0.1)
    close(f"TRL {case.loss} gradient, float32", found.gradient, gradient, 1e-5, floor=1e-2)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("loss", LOSSES)
def test_advantages_may_differ_within_a_trace(close, loss, level, seed):
    case = Case(loss, level, "token_truncate", (0.5, 2.0), kl="corrected", share=0.6)
    if not possible(case):
        case = case._replace(level="token")
    data = hard(seed)
    data["advantages"] = torch.randn(data["mask"].shape, generator=torch.Generator().manual_seed(seed)).double()
    loss_, gradient, _ = theirs(case, data)
    found = run(case.objective, data, rows=True)
    close("TRL with advantages per token, loss", found.loss, loss_)
    close("TRL with advantages per token, gradient", found.gradient, gradient)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("mode", ["token_truncate", "token_mask"])
@pytest.mark.parametrize("loss", LOSSES)
def test_trl_takes_a_missing_logprob_as_neutral(close, fired, loss, mode, seed):
    case, data = Case(loss, mode=mode, bounds=(0.5, 2.0), kl="plain"), hard(seed)
    lost = torch.rand(data["mask"].shape, generator=torch.Generator().manual_seed(seed)) < 0.2
    data["rollout"][lost] = float("nan")
    loss_, gradient, _ = theirs(case, data)
    found = run(case.objective, data, rows=True, missing_logprobs="ratio_one")
    close("TRL with missing logprobs, loss", found.loss, loss_)
    close("TRL with missing logprobs, gradient", found.gradient, gradient)
    fired("TRL", {"NaN": lost & data["mask"]})
    penalty = run(case.objective, data | {"advantages": torch.zeros_like(data["advantages"])}, rows=True).gradient
    masked = run(case.objective, data, rows=True).gradient
    assert torch.equal(masked[lost], penalty[lost])  # missing_logprobs="mask": only the penalty is left of them


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("loss", LOSSES)
def test_with_beta_is_what_trls_beta_does_by_default(close, loss, level, seed):
    case, data = Case(loss, level, kl="corrected"), hard(seed)
    if not possible(case):
        case = case._replace(level="token")
    config = {name: value for name, value in case.config.items() if name != "use_bias_correction_kl"}
    logprobs = data["logprobs"].clone().requires_grad_()
    loss_ = trl_loss(logprobs, given(case, data), data["entropy"], **config)
    loss_.backward()
    objective = with_beta(replace(case.objective, penalties=()), 0.04)
    found = run(objective, data, rows=True)
    close("TRL's beta as it ships, loss", found.loss, loss_.detach())
    close("TRL's beta as it ships, gradient", found.gradient, logprobs.grad)
    assert objective == case.objective


def test_every_branch_has_fired(fired):
    counts = fired("TRL")
    if counts["empty row"] < len(PRODUCTS):
        pytest.skip("the other tests of this file have not run")
    assert {name for name, count in counts.items() if count == 0} == set()
    assert {"clip low", "delta", "token_mask", "sequence_truncate low", "OPSM drop", "entropy drop", "NaN"} <= set(
        counts
    )
