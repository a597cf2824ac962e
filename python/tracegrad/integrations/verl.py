"""Use tracegrad's weights and rejections instead of verl's rollout correction, and an objective as a policy loss.

Tested with verl 0.9.1. A row of a DataProto is a trace. `correct_batch` replaces verl's
`compute_rollout_correction_and_add_to_batch`.
"""

from typing import Any

import numpy as np
import torch

from tracegrad.integrations import peer
from tracegrad.integrations._common import TrainerInputs, same_scale
from tracegrad.integrations.metrics import as_verl
from tracegrad.metrics.aggregate import Rows
from tracegrad.objective import MissingLogprobs, Objective
from tracegrad.objective.correction import correct
from tracegrad.objective.torch_loss import Terms

VERSIONS = "verl==0.9.1"
_LEVELS = {("token", None): "token", ("trace", "sum"): "seq_sum", ("trace", "mean"): "seq_mean"}
_AGGREGATES = {"token-mean": ("token", None), "token-sum": ("constant", None), "seq-mean-token-mean": ("trace", "mean")}
_AGGREGATES |= dict.fromkeys(["seq-mean-token-sum", "seq-mean-token-sum-norm"], ("trace", "sum"))

_GIVES = TrainerInputs(
    frozenset({"old", "kept", "advantages"}),
    "verl hands a policy loss old logprobs, advantages and a mask, and what else it takes would be made up.",
    "Take theta/old; KL and entropy terms are verl's own options.",
    detached=False,
)


def correct_batch(
    batch: Any, objective: Objective, *, missing_logprobs: MissingLogprobs = "mask"
) -> tuple[Any, dict[str, float]]:
    """Correct a batch: apply rejections to response_mask, and add weights as rollout_is_weights.

    Args:
        batch: DataProto with old_log_probs, rollout_log_probs (NaN if missing) and response_mask; also advantages for
            components with `when`, and uid for aggregation over groups.
        objective: its components on old/rollout are applied here; those on theta are left to the loss.
        missing_logprobs: as in `correct`.

    Returns:
        the batch, and metrics under verl's names. They are 0 when verl divides by zero, for example if no token is
        left.
    """
    proto = peer("verl.protocol", VERSIONS, "DataProto.union", "DataProto.from_dict").DataProto
    tensors, uid = batch.batch, batch.non_tensor_batch.get("uid")
    old, rollout, mask = (tensors[name] for name in ("old_log_probs", "rollout_log_probs", "response_mask"))
    corrected = correct(
        old,
        rollout,
        ref=tensors.get("ref_log_prob"),
        mask=mask.bool(),
        advantages=tensors.get("advantages"),
        group=None if uid is None else np.unique(uid, return_inverse=True)[1],
        weights=objective.weights,
        rejections=objective.rejections,
        missing_logprobs=missing_logprobs,
    )
    tensors["response_mask"] = (mask * corrected.keep).to(mask.dtype)
    if any(weight.detached for weight in objective.weights):
        batch = batch.union(proto.from_dict(tensors={"rollout_is_weights": corrected.weight}))
    known = mask.bool() & ~rollout.isnan()
    old, rollout = old[known].double().cpu(), rollout[known].double().cpu()
    metrics = as_verl(old, rollout, Rows.padded(known.cpu()), **_metric_options(objective)).values()
    return batch, metrics | {"rollout_corr/rollout_rs_masked_fraction": corrected.metrics["masked_fraction"]}


def register(objective: Objective, name: str = "tracegrad") -> Any:
    """Register the objective as verl's policy loss `name`, for actor.policy_loss.loss_mode.

    `correct_batch` applies the components on old/rollout. Denominators are those of verl's loss_agg_mode, which must
    match the objective.

    Raises:
        ArgumentError: if the objective needs inputs that verl does not pass to a policy loss.
    """
    algos = peer("verl.trainer.ppo.core_algos", VERSIONS, "register_policy_loss", "agg_loss")
    _GIVES.check(objective)

    def loss(*, old_log_prob, log_prob, advantages, response_mask, loss_agg_mode, config=None, rollout_is_weights=None):
        same_scale("loss_agg_mode", loss_agg_mode, _AGGREGATES, objective)
        mask, unit = response_mask.bool(), torch.zeros_like(log_prob, requires_grad=True)
        info = {} if config is None else config.global_batch_info
        (scale,) = torch.autograd.grad(algos.agg_loss(unit, response_mask, loss_agg_mode, **info), unit)
        row = torch.arange(len(mask), device=mask.device)[:, None].expand_as(mask)
        result = objective(
            log_prob,
            None,
            Terms(
                advantages=advantages,
                keep=mask,
                old=old_log_prob,
                scale=scale.nan_to_num(0.0),
                weight=rollout_is_weights,
                trace=row,
            ),
        )
        count, difference = mask.sum().clamp(min=1), torch.where(mask, old_log_prob - log_prob.detach(), 0).sum()
        clipped = (result.per_term.clipped & result.per_term.keep).sum() / count
        return result.loss, {"actor/pg_clipfrac": clipped.item(), "actor/ppo_kl": (difference / count).item()}

    return algos.register_policy_loss(name)(loss)


def _metric_options(objective: Objective) -> dict[str, Any]:
    """Return the options of `as_verl` for the components that verl has a name for.

    verl's k1 is -log(old/rollout), so its bounds are those of the inverse ratio.
    """
    options: dict[str, Any] = {"rollout_rs": {}}
    for weight in (weight for weight in objective.weights if weight.detached):
        level, shape = _LEVELS.get((weight.level.over, weight.level.reduce)), weight.transform.to_core()
        if level in ("token", "seq_sum") and shape.name in ("clamp", "window", "strict_window"):
            options |= {"rollout_is": "token" if level == "token" else "sequence", "batch_normalize": weight.normalize}
            options["rollout_is_bounds"] = (None if shape.name == "clamp" else shape.first, shape.second)
    gates: list[Any] = [gate for gate in objective.rejections if gate.detached and hasattr(gate, "level")]
    for gate in (gate for gate in gates if gate.drops is None and gate.terms == "all"):
        level = _LEVELS.get((gate.level.over, gate.level.reduce))
        if level and gate.stat in ("k2", "k3"):
            options["rollout_rs"][f"{level}_{gate.stat}"] = (None, gate.high)
        elif level and gate.stat == "ratio" and gate.low and gate.high:
            options["rollout_rs"][f"{level}_k1"] = (1 / gate.high, 1 / gate.low)
    return options
