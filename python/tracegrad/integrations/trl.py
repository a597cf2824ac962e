"""Train with TRL's GRPOTrainer and a tracegrad objective: on recorded traces or on what TRL generates.

Run against trl 1.16.0. Mixins: `FromTraces` for recorded traces (a row is a trace, each optimizer step is corrected
whole), `WithObjective` for TRL's own generation. docs/trainers.md has both.
"""

import dataclasses
import inspect
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from tracegrad.alignment.sequences import Sequences
from tracegrad.errors import ArgumentError
from tracegrad.integrations import peer
from tracegrad.integrations._common import Gives, Padded, Recorded, as_trl, step_terms
from tracegrad.objective import Missing, Objective, presets
from tracegrad.objective.correction import AllReduce
from tracegrad.objective.torch_loss import Terms

__all__ = ["FromTraces", "WithObjective"]


VERSIONS = "trl==1.16.0"
GIVES = Gives(
    frozenset({"old", "entropy", "turn", "step", "kept", "reductions", "advantages"}),
    "GRPOTrainer does not give it, and it would be made up.",
    "Take an objective without it, or our learner.",
    {
        "ref": "Pass GRPOConfig(beta=...) above 0, without PEFT where traces are recorded: the coefficient stays the "
        "objective's.",
        "rollout": "Generate with use_vllm=True, or take an objective on theta/old.",
        "proximal": "Take old in its place (DECOUPLED_PPO).",
        "group": "A group may stand on several ranks. Take an objective that looks at traces, or our learner.",
    },
)
"""What a GRPOTrainer always gives."""


def may_give(args: Any, *, rollout: bool, ref: bool) -> frozenset[str]:
    """What it gives in this run: recorded logprobs, a reference, and groups where there is one rank."""
    found = {"rollout": rollout, "ref": ref, "group": args.world_size == 1, "group_counts": args.world_size == 1}
    return frozenset(thing for thing, given in found.items() if given)


def check_steps(args: Any) -> None:
    """Refuses generations that end inside an optimizer step."""
    if args.steps_per_generation % args.gradient_accumulation_steps:
        raise ArgumentError(
            f"steps_per_generation is {args.steps_per_generation}, gradient_accumulation_steps "
            f"{args.gradient_accumulation_steps}: optimizer steps would come in pieces, and denominators are of the "
            "whole. Make the first a multiple of the second."
        )


def loss_of(trainer: Any, objective: Objective, logprobs: Tensor, entropy: Tensor, aux: Any, terms: Terms) -> Tensor:
    """The loss of a micro-batch as GRPOTrainer takes it, and a line in its log; [m] tensors.

    Args:
        trainer: whose ranks' gradients are averaged, and whose router has a loss of its own.
        objective: evaluated.
        logprobs, entropy: of the policy being trained.
        aux: the router's loss, None without.
        terms: `old` None is the policy as it is.
    """
    terms = replace(terms, old=logprobs.detach()) if objective.needs.old and terms.old is None else terms
    found = objective(logprobs, entropy, terms)
    note(trainer, as_trl(objective, found.per_term, terms, entropy).all_reduce(reducer(trainer)).named())
    routing = 0.0 if aux is None else trainer.router_aux_loss_coef * aux / trainer.current_gradient_accumulation_steps
    return found.loss * trainer.accelerator.num_processes + routing


def note(trainer: Any, metrics: Mapping[str, float]) -> None:
    """Into the trainer's own log of training."""
    for name, value in metrics.items():
        trainer._metrics["train"][name].append(value)


def reducer(trainer: Any) -> Callable[[NDArray[np.float64], str], NDArray[np.float64]]:
    """Sums and maxima over the trainer's ranks."""

    def all_reduce(array: NDArray[np.float64], op: str) -> NDArray[np.float64]:
        ranks = trainer.accelerator.gather(torch.from_numpy(array)[None].to(trainer.accelerator.device))
        return (ranks.amax(0) if op == "max" else ranks.sum(0)).cpu().numpy()

    return all_reduce


def over_ranks(trainer: Any) -> AllReduce | None:
    """What `correct` takes: None on one rank, where groups count for themselves."""
    return reducer(trainer) if trainer.accelerator.num_processes > 1 else None


_BEHIND: Any = object  # the user puts GRPOTrainer there
_LIVE_METHODS = (
    "_generate_and_score_completions",
    "_prepare_inputs",
    "_compute_loss",
    "_get_per_token_logps_and_entropies",
)
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
        peer("trl", VERSIONS, *(f"GRPOTrainer.{name}" for name in _LIVE_METHODS))
        objective.check_missing(missing)
        self.objective, self.missing = objective, missing
        super().__init__(*arguments, **options)
        _check_live(self.args, objective)
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


def _check_live(args: Any, objective: Objective) -> None:
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


_TAKEN = ("_prepare_inputs", "_compute_loss", "_get_per_token_logps_and_entropies", "_get_train_sampler")


