"""Train with TRL's GRPOTrainer and a tracegrad objective, on recorded traces or on TRL's own generations.

Tested with trl 1.16.0. The mixin `FromTraces` is for recorded traces: a row is a trace, and each optimizer step is
corrected as one unit. The mixin `WithObjective` is for TRL's own generation. docs/how-to/trl.md and
docs/how-to/trl-rollouts.md describe them.
"""

import dataclasses
import inspect
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from tracegrad.alignment.sequences import Sequences
from tracegrad.errors import ArgumentError
from tracegrad.integrations import peer
from tracegrad.integrations._common import (
    PaddedRows,
    RecordedTraces,
    TrainerInputs,
    as_trl,
    check_sampling,
    step_terms,
    warn_unused_logprobs,
)
from tracegrad.model.structure import unwrap_adapters
from tracegrad.objective import MissingLogprobs, Objective, presets
from tracegrad.objective.correction import AllReduce
from tracegrad.objective.torch_loss import Terms
from tracegrad.recipes import from_trl

__all__ = ["FromTraces", "WithObjective"]


VERSIONS = "trl==1.16.0"
TRL_INPUTS = TrainerInputs(
    frozenset({"old", "entropy", "turn", "step", "kept", "reductions", "advantages"}),
    "GRPOTrainer does not give it, and it would be made up.",
    "Take an objective without it, or tracegrad.train.",
    {
        "ref": "Pass GRPOConfig(beta=...) above 0, without PEFT where traces are recorded: the coefficient stays the "
        "objective's.",
        "rollout": "Generate with use_vllm=True, or take an objective on theta/old.",
        "proximal": "Take old in its place (DECOUPLED_PPO).",
        "group": "A group may stand on several ranks. Take an objective that looks at traces, or tracegrad.train.",
    },
)
"""The inputs that a GRPOTrainer always passes to an objective."""


def available_inputs(args: Any, *, rollout: bool, ref: bool) -> frozenset[str]:
    """Return the further inputs that a run passes: recorded logprobs, a reference, and groups if there is one rank."""
    available = {"rollout": rollout, "ref": ref, "group": args.world_size == 1, "group_counts": args.world_size == 1}
    return frozenset(name for name, is_available in available.items() if is_available)


def check_steps(args: Any) -> None:
    """Raise ArgumentError if a generation batch ends inside an optimizer step."""
    if args.steps_per_generation % args.gradient_accumulation_steps:
        raise ArgumentError(
            f"TG-INTEG-019: steps_per_generation is {args.steps_per_generation}, gradient_accumulation_steps "
            f"{args.gradient_accumulation_steps}: a generation would not split into complete optimizer steps. Make the "
            "first a multiple of the second."
        )


def loss_of(
    trainer: Any,
    objective: Objective,
    logprobs: Tensor,
    entropy: Tensor,
    aux: Any,
    terms: Terms,
    vocabulary_logprobs: Tensor | None = None,
) -> Tensor:
    """Return the loss of a micro-batch in the scale of GRPOTrainer, and add its metrics to the trainer's log.

    Args:
        trainer: the trainer, which averages gradients over ranks and may have a router loss.
        objective: the objective to evaluate.
        logprobs, entropy: [m] of the policy being trained.
        aux: the router loss; None if there is none.
        terms: [m]; `old` None means the current policy.
        vocabulary_logprobs: [m], as `Objective` reads them.
    """
    terms = replace(terms, old=logprobs.detach()) if objective.requirements.old and terms.old is None else terms
    loss = objective(logprobs, entropy, terms, vocabulary_logprobs=vocabulary_logprobs)
    metrics = as_trl(objective, loss.per_term, terms, entropy, logprobs)
    log_metrics(trainer, metrics.all_reduce(reducer(trainer)).values())
    routing = 0.0 if aux is None else trainer.router_aux_loss_coef * aux / trainer.current_gradient_accumulation_steps
    return loss.loss * trainer.accelerator.num_processes + routing


def log_metrics(trainer: Any, metrics: Mapping[str, float]) -> None:
    """Add metrics to the trainer's own training log."""
    for name, value in metrics.items():
        trainer._metrics["train"][name].append(value)


def reducer(trainer: Any) -> Callable[[NDArray[np.float64], str], NDArray[np.float64]]:
    """Return a function that computes sums and maxima over the trainer's ranks."""

    def all_reduce(array: NDArray[np.float64], op: str) -> NDArray[np.float64]:
        ranks = trainer.accelerator.gather(torch.from_numpy(array)[None].to(trainer.accelerator.device))
        return (ranks.amax(0) if op == "max" else ranks.sum(0)).cpu().numpy()

    return all_reduce


