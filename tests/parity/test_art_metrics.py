"""ART's metrics beside ours: loss_fn of openpipe-art 0.5.18, and the diagnostics that later releases have."""

import math

import pytest
import torch

from metric_cases import KINDS, compare, drawn, merged
from tracegrad.integrations import metrics


@pytest.fixture
def loss():
    return pytest.importorskip("art.loss")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("missing", [False, True])
def test_loss(close, fired, loss, kind, missing):
    data = drawn(kind)
    recorded = torch.where(data.mask, data.rollout, math.nan)
    if missing:
        recorded[:, 3:7] = math.nan

    inputs, theta, ref = inputs_of(loss, data, recorded)
    theirs = loss.loss_fn(inputs, theta, ref, None, {"kl_penalty_coef": 0.1})
    ours = merged(
        data,
        lambda rows, part: metrics.as_art(
            part(data.theta), part(recorded), rows, advantages=part(data.advantages), ref=part(data.ref)
        ),
    )
    close("ART metrics", ours["kl_policy_ref"], theirs.kl_policy_ref, 1e-6)
    if math.isnan(ours["probs_corr"]):  # no known logprob: NaN in 0.5.18 as here, 0 in later releases
        assert missing
        assert math.isnan(theirs.probs_corr) or theirs.probs_corr == 0
    else:
        close("ART metrics", ours["probs_corr"], theirs.probs_corr, 1e-6)


def inputs_of(loss, data, recorded):
    """The loss's inputs and logprobs: shifted by one token, or aligned where the release takes them so."""
    given = {
        "logprobs": recorded,
        "advantages": data.advantages,
        "assistant_mask": data.mask,
        "weights": torch.ones_like(data.theta),
        "group_ids": torch.zeros(data.mask.shape, dtype=torch.long),
    }
    if hasattr(loss, "AlignedLossInputs"):
        given["old_logprobs"] = given.pop("logprobs")
        return loss.AlignedLossInputs(**given | {"assistant_mask": data.mask.double()}), data.theta, data.ref
    pad = torch.nn.functional.pad
    shifted = {name: pad(values, (1, 0), value=math.nan if name == "logprobs" else 0) for name, values in given.items()}
    return shifted, pad(data.theta, (0, 1)), pad(data.ref, (0, 1))


@pytest.mark.parametrize("ppo", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_diagnostics(close, fired, loss, kind, ppo):
    if not hasattr(loss, "LossOffPolicyDiagnostics"):
        pytest.skip("this release of openpipe-art has no off-policy diagnostics")
    data = drawn(kind)
    diagnostics = loss.LossOffPolicyDiagnostics.from_tensors(
        prob_ratio=(data.theta - data.rollout).exp(),
        advantages=data.advantages,
        assistant_mask=data.mask.double(),
        weights=torch.ones_like(data.theta),
        ppo=ppo,
        epsilon=0.2 if ppo else 1.0,
        epsilon_high=0.2 if ppo else 4.0,
    )
    gathered = loss.LossOffPolicyDiagnosticsAccumulator()
    gathered.add(diagnostics)
    ours = merged(
        data,
        lambda rows, part: metrics.as_art(
            part(data.theta), part(data.rollout), rows, advantages=part(data.advantages), ppo=ppo
        ),
    )
    ours = {name: value for name, value in ours.items() if name.startswith("loss/")}
    compare(close, fired, "ART", ours, gathered.to_metrics(), 1e-5)  # its ratios are float32
