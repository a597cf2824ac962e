"""TRL's GRPOTrainer with our objective: on recorded traces, or on what it plays itself. Run against trl 1.16.0.

Here is `FromTraces`, a mixin for records: a row is a trace, a micro-batch holds all branches of its traces, and each
optimizer step is corrected whole. `WithObjective` (trl_live) keeps TRL's generation. docs/trainers.md has both.
"""

from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike
from torch import Tensor

from tracegrad import presets
from tracegrad.algebra import Missing, Objective
from tracegrad.errors import ArgumentError
from tracegrad.integrations import peer
from tracegrad.integrations.padded import Padded, Recorded
from tracegrad.integrations.trl_live import WithObjective
from tracegrad.integrations.trl_step import GIVES, VERSIONS, check_steps, loss_of, may_give, note, over_ranks
from tracegrad.sequence import Sequences

__all__ = ["FromTraces", "WithObjective"]

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