def all_reduce_of(trainer: Any) -> AllReduce | None:
    """Return the `all_reduce` argument of `correct`; None on one rank, where `correct` counts groups itself."""
    return reducer(trainer) if trainer.accelerator.num_processes > 1 else None


_Base: Any = object  # users put GRPOTrainer after the mixin in the list of base classes
_LIVE_METHODS = (
    "_generate_and_score_completions",
    "_prepare_inputs",
    "_compute_loss",
    "_get_per_token_logps_and_entropies",
)
_SAMPLING_OPTIONS = ("top_p", "top_k", "min_p", "repetition_penalty")
_OBJECTIVE_OPTIONS = (
    *("loss_type", "importance_sampling_level", "epsilon", "epsilon_high", "delta", "use_bias_correction_kl"),
    *("sapo_temperature_pos", "sapo_temperature_neg", "vespo_k_pos", "vespo_lambda_pos", "vespo_k_neg"),
    *("vespo_lambda_neg", "top_entropy_quantile", "off_policy_mask_threshold", "entropy_coef", "use_adaptive_entropy"),
    *("vllm_importance_sampling_mode", "vllm_importance_sampling_clip_max", "vllm_importance_sampling_clip_min"),
    "vllm_importance_sampling_correction",
)
"""Options of TRL's loss, which the objective replaces."""
_ROLLOUT_OPTIONS = (
    *("scale_rewards", "multi_objective_aggregation", "reward_weights", "mask_truncated_completions"),
    "log_completions",
)
"""Options of TRL's advantages and completions, which recorded traces do not have."""


def options_without_effect(args: Any, objective: Objective, names: Sequence[str]) -> list[str]:
    """Return the options among `names` that are not at their defaults, as `name=value`.

    Options of the loss are left out if the objective is that of the config, by `from_trl`.
    """
    if objective in _objectives_of(args):
        names = [name for name in names if name not in _OBJECTIVE_OPTIONS]
    defaults = {field.name: field.default for field in dataclasses.fields(args)}
    values = {name: getattr(args, name) for name in names if name in defaults}
    return [f"{name}={value!r:.40}" for name, value in values.items() if value != defaults[name]]


def _objectives_of(args: Any) -> list[Objective]:
    """Return the objectives of a GRPOConfig, without and with recorded logprobs; empty if it has no counterpart."""
    try:
        return [from_trl(args, rollout_logprobs=each).objective for each in (False, True)]
    except ArgumentError:
        return []


