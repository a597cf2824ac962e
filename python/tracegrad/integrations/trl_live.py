"""TRL's GRPOTrainer as it plays: its generation, rewards and advantages, our objective. Run against trl 1.16.0.

Here is `WithObjective`, a mixin; `integrations.trl` hands it on. No traces of ours come by here.
"""

import dataclasses
import inspect
from typing import Any

import torch
from torch import Tensor

from tracegrad import presets
from tracegrad.algebra import Missing, Objective
from tracegrad.errors import ArgumentError
from tracegrad.integrations import peer
from tracegrad.integrations.padded import step_terms
from tracegrad.integrations.trl_step import GIVES, VERSIONS, check_steps, loss_of, may_give, note, over_ranks

_BEHIND: Any = object  # the user puts GRPOTrainer there
_TAKEN = ("_generate_and_score_completions", "_prepare_inputs", "_compute_loss", "_get_per_token_logps_and_entropies")
_SAID_BY_THE_OBJECTIVE = (
    *("loss_type", "importance_sampling_level", "epsilon", "epsilon_high", "delta", "use_bias_correction_kl"),
    *("sapo_temperature_pos", "sapo_temperature_neg", "vespo_k_pos", "vespo_lambda_pos", "vespo_k_neg"),
    *("vespo_lambda_neg", "top_entropy_quantile", "off_policy_mask_threshold", "entropy_coef", "use_adaptive_entropy"),
    *("vllm_importance_sampling_mode", "vllm_importance_sampling_clip_max", "vllm_importance_sampling_clip_min"),
)


