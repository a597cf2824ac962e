"""Call SkyRL's own losses and give ours for them."""

import pytest

from padded import per_position
from skyrl_plan import DIRECT, OLD, REDUCTIONS, Correction
from tracegrad.objective import (
    Aggregation,
    Clip,
    CrossEntropy,
    DropCovariance,
    Importance,
    MaskOutside,
    Objective,
    Penalty,
    PolicyGradient,
    Reduce,
    Rejection,
    Sigmoid,
    TopCovariance,
    Truncate,
    Weight,
)

correction_utils = pytest.importorskip("skyrl.backends.skyrl_train.utils.off_policy_correction_utils")


ppo_utils = pytest.importorskip("skyrl.backends.skyrl_train.utils.ppo_utils")

ABOVE, BELOW = {"high": 0.25, "when": "A>0"}, {"low": -0.2, "when": "A<0"}


def surrogate_of(loss: str, terms: int) -> dict:
    """Surrogate, ratio, weights, gates and penalties of a loss, where the reduction divides by `terms`.

    Its covariances see advantages that the reduction has divided, and its penalty on them is not divided.
    """
    dppo = {"surrogate": Importance(), "ratio": DIRECT}
    tv, kl = (tuple(Rejection(DIRECT, stat, **side) for side in (ABOVE, BELOW)) for stat in ("dprob", "binary_kl"))
    cov = Penalty(OLD, "abs", 1.0 * terms, masked=True, weighted=False, where=TopCovariance(0.2, "microbatch"))
    return {
        "regular": {"surrogate": Clip(0.2, 0.28), "ratio": OLD},
        "dual_clip": {"surrogate": Clip(0.2, 0.28, dual=3.0), "ratio": OLD},
        "gspo": {"surrogate": Clip(0.2, 0.28, level=Aggregation("trace", "mean", "token")), "ratio": OLD},
        "cispo": {"surrogate": PolicyGradient(), "weights": (Weight(OLD, transform=Truncate(0.0, 5.0)),)},
        "rollout_is": {
            "surrogate": PolicyGradient(),
            "weights": (Weight(DIRECT, transform=MaskOutside(0.8, 1.28, strict=True)),),
        },
        "dppo_tv": dppo | {"rejections": tv},
        "dppo_kl": dppo | {"rejections": kl},
        "sapo": {"surrogate": Sigmoid(1.0, 1.05), "ratio": OLD},
        "clip_cov": {
            "surrogate": Clip(0.2, 0.28),
            "ratio": OLD,
            "rejections": (DropCovariance(0.1, 1e-3 * terms, 0.03 * terms, "microbatch"),),
        },
        "kl_cov": {"surrogate": Importance(), "ratio": OLD, "penalties": (cov,)},
        "importance_sampling": {"surrogate": Importance(), "ratio": OLD},
        "cross_entropy": {"surrogate": CrossEntropy(), "reduce": Reduce("constant", norm=1.0)},
    }[loss]


def objective_of(loss: str, correction: Correction, reduction: str, terms: int = 1) -> Objective:
    told = surrogate_of(loss, terms)
    told["weights"] = correction.weights + told.get("weights", ())
    told["rejections"] = correction.rejections + told.get("rejections", ())
    return Objective(**{"reduce": REDUCTIONS[reduction]} | told)


def scaled(data, reduction: str, micro: int = 8):
    """SkyRL's advantages after its reduction, [B, S]."""
    mask = data["mask"].to(data["logprobs"].dtype)
    return ppo_utils.apply_loss_reduction_to_advantages_minibatch(
        per_position(data["advantages"], mask), mask, reduction, micro, 40, [(0, 2), (2, 4), (4, 6), (6, 8)]
    )