class WithObjective(_Base):
    """A mixin to put before GRPOTrainer: `class Trainer(WithObjective, GRPOTrainer): ...`.

    TRL generates, scores and computes advantages as usual, and evaluates with its own loss. The training loss is the
    objective, corrected over complete optimizer steps. `old` is TRL's `old_per_token_logps`, or the current policy if
    TRL computes none. Recorded logprobs are TRL's `sampling_per_token_logps`. A completion is a trace, the tokens
    sampled between two tool calls are a turn, and the completions of one prompt are a group.

    Args:
        arguments: of GRPOTrainer.
        objective: the loss. Its reference policy is the model that TRL loads if GRPOConfig.beta is not 0.
        missing_logprobs: the treatment of sampled tokens without a logprob, as in `correct`; TRL sets their ratio to 1
            ("ratio_one").
        options: keyword arguments of GRPOTrainer.

    Raises:
        ArgumentError: if the installed TRL lacks a method, does not pass all inputs of the objective, or if an option
            of GRPOConfig is set that the objective replaces; or if vLLM samples with top_p, top_k, min_p or a penalty
            and the objective reads recorded logprobs: TRL computes the policy over the whole vocabulary.
    """

    def __init__(
        self,
        *arguments: Any,
        objective: Objective = presets.DAPO,
        missing_logprobs: MissingLogprobs = "mask",
        **options: Any,
    ) -> None:
        peer("trl", VERSIONS, *(f"GRPOTrainer.{name}" for name in _LIVE_METHODS))
        objective.check_missing(missing_logprobs)
        self.objective = objective
        self.missing_logprobs: MissingLogprobs = missing_logprobs
        self._warned_unused_logprobs = False
        super().__init__(*arguments, **options)
        _check_live(self.args, objective)
        recorded = self.use_vllm or self.rollout_func is not None
        TRL_INPUTS.check(objective, available_inputs(self.args, rollout=recorded, ref=self.beta != 0))

    def _generate_and_score_completions(self, inputs: Any) -> dict[str, Any]:
        """Call TRL's method, and add the index of each completion, which TRL's shuffle would lose."""
        outputs = super()._generate_and_score_completions(inputs)
        if self.model.training:
            rows = len(outputs["completion_ids"])
            outputs["trace"] = torch.arange(rows) + self.accelerator.process_index * rows
        return outputs

    def _prepare_inputs(self, generation_batch: Any) -> Any:
        previous = self._buffered_inputs
        inputs = super()._prepare_inputs(generation_batch)
        if self.model.training and self._buffered_inputs is not previous:
            window = self.args.gradient_accumulation_steps
            for start in range(0, len(self._buffered_inputs), window):
                self._correct(self._buffered_inputs[start : start + window])
        return inputs

    def _correct(self, step: list[dict[str, Any]]) -> None:
        """Correct one optimizer step, and store the trained tokens of each micro-batch in its inputs."""
        parts = [self._part(inputs) for inputs in step]
        terms, metrics = step_terms(
            self.objective,
            parts,
            self.accelerator.device,
            missing_logprobs=self.missing_logprobs,
            all_reduce=all_reduce_of(self),
        )
        log_metrics(self, {f"tracegrad/{name}": value for name, value in metrics.items()})
        for inputs, micro_batch_terms in zip(step, terms, strict=True):
            inputs["terms"] = micro_batch_terms

    def _part(self, inputs: dict[str, Any]) -> dict[str, Any]:
        """Return the arrays [m] of a micro-batch for `step_terms`."""
        mask, needs = _mask(inputs), self.objective.requirements
        old, rollout, ref = (inputs.get(f"{name}_per_token_logps") for name in ("old", "sampling", "ref"))
        if needs.rollout and rollout is None:
            raise ArgumentError(
                "TG-INTEG-020: the objective needs recorded logprobs, but this generation of GRPOTrainer has none. "
                "Return 'logprobs' from rollout_func, or use an objective on theta/old."
            )
        if not needs.rollout and rollout is not None and not rollout.isnan().all() and not self._warned_unused_logprobs:
            self._warned_unused_logprobs = True
            warn_unused_logprobs()
        needs_old_before_step = any(
            part.detached and "old" in ratio for part in self.objective.components for ratio, _ in part.ratios()
        )
        if old is None and needs_old_before_step:
            with torch.no_grad():
                old = self._score(self.model, inputs)[0]
        trace = inputs["trace"].to(mask.device)
        turn_starts = mask & ~torch.nn.functional.pad(mask, (1, 0))[:, :-1]
        arrays = {
            "trace": trace,
            "turn": turn_starts.cumsum(1) - 1,
            "group": trace // self.num_generations,
            "advantages": inputs["advantages"],
            "old": old,
            "rollout": rollout,
            "ref": ref,
        }
        available = {name: values for name, values in arrays.items() if values is not None}
        return {
            name: (values[:, None] if values.ndim == 1 else values).expand_as(mask)[mask]
            for name, values in available.items()
        }

    def _compute_loss(self, model: Any, inputs: Any) -> Tensor:
        if "terms" not in inputs:
            return super()._compute_loss(model, inputs)
        options = {"compute_aux_loss": True} if self.aux_loss_enabled else {}
        logprobs, entropy, aux = self._score(model, inputs, compute_entropy=True, **options)
        mask = _mask(inputs)
        return loss_of(self, self.objective, logprobs[mask], entropy[mask], aux, inputs["terms"])

    def _score(self, model: Any, inputs: dict[str, Any], **options: bool) -> Any:
        """Return the logprobs [B, T] of the completions, their entropy and the router loss, by TRL's forward pass."""
        ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], dim=1)
        attention = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], dim=1)
        parameters = inspect.signature(self._get_per_token_logps_and_entropies).parameters
        options |= {name: inputs[name] for name in parameters if name in inputs}  # inputs of images
        length = inputs["completion_ids"].size(1)
        return self._get_per_token_logps_and_entropies(model, ids, attention, length, **options)


def _mask(inputs: dict[str, Any]) -> Tensor:
    """Return [B, T] bool: the sampled tokens that are trained."""
    return (inputs["completion_mask"] * inputs.get("tool_mask", 1)).bool()


