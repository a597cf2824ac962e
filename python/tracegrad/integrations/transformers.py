"""Train a plain transformers.Trainer on recorded traces, by its `compute_loss_func`. Tested with transformers 5.23.0.

Denominators come from the Trainer's `num_items_in_batch`, which counts the labels of a complete optimizer step over
micro-batches and ranks. The collator therefore sets a label for each item that the objective's reduction counts.
"""

from collections.abc import Sequence
from typing import Any

import torch
from numpy.typing import ArrayLike
from torch import Tensor

from tracegrad.alignment.sequences import Sequences
from tracegrad.errors import ArgumentError
from tracegrad.integrations import peer
from tracegrad.integrations._common import RecordedTraces, TrainerInputs
from tracegrad.objective import MissingLogprobs, Objective, presets
from tracegrad.packing import Totals

VERSIONS = "transformers==5.23.0"
_IGNORED = -100
_GIVES = TrainerInputs(
    frozenset({"old", "rollout", "entropy", "turn", "group", "advantages"}),
    "compute_loss_func sees one micro-batch and one count of the step.",
    "Take an objective without, integrations.trl, or tracegrad.train.",
)


class TraceLoss:
    """A loss for `Trainer(model, args, train_dataset=x.dataset, data_collator=x.collate, compute_loss_func=x)`.

    A row of the dataset is a trace, and all its branches are in one micro-batch. `old` is the policy before the
    optimizer step, whose logprobs equal those of theta. A clip of theta/old therefore never clips, and weights and
    rejections use old/rollout. An objective on theta/rollout does clip. Use `integrations.trl` or tracegrad's own
    trainer to keep `old` over several steps.

    Args:
        sequences: from `align`, or `Sequences.from_arrays`.
        advantages: [R] of traces or [M] of trained tokens.
        objective: an objective that needs no statistics of the complete step except its denominators; `reduce.per` is
            token, trace or constant.
        missing_logprobs: as in `correct`.

    Raises:
        ArgumentError: for another objective, or a Trainer without compute_loss_func.
    """

    def __init__(
        self,
        sequences: Sequences,
        advantages: ArrayLike,
        objective: Objective = presets.DAPO,
        *,
        missing_logprobs: MissingLogprobs = "mask",
    ) -> None:
        peer("transformers", VERSIONS, "Trainer._get_num_items_in_batch")
        _GIVES.check(objective)
        self.recorded = RecordedTraces.of(sequences, advantages, objective, missing_logprobs)
        self.dataset: list[int] = self.recorded.traces

    def collate(self, traces: Sequence[int]) -> dict[str, Tensor]:
        """Return ids, attention and labels [B, S], padded on the right.

        A label is the index of the trace, at each token that the reduction counts.
        """
        padded = self.recorded.padded(traces, "right")
        trace = torch.from_numpy(self.recorded.owner[padded.origin]).long()
        counted = torch.ones_like(trace, dtype=torch.bool)
        if self.recorded.objective.reduce.per == "trace":
            counted[1:] = trace[1:] != trace[:-1]
        labels = torch.full_like(padded.ids, _IGNORED)
        labels[padded.row[counted], padded.column[counted]] = trace[counted]
        return {"input_ids": padded.ids, "attention_mask": padded.attention, "labels": labels}

    def __call__(self, outputs: Any, labels: Tensor, num_items_in_batch: Any = None) -> Tensor:
        """Return the contribution of a micro-batch to the loss of its optimizer step."""
        logits, objective = outputs.logits, self.recorded.objective
        padded = self.recorded.padded(labels[labels != _IGNORED].unique_consecutive().tolist(), "right")
        if num_items_in_batch is None or logits.shape[:2] != padded.ids.shape:
            raise ArgumentError(
                f"TG-INTEG-018: logits are {tuple(logits.shape)}, rows {tuple(padded.ids.shape)}, items "
                f"{num_items_in_batch}. They do not match. Pass data_collator=x.collate together with "
                "compute_loss_func=x."
            )
        padded = padded.to(logits.device)
        logprobs, entropy = padded.logprobs(logits, entropy_over_support=self.recorded.entropy_over_support)
        count = int(num_items_in_batch)
        (terms,), _ = self.recorded.step([padded], [logprobs.detach()], totals=Totals(count, count, count))
        return objective(logprobs, entropy if objective.requirements.entropy else None, terms).loss