class FromTraces(_BEHIND):
    """Put before GRPOTrainer: `class Trainer(FromTraces, GRPOTrainer): ...`.

    `old` is measured before every `steps_per_generation` micro-batches and kept over `num_iterations`, as TRL does with
    its generations. Denominators are of whole optimizer steps: how a step was cut does not change its gradient. TRL's
    own loss options (loss_type, epsilon, scale_rewards and so on) are not read; num_generations neither.

    Args:
        model, args: as GRPOTrainer's. per_device_train_batch_size counts traces.
        sequences, advantages: aligned traces; [R] by trace or [M] by term.
        objective: its reference policy is the ref_model that TRL loads where args.beta is not 0.
        missing: as in `correct`.
        trainer: GRPOTrainer's other arguments. Evaluation is TRL's own: it generates, and calls reward_funcs.

    Raises:
        ArgumentError: if the installed TRL is of another shape, or `args` and the traces contradict each other.
    """

    def __init__(
        self,
        model: Any,
        args: Any,
        sequences: Sequences,
        advantages: ArrayLike,
        *,
        objective: Objective = presets.DAPO,
        missing: Missing = "mask",
        **trainer: Any,
    ) -> None:
        peer("trl", VERSIONS, *(f"GRPOTrainer.{name}" for name in _TAKEN))
        ref = args.beta != 0 and not trainer.get("peft_config") and not hasattr(model, "peft_config")
        GIVES.check(objective, may_give(args, rollout=True, ref=ref))
        self.recorded = Recorded.of(sequences, advantages, objective, missing)
        _check(args, self.recorded)
        traces = self.recorded.traces
        rows = peer("datasets", VERSIONS).Dataset.from_dict({"prompt": [""] * len(traces), "trace": traces})
        trainer.setdefault("reward_funcs", [_recorded_reward])
        super().__init__(model=model, args=args, train_dataset=rows, **trainer)

    def _get_train_sampler(self, dataset: Any = None) -> Any:
        """TRL's sampler over traces, each once: groups are known by their ids and need not stand together."""
        sampler = super()._get_train_sampler(dataset)
        sampler.mini_repeat_count, sampler.batch_size = 1, self.args.generation_batch_size
        return sampler

    def _prepare_inputs(self, generation_batch: Any) -> Any:
        if not self.model.training:
            return super()._prepare_inputs(generation_batch)
        every = self.args.steps_per_generation
        if self._step % (every * self.num_iterations) == 0 or self._buffered_inputs is None:
            self._buffered_inputs = self._micro_batches([row["trace"] for row in generation_batch])
        return self._buffered_inputs[self._step % every]

    def _micro_batches(self, traces: list[int]) -> list[dict[str, Any]]:
        """The traces of some whole optimizer steps, cut into micro-batches, each step corrected together."""
        size = len(traces) // self.args.steps_per_generation
        cut = [self.recorded.padded(traces[at : at + size], "left") for at in range(0, len(traces), size)]
        cut, needs = [padded.to(self.accelerator.device) for padded in cut], self.recorded.objective.needs
        with torch.no_grad():
            old = [self._score(self.model, padded)[0] for padded in cut] if needs.old else None
            ref = [self._score(self.ref_model, padded)[0] for padded in cut] if needs.ref else None
        found, window = [], self.args.gradient_accumulation_steps
        for at in range(0, len(cut), window):
            step = slice(at, at + window)
            rest = (old and old[step], ref and ref[step])
            terms, metrics = self.recorded.step(cut[step], *rest, all_reduce=over_ranks(self))
            note(self, {f"tracegrad/{name}": value for name, value in metrics.items()})
            found += [{"padded": part, "terms": here} for part, here in zip(cut[step], terms, strict=True)]
        return found

    def _compute_loss(self, model: Any, inputs: Any) -> Tensor:
        if "padded" not in inputs:
            return super()._compute_loss(model, inputs)
        options = {"compute_aux_loss": True} if self.aux_loss_enabled else {}
        logprobs, entropy, *aux = self._score(model, inputs["padded"], compute_entropy=True, **options)
        return loss_of(self, self.recorded.objective, logprobs, entropy, aux[0] if aux else None, inputs["terms"])

    def _score(self, model: Any, padded: Padded, **options: bool) -> list[Tensor]:
        """[m] logprob of the terms by TRL's own forward pass, then their entropy and the router's loss if asked for."""
        kept = padded.ids.shape[1] - padded.first
        found = self._get_per_token_logps_and_entropies(model, padded.ids, padded.attention, kept, **options)
        at = (padded.row, padded.column - padded.first)
        return [each[at] if each.ndim == 2 else each for each in found if each is not None]


def _recorded_reward(**_: Any) -> list[float]:
    raise ArgumentError("evaluation generates, and has no reward for it. Pass reward_funcs=, or no eval_dataset.")


def _check(args: Any, recorded: Recorded) -> None:
    check_steps(args)
    s = recorded.sequences
    heat = 1 / np.unique(s.inv_temperature[s.trainable])
    if len(recorded.traces) < args.generation_batch_size:
        raise ArgumentError(
            f"{len(recorded.traces)} traces have a term, and generation_batch_size is {args.generation_batch_size}. "
            "TRL drops what does not fill one, so nothing would be trained. Lower it, or its factors."
        )
    if not np.allclose(heat, args.temperature):
        raise ArgumentError(
            f"the recorded logprobs are of temperature {heat.tolist()}, and TRL divides all logits by "
            f"GRPOConfig.temperature, {args.temperature}: a ratio of two distributions. Set it to the recorded one."
        )