def _check_live(args: Any, objective: Objective) -> None:
    """Raise ArgumentError for options of GRPOConfig that would have no effect."""
    check_steps(args)
    if unused := options_without_effect(args, objective, _OBJECTIVE_OPTIONS):
        raise ArgumentError(
            f"TG-INTEG-021: options of GRPOConfig have no effect: {', '.join(unused)}. The loss is that of the "
            "objective. Remove them, or pass the objective of the config: recipes.from_trl(args).objective."
        )
    if args.use_vllm:
        options = {name: getattr(args, name, None) for name in _SAMPLING_OPTIONS}
        further = args.generation_kwargs if isinstance(args.generation_kwargs, Mapping) else {}
        check_sampling(objective, "GRPOConfig.", {**options, **further})
    if args.beta != 0 and not objective.requirements.ref:
        raise ArgumentError(
            f"TG-INTEG-022: GRPOConfig.beta is {args.beta}, which loads a reference, but the objective uses none. "
            f"Remove it, or pass objective=with_beta(objective, {args.beta})."
        )


_TRACE_METHODS = ("_prepare_inputs", "_compute_loss", "_get_per_token_logps_and_entropies", "_get_train_sampler")


class FromTraces(_Base):
    """A mixin to put before GRPOTrainer: `class Trainer(FromTraces, GRPOTrainer): ...`.

    `old` is computed before every `steps_per_generation` micro-batches and kept over `num_iterations`, as TRL does for
    its generations. Denominators are those of complete optimizer steps, so the split into micro-batches does not change
    the gradient. TRL's own loss options (loss_type, epsilon, scale_rewards and so on) and num_generations are ignored.
    A warning names those that are set, unless `recipes.from_trl(args, rollout_logprobs=True)` has the same objective.

    Tokens with `sequences.support` are compared over it. The logits of such a micro-batch are in memory at once,
    because TRL's own forward pass returns logprobs over the whole vocabulary only.

    Args:
        model, args: as for GRPOTrainer. per_device_train_batch_size counts traces.
        sequences: aligned traces.
        advantages: [R] of traces or [M] of trained tokens.
        objective: its reference policy is the ref_model that TRL loads if args.beta is not 0.
        missing_logprobs: as in `correct`.
        trainer: other arguments of GRPOTrainer. Evaluation is TRL's own: it generates, and calls reward_funcs.

    Raises:
        ArgumentError: if the installed TRL lacks a method, or `args` and the traces contradict each other.
    """

    def __init__(
        self,
        model: Any,
        args: Any,
        sequences: Sequences,
        advantages: ArrayLike,
        *,
        objective: Objective = presets.DAPO,
        missing_logprobs: MissingLogprobs = "mask",
        **trainer: Any,
    ) -> None:
        peer("trl", VERSIONS, *(f"GRPOTrainer.{name}" for name in _TRACE_METHODS))
        ref = args.beta != 0 and not trainer.get("peft_config") and not hasattr(model, "peft_config")
        TRL_INPUTS.check(objective, available_inputs(args, rollout=True, ref=ref))
        self.recorded = RecordedTraces.of(sequences, advantages, objective, missing_logprobs)
        _check(args, self.recorded)
        _warn_without_effect(args, objective)
        traces = self.recorded.traces
        rows = peer("datasets", VERSIONS).Dataset.from_dict({"prompt": [""] * len(traces), "trace": traces})
        trainer.setdefault("reward_funcs", [_recorded_reward])
        super().__init__(model=model, args=args, train_dataset=rows, **trainer)

    def _get_train_sampler(self, dataset: Any = None) -> Any:
        """Return TRL's sampler over traces, each once. Groups have ids, so their traces need not be adjacent."""
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
        """Split the traces of some complete optimizer steps into micro-batches, and correct each step as one unit."""
        size = len(traces) // self.args.steps_per_generation
        parts = [self.recorded.padded(traces[start : start + size], "left") for start in range(0, len(traces), size)]
        parts, needs = [padded.to(self.accelerator.device) for padded in parts], self.recorded.objective.requirements
        with torch.no_grad():
            old = [self._score(self.model, padded)[0] for padded in parts] if needs.old else None
            is_over_support = needs.ref_over == "support"
            ref_parts = parts if is_over_support else [replace(padded, support=None) for padded in parts]
            ref = [self._score(self.ref_model, padded)[0] for padded in ref_parts] if needs.ref else None
        micro_batches, window = [], self.args.gradient_accumulation_steps
        for start in range(0, len(parts), window):
            step = slice(start, start + window)
            logprobs = (old and old[step], ref and ref[step])
            terms, metrics = self.recorded.step(parts[step], *logprobs, all_reduce=all_reduce_of(self))
            log_metrics(self, {f"tracegrad/{name}": value for name, value in metrics.items()})
            micro_batches += [
                {"padded": part, "terms": part_terms} for part, part_terms in zip(parts[step], terms, strict=True)
            ]
        return micro_batches

    def _compute_loss(self, model: Any, inputs: Any) -> Tensor:
        if "padded" not in inputs:
            return super()._compute_loss(model, inputs)
        objective, padded = self.recorded.objective, inputs["padded"]
        options = {"compute_aux_loss": True} if self.aux_loss_enabled else {}
        has_both = padded.support is not None and objective.requirements.ref_over == "vocabulary"
        if has_both:
            options["compute_vocabulary_logprobs"] = True
        logprobs, entropy, *more = self._score(model, padded, compute_entropy=True, **options)
        of_vocabulary = more.pop(0) if has_both else None
        return loss_of(self, objective, logprobs, entropy, more[0] if more else None, inputs["terms"], of_vocabulary)

    def _score(self, model: Any, padded: PaddedRows, **options: bool) -> list[Tensor]:
        """Return logprobs [m] of the trained tokens by TRL's forward pass, then entropy and router loss if enabled."""
        if padded.support is not None:
            return self._score_over_support(model, padded, **options)
        length = padded.ids.shape[1] - padded.first
        outputs = self._get_per_token_logps_and_entropies(model, padded.ids, padded.attention, length, **options)
        positions = (padded.row, padded.column - padded.first)
        return [values[positions] if values.ndim == 2 else values for values in outputs if values is not None]

    def _score_over_support(
        self,
        model: Any,
        padded: PaddedRows,
        compute_entropy: bool = False,
        compute_aux_loss: bool = False,
        compute_vocabulary_logprobs: bool = False,
    ) -> list[Tensor]:
        """Return the same over the support of the tokens, from the logits of the model's own forward pass.

        The logprobs over the whole vocabulary, if requested, come before the router loss.

        TRL's forward pass returns logprobs over the whole vocabulary only, and no logits.
        """
        options: dict[str, Any] = {"output_router_logits": True} if compute_aux_loss else {}
        if (
            "logits_to_keep"
            in inspect.signature(unwrap_adapters(self.accelerator.unwrap_model(model)).forward).parameters
        ):
            options["logits_to_keep"] = padded.ids.shape[1] - padded.first + 1
        with self.accelerator.autocast():
            outputs = model(input_ids=padded.ids, attention_mask=padded.attention, use_cache=False, **options)
        logprobs, entropy = padded.logprobs(outputs.logits, entropy_over_support=self.recorded.entropy_over_support)
        result = [logprobs, *([entropy] if compute_entropy else [])]
        if compute_vocabulary_logprobs:
            result.append(padded.logprobs(outputs.logits, over_vocabulary=True)[0])
        return [*result, *([outputs.aux_loss] if compute_aux_loss else [])]