class WithObjective(_BEHIND):
    """Put before GRPOTrainer: `class Trainer(WithObjective, GRPOTrainer): ...`.

    TRL generates, scores and forms advantages as it does by itself, and evaluates by its own loss. In training our
    objective is the loss, corrected over whole optimizer steps: `old` is TRL's `old_per_token_logps`, or the policy as
    it is where TRL takes that for it; recorded logprobs are its `sampling_per_token_logps`; a completion is a trace,
    what is sampled between two tools a turn, the completions of one prompt a group.

    Args:
        arguments: GRPOTrainer's.
        objective: the loss. Its reference is what TRL loads where GRPOConfig.beta is not 0.
        missing: for sampled tokens without a logprob, as in `correct`; TRL takes their ratio for 1 ("neutral").
        options: GRPOTrainer's.

    Raises:
        ArgumentError: if the installed TRL is of another shape, does not give what the objective takes, or is told by
            an option of GRPOConfig what the objective says.
    """

    def __init__(
        self, *arguments: Any, objective: Objective = presets.DAPO, missing: Missing = "mask", **options: Any
    ) -> None:
        peer("trl", VERSIONS, *(f"GRPOTrainer.{name}" for name in _TAKEN))
        objective.check_missing(missing)
        self.objective, self.missing = objective, missing
        super().__init__(*arguments, **options)
        _check(self.args, objective)
        recorded = self.use_vllm or self.rollout_func is not None
        GIVES.check(objective, may_give(self.args, rollout=recorded, ref=self.beta != 0))

    def _generate_and_score_completions(self, inputs: Any) -> dict[str, Any]:
        """TRL's, with the place of each completion, which its shuffle would lose."""
        found = super()._generate_and_score_completions(inputs)
        if self.model.training:
            rows = len(found["completion_ids"])
            found["trace"] = torch.arange(rows) + self.accelerator.process_index * rows
        return found

    def _prepare_inputs(self, generation_batch: Any) -> Any:
        before = self._buffered_inputs
        inputs = super()._prepare_inputs(generation_batch)
        if self.model.training and self._buffered_inputs is not before:
            window = self.args.gradient_accumulation_steps
            for at in range(0, len(self._buffered_inputs), window):
                self._correct(self._buffered_inputs[at : at + window])
        return inputs

    def _correct(self, step: list[dict[str, Any]]) -> None:
        """Gives each micro-batch of one optimizer step its terms."""
        parts = [self._part(inputs) for inputs in step]
        device, how = self.accelerator.device, {"missing": self.missing, "all_reduce": over_ranks(self)}
        terms, metrics = step_terms(self.objective, parts, device, **how)
        note(self, {f"tracegrad/{name}": value for name, value in metrics.items()})
        for inputs, here in zip(step, terms, strict=True):
            inputs["terms"] = here

    def _part(self, inputs: dict[str, Any]) -> dict[str, Any]:
        """[m] what the terms of a micro-batch are beside their logprobs."""
        mask, needs = _mask(inputs), self.objective.needs
        old, rollout, ref = (inputs.get(f"{name}_per_token_logps") for name in ("old", "sampling", "ref"))
        if needs.rollout and rollout is None:
            raise ArgumentError(
                "the objective takes recorded logprobs, and this generation of GRPOTrainer has none. Their ratio would "
                "be made up. Return 'logprobs' from rollout_func, or take an objective on theta/old."
            )
        early = any(part.detached and "old" in ratio for part in self.objective.parts for ratio, _ in part.ratios())
        if old is None and early:
            with torch.no_grad():
                old = self._score(self.model, inputs)[0]
        trace = inputs["trace"].to(mask.device)
        begins = mask & ~torch.nn.functional.pad(mask, (1, 0))[:, :-1]
        arrays = {
            "trace": trace,
            "turn": begins.cumsum(1) - 1,
            "group": trace // self.num_generations,
            "advantages": inputs["advantages"],
            "old": old,
            "rollout": rollout,
            "ref": ref,
        }
        given = {name: each for name, each in arrays.items() if each is not None}
        return {name: (each[:, None] if each.ndim == 1 else each).expand_as(mask)[mask] for name, each in given.items()}

    def _compute_loss(self, model: Any, inputs: Any) -> Tensor:
        if "terms" not in inputs:
            return super()._compute_loss(model, inputs)
        options = {"compute_aux_loss": True} if self.aux_loss_enabled else {}
        logprobs, entropy, aux = self._score(model, inputs, compute_entropy=True, **options)
        mask = _mask(inputs)
        return loss_of(self, self.objective, logprobs[mask], entropy[mask], aux, inputs["terms"])

    def _score(self, model: Any, inputs: dict[str, Any], **options: bool) -> Any:
        """Logprobs of the completions by TRL's own forward pass, [B, T], their entropy and the router's loss."""
        ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], dim=1)
        attention = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], dim=1)
        takes = inspect.signature(self._get_per_token_logps_and_entropies).parameters
        options |= {name: inputs[name] for name in takes if name in inputs}  # pictures
        kept = inputs["completion_ids"].size(1)
        return self._get_per_token_logps_and_entropies(model, ids, attention, kept, **options)


def _mask(inputs: dict[str, Any]) -> Tensor:
    """[B, T] bool: the tokens that were sampled and count."""
    return (inputs["completion_mask"] * inputs.get("tool_mask", 1)).bool()


def _check(args: Any, objective: Objective) -> None:
    """Refuses options of GRPOConfig that would have no effect."""
    check_steps(args)
    defaults = {each.name: each.default for each in dataclasses.fields(args)}
    for name in _SAID_BY_THE_OBJECTIVE:
        if name in defaults and getattr(args, name) != defaults[name]:
            raise ArgumentError(
                f"GRPOConfig.{name} is {getattr(args, name)!r}, and nothing reads it: the objective is\n{objective}\n"
                "Leave the option out, and say it in the objective."
            )
    if args.beta != 0 and not objective.needs.ref:
        raise ArgumentError(
            f"GRPOConfig.beta is {args.beta}, which loads a reference, and the objective takes none. Leave it out, or "
            f"pass objective=with_beta(objective, {args.beta})."
        )
