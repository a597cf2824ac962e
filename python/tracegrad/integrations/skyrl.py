"""Use an objective as SkyRL's policy loss, which also replaces its off_policy_correction. Tested with skyrl 0.3.0.

SkyRL keeps its generators, advantages, workers, denominators, and KL and entropy terms. A row is a trace, or a turn if
SkyRL trains turn by turn (generator.step_wise_trajectories).
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from tracegrad.errors import ArgumentError
from tracegrad.integrations import peer
from tracegrad.integrations._common import TrainerInputs, check_sampling, same_scale
from tracegrad.integrations.metrics import as_skyrl
from tracegrad.metrics.aggregate import Rows
from tracegrad.objective import MissingLogprobs, Objective, Reduce
from tracegrad.objective.torch_loss import build_terms

VERSIONS = "skyrl==0.3.0"
_UTILS = "skyrl.backends.skyrl_train.utils"
_UNKNOWN = -9999.0  # SkyRL's inference servers write this for an unknown logprob
_REDUCTIONS = {"token_mean": ("token", None), "sequence_mean": ("trace", "mean"), "prompt_mean": ("prompt", "mean")}
_REDUCTIONS |= {"seq_mean_token_sum_norm": ("trace", "sum")}
_OWN = "KL and entropy terms are SkyRL's own options, use_kl_loss and use_entropy_loss."
_GIVES = TrainerInputs(
    frozenset({"old", "rollout", "group_counts"}),
    "SkyRL hands a policy loss a mask, old and recorded logprobs of one micro-batch, and advantages that "
    "loss_reduction has divided; what else it takes would be made up.",
    "Take weights and rejections that look at tokens or traces.",
    {
        "ref": _OWN,
        "entropy": _OWN,
        "kept": "SkyRL counts before it rejects: take Reduce(..., denominator='all').",
        "advantages": f"A loss that is A times something says times_advantage=True. {_OWN}",
    },
)


def register(
    objective: Objective, name: str = "tracegrad", *, missing_logprobs: MissingLogprobs = "mask", config: Any = None
) -> Any:
    """Register the objective as SkyRL's policy loss `name`, for trainer.algorithm.policy_loss_type.

    The objective corrects old/rollout, so off_policy_correction must be off. Generators must return logprobs
    (sampling_params.logprobs=0) if the objective reads them. Denominators are those of loss_reduction, which must match
    the objective. SkyRL divides the advantages by them, so a surrogate may use the sign of advantages but not their
    size.

    Args:
        objective: on theta, old and rollout.
        name: of the policy loss.
        missing_logprobs: treatment of tokens without a recorded logprob (NaN, or SkyRL's -9999), as in `correct`.
        config: SkyRL's complete config, a SkyRLTrainConfig or a dict with the same names. Pass it if trajectories may
            be step-wise or are sampled with top_p, top_k or min_p: SkyRL does not pass it to a policy loss, which
            cannot see whether its rows are turns, or from which tokens they were sampled.

    Returns:
        The function that SkyRL calls.

    Raises:
        ArgumentError: if the objective needs inputs that SkyRL does not pass, the name is used by another loss, the
            installed SkyRL lacks a function, or by `config` the objective aggregates over traces and rows are turns,
            or it reads recorded logprobs of tokens sampled with top_p, top_k, min_p or a penalty.
    """
    if config is not None:
        _check_config(objective, config)
    registry = peer(f"{_UTILS}.ppo_utils", VERSIONS, "PolicyLossRegistry.unregister").PolicyLossRegistry
    utils = peer(f"{_UTILS}.off_policy_correction_utils", VERSIONS, "off_policy_correction_enabled")
    corrects = utils.off_policy_correction_enabled
    objective.check_missing(missing_logprobs)
    _GIVES.check(objective)
    scaled = replace(objective, reduce=Reduce("constant", norm=1.0))  # the advantages include the denominators

    def loss(log_probs, old_log_probs, advantages, config, loss_mask=None, rollout_logprobs=None):
        same_scale("loss_reduction", config.loss_reduction, _REDUCTIONS, objective)
        if corrects(config.off_policy_correction):
            raise ArgumentError(
                "TG-INTEG-014: off_policy_correction is on, but the registered objective has its own correction, so "
                "SkyRL's has no effect. Keep its defaults, and set weights and rejections in the objective."
            )
        if rollout_logprobs is None and objective.requirements.rollout:
            raise ArgumentError(
                "TG-INTEG-015: the objective needs recorded logprobs, but the batch has no rollout_logprobs. Set "
                "generator.sampling_params.logprobs=0, or use an objective on theta/old."
            )
        mask = torch.ones_like(log_probs, dtype=torch.bool) if loss_mask is None else loss_mask > 0
        rollout = (
            None if rollout_logprobs is None else rollout_logprobs.masked_fill(rollout_logprobs <= _UNKNOWN, torch.nan)
        )
        terms, corrected = build_terms(
            scaled,
            log_probs,
            advantages=advantages,
            mask=mask,
            old=old_log_probs,
            rollout=rollout,
            missing_logprobs=missing_logprobs,
        )
        result = scaled(log_probs, None, terms)
        clipped = (result.per_term.clipped & mask).sum() / mask.sum().clamp(min=1)
        metrics = {name: corrected.metrics[name] for name in ("frac_missing", "masked_fraction")}
        return result.loss, {"clip_ratio": clipped.item(), **metrics, **_ratios(old_log_probs, rollout, mask)}

    loss.__dict__["objective"] = objective
    if name in registry.list_available():
        if not hasattr(registry.get(name), "objective"):
            raise ArgumentError(
                f"TG-INTEG-016: a policy loss named {name} is already registered and would be replaced. Use another "
                f"name."
            )
        registry.unregister(name)
    registry.register(name, loss)
    return loss


def _check_config(objective: Objective, config: Any) -> None:
    """Raise ArgumentError if the objective would treat a turn as a trace, or compare different distributions."""
    generator = _options(_options(config).get("generator", {}))
    over_traces = [f"{ratio} over the {level.over}" for ratio, level in objective.ratios() if level.over != "token"]
    over_traces += [f"a mean over traces, {objective.reduce}"] if objective.reduce.per in ("trace", "group") else []
    if generator.get("step_wise_trajectories") and over_traces:
        raise ArgumentError(
            "TG-INTEG-017: generator.step_wise_trajectories makes one row per turn, but the objective uses "
            f"{over_traces[0]}, which needs one row per trace. Use ratios, weights and rejections of tokens, and "
            "Reduce('token') or Reduce('prompt', ...), or turn off step_wise_trajectories."
        )
    sampling = _options(generator.get("sampling_params") or {})
    own = {name: value for name, value in sampling.items() if name not in ("logprobs", "stop", "additional_kwargs")}
    check_sampling(objective, "generator.sampling_params.", {**own, **(sampling.get("additional_kwargs") or {})})


def _options(config: Any) -> Mapping[str, Any]:
    return config if isinstance(config, Mapping) else vars(config)


def _ratios(old: Any, rollout: Any, mask: Any) -> dict[str, float]:
    """Return metrics of old/rollout under SkyRL's names, over the trained tokens with a recorded logprob."""
    if old is None or rollout is None or not (known := mask & ~rollout.isnan()).any():
        return {}
    old, rollout = old[known].double().cpu(), rollout[known].double().cpu()
    return as_skyrl(old, rollout, Rows.padded(known.cpu())).values()