def _recorded_reward(**_: Any) -> list[float]:
    raise ArgumentError("TG-INTEG-023: evaluation needs a reward function. Pass reward_funcs=, or omit eval_dataset.")


def _warn_without_effect(args: Any, objective: Objective) -> None:
    unused = options_without_effect(args, objective, [*_OBJECTIVE_OPTIONS, *_ROLLOUT_OPTIONS])
    if args.beta and not objective.requirements.ref:
        unused.append(f"beta={args.beta}, which loads a reference model that the objective does not use")
    if unused:
        warnings.warn(f"Options of GRPOConfig have no effect on recorded traces: {'; '.join(unused)}.", stacklevel=3)


def _check(args: Any, recorded: RecordedTraces) -> None:
    check_steps(args)
    s = recorded.sequences
    temperatures = 1 / np.unique(s.inv_temperature[s.trainable])
    if len(recorded.traces) < args.generation_batch_size:
        raise ArgumentError(
            f"TG-INTEG-024: {len(recorded.traces)} traces have a trained token, but generation_batch_size is "
            f"{args.generation_batch_size}. TRL drops incomplete batches, so no trace would be trained on. Lower it, "
            "or its factors."
        )
    if not np.allclose(temperatures, args.temperature):
        raise ArgumentError(
            f"TG-INTEG-025: the recorded logprobs are of temperature {temperatures.tolist()}, but TRL divides all "
            f"logits by GRPOConfig.temperature, {args.temperature}, so ratios would be wrong. Set it to the recorded "
            "temperature."
        )
