"""SkyRL's functions beside ours: off-policy correction, the PPO losses with it, reductions."""

from types import SimpleNamespace

import pytest
import torch
from parity_verl import MISMATCH, case

from test_objective import padded
from tracegrad.algebra import Clamp, Clip, Gate, Level, Objective, Ratio, Reduce, Weight
from tracegrad.correction import correct
from tracegrad.objective import Terms

correction = pytest.importorskip("skyrl.backends.skyrl_train.utils.off_policy_correction_utils")
ppo_utils = pytest.importorskip("skyrl.backends.skyrl_train.utils.ppo_utils")

OFF = {
    "tis_ratio_type": None,
    "token_tis_ratio_clip_high": 2.0,
    "sequence_tis_ratio_clip_high": 5.0,
    "sequence_mask_metric": None,
    "geo_mask_high": 1.02,
    "geo_mask_low": 0.98,
    "product_mask_high": 2.0,
    "product_mask_low": 0.5,
    "outlier_token_is_threshold_low": None,
    "outlier_token_is_threshold_high": None,
    "token_mask_is_threshold_low": None,
    "token_mask_is_threshold_high": None,
}
GEO = Gate(MISMATCH, "ratio", Level("trace", "mean"), low=0.98, high=1.02, over="kept")
PRODUCT = Gate(MISMATCH, "ratio", Level("trace", "sum"), low=0.5, high=2.0, over="kept")
OUTLIER = Gate(MISMATCH, low=1e-4, high=100.0, scope="trace")
TOKEN = Gate(MISMATCH, low=0.7, high=1.4)
TOKEN_TIS = Weight(MISMATCH, shape=Clamp(0.0, 2.0))
SEQUENCE_TIS = Weight(MISMATCH, Level("trace", "sum", terms="kept"), Clamp(0.0, 5.0))
OUTLIERS = {"outlier_token_is_threshold_low": 1e-4, "outlier_token_is_threshold_high": 100.0}
TOKENS = {"token_mask_is_threshold_low": 0.7, "token_mask_is_threshold_high": 1.4}

CASES = {
    "nothing": ({}, (), ()),
    "token TIS": ({"tis_ratio_type": "token"}, (TOKEN_TIS,), ()),
    "sequence TIS": ({"tis_ratio_type": "sequence"}, (SEQUENCE_TIS,), ()),
    "geometric mask": ({"sequence_mask_metric": "geometric"}, (), (GEO,)),
    "product mask": ({"sequence_mask_metric": "product"}, (), (PRODUCT,)),
    "outlier": (OUTLIERS, (), (OUTLIER,)),
    "token mask": (TOKENS, (), (TOKEN,)),
    "all of them": (
        OUTLIERS | TOKENS | {"tis_ratio_type": "sequence", "sequence_mask_metric": "geometric"},
        (SEQUENCE_TIS,),
        (OUTLIER, TOKEN, GEO),
    ),
}


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("loss_type", ["regular", "dual_clip"])
@pytest.mark.parametrize("name", list(CASES))
def test_the_ppo_loss_with_its_correction(close, name, loss_type, seed):
    options, weights, gates = CASES[name]
    data = case(seed)
    settings = SimpleNamespace(**{**OFF, **options})
    config = SimpleNamespace(
        policy_loss_type=loss_type,
        eps_clip_low=0.2,
        eps_clip_high=0.28,
        clip_ratio_c=3.0,
        off_policy_correction=settings,
    )
    logprobs = data["logprobs"].clone().requires_grad_()
    mask = data["mask"].double()
    advantages = data["advantages"][:, None].expand_as(mask)
    scaled = ppo_utils.apply_loss_reduction_to_advantages_minibatch(advantages, mask, "sequence_mean", 1, 40)
    theirs, _ = ppo_utils.ppo_policy_loss(logprobs, data["old"], scaled, config, mask, data["rollout"])
    theirs.backward()

    dual = 3.0 if loss_type == "dual_clip" else None
    objective = Objective(
        Clip(0.2, 0.28, dual=dual), Ratio("theta", "old"), weights, gates, reduce=Reduce("trace", "mean")
    )
    again = data["logprobs"].clone().requires_grad_()
    corrected = correct(
        data["old"], data["rollout"], mask=data["mask"], weights=weights, gates=gates, reduce=objective.reduce
    )
    terms = Terms(
        old=data["old"],
        advantages=advantages,
        weight=corrected.weight,
        keep=corrected.keep,
        scale=corrected.scale,
    )
    loss = objective(again, None, terms).loss
    loss.backward()
    close(f"SkyRL {loss_type} loss, {name}", loss.item(), theirs.item(), 1e-5)  # its ratios are float32
    close(f"SkyRL {loss_type} gradient, {name}", again.grad, logprobs.grad, 1e-5)
    if gates and name != "outlier":
        assert 0 < corrected.metrics["masked_fraction"] < 1


@pytest.mark.parametrize(
    ("reduction", "reduce"),
    [
        ("token_mean", Reduce("token")),
        ("sequence_mean", Reduce("trace", "mean")),
        ("seq_mean_token_sum_norm", Reduce("trace", "sum", norm=40.0)),
        ("prompt_mean", Reduce("prompt", "mean")),
    ],
)
def test_reductions(close, reduction, reduce):
    data = padded(1, rows=12, width=40)
    ones = torch.ones_like(data["old"])
    theirs = ppo_utils.apply_loss_reduction_to_advantages_minibatch(
        ones, data["mask"].double(), reduction, 1, 40, prompt_boundaries=[(0, 4), (4, 8), (8, 12)]
    )
    ours = correct(data["old"], data["rollout"], mask=data["mask"], group=torch.arange(12) // 4, reduce=reduce)
    close(f"SkyRL {reduction}", ours.scale[data["mask"]], theirs[data["mask"]], 1e-12)
