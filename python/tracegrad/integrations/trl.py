"""TRL's GRPOTrainer on recorded traces: no generation, our weights, our objective. Run against trl 1.16.0.

Here is `FromTraces`, a mixin. A row is a trace, a micro-batch holds all branches of its traces, and each optimizer step
is corrected whole. docs/trainers.md says what TRL does by itself, and what is not supported.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from tracegrad import presets
from tracegrad.algebra import Missing, Objective
from tracegrad.errors import ArgumentError
from tracegrad.integrations import peer
from tracegrad.integrations.padded import Padded, Recorded, as_trl
from tracegrad.sequence import Sequences

VERSIONS = "trl==1.16.0"
_BEHIND: Any = object  # the user puts GRPOTrainer there
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
        self.recorded = Recorded.of(sequences, advantages, objective, missing)
        _check(args, self.recorded)
        traces = self.recorded.traces
        rows = peer("datasets", VERSIONS).Dataset.from_dict({"prompt": [""] * len(traces), "trace": traces})
        trainer.setdefault("reward_funcs", [_recorded_reward])
        super().__init__(model=model, args=args, train_dataset=rows, **trainer)
        if objective.needs.ref and self.ref_model is None:
            raise ArgumentError(
                "the objective takes a reference policy and TRL has loaded none, as it does with beta=0 and with PEFT. "
                "Pass GRPOConfig(beta=...) above 0: the coefficient stays the objective's."
            )

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
            terms, metrics = self.recorded.step(cut[step], *rest, all_reduce=self._all_reduce)
            self._note({f"tracegrad/{name}": value for name, value in metrics.items()})
            found += [{"padded": part, "terms": here} for part, here in zip(cut[step], terms, strict=True)]
        return found

    def _compute_loss(self, model: Any, inputs: Any) -> Tensor:
        if "padded" not in inputs:
            return super()._compute_loss(model, inputs)
        options = {"compute_aux_loss": True} if self.aux_loss_enabled else {}
        logprobs, entropy, *aux = self._score(model, inputs["padded"], compute_entropy=True, **options)
        found = self.recorded.objective(logprobs, entropy, inputs["terms"])
        told = as_trl(self.recorded.objective, found.per_term, inputs["terms"], entropy)
        self._note(told.all_reduce(self._all_reduce).named())
        routing = self.router_aux_loss_coef * aux[0] / self.current_gradient_accumulation_steps if aux else 0.0
        return found.loss * self.accelerator.num_processes + routing  # ranks' gradients are averaged

    def _score(self, model: Any, padded: Padded, **options: bool) -> list[Tensor]:
        """[m] logprob of the terms by TRL's own forward pass, then their entropy and the router's loss if asked for."""
        kept = padded.ids.shape[1] - padded.first
        found = self._get_per_token_logps_and_entropies(model, padded.ids, padded.attention, kept, **options)
        at = (padded.row, padded.column - padded.first)
        return [each[at] if each.ndim == 2 else each for each in found if each is not None]

    def _all_reduce(self, array: NDArray[np.float64], op: str) -> NDArray[np.float64]:
        ranks = self.accelerator.gather(torch.from_numpy(array)[None].to(self.accelerator.device))
        return (ranks.amax(0) if op == "max" else ranks.sum(0)).cpu().numpy()

    def _note(self, metrics: Mapping[str, float]) -> None:
        for name, value in metrics.items():
            self._metrics["train"][name].append(value)


def _recorded_reward(**_: Any) -> list[float]:
    raise ArgumentError("evaluation generates, and has no reward for it. Pass reward_funcs=, or no eval_dataset.")


def _check(args: Any, recorded: Recorded) -> None:
    s, per_step = recorded.sequences, args.gradient_accumulation_steps
    heat = 1 / np.unique(s.inv_temperature[s.trainable])
    if args.steps_per_generation % per_step:
        raise ArgumentError(
            f"steps_per_generation is {args.steps_per_generation}, gradient_accumulation_steps {per_step}: optimizer "
            "steps would come in pieces, and denominators are of the whole. Make the first a multiple of the second."
        )
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
