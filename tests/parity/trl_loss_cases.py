"""Give the losses of TRL that are compared, and their inputs."""

from typing import Any, NamedTuple

import torch

from peer_code import trl_importance_ratio, trl_loss
from tracegrad.objective import (
    Aggregation,
    Clip,
    EntropyBonus,
    Gamma,
    MaskOutside,
    Objective,
    Penalty,
    PolicyGradient,
    Ratio,
    Reduce,
    Rejection,
    Sigmoid,
    TopEntropy,
    Truncate,
    Weight,
)

OLD, MISMATCH, SAMPLER = Ratio("theta", "old"), Ratio("old", "rollout"), Ratio("rollout", "theta")

MEAN, PRODUCT = Aggregation("trace", "mean"), Aggregation("trace", "sum")

LEVELS = {"token": Aggregation(), "sequence": MEAN}

LOSSES = ("grpo", "bnpo", "dr_grpo", "dapo", "luspo", "cispo", "sapo", "vespo")

LENGTH = 32

REDUCTIONS = {
    "grpo": Reduce("trace", "mean"),
    "sapo": Reduce("trace", "mean"),
    "dr_grpo": Reduce("trace", "sum", norm=float(LENGTH)),
    "luspo": Reduce("trace", "sum", norm=1.0),
}

TAU = torch.tensor(1.05).item()  # TRL's temperatures are float32 whatever the logprobs are

EPSILONS = {"epsilon": 0.2, "epsilon_high": 0.28}


class Case(NamedTuple):
    loss: str
    level: str = "token"
    mode: str | None = None
    bounds: tuple[float | None, float] = (None, 3.0)
    delta: float | None = None
    kl: str | None = None  # None, "plain" or "corrected"
    opsm: float | None = None
    share: float = 1.0
    coef: float = 0.0

    def __str__(self) -> str:
        return " ".join(f"{name} {value}" for name, value in self._asdict().items() if value is not None)

    @property
    def config(self) -> dict[str, Any]:
        """TRL's options."""
        return {
            "loss_type": self.loss,
            "importance_sampling_level": self.level,
            **({"epsilon_high": 5.0} if self.loss == "cispo" else EPSILONS),
            "delta": self.delta,
            "beta": 0.0 if self.kl is None else 0.04,
            "use_bias_correction_kl": self.kl == "corrected",
            "off_policy_mask_threshold": self.opsm,
            "top_entropy_quantile": self.share,
            "entropy_coef": self.coef,
            "max_completion_length": LENGTH,
        }

    @property
    def objective(self) -> Objective:
        """Ours."""
        level, weights, gates, penalties = LEVELS[self.level], [], [], []
        if self.mode is not None:
            low, high = self.bounds[0] or 0.0, self.bounds[1]
            shape = Truncate(low, high) if self.mode.endswith("truncate") else MaskOutside(low, high)
            weights.append(Weight(MISMATCH, PRODUCT if self.mode.startswith("sequence") else Aggregation(), shape))
        if self.loss == "cispo":
            weights.append(Weight(OLD, level, Truncate(0.0, 5.0)))
        if self.loss == "vespo":
            absorbs = self.mode is not None
            weights.append(Weight(OLD, PRODUCT, Gamma(2.0, 3.0), when="A>=0", absorbs=absorbs))
            weights.append(Weight(OLD, PRODUCT, Gamma(3.0, 2.0), when="A<0", absorbs=absorbs))
        if self.opsm is not None:
            ratio = SAMPLER if self.mode is not None else Ratio("old", "theta")
            gates.append(Rejection(ratio, "k1", MEAN, high=self.opsm, when="A<0"))
        if self.share < 1:
            gates.append(TopEntropy(self.share, "microbatch"))
        if self.kl is not None:
            factor = {"importance": OLD, "importance_level": level} if self.kl == "corrected" else {}
            penalties.append(Penalty(Ratio("theta", "ref"), "k3", 0.04, masked=False, weighted=False, **factor))
        if self.loss in ("cispo", "vespo"):
            surrogate, ratio = PolicyGradient(), None
        elif self.loss == "sapo":
            surrogate, ratio = Sigmoid(1.0, TAU, level), OLD
        else:
            surrogate, ratio = Clip(0.2, 0.28, delta=self.delta, level=level), OLD
        return Objective(
            surrogate,
            ratio,
            tuple(weights),
            tuple(gates),
            tuple(penalties),
            REDUCTIONS.get(self.loss, Reduce("token")),
            entropy=EntropyBonus(self.coef, masked=False, reduce=Reduce("token")) if self.coef else None,
        )


def given(case: Case, data: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The batch as TRL's generation step leaves it."""
    mask = data["mask"].long()
    inputs = {
        "completion_mask": (mask.flip(1).cumsum(1).flip(1) > 0).long(),
        "tool_mask": mask,
        "advantages": data["advantages"],
        "old_per_token_logps": data["old"],
        "ref_per_token_logps": data["ref"],
    }
    if case.mode is not None:
        inputs["sampling_per_token_logps"] = data["rollout"]
        inputs["importance_sampling_ratio"] = trl_importance_ratio(
            data["old"], data["rollout"], mask, case.mode, clip_min=case.bounds[0], clip_max=case.bounds[1]
        )
    return inputs


def theirs(case: Case, data: dict[str, torch.Tensor]):
    """TRL's loss and its gradients with respect to logprobs and entropies."""
    logprobs = data["logprobs"].clone().requires_grad_()
    entropy = data["entropy"].clone().requires_grad_()
    loss = trl_loss(logprobs, given(case, data), entropy, **case.config)
    loss.backward()
    return loss.detach(), logprobs.grad, entropy.grad
