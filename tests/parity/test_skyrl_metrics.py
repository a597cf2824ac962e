"""SkyRL's metrics beside ours: off-policy correction, policy losses, logprob differences of worker and trainer."""

import math
from collections import defaultdict
from types import SimpleNamespace

import pytest

from metric_cases import KINDS, assert_every_bound_was_crossed, compare, drawn, evaluated, merged, run_statement
from tracegrad.integrations import metrics
from tracegrad.objective import Aggregation, Clip, Objective, Ratio

CASES = (
    {"tis_ratio_type": "token"},
    {"tis_ratio_type": "sequence", "tis_high": 5.0},
    {"sequence_mask_metric": "geometric", "sequence_mask": (0.98, 1.02)},
    {"sequence_mask_metric": "product", "sequence_mask": (0.5, 2.0)},
    {"outlier": (1e-4, 100.0)},
    {"outlier": (None, 1.4)},
    {"token_mask": (0.8, 1.25)},
    {
        "outlier": (1e-4, 100.0),
        "token_mask": (0.8, 1.25),
        "tis_ratio_type": "sequence",
        "tis_high": 1.5,
        "sequence_mask_metric": "geometric",
        "sequence_mask": (0.98, 1.02),
    },
)


@pytest.mark.parametrize("case", CASES, ids=lambda case: "+".join(case))
@pytest.mark.parametrize("kind", KINDS)
def test_off_policy_correction(close, fired, kind, case):
    module = pytest.importorskip("skyrl.backends.skyrl_train.utils.off_policy_correction_utils")
    data = drawn(kind)
    told = defaultdict(lambda: None, case)
    low, high = told["sequence_mask"] or (None, None)
    settings = SimpleNamespace(
        tis_ratio_type=told["tis_ratio_type"],
        token_tis_ratio_clip_high=told["tis_high"] or 2.0,
        sequence_tis_ratio_clip_high=told["tis_high"],
        sequence_mask_metric=told["sequence_mask_metric"],
        geo_mask_low=low,
        geo_mask_high=high,
        product_mask_low=low,
        product_mask_high=high,
        outlier_token_is_threshold_low=(told["outlier"] or (None, None))[0],
        outlier_token_is_threshold_high=(told["outlier"] or (None, None))[1],
        token_mask_is_threshold_low=(told["token_mask"] or (None, None))[0],
        token_mask_is_threshold_high=(told["token_mask"] or (None, None))[1],
    )
    _, theirs, _ = module.compute_off_policy_correction(data.old, data.rollout, data.mask.double(), settings)
    ours = merged(data, lambda rows, part: metrics.as_skyrl(part(data.old), part(data.rollout), rows, **case))
    compare(close, fired, "SkyRL", ours, theirs, 1e-5)  # its ratios are float32


@pytest.mark.parametrize("kind", KINDS)
def test_minibatch_differences(close, fired, kind):
    module = pytest.importorskip("skyrl.backends.skyrl_train.workers.worker_utils")
    data = drawn(kind)
    theirs = module.compute_minibatch_rollout_logprob_diff_metrics(data.theta, data.rollout, data.mask.double())
    prefix = "minibatch_rollout_logprobs_abs_diff_"
    mean, square = theirs[prefix + "mean"], theirs[prefix + "sq_mean"]
    theirs[prefix + "std"] = math.sqrt(max(0.0, square - mean**2))  # as finalised where the moments are merged
    ours = merged(
        data, lambda rows, part: metrics.as_skyrl_policy(part(data.theta), part(data.rollout), rows, minibatch=True)
    )
    compare(close, fired, "SkyRL", ours, theirs)


@pytest.mark.parametrize("kind", KINDS)
def test_policy_differences(close, fired, kind):
    data = drawn(kind)
    given = {"loss_mask": data.mask.double(), "rollout_logprobs": data.rollout}
    scope = {"training_input": given, "action_log_probs": data.old, "self": SimpleNamespace(all_metrics={})}
    run_statement("skyrl.train.trainer", "if training_input.get('rollout_logprobs', None) is not None", scope)
    ours = merged(data, lambda rows, part: metrics.as_skyrl_policy(part(data.old), part(data.rollout), rows))
    compare(close, fired, "SkyRL", ours, scope["self"].all_metrics)


@pytest.mark.parametrize("loss", ["regular", "gspo", "cispo", "importance_sampling"])
@pytest.mark.parametrize("kind", KINDS)
def test_policy_losses(close, fired, kind, loss):
    module = pytest.importorskip("skyrl.backends.skyrl_train.utils.ppo_utils")
    data = drawn(kind)
    config = SimpleNamespace(
        policy_loss_type=loss,
        eps_clip_low=0.05,
        eps_clip_high=0.2,
        clip_ratio_c=3.0,
        loss_reduction="sequence_mean",
        cispo=SimpleNamespace(cispo_eps_clip_low=0.05, cispo_eps_clip_high=0.2),
        off_policy_correction=SimpleNamespace(),
    )
    function = module.PolicyLossRegistry.get(loss)
    _, theirs = function(data.theta, data.old, data.advantages, config, data.mask.double(), None)
    ratio = (data.theta - data.old).exp()
    level = Aggregation("trace", "mean", grad="token") if loss == "gspo" else Aggregation()
    clipped = evaluated(Objective(Clip(0.05, 0.2, level=level), Ratio("theta", "old")), data).clipped
    if loss == "cispo":
        clipped = (ratio < 0.95) | (ratio > 1.2)
    given = {"ratio": ratio} if loss == "importance_sampling" else {"clipped": clipped}
    ours = merged(
        data,
        lambda rows, part: metrics.as_skyrl_policy(
            part(data.old), part(data.rollout), rows, **{name: part(value) for name, value in given.items()}
        ),
    )
    ours = {name: value for name, value in ours.items() if "abs_diff" not in name}
    compare(close, fired, "SkyRL", ours, theirs, 1e-5)


def test_every_bound_was_crossed_in_some_case(fired):
    assert_every_bound_was_crossed(fired("SkyRL metrics"))
